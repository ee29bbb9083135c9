"""Copies between caches and chunks: every byte to its place, none beside it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankgate.agents.chunks import ChunkSpec, cut
from rankgate.agents.describe import describe_kv
from rankgate.agents.transports.memory import Side, contiguous, gather, runs, scatter, window
from rankgate.coordinator.core.plans import make_plan
from rankgate.proto.messages import Slice
from tests.agents.pairs import whole
from tests.coordinator.core.harness import Job, decode, prefill

PAGES = 9


def cache_of(job: Job, rank: int, *, fill: int | None) -> list[torch.Tensor]:
    """Return K and V of every layer of a rank: ``fill`` everywhere, or random bytes."""
    group = job.describe(rank).kv[0]
    axes = (group.local_heads, group.page_size)
    axes = axes if group.layout == "HND" else axes[::-1]
    shape = (PAGES, *axes, 2 * group.head_dim)
    generator = torch.Generator().manual_seed(rank)
    return [
        torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        if fill is None
        else torch.full(shape, fill, dtype=torch.uint8)
        for _ in range(2 * len(group.layers))
    ]


def memory_of(job: Job, rank: int, tensors: list[torch.Tensor]) -> dict[tuple[str, str], list]:
    """Return the views that the transport copies through."""
    half = len(tensors) // 2
    cache = describe_kv(
        "full",
        tensors[:half],
        tensors[half:],
        layers=job.describe(rank).kv[0].layers,
        total_heads=job.heads,
        layout=job.page_layout,
    )
    return {("full", part): views for part, views in cache.memory().items()}


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize(("ours", "theirs", "heads"), [(1, 1, 2), (2, 4, 8), (4, 2, 8), (4, 6, 12)])
@given(data=st.data())
def test_a_plan_moves_every_head_to_its_place_and_touches_nothing_else(
    layout: str, ours: int, theirs: int, heads: int, data: st.DataObject
) -> None:
    """Gather and scatter of all chunks equal what indexing by head gives, for any pages."""
    source = prefill(tp=ours, heads=heads, page_layout=layout, layers=2)
    destination = decode(tp=theirs, heads=heads, page_layout=layout, layers=2)
    plan = make_plan(source.shape(), destination.shape(), "native")
    pages = st.lists(st.integers(0, PAGES - 1), unique=True, min_size=1, max_size=PAGES)
    here = data.draw(pages)
    there = data.draw(st.permutations(range(PAGES)))[: len(here)]
    chunk_bytes = data.draw(st.integers(1, 4000))
    held = {rank: cache_of(source, rank, fill=None) for rank in range(ours)}
    for slot, contacts in enumerate(plan.by_destination):
        landing = cache_of(destination, slot, fill=0xAA)
        memory = memory_of(destination, slot, landing)
        for contact in contacts:
            slices = list(contact.slices)
            sending = memory_of(source, contact.source, held[contact.source])
            for spec in cut(slices, {"full": len(here)}, chunk_bytes):
                part = slices[spec.slice]
                scatter(memory, part, spec, there, gather(sending, part, spec, here))
        axis = 1 if layout == "HND" else 2
        share = heads // theirs
        wanted = slice(slot * share, (slot + 1) * share)
        for layer, tensor in enumerate(landing):
            every = torch.cat([held[rank][layer] for rank in range(ours)], dim=axis)
            expected = torch.full_like(tensor, 0xAA)
            mine = every[here].narrow(axis, wanted.start, share)
            expected[list(there)] = mine
            assert torch.equal(tensor, expected)


def test_whole_pages_that_lie_together_are_the_caches_own_memory() -> None:
    """One run of whole pages is sent and received without a copy; anything else is gathered."""
    pool = np.zeros((8, 64), dtype=np.uint8)
    memory = {("full", "k"): [pool, pool.copy()]}
    one = ChunkSpec(slice=0, layer=0, layers=1, first=1, pages=3)
    view = contiguous(memory, whole(), one, [7, 2, 3, 4], sending=True)
    assert view is not None
    assert np.shares_memory(view, pool)
    assert view.nbytes == 3 * 64
    part = whole(length=32)
    for wrong, pages, spec in (
        (whole(), [7, 2, 4, 3], one),
        (part, [7, 2, 3, 4], one),
        (whole(), [7, 2, 3, 4], one._replace(layers=2)),
    ):
        assert contiguous(memory, wrong, spec, pages, sending=True) is None


def test_a_slice_that_leaves_its_page_is_never_touched() -> None:
    """The last check before an address is made."""
    pool = np.zeros((2, 64), dtype=np.uint8)
    part = Slice(
        group="full",
        part="k",
        source_layer=0,
        destination_layer=0,
        layers=1,
        source_offset=1,
        destination_offset=0,
        length=64,
    )
    with pytest.raises(IndexError, match="65"):
        window(pool, part, Side(part, sending=True))


@given(pages=st.lists(st.integers(0, 30), unique=True))
def test_runs_cover_the_list_in_order(pages: list[int]) -> None:
    """Consecutive pages are one run, and the longest possible."""
    covered: list[int] = []
    found = list(runs(pages))
    for at, page, count in found:
        assert at == len(covered)
        covered += range(page, page + count)
    assert covered == pages
    breaks = sum(later != sooner + 1 for sooner, later in pairwise(pages))
    assert len(found) == (breaks + 1 if pages else 0)
