"""Links: who answers is checked, old and new verdicts are told apart, memory must fit the plan."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from rankgate.agents.linking import LINK_MS, LinkState, Registered, check_slices
from rankgate.proto.codec import encode_blob
from rankgate.proto.codes import Code
from rankgate.proto.findings import Side, finding
from rankgate.proto.messages import (
    Drain,
    Linked,
    Metadata,
    PeerHello,
    PeerWelcome,
    Present,
    Refusal,
    Rejected,
)
from tests.agents.fleet import Fleet, Rank
from tests.agents.pairs import sealed, whole
from tests.coordinator.core.harness import decode, id16, prefill

ROUTE = b"\0test"


@pytest.fixture
def fleet() -> Fleet:
    """A prefill and a decode rank whose pair is ready."""
    fleet = Fleet()
    fleet.launch(prefill())
    fleet.launch(decode())
    fleet.ready(prefill(), decode())
    return fleet


def both(fleet: Fleet) -> tuple[Rank, Rank]:
    """Return source and destination."""
    return fleet.ranks["p", 0], fleet.ranks["d", 0]


def hello_of(fleet: Fleet, **changes: Any) -> PeerHello:  # noqa: ANN401 - fields of PeerHello
    """Return what the destination would say to the source."""
    source, destination = both(fleet)
    pair = destination.pair("p")
    hello = PeerHello(
        world="d",
        epoch=pair.epochs[1],
        rank=0,
        incarnation=destination.core.identity.incarnation,
        source_world="p",
        source_epoch=pair.epochs[0],
        source_rank=0,
        source_incarnation=source.core.identity.incarnation,
        table_digest=pair.verdict.table_digest,
        metadata=destination.core.registered.blob,
    )
    return replace(hello, **changes)


def answer_to(fleet: Fleet, message: Any) -> Any:  # noqa: ANN401 - any message and its answer
    """Let a message reach the source on a route of its own; return the answer, if one came."""
    source, _ = both(fleet)
    side = source.core.source
    side.receive(ROUTE, 5, message, fleet.now)
    found = [item for route, _, item in side.out if route == ROUTE]
    side.out.clear()
    return found[0] if found else None


def test_a_repeated_hello_is_welcomed_again(fleet: Fleet) -> None:
    """The answer was lost: the same link, welcomed a second time."""
    assert isinstance(answer_to(fleet, hello_of(fleet)), PeerWelcome)
    assert isinstance(answer_to(fleet, hello_of(fleet)), PeerWelcome)


@pytest.mark.parametrize(
    ("changes", "slug", "words"),
    [
        ({"source_incarnation": id16("another")}, "identity_mismatch", "expects"),
        ({"source_rank": 3}, "identity_mismatch", "rank 3"),
        ({"incarnation": id16("another")}, "identity_mismatch", "verdict"),
        ({"rank": 9}, "identity_mismatch", "no such contact"),
        ({"table_digest": id16("x")}, "metadata_mismatch", "table_digest"),
        ({"metadata": b"\x80"}, "metadata_mismatch", "validated"),
    ],
)
def test_a_dialer_that_means_another_process_is_told_who_answered(
    fleet: Fleet, changes: dict[str, Any], slug: str, words: str
) -> None:
    """Expected and found identity stand in the refusal (C07)."""
    answer = answer_to(fleet, hello_of(fleet, **changes))
    assert isinstance(answer, Rejected)
    (found,) = answer.findings
    assert found.slug == slug
    assert words in found.message


def test_an_older_epoch_is_stale_and_a_newer_one_is_waited_for(fleet: Fleet) -> None:
    """Older: refused at once. Unknown and newer: held for the probe time, then refused."""
    epochs = both(fleet)[1].pair("p").epochs
    older = answer_to(fleet, hello_of(fleet, epoch=epochs[1] - 1, source_epoch=epochs[0] - 1))
    assert older.findings[0].slug == "stale_epoch"
    assert answer_to(fleet, hello_of(fleet, epoch=epochs[1] + 5)) is None
    source, _ = both(fleet)
    fleet.now += 1000
    source.core.source.tick(fleet.now)
    ((_, number, late),) = source.core.source.out
    assert number == 5
    assert isinstance(late, Rejected)
    assert late.findings[0].slug == "stale_epoch"


def test_a_peer_of_another_wire_version_gets_a_readable_answer(fleet: Fleet) -> None:
    """Kind 0 with both ranges."""
    answer = answer_to(fleet, hello_of(fleet, wire_min=7, wire_max=9))
    assert isinstance(answer, Refusal)
    assert (answer.min, answer.max) == (1, 1)


def test_who_has_no_link_is_told_so(fleet: Fleet) -> None:
    """A presentation or a drain before PeerHello changes nothing."""
    for message in (Present(grant=sealed(), counts={}, credit=1), Drain(grant=sealed())):
        answer = answer_to(fleet, message)
        assert answer.findings[0].slug == "no_session"


def test_metadata_that_was_not_validated_refuses_the_pair() -> None:
    """The blob has another digest than was registered: both worlds hear metadata_mismatch."""
    fleet = Fleet()
    (source,) = fleet.launch(prefill())
    source.core.registered = Registered(
        blob=encode_blob(Metadata(kind="zmq", regions=[])),
        lengths=source.core.registered.lengths,
        item_lens=source.core.registered.item_lens,
    )
    (destination,) = fleet.launch(decode())
    fleet.until(
        lambda: all(
            any(pair.state is LinkState.REJECTED for pair in rank.core.pairs.values())
            for rank in (source, destination)
        )
    )
    for rank in (source, destination):
        (pair,) = rank.core.pairs.values()
        assert "metadata_mismatch" in {found.slug for found in pair.findings}


def test_a_contact_that_does_not_answer_is_named_and_still_waited_for() -> None:
    """After 10 s link_failed names its address; when it answers, the pair is ready after all."""
    fleet = Fleet()
    (source,) = fleet.launch(prefill())
    (destination,) = fleet.launch(decode())
    fleet.until(lambda: bool(destination.core.pairs))
    route = destination.core.destination
    silent, route.receive = route.receive, lambda *_args: None  # type: ignore[method-assign]
    fleet.run(LINK_MS + 500)
    (pair,) = destination.core.pairs.values()
    assert pair.state is LinkState.LINKING
    assert pair.findings[0].slug == "link_failed"
    assert source.address in pair.findings[0].message
    route.receive = silent  # type: ignore[method-assign]
    fleet.ready(prefill(), decode())
    assert pair.findings == []


@pytest.mark.parametrize(
    ("part", "fits"),
    [
        (whole(layers=2, length=64), True),
        (whole(layers=3, length=64), False),
        (whole(layers=2, length=65), False),
        (replace(whole(layers=2, length=32), destination_offset=33), False),
        (replace(whole(length=16), count=4, destination_stride=17), False),
        (replace(whole(), part="v"), False),
        (replace(whole(), destination_offset=1 << 63), False),
    ],
)
def test_a_plan_that_leaves_registered_memory_is_refused(part: Any, fits: bool) -> None:  # noqa: ANN401, FBT001 - a table
    """Layers and bytes of every slice are checked against what this rank registered (A38)."""
    ours = Registered(blob=b"", lengths={("full", "k"): [640, 640]}, item_lens={("full", "k"): 64})
    found = check_slices([part], ours, sending=False)
    assert (found is None) is fits
    assert found is None or found.slug == "metadata_mismatch"


def test_a_newer_epoch_drops_what_belongs_to_the_older() -> None:
    """A new round of the source: one pair is left, under the new epoch, and old links are gone."""
    fleet = Fleet()
    source, destination = prefill(tp=2), decode()
    old = fleet.launch(source)
    (taker,) = fleet.launch(destination)
    fleet.ready(source, destination)
    before = taker.pair("p").epochs
    for rank in old:
        fleet.kill(rank)
    fleet.launch(source, "r2")
    fleet.ready(source, destination, ms=70_000)
    after = taker.pair("p").epochs
    assert list(taker.core.pairs) == [after]
    assert after[0] > before[0]
    assert {key[0] for key in taker.dialed} == {after}


def test_linked_carries_claims_and_the_table_digest() -> None:
    """What a rank says once all its links stand."""
    fleet = Fleet()
    (source,) = fleet.launch(prefill())
    said: list[Linked] = []
    step = fleet.step

    def watch(event: Any) -> None:  # noqa: ANN401 - any event of the core
        if isinstance(getattr(event, "message", None), Linked):
            said.append(event.message)
        step(event)

    fleet.step = watch  # type: ignore[method-assign]
    fleet.launch(decode())
    fleet.ready(prefill(), decode())
    assert len(said) == 2
    assert {one.table_digest for one in said} == {source.pair("d").verdict.table_digest}


def test_a_pair_that_failed_to_link_is_dialed_anew_when_told_again(fleet: Fleet) -> None:
    """The same verdict after a retryable failure: a new hello, and ready without an operator."""
    _, destination = both(fleet)
    pair = destination.pair("p")
    why = finding(Code.LINK_FAILED, "links", Side("a test", "x"))
    destination.core.link_failed(pair, [why], fleet.now)
    assert pair.state is LinkState.REJECTED
    assert not pair.links[0].up
    fleet.settle(destination)
    fleet.ready(prefill(), decode())
    again = destination.pair("p")
    assert again.epochs == pair.epochs
    assert again.links[0].up


def test_pairs_of_worlds_that_are_gone_are_let_go() -> None:
    """Twelve dead prefill worlds leave no pair, no link and no hello behind on either side."""
    fleet = Fleet()
    (taker,) = fleet.launch(decode())
    names = [f"p{index}" for index in range(12)]
    for name in names:
        fleet.launch(prefill(name))
    fleet.until(lambda: len(taker.dialed) == 12)
    fleet.ready(decode(), *(prefill(name) for name in names))
    givers = [fleet.ranks[name, 0] for name in names]
    for giver in givers[1:]:
        fleet.kill(giver)
    fleet.run(100_000)
    assert [pair.other for pair in taker.core.pairs.values()] == ["p0"]
    assert {key[0] for key in taker.dialed} == set(taker.core.pairs)
    assert len(taker.core.destination._outstanding) == 0
    fleet.kill(taker)
    fleet.run(100_000)
    assert not givers[0].core.pairs
    assert not givers[0].core.source.links


def test_a_hello_that_is_repeated_while_it_waits_is_held_once(fleet: Fleet) -> None:
    """One answer for one id, after the daemon's own probe time."""
    source, destination = both(fleet)
    rules = source.core.session.rules
    assert rules is not None
    source.core.session.rules = replace(rules, probe=3000)
    newer = hello_of(fleet, epoch=destination.pair("p").epochs[1] + 5)
    for _ in range(3):
        assert answer_to(fleet, newer) is None
    source.core.source.tick(fleet.now + 2999)
    assert not source.core.source.out
    source.core.source.tick(fleet.now + 3000)
    assert [number for _, number, _ in source.core.source.out] == [5]
