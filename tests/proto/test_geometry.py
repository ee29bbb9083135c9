"""Geometry: heads, lengths and page slices against a dumb second implementation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankgate.proto.geometry import (
    DTYPE_BYTES,
    GeometryError,
    Interval,
    PageSlice,
    checked_end,
    heads_of_rank,
    item_len,
    page_slice,
)
from rankgate.proto.limits import U64_MAX

SIZES = st.integers(1, 96)


@given(SIZES, SIZES)
def test_A06_the_ranks_cover_the_heads_evenly(total: int, tp: int) -> None:
    """Every head has equally many holders, in order; other sizes are refused, never rounded."""
    if total % tp and tp % total:
        for rank in (0, tp - 1):
            with pytest.raises(GeometryError, match=f"{total} KV heads .* tp_size {tp}"):
                heads_of_rank(total, tp, rank)
        return
    held = [heads_of_rank(total, tp, rank) for rank in range(tp)]
    assert held == sorted(held)
    holders = [sum(head in range(*one) for one in held) for head in range(total)]
    assert set(holders) == {max(1, tp // total)}
    assert {one.size for one in held} == {max(1, total // tp)}


@pytest.mark.parametrize(("total", "tp", "rank"), [(0, 1, 0), (1, 0, 0), (4, 2, 2), (4, 2, -1)])
def test_impossible_shards_are_refused(total: int, tp: int, rank: int) -> None:
    """Sizes below one and ranks outside the group describe nothing."""
    with pytest.raises(GeometryError, match="describe no shard"):
        heads_of_rank(total, tp, rank)


@given(
    st.tuples(st.integers(0, 9), st.integers(0, 9)), st.tuples(st.integers(0, 9), st.integers(0, 9))
)
def test_overlaps_are_those_of_sets(one: tuple[int, int], two: tuple[int, int]) -> None:
    """Overlap is set intersection, both ways."""
    first, second = Interval(*sorted(one)), Interval(*sorted(two))
    both = first.overlap(second)
    assert set(range(*both)) == set(range(*first)) & set(range(*second))
    assert set(range(*second.overlap(first))) == set(range(*both))
    assert both.size == len(set(range(*both)))


def test_A01_item_lengths_follow_from_sizes() -> None:
    """page x heads x dim x element size, for every dtype; unknown dtypes are refused."""
    assert item_len(32, 4, 128, "bfloat16") == 32768
    assert item_len(32, 4, 128, "float8_e4m3fn") == 16384
    for dtype, size in DTYPE_BYTES.items():
        assert item_len(3, 5, 7, dtype) == 105 * size
    with pytest.raises(GeometryError, match="'bf16'"):
        item_len(1, 1, 1, "bf16")


def test_A38_ranges_end_inside_64_bits() -> None:
    """An address of 2^64 - 64 MiB with 64 MiB is exact; one byte more is refused."""
    base, size = 18446744073642442752, 67108864
    assert checked_end(base, size) == U64_MAX + 1
    assert checked_end(1 << 63, 5) == (1 << 63) + 5
    assert checked_end(0, 0) == 0
    for bad in ((base, size + 1), (base + 1, size), (-1, 5), (5, -1), (U64_MAX + 2, 0)):
        with pytest.raises(GeometryError, match="64-bit address space"):
            checked_end(*bad)
    with pytest.raises(GeometryError):
        item_len(1 << 32, 1 << 32, 1 << 32, "float64")


def elements(layout: str, page_size: int, head_bytes: int, held: Interval) -> list[tuple[int, int]]:
    """Return (head, token) of every byte of a page."""
    if layout == "HND":
        order = [(head, token) for head in range(*held) for token in range(page_size)]
    else:
        order = [(head, token) for token in range(page_size) for head in range(*held)]
    return [place for place in order for _ in range(head_bytes)]


@given(st.sampled_from(["HND", "NHD"]), st.integers(1, 5), st.integers(1, 5), st.data())
def test_a_page_slice_covers_just_the_wanted_heads(
    layout: str, page_size: int, head_bytes: int, data: st.DataObject
) -> None:
    """Byte by byte: the runs are the bytes of the wanted heads, in order, and nothing else."""
    start = data.draw(st.integers(0, 5))
    held = Interval(start, start + data.draw(st.integers(1, 6)))
    first = data.draw(st.integers(held.start, held.stop - 1))
    wanted = Interval(first, data.draw(st.integers(first + 1, held.stop)))
    piece = page_slice(layout, page_size, head_bytes, held, wanted)
    page = elements(layout, page_size, head_bytes, held)
    covered = [
        byte
        for run in range(piece.count)
        for byte in range(
            piece.offset + run * piece.stride, piece.offset + run * piece.stride + piece.length
        )
    ]
    assert covered == sorted(set(covered))
    assert covered == [at for at, (head, _) in enumerate(page) if head in range(*wanted)]
    assert piece.nbytes == len(covered) == page_size * head_bytes * wanted.size
    assert piece.end == covered[-1] + 1 <= len(page)


def test_a_whole_page_is_one_run() -> None:
    """All heads of either layout move in one piece."""
    for layout in ("HND", "NHD"):
        whole = page_slice(layout, 4, 2, Interval(0, 3), Interval(0, 3))
        assert whole == PageSlice(0, 24, 1, 24)
    assert page_slice("NHD", 4, 2, Interval(0, 3), Interval(1, 2)) == PageSlice(2, 2, 4, 6)


def test_impossible_slices_are_refused() -> None:
    """Heads that are not held, intervals turned round, and layouts nobody knows."""
    for wanted in (Interval(0, 2), Interval(3, 5), Interval(3, 2)):
        with pytest.raises(GeometryError, match="not inside"):
            page_slice("HND", 1, 1, Interval(1, 4), wanted)
    with pytest.raises(GeometryError, match="'DHN'"):
        page_slice("DHN", 1, 1, Interval(0, 1), Interval(0, 1))
