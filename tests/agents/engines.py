"""Ranks of both worlds in one process: real agents, real torch tensors, a real daemon beside."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Self

import torch

from rankgate.agents.agent import RankAgent
from rankgate.agents.describe import RankDescription, describe_kv
from rankgate.agents.events import AgentEvent, Released
from rankgate.agents.session import Identity
from rankgate.proto.descriptor import Coordinates, Layout
from rankgate.proto.geometry import heads_of_rank

LAYERS, PAGES, PAGE_SIZE, DIM = 3, 12, 4, 8
PATIENCE = 20.0
"""Seconds after which what a test waits for is taken as never coming."""


class Engine:
    """One rank's place: its caches, HND or NHD, and the agent beside them."""

    def __init__(
        self,
        daemon: str,
        world: str,
        role: str,
        rank: int,
        tp: int,
        token: bytes,
        *,
        heads: int = 4,
        layout: str = "HND",
        dtype: torch.dtype = torch.bfloat16,
        pages: int = PAGES,
        claims: dict[str, int] | None = None,
        link: str = "",
    ) -> None:
        """Start the agent."""
        held = heads_of_rank(heads, tp, rank)
        self.heads = slice(held.start, held.stop)
        self.total_heads, self.layout = heads, layout
        axes = (held.size, PAGE_SIZE) if layout == "HND" else (PAGE_SIZE, held.size)
        self.keys = [torch.zeros(pages, *axes, DIM, dtype=dtype) for _ in range(LAYERS)]
        self.values = [torch.zeros(pages, *axes, DIM, dtype=dtype) for _ in range(LAYERS)]
        cache = describe_kv(
            "full",
            self.keys,
            self.values,
            layers=range(LAYERS),
            total_heads=heads,
            layout=layout,
        )
        description = RankDescription(
            role=role,
            layout=Layout(tp=tp),
            coordinates=Coordinates(tp=rank),
            kv=[cache],
            claims=claims or {},
        )
        self.events: list[AgentEvent] = []
        self.rank = rank
        self.agent = RankAgent(
            description,
            identity=Identity(world=world, rank=rank, incarnation=os.urandom(16), round=token),
            world_size=tp,
            daemon=daemon,
            link=link,
        )

    def _expected(self, request: str, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each cache and what the request's pages must hold in it."""
        for part, caches in enumerate((self.keys, self.values)):
            for layer, cache in enumerate(caches):
                seed = hash((request, part, layer)) & 0xFFFFFFFF
                every = torch.randint(
                    0,
                    256,
                    (count, self.total_heads, PAGE_SIZE, DIM * cache.element_size()),
                    dtype=torch.uint8,
                    generator=torch.Generator().manual_seed(seed),
                )
                mine = every[:, self.heads]
                yield (
                    cache.view(torch.uint8),
                    mine if self.layout == "HND" else mine.transpose(1, 2),
                )

    def fill(self, request: str, pages: Sequence[int]) -> None:
        """Write what a prefill would have computed."""
        for cache, expected in self._expected(request, len(pages)):
            cache[list(pages)] = expected

    def wrong(self, request: str, pages: Sequence[int]) -> int:
        """Return how many bytes of a request are not what they must be."""
        return sum(
            int((cache[list(pages)] != expected).count_nonzero())
            for cache, expected in self._expected(request, len(pages))
        )

    def stray(self, pages: Sequence[int]) -> int:
        """Return how many bytes outside these pages are not zero."""
        others = [page for page in range(self.keys[0].shape[0]) if page not in set(pages)]
        caches = [*self.keys, *self.values]
        return sum(int(cache.view(torch.uint8)[others].count_nonzero()) for cache in caches)

    def poll(self) -> list[AgentEvent]:
        """Collect the agent's events."""
        self.events += self.agent.poll()
        return self.events

    def released(self, request: str) -> list[Released]:
        """Return the releases of a request so far."""
        return [
            event
            for event in self.poll()
            if isinstance(event, Released) and event.request == request
        ]


class Engines:
    """All ranks of one world; closed together."""

    def __init__(self, daemon: str, world: str, role: str, tp: int, **fields: object) -> None:
        """Start them under one round token."""
        token = os.urandom(16)
        self.world = world
        self.ranks = [
            Engine(daemon, world, role, rank, tp, token, **fields)  # type: ignore[arg-type]
            for rank in range(tp)
        ]

    def __iter__(self) -> Iterator[Engine]:
        return iter(self.ranks)

    def __getitem__(self, rank: int) -> Engine:
        return self.ranks[rank]

    def ready(self, other: str) -> None:
        """Wait until every rank sees the pair ready."""
        for rank in self.ranks:
            rank.agent.wait_ready(other, timeout=PATIENCE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        for rank in self.ranks:
            rank.agent.close()


def wait_until(fact: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
    """Wait for a fact, with a bound."""
    end = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < end, f"{what}: not so after {seconds} s"
        time.sleep(0.005)
