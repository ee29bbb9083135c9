"""What an engine learns from ``RankAgent.poll()``. Past tense, small, and final."""

from __future__ import annotations

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
