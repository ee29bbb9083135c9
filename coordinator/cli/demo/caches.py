"""The paged KV caches of one rank: real torch tensors, filled and verified byte by byte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from rankgate.coordinator.cli.demo.job import Job
from rankgate.coordinator.cli.demo.pattern import expected_bytes
from rankgate.proto.geometry import Interval


class Mismatch(NamedTuple):
    """How many bytes of a request were wrong, and where the first one is."""

    wrong: int
    first: str


class Caches:
    """K and V of every layer, ``[pages, local heads, tokens of a page, head_dim]`` (HND)."""

    def __init__(self, job: Job, heads: Interval) -> None:
        """Allocate zeroed pools for the rank's heads."""
        model = job.model
        self._job = job
        self._heads = range(heads.start, heads.stop)
        shape = (job.pool, heads.size, job.page_size, model.head_dim)
        dtype: torch.dtype = getattr(torch, model.dtype)
        self.keys = [torch.zeros(shape, dtype=dtype) for _ in model.layers]
        self.values = [torch.zeros(shape, dtype=dtype) for _ in model.layers]

    def fill(self, request: str, pages: Sequence[int]) -> None:
        """Write what a prefill would have computed for a request into its pages."""
        where = torch.tensor(pages)
        for _, _, cache, expected in self._expectations(request, len(pages)):
            cache[where] = expected

    def verify(self, request: str, pages: Sequence[int]) -> Mismatch:
        """Compare every byte of a request's pages with what it must be."""
        where = torch.tensor(pages)
        count, first = 0, ""
        for layer, part, cache, expected in self._expectations(request, len(pages)):
            wrong = cache[where] != expected
            found = int(wrong.count_nonzero())
            if found and not first:
                first = self._place(request, layer, part, wrong)
            count += found
        return Mismatch(count, first)

    def wipe(self, pages: Sequence[int]) -> None:
        """Zero pages, so that stale bytes can never pass for new ones."""
        where = torch.tensor(pages)
        for cache in (*self.keys, *self.values):
            cache[where] = 0

    def nonzero_bytes(self, pages: Sequence[int]) -> int:
        """Return how many bytes of pages that belong to no request are not zero."""
        where = torch.tensor(pages)
        caches = (*self.keys, *self.values)
        return sum(int(cache.view(torch.uint8)[where].count_nonzero()) for cache in caches)

    def request_bytes(self, pages: int) -> int:
        """Return this rank's bytes of a request with so many pages."""
        page = self.keys[0][0]
        return 2 * len(self.keys) * pages * page.numel() * page.element_size()

    def _expectations(
        self, request: str, pages: int
    ) -> Iterator[tuple[int, str, torch.Tensor, torch.Tensor]]:
        """Yield (layer id, part, the cache's bytes, the request's expected bytes page by page)."""
        job = self._job
        for place, layer in enumerate(job.model.layers):
            for part, caches in (("k", self.keys), ("v", self.values)):
                cache = caches[place].view(torch.uint8)
                expected = expected_bytes(
                    seed=job.seed,
                    request=request,
                    layer=layer,
                    part=part,
                    heads=self._heads,
                    positions=range(pages * job.page_size),
                    head_bytes=cache.shape[-1],
                )
                paged = expected.view(pages, job.page_size, len(self._heads), -1)
                yield layer, part, cache, paged.transpose(1, 2)

    def _place(self, request: str, layer: int, part: str, wrong: torch.Tensor) -> str:
        page, head, token, byte = (int(index) for index in wrong.nonzero()[0])
        position = page * self._job.page_size + token
        return (
            f"request {request} layer {layer} {part} page {page} head {self._heads[head]}"
            f" token {position} byte {byte}"
        )
