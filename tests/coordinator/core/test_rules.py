"""Rules of a pair and of one world: reject, accept, and the legal look-alike of each."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace as changed

from rankgate.coordinator.core.judging import judge
from rankgate.coordinator.core.rules.agreement import check_agreement, check_order
from rankgate.coordinator.core.rules.descriptor import check_descriptor
from rankgate.coordinator.core.verdicts import SideName
from rankgate.proto.descriptor import Coordinates, Descriptor, Layout, StateComponent
from rankgate.proto.findings import Finding, ranks_text
from tests.coordinator.core.harness import Job, codes, decode, prefill, state


def findings(source: Job, destination: Job) -> list[Finding]:
    """Return all findings of a pair with names filled in; a plan exists exactly without errors."""

    def who(side: SideName, slots: tuple[int, ...]) -> str:
        return f"{side} {ranks_text(slots)}"

    judgement = judge(source.shape(), destination.shape())
    found = [ruling.name(who) for ruling in judgement.rulings]
    assert (judgement.plan is None) is any(item.is_error for item in found)
    return found


def slugs(source: Job, destination: Job) -> list[str]:
    """Return the slugs of all findings of a pair."""
    return codes(findings(source, destination))


def job_with(role: str, **fields: Any) -> Job:  # noqa: ANN401 - fields of Job
    """Return a job of a role."""
    return prefill(**fields) if role == "p" else decode(**fields)


# --- pairs ---------------------------------------------------------------------------------------

REJECTED: list[tuple[str, dict[str, Any], dict[str, Any], set[str], tuple[str, ...]]] = [
    (
        "A01 dtype",
        {"dtype": "bfloat16", "page_size": 32},
        {"dtype": "float8_e4m3fn", "page_size": 32},
        {"kv_dtype_mismatch", "kv_item_len_mismatch"},
        ("kv[full].dtype", "bfloat16", "float8_e4m3fn"),
    ),
    (
        "A01 another dtype of the same size",
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
        {"kv_dtype_mismatch"},
        ("kv[full].dtype", "bfloat16", "float16"),
    ),
    (
        "A02 page size",
        {"page_size": 32},
        {"page_size": 64},
        {"page_size_mismatch", "kv_item_len_mismatch"},
        ("kv[full].page_size", "32 (", "64 ("),
    ),
    (
        "A06 total heads",
        {"heads": 4},
        {"heads": 2},
        {"kv_heads_mismatch"},
        ("kv[full].total_heads", "has 4", "has 2"),
    ),
    (
        "head dim",
        {"head_dim": 64},
        {"head_dim": 128},
        {"head_dim_mismatch", "kv_item_len_mismatch"},
        ("kv[full].head_dim", "has 64", "has 128"),
    ),
    (
        "v head dim alone",
        {"v_head_dim": 4},
        {"v_head_dim": 2},
        {"head_dim_mismatch", "kv_item_len_mismatch"},
        ("kv[full].v_head_dim", "has 4", "has 2"),
    ),
    (
        "A16 kernel block of a hybrid",
        {"page_size": 64, "state": [state("MAMBA")]},
        {"page_size": 32, "state": [state("MAMBA")]},
        {"page_size_mismatch", "kv_item_len_mismatch"},
        ("kv[full].page_size", "64 (", "32 ("),
    ),
    (
        "A18 layout",
        {"page_layout": "HND"},
        {"page_layout": "NHD"},
        {"kv_layout_mismatch"},
        ("kv[full].layout", "HND", "NHD"),
    ),
    (
        "A21 gap",
        {"pp": 2, "layers": [[0, 1], [3]]},
        {"layers": [[0, 1, 2, 3]]},
        {"layer_coverage_gap"},
        ("kv[full].layers", "0-1, 3", "0-3", "(layers 2 "),
    ),
    (
        "A21 layers without a place",
        {"layers": [[0, 1, 2, 3, 47]]},
        {"layers": [[0, 1, 2, 3]]},
        {"layer_ids_missing"},
        ("kv[full].layers", "0-3, 47", "(layers 47 "),
    ),
    (
        "A21 overlap",
        {"pp": 2, "layers": [[0, 1], [1, 2, 3]]},
        {"layers": [[0, 1, 2, 3]]},
        {"layer_overlap"},
        ("kv[full].layers", "source rank 0 has 0-1", "source rank 1 has 1-3", "(layers 1 "),
    ),
    (
        "A31 latent against heads",
        {"kind": "mla"},
        {"kind": "gqa", "heads": 1},
        {"kv_kind_mismatch", "head_dim_mismatch", "kv_item_len_mismatch"},
        ("kv[full].kind", "mla", "gqa"),
    ),
    (
        "A13 a draft's cache group on decode only",
        {},
        {"groups": ["full", "draft"]},
        {"kv_group_missing"},
        ("kv[draft]", "only ['full']", "has it"),
    ),
    (
        "a group on prefill only",
        {"groups": ["full", "swa"]},
        {"groups": ["full"]},
        {"kv_group_missing"},
        ("kv[swa]", "only ['full']"),
    ),
    (
        "A34 a component missing",
        {"state": [state("SWA"), state("MAMBA")]},
        {"state": [state("MAMBA")]},
        {"state_component_missing"},
        ("state[SWA]", "2 components ['SWA', 'MAMBA']", "1 components ['MAMBA']"),
    ),
    (
        "a state component missing",
        {"state": [state("SWA"), state("MAMBA"), state("DSA")]},
        {"state": [state("SWA"), state("MAMBA")]},
        {"state_component_missing"},
        ("state[DSA]", "3 components", "2 components"),
    ),
    (
        "state on one side only",
        {},
        {"state": [state("MAMBA"), state("SWA")]},
        {"state_component_missing"},
        ("state[MAMBA]", "0 components []", "2 components"),
    ),
    (
        "another kind of state",
        {"state": [state("MAMBA")]},
        {"state": [state("GDN")]},
        {"state_kind_mismatch"},
        ("state[MAMBA].kind", "has MAMBA", "has GDN"),
    ),
    (
        "A03 state dtype",
        {"state": [state("MAMBA", dtype="bfloat16", size=4096)]},
        {"state": [state("MAMBA", dtype="float32", size=8192)]},
        {"state_dtype_mismatch"},
        ("state[MAMBA].dtype", "bfloat16 (item_lens [4096", "float32 (item_lens [8192"),
    ),
    (
        "state layers",
        {"state": [state("MAMBA", layers=2)]},
        {"state": [state("MAMBA", layers=3)]},
        {"state_layers_mismatch"},
        ("state[MAMBA].layers", "[0, 1]", "[0, 1, 2]"),
    ),
    (
        "profile",
        {"profile": "sglang"},
        {"profile": "vllm"},
        {"profile_mismatch"},
        ("profile", "sglang", "vllm"),
    ),
    (
        "A05 sizes that do not divide, in an engine's profile",
        {"tp": 4, "heads": 12, "profile": "sglang"},
        {"tp": 6, "heads": 12, "profile": "sglang"},
        {"sizes_do_not_divide"},
        ("layout.tp", "have 4", "have 6", "(sglang profile)"),
    ),
    (
        "vLLM replicated source",
        {"tp": 4, "heads": 2, "profile": "vllm"},
        {"tp": 2, "heads": 2, "profile": "vllm"},
        {"replicated_source_unsupported"},
        ("kv[full].total_heads", "tp 4 over 2 KV heads", "tp 2"),
    ),
    (
        "vLLM replicated source with the capability on one side",
        {"tp": 4, "heads": 2, "profile": "vllm", "capabilities": ["p_tp_gt_d_tp"]},
        {"tp": 2, "heads": 2, "profile": "vllm"},
        {"replicated_source_unsupported"},
        ("kv[full].total_heads",),
    ),
    (
        "context parallel",
        {"cp": 2},
        {},
        {"parallelism_unsupported"},
        ("layout.cp", "have 2", "has 1", "(native profile)"),
    ),
    (
        "decode context parallel",
        {"tp": 2, "dcp": 2},
        {"tp": 2, "dcp": 2},
        {"parallelism_unsupported"},
        ("layout.dcp", "have 2"),
    ),
    (
        "pipeline stages in an engine's profile",
        {"pp": 2, "profile": "sglang"},
        {"profile": "sglang"},
        {"parallelism_unsupported"},
        ("layout.pp", "have 2", "(sglang profile)"),
    ),
    (
        "latents in an engine's profile",
        {"kind": "mla", "profile": "vllm"},
        {"kind": "mla", "profile": "vllm"},
        {"parallelism_unsupported"},
        ("kv.kind", "mla", "vllm profile plans gqa only"),
    ),
    (
        "transport",
        {"transport": "zmq"},
        {"transport": "nixl"},
        {"transport_mismatch"},
        ("transport.kind", "zmq", "nixl"),
    ),
]


@pytest.mark.parametrize(
    ("ours", "theirs", "expected", "words"),
    [row[1:] for row in REJECTED],
    ids=[row[0] for row in REJECTED],
)
def test_a_pair_is_rejected_with_field_values_and_ranks(
    ours: dict[str, Any], theirs: dict[str, Any], expected: set[str], words: tuple[str, ...]
) -> None:
    """F09: every finding names field, both values and both sides' ranks."""
    source, destination = prefill(**ours), decode(**theirs)
    found = findings(source, destination)
    assert set(codes(found)) == expected
    for item in found:
        assert item.field in item.message
        assert all(side.who in item.message and side.value in item.message for side in item.sides)
        assert len({side.who for side in item.sides}) == 2
        assert item.hint
    text = " | ".join(item.message for item in found)
    for word in words:
        assert word in text


