"""Verdicts, grants and pairs for tests of one pure part, without a daemon."""

from __future__ import annotations

from collections.abc import Sequence

from rankgate.agents.linking import PairLinks
from rankgate.proto.grants import Grant, pair_key, seal_grant
from rankgate.proto.messages import Contact, Peer, Slice, Verdict
from tests.coordinator.core.harness import id16

EPOCHS = (3, 5)
KEY = pair_key(bytes(32), "p", EPOCHS[0], "d", EPOCHS[1])
TABLE = id16("table")


def whole(part: str = "k", *, layers: int = 2, length: int = 64) -> Slice:
    """Return a slice of whole pages."""
    return Slice(
        group="full",
        part=part,
        source_layer=0,
        destination_layer=0,
        layers=layers,
        source_offset=0,
        destination_offset=0,
        length=length,
        source_stride=length,
        destination_stride=length,
    )


def peer(rank: int, *, dp: int = 0, slot: int | None = None, life: str = "") -> Peer:
    """Return a rank of the other world."""
    return Peer(
        rank=rank,
        dp=dp,
        slot=rank if slot is None else slot,
        incarnation=id16("peer", rank, life),
        address=f"mem://{rank}",
        host="h",
        metadata_digest=id16("metadata", rank),
    )


def pair_of(
    kinds: Sequence[str], *, sending: bool, epochs: tuple[int, int] = EPOCHS, now: int = 0
) -> PairLinks:
    """Return an accepted pair whose contact ``i`` is ``kinds[i]``: data or notice."""
    verdict = Verdict(
        source="p",
        source_epoch=epochs[0],
        destination="d",
        destination_epoch=epochs[1],
        accepted=True,
        table_digest=TABLE,
        receive_count=len(kinds) if sending else 0,
        send_count=0 if sending else sum(kind == "data" for kind in kinds),
        contacts=[
            Contact(slot=slot, kind=kind, slices=[whole()] if kind == "data" else [])
            for slot, kind in enumerate(kinds)
        ],
        peers=[peer(rank) for rank in range(len(kinds))],
        grant_key=KEY if sending else b"",
    )
    return PairLinks(verdict, sending=sending, now=now)


def grant_of(transfer: int = 7, request: str = "r", **changes: object) -> Grant:
    """Return a grant of the pair, issued at tick 1000 for 10 s."""
    fields = {
        "transfer": transfer,
        "instance": id16("instance"),
        "clock": id16("boot"),
        "issued": 1000,
        "ttl": 10_000,
        "source_epoch": EPOCHS[0],
        "destination_epoch": EPOCHS[1],
        "request": request,
        "table_digest": TABLE,
        **changes,
    }
    return Grant(**fields)  # type: ignore[arg-type]


def sealed(transfer: int = 7, request: str = "r", **changes: object) -> bytes:
    """Return the bytes of :func:`grant_of`."""
    return seal_grant(grant_of(transfer, request, **changes), KEY)
