"""State components of a pair, matched by kind and never by position (RG5xx, case A34)."""

from __future__ import annotations

from collections.abc import Iterator

from rankgate.coordinator.core.verdicts import Ruling, SideName, Stand, WorldShape
from rankgate.proto.codes import Code
from rankgate.proto.descriptor import StateComponent


def check_state(source: WorldShape, destination: WorldShape) -> Iterator[Ruling]:
    """Yield what stands between the state components of two shapes."""
    ours, theirs = _by_kind(source), _by_kind(destination)
    only_ours, only_theirs = (
        [k for k in ours if k not in theirs],
        [k for k in theirs if k not in ours],
    )
    if len(only_ours) == len(only_theirs) == 1:
        # One component each and only its kind differs: say so, not "missing" twice.
        field = f"state[{only_ours[0]}].kind"
        stands = _stands(source, destination, only_ours[0], only_theirs[0])
        yield Ruling(Code.STATE_KIND_MISMATCH, field, stands)
    else:
        yield from _missing(source, destination, only_ours, only_theirs)
    for kind in ours:
        if kind in theirs:
            yield from _compare(kind, ours[kind], theirs[kind], source, destination)


def _by_kind(shape: WorldShape) -> dict[str, list[StateComponent]]:
    found: dict[str, list[StateComponent]] = {}
    for rank in shape.ranks:
        for component in rank.state:
            found.setdefault(component.kind, []).append(component)
    return found


def _stand(side: SideName, shape: WorldShape, kind: str, value: str) -> Stand:
    slots = tuple(
        slot for slot, rank in enumerate(shape.ranks) if any(c.kind == kind for c in rank.state)
    )
    return Stand(side, slots or tuple(range(len(shape.ranks))), value)


def _stands(
    source: WorldShape, destination: WorldShape, first: str, second: str
) -> tuple[Stand, Stand]:
    return (
        _stand("source", source, first, first),
        _stand("destination", destination, second, second),
    )


def _missing(
    source: WorldShape, destination: WorldShape, only_ours: list[str], only_theirs: list[str]
) -> Iterator[Ruling]:
    """RG510: SGLang's "state component count mismatch (local=3, remote=2)", before any transfer."""
    ours, theirs = list(_by_kind(source)), list(_by_kind(destination))
    for kind in (*only_ours, *only_theirs):
        stands = (
            _stand("source", source, kind, f"{len(ours)} components {ours}"),
            _stand("destination", destination, kind, f"{len(theirs)} components {theirs}"),
        )
        yield Ruling(Code.STATE_COMPONENT_MISSING, f"state[{kind}]", stands)


def _compare(
    kind: str,
    ours: list[StateComponent],
    theirs: list[StateComponent],
    source: WorldShape,
    destination: WorldShape,
) -> Iterator[Ruling]:
    """RG512, RG513: dtype and layers agree (case A03: silently accepted today)."""
    first, second = ours[0], theirs[0]
    if first.dtype != second.dtype:
        stands = (
            _stand("source", source, kind, f"{first.dtype} (item_lens {first.item_lens[:4]})"),
            _stand(
                "destination",
                destination,
                kind,
                f"{second.dtype} (item_lens {second.item_lens[:4]})",
            ),
        )
        yield Ruling(Code.STATE_DTYPE_MISMATCH, f"state[{kind}].dtype", stands)
    layers = [sorted({layer for c in side for layer in c.layers}) for side in (ours, theirs)]
    if layers[0] != layers[1]:
        stands = (
            _stand("source", source, kind, str(layers[0][:16])),
            _stand("destination", destination, kind, str(layers[1][:16])),
        )
        yield Ruling(Code.STATE_LAYERS_MISMATCH, f"state[{kind}].layers", stands)
