"""Transfers: opened at once, ended once a rank, one outcome for everyone, then forgotten."""

from __future__ import annotations

import pytest

from rankgate.coordinator.core.settings import Settings
from rankgate.coordinator.core.tables import PairState, TransferState
from rankgate.proto.codes import Code
from rankgate.proto.findings import Side, finding
from rankgate.proto.grants import Grant, open_grant, read_grant
from rankgate.proto.limits import MAX_BATCH
from rankgate.proto.messages import (
    Aborting,
    Claim,
    End,
    EndItem,
    OpenResult,
    Outcome,
    OutcomeItem,
    PairBroken,
    Verdict,
)
from tests.coordinator.core.harness import Agent, Bench, codes, decode, prefill, rejected

Both = tuple[list[Agent], list[Agent]]


def slug(result: OpenResult) -> str:
    """Return why an open was denied."""
    assert result.finding is not None, result
    assert not result.grant
    return result.finding.slug


def ready(bench: Bench, *, source: int = 2, destination: int = 2) -> Both:
    """Return the agents of a ready pair."""
    return bench.pair(prefill(tp=source), decode(tp=destination))


def outcome_of(agents: list[Agent], transfer: int) -> OutcomeItem:
    """Return the one outcome that every agent was told once."""
    told = [[o for o in agent.outcomes() if o.transfer == transfer] for agent in agents]
    assert all(len(items) == 1 for items in told), told
    assert len({repr(items[0]) for items in told}) == 1
    return told[0][0]


def state_of(bench: Bench, transfer: int) -> TransferState:
    """Return a transfer's state."""
    return bench.core.transfers.by_id[transfer].state


# --- opening -------------------------------------------------------------------------------------


def test_an_open_is_granted_at_once_with_everything_a_source_must_check() -> None:
    """The grant names instance, clock, issue tick, ttl, epochs, DP ranks, request and table."""
    bench = Bench(start=3)
    ours, theirs = ready(bench)
    verdict = ours[0].last(Verdict)
    bench.now += 17
    result = theirs[1].open("r1", attempt=4)
    assert open_grant(result.grant, verdict.grant_key) == Grant(
        transfer=(3 << 32) + 1,
        instance=bench.identity.instance,
        clock=bench.identity.clock,
        issued=bench.now,
        ttl=60_000,
        source_epoch=verdict.source_epoch,
        destination_epoch=verdict.destination_epoch,
        request="r1",
        attempt=4,
        table_digest=verdict.table_digest,
    )
    assert (result.finding, result.ended) == (None, None)


@pytest.mark.parametrize(("asked", "given"), [(0, 60_000), (5, 5), (10**9, 600_000)])
def test_B22_every_grant_has_a_finite_time(asked: int, given: int) -> None:
    """0 takes the default, more than the maximum is cut; nothing is for ever."""
    bench = Bench()
    _, theirs = ready(bench)
    assert theirs[0].grant("r1", ttl=asked).ttl == given


def test_a_repeated_open_renews_the_same_transfer() -> None:
    """Same id, new issue time; any rank of the DP group may repeat; time only grows."""
    bench = Bench()
    _, theirs = ready(bench)
    first = theirs[0].grant("r1", ttl=10_000)
    bench.now += 4000
    second = theirs[1].grant("r1", ttl=10_000)
    assert second.transfer == first.transfer
    assert (second.issued, second.ttl) == (bench.now, 10_000)
    third = theirs[1].grant("r1", ttl=1000)
    assert (third.issued, third.ttl) == (bench.now, 10_000)
    assert len(bench.core.transfers.by_id) == 1
    bench.wait(9999)
    assert state_of(bench, first.transfer) is TransferState.GRANTED
    bench.wait(1)
    assert state_of(bench, first.transfer) is TransferState.EXPIRED


def test_C08_other_content_for_an_open_request_is_a_conflict() -> None:
    """DP ranks, payload and table of the first open hold; the first open is not disturbed."""
    bench = Bench()
    _, theirs = bench.pair(prefill(dp=2), decode(dp=2))
    grant = theirs[0].grant("r1")
    for change in ({"source_dp": 1}, {"payload": "embedding"}, {"table_digest": bytes(16)}):
        result = theirs[0].open("r1", **change)
        assert slug(result) == "conflicting_open"
        assert result.finding is not None
        assert next(iter(change)) in result.finding.message
    assert slug(theirs[1].open("r1")) == "not_in_scope"
    assert theirs[0].grant("r1").transfer == grant.transfer
    assert theirs[0].grant("r1", attempt=1).transfer != grant.transfer


