"""Judging a pair: every rule, all findings, and the plan when none refuses."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from rankgate.coordinator.core.plans import make_plan
from rankgate.coordinator.core.rules.agreement import slot_of
from rankgate.coordinator.core.rules.kv import check_kv
from rankgate.coordinator.core.rules.state import check_state
from rankgate.coordinator.core.rules.topology import check_topology
from rankgate.coordinator.core.verdicts import Judgement, RankShape, WorldShape
from rankgate.proto.codes import Severity
from rankgate.proto.descriptor import Descriptor
from rankgate.proto.digests import digest_of


def judge(source: WorldShape, destination: WorldShape) -> Judgement:
    """Return all rulings on a pair of shapes, and its plan when it may talk.

    Pure, and up to tens of milliseconds for the largest layouts, so the runtime calls it beside
    the serving loop.
    """
    rulings = (
        *check_topology(source, destination),
        *check_kv(source, destination),
        *check_state(source, destination),
    )
    refused = any(ruling.code.severity is Severity.ERROR for ruling in rulings)
    return Judgement(rulings, None if refused else make_plan(source, destination, source.profile))


def shape_of(members: Mapping[int, Descriptor]) -> WorldShape:
    """Return the shape of a complete, agreeing set of ranks (its data-parallel group 0)."""
    first = members[0]
    ranks: list[RankShape | None] = [None] * first.layout.slots
    for member in members.values():
        if member.coordinates.dp == 0:
            ranks[slot_of(member.coordinates, first.layout)] = RankShape(
                tuple(replace(group, pages=1) for group in member.kv), tuple(member.state)
            )
    held = tuple(rank for rank in ranks if rank is not None)
    capabilities = tuple(sorted(first.capabilities))
    return WorldShape(
        role=first.role,
        layout=first.layout,
        profile=first.profile,
        model=first.model,
        capabilities=capabilities,
        transport=first.transport.kind,
        ranks=held,
        digest=digest_of(
            [
                first.role,
                first.layout,
                first.profile,
                first.model,
                capabilities,
                first.transport.kind,
                held,
            ]
        ),
    )
