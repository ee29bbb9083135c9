"""How a contact's share of one request is cut into chunks; both ends compute the same cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from rankgate.proto.messages import Slice

CHUNK_BYTES = 1 << 20
"""Bytes a chunk aims at; a single page of one layer is never cut."""


class ChunkSpec(NamedTuple):
    """Layers ``[layer, layer + layers)``, page positions ``[first, first + pages)`` of a slice."""

    slice: int
    layer: int
    layers: int
    first: int
    pages: int


def cut(
    slices: Sequence[Slice], counts: Mapping[str, int], chunk_bytes: int = CHUNK_BYTES
) -> Iterator[ChunkSpec]:
    """Yield the chunks that cover every slice, layer and page exactly once.

    Args:
        slices: the contact's slices.
        counts: pages of the request by group.
        chunk_bytes: what a chunk aims at.
    """
    for index, part in enumerate(slices):
        pages = counts.get(part.group, 0)
        if not pages:
            continue
        page = part.count * part.length
        layers = max(1, min(part.layers, chunk_bytes // (page * pages)))
        run = pages if layers > 1 else max(1, min(pages, chunk_bytes // page))
        for layer in range(0, part.layers, layers):
            for first in range(0, pages, run):
                yield ChunkSpec(
                    index,
                    layer,
                    min(layers, part.layers - layer),
                    first,
                    min(run, pages - first),
                )


def chunk_bytes_of(part: Slice, spec: ChunkSpec) -> int:
    """Return the bytes of one chunk's data frame."""
    return spec.layers * spec.pages * part.count * part.length
