"""The ranks of one round against each other: who deviates, and what the others say (RG107)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rankgate.proto.codes import Code
from rankgate.proto.descriptor import Coordinates, Descriptor, Layout
from rankgate.proto.digests import digest_of
from rankgate.proto.findings import Finding, Side, finding, ranks_text

Members = Mapping[int, Descriptor]

_GROUP_FIELDS = (
    "kind",
    "dtype",
    "layout",
    "page_size",
    "total_heads",
    "head_dim",
    "v_head_dim",
)


def check_agreement(members: Members) -> list[Finding]:
    """Return where the registered ranks of one round contradict each other."""
    found = list(_fields_agree(members))
    found += _caches_agree(members)
    found += _coordinates_unique(members)
    return found


class Trait(NamedTuple):
    """Something that all ranks of one round must have in common."""

    of: str
    value: Any


def traits_of(member: Descriptor) -> list[Trait]:
    """Return one rank's traits, so that a round's agreement costs the same at any size."""
    stage = [(group.name, group.layers) for group in member.kv]
    held = [(part.kind, part.layers, part.item_lens) for part in member.state]
    rest = [[getattr(group, name) for name in ("name", *_GROUP_FIELDS)] for group in member.kv]
    state = [(part.kind, part.dtype) for part in member.state]
    common = [
        *(getattr(member, name) for name in ("role", "group", "profile", "model", "layout")),
        sorted(member.capabilities),
        member.transport.kind,
    ]
    return [
        Trait("size", member.world_size),
        Trait("common", digest_of(common)),
        Trait(f"stage {member.coordinates.pp}", digest_of([stage, held, rest, state])),
        *(Trait(f"kv {row[0]}", digest_of(row)) for row in rest),
        *(Trait(f"state {kind}", dtype) for kind, dtype in state),
    ]


def slot_of(at: Coordinates, sizes: Layout) -> int:
    """Return a rank's place in its data-parallel group: ``(pp * cp + cp) * tp + tp``."""
    return (at.pp * sizes.cp + at.cp) * sizes.tp + at.tp


def check_order(members: Members) -> Iterator[Finding]:
    """RG150: ranks numbered in no engine's habit only warn; coordinates decide."""
    if not any(
        all(rank == habit(member.coordinates, member.layout) for rank, member in members.items())
        for habit in (_sglang_rank, _vllm_rank)
    ):
        first = next(iter(members.values()))
        side = Side(f"{first.role} {first.world}", "an order of its own")
        yield finding(Code.RANK_ORDER_UNUSUAL, "coordinates", side)


def _sglang_rank(at: Coordinates, size: Layout) -> int:
    return (at.pp * size.dp * size.cp + at.dp * size.cp + at.cp) * size.tp + at.tp


def _vllm_rank(at: Coordinates, size: Layout) -> int:
    return ((at.dp * size.pp + at.pp) * size.cp + at.cp) * size.tp + at.tp


def _fields_agree(members: Members) -> Iterator[Finding]:
    values: dict[str, dict[int, Any]] = defaultdict(dict)
    for rank, member in members.items():
        values["world_size"][rank] = member.world_size
        values["role"][rank] = member.role
        values["group"][rank] = member.group
        values["profile"][rank] = member.profile
        values["model.name"][rank] = member.model.name
        values["model.revision"][rank] = member.model.revision
        values["capabilities"][rank] = sorted(member.capabilities)
        values["transport.kind"][rank] = member.transport.kind
        for axis in ("pp", "dp", "cp", "tp", "dcp"):
            values[f"layout.{axis}"][rank] = getattr(member.layout, axis)
        for group in member.kv:
            for name in _GROUP_FIELDS:
                values[f"kv[{group.name}].{name}"][rank] = getattr(group, name)
        for component in member.state:
            values[f"state[{component.kind}].dtype"][rank] = component.dtype
    for field, by_rank in values.items():
        yield from _disagreement(field, by_rank, members)


def _caches_agree(members: Members) -> Iterator[Finding]:
    """Ranks of one pipeline stage hold the same groups, states and layers."""
    stages: dict[int, dict[str, dict[int, Any]]] = defaultdict(lambda: defaultdict(dict))
    for rank, member in members.items():
        stage = stages[member.coordinates.pp]
        stage["kv"][rank] = sorted(group.name for group in member.kv)
        stage["state"][rank] = sorted(component.kind for component in member.state)
        for group in member.kv:
            stage[f"kv[{group.name}].layers"][rank] = group.layers
        for component in member.state:
            stage[f"state[{component.kind}].layers"][rank] = component.layers
            stage[f"state[{component.kind}].item_lens"][rank] = component.item_lens
    for by_field in stages.values():
        for field, by_rank in by_field.items():
            yield from _disagreement(field, by_rank, members)


def _disagreement(field: str, by_rank: Mapping[int, Any], members: Members) -> Iterator[Finding]:
    holders: dict[str, list[int]] = defaultdict(list)
    for rank, value in by_rank.items():
        holders[repr(value)].append(rank)
    if len(holders) > 1:
        ordered = sorted(holders.items(), key=lambda item: (-len(item[1]), item[1]))
        world = members[ordered[0][1][0]].world
        sides = [Side(f"{world} {ranks_text(ranks)}", _short(text)) for text, ranks in ordered]
        yield finding(Code.RANKS_DISAGREE, field, *sides)


def _short(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:80]}… ({len(text)} characters)"  # noqa: PLR2004


def _coordinates_unique(members: Members) -> Iterator[Finding]:
    """RG106: no two ranks stand at one place (case C13)."""
    places: dict[Coordinates, list[int]] = defaultdict(list)
    for rank, member in members.items():
        places[member.coordinates].append(rank)
    for at, ranks in places.items():
        if len(ranks) > 1:
            yield _same_place(at, ranks, members)


def _same_place(at: Coordinates, ranks: Sequence[int], members: Members) -> Finding:
    place = f"pp {at.pp}, dp {at.dp}, cp {at.cp}, tp {at.tp}"
    sides = [
        Side(f"{members[rank].world} rank {rank} on {members[rank].transport.host}", place)
        for rank in sorted(ranks)
    ]
    return finding(Code.DUPLICATE_COORDINATE, "coordinates", *sides)
