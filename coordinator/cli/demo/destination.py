"""The decode side of the stream: open requests into free pages, and verify every byte."""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import Final

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
SHORT_TTL_SECONDS: Final = 8.0
"""With a dead source: a transfer that a rank never came to open ends when its grant does."""


class Destination:
    """One decode rank: keeps ``concurrency`` transfers open, each into pages of its own.

    Every rank of the world opens every request, in the same order; a request that failed
    because its source was lost is opened again when the pair is ready again.
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
        self._open: dict[str, list[int]] = {}
        self._dirty: set[int] = set()
        """Free pages that a failed transfer may have written to."""
        self._outcomes: Counter[str] = Counter()
        dies = job.fault == faults.DEAD_RANK
        self._ttl = SHORT_TTL_SECONDS if dies else GRANT_TTL_SECONDS

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
        request = self._job.request(self._todo[0])
        pages = self._pool.take(self._job.pages_of(self._todo[0]))
        if pages is None:
            return False
        if self._dirty.intersection(pages):
            self._caches.wipe(pages)
        try:
            self._agent.open(request, source=PREFILL, pages=pages, ttl=self._ttl)
        except (PagesError, NotReadyError, OpenDeniedError) as error:
            self._pool.give(pages)
            if isinstance(error, NotReadyError) or _passes(error):
                return False
            raise
        self._dirty.difference_update(pages)
        self._todo.popleft()
        self._open[request] = pages
        return True

    def _take(self, event: AgentEvent, journal: Journal) -> None:
        if isinstance(event, Broken):
            journal.write("broken", findings=msgspec.to_builtins(event.findings))
        elif isinstance(event, Outcome) and event.request in self._open:
            self._outcomes[event.outcome] += 1
            if event.delivered:
                self._delivered(event.request, journal)
            else:
                self._failed(event, journal)

    def _delivered(self, request: str, journal: Journal) -> None:
        """Verify every byte, then zero the pages so that no old byte can pass for a new one."""
        pages = self._open.pop(request)
        found = self._caches.verify(request, pages)
        size = self._caches.request_bytes(len(pages))
        self._result.bytes_verified += size
        self._result.mismatched_bytes += found.wrong
        self._result.first_mismatch = self._result.first_mismatch or found.first
        self._caches.wipe(pages)
        self._pool.give(pages)
        journal.write("delivered", request=request, bytes=size, wrong=found.wrong)

    def _failed(self, event: Outcome, journal: Journal) -> None:
        """Take the pages back and put the request in front again."""
        pages = self._open.pop(event.request)
        self._dirty.update(pages)
        self._pool.give(pages)
        self._todo.appendleft(self._job.index_of(event.request))
        code = event.finding.code if event.finding else event.outcome
        journal.write("failed", request=event.request, code=code)


def _passes(error: PagesError | OpenDeniedError) -> bool:
    """Whether the refusal may pass: pages still drain, or the pair is being restored."""
    return bool(error.findings) and all(found.retryable for found in error.findings)
