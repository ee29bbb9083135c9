"""The daemon's core and real rank cores in one memory: flows under loss, death and restarts."""

from __future__ import annotations

from typing import Any

import pytest

from rankgate.agents.events import Arrived, Outcome, Released, Wanted
from rankgate.agents.linking import LinkState
from rankgate.proto.codes import Code
from rankgate.proto.findings import Side, finding
from rankgate.proto.messages import Claim, End, Ended, EndResult, Refusal, Rejected
from tests.agents.fleet import Fleet, Rank
from tests.coordinator.core.harness import Job, decode, prefill

SHAPES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({"tp": 4}, {"tp": 4}, {}),
    ({"tp": 2}, {"tp": 4}, {}),
    ({"tp": 4}, {"tp": 2}, {}),
    ({"tp": 4}, {"tp": 2}, {"heads": 2}),
    ({"tp": 4}, {"tp": 6}, {"heads": 12}),
    ({"tp": 2, "pp": 2}, {"tp": 2}, {}),
    ({"tp": 4}, {"tp": 2}, {"kind": "mla"}),
]


def jobs(ours: dict[str, Any], theirs: dict[str, Any], both: dict[str, Any]) -> tuple[Job, Job]:
    """Return a prefill and a decode job."""
    return prefill(**{**both, **ours}), decode(**{**both, **theirs})


def serve(fleet: Fleet, source: Job, destination: Job, request: str, pages: int = 3) -> None:
    """Stage and open one request on all ranks."""
    for rank in fleet.of(source):
        rank.stage(request, list(range(pages)))
    for rank in fleet.of(destination):
        rank.open(request, source.name, list(range(8, 8 + pages)))


def settled(ranks: list[Rank], request: str, of: type = Outcome) -> bool:
    """Whether all ranks that live were told of a request, or were denied it."""
    return all(
        rank.told(of, request)
        or any(name == request and denied for name, _, denied, _ in rank.answers)
        for rank in ranks
        if rank.alive
    )


def nothing_left(fleet: Fleet) -> bool:
    """Whether no memory is held anywhere."""
    return all(
        not rank.core.source.ledger.staged
        and not rank.core.destination.table.landings
        and not rank.core.destination.table._owner
        and not rank.queue
        for rank in fleet.ranks.values()
    )


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize(("ours", "theirs", "both"), SHAPES)
def test_every_byte_arrives_and_every_source_releases_once(
    ours: dict[str, Any], theirs: dict[str, Any], both: dict[str, Any], layout: str
) -> None:
    """Bytes are compared at Arrived; released means receive_count ended, and once (B01, B07)."""
    fleet = Fleet()
    source, destination = jobs(ours, theirs, {**both, "page_layout": layout})
    sources, destinations = fleet.launch(source), fleet.launch(destination)
    fleet.ready(source, destination)
    serve(fleet, source, destination, "req-1")
    fleet.until(lambda: settled(destinations, "req-1") and settled(sources, "req-1", Released))
    assert set(fleet.outcomes.values()) == {"delivered"}
    for rank in sources:
        (released,) = rank.told(Released)
        assert (released.reason, released.ended) == ("delivered", released.receive_count)
    assert nothing_left(fleet)


@pytest.mark.parametrize("seed", range(12))
def test_lost_and_late_messages_change_nothing_but_the_time_it_takes(seed: int) -> None:
    """A tenth of all control messages is lost: still one outcome each, all bytes right (B02)."""
    fleet = Fleet(seed=seed, loss=0.1, delay=20)
    source, destination = jobs(*SHAPES[seed % len(SHAPES)])
    sources, destinations = fleet.launch(source), fleet.launch(destination)
    fleet.ready(source, destination)
    names = [f"req-{index}" for index in range(4)]
    for index, name in enumerate(names):
        for rank in sources:
            rank.stage(name, [2 * index, 2 * index + 1])
        for rank in destinations:
            rank.open(name, source.name, [15 - 2 * index, 14 - 2 * index])
    fleet.until(
        lambda: all(
            settled(destinations, name) and settled(sources, name, Released) for name in names
        )
    )
    assert set(fleet.outcomes.values()) == {"delivered"}
    fleet.until(lambda: nothing_left(fleet))


