"""Copies between paged caches and chunks, on the calling thread alone.

Caches are seen as one ``[pages, item_len]`` uint8 array a layer. numpy copies strided memory on one
thread and without the GIL; torch would spread small copies over all cores of the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rankgate.agents.chunks import ChunkSpec
from rankgate.proto.messages import Slice

if TYPE_CHECKING:
    import numpy as np

    Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]

Memory = Mapping[tuple[str, str], Sequence["Bytes"]]
"""(group, part) -> one ``[pages, item_len]`` array a layer."""


def runs(pages: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (position, first page, length) of each run of consecutive pages."""
    start = 0
    for index in range(1, len(pages) + 1) if pages else ():
        if index == len(pages) or pages[index] != pages[index - 1] + 1:
            yield start, pages[start], index - start
            start = index


class Side:
    """One side's place of a slice: which layer a chunk begins at, and where in a page it lies."""

    __slots__ = ("first_layer", "offset", "stride")

    def __init__(self, part: Slice, *, sending: bool) -> None:
        """Take the source's or the destination's offsets of a slice."""
        self.first_layer = part.source_layer if sending else part.destination_layer
        self.offset = part.source_offset if sending else part.destination_offset
        self.stride = part.source_stride if sending else part.destination_stride


def window(region: Bytes, part: Slice, side: Side) -> Bytes:
    """Return the slice's bytes in every page of a buffer: a ``[pages, count, length]`` view."""
    from numpy.lib.stride_tricks import as_strided

    end = side.offset + (part.count - 1) * side.stride + part.length
    if end > region.shape[1]:
        msg = f"slice ends at byte {end} of a page of {region.shape[1]} bytes"
        raise IndexError(msg)
    view: Bytes = as_strided(
        region[:, side.offset :],
        shape=(region.shape[0], part.count, part.length),
        strides=(region.strides[0], side.stride, 1),
    )
    return view


def contiguous(
    memory: Memory, part: Slice, spec: ChunkSpec, pages: Sequence[int], *, sending: bool
) -> Bytes | None:
    """Return a chunk's own memory if it is one run of bytes, else None.

    So a whole-page slice over consecutive pages is sent from, and received into, the cache itself.
    """
    side = Side(part, sending=sending)
    listed = pages[spec.first : spec.first + spec.pages]
    if spec.layers != 1 or len(list(runs(listed))) != 1:
        return None
    region = memory[part.group, part.part][side.first_layer + spec.layer]
    if side.offset or part.count * part.length != region.shape[1]:
        return None
    if not region.flags.c_contiguous or side.stride != part.length:
        return None
    return region[listed[0] : listed[-1] + 1]


def gather(memory: Memory, part: Slice, spec: ChunkSpec, pages: Sequence[int]) -> Bytes:
    """Return a chunk's bytes, copied out of the source's cache."""
    import numpy as np

    side = Side(part, sending=True)
    out = np.empty((spec.layers, spec.pages, part.count, part.length), dtype=np.uint8)
    listed = pages[spec.first : spec.first + spec.pages]
    buffers = memory[part.group, part.part]
    for layer in range(spec.layers):
        view = window(buffers[side.first_layer + spec.layer + layer], part, side)
        for at, page, count in runs(listed):
            out[layer, at : at + count] = view[page : page + count]
    return out


def scatter(
    memory: Memory, part: Slice, spec: ChunkSpec, pages: Sequence[int], data: memoryview | Bytes
) -> None:
    """Copy a chunk's bytes into the destination's cache."""
    import numpy as np

    side = Side(part, sending=False)
    shape = (spec.layers, spec.pages, part.count, part.length)
    chunk = np.frombuffer(data, dtype=np.uint8).reshape(shape)
    listed = pages[spec.first : spec.first + spec.pages]
    buffers = memory[part.group, part.part]
    for layer in range(spec.layers):
        view = window(buffers[side.first_layer + spec.layer + layer], part, side)
        for at, page, count in runs(listed):
            view[page : page + count] = chunk[layer, at : at + count]