@pytest.mark.parametrize("request_id", ["", " ", "none", "None", "NULL", "0", "-1", "undefined"])
def test_empty_and_constant_request_ids_are_refused(request_id: str) -> None:
    """Ids that every request of a careless client would share are no ids."""
    bench = Bench()
    _, theirs = ready(bench)
    result = theirs[0].open(request_id)
    assert slug(result) == "request_invalid"
    assert repr(request_id) in result.finding.message  # type: ignore[union-attr]


def test_only_the_destination_dp_group_opens() -> None:
    """A source rank, another DP group and another world are not in scope; the scope is named."""
    bench = Bench()
    ours, theirs = bench.pair(prefill(), decode(tp=2, dp=2))
    (other,) = bench.seal(decode("other"))
    item = theirs[0].item("r1")
    for agent in (ours[0], theirs[2], other):
        (result,) = agent.open_items([item])
        assert slug(result) == "not_in_scope"
        assert "d ranks 0-1" in result.finding.message  # type: ignore[union-attr]
    assert slug(theirs[0].open("r1", destination_dp=1)) == "not_in_scope"
    assert slug(theirs[0].open("r1", destination_dp=9)) == "not_in_scope"


def test_A40_the_dp_rank_is_said_and_checked() -> None:
    """Different DP sizes are legal; a DP rank that does not exist is refused with the size."""
    bench = Bench()
    _, theirs = bench.pair(prefill(dp=4), decode(dp=8))
    grant = theirs[5].grant("818533314937763119", source_dp=2)
    assert (grant.source_dp, grant.destination_dp) == (2, 5)
    result = theirs[5].open("r2", source_dp=4)
    assert slug(result) == "dp_rank_unknown"
    assert "p has dp size 4" in result.finding.message  # type: ignore[union-attr]


def test_other_payloads_and_tables_are_refused() -> None:
    """What the pair does not move, or another plan, is no request of this pair."""
    bench = Bench()
    _, theirs = ready(bench)
    assert slug(theirs[0].open("r1", payload="soup")) == "value_invalid"
    result = theirs[0].open("r1", table_digest=bytes(16))
    assert slug(result) == "metadata_mismatch"
    assert bytes(16).hex() in result.finding.message  # type: ignore[union-attr]


def test_B01_a_wrong_claim_at_open_rejects_the_pair_for_both_worlds() -> None:
    """The number, the computed one and the rank are named; open transfers fail."""
    bench = Bench()
    ours, theirs = ready(bench)
    running = theirs[0].grant("r0").transfer
    result = theirs[1].open("r1", claims=[Claim(count="world_receive_count", value=4)])
    assert slug(result) == "receive_count_mismatch"
    message = result.finding.message  # type: ignore[union-attr]
    assert "decode d rank 1 has 4" in message
    assert "computed from the world sizes has 2" in message
    assert bench.core.pairs.by_name["p", "d"].state is PairState.REJECTED
    for agent in (*ours, *theirs):
        assert codes(agent.last(Verdict).findings) == ["receive_count_mismatch"]
    outcome = outcome_of([*ours, *theirs], running)
    assert outcome.outcome == "failed"
    assert outcome.finding is not None
    assert outcome.finding.slug == "receive_count_mismatch"


def test_right_and_unknown_claims_at_open() -> None:
    """A right claim is granted; an unknown count is refused without ending the pair."""
    bench = Bench()
    _, theirs = ready(bench)
    assert theirs[0].open("r1", claims=[Claim(count="send_count", value=1)]).grant
    assert slug(theirs[0].open("r2", claims=[Claim(count="soup", value=1)])) == "value_invalid"
    assert theirs[0].open("r3").grant


def test_not_ready_and_stale_pairs_deny_and_say_what_they_wait_for() -> None:
    """Waiting to link is retryable and named; epochs of the past are stale."""
    bench = Bench()
    ours, theirs = bench.seal(prefill()), bench.seal(decode())
    result = theirs[0].open("r1")
    assert slug(result) == "pair_not_ready"
    assert result.finding.retryable  # type: ignore[union-attr]
    assert "p rank 0 to link" in result.finding.message  # type: ignore[union-attr]
    bench.link(*ours, *theirs)
    stale = theirs[0].open("r1", source_epoch=77)
    assert slug(stale) == "stale_epoch"
    assert "77:2" in stale.finding.message  # type: ignore[union-attr]
    assert "p:d 1:2" in stale.finding.message  # type: ignore[union-attr]


