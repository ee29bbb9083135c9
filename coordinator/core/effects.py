"""What is to be done: the only way anything leaves the core. Imperative.

The runtime carries them out in order. What stands after a Persist leaves only once that is
durable; messages to one peer never overtake each other.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from rankgate.coordinator.core.settings import SealedRecord
from rankgate.coordinator.core.verdicts import WorldShape
from rankgate.proto.views import View


class Send(Struct, frozen=True):
    """Send a message to an agent under a message id."""

    peer: bytes
    id: int
    message: Struct


class Show(Struct, frozen=True):
    """Answer an operator."""

    peer: bytes
    id: int
    view: View


class Persist(Struct, frozen=True):
    """Make the epoch counter and a sealed world durable; with ``removed``, forget one."""

    epoch: int
    sealed: SealedRecord | None = None
    removed: str = ""


class Judge(Struct, frozen=True):
    """Judge a pair of shapes beside the serving loop; the answer is the event VerdictReached."""

    source: WorldShape
    destination: WorldShape


class CutOff(Struct, frozen=True):
    """Void the peer: drop what is queued for it and refuse its later messages."""

    peer: bytes
    reason: str


class Note(Struct, frozen=True):
    """Log one fact; ``level`` is debug, info, warning or error."""

    event: str
    level: str
    fields: dict[str, Any]


Effect = Send | Show | Persist | Judge | CutOff | Note
