"""One heap of deadlines. Entries are never removed early: who wakes re-checks its own state."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Deadlines:
    """Wakes callbacks at or after a time in ms.

    Invariant: a callback is called once per ``at``; it decides by its own state whether anything
    is due, and sets the next deadline itself. So a renewed deadline costs nothing.
    """

    def __init__(self) -> None:
        """Start without any deadline."""
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, when: int, wake: Callable[[], None]) -> None:
        """Call ``wake`` once ``when`` (ms) has come."""
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, wake))

    def next(self) -> int | None:
        """Return the earliest time at which anything may be due."""
        return self._heap[0][0] if self._heap else None

    def run(self, now: int) -> None:
        """Call everything that is due, in order of time."""
        while self._heap and self._heap[0][0] <= now:
            heapq.heappop(self._heap)[2]()
