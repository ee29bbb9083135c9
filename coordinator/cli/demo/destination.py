"""The decode side of the stream: open requests into free pages, and verify every byte."""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import Final, NamedTuple

import msgspec

from rankgate.agents.agent import RankAgent
from rankgate.agents.errors import NotReadyError, OpenDeniedError, PagesError
from rankgate.agents.events import AgentEvent, Broken, Outcome
from rankgate.coordinator.cli.demo import faults
from rankgate.coordinator.cli.demo.caches import Caches
from rankgate.coordinator.cli.demo.job import PREFILL, Job, Journal, Result
from rankgate.coordinator.cli.demo.pool import PagePool

IDLE_SECONDS: Final = 0.002
GRANT_TTL_SECONDS: Final = 30.0
DENIED: Final = "denied"
SHORT_TTL_SECONDS: Final = 8.0
"""With a dead source: a transfer that a rank never came to open ends when its grant does."""


class Opened(NamedTuple):
    """An open request: the pages it lands in, and the source's epoch it was opened under."""

    pages: list[int]
    epoch: int


class Destination:
    """One decode rank: keeps ``concurrency`` transfers open, each into pages of its own.

    Every rank of the world opens every request, in the same order. When a source is to die, a
    request that failed is opened again, under the source's next epoch.
    """

    def __init__(
        self, agent: RankAgent, job: Job, caches: Caches, pool: PagePool, result: Result
    ) -> None:
        """Begin with nothing open."""
        self._agent = agent
        self._job = job
        self._caches = caches
        self._pool = pool
        self._result = result
        self._todo = deque(range(job.requests))
        self._open: dict[str, Opened] = {}
        self._dirty: set[int] = set()
        """Free pages that a failed transfer may have written to."""
        self._outcomes: Counter[str] = Counter()
        self._lost_epoch = 0
        """Source epoch in which a transfer failed: nothing more is opened under it."""
        self._repeats = job.fault == faults.DEAD_RANK
        self._ttl = SHORT_TTL_SECONDS if self._repeats else GRANT_TTL_SECONDS

    def run(self, journal: Journal) -> None:
        """Take every request; return when all have been delivered, or time is up."""
        try:
            while (self._todo or self._open) and time.monotonic() < self._job.deadline:
                busy = self._open_next()
                for event in self._agent.poll():
                    busy = True
                    self._take(event, journal)
                if not busy:
                    time.sleep(IDLE_SECONDS)
        finally:
            self._result.outcomes = dict(self._outcomes)
        clean = [page for page in self._pool.free if page not in self._dirty]
        self._result.stray_bytes = self._caches.nonzero_bytes(clean)

    def _open_next(self) -> bool:
        """Open the next request, if there is one and room for it."""
        if not self._todo or len(self._open) >= self._job.concurrency:
            return False
        epoch = self._source_epoch()
        if not epoch:
            return False
        request = self._job.request(self._todo[0])
        pages = self._pool.take(self._job.pages_of(self._todo[0]))
        if pages is None:
            return False
        if self._dirty.intersection(pages):
            self._caches.wipe(pages)
        try:
            self._agent.open(request, source=PREFILL, pages=pages, ttl=self._ttl)
        except NotReadyError:  # the pair broke, and comes back with the source's next life
            self._pool.give(pages)
            return False
        except PagesError as error:  # they may still belong to a transfer that drains
            self._pool.give(pages)
            if error.findings and all(found.retryable for found in error.findings):
                return False
            raise
        self._dirty.difference_update(pages)
        self._todo.popleft()
        self._open[request] = Opened(pages, epoch)
        return True

    def _source_epoch(self) -> int:
        """Return the source's epoch in a ready pair; 0 while there is none that is worth asking."""
        epochs = [pair.source_epoch for pair in self._agent.pairs if pair.source == PREFILL]
        return next((epoch for epoch in epochs if epoch != self._lost_epoch), 0)

    def _take(self, event: AgentEvent, journal: Journal) -> None:
        if isinstance(event, Broken):
            journal.write("broken", findings=msgspec.to_builtins(event.findings))
        elif isinstance(event, Outcome) and event.request in self._open:
            if event.outcome == DENIED:
                self._denied(event)
                return
            self._outcomes[event.outcome] += 1
            if event.delivered:
                self._delivered(event.request, journal)
            else:
                self._failed(event, journal)

    def _denied(self, event: Outcome) -> None:
        """Try again later, if that can help: no source has heard of these pages."""
        if event.finding is None or not event.finding.retryable:
            found = [event.finding] if event.finding else []
            raise OpenDeniedError(f"request {event.request} is not granted", found)
        self._pool.give(self._open.pop(event.request).pages)
        self._todo.appendleft(self._job.index_of(event.request))

    def _delivered(self, request: str, journal: Journal) -> None:
        """Verify every byte, then zero the pages so that no old byte can pass for a new one."""
        pages = self._open.pop(request).pages
        found = self._caches.verify(request, pages)
        size = self._caches.request_bytes(len(pages))
        self._result.bytes_verified += size
        self._result.mismatched_bytes += found.wrong
        self._result.first_mismatch = self._result.first_mismatch or found.first
        self._caches.wipe(pages)
        self._pool.give(pages)
        journal.write("delivered", request=request, bytes=size, wrong=found.wrong)

    def _failed(self, event: Outcome, journal: Journal) -> None:
        """Take the pages back; if the source comes again, the request comes first."""
        opened = self._open.pop(event.request)
        self._dirty.update(opened.pages)
        self._pool.give(opened.pages)
        if self._repeats:
            self._lost_epoch = max(self._lost_epoch, opened.epoch)
            self._todo.appendleft(self._job.index_of(event.request))
        code = event.finding.code if event.finding else event.outcome
        journal.write("failed", request=event.request, code=code)
