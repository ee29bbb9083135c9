"""The landing table: pages have one owner, a transfer ends once, nothing old is applied."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rankgate.agents.events import Arrived, Outcome
from rankgate.agents.landing import LANDING_TABLE, Landing, LandingState, LandingTable, check_pages
from rankgate.proto.codes import Code
from rankgate.proto.findings import Finding, Side, finding
from rankgate.proto.messages import Chunk, OutcomeItem
from tests.agents.pairs import EPOCHS, grant_of, pair_of, sealed

WHY = finding(Code.ABORTED, "transfer", Side("a test", "x"))
UNTIL = 11_000


def opened(
    table: LandingTable, pages: list[int], request: str = "r", transfer: int = 7, sources: int = 2
) -> Landing:
    """Open a request and give it its grant."""
    pair = pair_of(["data"] * sources, sending=False)
    landing = table.ask(request, 0, pair, {"full": pages})
    assert isinstance(landing, Landing), landing
    grant = grant_of(transfer, request)
    assert table.granted(landing, grant, sealed(transfer, request), UNTIL) == list(range(sources))
    return landing


def table_of(pool: int = 64) -> LandingTable:
    """Return a table over one pool."""
    return LandingTable({"full": pool})


def chunk(sequence: int = 0, total: int = 1, pages: int = 3, transfer: int = 7) -> Chunk:
    """Return a chunk of whole pages of both layers."""
    return Chunk(
        transfer=transfer,
        sequence=sequence,
        total=total,
        slice=0,
        layer=0,
        layers=2,
        first=0,
        pages=pages,
    )


def slug(found: Landing | Finding) -> str:
    """Return the slug of a refusal."""
    assert isinstance(found, Finding), found
    return found.slug


def outcome_item(outcome: str, transfer: int = 7, request: str = "r") -> OutcomeItem:
    """Return an outcome of the daemon."""
    return OutcomeItem(
        transfer=transfer,
        request=request,
        source_epoch=EPOCHS[0],
        destination_epoch=EPOCHS[1],
        outcome=outcome,
    )


def test_pages_stay_owned_after_an_abort_until_the_sources_have_drained() -> None:
    """A opens 14..44 and is aborted; B on 1..32 is refused, naming them; after Drained it may."""
    table = table_of()
    opened(table, list(range(14, 45)))
    table.aborting(7, WHY)
    pair = pair_of(["data"] * 2, sending=False)
    refused = table.ask("b", 0, pair, {"full": list(range(1, 33))})
    assert slug(refused) == "range_busy"
    assert isinstance(refused, Finding)
    assert "14" in refused.message
    assert sorted(rank for _, rank in table.drains) == [0, 1]
    table.drained(EPOCHS, 0, 7)
    assert slug(table.ask("b", 0, pair, {"full": list(range(1, 33))})) == "range_busy"
    table.drained(EPOCHS, 1, 7)
    assert isinstance(table.ask("b", 0, pair, {"full": list(range(1, 33))}), Landing)


def test_without_an_answer_pages_are_free_once_the_grant_has_certainly_ended() -> None:
    """Source dead, no Drained: reclaimed at the deadline, a late answer is harmless (B12)."""
    table = table_of()
    opened(table, [1, 2])
    table.aborting(7, WHY)
    pair = pair_of(["data"], sending=False)
    table.tick(UNTIL)
    assert slug(table.ask("b", 0, pair, {"full": [2]})) == "range_busy"
    assert table.next_deadline() == UNTIL
    table.tick(UNTIL + 1)
    assert isinstance(table.ask("b", 0, pair, {"full": [2]}), Landing)
    table.drained(EPOCHS, 0, 7)
    table.drained(EPOCHS, 1, 7)


def test_a_grant_that_ends_without_all_data_ends_this_rank_failed_as_expired() -> None:
    """Expiry is said to the daemon as what it is (B09, B22)."""
    table = table_of()
    opened(table, [1])
    table.tick(UNTIL + 1)
    (ended,) = table.ended
    assert ended.outcome == "failed"
    assert ended.finding is not None
    assert ended.finding.slug == "expired"


def test_a_rank_that_nobody_will_tell_ends_its_wait_itself() -> None:
    """The session that would have heard the outcome is gone: expired, once, at the grant's end."""
    table = table_of()
    opened(table, [1])
    table.deafen()
    table.tick(UNTIL + 1)
    table.tick(UNTIL + 9)
    assert [event.outcome for event in table.events if isinstance(event, Outcome)] == ["expired"]
    assert not table.by_transfer


def test_pages_outside_the_pool_or_named_twice_or_of_no_group_are_refused() -> None:
    """pages_invalid says which page and why."""
    table, pair = table_of(pool=8), pair_of(["data"], sending=False)
    for pages, word in (({"full": [8]}, "8"), ({"full": [1, 2, 1]}, "1"), ({"x": [1]}, "x")):
        refused = table.ask("r", 0, pair, pages)
        assert slug(refused) == "pages_invalid"
        assert isinstance(refused, Finding)
        assert word in refused.message
    assert not table.landings