def test_an_unfit_rank_denies_new_grants_but_running_transfers_go_on() -> None:
    """Stalled: the seal stays, running transfers are renewed, nothing new is granted."""
    bench = Bench(Settings(grant_ttl=600_000))
    ours, theirs = ready(bench)
    before = theirs[0].grant("r1")
    bench.wait(bench.settings.ttl, beating=(ours[0], *theirs))
    result = theirs[0].open("r2")
    assert slug(result) == "pair_not_ready"
    assert "p: rank 1 stalled" in result.finding.message  # type: ignore[union-attr]
    assert theirs[0].grant("r1").transfer == before.transfer
    assert theirs[0].grant("r1").issued == bench.now
    ours[1].beat()
    assert theirs[0].open("r2").grant


def test_a_full_table_denies_as_busy_and_evicts_nobody() -> None:
    """Tombstones count; a known request is still answered; room comes with time."""
    bench = Bench(Settings(max_transfers=3, grant_ttl=1000))
    _, theirs = ready(bench, destination=1)
    first = theirs[0].grant("r0").transfer
    theirs[0].end(first)
    for number in (1, 2):
        theirs[0].grant(f"r{number}")
    result = theirs[0].open("r3")
    assert slug(result) == "busy"
    assert result.finding.retryable  # type: ignore[union-attr]
    assert theirs[0].open("r0").ended is not None
    assert theirs[0].open("r1").grant
    bench.wait(1000 + bench.settings.tombstone)
    assert theirs[0].open("r3").grant


def test_results_come_in_the_order_of_the_items() -> None:
    """Grants, denials and outcomes are mixed in one message, each at its place."""
    bench = Bench()
    _, theirs = ready(bench, destination=1)
    done = theirs[0].grant("done").transfer
    theirs[0].end(done)
    names = ("a", "", "done", "b", "a")
    results = theirs[0].open_items([theirs[0].item(name) for name in names])
    assert [bool(r.grant) for r in results] == [True, False, False, True, True]
    assert slug(results[1]) == "request_invalid"
    assert results[2].ended is not None
    assert read_grant(results[0].grant).transfer == read_grant(results[4].grant).transfer


def test_C23_transfer_ids_of_daemon_starts_never_meet() -> None:
    """The start number is the upper half of the id."""
    bench = Bench()
    ours, theirs = ready(bench)
    first = theirs[0].grant("r1").transfer
    bench.restart()
    for agent in (*ours, *theirs):
        agent.join()
    bench.link(*ours, *theirs)
    assert slug(OpenResult(finding=theirs[0].end(first).finding)) == "transfer_unknown"
    second = theirs[0].grant("r1").transfer
    assert (first >> 32, second >> 32) == (1, 2)


# --- ending --------------------------------------------------------------------------------------


def test_B02_only_distinct_ranks_are_counted() -> None:
    """N=4: ends of 0, 1, 1, 1 leave it open; 2 and 3 deliver it; a fifth end is late."""
    bench = Bench()
    ours, theirs = ready(bench, source=1, destination=4)
    transfer = theirs[0].grant("r1").transfer
    for rank in (0, 1, 1, 1):
        assert theirs[rank].end(transfer).late == ""
    row = (bench.query("transfers").transfers or [])[0]
    assert (row.state, row.ended, row.missing) == ("granted", [0, 1], [2, 3])
    assert not ours[0].outcomes()
    for rank in (2, 3):
        theirs[rank].end(transfer)
    assert outcome_of([*ours, *theirs], transfer).outcome == "delivered"
    again = theirs[1].end(transfer)
    assert (again.late, again.finding) == ("delivered", None)
    outcome_of([*ours, *theirs], transfer)


def test_everyone_in_scope_hears_the_outcome_and_nobody_else() -> None:
    """Both sides' ranks of the named DP groups, not the other groups."""
    bench = Bench()
    ours, theirs = bench.pair(prefill(tp=2, dp=2), decode(tp=2, dp=2))
    transfer = theirs[2].grant("r1", source_dp=1).transfer
    for rank in (2, 3):
        theirs[rank].end(transfer)
    outcome_of([ours[2], ours[3], theirs[2], theirs[3]], transfer)
    assert not any(agent.outcomes() for agent in (ours[0], ours[1], theirs[0], theirs[1]))


