"""Contacts, counts and byte ranges: the design's rows, the engines' formulas, a dumb oracle."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from rankgate.coordinator.core.contacts import relate
from rankgate.coordinator.core.judging import judge
from rankgate.coordinator.core.plans import make_plan
from rankgate.coordinator.core.verdicts import Plan, WorldShape
from rankgate.proto.codes import Code
from rankgate.proto.descriptor import KvGroup
from rankgate.proto.digests import digest_of
from rankgate.proto.geometry import DTYPE_BYTES, Interval, heads_of_rank
from tests.coordinator.core.harness import Job, decode, prefill

PARTS = ("k", "v")


def plan_of(source: Job, destination: Job) -> Plan:
    """Return the plan of two jobs that must be compatible."""
    judgement = judge(source.shape(), destination.shape())
    assert judgement.plan is not None, judgement.rulings
    return judgement.plan


def kinds(plan: Plan) -> list[str]:
    """Return the kind of every contact."""
    return [contact.kind for contact in plan.contacts]


# --- the rows of the design ----------------------------------------------------------------------

ROWS: dict[str, tuple[dict[str, Any], dict[str, Any], list[int], list[int], int]] = {
    "gqa p4 d4": ({"tp": 4}, {"tp": 4}, [1] * 4, [1] * 4, 0),
    "gqa p2 d4": ({"tp": 2}, {"tp": 4}, [2] * 2, [1] * 4, 0),
    "mla p2 d4": ({"tp": 2, "kind": "mla"}, {"tp": 4, "kind": "mla"}, [2] * 2, [1] * 4, 0),
    "gqa p4 d2, 8 heads": ({"tp": 4}, {"tp": 2}, [1] * 4, [2] * 2, 0),
    "gqa p4 d2, 4 heads": ({"tp": 4, "heads": 4}, {"tp": 2, "heads": 4}, [1] * 4, [2] * 2, 0),
    "gqa p4 d2, 2 heads": ({"tp": 4, "heads": 2}, {"tp": 2, "heads": 2}, [1] * 4, [1] * 2, 2),
    "gqa p4 d2, 2 heads, sglang": (
        {"tp": 4, "heads": 2, "profile": "sglang"},
        {"tp": 2, "heads": 2, "profile": "sglang"},
        [1] * 4,
        [2] * 2,
        0,
    ),
    "gqa p4 d2, 2 heads, vllm with the capability": (
        {"tp": 4, "heads": 2, "profile": "vllm", "capabilities": ["p_tp_gt_d_tp"]},
        {"tp": 2, "heads": 2, "profile": "vllm", "capabilities": ["p_tp_gt_d_tp"]},
        [1] * 4,
        [2] * 2,
        0,
    ),
    "mla p4 d2": ({"tp": 4, "kind": "mla"}, {"tp": 2, "kind": "mla"}, [1] * 4, [1] * 2, 2),
    "gqa p(4, pp2) d2": ({"tp": 4, "pp": 2}, {"tp": 2}, [1] * 8, [4] * 2, 0),
    "mla p(2, pp2) d4": (
        {"tp": 2, "pp": 2, "kind": "mla"},
        {"tp": 4, "kind": "mla"},
        [2] * 4,
        [2] * 4,
        0,
    ),
    "gqa pp8 tp8 to tp4, 8 heads": (
        {"tp": 8, "pp": 8, "layers": 16},
        {"tp": 4, "layers": 16},
        [1] * 64,
        [16] * 4,
        0,
    ),
    "gqa pp8 tp8 to tp4, 4 heads": (
        {"tp": 8, "pp": 8, "layers": 16, "heads": 4},
        {"tp": 4, "layers": 16, "heads": 4},
        [1] * 64,
        [8] * 4,
        32,
    ),
    "gqa p4 d6, 12 heads": (
        {"tp": 4, "heads": 12},
        {"tp": 6, "heads": 12},
        [2] * 4,
        [1, 2, 1, 1, 2, 1],
        0,
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_B07_the_counts_of_the_design(row: str) -> None:
    """receive_count per source, send_count per destination, and how many are told by notice."""
    ours, theirs, receive, send, notices = ROWS[row]
    plan = plan_of(prefill(**ours), decode(**theirs))
    assert list(plan.receive_counts) == receive
    assert list(plan.send_counts) == send
    assert Counter(kinds(plan))["notice"] == notices


def test_the_uneven_row_names_its_contacts() -> None:
    """p4 to d6 with 12 heads: s0: d0 d1, s1: d1 d2, s2: d3 d4, s3: d4 d5."""
    plan = plan_of(prefill(tp=4, heads=12), decode(tp=6, heads=12))
    met = [[contact.destination for contact in contacts] for contacts in plan.by_source]
    assert met == [[0, 1], [1, 2], [3, 4], [4, 5]]


def test_B07_every_skipped_producer_gets_exactly_one_notice() -> None:
    """MLA p4 to d2: two of four producers are read, each of the four is told once."""
    plan = plan_of(prefill(tp=4, kind="mla"), decode(tp=2, kind="mla"))
    assert [contacts[0].kind for contacts in plan.by_source] == [
        "data",
        "notice",
        "data",
        "notice",
    ]
    assert [len(contacts) for contacts in plan.by_destination] == [2, 2]
    assert all(not contact.slices for contact in plan.contacts if contact.kind == "notice")


@pytest.mark.parametrize("tp", [6, 12])
def test_sizes_that_do_not_divide_the_heads_are_malformed(tp: int) -> None:
    """tp 6 or 12 with 8 heads is no world at all."""
    with pytest.raises(ValueError, match="neither divides"):
        prefill(tp=tp).shape()


@pytest.mark.parametrize("profile", ["sglang", "vllm"])
def test_engines_refuse_sizes_that_do_not_divide(profile: str) -> None:
    """p4 to d6 with 12 heads is planned by native only, never rounded."""
    job = {"heads": 12, "profile": profile}
    judgement = judge(prefill(tp=4, **job).shape(), decode(tp=6, **job).shape())
    assert [ruling.code for ruling in judgement.rulings] == [Code.SIZES_DO_NOT_DIVIDE]
    assert judgement.plan is None


# --- the engines' formulas -----------------------------------------------------------------------


def _grid() -> list[tuple[int, int, int]]:
    sizes = [size for size in range(1, 65) if 64 % size == 0 or size in {3, 6, 12, 24, 48}]
    return [
        (source, destination, heads)
        for source in sizes
        for destination in sizes
        if max(source, destination) % min(source, destination) == 0
        for heads in (2, 4, 8, 12, 64)
        if all(heads % size == 0 or size % heads == 0 for size in (source, destination))
    ]


def sglang_formula(p_tp: int, d_tp: int, rank: int) -> tuple[list[int], int, int]:
    """Return targets, required_dst_info_num and required_prefill_response_num of SGLang (MHA)."""
    if d_tp >= p_tp:
        ratio = d_tp // p_tp
        return [rank // ratio], ratio, 1
    k = p_tp // d_tp
    return list(range(rank * k, (rank + 1) * k)), 1, k


def vllm_formula(p_tp: int, d_tp: int, rank: int) -> tuple[list[int], int]:
    """Return the remote ranks vLLM reads and the consumers it announces (no context parallel)."""
    consumers = max(1, d_tp // p_tp) if d_tp >= p_tp else 1
    if d_tp >= p_tp:
        return [rank // (d_tp // p_tp)], consumers
    k = p_tp // d_tp
    return list(range(rank * k, rank * k + k)), consumers


def test_sglang_plans_equal_sglangs_own_numbers() -> None:
    """Over a grid of tp 1..64 and heads: the same targets, dst and resp on every rank."""
    for p_tp, d_tp, heads in _grid():
        job = {"heads": heads, "profile": "sglang", "layers": 1, "head_dim": 1}
        plan = plan_of(prefill(tp=p_tp, **job), decode(tp=d_tp, **job))
        for rank in range(d_tp):
            targets, dst, resp = sglang_formula(p_tp, d_tp, rank)
            met = [contact.source for contact in plan.by_destination[rank]]
            assert met == targets, (p_tp, d_tp, heads, rank)
            assert plan.send_counts[rank] == resp
            assert {plan.receive_counts[target] for target in targets} == {dst}


def test_vllm_plans_equal_vllms_own_numbers() -> None:
    """The same for vLLM; replicated sources with P > D need the capability."""
    for p_tp, d_tp, heads in _grid():
        job = {"heads": heads, "profile": "vllm", "layers": 1, "head_dim": 1}
        judgement = judge(prefill(tp=p_tp, **job).shape(), decode(tp=d_tp, **job).shape())
        if p_tp > d_tp and p_tp > heads:
            assert [r.code for r in judgement.rulings] == [Code.REPLICATED_SOURCE_UNSUPPORTED]
            job["capabilities"] = ["p_tp_gt_d_tp"]
            judgement = judge(prefill(tp=p_tp, **job).shape(), decode(tp=d_tp, **job).shape())
        plan = judgement.plan
        assert plan is not None, (p_tp, d_tp, heads)
        for rank in range(d_tp):
            remotes, consumers = vllm_formula(p_tp, d_tp, rank)
            assert [contact.source for contact in plan.by_destination[rank]] == remotes
            assert {plan.receive_counts[remote] for remote in remotes} == {consumers}


def test_native_equals_the_engines_where_nothing_is_replicated() -> None:
    """Habits differ only among replicas: with enough heads all profiles plan alike."""
    for p_tp, d_tp, heads in _grid():
        if heads % max(p_tp, d_tp):
            continue
        job = {"heads": heads, "layers": 1, "head_dim": 1}
        native = plan_of(prefill(tp=p_tp, **job), decode(tp=d_tp, **job))
        engine = plan_of(
            prefill(tp=p_tp, profile="sglang", **job), decode(tp=d_tp, profile="sglang", **job)
        )
        assert native.by_source == engine.by_source
        assert native.digest != engine.digest


# --- the oracle ----------------------------------------------------------------------------------

Element = tuple[int, int, int]
"""Head, token of the page, byte of the head."""


def page_of(group: KvGroup, heads: Interval, dim: int) -> list[Element]:
    """Return what each byte of one page of one layer means."""
    width = dim * DTYPE_BYTES[group.dtype]
    if group.layout == "HND":
        order = [(h, t) for h in range(*heads) for t in range(group.page_size)]
    else:
        order = [(h, t) for t in range(group.page_size) for h in range(*heads)]
    return [(head, token, byte) for head, token in order for byte in range(width)]


def written(
    source: WorldShape, destination: WorldShape, plan: Plan
) -> dict[tuple[int, str, str, int], Counter[tuple[int, Element]]]:
    """Apply all slices; return per (slot, group, part, layer) what was written where, how often."""
    found: dict[tuple[int, str, str, int], Counter[tuple[int, Element]]] = defaultdict(Counter)
    for contact in plan.contacts:
        for piece in contact.slices:
            ours = source.ranks[contact.source].group(piece.group)
            theirs = destination.ranks[contact.destination].group(piece.group)
            assert ours is not None
            assert theirs is not None
            dim = ours.head_dim if piece.part == "k" else ours.v_head_dim
            held = heads_of_rank(
                ours.total_heads, source.layout.tp, contact.source % source.layout.tp
            )
            page = page_of(ours, held, dim)
            assert piece.layers >= 1
            for i in range(piece.layers):
                layer = ours.layers[piece.source_layer + i]
                assert theirs.layers[piece.destination_layer + i] == layer
                for j in range(piece.count):
                    begin = piece.source_offset + j * piece.source_stride
                    put = piece.destination_offset + j * piece.destination_stride
                    assert 0 <= begin <= begin + piece.length <= len(page)
                    for byte in range(piece.length):
                        key = (contact.destination, piece.group, piece.part, layer)
                        found[key][put + byte, page[begin + byte]] += 1
    return found


def needed(destination: WorldShape) -> dict[tuple[int, str, str, int], list[Element]]:
    """Return what every byte of every destination page must become."""
    tp = destination.layout.tp
    return {
        (slot, group.name, part, layer): page
        for slot, rank in enumerate(destination.ranks)
        for group in rank.kv
        for part, dim in (("k", group.head_dim), ("v", group.v_head_dim))
        for layer in group.layers
        if (page := page_of(group, heads_of_rank(group.total_heads, tp, slot % tp), dim))
    }


@st.composite
def split(draw: st.DrawFn, layers: int, stages: int) -> list[list[int]]:
    """Draw which layers each pipeline stage holds, in which buffer order; none is left empty."""
    ids = draw(st.permutations(range(layers)))
    cuts = sorted(draw(st.permutations(range(1, layers)))[: stages - 1])
    return [list(ids[a:b]) for a, b in zip([0, *cuts], [*cuts, layers], strict=True)]


@st.composite
def jobs(draw: st.DrawFn, *, native: bool = True) -> tuple[Job, Job]:
    """Draw two compatible jobs of any sizes the profile can plan."""
    kind = draw(st.sampled_from(["gqa", "gqa", "mla"])) if native else "gqa"
    heads = draw(st.integers(1, 12))
    sizes = [size for size in range(1, 13) if heads % size == 0 or size % heads == 0]
    if kind == "mla":
        sizes = list(range(1, 9))
    tp = draw(st.tuples(st.sampled_from(sizes), st.sampled_from(sizes)))
    if not native:
        small = draw(st.sampled_from([s for s in sizes if tp[0] % s == 0]))
        tp = draw(st.sampled_from([(tp[0], small), (small, tp[0])]))
    layers = draw(st.integers(1, 5))
    most = min(3, layers) if native else 1
    stages = draw(st.tuples(st.integers(1, most), st.integers(1, most)))
    same = {
        "kind": kind,
        "heads": heads,
        "head_dim": draw(st.integers(1, 3)),
        "v_head_dim": draw(st.sampled_from([None, 1, 2])),
        "page_size": draw(st.integers(1, 4)),
        "page_layout": draw(st.sampled_from(["HND", "NHD"])),
        "dtype": draw(st.sampled_from(["uint8", "bfloat16"])),
        "profile": "native" if native else draw(st.sampled_from(["sglang", "vllm"])),
        "capabilities": ["p_tp_gt_d_tp"],
        "groups": draw(st.sampled_from([["full"], ["full", "swa"]])),
    }
    source = prefill(tp=tp[0], pp=stages[0], layers=draw(split(layers, stages[0])), **same)
    return source, decode(tp=tp[1], pp=stages[1], layers=draw(split(layers, stages[1])), **same)


@given(jobs())
def test_native_plans_write_every_needed_byte_exactly_once(both: tuple[Job, Job]) -> None:
    """For any sizes: every byte of every page gets its own element, once, and nothing else."""
    note(repr(both))
    source, destination = both[0].shape(), both[1].shape()
    plan = plan_of(*both)
    got = written(source, destination, plan)
    want = needed(destination)
    assert set(got) == set(want)
    for key, page in want.items():
        assert got[key] == Counter(dict.fromkeys(enumerate(page), 1)), key


@given(jobs(native=False))
def test_engine_plans_write_every_needed_byte_and_replicas_agree(both: tuple[Job, Job]) -> None:
    """A byte may have several writers, but all of them write the same element."""
    note(repr(both))
    source, destination = both[0].shape(), both[1].shape()
    got = written(source, destination, plan_of(*both))
    want = needed(destination)
    assert set(got) == set(want)
    for key, page in want.items():
        assert set(got[key]) == set(enumerate(page)), key


@given(jobs())
def test_all_counts_are_those_of_the_one_relation(both: tuple[Job, Job]) -> None:
    """Counts count contacts; every source is told; both orders list the same contacts."""
    plan = plan_of(*both)
    assert len(plan.by_source) == both[0].slots
    assert len(plan.by_destination) == both[1].slots
    for slot, contacts in enumerate(plan.by_source):
        assert {contact.source for contact in contacts} == {slot}
        met = [contact.destination for contact in contacts]
        assert met == sorted(set(met))
        assert plan.receive_counts[slot] == len(met) >= 1
        assert len({contact.kind for contact in contacts}) == 1
    for slot, contacts in enumerate(plan.by_destination):
        assert {contact.destination for contact in contacts} <= {slot}
        data = [contact for contact in contacts if contact.slices]
        assert plan.send_counts[slot] == len({contact.source for contact in data}) >= 1
    again = [c for contacts in plan.by_destination for c in contacts]
    assert sorted(again, key=lambda c: (c.source, c.destination)) == plan.contacts
    assert digest_of(plan) == digest_of(plan_of(*both))


def test_the_plan_does_not_depend_on_dp_or_pool_sizes() -> None:
    """More data-parallel groups or pages change neither contacts nor table digest."""
    one = plan_of(prefill(tp=4), decode(tp=2))
    many = plan_of(prefill(tp=4, dp=3, pages=5), decode(tp=2, dp=5, pages=999))
    assert many == one


def test_the_table_digest_covers_bytes_and_counts() -> None:
    """Another page size, head count or split gives another digest."""
    digests = {
        plan_of(prefill(**job), decode(**job)).digest
        for job in ({}, {"page_size": 4}, {"heads": 4}, {"layers": 5}, {"tp": 2})
    }
    assert len(digests) == 5


def test_layers_are_matched_by_id_and_run_together() -> None:
    """Equal order is one slice a part; a permuted order is as many runs as it needs."""
    straight = plan_of(prefill(layers=[[0, 1, 2, 3]]), decode(layers=[[0, 1, 2, 3]]))
    assert [(s.part, s.layers) for s in straight.contacts[0].slices] == [("k", 4), ("v", 4)]
    mixed = plan_of(prefill(layers=[[2, 3, 0, 1]]), decode(layers=[[0, 1, 2, 3]]))
    runs = [(s.source_layer, s.destination_layer, s.layers) for s in mixed.contacts[0].slices]
    assert runs[:2] == [(0, 2, 2), (2, 0, 2)]
    split_up = plan_of(
        prefill(pp=2, layers=[[0, 2], [1, 3]]), decode(pp=2, layers=[[0, 1], [2, 3]])
    )
    assert [c.kind for c in split_up.contacts] == ["data"] * 4
    assert split_up.contacts[0].slices[0].page_bytes == 1 * 2 * 8 * 4 * 2


def test_a_source_that_holds_no_group_is_told_by_somebody() -> None:
    """A rank without any cache in common still hears that the request is over (contacts exist)."""
    ours = prefill(pp=2, layers=[[0, 1], [2, 3]])
    shape = ours.shape()
    empty = WorldShape(
        role=shape.role,
        layout=shape.layout,
        profile=shape.profile,
        model=shape.model,
        capabilities=shape.capabilities,
        transport=shape.transport,
        ranks=(shape.ranks[0], type(shape.ranks[1])(kv=(), state=())),
        digest=shape.digest,
    )
    target = decode(layers=[[0, 1]]).shape()
    plan = make_plan(empty, target, "native")
    assert plan.receive_counts == (1, 1)
    assert kinds(plan) == ["data", "notice"]


def test_worlds_without_any_cache_still_meet() -> None:
    """No KV group at all: every source is told by one destination, and nobody waits for data."""
    judgement = judge(prefill(tp=4, groups=()).shape(), decode(tp=2, groups=()).shape())
    assert judgement.plan is not None
    assert kinds(judgement.plan) == ["notice"] * 4
    assert judgement.plan.send_counts == (0, 0)


def test_a_source_group_that_nobody_needs_is_told_by_notice() -> None:
    """Layers that touch no destination leave a source without data but not without an end."""
    source, target = prefill(pp=2, layers=[[0, 1], [7, 8]]).shape(), decode(layers=[[0, 1]]).shape()
    relation = relate(source, target, "native")
    assert [edge.source for edge in relation.notices] == [1]
    assert {tuple(edge) for edge in relation.edges()} == {(0, 0), (1, 0)}


def test_a_large_pair_is_planned_fast_and_small() -> None:
    """tp16 pp8 to tp8 of a 61-layer MLA model: a few hundred contacts, one run each."""
    job = {"kind": "mla", "layers": 61}
    plan = plan_of(prefill(tp=16, pp=8, **job), decode(tp=8, **job))
    assert set(plan.receive_counts) == {1}
    assert set(plan.send_counts) == {8}
    assert all(len(contact.slices) <= 1 for contact in plan.contacts)