def test_a_denied_open_gives_its_pages_back_at_once() -> None:
    """No source ever heard of it."""
    table, pair = table_of(), pair_of(["data"], sending=False)
    landing = table.ask("r", 0, pair, {"full": [1]})
    assert isinstance(landing, Landing)
    table.denied(landing)
    assert isinstance(table.ask("s", 0, pair, {"full": [1]}), Landing)


def test_arrived_when_all_shares_are_complete_and_ends_once() -> None:
    """Duplicates are dropped; the outcome comes later and is an event of its own."""
    table = table_of()
    landing = opened(table, [1, 2, 3])
    for rank in (0, 0, 1):
        if table.place(EPOCHS, rank, chunk()) is not None:
            table.took(EPOCHS, rank, chunk())
    assert table.events == [Arrived("r", 7)]
    assert [ended.outcome for ended in table.ended] == ["delivered"]
    assert landing.state is LandingState.DRAINED
    table.outcome(outcome_item("delivered"))
    table.outcome(outcome_item("delivered"))
    assert table.events[1:] == [Outcome("r", 7, "delivered")]
    assert not table.by_transfer


def test_a_chunk_outside_the_plan_or_the_pages_fails_the_transfer_and_is_not_applied() -> None:
    """transport_failed names what came and what was planned."""
    for wrong in (
        chunk(pages=4),
        Chunk(transfer=7, sequence=0, total=1, slice=1, layers=1, pages=1),
        Chunk(transfer=7, sequence=0, total=1, layer=1, layers=2, pages=1),
    ):
        table = table_of()
        opened(table, [1, 2, 3])
        assert table.place(EPOCHS, 0, wrong) is None
        (ended,) = table.ended
        assert ended.finding is not None
        assert ended.finding.slug == "transport_failed"


def test_a_chunk_of_another_length_fails_the_transfer_with_both_sizes() -> None:
    """A frame that is not exactly what slice and counts give is an error, never a partial write."""
    table = table_of()
    opened(table, [1, 2, 3])
    table.wrong_size(EPOCHS, 0, chunk(), 100, 384)
    (ended,) = table.ended
    assert ended.finding is not None
    assert ended.finding.slug == "transport_failed"
    assert "100" in ended.finding.message
    assert "384" in ended.finding.message


def test_chunks_of_unknown_ended_or_foreign_transfers_are_dropped() -> None:
    """A late writer is not applied, whatever it carries (B16)."""
    table = table_of()
    opened(table, [1, 2, 3])
    assert table.place(EPOCHS, 0, chunk(transfer=8)) is None
    assert table.place((1, 2), 0, chunk()) is None
    assert table.place(EPOCHS, 9, chunk()) is None
    table.aborting(7, WHY)
    assert table.place(EPOCHS, 0, chunk()) is None
    assert len(table.ended) == 1


def test_a_lost_source_fails_what_is_incomplete_of_it_alone() -> None:
    """Source 0 was complete: its loss changes nothing; source 1 was not: source_lost."""
    table = table_of()
    landing = opened(table, [1, 2, 3])
    table.place(EPOCHS, 0, chunk())
    table.took(EPOCHS, 0, chunk())
    table.source_lost(EPOCHS, 0, "its connection ended")
    assert not table.ended
    table.source_lost(EPOCHS, 1, "its connection ended")
    (ended,) = table.ended
    assert ended.finding is not None
    assert ended.finding.slug == "source_lost"
    assert landing.state is LandingState.DRAINED


def test_an_outcome_that_comes_before_the_data_ends_it_without_another_word() -> None:
    """The daemon expired it: nothing to say any more, but the pages wait for Drained."""
    table = table_of()
    landing = opened(table, [1, 2, 3])
    table.outcome(outcome_item("expired"))
    assert table.ended == []
    assert len(table._owner) == 3
    for rank in (0, 1):
        table.drained(EPOCHS, rank, 7)
    assert landing.state is LandingState.DRAINED
    assert not table.by_transfer


STEPS = st.sampled_from(
    ["chunk0", "chunk1", "lost0", "lost1", "fail0", "abort", "drained0", "drained1", "outcome"]
)


