"""From contacts to byte ranges: which bytes of every page each contact moves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from rankgate.coordinator.core.contacts import Edge, holdings, relate
from rankgate.coordinator.core.verdicts import Plan, PlannedContact, WorldShape
from rankgate.proto.descriptor import KvGroup
from rankgate.proto.digests import digest_of
from rankgate.proto.geometry import DTYPE_BYTES, page_slice
from rankgate.proto.messages import Slice


def make_plan(source: WorldShape, destination: WorldShape, profile: str) -> Plan:
    """Return the plan of two shapes that have been found compatible.

    The digest covers contacts, slices and counts: two programs with the same table digest agree
    on every byte and every number.
    """
    relation = relate(source, destination, profile)
    slices: defaultdict[Edge, list[Slice]] = defaultdict(list)
    for name, edges in relation.data.items():
        held, needed = holdings(source, name), holdings(destination, name)
        sending, receiving = dict(source.holders(name)), dict(destination.holders(name))
        for edge in edges:
            ours, theirs = held[edge.source], needed[edge.destination]
            heads = ours.heads.overlap(theirs.heads)
            group, other = sending[edge.source], receiving[edge.destination]
            for part, dim in _parts(group):
                size = dim * DTYPE_BYTES[group.dtype]
                here = page_slice(group.layout, group.page_size, size, ours.heads, heads)
                there = page_slice(other.layout, other.page_size, size, theirs.heads, heads)
                # One side may hold just these heads (one run a page), the other more (one run
                # a token): move in the finer steps of the two.
                count = max(here.count, there.count)
                length = here.nbytes // count
                slices[edge].extend(
                    Slice(
                        group=name,
                        part=part,
                        source_layer=first,
                        destination_layer=second,
                        layers=run,
                        source_offset=here.offset,
                        destination_offset=there.offset,
                        length=length,
                        count=count,
                        source_stride=here.stride if here.count > 1 else length,
                        destination_stride=there.stride if there.count > 1 else length,
                    )
                    for first, second, run in _layer_runs(group.layers, other.layers)
                )
    return _counted(source, destination, profile, relation.edges(), slices)


def _counted(
    source: WorldShape,
    destination: WorldShape,
    profile: str,
    edges: Sequence[Edge],
    slices: defaultdict[Edge, list[Slice]],
) -> Plan:
    by_source: list[list[PlannedContact]] = [[] for _ in source.ranks]
    by_destination: list[list[PlannedContact]] = [[] for _ in destination.ranks]
    for edge in edges:
        contact = PlannedContact(edge.source, edge.destination, tuple(slices.get(edge, ())))
        by_source[edge.source].append(contact)
        by_destination[edge.destination].append(contact)
    receive_counts = tuple(len(contacts) for contacts in by_source)
    send_counts = tuple(
        sum(contact.kind == "data" for contact in contacts) for contacts in by_destination
    )
    return Plan(
        profile=profile,
        by_source=tuple(map(tuple, by_source)),
        by_destination=tuple(map(tuple, by_destination)),
        receive_counts=receive_counts,
        send_counts=send_counts,
        digest=digest_of([profile, by_source, receive_counts, send_counts]),
    )


def _parts(group: KvGroup) -> list[tuple[str, int]]:
    parts = [("k", group.head_dim)]
    if group.v_head_dim:
        parts.append(("v", group.v_head_dim))
    return parts


def _layer_runs(
    source: Sequence[int], destination: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """Yield (first source index, first destination index, run length) of the common layers."""
    places = {layer: index for index, layer in enumerate(destination)}
    run: list[int] = []  # [source index, destination index, length]
    for index, layer in enumerate(source):
        place = places.get(layer)
        if run and place == run[1] + run[2] and index == run[0] + run[2]:
            run[2] += 1
            continue
        if run:
            yield run[0], run[1], run[2]
        run = [] if place is None else [index, place, 1]
    if run:
        yield run[0], run[1], run[2]