def test_a_presentation_before_staging_is_shown_and_served_once_staged() -> None:
    """Parked presentations ask the engine, which stages then."""
    fleet = Fleet()
    source, destination = prefill(tp=2), decode(tp=4)
    sources, destinations = fleet.launch(source), fleet.launch(destination)
    fleet.ready(source, destination)
    for rank in destinations:
        rank.open("req-1", "p", [4, 5])
    fleet.until(lambda: settled(sources, "req-1", Wanted))
    assert not any(rank.told(Arrived) for rank in destinations)
    for rank in sources:
        rank.stage("req-1", [0, 1])
    fleet.until(lambda: settled(destinations, "req-1"))
    assert set(fleet.outcomes.values()) == {"delivered"}
    assert all(len(rank.told(Wanted)) == 1 for rank in sources)


def test_a_request_that_is_never_staged_fails_as_not_staged() -> None:
    """The parked presentation ends with the grant, and the destination hears why (B11, B22)."""
    fleet = Fleet()
    source, destination = prefill(tp=1), decode(tp=1)
    fleet.launch(source)
    (rank,) = fleet.launch(destination)
    fleet.ready(source, destination)
    rank.open("req-1", "p", [4], ttl=2000)
    fleet.until(lambda: settled([rank], "req-1"), 5000)
    (outcome,) = rank.told(Outcome)
    assert outcome.outcome in {"failed", "expired"}
    fleet.until(lambda: nothing_left(fleet), 10_000)


def test_other_page_counts_are_refused_before_any_byte_moves() -> None:
    """Staged 3 pages, opened 2: pages_invalid names both, and nothing was sent."""
    fleet = Fleet()
    source, destination = prefill(tp=1), decode(tp=1)
    (giver,) = fleet.launch(source)
    (taker,) = fleet.launch(destination)
    fleet.ready(source, destination)
    giver.stage("req-1", [0, 1, 2])
    taker.open("req-1", "p", [4, 5])
    fleet.until(lambda: settled([taker], "req-1"))
    (outcome,) = taker.told(Outcome)
    assert outcome.outcome == "failed"
    assert outcome.finding.slug == "pages_invalid"
    assert "3" in outcome.finding.message
    assert "2" in outcome.finding.message
    assert giver.sent_bytes == 0
    fleet.until(lambda: nothing_left(fleet))


@pytest.mark.parametrize("seed", range(8))
def test_a_dead_source_fails_what_was_under_way_and_a_new_round_serves(seed: int) -> None:
    """A source dies in mid-stream, its world starts anew, and the next request is served (C05)."""
    fleet = Fleet(seed=seed, delay=20, settings=None)
    source, destination = prefill(tp=4), decode(tp=2)
    sources, destinations = fleet.launch(source), fleet.launch(destination)
    fleet.ready(source, destination)
    serve(fleet, source, destination, "req-1")
    fleet.run(5 + 11 * seed)
    fleet.kill(sources[seed % 4])
    fleet.until(lambda: settled(destinations, "req-1"), 70_000)
    for rank in sources:
        if rank.alive:
            fleet.kill(rank)
    fleet.launch(source, "r2")
    fleet.ready(source, destination, ms=70_000)
    for rank in fleet.of(source):
        rank.stage("req-2", [0, 1])
    for rank in destinations:
        rank.open("req-2", "p", [1, 2])
    fleet.until(lambda: settled(destinations, "req-2"))
    for rank in destinations:
        (outcome,) = rank.told(Outcome, "req-2")
        assert outcome.outcome == "delivered"
    fleet.until(lambda: nothing_left(fleet), 70_000)


