"""Findings and codes: stable, in their families, and always with field and values (F09)."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankgate.proto.codec import decode, encode
from rankgate.proto.codes import BY_ID, Code, Severity
from rankgate.proto.findings import (
    Finding,
    Side,
    finding,
    has_error,
    ranks_text,
    world_ranks,
)
from rankgate.proto.limits import MAX_NAME, MAX_TEXT
from rankgate.proto.messages import Rejected

FAMILIES = {
    "RG1": "WORLD RANK COORDINATE DUPLICATE HEADS ITEM LAYER LENGTHS DTYPE ROLE VALUE RANKS",
    "RG2": "WIRE HEADER BODY FIELD KIND TOO NO",
    "RG4": "KV PAGE HEAD LAYER",
    "RG5": "STATE",
    "RG6": "RECEIVE SIZES REPLICATED PROFILE PARALLELISM",
    "RG8": "TRANSPORT IDENTITY METADATA LINK",
    "RG9": (
        "REQUEST PAIR CONFLICTING STALE DP NOT TRANSFER GRANT PAGES RANGE STAGING BUSY SOURCE"
        " DESTINATION ABORTED EXPIRED TRANSPORT WORLD"
    ),
}


@pytest.mark.parametrize("code", list(Code), ids=lambda code: code.slug)
def test_F09_every_code_is_documented_and_its_message_says_everything(code: Code) -> None:
    """Id, slug, title, hint; and the message contains the field path and both values."""
    assert re.fullmatch(r"RG[1-9]\d\d", code.id)
    assert re.fullmatch(r"[a-z][a-z0-9_]*", code.slug)
    assert len(code.slug) <= MAX_NAME
    assert code.title
    assert not code.title.endswith(".")
    assert code.hint.endswith((".", ").")) or code.hint[-1] == "."
    assert code.severity in set(Severity)
    found = finding(
        code, "kv[full].dtype", Side("prefill p rank 0", "a-value"), Side("decode d", "b-value")
    )
    for word in (
        "kv[full].dtype",
        "a-value",
        "b-value",
        "prefill p rank 0",
        "decode d",
        code.title,
    ):
        assert word in found.message
    assert (found.code, found.slug, found.hint) == (code.id, code.slug, code.hint)
    assert found.retryable is code.retryable
    assert found.is_error is (code.severity is Severity.ERROR)


def test_codes_are_unique_and_in_their_families() -> None:
    """One id a code, one code an id; first words belong to the family of the hundred."""
    assert len({code.id for code in Code}) == len(list(Code)) == len(BY_ID)
    assert all(BY_ID[code.id] is code for code in Code)
    for code in Code:
        assert code.name.split("_")[0] in FAMILIES[code.id[:3]].split(), code


def test_a_code_never_changes_its_number() -> None:
    """Numbers that were given out stay: scripts of operators rely on them."""
    fixed = {
        "RG101": "world_name_invalid",
        "RG105": "duplicate_rank",
        "RG107": "ranks_disagree",
        "RG108": "world_in_use",
        "RG201": "wire_version",
        "RG204": "field_invalid",
        "RG412": "kv_dtype_mismatch",
        "RG413": "page_size_mismatch",
        "RG510": "state_component_missing",
        "RG601": "receive_count_mismatch",
        "RG902": "pair_not_ready",
        "RG904": "stale_epoch",
        "RG923": "expired",
    }
    assert {code: BY_ID[code].slug for code in fixed} == fixed


def test_detail_and_hint_can_be_given() -> None:
    """Without sides the detail stands alone; a hint of one's own replaces the code's."""
    bare = finding(Code.BUSY, "transfers")
    assert bare.message == f"{Code.BUSY.title}: transfers"
    said = finding(Code.BUSY, "transfers", detail="so much", hint="do that")
    assert said.message == f"{Code.BUSY.title}: transfers: so much"
    assert said.hint == "do that"


def test_has_error_looks_at_severity() -> None:
    """A warning refuses nothing."""
    warning = finding(Code.RANK_ORDER_UNUSUAL, "coordinates")
    assert not has_error([])
    assert not has_error([warning])
    assert has_error([warning, finding(Code.BUSY, "x")])


@given(st.sets(st.integers(0, 40), min_size=1))
def test_ranks_are_written_as_people_write_them(ranks: set[int]) -> None:
    """What is written names just these ranks, in runs, once each."""
    text = ranks_text(ranks)
    word, _, rest = text.partition(" ")
    assert word == ("rank" if len(ranks) == 1 else "ranks")
    back: list[int] = []
    for run in rest.split(", "):
        first, _, last = run.partition("-")
        back += range(int(first), int(last or first) + 1)
    assert back == sorted(ranks)
    assert ranks_text([*ranks, *ranks]) == text


def test_ranks_of_a_world() -> None:
    """Role, name and ranks."""
    assert ranks_text([7]) == "rank 7"
    assert ranks_text(range(7)) == "ranks 0-6"
    assert world_ranks("decode", "d0", [0, 1, 2, 3, 9]) == "decode d0 ranks 0-3, 9"


@given(
    st.lists(st.tuples(st.text(max_size=6000), st.text(max_size=6000)), max_size=3),
    st.integers(0, 50),
    st.text(max_size=6000),
    st.text(max_size=9000),
)
def test_a_finding_always_fits_the_wire(
    sides: list[tuple[str, str]], times: int, field: str, detail: str
) -> None:
    """However much a world says of itself, the finding about it can be read by every peer."""
    many = [Side(who, value) for who, value in sides] * times
    found = finding(Code.RANKS_DISAGREE, field, *many, detail=detail, hint=detail)
    assert decode(encode(Rejected(findings=[found]), 1))[1] == Rejected(findings=[found])
    assert len(found.message) <= MAX_TEXT
    for side in found.sides:
        assert side.value in found.message
    if len(many) > len(found.sides):
        assert f"and {len(many) - len(found.sides)} more" in found.message


def test_a_refusal_is_retryable_only_if_all_its_findings_are() -> None:
    """One lasting reason is enough; no reason at all is not retryable."""
    busy, wrong = finding(Code.BUSY, "x"), finding(Code.ROLE_INVALID, "role")
    assert Rejected(findings=[busy]).retryable
    assert not Rejected(findings=[busy, wrong]).retryable
    assert not Rejected(findings=[]).retryable
    assert isinstance(busy, Finding)
