"""Seeded disorder: loss, kills, restarts of daemon and worlds, sleeps and aborts, all at once.

The fleet checks every byte, every release and every outcome as it goes; here is what must hold at
the end: nothing is held anywhere, every opened request had its one outcome, and all still works.
"""

from __future__ import annotations

import random

import pytest

from rankgate.agents.events import Outcome
from rankgate.agents.linking import LinkState
from rankgate.coordinator.core.tables import PairState
from tests.agents.fleet import Fleet, Rank
from tests.agents.test_fleet import SHAPES, jobs, nothing_left, settled
from tests.coordinator.core.harness import Job


class Disorder:
    """One seeded run."""

    def __init__(self, seed: int) -> None:
        """Launch both worlds."""
        self.rng = random.Random(seed)
        self.fleet = Fleet(
            seed=seed, loss=self.rng.choice([0, 0.02, 0.1]), delay=self.rng.choice([2, 10, 40])
        )
        self.source, self.destination = jobs(*self.rng.choice(SHAPES))
        self.fleet.launch(self.source, "first")
        self.fleet.launch(self.destination, "first")
        self.requests = 0
        self.lives = 0

    def act(self) -> None:
        """Let one thing happen after a while."""
        self.fleet.run(self.rng.randint(0, 400))
        chance = self.rng.random()
        if chance < 0.6:
            self._serve()
        elif chance < 0.7:
            self._kill()
        elif chance < 0.8:
            self.fleet.boot()
        elif chance < 0.9:
            self._sleep()
        elif self.requests:
            rank = self.rng.choice(list(self.fleet.ranks.values()))
            rank.core.abort(f"req-{self.requests}", "why", self.fleet.now)
            self.fleet.settle(rank)

    def _serve(self) -> None:
        """Stage and open a request on every rank, in any order, if all have a pair."""
        ranks = [*self.fleet.of(self.source), *self.fleet.of(self.destination)]
        if not all(rank.core.pairs for rank in ranks):
            return
        self.requests += 1
        name, count = f"req-{self.requests}", self.rng.randint(1, 3)
        self.rng.shuffle(ranks)
        for rank in ranks:
            self.fleet.run(self.rng.choice([0, 0, 3, 30]))
            if rank.job is self.source:
                used = {page for pages in rank.staged.values() for page in pages}
            else:
                used = {page for _, page in rank.core.destination.table._owner}
            pages = [page for page in range(16) if page not in used]
            self.rng.shuffle(pages)
            if len(pages) >= count:
                self._give(rank, name, pages[:count])

    def _give(self, rank: Rank, name: str, pages: list[int]) -> None:
        if rank.job is self.source:
            rank.stage(name, pages, ttl=20_000)
        elif rank.core.pair_with("p") is not None:
            rank.cache.spoil(pages)
            rank.open(name, "p", pages, ttl=self.rng.choice([3000, 20_000]))

    def _kill(self) -> None:
        victim = self.rng.choice(list(self.fleet.ranks.values()))
        self.fleet.kill(victim)
        self.fleet.run(self.rng.choice([0, 50, 3000]))
        for rank in self.fleet.of(victim.job):
            self.fleet.kill(rank)
        self.lives += 1
        self.fleet.launch(victim.job, f"again {self.lives}")

    def _sleep(self) -> None:
        rank = self.rng.choice(list(self.fleet.ranks.values()))
        rank.paused = True
        self.fleet.run(self.rng.choice([100, 2500, 4000, 8000]))
        rank.paused = False
        self.fleet.settle(rank)

    # --- what must hold at the end ----------------------------------------------------------

    def all_told(self) -> bool:
        """Whether every granted open has its outcome."""
        return all(
            any(event.transfer == transfer for event in rank.told(Outcome, name))
            for rank in self.fleet.ranks.values()
            for name, transfer, _, _ in rank.answers
            if transfer
        )

    def told_once(self) -> bool:
        """Whether no rank heard two outcomes of one transfer."""
        for rank in self.fleet.ranks.values():
            transfers = [event.transfer for event in rank.told(Outcome)]
            if len(transfers) != len(set(transfers)):
                return False
        return True

    def whole(self) -> bool:
        """Whether daemon and agents agree that the pair is ready and everyone is fit."""
        daemon = self.fleet.daemon
        pair = daemon.pairs.by_name.get(("p", "d"))
        if pair is None or pair.state is not PairState.READY:
            return False
        if any(daemon.worlds.by_name[name].unfit for name in "pd"):
            return False
        return all(
            [(one.state, one.epochs) for one in rank.core.pairs.values()]
            == [(LinkState.READY, pair.epochs)]
            for rank in self.fleet.ranks.values()
        )


def serve_last(fleet: Fleet, source: Job, destination: Job) -> list[Outcome]:
    """Move one more request; return its outcomes."""
    for rank in fleet.of(source):
        rank.stage("last", [0, 1])
    takers = fleet.of(destination)
    for rank in takers:
        rank.open("last", "p", [2, 3])
    fleet.until(lambda: settled(takers, "last"))
    return [event for rank in takers for event in rank.told(Outcome, "last")]


@pytest.mark.parametrize("seed", range(24))
def test_after_any_disorder_nothing_leaks_and_all_works_again(seed: int) -> None:
    """Invariants of the whole flow over a seeded schedule (B02, B12, B16, B18, C05, C23)."""
    disorder = Disorder(seed)
    for _ in range(disorder.rng.randint(4, 14)):
        disorder.act()
    fleet = disorder.fleet
    fleet.loss = 0
    fleet.until(lambda: nothing_left(fleet), 200_000)
    fleet.until(disorder.all_told, 60_000)
    assert disorder.told_once()
    fleet.until(disorder.whole, 130_000)
    outcomes = serve_last(fleet, disorder.source, disorder.destination)
    assert {outcome.outcome for outcome in outcomes} == {"delivered"}
    assert len(outcomes) == disorder.destination.size