@pytest.mark.parametrize("seed", range(8))
def test_a_dead_destination_ends_its_transfers_and_sources_release(seed: int) -> None:
    """A killed destination rank never holds a source's memory beyond the outcome (B12)."""
    fleet = Fleet(seed=seed, delay=20)
    source, destination = prefill(tp=2), decode(tp=4)
    sources, destinations = fleet.launch(source), fleet.launch(destination)
    fleet.ready(source, destination)
    serve(fleet, source, destination, "req-1")
    fleet.run(5 + 11 * seed)
    fleet.kill(destinations[seed % 4])
    fleet.until(lambda: settled(sources, "req-1", Released), 130_000)
    fleet.until(lambda: nothing_left(fleet), 130_000)


@pytest.mark.parametrize("seed", range(6))
def test_an_abort_drains_before_pages_are_used_again(seed: int) -> None:
    """After an abort the pages are given to another request, whose bytes stay right (B16)."""
    fleet = Fleet(seed=seed, delay=30)
    source, destination = prefill(tp=2), decode(tp=2)
    sources, destinations = fleet.launch(source), fleet.launch(destination)
    fleet.ready(source, destination)
    serve(fleet, source, destination, "req-1", pages=6)
    fleet.run(40 + 17 * seed)
    destinations[0].core.abort("req-1", "the client left", fleet.now)
    fleet.settle(destinations[0])
    fleet.until(lambda: settled(destinations, "req-1"))
    fleet.until(lambda: nothing_left(fleet))
    for rank in sources:
        rank.stage("req-2", [6, 7, 8])
    for rank in destinations:
        rank.open("req-2", "p", [8, 9, 10])
    fleet.until(lambda: settled(destinations, "req-2"))
    assert all(rank.told(Outcome, "req-2")[0].delivered for rank in destinations)
    assert all(len(rank.told(Released, "req-1")) == 1 for rank in sources)


def test_pages_of_a_running_transfer_are_refused_locally() -> None:
    """An overlapping open never reaches the daemon: range_busy (B16)."""
    fleet = Fleet()
    source, destination = prefill(tp=1), decode(tp=1)
    fleet.launch(source)
    (taker,) = fleet.launch(destination)
    fleet.ready(source, destination)
    taker.open("req-1", "p", [4, 5])
    taker.open("req-2", "p", [5, 6])
    taker.open("req-3", "p", [99])
    taker.open("req-4", "p", [7, 7])
    taker.open("x" * 129, "p", [8])
    denied = {request: found.slug for request, _, found, _ in taker.answers if found}
    assert denied == {
        "req-2": "range_busy",
        "req-3": "pages_invalid",
        "req-4": "pages_invalid",
        "x" * 129: "request_invalid",
    }


@pytest.mark.parametrize("seed", range(6))
def test_a_restart_of_the_daemon_keeps_epochs_and_serves_again(seed: int) -> None:
    """Agents register anew by themselves; confirmed worlds keep their epochs (C23)."""
    fleet = Fleet(seed=seed, delay=10)
    source, destination = prefill(tp=2), decode(tp=2)
    sources, destinations = fleet.launch(source), fleet.launch(destination)
    fleet.ready(source, destination)
    epochs = destinations[0].pair("p").epochs
    if seed % 2:
        serve(fleet, source, destination, "req-0")
        fleet.run(7 * seed)
    fleet.boot()
    fleet.run(3000)
    fleet.ready(source, destination)
    assert destinations[0].pair("p").epochs == epochs
    for rank in sources:
        rank.stage("req-1", [4, 5])
    for rank in destinations:
        rank.open("req-1", "p", [12, 13])
    fleet.until(lambda: settled(destinations, "req-1"))
    assert destinations[0].told(Outcome, "req-1")[0].delivered
    fleet.until(lambda: nothing_left(fleet), 130_000)


