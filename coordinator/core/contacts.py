"""The one relation from which every count comes: which source slots and destination slots talk.

What a slot holds of a KV group is its layer ids and its head interval. A *class* is the set of
slots that hold exactly the same; its members are replicas. Profiles differ only in who among them
talks: ``native`` writes every byte once, ``sglang`` and ``vllm`` follow the engines' own habit
(sglang/srt/disaggregation/common/conn.py; vllm/distributed/kv_transfer/kv_connector/utils.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from rankgate.coordinator.core.verdicts import WorldShape
from rankgate.proto.geometry import Interval, heads_of_rank


class Edge(NamedTuple):
    """Source slot and destination slot that must talk."""

    source: int
    destination: int


class Holding(NamedTuple):
    """What one slot has of one KV group: layer ids and global heads."""

    layers: tuple[int, ...]
    heads: Interval

    def touches(self, other: Holding) -> bool:
        """Whether both have some layer and some head in common."""
        return bool(self.heads.overlap(other.heads).size) and not set(self.layers).isdisjoint(
            other.layers
        )


class Relation(NamedTuple):
    """Data edges by KV group, and the notices of sources that nobody reads."""

    data: dict[str, list[Edge]]
    notices: list[Edge]

    def edges(self) -> list[Edge]:
        """Return every edge once, ordered."""
        return sorted({edge for edges in self.data.values() for edge in edges} | set(self.notices))


def holdings(shape: WorldShape, name: str) -> dict[int, Holding]:
    """Return what each slot holds of the KV group ``name``."""
    tp = shape.layout.tp
    return {
        slot: Holding(tuple(group.layers), heads_of_rank(group.total_heads, tp, slot % tp))
        for slot, group in shape.holders(name)
    }


def relate(source: WorldShape, destination: WorldShape, profile: str) -> Relation:
    """Return the contacts of two shapes that have been found compatible.

    Args:
        source: the sending world's shape.
        destination: the receiving world's shape.
        profile: ``native``, ``sglang`` or ``vllm``.
    """
    readers = _READERS[profile]
    data: dict[str, list[Edge]] = {}
    for name in source.group_names():
        held, needed = holdings(source, name), holdings(destination, name)
        data[name] = sorted(set(readers(held, needed, source, destination)))
    return Relation(data, list(_notices(source, destination, data)))


def _classes(held: dict[int, Holding]) -> list[tuple[Holding, list[int]]]:
    members: defaultdict[Holding, list[int]] = defaultdict(list)
    for slot in sorted(held):
        members[held[slot]].append(slot)
    return list(members.items())


def _native(
    held: dict[int, Holding],
    needed: dict[int, Holding],
    _source: WorldShape,
    _destination: WorldShape,
) -> Iterator[Edge]:
    """Among replicas R[0..k) and needers D[0..m) in rank order, D[j] reads R[j * k // m]."""
    for holding, replicas in _classes(held):
        needers = [slot for slot in sorted(needed) if needed[slot].touches(holding)]
        for place, slot in enumerate(needers):
            yield Edge(replicas[place * len(replicas) // len(needers)], slot)


def _engine(
    held: dict[int, Holding],
    needed: dict[int, Holding],
    source: WorldShape,
    destination: WorldShape,
) -> Iterator[Edge]:
    """Both engines' habit for sizes that divide: neighbours by the ratio of the tp sizes.

    ``tp_d >= tp_s``: rank ``r`` reads ``r // (tp_d / tp_s)``; else it reads the ``k = tp_s / tp_d``
    ranks from ``r * k`` on, replicas included (a byte may have several writers, all alike).
    """
    tp_source, tp_destination = source.layout.tp, destination.layout.tp
    for slot in sorted(needed):
        rank = slot % tp_destination
        if tp_destination >= tp_source:
            targets = range(rank // (tp_destination // tp_source), tp_source)[:1]
        else:
            ratio = tp_source // tp_destination
            targets = range(rank * ratio, (rank + 1) * ratio)
        for holder in sorted(held):
            if holder % tp_source in targets and held[holder].touches(needed[slot]):
                yield Edge(holder, slot)


_Readers = Callable[
    [dict[int, Holding], dict[int, Holding], WorldShape, WorldShape], Iterator[Edge]
]
_READERS: dict[str, _Readers] = {"native": _native, "sglang": _engine, "vllm": _engine}


def _notices(
    source: WorldShape, destination: WorldShape, data: dict[str, list[Edge]]
) -> Iterator[Edge]:
    """An unread replica R[i] is told by D[i * m // k], so that it may release (case B07)."""
    read = {edge.source for edges in data.values() for edge in edges}
    everyone = list(range(len(destination.ranks)))
    for slot in range(len(source.ranks)):
        if slot in read:
            continue
        replicas, needers = [slot], everyone
        for name in source.group_names():
            held, needed = holdings(source, name), holdings(destination, name)
            if slot not in held:
                continue
            replicas = [other for other in sorted(held) if held[other] == held[slot]]
            needers = [
                other for other in sorted(needed) if needed[other].touches(held[slot])
            ] or everyone
            break
        yield Edge(slot, needers[replicas.index(slot) * len(needers) // len(replicas)])