ACCEPTED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("equal", {}, {}),
    ("A01 fp8 on both sides", {"dtype": "float8_e4m3fn"}, {"dtype": "float8_e4m3fn"}),
    (
        "A03 fp32 state on both",
        {"state": [state("M", dtype="float32")]},
        {"state": [state("M", dtype="float32")]},
    ),
    ("A05 tp2 to tp1 of a GQA model", {"tp": 2}, {"tp": 1}),
    ("A06 two heads over tp 4 against tp 1", {"tp": 4, "heads": 2}, {"heads": 2}),
    ("A09 tp2 to tp4", {"tp": 2}, {"tp": 4}),
    ("A09 tp4 to tp8", {"tp": 4}, {"tp": 8}),
    ("A09 tp8 to tp16 with 8 heads", {"tp": 8}, {"tp": 16}),
    ("A15 pools of other sizes", {"pages": 113}, {"pages": 211}),
    ("A15 the reverse", {"pages": 211}, {"pages": 113}),
    (
        "A16 equal kernel blocks",
        {"page_size": 64, "state": [state("M")]},
        {"page_size": 64, "state": [state("M")]},
    ),
    ("A18 both NHD, sliced", {"page_layout": "NHD", "tp": 2}, {"page_layout": "NHD"}),
    ("A21 stages of a pipeline", {"pp": 2, "layers": [[0, 1], [2, 3]]}, {"layers": [[0, 1, 2, 3]]}),
    ("A21 another order", {"layers": [[3, 1, 2, 0]]}, {"layers": [[0, 1, 2, 3]]}),
    ("A24 pipelined decode", {"pp": 2}, {"pp": 2}),
    ("A31 latents tp4 to tp2", {"tp": 4, "kind": "mla"}, {"tp": 2, "kind": "mla"}),
    ("A31 latents tp3 to tp5", {"tp": 3, "kind": "mla"}, {"tp": 5, "kind": "mla"}),
    ("A31 tp16 to tp16 dp4", {"tp": 16, "kind": "mla"}, {"tp": 4, "dp": 4, "kind": "mla"}),
    (
        "A34 components in another order",
        {"state": [state("SWA"), state("M")]},
        {"state": [state("M"), state("SWA")]},
    ),
    ("A38 tp1 to tp2", {"tp": 1}, {"tp": 2}),
    ("A40 other dp sizes", {"dp": 4}, {"dp": 8}),
    ("sizes that do not divide, native", {"tp": 4, "heads": 12}, {"tp": 6, "heads": 12}),
    ("KV groups in another order", {"groups": ["a", "b"]}, {"groups": ["b", "a"]}),
    ("other hosts", {"host": "a"}, {"host": "b"}),
    (
        "vLLM P < D",
        {"tp": 2, "heads": 2, "profile": "vllm"},
        {"tp": 4, "heads": 2, "profile": "vllm"},
    ),
    ("vLLM P > D without replicas", {"tp": 4, "profile": "vllm"}, {"tp": 2, "profile": "vllm"}),
    ("other capabilities", {"capabilities": ["x"]}, {"capabilities": []}),
]


