"""Batches: whatever their findings, ends and outcomes go in messages that can be read."""

from __future__ import annotations

import msgspec

from rankgate.proto.batches import batches
from rankgate.proto.codec import encode
from rankgate.proto.codes import Code
from rankgate.proto.findings import Finding, Side, clip, finding
from rankgate.proto.limits import MAX_BATCH, MAX_BODY_BYTES, MAX_REQUEST
from rankgate.proto.messages import End, EndItem, Outcome, OutcomeItem

WIDE = "\U0001f980"
"""A character of four bytes."""


def outcome(found: Finding | None) -> OutcomeItem:
    """Return the longest outcome that can be."""
    return OutcomeItem(
        transfer=(1 << 64) - 1,
        request=WIDE * MAX_REQUEST,
        attempt=(1 << 32) - 1,
        source_epoch=(1 << 64) - 1,
        destination_epoch=(1 << 64) - 1,
        outcome="delivered",
        finding=found,
        missing=list(range(65_000, 65_064)),
    )


def longest() -> Finding:
    """Return the longest finding that a peer can make us hand on."""
    sides = [Side(WIDE * 4000, WIDE * 4000) for _ in range(20)]
    ours = finding(Code.EXPIRED, WIDE * 4000, *sides, detail=WIDE * 4000)
    theirs = msgspec.structs.replace(
        ours, message=WIDE * 4096, hint=WIDE * 4096, sides=tuple(sides)
    )
    return clip(theirs)


def test_every_batch_fits_a_body_however_long_its_items_are() -> None:
    """Outcomes and ends with and without findings, as long as the wire allows."""
    for found in (None, longest()):
        items = [outcome(found)] * (MAX_BATCH + 1)
        cut = list(batches(items))
        assert sum(map(len, cut)) == len(items)
        assert all(len(encode(Outcome(items=batch), 1)[1]) <= MAX_BODY_BYTES for batch in cut)
        ends = [EndItem(transfer=1, outcome="failed", finding=found)] * (MAX_BATCH + 1)
        bodies = [encode(End(session=1, items=batch), 1)[1] for batch in batches(ends)]
        assert max(map(len, bodies)) <= MAX_BODY_BYTES


def test_nothing_is_no_message() -> None:
    """An empty turn sends nothing."""
    assert list(batches([])) == []


def test_clipping_keeps_code_and_words() -> None:
    """A finding of ordinary length is handed on as it is."""
    found = finding(Code.KV_DTYPE_MISMATCH, "kv[full].dtype", Side("a", "1"), Side("b", "2"))
    assert clip(found) == found