def test_B11_all_accounted_with_one_failure_is_failed_at_once() -> None:
    """ok(0), failed(1), ok(2): FAILED with rank 1's reason, never released as success."""
    bench = Bench()
    ours, theirs = bench.pair(prefill(heads=3), decode(tp=3, heads=3))
    transfer = theirs[0].grant("r1").transfer
    why = finding(Code.TRANSPORT_FAILED, "chunk", Side("decode d rank 1", "post error"))
    theirs[0].end(transfer)
    theirs[1].end(transfer, "failed", why)
    assert state_of(bench, transfer) is TransferState.GRANTED
    theirs[2].end(transfer)
    outcome = outcome_of([*ours, *theirs], transfer)
    assert (outcome.outcome, outcome.finding, outcome.missing) == ("failed", why, [])
    assert theirs[1].end(transfer).late == "failed"


def test_B11_of_several_failures_the_lowest_rank_is_named() -> None:
    """A failure without a reason gets one that names the rank."""
    bench = Bench()
    ours, theirs = ready(bench)
    transfer = theirs[0].grant("r1").transfer
    theirs[1].end(transfer, "failed", finding(Code.SOURCE_LOST, "x"))
    theirs[0].end(transfer, "failed")
    outcome = outcome_of([*ours, *theirs], transfer)
    assert outcome.finding is not None
    assert outcome.finding.slug == "transport_failed"
    assert "decode d rank 0" in outcome.finding.message


def test_a_first_end_counts_and_a_second_one_changes_nothing() -> None:
    """delivered then failed of one rank is delivered; failed then delivered is failed."""
    bench = Bench()
    _, theirs = ready(bench)
    first, second = theirs[0].grant("r1").transfer, theirs[0].grant("r2").transfer
    theirs[0].end(first)
    theirs[0].end(first, "failed")
    theirs[1].end(first)
    theirs[0].end(second, "failed")
    theirs[0].end(second)
    theirs[1].end(second)
    assert state_of(bench, first) is TransferState.DELIVERED
    assert state_of(bench, second) is TransferState.FAILED


def test_outsiders_and_unknown_transfers_cannot_end() -> None:
    """Sources, other DP groups and other worlds are refused by name; unknown ids too."""
    bench = Bench()
    ours, theirs = bench.pair(prefill(), decode(dp=2))
    (other,) = bench.seal(decode("other"))
    transfer = theirs[0].grant("r1").transfer
    for agent in (ours[0], theirs[1], other):
        found = agent.end(transfer).finding
        assert found is not None
        assert found.slug == "not_in_scope"
    for wrong in (0, transfer + 1):
        found = theirs[0].end(wrong).finding
        assert found is not None
        assert found.slug == "transfer_unknown"
    assert state_of(bench, transfer) is TransferState.GRANTED


def test_an_unknown_outcome_word_is_refused() -> None:
    """A rank says delivered or failed; outcomes are named by the daemon alone."""
    bench = Bench()
    _, theirs = ready(bench, destination=1)
    transfer = theirs[0].grant("r1").transfer
    found = theirs[0].end(transfer, "expired").finding
    assert found is not None
    assert found.slug == "value_invalid"
    assert "'expired'" in found.message
    assert state_of(bench, transfer) is TransferState.GRANTED


def test_ends_in_a_batch_are_told_in_one_message_a_rank() -> None:
    """Outcomes named in one step travel together, split at the batch bound."""
    bench = Bench()
    ours, theirs = ready(bench, destination=1)
    items = [theirs[0].item(f"r{n}") for n in range(MAX_BATCH)]
    grants = theirs[0].open_items(items)
    grants += theirs[0].open_items([theirs[0].item("one more")])
    ends = [EndItem(transfer=read_grant(g.grant).transfer, outcome="delivered") for g in grants]
    session = bench.core.sessions.by_id[theirs[0].session]
    for end in ends:
        bench.core.transfers.end(session, end)
    bench.tick()
    assert [len(message.items) for message in ours[0].told(Outcome)] == [MAX_BATCH, 1]
    answer = theirs[0].ask(End(session=theirs[0].session, items=ends[:MAX_BATCH]))
    assert {item.late for item in answer.items} == {"delivered"}  # type: ignore[attr-defined]


# --- time ----------------------------------------------------------------------------------------


