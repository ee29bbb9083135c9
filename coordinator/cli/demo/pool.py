"""Which pages of a rank's pool are free."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence


class PagePool:
    """Free pages, handed out in a shuffled order and taken back at the end.

    Invariant: a page is either free or belongs to exactly one taker.
    """

    def __init__(self, pages: int, seed: int) -> None:
        """Begin with every page free, in an order of its own for each seed."""
        order = list(range(pages))
        random.Random(seed).shuffle(order)  # noqa: S311 - any order will do
        self._free = deque(order)

    def take(self, count: int) -> list[int] | None:
        """Return so many pages, or None while there are not enough."""
        if count > len(self._free):
            return None
        return [self._free.popleft() for _ in range(count)]

    def give(self, pages: Sequence[int]) -> None:
        """Take pages back.

        Raises:
            ValueError: a page is free already.
        """
        twice = set(pages) & set(self._free)
        if twice:
            raise ValueError(f"pages {sorted(twice)} are given back twice")
        self._free.extend(pages)

    @property
    def free(self) -> list[int]:
        """The pages that belong to nobody."""
        return list(self._free)
