"""The source's ledger: two holders, one release, typed refusals before any byte moves."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankgate.agents.events import Released, Wanted
from rankgate.agents.ledger import MAX_PARKED, Ledger, Staged
from rankgate.agents.linking import PairLinks
from rankgate.proto.codes import Code
from rankgate.proto.findings import Finding, Side, finding
from tests.agents.pairs import EPOCHS, grant_of, pair_of, sealed
from tests.coordinator.core.harness import id16

PAGES = {"full": [4, 5, 6]}
COUNTS = {"full": 3}
UPPER = 2000


def ledger_with(request: str = "r", *, until: int = 60_000) -> Ledger:
    """Return a ledger with one staged request."""
    ledger = Ledger(1000, max_staged=100)
    assert ledger.stage(request, PAGES, 192, until, 0) is None
    return ledger


def present(ledger: Ledger, pair: PairLinks, rank: int, grant: bytes = b"") -> tuple[str, str]:
    """Present a grant; return status and the slug of the refusal."""
    status, _, found = ledger.present(pair, rank, grant or sealed(), COUNTS, UPPER, 0)
    return status, found.slug if found else ""


def released(ledger: Ledger) -> list[Released]:
    """Return the releases so far."""
    return [event for event in ledger.events if isinstance(event, Released)]


# --- staging ----------------------------------------------------------------------------------


def test_staging_is_bounded_and_room_comes_back() -> None:
    """Capacity 3: the 4th is staging_full; after one release it is taken (B18)."""
    ledger = Ledger(1000, max_staged=3)
    for index in range(3):
        assert ledger.stage(f"r{index}", PAGES, 10, 100, 0) is None
    found = ledger.stage("r3", PAGES, 10, 100, 0)
    assert found is not None
    assert found.slug == "staging_full"
    assert "30 bytes" in found.message
    ledger.withdraw("r0", "aborted")
    assert ledger.stage("r3", PAGES, 10, 100, 0) is None


def test_an_equal_repeat_is_the_same_and_another_is_a_conflict() -> None:
    """Four equal stages make one record; other pages are refused and change nothing (B03)."""
    ledger = ledger_with()
    for _ in range(3):
        assert ledger.stage("r", PAGES, 192, 60_000, 0) is None
    found = ledger.stage("r", {"full": [4, 5]}, 128, 60_000, 0)
    assert found is not None
    assert found.slug == "conflicting_stage"
    assert list(ledger.staged["r"].pages["full"]) == PAGES["full"]


def test_what_nobody_comes_for_is_given_back_as_expired() -> None:
    """Expiry is a reason of its own, with nobody counted (B09)."""
    ledger = ledger_with(until=500)
    ledger.tick(499)
    assert not released(ledger)
    assert ledger.next_deadline() == 500
    ledger.tick(500)
    assert released(ledger) == [Released("r", "expired", 0, 0)]


# --- counting ---------------------------------------------------------------------------------


def test_a_repeated_end_is_not_another_receiver() -> None:
    """N=4: 0, 1, 1, 1 is still 2 of 4; 2 and 3 release; a fifth is harmless (B02)."""
    ledger, pair = ledger_with(), pair_of(["data"] * 4, sending=True)
    for rank in range(4):
        assert present(ledger, pair, rank) == ("accepted", "")
    for rank in (0, 1, 1, 1):
        assert ledger.peer_end(pair, rank, sealed(), 0) == (7, None)
    assert not released(ledger)
    for rank in (2, 3, 1):
        assert ledger.peer_end(pair, rank, sealed(), 0) == (7, None)
    assert released(ledger) == [Released("r", "delivered", 4, 4)]


def test_one_failed_end_makes_the_whole_a_failure() -> None:
    """All accounted for with one failure: released as failed, never as delivered (B11)."""
    ledger, pair = ledger_with(), pair_of(["data"] * 3, sending=True)
    for rank, outcome in ((0, "delivered"), (1, "failed"), (2, "delivered")):
        present(ledger, pair, rank)
        ledger.peer_end(pair, rank, sealed(), 0, outcome)
    assert released(ledger) == [Released("r", "failed", 3, 3)]


def test_a_notice_contact_is_counted_though_it_never_presents() -> None:
    """Data from one, notice from another: both must end (B07)."""
    ledger, pair = ledger_with(), pair_of(["data", "notice"], sending=True)
    assert present(ledger, pair, 0) == ("accepted", "")
    assert present(ledger, pair, 1) == ("refused", "not_in_scope")
    ledger.peer_end(pair, 0, sealed(), 0)
    assert not released(ledger)
    ledger.peer_end(pair, 1, sealed(), 0)
    assert released(ledger) == [Released("r", "delivered", 2, 2)]


def test_an_end_before_staging_is_remembered() -> None:
    """A source that only gets a notice may stage after it; it then releases at once (B07)."""
    ledger, pair = Ledger(1000), pair_of(["notice"], sending=True)
    assert ledger.peer_end(pair, 0, sealed(), 0) == (7, None)
    ledger.stage("r", PAGES, 192, 60_000, 0)
    assert released(ledger) == [Released("r", "delivered", 1, 1)]


def test_a_delivery_before_staging_releases_at_once() -> None:
    """The outcome may even be named before an unread source has staged."""
    ledger, pair = Ledger(1000), pair_of(["notice"], sending=True)
    ledger.peer_end(pair, 0, sealed(), 0)
    ledger.outcome(7, "r", "delivered", 0)
    ledger.stage("r", PAGES, 192, 60_000, 0)
    (event,) = released(ledger)
    assert event.reason == "delivered"
    assert not ledger.staged


def test_a_stranger_is_not_counted() -> None:
    """An end from a rank that is no contact, or for another scope, is not_in_scope."""
    ledger, pair = ledger_with(), pair_of(["data"], sending=True)
    for rank, grant in ((9, sealed()), (0, sealed(destination_dp=1)), (0, sealed(source_dp=1))):
        _, found = ledger.peer_end(pair, rank, grant, 0)
        assert found is not None
        assert found.slug == "not_in_scope"
    assert not released(ledger)


# --- the transport as holder --------------------------------------------------------------------


@pytest.mark.parametrize("outcome", ["delivered", "failed", "expired", "aborted"])
def test_no_outcome_releases_memory_that_is_still_read(outcome: str) -> None:
    """Contacts are done, the transport is not: released only when its operation is seen done."""
    ledger, pair = ledger_with(), pair_of(["data"], sending=True)
    present(ledger, pair, 0)
    staged = ledger.staged["r"]
    ledger.operation_started(staged)
    ledger.outcome(7, "r", outcome, 0)
    assert not released(ledger)
    assert "r" in ledger.staged
    ledger.operation_done(staged)
    assert [event.reason for event in released(ledger)] == [outcome]


def test_an_abort_after_a_grant_does_not_free() -> None:
    """Withdrawing what is promised changes nothing; what is not promised goes at once (B15)."""
    ledger, pair = ledger_with(), pair_of(["data"], sending=True)
    present(ledger, pair, 0)
    ledger.withdraw("r", "aborted")
    assert not released(ledger)
    ledger.peer_end(pair, 0, sealed(), 0)
    assert len(released(ledger)) == 1
    other = ledger_with("s")
    other.withdraw("s", "aborted")
    assert [event.reason for event in released(other)] == ["aborted"]


# --- presenting ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grant", "slug"),
    [
        (b"x" * 40, "grant_invalid"),
        (sealed()[:-1] + b"!", "grant_invalid"),
        (sealed(source_epoch=2), "stale_epoch"),
        (sealed(ttl=900), "grant_expired"),
        (sealed(destination_dp=1), "not_in_scope"),
    ],
)
def test_a_grant_that_is_not_good_is_refused_before_any_byte(grant: bytes, slug: str) -> None:
    """Seal, epochs, scope and age are checked, in words for people (B14)."""
    ledger, pair = ledger_with(), pair_of(["data"], sending=True)
    assert present(ledger, pair, 0, grant) == ("refused", slug)
    assert not ledger.sendings
    assert ledger.staged["r"].transfer == 0


def test_other_page_counts_are_refused_with_both_numbers() -> None:
    """Three staged, two ready: pages_invalid before any byte moves."""
    ledger, pair = ledger_with(), pair_of(["data"], sending=True)
    status, _, found = ledger.present(pair, 0, sealed(), {"full": 2}, UPPER, 0)
    assert status == "refused"
    assert isinstance(found, Finding)
    assert {side.value for side in found.sides} == {"3 pages", "2 pages"}
    assert not ledger.sendings


def test_no_operation_may_start_that_could_outlive_the_grant() -> None:
    """A share stops max_op before the grant's end, by the latest reckoning of the clock."""
    ledger, pair = ledger_with(), pair_of(["data"], sending=True)
    ledger.present(pair, 0, sealed(), COUNTS, UPPER, 50)
    (sending,) = ledger.sendings
    assert sending.stop == 50 + (1000 + 10_000 - UPPER) - 1000


