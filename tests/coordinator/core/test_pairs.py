"""Pairs: judged once, told to everyone, linked by everyone, broken for everyone."""

from __future__ import annotations

import pytest
from msgspec.structs import replace as changed

from rankgate.coordinator.core import pairs as pairs_module
from rankgate.coordinator.core.judging import judge
from rankgate.coordinator.core.pairs import Pairs
from rankgate.coordinator.core.tables import PairState
from rankgate.proto.codes import Code
from rankgate.proto.findings import Side, finding
from rankgate.proto.grants import open_grant, pair_key
from rankgate.proto.messages import (
    Claim,
    LinkedAck,
    PairBroken,
    PairReady,
    Verdict,
    WorldSealed,
)
from tests.coordinator.core.harness import Agent, Bench, Job, codes, decode, prefill, rejected


def state_of(bench: Bench, source: str = "p", destination: str = "d") -> PairState:
    """Return a pair's state."""
    return bench.core.pairs.by_name[source, destination].state


def everyone(bench: Bench, source: Job, destination: Job) -> list[Agent]:
    """Seal both jobs; return all their agents."""
    return [*bench.seal(source), *bench.seal(destination)]


# --- verdicts ------------------------------------------------------------------------------------


def test_every_rank_of_both_worlds_is_told_the_verdict_and_its_part() -> None:
    """Counts, contacts, peers with registered addresses; the grant key for sources only."""
    bench = Bench()
    ours, theirs = bench.seal(prefill(tp=2)), bench.seal(decode(tp=4))
    for agent in ours:
        verdict = agent.last(Verdict)
        assert verdict.accepted
        assert (verdict.receive_count, verdict.send_count) == (2, 0)
        assert [contact.kind for contact in verdict.contacts] == ["data", "data"]
        assert len(verdict.grant_key) == 32
        assert {peer.rank for peer in verdict.peers} == {agent.rank * 2, agent.rank * 2 + 1}
    for agent in theirs:
        verdict = agent.last(Verdict)
        assert (verdict.receive_count, verdict.send_count) == (0, 1)
        assert verdict.grant_key == b""
        (peer,) = verdict.peers
        source = ours[agent.rank // 2].descriptor
        assert peer.rank == agent.rank // 2
        assert peer.address == source.transport.address
        assert peer.metadata_digest == source.transport.metadata_digest
        assert peer.incarnation == ours[peer.rank].incarnation
        assert peer.host == "host"
    digests = {agent.last(Verdict).table_digest for agent in (*ours, *theirs)}
    assert len(digests) == 1


def test_B21_peers_are_of_every_dp_group_at_their_registered_addresses() -> None:
    """A contact names a slot; its peers are that slot of all groups, wherever they listen."""
    bench = Bench()
    ours, theirs = bench.seal(prefill(dp=2)), bench.seal(decode(dp=3))
    verdict = ours[0].last(Verdict)
    assert [peer.dp for peer in verdict.peers] == [0, 1, 2]
    assert {peer.address for peer in verdict.peers} == {
        agent.descriptor.transport.address for agent in theirs
    }
    assert theirs[2].last(Verdict).dp == 2


def test_the_grant_key_belongs_to_the_pair_of_epochs() -> None:
    """What a source is given checks this pair's grants and no other's."""
    bench = Bench()
    ours, theirs = bench.pair(prefill(), decode())
    verdict = ours[0].last(Verdict)
    epochs = (verdict.source_epoch, verdict.destination_epoch)
    assert verdict.grant_key == pair_key(bench.identity.master, "p", epochs[0], "d", epochs[1])
    sealed = theirs[0].open("r1").grant
    assert open_grant(sealed, verdict.grant_key).request == "r1"


def test_A02_a_rejected_pair_is_told_to_both_sides_with_all_findings_before_any_request() -> None:
    """Page size and dtype differ: every rank of both worlds hears both, with both values."""
    bench = Bench()
    agents = everyone(bench, prefill(tp=2, page_size=2), decode(page_size=4, dtype="float16"))
    found = {}
    for agent in agents:
        verdict = agent.last(Verdict)
        assert not verdict.accepted
        found = {item.slug: item for item in verdict.findings}
        assert {"page_size_mismatch", "kv_dtype_mismatch"} <= set(found)
        assert "2 (k_item_len" in found["page_size_mismatch"].message
        assert "4 (k_item_len" in found["page_size_mismatch"].message
        assert "prefill p ranks 0-1" in found["page_size_mismatch"].message
        assert "decode d rank 0" in found["page_size_mismatch"].message
        assert (verdict.contacts, verdict.peers, verdict.grant_key) == ([], [], b"")
    assert state_of(bench) is PairState.REJECTED
    row = (bench.query("pairs").pairs or [])[0]
    assert (row.state, row.table_digest) == ("rejected", "")
    assert set(codes(row.findings)) == set(found)


@pytest.mark.parametrize(
    ("source", "destination", "pairs"),
    [
        (prefill(), decode(), True),
        (prefill(group="a"), decode(group="a"), True),
        (prefill(group="a"), decode(group="b"), False),
        (prefill(group="a"), decode(), False),
        (decode(), prefill(), True),
        (prefill(), prefill("d"), False),
        (decode("p"), decode(), False),
        (prefill(), Job(name="d", role="unified"), False),
        (prefill(), Job(name="d", role="encoder"), False),
    ],
)
def test_F07_only_equal_groups_and_fitting_roles_pair(
    source: Job, destination: Job, *, pairs: bool
) -> None:
    """A label pairs with the same label, unlabelled with unlabelled; roles decide the direction."""
    bench = Bench()
    agents = everyone(bench, source, destination)
    assert bool(bench.core.pairs.by_name) is pairs
    assert all(bool(agent.told(Verdict)) is pairs for agent in agents)
    for names in bench.core.pairs.by_name:
        assert bench.core.worlds.by_name[names[0]].role == "prefill"


def test_F07_two_by_two_with_one_incompatible_prefill() -> None:
    """Four pairs, two of them rejected with reasons; the good ones are not disturbed."""
    bench = Bench()
    good, bad = bench.seal(prefill("p1")), bench.seal(prefill("p2", page_size=4))
    theirs = [bench.seal(decode(name))[0] for name in ("d1", "d2")]
    rows = {(row.source, row.destination): row for row in bench.query("pairs").pairs or []}
    assert len(rows) == 4
    for (source, _), row in rows.items():
        assert row.state == ("linking" if source == "p1" else "rejected")
        assert bool(row.findings) is (source == "p2")
    assert [verdict.accepted for verdict in theirs[0].told(Verdict)] == [True, False]
    assert len(good[0].told(Verdict)) == len(bad[0].told(Verdict)) == 2


def test_warnings_and_counts_stand_in_the_pair_view() -> None:
    """The operator sees per rank what it must hear and whether it has linked."""
    bench = Bench()
    ours, theirs = bench.seal(prefill(tp=2)), bench.seal(decode(tp=4))
    ours[0].link()
    theirs[3].link()
    row = (bench.query("pairs").pairs or [])[0]
    counts = {(c.side, c.rank): (c.receive_count, c.send_count, c.linked) for c in row.counts}
    assert counts["source", 0] == (2, 0, True)
    assert counts["source", 1] == (2, 0, False)
    assert counts["destination", 3] == (0, 1, True)
    assert (row.linked, row.ranks) == (2, 6)
    assert row.waiting_for == ["p rank 1 to link", "d ranks 0-2 to link"]
    ours[1].link()
    row = (bench.query("pairs").pairs or [])[0]
    assert row.waiting_for == ["d ranks 0-2 to link"]


# --- judging -------------------------------------------------------------------------------------


def test_equal_shapes_are_judged_once() -> None:
    """Replicas of a world cost one judgement, and a re-seal costs none."""
    bench = Bench()
    bench.seal(prefill("p1"))
    for name in ("d1", "d2", "d3"):
        bench.seal(decode(name))
    assert bench.judged == 1
    bench.seal(prefill("p2"))
    assert bench.judged == 1
    agents = bench.core.worlds.by_name["d1"].members()
    assert len(agents) == 1
    again = bench.agents(decode("d1"), life="2")
    bench.core.sessions.lose(agents[0], "test")
    bench.tick()
    again[0].join()
    assert bench.judged == 1
    assert again[0].last(Verdict).accepted


def test_a_judgement_under_way_is_asked_for_once() -> None:
    """Pairs that wait for the same judgement all get their verdict when it comes."""
    bench = Bench(judging=False)
    ours = bench.seal(prefill())
    theirs = [bench.seal(decode(name))[0] for name in ("d1", "d2")]
    (asked,) = bench.asked
    assert not ours[0].told(Verdict)
    assert state_of(bench, "p", "d1") is PairState.WAITING
    bench.answer(asked)
    assert [agent.last(Verdict).accepted for agent in theirs] == [True, True]
    assert len(ours[0].told(Verdict)) == 2


def test_a_judgement_that_comes_too_late_is_for_nobody() -> None:
    """The world re-formed with another shape meanwhile: only the new judgement counts."""
    bench = Bench(judging=False)
    bench.seal(prefill())
    (old,) = bench.seal(decode())
    (first,) = bench.asked
    old.leave()
    (new,) = bench.seal(decode(tp=1, heads=4), "r2")
    bench.answer(first)
    assert not new.told(Verdict)
    bench.answer(bench.asked[1])
    assert not new.last(Verdict).accepted


@pytest.mark.parametrize("lost", ["source", "destination", "unsealed"])
def test_a_judgement_for_a_world_that_is_gone_is_kept_for_later(lost: str) -> None:
    """Nobody is told; when the world is back with the same shape nothing is judged again."""
    bench = Bench(judging=False)
    (ours,), (theirs,) = bench.seal(prefill()), bench.seal(decode())
    gone, other = (theirs, ours) if lost == "destination" else (ours, theirs)
    if lost == "unsealed":
        gone.drop()
        bench.wait(bench.settings.resume, beating=[other])
    else:
        gone.leave()
    bench.answer(bench.asked[0])
    assert not other.told(Verdict)
    job = decode() if lost == "destination" else prefill()
    (back,) = bench.seal(job, "r2")
    assert back.last(Verdict).accepted
    assert bench.judged == 1


@pytest.mark.parametrize("how", ["left", "crashed"])
def test_a_judgement_for_a_world_that_came_back_in_another_group_is_for_nobody(how: str) -> None:
    """Same name and shape under another label: no verdict, no pair that waits for ever."""
    bench = Bench(judging=False)
    (ours,), (theirs,) = bench.seal(prefill()), bench.seal(decode())
    if how == "left":
        theirs.leave()
    else:
        theirs.drop()
        bench.wait(bench.settings.resume, beating=[ours])
    (back,) = bench.seal(decode(group="x"), "r2")
    bench.answer(bench.asked[0])
    assert not ours.told(Verdict)
    assert not back.told(Verdict)
    assert bench.core.pairs.by_name == {}
    status = bench.query("status").status
    assert status is not None
    assert status.healthy


def test_a_judgement_that_comes_twice_is_given_once() -> None:
    """A repeated VerdictReached tells nobody anything twice."""
    bench = Bench(judging=False)
    (ours,) = bench.seal(prefill())
    bench.seal(decode())
    bench.answer(bench.asked[0])
    bench.answer(bench.asked[0])
    assert len(ours.told(Verdict)) == 1


def test_the_cache_of_judgements_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used judgement goes first; it is simply judged again."""
    monkeypatch.setattr(pairs_module, "_MAX_JUDGEMENTS", 2)
    bench = Bench()
    bench.seal(prefill())
    for name, heads in (("d1", 8), ("d2", 4), ("d3", 8), ("d4", 2), ("d5", 8), ("d6", 4)):
        bench.seal(decode(name, heads=heads))
    assert bench.judged == 4
    assert len(bench.core.pairs._judgements) == 2


# --- linking -------------------------------------------------------------------------------------


def test_the_pair_is_ready_when_every_rank_has_linked_and_not_before() -> None:
    """PairReady goes to all ranks of both sides, once, after the last report."""
    bench = Bench()
    agents = everyone(bench, prefill(tp=2), decode(tp=2))
    for agent in agents[:-1]:
        assert agent.link() == LinkedAck()
        assert agent.link() == LinkedAck()
    assert not any(agent.told(PairReady) for agent in agents)
    assert state_of(bench) is PairState.LINKING
    assert agents[-1].link() == LinkedAck()
    assert state_of(bench) is PairState.READY
    for agent in agents:
        (ready,) = agent.told(PairReady)
        verdict = agent.last(Verdict)
        assert ready.source_epoch == verdict.source_epoch
        assert ready.destination_epoch == verdict.destination_epoch
    assert agents[0].link() == LinkedAck()
    assert all(len(agent.told(PairReady)) == 1 for agent in agents)


def test_B01_a_wrong_claim_is_refused_while_linking_and_both_worlds_are_told() -> None:
    """'Inconsistent receive_count: registered 4, got 2' is a refusal with rank and numbers."""
    bench = Bench()
    agents = everyone(bench, prefill(tp=2), decode(tp=4))
    (found,) = rejected(agents[1].link(claims=[Claim(count="world_receive_count", value=2)]))
    assert found.slug == "receive_count_mismatch"
    assert "prefill p rank 1 has 2" in found.message
    assert "computed from the world sizes has 4" in found.message
    assert state_of(bench) is PairState.REJECTED
    for agent in agents:
        verdict = agent.last(Verdict)
        assert not verdict.accepted
        assert codes(verdict.findings) == ["receive_count_mismatch"]
    late = rejected(agents[0].link(agents[0].told(Verdict)[0]))
    assert codes(late) == ["receive_count_mismatch"]
    assert not any(agent.told(PairReady) for agent in agents)


def test_right_claims_are_taken() -> None:
    """Each side may claim the numbers that concern it."""
    bench = Bench()
    ours, theirs = bench.seal(prefill(tp=2)), bench.seal(decode(tp=4))
    world = Claim(count="world_receive_count", value=4)
    for agent in ours:
        assert agent.link(claims=[world, Claim(count="receive_count", value=2)]) == LinkedAck()
    for agent in theirs:
        assert agent.link(claims=[world, Claim(count="send_count", value=1)]) == LinkedAck()
    assert state_of(bench) is PairState.READY


@pytest.mark.parametrize("count", ["send_count", "replicas", ""])
def test_a_claim_of_an_unknown_count_is_refused(count: str) -> None:
    """A source has no send_count; unknown names are listed."""
    bench = Bench()
    agents = everyone(bench, prefill(), decode())
    (found,) = rejected(agents[0].link(claims=[Claim(count=count, value=1)]))
    assert found.slug == "value_invalid"
    assert repr(count) in found.message
    assert "known: world_receive_count" in found.message


def test_another_table_digest_is_refused_with_both_digests() -> None:
    """An agent that planned something else rejects the pair for both worlds."""
    bench = Bench()
    agents = everyone(bench, prefill(), decode())
    digest = agents[0].last(Verdict).table_digest
    (found,) = rejected(agents[0].link(table_digest=bytes(16)))
    assert found.slug == "metadata_mismatch"
    assert bytes(16).hex() in found.message
    assert digest.hex() in found.message
    assert codes(agents[1].last(Verdict).findings) == ["metadata_mismatch"]


def test_a_rank_that_cannot_link_says_why_and_everyone_hears() -> None:
    """The finding of the rank reaches both worlds and the operator."""
    bench = Bench()
    agents = everyone(bench, prefill(), decode())
    found = finding(Code.METADATA_MISMATCH, "metadata", Side("d rank 0", "other"))
    assert rejected(agents[1].link(findings=[found])) == [found]
    for agent in agents:
        assert agent.last(Verdict).findings == [found]
    assert state_of(bench) is PairState.REJECTED


def test_linked_for_a_stale_epoch_or_a_foreign_pair_is_refused() -> None:
    """Only the current epochs of a pair that the rank belongs to are linked."""
    bench = Bench()
    agents = everyone(bench, prefill(), decode())
    (outsider,) = bench.seal(decode("other", group="x"))
    verdict = agents[0].last(Verdict)
    for agent, epochs in ((agents[0], 99), (outsider, verdict.source_epoch)):
        (found,) = rejected(agent.link(verdict, source_epoch=epochs))
        assert found.slug == "stale_epoch"
        assert f"{epochs}:{verdict.destination_epoch}" in found.message
    assert "p:d 1:2" in rejected(agents[0].link(verdict, source_epoch=9))[0].message
    assert "no pair of this world" in rejected(outsider.link(verdict))[0].message
    assert state_of(bench) is PairState.LINKING


def test_a_refusal_after_ready_ends_the_pair_too() -> None:
    """A late wrong claim rejects a ready pair; nothing more is granted."""
    bench = Bench()
    ours, theirs = bench.pair(prefill(), decode())
    rejected(ours[0].link(claims=[Claim(count="receive_count", value=9)]))
    assert state_of(bench) is PairState.REJECTED
    item = theirs[0].item("r1")
    (result,) = theirs[0].open_items([item])
    assert result.finding is not None
    assert result.finding.slug == "pair_not_ready"
    assert "rejected" in result.finding.message


# --- breaking ------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["source", "destination"])
def test_a_broken_world_breaks_its_pairs_for_both_sides(side: str) -> None:
    """Both hear PairBroken with the epochs that ended, the lost ranks and which side it was."""
    bench = Bench()
    ours, theirs = bench.pair(prefill(tp=2), decode(tp=2))
    lost = ours if side == "source" else theirs
    lost[1].leave()
    for agent in (ours[0], theirs[0], (theirs if side == "source" else ours)[1]):
        (told,) = agent.told(PairBroken)
        assert (told.source_epoch, told.destination_epoch) == (1, 2)
        assert (told.source_lost, told.destination_lost) == (side == "source", side != "source")
        assert told.lost_ranks == [1]
        assert codes(told.findings) == ["world_broken"]
    assert state_of(bench) is PairState.WAITING
    assert bench.core.pairs.by_epochs == {}
    row = (bench.query("pairs").pairs or [])[0]
    name = "p" if side == "source" else "d"
    assert row.waiting_for == [f"{name} is not sealed: missing rank 1"]


def test_C04_only_pairs_of_the_lost_world_are_broken() -> None:
    """Another prefill world goes on without noticing."""
    bench = Bench()
    (first,), (second,) = bench.seal(prefill("p1")), bench.seal(prefill("p2"))
    (theirs,) = bench.seal(decode())
    for agent in (first, second):
        agent.link()
    for verdict in theirs.told(Verdict):
        theirs.link(verdict)
    first.drop()
    bench.wait(bench.settings.resume, beating=(second, theirs))
    assert state_of(bench, "p2", "d") is PairState.READY
    assert [told.source for told in theirs.told(PairBroken)] == ["p1"]
    assert not second.told(PairBroken)
    assert theirs.open("r1").grant


def test_C05_a_resealed_world_is_judged_from_the_cache_and_must_link_anew() -> None:
    """New epochs, a new verdict, and no grant before all links of the new epochs stand."""
    bench = Bench()
    ours, theirs = bench.pair(prefill(tp=2), decode())
    ours[1].leave()
    fresh = bench.agents(prefill(tp=2), life="2")[1]
    fresh.join()
    assert bench.judged == 1
    verdict = theirs[0].last(Verdict)
    assert (verdict.source_epoch, verdict.destination_epoch) == (3, 2)
    assert theirs[0].open("r1").finding.slug == "pair_not_ready"  # type: ignore[union-attr]
    stale = theirs[0].told(Verdict)[0]
    assert codes(rejected(theirs[0].link(stale))) == ["stale_epoch"]
    bench.link(ours[0], fresh, *theirs)
    assert state_of(bench) is PairState.READY
    assert theirs[0].open("r1").grant


def test_a_rejected_pair_is_told_when_its_world_breaks_and_judged_again_after() -> None:
    """A rejected pair waits like any other; with the cause mended it is accepted."""
    bench = Bench()
    (ours,), (theirs,) = bench.seal(prefill(page_size=4)), bench.seal(decode())
    ours.drop()
    bench.wait(bench.settings.resume, beating=[theirs])
    assert theirs.told(PairBroken)
    (mended,) = bench.seal(prefill(), "r2")
    assert mended.last(Verdict).accepted
    bench.link(mended, theirs)
    assert state_of(bench) is PairState.READY
    row = (bench.query("pairs").pairs or [])[0]
    assert row.findings == []


def test_C23_after_a_restart_nothing_is_granted_until_everybody_linked_again() -> None:
    """Epochs are confirmed, but links and sessions are anew."""
    bench = Bench()
    ours, theirs = bench.pair(prefill(tp=2), decode())
    before = theirs[0].last(WorldSealed).epoch
    bench.restart()
    for agent in (*ours, *theirs):
        agent.join()
    assert theirs[0].last(WorldSealed).epoch == before
    assert theirs[0].open("r1").finding.slug == "pair_not_ready"  # type: ignore[union-attr]
    bench.link(*ours, *theirs)
    assert theirs[0].open("r1").grant


def test_what_a_pair_waits_for_is_said_in_words() -> None:
    """Unsealed, unfit, then linking: each is named with its ranks."""
    bench = Bench()
    ours = bench.agents(prefill(tp=2))
    bench.seal(decode())
    ours[0].join()
    ours[1].join()
    pair = bench.core.pairs.by_name["p", "d"]
    words = bench.core.pairs.waiting_for(pair)
    assert words == ["p ranks 0-1 to link", "d rank 0 to link"]
    ours[1].drop()
    assert bench.core.pairs.waiting_for(pair)[0] == "p: rank 1 disconnected"
    bench.wait(bench.settings.resume, beating=[ours[0]])
    assert bench.core.pairs.waiting_for(pair)[0] == "p is not sealed: missing rank 1"
    bench.core.sessions.lose(bench.core.sessions.by_id[ours[0].session], "test")
    assert bench.core.pairs.waiting_for(pair)[0] == "p is not sealed: none of its ranks is there"


def test_a_pair_that_was_refused_at_a_profile_says_so() -> None:
    """The judgement names codes of topology as well."""
    judgement = judge(prefill(profile="sglang").shape(), decode().shape())
    assert [ruling.code for ruling in judgement.rulings] == [Code.PROFILE_MISMATCH]
    assert judgement.plan is None


def test_pairs_that_are_not_wired_fail_loudly() -> None:
    """A part that was not connected is a defect of ours."""
    bench = Bench()
    core = bench.core
    bare = Pairs(core._turn, bench.identity, core.sessions, core.worlds)
    bench.pair(prefill(), decode())
    with pytest.raises(AssertionError, match="not wired"):
        bare.on_broken(core.pairs.by_name["p", "d"], (1, 2), None)


def test_a_story_tells_why() -> None:
    """Worlds and pairs keep what happened to them, bounded."""
    bench = Bench()
    ours, _ = bench.pair(prefill(), decode())
    events = [line.split()[0] for _, line in bench.core.story("pair:p:d")]
    assert events == ["pair_accepted", "pair_ready"]
    assert [line.split()[0] for _, line in bench.core.story("world:p")] == [
        "rank_counted",
        "world_sealed",
    ]
    assert bench.core.story("world:unknown") == []
    told = bench.query("story", "pair:p:d").story
    assert told is not None
    assert told[0].startswith("-0.000 s pair_accepted")
    assert changed(ours[0].last(Verdict), accepted=False).accepted is False


def test_C05_a_link_that_is_lost_holds_grants_until_all_have_linked_again() -> None:
    """A failure that may pass takes the pair back to linking; everyone is told the verdict anew."""
    bench = Bench()
    ours, theirs = bench.pair(prefill(tp=2), decode(tp=2))
    before = [len(agent.told(Verdict)) for agent in (*ours, *theirs)]
    lost = finding(Code.LINK_FAILED, "links", Side("p rank 1", "no answer"))
    theirs[1].link(findings=[lost])
    assert state_of(bench).value == "linking"
    assert [len(agent.told(Verdict)) for agent in (*ours, *theirs)] == [n + 1 for n in before]
    assert all(agent.last(Verdict).accepted for agent in (*ours, *theirs))
    denied = theirs[0].open("r1").finding
    assert denied is not None
    assert denied.slug == "pair_not_ready"
    theirs[1].link(findings=[lost])
    assert state_of(bench).value == "linking"
    bench.link(*ours, *theirs)
    assert state_of(bench).value == "ready"
    assert theirs[0].open("r1").grant
    status = bench.query("status").status
    assert status is not None
    assert "link_failed" in [refused.finding.slug for refused in status.refusals]
