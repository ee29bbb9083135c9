"""What an engine learns from ``RankAgent.poll()``. Past tense, small, and final."""

from __future__ import annotations

from collections import deque

from msgspec import Struct

from rankgate.proto.findings import Finding


class Wanted(Struct, frozen=True):
    """A destination has presented a request that this source has not staged yet."""

    request: str


class Arrived(Struct, frozen=True):
    """All of this destination's data of a request is in its pages; the outcome is still to come."""

    request: str
    transfer: int


class Outcome(Struct, frozen=True):
    """The daemon's one outcome of a transfer: delivered, failed, expired or aborted."""

    request: str
    transfer: int
    outcome: str
    finding: Finding | None = None

    @property
    def delivered(self) -> bool:
        """Whether every destination rank has all its bytes."""
        return self.outcome == "delivered"


class Released(Struct, frozen=True):
    """A staged request's pages are the engine's again; reported once.

    ``reason``: delivered, failed, expired, aborted or unwanted. ``ended`` of ``receive_count``
    distinct destination ranks had ended by then (0 of 0 if no grant was ever seen).
    """

    request: str
    reason: str
    ended: int
    receive_count: int


class Broken(Struct, frozen=True):
    """A world or a pair of this rank can do no more; findings say why."""

    world: str
    findings: list[Finding]


AgentEvent = Wanted | Arrived | Outcome | Released | Broken

MAX_SETTLED = 1 << 16


class Unpolled:
    """What has happened since the last poll, in order.

    Invariant: Wanted, Released and Broken stay until they are polled, and so does what a transfer
    has arrived with before it has its outcome. Of transfers that have theirs (a destination that
    only waits on its handles never polls) the newest ``limit`` Arrived and Outcome stay.
    """

    def __init__(self, limit: int = MAX_SETTLED) -> None:
        """Start empty."""
        self._limit = limit
        self._events: dict[int, AgentEvent] = {}
        self._next = 0
        self._arrived: dict[int, int] = {}
        self._settled: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._events)

    def add(self, event: AgentEvent) -> None:
        """Append an event; an outcome may cost the oldest ones of transfers that are over."""
        number = self._next
        self._next += 1
        self._events[number] = event
        if isinstance(event, Arrived):
            self._arrived[event.transfer] = number
        elif isinstance(event, Outcome):
            arrived = self._arrived.pop(event.transfer, None)
            self._settled.extend([number] if arrived is None else [arrived, number])
            while len(self._settled) > self._limit:
                del self._events[self._settled.popleft()]

    def take(self) -> list[AgentEvent]:
        """Return all events, which are polled by that."""
        events = list(self._events.values())
        for kept in (self._events, self._arrived, self._settled):
            kept.clear()
        return events