def test_B09_expiry_is_its_own_outcome_and_names_the_missing() -> None:
    """N=4, 2 ended, time passes: expired(2/4, missing 2-3); nothing counts as delivered."""
    bench = Bench()
    ours, theirs = ready(bench, source=1, destination=4)
    transfer = theirs[0].grant("r1", ttl=5000).transfer
    for rank in (0, 1):
        theirs[rank].end(transfer)
    bench.wait(4999)
    assert not ours[0].outcomes()
    bench.wait(1)
    outcome = outcome_of([*ours, *theirs], transfer)
    assert (outcome.outcome, outcome.missing) == ("expired", [2, 3])
    assert outcome.finding is not None
    assert "2 of 4" in outcome.finding.message
    assert "d ranks 2-3" in outcome.finding.message
    assert "request r1" in outcome.finding.message
    status = bench.query("status").status
    assert status is not None
    assert status.transfers == {"granted": 1, "expired": 1, "open": 0}
    assert theirs[2].end(transfer).late == "expired"


def test_B22_the_default_deadline_ends_a_transfer_nobody_ends() -> None:
    """Authorised and silent: expired at the default time, and the place is free again after."""
    bench = Bench()
    ours, theirs = ready(bench)
    transfer = theirs[0].grant("r1").transfer
    bench.wait(bench.settings.grant_ttl)
    assert outcome_of([*ours, *theirs], transfer).missing == [0, 1]


@pytest.mark.parametrize("end", ["delivered", "failed", "expired", "aborted", "renewed"])
def test_tombstones_answer_and_are_then_forgotten(end: str) -> None:
    """After the outcome a repeat gets it until issued + ttl + tombstone; then nothing is left."""
    bench = Bench(Settings(grant_ttl=10_000))
    _, theirs = ready(bench, destination=1)
    transfer = theirs[0].grant("r1").transfer
    if end == "renewed":
        bench.wait(5000)
        theirs[0].grant("r1")
    if end == "aborted":
        theirs[0].abort(transfer)
        theirs[0].end(transfer, "failed")
    elif end != "expired":
        theirs[0].end(transfer, end if end == "failed" else "delivered")
    bench.wait(10_000)
    name = "delivered" if end == "renewed" else end
    ended = theirs[0].open("r1").ended
    assert ended is not None
    assert (ended.outcome, ended.transfer) == (name, transfer)
    bench.wait(bench.settings.tombstone - 1)
    assert theirs[0].end(transfer).late == name
    bench.wait(1)
    assert bench.core.transfers.by_id == {}
    assert bench.core.transfers._by_key == {}
    assert theirs[0].end(transfer).finding is not None
    assert theirs[0].grant("r1").transfer == transfer + 1


# --- abort ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["source", "destination"])
def test_abort_tells_both_sides_and_waits_for_the_destinations(side: str) -> None:
    """Aborting reaches all in scope; the transfer is aborted once every destination has ended."""
    bench = Bench()
    ours, theirs = ready(bench)
    transfer = theirs[0].grant("r1").transfer
    agent = (ours if side == "source" else theirs)[1]
    assert agent.abort(transfer, "client left").state == "aborting"
    for told in (*ours, *theirs):
        (item,) = told.last(Aborting).items
        assert item.transfer == transfer
        assert item.finding.slug == "aborted"
        assert "client left" in item.finding.message
        assert f"rank {agent.rank}" in item.finding.message
    assert agent.abort(transfer).state == "aborting"
    assert len(ours[0].told(Aborting)) == 1
    theirs[0].end(transfer, "failed")
    assert state_of(bench, transfer) is TransferState.ABORTING
    theirs[1].end(transfer, "failed")
    outcome = outcome_of([*ours, *theirs], transfer)
    assert outcome.outcome == "aborted"
    assert outcome.finding is not None
    assert "client left" in outcome.finding.message


def test_B15_abort_of_what_is_complete_is_delivered() -> None:
    """All destinations had it: the abort came too late and changes nothing."""
    bench = Bench()
    ours, theirs = ready(bench)
    transfer = theirs[0].grant("r1").transfer
    theirs[0].end(transfer)
    ours[0].abort(transfer)
    theirs[1].end(transfer)
    outcome = outcome_of([*ours, *theirs], transfer)
    assert (outcome.outcome, outcome.finding) == ("delivered", None)
    assert ours[0].abort(transfer).state == "delivered"
    assert len(ours[0].told(Aborting)) == 1