def test_a_presentation_before_staging_waits_and_is_wanted_once() -> None:
    """Parked for each destination, shown once; served when staged."""
    ledger, pair = Ledger(1000), pair_of(["data", "data"], sending=True)
    assert present(ledger, pair, 0) == ("parked", "")
    assert present(ledger, pair, 1) == ("parked", "")
    assert present(ledger, pair, 1) == ("parked", "")
    assert ledger.events == [Wanted("r")]
    ledger.stage("r", PAGES, 192, 60_000, 0)
    assert sorted(sending.rank for sending in ledger.sendings) == [0, 1]


def test_what_is_never_staged_fails_at_the_grants_end() -> None:
    """not_staged goes to the destination; the parking place is free again (B11)."""
    ledger, pair = Ledger(1000), pair_of(["data"], sending=True)
    present(ledger, pair, 0)
    due = ledger.next_deadline()
    assert due == 1000 + 10_000 - UPPER
    ledger.tick(due)
    ((epochs, rank, transfer, found),) = ledger.failures
    assert (epochs, rank, transfer, found.slug) == (EPOCHS, 0, 7, "not_staged")
    assert ledger.next_deadline() is None


def test_parking_is_bounded() -> None:
    """Beyond the bound a presentation is refused, retryable."""
    ledger, pair = Ledger(1000), pair_of(["data"], sending=True)
    for transfer in range(1, MAX_PARKED + 1):
        assert present(ledger, pair, 0, sealed(transfer, f"r{transfer}"))[0] == "parked"
    assert present(ledger, pair, 0, sealed(MAX_PARKED + 1, "one more")) == (
        "refused",
        "staging_full",
    )


