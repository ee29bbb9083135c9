"""The program that torchrun starts once a rank: an engine's place, with a rank agent beside it.

Usage: ``torchrun … --module rankgate.coordinator.cli.demo.rank FOLDER``
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Final

import msgspec
import torch

from rankgate.agents.agent import RankAgent
from rankgate.agents.describe import RankDescription, describe_kv
from rankgate.agents.errors import NotReadyError, PairRejectedError
from rankgate.agents.events import Broken
from rankgate.agents.handles import Pair
from rankgate.agents.torchrun import read_environment, share_round
from rankgate.coordinator.cli.demo import faults
from rankgate.coordinator.cli.demo.caches import Caches
from rankgate.coordinator.cli.demo.destination import Destination
from rankgate.coordinator.cli.demo.job import (
    DECODE,
    GROUP,
    PREFILL,
    Counts,
    Folder,
    Job,
    Journal,
    Result,
)
from rankgate.coordinator.cli.demo.launch import end_with_parent
from rankgate.coordinator.cli.demo.pool import PagePool
from rankgate.coordinator.cli.demo.source import Source
from rankgate.proto import __version__
from rankgate.proto.descriptor import Coordinates, Layout, Model, Software, StateComponent
from rankgate.proto.findings import Finding, has_error
from rankgate.proto.geometry import heads_of_rank

IDLE_SECONDS: Final = 0.02
READY_STEP_SECONDS: Final = 0.2
STATE_ITEM_BYTES: Final = 4096


def main() -> None:
    """Play one rank to the end of the run."""
    folder = Folder(Path(sys.argv[1]))
    world, rank = os.environ["TORCHELASTIC_RUN_ID"], int(os.environ["RANK"])
    end_with_parent(signal.SIGKILL)
    torch.set_num_threads(1)
    journal = Journal(folder.journal(world, rank))
    journal.write("started", pid=os.getpid())
    try:
        folder.write_result(RankRun(folder, journal, world, rank).play())
    except Exception as error:
        journal.write("error", text=f"{type(error).__name__}: {error}")
        raise
    finally:
        journal.close()
    # All is written and closed; torch's own way out would cost each rank half a second.
    os._exit(0)


class RankRun:
    """One rank's part of the run, from its tensors to its result."""

    def __init__(self, folder: Folder, journal: Journal, world: str, rank: int) -> None:
        """Allocate the rank's caches."""
        self._folder = folder
        self._journal = journal
        self._world = world
        self._rank = rank
        self._job: Job = folder.job()
        heads = heads_of_rank(self._job.model.kv_heads, self._job.tp(world), rank)
        self._caches = Caches(self._job, heads)
        self._result = Result(world=world, rank=rank)

    def play(self) -> Result:
        """Register, pair, run the stream, and return what came of it."""
        if not faults.registers(self._job, self._world, self._rank):
            # It takes part in torchrun's rendezvous, so the others have a round token.
            share_round(read_environment(os.environ, daemon=self._job.daemon), os.urandom(16), 60.0)
            self._await_finish(None)
            return self._result
        agent = RankAgent.from_env(
            self._description(), daemon=self._job.daemon, timeout=self._left()
        )
        try:
            self._journal.write("registered")
            if (pair := self._pair(agent)) is not None:
                self._note_counts(pair)
                self._stream(agent)
            self._await_finish(agent)
            self._note_stats(agent)
        finally:
            agent.close()
        return self._result

    def _description(self) -> RankDescription:
        """Describe the real tensors, and what the run's fault adds to or takes from them."""
        job, tp = self._job, self._job.tp(self._world)
        kv = describe_kv(
            GROUP,
            self._caches.keys,
            self._caches.values,
            layers=job.model.layers,
            total_heads=job.model.kv_heads,
        )
        state = [
            StateComponent(kind=kind, dtype="float32", layers=[0], item_lens=[STATE_ITEM_BYTES])
            for kind in faults.state_kinds(job, self._world)
        ]
        return RankDescription(
            role=self._world,
            layout=Layout(tp=tp),
            coordinates=Coordinates(tp=self._rank),
            kv=[kv],
            state=state,
            model=Model(name=job.model.name),
            software=Software(engine="rankgate-demo", version=__version__),
            profile=job.profile,
            claims=faults.claims(job, self._world, self._rank),
        )

    def _pair(self, agent: RankAgent) -> Pair | None:
        """Wait for the pair with the other world; None when it is refused."""
        other = DECODE if self._world == PREFILL else PREFILL
        while True:
            try:
                return agent.wait_ready(world=other, timeout=READY_STEP_SECONDS)
            except PairRejectedError as error:
                self._refused(error.findings)
                return None
            except NotReadyError as error:
                # Most of what delays a pair passes; a rank that never comes does not.
                lasting = [found for found in error.findings if not found.retryable]
                if has_error(lasting) or self._lacks_rank(error.findings):
                    self._refused(error.findings)
                    return None
                if self._left() <= 0:
                    raise

    def _lacks_rank(self, findings: list[Finding]) -> bool:
        missing = self._job.fault == faults.RANK_MISSING
        return missing and faults.refusal_in(findings, self._job) is not None

    def _refused(self, findings: list[Finding]) -> None:
        self._result.findings = findings
        self._journal.write("refused", findings=msgspec.to_builtins(findings))

    def _note_counts(self, pair: Pair) -> None:
        counts = Counts(
            source_epoch=pair.source_epoch,
            destination_epoch=pair.destination_epoch,
            world_receive_count=pair.world_receive_count,
            receive_count=pair.receive_count,
            send_count=pair.send_count,
        )
        self._result.counts = counts
        mine = pair.source_epoch if self._world == PREFILL else pair.destination_epoch
        self._journal.write("ready", counts=msgspec.to_builtins(counts), epoch=mine)

    def _stream(self, agent: RankAgent) -> None:
        began = time.monotonic()
        pool = PagePool(self._job.pool, seed=self._job.seed + self._rank)
        if self._world == PREFILL:
            first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
            source = Source(agent, self._job, self._caches, pool, self._result)
            source.run(self._folder, self._journal, ahead=first_life)
        else:
            Destination(agent, self._job, self._caches, pool, self._result).run(self._journal)
            self._journal.write("complete")
        self._result.seconds["stream"] = time.monotonic() - began

    def _await_finish(self, agent: RankAgent | None) -> None:
        """Stay, so that others see this rank, until the demo says that all is over."""
        while not self._folder.finished and self._left() > 0:
            for event in agent.poll() if agent else ():
                if isinstance(event, Broken):
                    self._journal.write("broken", findings=msgspec.to_builtins(event.findings))
            time.sleep(IDLE_SECONDS)

    def _note_stats(self, agent: RankAgent) -> None:
        """Take the agent's own numbers."""
        stats = agent.stats()
        sent = self._world == PREFILL
        self._result.bytes_moved = stats.bytes_sent if sent else stats.bytes_received
        self._result.staged_left += stats.staged
        self._result.landing_left = stats.landing
        self._result.seconds |= stats.seconds

    def _left(self) -> float:
        return max(0.0, self._job.deadline - time.monotonic())


if __name__ == "__main__":
    main()