@given(steps=st.lists(STEPS, max_size=20), outcome=st.sampled_from(["delivered", "failed"]))
def test_in_any_order_a_landing_ends_once_and_gives_every_page_back(
    steps: list[str], outcome: str
) -> None:
    """One end at most, one outcome, one Arrived at most; after the grant no page is owned."""
    table = table_of()
    landing = opened(table, [1, 2, 3])
    for step in steps:
        before = landing.state
        rank = int(step[-1]) if step[-1].isdigit() else 0
        match step.rstrip("01"):
            case "chunk":
                if table.place(EPOCHS, rank, chunk()) is not None:
                    assert before is LandingState.OPEN
                    table.took(EPOCHS, rank, chunk())
            case "lost":
                table.source_lost(EPOCHS, rank, "x")
            case "fail":
                table.source_failed(EPOCHS, rank, 7, WHY)
            case "abort":
                table.aborting(7, WHY)
            case "drained":
                table.drained(EPOCHS, rank, 7)
            case "outcome":
                table.outcome(outcome_item(outcome))
        owned = len(table._owner)
        assert owned == (0 if landing.state is LandingState.DRAINED else 3)
        assert len(table.ended) <= 1
    table.outcome(outcome_item(outcome))
    table.tick(UNTIL + 1)
    assert table._owner == {}
    assert table.landings == {}
    assert table.by_transfer == {}
    assert sum(isinstance(event, Arrived) for event in table.events) <= 1
    assert sum(isinstance(event, Outcome) for event in table.events) == 1


def test_the_table_of_changes_ends_where_pages_are_free() -> None:
    """Every state leads to drained, which leads nowhere."""
    assert LANDING_TABLE[LandingState.DRAINED] == frozenset()
    assert set(LANDING_TABLE) == set(LandingState)


def test_a_share_with_a_hole_is_never_called_arrived() -> None:
    """The same range under two numbers, or another total: both ends' cuts are named instead."""
    for wrong in (chunk(0, 2), chunk(1, 2), chunk(1, 1), chunk(pages=2)):
        table = table_of()
        opened(table, [1, 2, 3], sources=1)
        assert table.place(EPOCHS, 0, wrong) is None
        (ended,) = table.ended
        assert ended.finding is not None
        assert ended.finding.slug == "transport_failed"
        assert "pages 0+3 of 1" in ended.finding.message or wrong.sequence
        assert not table.events


def test_a_share_without_data_is_one_chunk_without_frames() -> None:
    """It is owed all the same; a chunk that names pages is not it."""
    table = table_of()
    landing = opened(table, [], sources=1)
    empty = Chunk(transfer=7, sequence=0, total=1)
    assert table.place(EPOCHS, 0, empty) is None
    assert landing.state is LandingState.OPEN
    table.took(EPOCHS, 0, empty)
    assert table.events == [Arrived("r", 7)]
    table = table_of()
    opened(table, [], sources=1)
    assert table.place(EPOCHS, 0, chunk(pages=1)) is None
    assert len(table.ended) == 1


def test_what_another_pair_says_of_a_transfer_is_ignored() -> None:
    """Sizes, chunks and drains count only over the links of the transfer's own epochs."""
    table = table_of()
    opened(table, [1, 2, 3], sources=1)
    table.took((1, 2), 0, chunk())
    table.wrong_size((1, 2), 0, chunk(), 1, 2)
    assert not table.ended
    table.aborting(7, WHY)
    table.drained((1, 2), 0, 7)
    assert len(table._owner) == 3


def test_a_renewed_grant_is_presented_again_where_data_is_still_owed() -> None:
    """Source 0 has delivered; source 1 is shown the new grant; the old one again is nothing."""
    table = table_of()
    landing = opened(table, [1, 2, 3])
    table.place(EPOCHS, 0, chunk())
    table.took(EPOCHS, 0, chunk())
    renewed = sealed(issued=9000)
    assert table.granted(landing, grant_of(issued=9000), renewed, UNTIL + 8000) == [1]
    assert table.granted(landing, grant_of(), sealed(), UNTIL) == []
    assert (landing.sealed, landing.until) == (renewed, UNTIL + 8000)


def test_another_clock_ends_every_landing_at_once_and_once() -> None:
    """Open, or arrived and waiting for the outcome: expired, with a finding, no page held."""
    table = table_of()
    opened(table, [1, 2, 3], sources=1)
    opened(table, [4, 5, 6], "s", 8, sources=1)
    table.place(EPOCHS, 0, chunk(transfer=8))
    table.took(EPOCHS, 0, chunk(transfer=8))
    table.void()
    table.void()
    outcomes = [event for event in table.events if isinstance(event, Outcome)]
    assert [(one.request, one.outcome) for one in outcomes] == [("r", "expired"), ("s", "expired")]
    assert all(one.finding is not None for one in outcomes)
    assert (table._owner, table.landings, table.by_transfer) == ({}, {}, {})
    assert table.next_deadline() is None


def test_a_long_list_of_pages_with_one_twice_is_found_in_no_time() -> None:
    """The check is linear: it runs on the engine's own thread."""
    assert "page 32766 stands more than once" in check_pages([*range(32_767), 32_766], 33_000)
