"""Every state and every allowed change of it; the documentation's diagrams are drawn from here."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar


class InvariantError(RuntimeError):
    """The core contradicts itself: a defect of ours, never a peer's fault."""


class RankState(StrEnum):
    """One registered process; it counts once it is live."""

    REGISTERING = "registering"
    LIVE = "live"
    STALLED = "stalled"
    DISCONNECTED = "disconnected"
    GONE = "gone"


class WorldState(StrEnum):
    """A world name: waiting for a complete round, or sealed under an epoch."""

    FORMING = "forming"
    SEALED = "sealed"


class PairState(StrEnum):
    """A source world and a destination world."""

    WAITING = "waiting"
    REJECTED = "rejected"
    LINKING = "linking"
    READY = "ready"


class TransferState(StrEnum):
    """One request's movement; the last four are outcomes and final."""

    GRANTED = "granted"
    ABORTING = "aborting"
    DELIVERED = "delivered"
    FAILED = "failed"
    EXPIRED = "expired"
    ABORTED = "aborted"


State = TypeVar("State", bound=StrEnum)
Table = Mapping[State, frozenset[State]]

RANK_TABLE: Table[RankState] = {
    RankState.REGISTERING: frozenset({RankState.LIVE, RankState.GONE}),
    RankState.LIVE: frozenset({RankState.STALLED, RankState.DISCONNECTED, RankState.GONE}),
    RankState.STALLED: frozenset({RankState.LIVE, RankState.DISCONNECTED, RankState.GONE}),
    RankState.DISCONNECTED: frozenset({RankState.LIVE, RankState.GONE}),
    RankState.GONE: frozenset(),
}
WORLD_TABLE: Table[WorldState] = {
    WorldState.FORMING: frozenset({WorldState.SEALED}),
    WorldState.SEALED: frozenset({WorldState.FORMING}),
}
PAIR_TABLE: Table[PairState] = {
    PairState.WAITING: frozenset({PairState.REJECTED, PairState.LINKING}),
    PairState.REJECTED: frozenset({PairState.WAITING}),
    PairState.LINKING: frozenset({PairState.READY, PairState.REJECTED, PairState.WAITING}),
    PairState.READY: frozenset({PairState.LINKING, PairState.REJECTED, PairState.WAITING}),
}
TRANSFER_TABLE: Table[TransferState] = {
    TransferState.GRANTED: frozenset(
        {
            TransferState.DELIVERED,
            TransferState.FAILED,
            TransferState.EXPIRED,
            TransferState.ABORTING,
        }
    ),
    TransferState.ABORTING: frozenset(
        {TransferState.ABORTED, TransferState.DELIVERED, TransferState.FAILED}
    ),
    TransferState.DELIVERED: frozenset(),
    TransferState.FAILED: frozenset(),
    TransferState.EXPIRED: frozenset(),
    TransferState.ABORTED: frozenset(),
}


def change(table: Table[State], state: State, to: State) -> State:
    """Return ``to`` if the table allows the change.

    Raises:
        InvariantError: it does not.
    """
    if to not in table[state]:
        msg = f"{type(state).__name__} {state} may not become {to}"
        raise InvariantError(msg)
    return to