@pytest.mark.parametrize(
    ("ours", "theirs"), [row[1:] for row in ACCEPTED], ids=[row[0] for row in ACCEPTED]
)
def test_a_legal_look_alike_is_accepted(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """What looks like a mismatch and is none has a plan and no finding at all."""
    assert findings(prefill(**ours), decode(**theirs)) == []


def test_all_findings_are_reported_not_the_first() -> None:
    """Five things wrong are five findings."""
    ours = prefill(dtype="bfloat16", page_size=2, heads=4, page_layout="HND", transport="zmq")
    theirs = decode(dtype="float32", page_size=4, heads=8, page_layout="NHD", transport="nixl")
    assert {
        "kv_dtype_mismatch",
        "page_size_mismatch",
        "kv_heads_mismatch",
        "kv_layout_mismatch",
        "transport_mismatch",
    } <= set(slugs(ours, theirs))


def test_long_lists_of_layers_are_shortened() -> None:
    """A message stays readable when every other layer is missing."""
    (found,) = findings(
        prefill(layers=[list(range(0, 200, 2))]), decode(layers=[list(range(0, 198, 2))])
    )
    assert "…" in found.message
    assert len(found.message) < 400


def test_state_of_ranks_that_hold_none_is_said_of_all_ranks() -> None:
    """A side without the component stands with all its ranks."""
    found = findings(prefill(tp=2), decode(tp=2, state=[state("M"), state("S")]))
    assert all("source ranks 0-1" in item.message for item in found)


# --- one rank by itself --------------------------------------------------------------------------


def one(**fields: Any) -> Descriptor:  # noqa: ANN401 - fields of Descriptor
    """Return the descriptor of rank 0 of a tp2 world with some fields changed."""
    return changed(prefill(tp=2, state=[state("M")]).describe(0), **fields)


def kv(**fields: Any) -> Descriptor:  # noqa: ANN401 - fields of KvGroup
    """Return a descriptor whose one KV group has some fields changed."""
    described = one()
    return changed(described, kv=[changed(described.kv[0], **fields)])


BROKEN: list[tuple[str, Descriptor, list[str], tuple[str, ...]]] = [
    ("RG101", one(world="none"), ["world_name_invalid"], ("world", "'none'")),
    ("RG102 product", one(world_size=3), ["world_size_invalid"], ("world_size", "3", "2 (pp 1")),
    (
        "RG102 rank",
        one(rank=2),
        ["world_size_invalid"],
        ("rank", "2", "allows 0 to 1"),
    ),
    (
        "RG102 too large",
        one(world_size=1 << 17, layout=Layout(tp=1 << 16, dp=2), kv=[]),
        ["world_size_invalid"],
        ("world_size", str(1 << 17), "at most 65536"),
    ),
    (
        "RG103 coordinate",
        one(coordinates=Coordinates(tp=2)),
        ["coordinate_invalid"],
        ("coordinates.tp", "2", "layout.tp is 2"),
    ),
    (
        "RG103 several",
        one(coordinates=Coordinates(pp=1, dp=1, cp=1, dcp=1)),
        ["coordinate_invalid"] * 4,
        ("coordinates.pp", "coordinates.dp", "coordinates.cp", "coordinates.dcp"),
    ),
    (
        "RG103 dcp",
        one(layout=Layout(tp=2, dcp=3)),
        ["coordinate_invalid"],
        ("layout.dcp", "3", "layout.tp 2"),
    ),
    ("RG110", kv(total_heads=3), ["heads_invalid"], ("kv[full].total_heads", "3 over tp_size 2")),
    (
        "A06 RG111 replicated heads counted twice",
        kv(total_heads=16),
        ["heads_inconsistent"],
        ("kv[full].local_heads", "4", "8 (total_heads 16 over tp 2)"),
    ),
    (
        "RG111 a latent with heads",
        kv(kind="mla", v_head_dim=0, v_item_len=0),
        ["heads_inconsistent"],
        ("kv[full].total_heads", "total_heads 8, local_heads 4"),
    ),
    (
        "RG112 K",
        kv(k_item_len=65),
        ["item_len_inconsistent"],
        ("kv[full].k_item_len", "65 bytes", "64 bytes (2 x 4 x 4 x bfloat16)"),
    ),
    ("RG112 V", kv(v_item_len=0), ["item_len_inconsistent"], ("kv[full].v_item_len", "0 bytes")),
    ("RG113 none", kv(layers=[]), ["layer_ids_invalid"], ("kv[full].layers", "an empty list")),
    ("A30 RG113 repeated", kv(layers=[1, 1, 2]), ["layer_ids_invalid"], ("[1] more than once",)),
    (
        "RG113 of a state",
        one(state=[StateComponent(kind="M", dtype="int8", layers=[4, 4], item_lens=[1, 1])]),
        ["layer_ids_invalid"],
        ("state[M].layers", "[4]"),
    ),
    (
        "A34 RG114",
        one(state=[StateComponent(kind="M", dtype="int8", layers=[0, 1], item_lens=[1])]),
        ["lengths_differ"],
        ("state[M].item_lens", "1 for 2 layers"),
    ),
    (
        "RG115 groups",
        one(kv=[prefill(tp=2).describe(0).kv[0]] * 2),
        ["duplicate_component"],
        ("kv[full]", "2 of them"),
    ),
    (
        "RG115 states",
        one(state=[state("M"), state("M")]),
        ["duplicate_component"],
        ("state[M]", "2 of them"),
    ),
    ("RG116", kv(dtype="bf16"), ["dtype_unknown"], ("kv[full].dtype", "'bf16'")),
    (
        "RG116 of a state",
        one(state=[state("M", dtype="fp32")]),
        ["dtype_unknown"],
        ("state[M].dtype", "'fp32'"),
    ),
    ("RG117", one(role="cook"), ["role_invalid"], ("role", "'cook'", "encoder, prefill")),
    ("RG118 profile", one(profile="x"), ["value_invalid"], ("profile", "'x'", "native")),
    ("RG118 kind", kv(kind="mha"), ["value_invalid"], ("kv[full].kind", "'mha'", "gqa, mla")),
    ("RG118 layout", kv(layout="DHN"), ["value_invalid"], ("kv[full].layout", "'DHN'", "HND")),
]


@pytest.mark.parametrize(
    ("descriptor", "expected", "words"),
    [row[1:] for row in BROKEN],
    ids=[row[0] for row in BROKEN],
)
def test_a_descriptor_that_contradicts_itself_is_refused(
    descriptor: Descriptor, expected: list[str], words: tuple[str, ...]
) -> None:
    """Each RG1xx names field and values before anything is compared with a peer."""
    found = check_descriptor(descriptor)
    assert codes(found) == expected
    text = " | ".join(item.message for item in found)
    for word in words:
        assert word in text
    assert all(item.field in item.message for item in found)


@pytest.mark.parametrize("name", ["full", "mla"])
def test_a_sound_descriptor_has_no_finding(name: str) -> None:
    """All ranks of sound jobs pass, whatever their layout."""
    kind = "mla" if name == "mla" else "gqa"
    for job in (
        prefill(tp=4, pp=2, dp=2, kind=kind),
        decode(tp=16, kind=kind),
        decode(cp=2, tp=4, dcp=2, kind=kind),
    ):
        for member in job.members().values():
            assert check_descriptor(member) == []


def test_sizes_beyond_64_bits_are_a_finding_and_not_a_crash() -> None:
    """The largest numbers a descriptor may carry give RG112, never an exception."""
    huge = kv(page_size=1 << 20, local_heads=1 << 16, head_dim=1 << 20, total_heads=1 << 16)
    huge = changed(huge, kv=[changed(huge.kv[0], v_head_dim=1 << 20, dtype="float64")])
    assert "item_len_inconsistent" in codes(check_descriptor(huge))


# --- one world -----------------------------------------------------------------------------------


def test_agreement_of_a_sound_world() -> None:
    """Every rank of a job agrees with every other, in both engines' orders."""
    for job in (prefill(tp=2, pp=2, dp=2), decode(tp=4, state=[state("M")])):
        assert check_agreement(job.members()) == []
        assert list(check_order(job.members())) == []


def test_vllms_numbering_is_usual_too() -> None:
    """dp outside pp is vLLM's order; neither order is RG150."""
    job = prefill(pp=2, dp=2)
    vllm = {
        rank: changed(
            job.describe(rank), rank=rank, coordinates=Coordinates(dp=rank // 2, pp=rank % 2)
        )
        for rank in range(4)
    }
    assert list(check_order(vllm)) == []
    mixed = {rank: vllm[3 - rank] for rank in range(4)}
    (found,) = check_order(mixed)
    assert found.slug == "rank_order_unusual"
    assert not found.is_error


def test_C13_two_ranks_at_one_place_are_named() -> None:
    """Plain data parallelism with dp_rank 0 everywhere: duplicate_coordinate names both."""
    members = prefill(dp=2).members()
    members[1] = changed(members[1], coordinates=members[0].coordinates)
    (found,) = check_agreement(members)
    assert found.slug == "duplicate_coordinate"
    assert "p rank 0 on host" in found.message
    assert "p rank 1 on host" in found.message
    assert "pp 0, dp 0, cp 0, tp 0" in found.message


DEVIATIONS: list[tuple[str, dict[str, Any]]] = [
    ("role", {"role": "decode"}),
    ("group", {"group": "x"}),
    ("profile", {"profile": "vllm"}),
    ("model.name", {"model": "other"}),
    ("capabilities", {"capabilities": ["x"]}),
    ("transport.kind", {"transport": "nixl"}),
    ("kv[full].dtype", {"dtype": "float16"}),
    ("kv[full].layout", {"page_layout": "NHD"}),
    ("kv[full].total_heads", {"heads": 16}),
    ("kv[full].page_size", {"page_size": 4}),
    ("kv[full].layers", {"layers": 3}),
    ("kv", {"groups": ["full", "swa"]}),
    ("state", {"state": [state("M")]}),
]


@pytest.mark.parametrize(("field", "change"), DEVIATIONS, ids=[row[0] for row in DEVIATIONS])
def test_who_deviates_is_said(field: str, change: dict[str, Any]) -> None:
    """'ranks 0-6' say this, 'rank 7' says that."""
    members = prefill(tp=8).members()
    members[7] = prefill(tp=8).but(**change).describe(7)
    found = {item.field: item for item in check_agreement(members)}
    assert field in found
    assert found[field].slug == "ranks_disagree"
    assert "ranks 0-6" in found[field].message
    assert "rank 7" in found[field].message


def test_deviations_inside_states_are_found() -> None:
    """dtype, layers and lengths of one state component must agree within a stage."""
    members = prefill(tp=2, state=[state("M")]).members()
    other = StateComponent(kind="M", dtype="float32", layers=[0], item_lens=[9])
    members[1] = changed(members[1], state=[other])
    fields = {item.field for item in check_agreement(members)}
    assert fields == {"state[M].dtype", "state[M].layers", "state[M].item_lens"}


def test_another_layout_and_size_are_found_and_long_values_are_cut() -> None:
    """Sizes are compared one by one; a long list is shown shortened."""
    members = prefill(tp=2, layers=200).members()
    members[1] = changed(members[1], layout=Layout(tp=4, dp=2), world_size=8)
    members[1] = changed(members[1], kv=[changed(members[1].kv[0], layers=list(range(1, 201)))])
    found = {item.field: item for item in check_agreement(members)}
    assert {"world_size", "layout.tp", "layout.dp", "kv[full].layers"} == set(found)
    assert "characters)" in found["kv[full].layers"].message
    assert len(found["kv[full].layers"].message) < 500


def test_stages_may_hold_other_layers_and_groups() -> None:
    """What differs between pipeline stages is no disagreement."""
    members = prefill(pp=2, layers=[[0, 1, 2], [3]]).members()
    last = members[1]
    members[1] = changed(last, kv=[*last.kv, changed(last.kv[0], name="draft", layers=[99])])
    assert check_agreement(members) == []