def test_a_later_attempt_waits_for_the_end_of_the_one_before() -> None:
    """Presented while the first attempt lives: parked, and wanted once that one is released."""
    ledger, pair = ledger_with(), pair_of(["data"], sending=True)
    present(ledger, pair, 0)
    assert present(ledger, pair, 0, sealed(8, "r", attempt=1)) == ("parked", "")
    assert ledger.events == []
    ledger.outcome(7, "r", "failed", 0)
    assert ledger.events == [Released("r", "failed", 0, 1), Wanted("r")]
    ledger.stage("r", PAGES, 192, 60_000, 0)
    assert [sending.transfer for sending in ledger.sendings] == [7, 8]


def test_C23_a_grant_of_another_daemon_or_of_another_start_of_its_host_is_refused() -> None:
    """The key may be the same, but its ids and its clock mean nothing here any more."""
    ledger, pair = ledger_with(), pair_of(["data"], sending=True)
    ledger.origin = (id16("instance"), id16("other boot"))
    assert present(ledger, pair, 0) == ("refused", "grant_invalid")
    ledger.origin = (id16("instance"), id16("boot"))
    assert present(ledger, pair, 0) == ("accepted", "")


def test_a_late_presentation_of_an_ended_transfer_is_refused() -> None:
    """A stalled destination shows a grant after the outcome: nothing is sent."""
    ledger, pair = ledger_with(), pair_of(["data"], sending=True)
    ledger.outcome(7, "r", "aborted", 0)
    assert present(ledger, pair, 0) == ("refused", "transfer_unknown")
    assert not ledger.sendings


def test_a_repeated_presentation_after_delivery_is_no_refusal() -> None:
    """The repeat of a presentation whose answer was slow finds the transfer ended, and says so."""
    ledger, pair = ledger_with(), pair_of(["data"], sending=True)
    ledger.outcome(7, "r", "delivered", 0)
    assert present(ledger, pair, 0) == ("ended", "")
    assert not ledger.sendings


# --- any order ----------------------------------------------------------------------------------

STEPS = ("present", "end", "start", "done", "outcome", "expire")


