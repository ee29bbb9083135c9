"""KV groups of a pair, compared as derived geometry per group tag (RG4xx)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations

from rankgate.coordinator.core.verdicts import Ruling, SideName, Stand, WorldShape
from rankgate.proto.codes import Code
from rankgate.proto.descriptor import KvGroup


def check_kv(source: WorldShape, destination: WorldShape) -> Iterator[Ruling]:
    """Yield what stands between the KV groups of two shapes."""
    ours, theirs = source.group_names(), destination.group_names()
    yield from _presence(source, destination)
    for name in ours:
        if name not in theirs:
            continue
        first, second = source.holders(name)[0][1], destination.holders(name)[0][1]
        for rule in _GROUP_RULES:
            yield from rule(name, first, second, source, destination)
        yield from _layers(name, source, destination)
        yield from _overlap(name, source)


def _stand(side: SideName, shape: WorldShape, name: str, value: object) -> Stand:
    slots = tuple(slot for slot, _ in shape.holders(name)) or tuple(range(len(shape.ranks)))
    return Stand(side, slots, str(value))


def _presence(source: WorldShape, destination: WorldShape) -> Iterator[Ruling]:
    """RG410: every group exists on both sides, whatever the order."""
    ours, theirs = source.group_names(), destination.group_names()
    for name in dict.fromkeys((*ours, *theirs)):
        if (name in ours) != (name in theirs):
            stands = (
                _stand("source", source, name, "it" if name in ours else f"only {list(ours)}"),
                _stand(
                    "destination",
                    destination,
                    name,
                    "it" if name in theirs else f"only {list(theirs)}",
                ),
            )
            yield Ruling(Code.KV_GROUP_MISSING, f"kv[{name}]", stands)


_GroupRule = Callable[[str, KvGroup, KvGroup, WorldShape, WorldShape], Iterator[Ruling]]


def _equal(code: Code, field: str, shown: Callable[[KvGroup], str]) -> _GroupRule:
    """Return the rule that ``field`` of a group is the same on both sides."""

    def rule(
        name: str, first: KvGroup, second: KvGroup, source: WorldShape, destination: WorldShape
    ) -> Iterator[Ruling]:
        if getattr(first, field) != getattr(second, field):
            stands = (
                _stand("source", source, name, shown(first)),
                _stand("destination", destination, name, shown(second)),
            )
            yield Ruling(code, f"kv[{name}].{field}", stands)

    return rule


def _item_len(
    name: str, first: KvGroup, second: KvGroup, source: WorldShape, destination: WorldShape
) -> Iterator[Ruling]:
    """RG416: bytes of one page and head agree, K and V apart; tp may differ (cases A05, A09)."""
    for part in ("k", "v"):
        here, there = (getattr(group, f"{part}_item_len") for group in (first, second))
        if here // first.local_heads != there // second.local_heads:
            stands = (
                _stand("source", source, name, f"{here} bytes for {first.local_heads} heads"),
                _stand(
                    "destination",
                    destination,
                    name,
                    f"{there} bytes for {second.local_heads} heads",
                ),
            )
            yield Ruling(Code.KV_ITEM_LEN_MISMATCH, f"kv[{name}].{part}_item_len", stands)


def _layers(name: str, source: WorldShape, destination: WorldShape) -> Iterator[Ruling]:
    """RG418, RG419: the sources' layers cover the destinations', by layer id and not position."""
    held = {layer for _, group in source.holders(name) for layer in group.layers}
    needed = {layer for _, group in destination.holders(name) for layer in group.layers}
    for code, missing in (
        (Code.LAYER_COVERAGE_GAP, needed - held),
        (Code.LAYER_IDS_MISSING, held - needed),
    ):
        if missing:
            stands = (
                _stand("source", source, name, _layers_text(held)),
                _stand("destination", destination, name, _layers_text(needed)),
            )
            detail = f"(layers {_layers_text(missing)} stand on one side only)"
            yield Ruling(code, f"kv[{name}].layers", stands, detail)


def _overlap(name: str, source: WorldShape) -> Iterator[Ruling]:
    """RG420: a layer has one stage, or its bytes would have two writers (case A21)."""
    stages: dict[tuple[int, ...], list[int]] = {}
    for slot, group in source.holders(name):
        stages.setdefault(tuple(group.layers), []).append(slot)
    for (ours, slots), (theirs, others) in combinations(stages.items(), 2):
        if twice := {*ours} & {*theirs}:
            stands = (
                Stand("source", tuple(slots), _layers_text({*ours})),
                Stand("source", tuple(others), _layers_text({*theirs})),
            )
            detail = f"(layers {_layers_text(twice)} stand in both stages)"
            yield Ruling(Code.LAYER_OVERLAP, f"kv[{name}].layers", stands, detail)


def _layers_text(layers: set[int]) -> str:
    ordered, runs, start = sorted(layers), [], 0
    for index, layer in enumerate(ordered):
        if index + 1 == len(ordered) or ordered[index + 1] != layer + 1:
            first = ordered[start]
            runs.append(str(layer) if first == layer else f"{first}-{layer}")
            start = index + 1
    return ", ".join(runs) if len(runs) <= 8 else f"{', '.join(runs[:8])}, …"  # noqa: PLR2004


_GROUP_RULES: tuple[_GroupRule, ...] = (
    _equal(Code.KV_KIND_MISMATCH, "kind", lambda group: group.kind),
    _equal(
        Code.KV_DTYPE_MISMATCH,
        "dtype",
        lambda group: f"{group.dtype} (k_item_len {group.k_item_len})",
    ),
    _equal(
        Code.PAGE_SIZE_MISMATCH,
        "page_size",
        lambda group: f"{group.page_size} (k_item_len {group.k_item_len})",
    ),
    _equal(Code.KV_HEADS_MISMATCH, "total_heads", lambda group: str(group.total_heads)),
    _equal(Code.HEAD_DIM_MISMATCH, "head_dim", lambda group: str(group.head_dim)),
    _equal(Code.HEAD_DIM_MISMATCH, "v_head_dim", lambda group: str(group.v_head_dim)),
    _equal(Code.KV_LAYOUT_MISMATCH, "layout", lambda group: group.layout),
    _item_len,
)