def test_a_source_that_sleeps_past_the_grant_sends_nothing_old() -> None:
    """A stalled source wakes after the grant has ended: refused, no byte lands (B14, B16)."""
    fleet = Fleet()
    source, destination = prefill(tp=1), decode(tp=1)
    (giver,) = fleet.launch(source)
    (taker,) = fleet.launch(destination)
    fleet.ready(source, destination)
    giver.stage("req-1", [0, 1], ttl=300_000)
    giver.paused = True
    taker.open("req-1", "p", [4, 5], ttl=1500)
    fleet.until(lambda: settled([taker], "req-1"))
    fleet.until(lambda: not taker.core.destination.table._owner, 10_000)
    giver.paused = False
    sent = giver.sent_bytes
    fleet.run(5000)
    assert giver.sent_bytes == sent == 0
    assert not taker.told(Arrived)


def test_two_data_parallel_groups_are_scopes_of_their_own() -> None:
    """A transfer of group 1 concerns only group 1; both count alone."""
    fleet = Fleet()
    source, destination = prefill(tp=2), decode(tp=2, dp=2)
    sources, destinations = fleet.launch(source), fleet.launch(destination)
    fleet.ready(source, destination)
    second = [rank for rank in destinations if rank.descriptor.coordinates.dp == 1]
    for rank in sources:
        rank.stage("req-1", [0])
    for rank in second:
        rank.open("req-1", "p", [3])
    fleet.until(lambda: settled(second, "req-1") and settled(sources, "req-1", Released))
    assert all(rank.told(Released)[0].receive_count == 1 for rank in sources)
    assert not any(rank.events for rank in destinations if rank not in second)


def test_a_wrong_claim_refuses_the_pair_on_both_sides_before_any_byte() -> None:
    """An engine that still computes its own number and gets it wrong (B01): both worlds hear it."""
    fleet = Fleet()
    source, destination = prefill(tp=2), decode(tp=4)
    fleet.launch(source)
    ranks = fleet.launch(destination)

    ranks[3].core.claims = [Claim(count="world_receive_count", value=2)]
    fleet.until(
        lambda: all(
            any(pair.state is LinkState.REJECTED for pair in rank.core.pairs.values())
            for rank in fleet.ranks.values()
        )
    )
    for rank in fleet.ranks.values():
        (pair,) = rank.core.pairs.values()
        assert any(found.slug == "receive_count_mismatch" for found in pair.findings)


def test_a_refused_message_of_opens_denies_each_and_gives_the_pages_back() -> None:
    """Whatever the daemon answers to a batch, no open waits for ever and no page is lost."""
    fleet = Fleet()
    source, destination = prefill(tp=1), decode(tp=1)
    fleet.launch(source)
    (taker,) = fleet.launch(destination)
    fleet.ready(source, destination)
    fleet.loss = 1.0
    taker.open("req-1", "p", [4, 5])
    numbers = [one.id for one in taker.core.session._outstanding._by_id.values()]
    refused = Rejected(findings=[finding(Code.FIELD_INVALID, "items", Side("a test", "x"))])
    for number in numbers:
        taker.core.session.receive(number, refused, fleet.now)
    assert [found.slug for _, _, found, _ in taker.answers if found] == ["field_invalid"]
    assert taker.core.destination.table._owner == {}


def test_a_daemon_with_another_clock_ends_what_the_old_one_granted_at_once() -> None:
    """An hour on the old clock is nothing on the new: expired and released, and all works again."""
    fleet = Fleet()
    source, destination = prefill(tp=1), decode(tp=2)
    (giver,) = fleet.launch(source)
    takers = fleet.launch(destination)
    fleet.ready(source, destination)
    giver.stage("req-1", [0, 1], ttl=3_000_000)
    takers[0].open("req-1", "p", [4, 5], ttl=300_000)
    fleet.until(lambda: settled(takers[:1], "req-1", Arrived))
    fleet.boot("another boot", fleet.now - 1000)
    fleet.until(lambda: settled(takers[:1], "req-1") and settled([giver], "req-1", Released))
    fleet.run(10_000)
    (outcome,) = takers[0].told(Outcome)
    assert outcome.outcome == "expired"
    assert outcome.finding is not None
    (released,) = giver.told(Released)
    assert released.reason == "expired"
    assert nothing_left(fleet)
    fleet.ready(source, destination)
    serve(fleet, source, destination, "req-2")
    fleet.until(lambda: settled(takers, "req-2"))
    assert all(rank.told(Outcome, "req-2")[0].delivered for rank in takers)


