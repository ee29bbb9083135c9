"""How a share is cut: every byte exactly once, whatever the sizes."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rankgate.agents.chunks import chunk_bytes_of, cut
from rankgate.proto.messages import Slice


@st.composite
def slices(draw: st.DrawFn) -> Slice:
    """Draw a slice of one of two groups."""
    return Slice(
        group=draw(st.sampled_from(["a", "b"])),
        part=draw(st.sampled_from(["k", "v"])),
        source_layer=draw(st.integers(0, 3)),
        destination_layer=draw(st.integers(0, 3)),
        layers=draw(st.integers(1, 9)),
        source_offset=0,
        destination_offset=0,
        length=draw(st.integers(1, 300)),
        count=draw(st.integers(1, 5)),
    )


@given(
    parts=st.lists(slices(), max_size=4),
    counts=st.fixed_dictionaries({"a": st.integers(0, 40), "b": st.integers(0, 7)}),
    chunk_bytes=st.integers(1, 20_000),
)
def test_chunks_tile_every_slice_layer_and_page_exactly_once(
    parts: list[Slice], counts: dict[str, int], chunk_bytes: int
) -> None:
    """No gap, no overlap; a chunk is above its aim only when one page of one layer is."""
    covered: Counter[tuple[int, int, int]] = Counter()
    for spec in cut(parts, counts, chunk_bytes):
        part = parts[spec.slice]
        assert spec.layer + spec.layers <= part.layers
        assert spec.first + spec.pages <= counts[part.group]
        size = chunk_bytes_of(part, spec)
        assert size == spec.layers * spec.pages * part.count * part.length > 0
        assert size <= chunk_bytes or (spec.layers, spec.pages) == (1, 1)
        covered.update(
            (spec.slice, layer, page)
            for layer in range(spec.layer, spec.layer + spec.layers)
            for page in range(spec.first, spec.first + spec.pages)
        )
    assert covered == Counter(
        (index, layer, page)
        for index, part in enumerate(parts)
        for layer in range(part.layers)
        for page in range(counts[part.group])
    )