def test_B12_an_abort_that_nobody_ends_is_aborted_at_the_deadline() -> None:
    """The deadline resolves it; late ends are answered with the outcome."""
    bench = Bench()
    ours, theirs = ready(bench)
    transfer = theirs[0].grant("r1", ttl=4000).transfer
    theirs[0].abort(transfer)
    assert theirs[1].open("r1").grant
    bench.wait(4000)
    outcome = outcome_of([*ours, *theirs], transfer)
    assert (outcome.outcome, outcome.missing) == ("aborted", [0, 1])
    assert outcome.finding is not None
    assert outcome.finding.slug == "aborted"
    assert theirs[1].end(transfer, "failed").late == "aborted"


def test_an_aborting_transfer_is_never_renewed() -> None:
    """A repeated open gets the grant as it was; its time does not grow."""
    bench = Bench()
    _, theirs = ready(bench)
    grant = theirs[0].grant("r1", ttl=4000)
    theirs[0].abort(grant.transfer)
    bench.now += 1000
    assert theirs[0].grant("r1", ttl=4000) == grant


def test_abort_by_outsiders_or_of_unknown_transfers_is_refused() -> None:
    """Only ranks in scope abort."""
    bench = Bench()
    ours, theirs = bench.pair(prefill(dp=2), decode(dp=2))
    transfer = theirs[0].grant("r1").transfer
    for agent in (ours[1], theirs[1]):
        found = agent.abort(transfer).finding
        assert found is not None
        assert found.slug == "not_in_scope"
    found = ours[0].abort(transfer + 1).finding
    assert found is not None
    assert found.slug == "transfer_unknown"
    assert state_of(bench, transfer) is TransferState.GRANTED


def test_B20_a_failure_reaches_every_destination_of_the_request() -> None:
    """Fail with receivers d0..d3: four outcomes, not only for the one that raised."""
    bench = Bench()
    _, theirs = ready(bench, source=1, destination=4)
    transfer = theirs[0].grant("r1").transfer
    for agent in theirs:
        agent.end(transfer, "failed")
    assert outcome_of(theirs, transfer).outcome == "failed"


# --- losing a side -------------------------------------------------------------------------------


def test_a_lost_destination_fails_its_transfers_at_once() -> None:
    """destination_lost names the rank; sources may release; the survivors hear it too."""
    bench = Bench()
    ours, theirs = ready(bench)
    transfer = theirs[0].grant("r1").transfer
    theirs[0].end(transfer)
    theirs[1].leave()
    outcome = outcome_of([*ours, theirs[0]], transfer)
    assert (outcome.outcome, outcome.missing) == ("failed", [1])
    assert outcome.finding is not None
    assert outcome.finding.slug == "destination_lost"
    assert "d" in outcome.finding.message
    assert "rank 1 gone" in outcome.finding.message


def test_a_destination_replaced_by_a_newer_round_fails_its_transfers() -> None:
    """No rank is gone by itself; the round as a whole is."""
    bench = Bench()
    ours, theirs = ready(bench, destination=1)
    transfer = theirs[0].grant("r1").transfer
    theirs[0].answers_probes = False
    (new,) = bench.agents(decode(), "r2")
    new.hello()
    new.register()
    bench.wait(bench.settings.probe, beating=ours)
    assert outcome_of(ours, transfer).outcome == "failed"


@pytest.mark.parametrize("ends", [("delivered", "delivered"), ("delivered", "failed")])
def test_loss_of_a_source_is_decided_by_the_destinations(ends: tuple[str, str]) -> None:
    """Complete at all destinations is delivered; otherwise they fail it with source_lost."""
    bench = Bench()
    ours, theirs = ready(bench)
    transfer = theirs[0].grant("r1").transfer
    ours[1].leave()
    assert theirs[0].last(PairBroken).source_lost
    assert state_of(bench, transfer) is TransferState.GRANTED
    for agent, end in zip(theirs, ends, strict=True):
        why = finding(Code.SOURCE_LOST, "x") if end == "failed" else None
        agent.end(transfer, end, why)
    outcome = outcome_of(theirs, transfer)
    assert outcome.outcome == ("failed" if "failed" in ends else "delivered")


