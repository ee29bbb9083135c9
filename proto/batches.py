"""How many items go into one message, so that every receiver can read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

from rankgate.proto.findings import Finding
from rankgate.proto.limits import MAX_BATCH

WEIGHT_OF_FINDING = 32
"""An item with a finding is as long as this many without."""


class Ending(Protocol):
    """An end or an outcome: it may carry a finding."""

    @property
    def finding(self) -> Finding | None:
        """Why it is no delivery."""
        ...


Item = TypeVar("Item", bound=Ending)


def batches(items: Sequence[Item]) -> Iterator[list[Item]]:
    """Cut ends or outcomes into messages by what they weigh; nothing gives no message."""
    batch: list[Item] = []
    weight = 0
    for item in items:
        own = 1 if item.finding is None else WEIGHT_OF_FINDING
        if weight + own > MAX_BATCH:
            yield batch
            batch, weight = [], 0
        batch.append(item)
        weight += own
    if batch:
        yield batch