@given(
    ranks=st.integers(1, 4),
    steps=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 3)), max_size=30),
)
def test_released_exactly_once_and_never_early_in_any_order(
    ranks: int, steps: list[tuple[str, int]]
) -> None:
    """Ends, repeats, outcomes, expiry, operations in any order: once, and not while held (B01)."""
    ledger, pair = ledger_with(), pair_of(["data"] * ranks, sending=True)
    staged, ended, running, closed = ledger.staged["r"], set(), 0, False
    for step, number in steps:
        rank = number % ranks
        if step == "present":
            present(ledger, pair, rank)
        elif step == "end":
            ledger.peer_end(pair, rank, sealed(), 0)
            ended.add(rank)
            closed = closed or len(ended) == ranks
        elif step == "start" and not released(ledger):
            ledger.operation_started(staged)
            running += 1
        elif step == "done" and running:
            running -= 1
            ledger.operation_done(staged)
        elif step == "outcome":
            ledger.outcome(7, "r", ("delivered", "failed", "expired", "aborted")[number], 0)
            closed = True
        elif step == "expire" and number == 3:
            ledger.tick(60_000)
            closed = True
        assert len(released(ledger)) == int(closed and not running)
        assert ("r" in ledger.staged) == (not released(ledger))
        if released(ledger):
            break
    for _ in range(running):
        ledger.operation_done(staged)
    ledger.outcome(7, "r", "aborted", 0)
    ledger.outcome(7, "r", "delivered", 0)
    assert len(released(ledger)) == 1
    assert not ledger.staged


def test_ten_thousand_random_operations_leave_nothing_staged() -> None:
    """Every path that ends a request gives its memory back (B18)."""
    rng = random.Random(18)
    ledger, pair = Ledger(1000, max_staged=50), pair_of(["data", "data", "notice"], sending=True)
    transfers: dict[str, int] = {}
    running: list[Staged] = []
    staged: Counter[str] = Counter()
    for step in range(10_000):
        request = f"r{rng.randrange(80)}"
        transfer = transfers.setdefault(request, step + 1)
        grant = sealed(transfer, request)
        match rng.randrange(8):
            case 0 | 1:
                fresh = request not in ledger.staged
                if ledger.stage(request, PAGES, 192, step + 500, step) is None and fresh:
                    staged[request] += 1
            case 2:
                ledger.present(pair, rng.randrange(2), grant, COUNTS, UPPER, step)
            case 3 | 4:
                outcome = rng.choice(["delivered", "delivered", "failed"])
                ledger.peer_end(pair, rng.randrange(3), grant, step, outcome)
            case 5:
                ledger.outcome(transfer, request, rng.choice(["failed", "delivered"]), step)
                transfers[request] = step + 20_000
            case 6:
                if ledger.staged and rng.random() < 0.7:
                    one = ledger.staged[rng.choice(list(ledger.staged))]
                    ledger.operation_started(one)
                    running.append(one)
                elif running:
                    ledger.operation_done(running.pop())
            case 7:
                ledger.withdraw(request, "aborted")
        ledger.tick(step)
    for one in running:
        ledger.operation_done(one)
    ledger.tick(1_000_000)
    assert ledger.staged == {}
    assert ledger.staged_bytes == 0
    assert Counter(event.request for event in released(ledger)) == staged
    assert grant_of().ttl == 10_000


def test_an_outcome_that_comes_before_the_notice_tells_the_count() -> None:
    """A notice contact that never saw the grant is released with the verdict's own count."""
    ledger = Ledger(max_op=10)
    assert ledger.stage("r", {"full": [0]}, 1, 1000, 0) is None
    ledger.outcome(7, "r", "delivered", 0, 3)
    ledger.outcome(8, "late", "delivered", 0, 2)
    assert ledger.stage("late", {"full": [1]}, 1, 1000, 0) is None
    released = [event for event in ledger.events if isinstance(event, Released)]
    assert [(one.request, one.ended, one.receive_count) for one in released] == [
        ("r", 3, 3),
        ("late", 2, 2),
    ]