def test_a_grant_that_is_renewed_before_its_source_stages_is_served() -> None:
    """The prefill queue is longer than one grant: each open again carries it on."""
    fleet = Fleet()
    source, destination = prefill(tp=1), decode(tp=1)
    (giver,) = fleet.launch(source)
    (taker,) = fleet.launch(destination)
    fleet.ready(source, destination)
    for _ in range(4):
        taker.open("req-1", "p", [4, 5], ttl=5000)
        fleet.run(3000)
    assert not taker.told(Outcome)
    giver.stage("req-1", [0, 1])
    fleet.until(lambda: settled([taker], "req-1"))
    assert taker.told(Outcome)[0].delivered


def test_a_source_starts_nothing_more_of_a_transfer_that_is_being_aborted() -> None:
    """Told by the daemon, before any destination has drained; staged later, nothing is sent."""
    fleet = Fleet()
    source, destination = prefill(tp=1), decode(tp=1)
    (giver,) = fleet.launch(source)
    (taker,) = fleet.launch(destination)
    fleet.ready(source, destination)
    taker.open("req-1", "p", [4, 5])
    fleet.until(lambda: settled([giver], "req-1", Wanted))
    taker.core.abort("req-1", "the client left", fleet.now)
    fleet.settle(taker)
    fleet.until(lambda: bool(giver.core.source.ledger._aborting))
    assert not giver.core.source.ledger._parked
    giver.stage("req-1", [0, 1])
    fleet.until(lambda: settled([taker], "req-1"))
    fleet.run(1000)
    assert giver.sent_bytes == 0


def one_to_one(fleet: Fleet) -> tuple[Rank, Rank]:
    """Return source and destination of the smallest ready pair."""
    source, destination = prefill(tp=1), decode(tp=1)
    (giver,), (taker,) = fleet.launch(source), fleet.launch(destination)
    fleet.ready(source, destination)
    return giver, taker


@pytest.mark.parametrize("ttl", [0, 1500])
def test_an_open_that_no_daemon_answers_is_denied_and_gives_the_pages_back(ttl: int) -> None:
    """Time is up with its ttl, or the daemon's: a retryable denial, and no source heard of it."""
    fleet = Fleet()
    giver, taker = one_to_one(fleet)
    fleet.loss = 1.0
    taker.open("req-1", "p", [4, 5], ttl=ttl)
    fleet.until(lambda: bool(taker.answers), 61_000)
    ((_, number, denied, ended),) = taker.answers
    assert (number, ended) == (0, None)
    assert denied is not None
    assert denied.retryable
    assert "did not answer" in denied.message
    assert taker.core.destination.table._owner == {}
    assert giver.sent_bytes == 0


def test_a_rank_that_is_refused_for_good_denies_its_opens_and_frees_their_pages() -> None:
    """What was asked and what is asked later is denied; what is granted ends with its grant."""
    fleet = Fleet()
    _, taker = one_to_one(fleet)
    taker.open("req-1", "p", [4, 5], ttl=5000)
    fleet.until(lambda: bool(taker.opened))
    fleet.loss = 1.0
    taker.open("req-2", "p", [6])
    refusal = Refusal(code=Code.WIRE_VERSION.id, text="wire_version: too old")
    taker.core.session.receive(0, refusal, fleet.now)
    taker.open("req-3", "p", [7])
    fleet.settle(taker)
    denied = {request: found.message for request, _, found, _ in taker.answers if found}
    assert set(denied) == {"req-2", "req-3"}
    assert all("refused this rank" in message for message in denied.values())
    assert {page for _, page in taker.core.destination.table._owner} == {4, 5}
    fleet.until(lambda: bool(taker.told(Outcome, "req-1")), 10_000)
    (outcome,) = taker.told(Outcome, "req-1")
    assert outcome.outcome == "expired"
    assert nothing_left(fleet)