def test_a_transfer_of_a_lost_source_is_never_renewed() -> None:
    """No grant without two sealed sides: a repeat gets the old grant, which runs out."""
    bench = Bench()
    ours, theirs = ready(bench)
    grant = theirs[0].grant("r1", ttl=8000)
    ours[1].leave()
    bench.now += 3000
    assert theirs[0].grant("r1", ttl=8000) == grant
    fresh = bench.agents(prefill(tp=2), life="2")[1]
    fresh.join()
    old = theirs[0].told(Verdict)[0]
    item = theirs[0].item(
        "r1", source_epoch=old.source_epoch, destination_epoch=old.destination_epoch, ttl=8000
    )
    (again,) = theirs[0].open_items([item])
    assert read_grant(again.grant) == grant
    bench.link(ours[0], fresh, *theirs)
    (again,) = theirs[0].open_items([item])
    assert read_grant(again.grant) == grant
    bench.wait(5000)
    assert state_of(bench, grant.transfer) is TransferState.EXPIRED


def test_a_transfer_of_a_refused_pair_is_never_renewed() -> None:
    """Its request is over: the repeat gets the outcome."""
    bench = Bench()
    ours, theirs = ready(bench)
    theirs[0].grant("r1")
    item = theirs[0].item("r1")
    assert rejected(ours[0].link(claims=[Claim(count="receive_count", value=7)]))
    (again,) = theirs[0].open_items([item])
    assert again.ended is not None
    assert again.ended.outcome == "failed"


def test_C16_old_and_new_sets_never_share_a_transfer() -> None:
    """World 4 becomes 2: the old request fails, a new one counts two."""
    bench = Bench()
    ours, theirs = bench.pair(prefill(), decode(tp=4))
    old = theirs[0].grant("r1").transfer
    for rank in (0, 1):
        theirs[rank].end(old)
    for agent in theirs:
        agent.leave()
    assert outcome_of(ours, old).missing == [2, 3]
    smaller = bench.seal(decode(tp=2), "r2")
    bench.link(*ours, *smaller)
    new = smaller[0].grant("r1").transfer
    assert new != old
    found = smaller[0].end(old).finding
    assert found is not None
    assert found.slug == "not_in_scope"
    for agent in smaller:
        agent.end(new)
    assert outcome_of([*ours, *smaller], new).outcome == "delivered"


def test_C04_only_the_transfers_of_the_lost_world_fail() -> None:
    """Five transfers to the dead decode fail; those of its neighbour go on."""
    bench = Bench()
    (ours,) = bench.seal(prefill())
    worlds = [bench.seal(decode(name))[0] for name in ("d1", "d2")]
    for verdict in ours.told(Verdict):
        ours.link(verdict)
    for agent in worlds:
        agent.link()
    doomed = [worlds[0].grant(f"r{n}").transfer for n in range(5)]
    fine = [worlds[1].grant(f"r{n}").transfer for n in range(5)]
    worlds[0].drop()
    bench.wait(bench.settings.resume, beating=(ours, worlds[1]))
    assert {state_of(bench, t) for t in doomed} == {TransferState.FAILED}
    assert {state_of(bench, t) for t in fine} == {TransferState.GRANTED}
    assert [o.transfer for o in ours.outcomes()] == doomed


def test_nothing_is_left_after_everything_ended() -> None:
    """Sessions gone, tombstones over: no table holds anything but what operators look at."""
    bench = Bench(Settings(grant_ttl=2000))
    ours, theirs = ready(bench)
    for number in range(20):
        transfer = theirs[0].grant(f"r{number}").transfer
        if number % 3:
            theirs[0].abort(transfer)
    for agent in (*ours, *theirs):
        agent.leave()
    bench.wait(20_000)
    core = bench.core
    assert core.transfers.by_id == {}
    assert core.transfers._by_key == {}
    assert core.transfers._named == []
    assert core.sessions.by_id == {}
    assert core.sessions.by_peer == {}
    assert core.pairs.by_name == {}
    assert core.pairs.by_epochs == {}
    assert core.worlds.by_name == {}
    bench.wait(2 * bench.settings.form_grace)
    assert core._turn.deadlines.next() is None


def test_survivors_of_a_broken_source_world_hear_the_outcome() -> None:
    """The source rank that still lives is told, since it still holds the request's memory."""
    bench = Bench()
    ours, theirs = ready(bench, destination=1)
    grant = theirs[0].grant("r1")
    ours[1].drop()
    bench.wait(3000)
    theirs[0].end(grant.transfer, "failed")
    assert outcome_of([ours[0], theirs[0]], grant.transfer).outcome == "failed"