def test_a_late_outcome_of_one_attempt_leaves_the_next_ones_pages_alone() -> None:
    """Ended by its contacts and staged anew: the daemon's word on the first attempt is no end."""
    ledger, pair = ledger_with(), pair_of(["data"], sending=True)
    present(ledger, pair, 0)
    ledger.peer_end(pair, 0, sealed(), 0, "failed")
    ledger.stage("r", {"full": [1, 2, 3]}, 192, 60_000, 0)
    ledger.outcome(7, "r", "failed", 0)
    ledger.outcome(7, "r", "failed", 0)
    assert len(released(ledger)) == 1
    assert present(ledger, pair, 0, sealed(8, "r", attempt=1)) == ("accepted", "")


def test_a_renewed_grant_lets_a_running_share_go_on() -> None:
    """Its last moment, and that of the staged entry, are the later grant's."""
    ledger, pair = ledger_with(until=500), pair_of(["data"], sending=True)
    present(ledger, pair, 0)
    (sending,) = ledger.sendings
    renewed = sealed(issued=9000)
    assert present(ledger, pair, 0, renewed) == ("accepted", "")
    assert present(ledger, pair, 0) == ("accepted", "")
    assert sending.stop == 9000 + 10_000 - UPPER - 1000
    assert ledger.staged["r"].until == 9000 + 10_000 - UPPER
    assert len(ledger.sendings) == 1


def test_a_renewed_grant_lets_a_parked_presentation_wait_on() -> None:
    """not_staged comes at the end of the later grant, whichever repeat comes last."""
    ledger, pair = Ledger(1000), pair_of(["data"], sending=True)
    for grant in (sealed(), sealed(issued=9000), sealed()):
        assert present(ledger, pair, 0, grant) == ("parked", "")
    ledger.tick(9000 + 10_000 - UPPER - 1)
    assert not ledger.failures
    ledger.tick(9000 + 10_000 - UPPER + 50)
    assert len(ledger.failures) == 1


def test_a_drained_share_is_never_sent_though_it_is_staged_later() -> None:
    """Parked, drained, staged: the pages over there are another request's by now (B16)."""
    ledger, pair = Ledger(1000), pair_of(["data", "data"], sending=True)
    for rank in (0, 1):
        assert present(ledger, pair, rank) == ("parked", "")
    ledger.drain(7, 0, 0)
    assert present(ledger, pair, 0) == ("ended", "")
    ledger.stage("r", PAGES, 192, 60_000, 0)
    (sending,) = ledger.sendings
    assert sending.rank == 1
    assert ledger.may_start(sending)
    ledger.drain(7, 1, 0)
    assert not ledger.may_start(sending)


def test_an_abort_stops_what_runs_and_what_is_parked() -> None:
    """Sources start nothing more of an aborting transfer; its outcome still releases."""
    why = finding(Code.ABORTED, "transfer", Side("a test", "x"))
    ledger, pair = ledger_with(), pair_of(["data", "data"], sending=True)
    present(ledger, pair, 0)
    (sending,) = ledger.sendings
    ledger.aborting(7, why, 0)
    assert not ledger.may_start(sending)
    assert present(ledger, pair, 1) == ("refused", "aborted")
    ledger.outcome(7, "r", "aborted", 0)
    assert [event.reason for event in released(ledger)] == ["aborted"]


def test_another_clock_ends_what_was_promised_and_only_that() -> None:
    """Requests bound to a void grant are released; the others wait for the next one."""
    ledger, pair = ledger_with(), pair_of(["data"], sending=True)
    ledger.stage("free", PAGES, 10, 60_000, 0)
    present(ledger, pair, 0)
    present(ledger, pair, 0, sealed(9, "parked"))
    ledger.void()
    assert released(ledger) == [Released("r", "expired", 0, 1)]
    assert list(ledger.staged) == ["free"]
    assert ledger.staged_bytes == 10
    ledger.tick(20_000)
    assert not ledger.failures


def test_a_transfer_that_failed_because_it_is_aborted_is_released_as_aborted() -> None:
    """The ends may come before the daemon's outcome; the reason is the same."""
    why = finding(Code.ABORTED, "transfer", Side("a test", "x"))
    ledger, pair = ledger_with(), pair_of(["data"], sending=True)
    present(ledger, pair, 0)
    ledger.aborting(7, why, 0)
    ledger.peer_end(pair, 0, sealed(), 0, "failed")
    assert released(ledger) == [Released("r", "aborted", 1, 1)]
