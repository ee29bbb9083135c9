"""What happened: the only way anything enters the core. Past tense."""

from __future__ import annotations

from msgspec import Struct

from rankgate.coordinator.core.verdicts import Judgement
from rankgate.proto.messages import Query


class MessageArrived(Struct, frozen=True):
    """A decoded message of a peer; ``peer`` is opaque and never shown to other peers."""

    peer: bytes
    id: int
    message: Struct


class MessageRefused(Struct, frozen=True):
    """Bytes that were no message; the runtime has answered, the core counts and shows it."""

    peer: bytes
    code: str
    text: str


class PeerDisconnected(Struct, frozen=True):
    """The peer's connection is gone, or it was cut off."""

    peer: bytes
    reason: str


class ClockTicked(Struct, frozen=True):
    """Time passed; stepped at least every heartbeat/2 and at ``next_deadline()``.

    The runtime reads its sockets empty before it steps this, so nobody is lost for a message that
    lies unread.
    """


class VerdictReached(Struct, frozen=True):
    """A judgement asked for by the effect Judge is there."""

    source_digest: bytes
    destination_digest: bytes
    judgement: Judgement


class QueryArrived(Struct, frozen=True):
    """An operator's question, from the operator socket; answered by the effect Show."""

    peer: bytes
    id: int
    query: Query


Event = (
    MessageArrived | MessageRefused | PeerDisconnected | ClockTicked | VerdictReached | QueryArrived
)