def test_a_refusal_of_one_message_of_opens_denies_these_alone() -> None:
    """too_large costs this message; the next open of the same session is granted."""
    fleet = Fleet()
    giver, taker = one_to_one(fleet)
    fleet.loss = 1.0
    taker.open("req-1", "p", [4, 5])
    refusal = Refusal(code=Code.TOO_LARGE.id, text="too_large: 2 MiB")
    for number in list(taker.core.session._outstanding._by_id):
        taker.core.session.receive(number, refusal, fleet.now)
    assert [found.slug for _, _, found, _ in taker.answers if found] == ["too_large"]
    fleet.loss = 0.0
    giver.stage("req-2", [0, 1])
    taker.open("req-2", "p", [4, 5])
    fleet.until(lambda: settled([taker], "req-2"))
    assert taker.told(Outcome, "req-2")[0].delivered


def test_an_abort_before_the_open_is_sent_denies_it_here() -> None:
    """The daemon never hears of it, and the pages are free at once."""
    fleet = Fleet()
    _, taker = one_to_one(fleet)
    taker.paused = True
    taker.open("req-1", "p", [4, 5])
    taker.core.abort("req-1", "the client left", fleet.now)
    taker.paused = False
    fleet.run(5000)
    ((_, number, denied, _),) = taker.answers
    assert (number, denied.slug if denied else "") == (0, "aborted")
    assert taker.core.destination.table._owner == {}
    assert fleet.daemon.transfers.by_id == {}


@pytest.mark.parametrize("staged", [False, True])
def test_an_abort_before_the_answer_aborts_what_is_granted_at_once(staged: bool) -> None:  # noqa: FBT001
    """The grant comes later than the abort: no byte moves, and the source gets its pages back."""
    fleet = Fleet()
    giver, taker = one_to_one(fleet)
    if staged:
        giver.stage("req-1", [0, 1])
    taker.open("req-1", "p", [4, 5])
    taker.core.abort("req-1", "the client left", fleet.now)
    fleet.until(lambda: settled([taker], "req-1") and nothing_left(fleet), 10_000)
    (outcome,) = taker.told(Outcome)
    assert outcome.outcome == "aborted"
    assert giver.sent_bytes == 0
    assert len(giver.told(Released)) == staged


def test_an_abort_of_an_open_that_is_denied_is_forgotten() -> None:
    """The next attempt of the same request runs."""
    fleet = Fleet()
    giver, taker = one_to_one(fleet)
    fleet.loss = 1.0
    taker.open("req-1", "p", [4, 5], ttl=1000)
    taker.core.abort("req-1", "the client left", fleet.now)
    fleet.until(lambda: bool(taker.answers), 3000)
    fleet.loss = 0.0
    giver.stage("req-1", [0, 1])
    taker.open("req-1", "p", [4, 5])
    fleet.until(lambda: settled([taker], "req-1", Arrived))
    fleet.until(lambda: bool(taker.told(Outcome, "req-1")))
    assert taker.told(Outcome, "req-1")[0].delivered


def test_an_end_that_comes_too_late_brings_the_outcome_whose_push_was_lost() -> None:
    """The answer to End names it: told once, never again as expired at the grant's end."""
    fleet = Fleet()
    giver, taker = one_to_one(fleet)
    giver.stage("req-1", [0, 1])
    taker.open("req-1", "p", [4, 5], ttl=5000)
    fleet.until(lambda: bool(taker.opened))
    taker.core.session.on_fresh(False)
    fleet.loss = 1.0
    fleet.until(lambda: bool(taker.told(Arrived)))
    (number,) = (
        each.id
        for each in taker.core.session._outstanding._by_id.values()
        if isinstance(each.build(), End)
    )
    (transfer,) = taker.core.destination.table.by_transfer
    answer = Ended(tick=fleet.now, items=[EndResult(transfer=transfer, late="failed")])
    taker.core.session.receive(number, answer, fleet.now)
    fleet.run(20_000)
    (outcome,) = taker.told(Outcome)
    assert outcome.outcome == "failed"
    assert taker.core.destination.table.by_transfer == {}
