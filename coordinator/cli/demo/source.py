"""The prefill side of the stream: fill pages, stage them, take them back when they are released."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Final

from rankgate.agents.agent import RankAgent
from rankgate.agents.errors import StageError
from rankgate.agents.events import AgentEvent, Released, Wanted
from rankgate.coordinator.cli.demo import faults
from rankgate.coordinator.cli.demo.caches import Caches
from rankgate.coordinator.cli.demo.job import Folder, Job, Journal, Result
from rankgate.coordinator.cli.demo.pool import PagePool

IDLE_SECONDS: Final = 0.002
STAGE_TTL_SECONDS: Final = 60.0
SLOW_SECONDS: Final = 0.05


class Source:
    """One prefill rank.

    In its first life it stages the requests in their order, ``concurrency`` at a time. A
    restarted one does not know what has been delivered: it stages what is wanted of it.
    """

    def __init__(
        self, agent: RankAgent, job: Job, caches: Caches, pool: PagePool, result: Result
    ) -> None:
        """Begin with nothing staged."""
        self._agent = agent
        self._job = job
        self._caches = caches
        self._pool = pool
        self._result = result
        self._outcomes: Counter[str] = Counter()
        self._staged: dict[str, list[int]] = {}
        self._seen: set[str] = set()
        self._slow = job.fault == faults.DEAD_RANK

    def run(self, folder: Folder, journal: Journal, *, ahead: bool) -> None:
        """Serve until the demo says that all is over and nothing is staged any more."""
        order = iter(range(self._ahead()) if ahead else ())
        try:
            while not self._over(folder):
                before = len(self._staged)
                busy = self._stage_next(order)
                for event in self._agent.poll():
                    busy = True
                    self._take(event)
                if len(self._staged) != before:
                    journal.write("staged", now=len(self._staged))
                if not busy:
                    time.sleep(IDLE_SECONDS)
        finally:
            self._result.outcomes = dict(self._outcomes)
            self._result.staged_left = len(self._staged)

    def _ahead(self) -> int:
        """Return how many requests to stage in order; a source that is to die stops short of all.

        So it dies while requests are under way, however fast this machine is.
        """
        return self._job.requests * 3 // 4 if self._slow else self._job.requests

    def _over(self, folder: Folder) -> bool:
        late = time.monotonic() > self._job.deadline
        return late or (not self._staged and folder.finished)

    def _stage_next(self, order: Iterator[int]) -> bool:
        """Stage the next request in order, if there is one and room for it."""
        if len(self._staged) >= self._job.concurrency:
            return False
        index = next((i for i in order if self._job.request(i) not in self._seen), None)
        if self._slow and index is not None:
            time.sleep(SLOW_SECONDS)
        return index is not None and self._stage(index)

    def _stage(self, index: int) -> bool:
        """Compute a request's cache into free pages and offer it."""
        request = self._job.request(index)
        pages = self._pool.take(self._job.pages_of(index))
        if pages is None:
            return False
        self._caches.fill(request, pages)
        try:
            self._agent.stage(request, pages=pages, ttl=STAGE_TTL_SECONDS)
        except StageError:
            self._pool.give(pages)
            raise
        self._seen.add(request)
        self._staged[request] = pages
        return True

    def _take(self, event: AgentEvent) -> None:
        if isinstance(event, Wanted):
            if event.request not in self._staged and len(self._staged) < self._job.room:
                self._stage(self._job.index_of(event.request))
        elif isinstance(event, Released):
            self._outcomes[event.reason] += 1
            if event.reason == "delivered":
                self._note_release(event)
            pages = self._staged.pop(event.request)
            self._caches.wipe(pages)
            self._pool.give(pages)

    def _note_release(self, event: Released) -> None:
        """Note at which count a delivered request came back.

        The daemon's outcome may overtake the last destination's own end: it says the same.
        """
        counts = self._result.counts
        if counts is not None and event.receive_count == event.ended == counts.receive_count:
            self._result.released_at_count += 1
        elif event.ended < event.receive_count:
            self._result.released_by_outcome += 1
        else:
            self._result.released_otherwise += 1
