"""Exact integer geometry of paged KV caches: intervals, heads, item lengths, byte slices.

Everything is derived from first principles and compared as bytes, heads and layer ids, never as
launch flags (cases A03, A09, A16). Pure; used by the coordinator to plan and by agents to check.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from rankgate.proto.limits import U64_MAX

DTYPE_BYTES: Final[dict[str, int]] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}
"""Bytes per element by torch's own dtype name (``str(t.dtype)`` without ``torch.``)."""

LAYOUTS: Final = ("HND", "NHD")
"""Order of a page's axes: H heads, N tokens of the page, D head dimension."""


class GeometryError(ValueError):
    """Sizes that describe no possible cache; ``args[0]`` says which and why."""


class Interval(NamedTuple):
    """Half-open ``[start, stop)`` on one axis (heads, layers or tokens); ``start <= stop``."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements covered."""
        return self.stop - self.start

    def overlap(self, other: Interval) -> Interval:
        """Return what both cover; empty (size 0) when they do not touch."""
        start = max(self.start, other.start)
        return Interval(start, max(start, min(self.stop, other.stop)))


def heads_of_rank(total: int, tp_size: int, tp_rank: int) -> Interval:
    """Return the KV heads that tensor-parallel rank ``tp_rank`` of ``tp_size`` holds.

    ``total % tp == 0``: an equal share each. ``tp % total == 0``: one head each, replicated over
    ``tp / total`` neighbours (cases A06, A09). Anything else is malformed and never rounded.

    Raises:
        GeometryError: sizes below 1, a rank outside the group, or sizes that do not divide.
    """
    if total < 1 or tp_size < 1 or not 0 <= tp_rank < tp_size:
        msg = f"total_heads={total}, tp_size={tp_size}, tp_rank={tp_rank} describe no shard"
        raise GeometryError(msg)
    if total % tp_size == 0:
        share = total // tp_size
        return Interval(tp_rank * share, (tp_rank + 1) * share)
    if tp_size % total == 0:
        head = tp_rank // (tp_size // total)
        return Interval(head, head + 1)
    msg = f"{total} KV heads cannot be split over tp_size {tp_size}: neither divides the other"
    raise GeometryError(msg)


def item_len(page_size: int, heads: int, head_dim: int, dtype: str) -> int:
    """Return the bytes of one page of one layer of one part (K or V).

    Raises:
        GeometryError: unknown dtype, or a length beyond 64 bits.
    """
    if dtype not in DTYPE_BYTES:
        msg = f"unknown dtype {dtype!r}"
        raise GeometryError(msg)
    return checked_end(0, page_size * heads * head_dim * DTYPE_BYTES[dtype])


def checked_end(base: int, length: int) -> int:
    """Return ``base + length``, the exclusive end of a byte range.

    Addresses of 2^63 and more are legal (case A38); only an end beyond 2^64 is not.

    Raises:
        GeometryError: a negative number, or an end past the 64-bit address space.
    """
    end = base + length
    if base < 0 or length < 0 or end > U64_MAX + 1:
        msg = f"byte range base={base} length={length} leaves the 64-bit address space"
        raise GeometryError(msg)
    return end


@dataclass(frozen=True, slots=True)
class PageSlice:
    """Where some heads lie inside one page of one layer: ``count`` runs of ``length`` bytes.

    Run ``i`` starts at ``offset + i * stride`` from the page's first byte.
    """

    offset: int
    length: int
    count: int
    stride: int

    @property
    def nbytes(self) -> int:
        """Bytes the slice covers in one page."""
        return self.length * self.count

    @property
    def end(self) -> int:
        """One past the last byte the slice touches in the page."""
        return self.offset + (self.count - 1) * self.stride + self.length


def page_slice(
    layout: str, page_size: int, head_bytes: int, held: Interval, wanted: Interval
) -> PageSlice:
    """Return where the ``wanted`` heads lie in a page that holds the ``held`` heads.

    Args:
        layout: ``HND`` (a head's tokens are contiguous) or ``NHD`` (a token's heads are).
        page_size: tokens in a page.
        head_bytes: bytes of one head of one token (head_dim x element size).
        held: head interval of the page's owner.
        wanted: head interval to locate; must lie inside ``held``.

    Raises:
        GeometryError: ``wanted`` is not inside ``held``, or the layout is unknown.
    """
    if not held.start <= wanted.start <= wanted.stop <= held.stop:
        msg = f"heads {wanted} are not inside the held heads {held}"
        raise GeometryError(msg)
    skip = wanted.start - held.start
    if layout == "HND":
        run = page_size * head_bytes
        return PageSlice(skip * run, wanted.size * run, 1, wanted.size * run)
    if layout == "NHD":
        if wanted == held:
            whole = page_size * held.size * head_bytes
            return PageSlice(0, whole, 1, whole)
        return PageSlice(
            skip * head_bytes, wanted.size * head_bytes, page_size, held.size * head_bytes
        )
    msg = f"unknown page layout {layout!r}; expected one of {LAYOUTS}"
    raise GeometryError(msg)
