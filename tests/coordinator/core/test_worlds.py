"""Worlds: rounds form and never mix, seal once, break, and survive a restart of the daemon."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace as changed

from rankgate.coordinator.core.effects import Persist, Send
from rankgate.coordinator.core.rounds import Round, World
from rankgate.coordinator.core.rules.agreement import check_agreement
from rankgate.coordinator.core.settings import Durable, SealedRecord, Settings
from rankgate.coordinator.core.tables import PairState, RankState, WorldState
from rankgate.proto import codec as wire
from rankgate.proto.descriptor import Coordinates
from rankgate.proto.messages import (
    Heartbeat,
    HeartbeatAck,
    Hello,
    Left,
    PairBroken,
    Probe,
    ProbeAck,
    Registered,
    Rejected,
    Verdict,
    WorldForming,
    WorldSealed,
)
from tests.coordinator.core.harness import (
    Bench,
    codes,
    decode,
    id16,
    need_hello,
    prefill,
    rejected,
    state,
)


def test_C10_nothing_is_sealed_before_every_rank_is_there() -> None:
    """Ranks 0, 1, 3 of 4: forming, 2 missing, no count told; then sealed and told once each."""
    bench = Bench()
    agents = bench.agents(prefill(tp=4))
    for rank in (0, 1, 3):
        agents[rank].join()
    row = bench.query("status").status.worlds[0]  # type: ignore[union-attr]
    assert (row.state, row.have, row.size, row.missing) == ("forming", 3, 4, [2])
    assert row.receive_count == 0
    assert not any(agent.told(WorldSealed) for agent in agents)
    agents[2].join()
    for agent in agents:
        (sealed,) = agent.told(WorldSealed)
        assert (sealed.world, sealed.size, sealed.receive_count) == ("p", 4, 4)
    assert len({agent.last(WorldSealed).epoch for agent in agents}) == 1
    assert len({agent.last(WorldSealed).digest for agent in agents}) == 1


def test_B01_receive_count_is_of_one_dp_group_at_one_stage() -> None:
    """Stage 0 of one data-parallel group counts, not the world size."""
    bench = Bench()
    agents = bench.seal(prefill(tp=4, pp=2, dp=2))
    assert {agent.last(WorldSealed).receive_count for agent in agents} == {4}
    assert {agent.last(WorldSealed).size for agent in agents} == {16}


def test_a_rank_counts_only_after_its_first_heartbeat() -> None:
    """Registered alone is not enough to be counted or to seal."""
    bench = Bench()
    (agent,) = bench.agents(prefill())
    agent.hello()
    assert isinstance(agent.register(), Registered)
    assert bench.core.worlds.by_name == {}
    assert isinstance(agent.beat(), HeartbeatAck)
    assert agent.told(WorldSealed)


def test_the_epoch_is_durable_before_anyone_hears_of_it() -> None:
    """In the effects of the sealing step, Persist stands before every Send of the epoch."""
    bench = Bench()
    (agent,) = bench.agents(prefill())
    agent.hello()
    agent.register()
    bench.log.clear()
    agent.beat()
    kinds = [
        type(effect)
        for effect in bench.log
        if isinstance(effect, Persist)
        or (isinstance(effect, Send) and isinstance(effect.message, WorldSealed))
    ]
    assert kinds == [Persist, Send]


def test_epochs_grow_over_all_worlds() -> None:
    """Every seal takes the next epoch of one counter."""
    bench = Bench(durable=Durable(epoch=41))
    epochs = [bench.seal(prefill(name))[0].last(WorldSealed).epoch for name in ("a", "b", "c")]
    assert epochs == [42, 43, 44]
    assert [effect.epoch for effect in bench.persisted] == epochs


def test_C23_a_restart_confirms_the_same_processes_under_their_epoch() -> None:
    """The same incarnations and descriptors keep their epoch, and nothing is written again."""
    bench = Bench()
    agents = bench.seal(prefill(tp=2))
    epoch, digest = agents[0].last(WorldSealed).epoch, agents[0].last(WorldSealed).digest
    bench.restart()
    written = len(bench.persisted)
    assert need_hello(agents[0].beat())
    for agent in reversed(agents):
        agent.join()
    assert agents[1].last(WorldSealed).epoch == epoch
    assert agents[1].last(WorldSealed).digest == digest
    assert len(bench.persisted) == written


@pytest.mark.parametrize("what", ["life", "round", "descriptor", "other world"])
def test_C23_a_restart_gives_any_other_set_a_new_epoch(what: str) -> None:
    """Another incarnation, round or layout is above every epoch that was ever durable."""
    bench = Bench()
    job = prefill(tp=2)
    bench.seal(job)
    bench.seal(prefill("q"))
    highest = bench.stored().epoch
    bench.restart()
    again = {
        "life": lambda: bench.seal(job, life="2"),
        "round": lambda: bench.seal(job, of_round="r2", life="r1"),
        "descriptor": lambda: bench.seal(job.but(heads=4), life="r1"),
        "other world": lambda: bench.seal(prefill("z")),
    }[what]()
    assert again[0].last(WorldSealed).epoch == highest + 1


def test_a_new_epoch_after_a_restart_replaces_the_durable_record() -> None:
    """What was confirmed or re-formed is what a second restart confirms."""
    bench = Bench()
    job = prefill(tp=2)
    bench.seal(job)
    bench.restart()
    agents = bench.seal(job, life="2")
    epoch = agents[0].last(WorldSealed).epoch
    assert bench.record("p") == SealedRecord(
        world="p",
        epoch=epoch,
        round=agents[0].token,
        digest=agents[0].last(WorldSealed).digest,
        incarnations=[agent.incarnation for agent in agents],
    )
    bench.restart()
    for agent in agents:
        agent.join()
    assert agents[0].last(WorldSealed).epoch == epoch


# --- rounds --------------------------------------------------------------------------------------


def test_C14_rounds_never_mix() -> None:
    """Rank 0 of one round and rank 1 of another do not make a world."""
    bench = Bench()
    first, second = bench.agents(prefill(tp=2)), bench.agents(prefill(tp=2), "r2")
    first[0].join()
    second[1].join()
    assert not first[0].told(WorldSealed)
    second[0].join()
    assert second[0].told(WorldSealed)
    assert second[1].told(WorldSealed)
    assert not first[0].told(WorldSealed)


def test_C14_ranks_may_swap_between_rounds() -> None:
    """In round 2 the processes have each other's ranks; round 1 left, so 2 is sealed anew."""
    bench = Bench()
    job = prefill(tp=2)
    old = bench.seal(job)
    for agent in old:
        agent.leave()
    new = bench.agents(job, "r2")
    new[0].incarnation, new[1].incarnation = old[1].incarnation, old[0].incarnation
    for agent in new:
        agent.join()
    assert new[0].last(WorldSealed).epoch > old[0].last(WorldSealed).epoch
    assert need_hello(old[0].beat())


def test_world_in_use_when_a_member_of_the_older_round_answers() -> None:
    """A living round keeps its name: newcomers are refused, may retry, and hear both hosts."""
    bench = Bench()
    old = bench.seal(prefill(tp=2, host="alpha"))
    new = bench.agents(prefill(tp=2, host="beta"), "r2")
    new[0].hello()
    (found,) = rejected(new[0].register())
    assert found.slug == "world_in_use"
    assert found.retryable
    assert "alpha" in found.message
    assert "beta" in found.message
    assert bench.core.worlds.by_name["p"].sealed is not None
    assert not old[0].told(WorldForming)


def test_an_older_round_that_does_not_answer_is_broken_first() -> None:
    """After `probe` without answer the old epoch ends and the newcomers are sealed above it."""
    bench = Bench()
    old, _ = bench.pair(prefill(tp=2), decode(tp=2))
    for agent in old:
        agent.answers_probes = False
    new = bench.agents(prefill(tp=2), "r2")
    for agent in new:
        agent.hello()
        assert agent.register() is None
    bench.wait(999, beating=())
    assert bench.late(new[0].last_id) == []
    bench.wait(1, beating=())
    for agent in new:
        assert isinstance(agent.registered(bench.late(agent.last_id)), Registered)
        agent.beat()
    sealed = new[0].last(WorldSealed)
    assert sealed.epoch > old[0].last(WorldSealed).epoch
    assert old[0].told(PairBroken)
    assert need_hello(old[0].beat())


def test_an_older_round_without_any_connection_is_broken_at_once() -> None:
    """Nobody can be asked, so nobody is waited for."""
    bench = Bench()
    old = bench.seal(prefill(tp=2))
    for agent in old:
        agent.drop()
    new = bench.agents(prefill(tp=2), "r2")
    new[0].hello()
    assert isinstance(new[0].register(), Registered)
    assert old[0].session not in bench.core.sessions.by_id


def test_a_probe_that_was_answered_cannot_break_a_later_one() -> None:
    """The deadline of the first probe does not end a second one that began just before it."""
    bench = Bench()
    old = bench.seal(prefill())
    (new,) = bench.agents(prefill(), "r2")
    new.hello()
    assert rejected(new.register())
    old[0].answers_probes = False
    bench.now += 1000
    assert new.register() is None
    bench.wait(10, beating=())
    assert bench.late(new.last_id) == []
    assert bench.core.worlds.by_name["p"].sealed is not None
    bench.say(old[0], ProbeAck(session=old[0].session))
    assert codes(rejected(new.registered(bench.late(new.last_id)))) == ["world_in_use"]


def test_a_probe_is_shared_and_a_register_repeated_meanwhile_is_not_a_second_one() -> None:
    """Two newcomers hear of one probe; a repeat of Register waits for the same answer."""
    bench = Bench()
    old = bench.seal(prefill(tp=2))
    for agent in old:
        agent.answers_probes = False
    new = bench.agents(prefill(tp=2), "r2")
    for agent in new:
        agent.hello()
        agent.register()
    first = new[0].last_id
    assert new[0].register() is None
    bench.say(old[1], ProbeAck(session=old[1].session))
    assert codes(rejected(new[0].registered(bench.late(first)))) == ["world_in_use"]
    assert codes(rejected(new[1].registered(bench.late(new[1].last_id)))) == ["world_in_use"]
    assert bench.late(new[0].last_id) == []


def test_only_a_member_of_the_sealed_round_answers_a_probe() -> None:
    """An answer of a rank that forms elsewhere, or of a world that is not sealed, is ignored."""
    bench = Bench()
    old, new = bench.agents(prefill()), bench.agents(prefill(tp=2), "r2")
    new[0].join()
    bench.say(new[0], ProbeAck(session=new[0].session))
    old[0].join()
    old[0].answers_probes = False
    new[1].hello()
    assert new[1].register() is None
    bench.say(new[0], ProbeAck(session=new[0].session))
    assert bench.late(new[1].last_id) == []
    bench.say(old[0], ProbeAck(session=old[0].session))
    assert codes(rejected(new[1].registered(bench.late(new[1].last_id)))) == ["world_in_use"]


def test_a_newcomer_that_hangs_up_during_the_probe_is_not_admitted() -> None:
    """The connection is gone when the probe ends: no session is made for it."""
    bench = Bench()
    old = bench.seal(prefill())
    old[0].answers_probes = False
    gone, said_hello_again = bench.agents(prefill(tp=2), "r2")
    for agent in (gone, said_hello_again):
        agent.hello()
        agent.register()
    gone.drop()
    bench.wait(1000, beating=())
    assert bench.late(gone.last_id) == []
    assert gone.peer not in bench.core.sessions.by_peer
    assert said_hello_again.peer in bench.core.sessions.by_peer


def test_a_newcomer_that_becomes_another_during_the_probe_is_not_admitted_as_the_first() -> None:
    """Another Hello on the connection voids the Register that waits."""
    bench = Bench()
    old = bench.seal(prefill())
    old[0].answers_probes = False
    (new,) = bench.agents(prefill(), "r2")
    new.hello()
    assert new.register() is None
    new.incarnation = id16("another")
    new.hello()
    bench.wait(bench.settings.probe, beating=())
    assert bench.late(new.last_id) == []
    assert new.peer not in bench.core.sessions.by_peer
    assert isinstance(new.register(), Registered)


def test_a_probe_ends_when_the_older_round_breaks_by_itself() -> None:
    """A member that leaves during the probe frees the name at once."""
    bench = Bench()
    old = bench.seal(prefill())
    old[0].answers_probes = False
    (new,) = bench.agents(prefill(), "r2")
    new.hello()
    assert new.register() is None
    old[0].leave()
    assert isinstance(new.registered(bench.late(new.last_id)), Registered)
    new.beat()
    bench.wait(5000)
    assert new.last(WorldSealed).epoch == 2


def test_a_complete_newer_round_is_told_world_in_use_and_sealed_once_the_older_is_gone() -> None:
    """Newcomers that counted before the older round was sealed take over by themselves."""
    bench = Bench()
    job = prefill(tp=2)
    old, new = bench.agents(job), bench.agents(job, "r2")
    new[0].join()
    old[0].join()
    new[1].hello()
    assert isinstance(new[1].register(), Registered)
    old[1].join()
    new[1].beat()
    assert codes(new[0].last(WorldForming).findings) == ["world_in_use"]
    assert "host" in new[0].last(WorldForming).findings[0].message
    old[0].leave()
    old[1].leave()
    assert new[0].last(WorldSealed).epoch == 2
    assert new[0].last(WorldForming).findings == []


def test_a_complete_newer_round_takes_over_when_the_older_does_not_answer() -> None:
    """The same, when the older round is dead: it is broken by the probe and the newer sealed."""
    bench = Bench()
    job = prefill(tp=2)
    old, new = bench.agents(job), bench.agents(job, "r2")
    new[0].join()
    old[0].join()
    new[1].hello()
    new[1].register()
    old[1].join()
    for agent in old:
        agent.answers_probes = False
    new[1].beat()
    bench.wait(1000, beating=new)
    assert new[0].last(WorldSealed).epoch == 2
    assert need_hello(old[0].beat())


def test_a_newer_round_that_shrinks_during_the_probe_is_not_sealed() -> None:
    """The probe frees the name, but nobody of the newcomers is left to take it."""
    bench = Bench()
    job = prefill()
    (old,), (new,) = bench.agents(job), bench.agents(job, "r2")
    new.hello()
    new.register()
    old.join()
    old.answers_probes = False
    new.beat()
    new.leave()
    bench.wait(1000, beating=())
    assert not new.told(WorldSealed)
    assert bench.core.worlds.by_name["p"].state is WorldState.FORMING


# --- duplicates and disagreement -----------------------------------------------------------------


def test_C17_the_later_of_two_processes_with_one_rank_is_refused_and_both_are_told() -> None:
    """Same world, round and rank: the one that counts stays, the later one is duplicate_rank."""
    bench = Bench()
    earlier, _ = bench.agents(prefill(tp=2, host="alpha"))
    later, _ = bench.agents(prefill(tp=2, host="beta"), life="2")
    later.token = earlier.token
    earlier.join()
    later.hello()
    (found,) = rejected(later.register())
    assert found.slug == "duplicate_rank"
    assert "alpha" in found.message
    assert "beta" in found.message
    assert codes(earlier.last(WorldForming).findings) == ["duplicate_rank"]
    assert isinstance(earlier.beat(), HeartbeatAck)
    assert need_hello(later.beat())


def test_C17_the_race_of_two_registrations_is_decided_by_the_first_heartbeat() -> None:
    """Both may register before either counts; the second heartbeat is refused."""
    bench = Bench()
    first, _ = bench.agents(prefill(tp=2))
    second, _ = bench.agents(prefill(tp=2), life="2")
    for agent in (first, second):
        agent.hello()
        assert isinstance(agent.register(), Registered)
    assert isinstance(second.beat(), HeartbeatAck)
    assert codes(rejected(first.beat())) == ["duplicate_rank"]
    assert codes(second.last(WorldForming).findings) == ["duplicate_rank"]
    assert need_hello(first.beat())


def test_C01_the_same_process_may_register_anew_and_replaces_itself() -> None:
    """A new connection of the same incarnation takes the rank; the old session is void."""
    bench = Bench()
    agents = bench.seal(prefill(tp=2))
    before = agents[0].session
    agents[0].reconnect()
    agents[0].join()
    assert agents[0].session != before
    assert before not in bench.core.sessions.by_id
    assert agents[1].last(WorldSealed).epoch == 2


def test_ranks_that_disagree_are_told_at_once_who_deviates() -> None:
    """Rank 7 of 8 declares another model: everyone hears 'ranks 0-6' and 'rank 7'."""
    bench = Bench()
    agents = bench.agents(prefill(tp=8))
    wrong = agents[7].descriptor
    agents[7].descriptor = changed(wrong, model=changed(wrong.model, name="other"))
    for agent in agents:
        agent.join()
    for agent in agents:
        (found,) = agent.last(WorldForming).findings
        assert found.slug == "ranks_disagree"
        assert found.field == "model.name"
        assert "ranks 0-6 have 'm'" in found.message
        assert "rank 7 has 'other'" in found.message
        assert not agent.told(WorldSealed)
    agents[7].leave()
    assert agents[0].last(WorldForming).findings[0].slug == "world_broken"
    agents[7].descriptor = wrong
    agents[7].join()
    assert agents[7].told(WorldSealed)


def test_disagreement_that_does_not_change_is_told_once() -> None:
    """A further rank that changes nothing about the disagreement makes no further message."""
    bench = Bench()
    agents = bench.agents(prefill(tp=4))
    for rank in (2, 3):
        told = agents[rank].descriptor
        agents[rank].descriptor = changed(told, group="x" * rank)
    agents[0].join()
    agents[2].join()
    assert len(agents[0].told(WorldForming)) == 1
    agents[3].join()
    assert len(agents[0].told(WorldForming)) == 2


def test_another_world_size_is_a_disagreement_and_the_majority_sizes_the_world() -> None:
    """One rank of another job size does not resize the world."""
    bench = Bench()
    agents = bench.agents(prefill(tp=4))
    stranger = bench.agents(prefill(tp=8))[3]
    for agent in (agents[0], agents[1], stranger):
        agent.join()
    told = agents[0].last(WorldForming)
    assert told.size == 4
    assert "world_size" in {found.field for found in told.findings}


def test_an_unusual_rank_order_only_warns() -> None:
    """RG150 is shown with the sealed world and pushed to nobody as a refusal."""
    bench = Bench()
    agents = bench.agents(prefill(tp=4))
    for rank, tp in enumerate((3, 2, 1, 0)):
        agents[rank].descriptor = changed(agents[rank].descriptor, coordinates=Coordinates(tp=tp))
        agents[rank].join()
    assert agents[0].told(WorldSealed)
    assert not agents[0].told(WorldForming)
    row = bench.query("status").status.worlds[0]  # type: ignore[union-attr]
    assert codes(row.findings) == ["rank_order_unusual"]


def test_a_warning_survives_the_probe_that_freed_the_name() -> None:
    """A newer round is sealed with its warning, and nobody hears WorldForming after that."""
    bench = Bench()
    (old,) = bench.agents(prefill())
    new = bench.agents(prefill(tp=2), "r2")
    for rank, tp in enumerate((1, 0)):
        new[rank].descriptor = changed(new[rank].descriptor, coordinates=Coordinates(tp=tp))
    new[0].join()
    new[1].hello()
    new[1].register()
    old.join()
    old.answers_probes = False
    new[1].beat()
    bench.wait(1000, beating=new)
    assert isinstance(new[0].pushes[-1], WorldSealed)
    row = bench.query("status").status.worlds[0]  # type: ignore[union-attr]
    assert codes(row.findings) == ["rank_order_unusual"]


# --- waiting, breaking, leaving ------------------------------------------------------------------


def test_an_incomplete_world_is_reported_after_the_grace_time() -> None:
    """Its members and would-be partners hear which ranks are missing, once."""
    bench = Bench()
    partner = bench.seal(decode(tp=2))
    stranger = bench.seal(decode("other", group="elsewhere"))
    agents = bench.agents(prefill(tp=4))
    for rank in (0, 1, 3):
        agents[rank].join()
    bench.wait(bench.settings.form_grace - 1)
    assert not agents[0].told(WorldForming)
    bench.wait(1)
    for agent in (agents[0], agents[3], *partner):
        told = agent.last(WorldForming)
        assert (told.world, told.have, told.size, told.missing) == ("p", 3, 4, [2])
        assert told.overdue
        (found,) = told.findings
        assert found.slug == "rank_missing"
        assert found.retryable
        assert "rank 2" in found.message
        assert "ranks 0-1, 3 of 4" in found.message
    assert not stranger[0].told(WorldForming)
    bench.wait(2 * bench.settings.form_grace)
    assert len(partner[0].told(WorldForming)) == 1
    agents[2].join()
    assert agents[0].told(WorldSealed)
    assert agents[0].last(WorldForming).findings == []


def test_a_partner_that_seals_later_hears_of_the_overdue_world() -> None:
    """Who comes after the report is told at its own seal; before the grace time it is not."""
    bench = Bench()
    agents = bench.agents(prefill(tp=2))
    agents[0].join()
    early = bench.seal(decode("early"))
    assert not early[0].told(WorldForming)
    bench.wait(bench.settings.form_grace)
    late = bench.seal(decode("late"))
    assert late[0].last(WorldForming).overdue
    assert late[0].last(WorldForming).missing == [1]


def test_overdue_without_missing_ranks_is_told_without_a_finding() -> None:
    """All ranks are there but one is disconnected when the grace time ends."""
    bench = Bench(Settings(resume=100_000))
    agents = bench.agents(prefill(tp=2))
    agents[0].join()
    agents[0].drop()
    bench.wait(59_000, beating=())
    agents[1].join()
    bench.wait(2000, beating=[agents[1]])
    told = agents[1].last(WorldForming)
    assert told.overdue
    assert (told.missing, told.findings) == ([], [])
    agents[0].reconnect()
    agents[0].hello(session=agents[0].session)
    assert agents[1].told(WorldSealed)


def test_a_lost_rank_breaks_the_seal_and_its_own_world_hears_why() -> None:
    """The rest is told who is gone; the same set plus a new process is sealed anew."""
    bench = Bench()
    job = prefill(tp=2)
    agents = bench.seal(job)
    agents[1].leave("maintenance")
    told = agents[0].last(WorldForming)
    assert (told.have, told.missing) == (1, [1])
    assert codes(told.findings) == ["world_broken"]
    assert "gone: left: maintenance" in told.findings[0].message
    row = bench.query("status").status.worlds[0]  # type: ignore[union-attr]
    assert row.state == "forming"
    assert codes(row.findings) == ["world_broken"]
    fresh = bench.agents(job, life="2")[1]
    fresh.join()
    assert agents[0].last(WorldSealed).epoch == 2
    row = bench.query("status").status.worlds[0]  # type: ignore[union-attr]
    assert row.findings == []


def test_a_broken_world_is_reported_again_after_its_grace_time() -> None:
    """The grace time starts anew when a seal breaks."""
    bench = Bench()
    agents = bench.seal(prefill(tp=2))
    bench.wait(2 * bench.settings.form_grace)
    agents[1].leave()
    bench.wait(bench.settings.form_grace, beating=[agents[0]])
    assert agents[0].last(WorldForming).overdue
    assert agents[0].last(WorldForming).missing == [1]


def test_a_world_that_breaks_within_its_grace_time_gets_a_whole_new_one() -> None:
    """The deadline set when the round began does not report it early."""
    bench = Bench()
    agents = bench.seal(prefill(tp=3, heads=3))
    bench.wait(bench.settings.form_grace // 2)
    agents[2].leave()
    agents[1].drop()
    bench.wait(bench.settings.form_grace - 1, beating=[agents[0]])
    assert not agents[0].last(WorldForming).overdue
    bench.wait(1, beating=[agents[0]])
    assert agents[0].last(WorldForming).overdue
    assert agents[0].last(WorldForming).missing == [1, 2]


def test_the_grace_time_of_a_replaced_round_says_nothing() -> None:
    """A round that is gone or sealed by then is not reported."""
    bench = Bench()
    job = prefill(tp=2)
    gone = bench.agents(job)
    gone[0].join()
    gone[0].leave()
    agents = bench.seal(job, "r2")
    bench.wait(2 * bench.settings.form_grace)
    assert not any(agent.told(WorldForming) for agent in agents)


def test_a_world_whose_ranks_all_left_is_forgotten_with_its_pairs() -> None:
    """Nothing is wrong with it: no row stays, and its durable record is removed."""
    bench = Bench()
    ours, theirs = bench.pair(prefill(), decode())
    assert isinstance(ours[0].leave(), Left)
    assert set(bench.core.worlds.by_name) == {"d"}
    assert bench.core.pairs.by_name == {}
    assert [record.world for record in bench.stored().worlds] == ["d"]
    assert theirs[0].told(PairBroken)
    status = bench.query("status").status
    assert status is not None
    assert status.healthy


def test_a_world_that_crashed_is_not_forgotten() -> None:
    """Lost ranks keep the row, so that an operator sees what is missing."""
    bench = Bench()
    bench.seal(prefill())[0].drop()
    bench.wait(bench.settings.resume, beating=())
    row = bench.query("status").status.worlds[0]  # type: ignore[union-attr]
    assert (row.world, row.state, row.size, row.missing) == ("p", "forming", 1, [0])
    assert bench.stored().worlds == []  # a broken epoch is never confirmed again


def test_beyond_the_bound_worlds_without_ranks_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Names of crashed worlds are bounded, and so are their pairs."""
    monkeypatch.setattr("rankgate.coordinator.core.worlds._MAX_WORLDS", 4)
    bench = Bench()
    bench.seal(decode("stays"))
    for number in range(12):
        bench.seal(prefill(f"p{number}"))[0].drop()
        bench.wait(bench.settings.resume, beating=[])
    names = set(bench.core.worlds.by_name)
    assert len(names) <= 5
    assert {name for pair in bench.core.pairs.by_name for name in pair} <= names


def test_a_sealed_round_whose_member_registers_with_another_descriptor_is_broken() -> None:
    """A rank that describes itself anew is another rank: the seal of the old one ends."""
    bench = Bench()
    ours, theirs = bench.pair(prefill(tp=2), decode())
    again = ours[0].descriptor
    ours[0].descriptor = changed(again, model=changed(again.model, revision="r2"))
    ours[0].hello()
    assert isinstance(ours[0].register(), Registered)
    assert theirs[0].told(PairBroken)
    ours[0].beat()
    assert codes(ours[1].last(WorldForming).findings) == ["ranks_disagree"]


def test_another_process_on_one_connection_does_not_inherit_its_session() -> None:
    """A Hello of another incarnation on the same connection gets no old session by registering."""
    bench = Bench()
    (agent,) = bench.seal(prefill())
    before = agent.session
    agent.incarnation = id16("another")
    agent.hello()
    agent.register()
    assert agent.session != before
    assert before not in bench.core.sessions.by_id


def test_a_disconnected_member_keeps_a_round_from_being_sealed_until_it_is_back() -> None:
    """Complete but not all live: sealed when the last one resumes."""
    bench = Bench()
    agents = bench.agents(prefill(tp=2))
    agents[0].join()
    agents[0].drop()
    agents[1].join()
    assert not agents[1].told(WorldSealed)
    agents[0].reconnect()
    agents[0].hello(session=agents[0].session)
    assert agents[1].told(WorldSealed)


def test_unfit_members_are_counted_exactly() -> None:
    """Stalled and disconnected members are unfit once each, whatever the order of changes."""
    bench = Bench(Settings(resume=10_000))
    ours, _ = bench.pair(prefill(tp=2), decode())
    world: World = bench.core.worlds.by_name["p"]
    ours[0].drop()
    assert world.unfit == 1
    bench.wait(6000, beating=())
    assert world.unfit == 2
    ours[1].drop()
    assert world.unfit == 2
    for agent in ours:
        agent.reconnect()
        agent.hello(session=agent.session)
    assert world.unfit == 0
    assert bench.core.sessions.by_id[ours[0].session].state is RankState.LIVE


def test_heartbeats_of_a_refused_session_are_answered_need_hello() -> None:
    """A refused rank cannot go on under the session it was given."""
    bench = Bench()
    first, _ = bench.agents(prefill(tp=2))
    second, _ = bench.agents(prefill(tp=2), life="2")
    for agent in (first, second):
        agent.hello()
        agent.register()
    first.beat()
    assert isinstance(second.beat(), Rejected)
    assert need_hello(second.ask(Heartbeat(session=second.session)))
    assert first.session in bench.core.sessions.by_id


def test_seed_2_state_count_mismatch_is_told_to_every_rank_before_any_request() -> None:
    """'state component count mismatch (local=3, remote=2)' is a verdict, no crash mid-transfer."""
    bench = Bench()
    three = [state("SWA"), state("MAMBA"), state("DSA")]
    ours = bench.seal(prefill(tp=2, state=three))
    theirs = bench.seal(decode(tp=2, state=three[:2]))
    for agent in (*ours, *theirs):
        verdict = agent.last(Verdict)
        assert not verdict.accepted
        (found,) = verdict.findings
        assert found.slug == "state_component_missing"
        assert "3 components ['SWA', 'MAMBA', 'DSA']" in found.message
        assert "2 components ['SWA', 'MAMBA']" in found.message
    assert bench.core.pairs.by_name["p", "d"].state is PairState.REJECTED


def test_a_rank_of_another_size_cannot_slip_into_a_sealed_round() -> None:
    """Same token, larger world: refused with both sizes, and the sealed world goes on."""
    bench = Bench()
    ours = bench.seal(prefill(tp=2))
    stranger = bench.agents(prefill(tp=4))[3]
    stranger.hello()
    stranger.register()
    (found,) = rejected(stranger.beat())
    assert found.slug == "ranks_disagree"
    assert "p rank 3 has 4" in found.message
    assert "2" in found.message
    assert codes(ours[0].last(WorldForming).findings) == ["ranks_disagree"]
    theirs = bench.seal(decode())
    bench.link(*ours, *theirs)
    assert theirs[0].open("r1").grant
    assert need_hello(stranger.beat())


def test_however_much_the_ranks_disagree_it_can_be_told() -> None:
    """64 ranks with 64 models and long lists: the push fits the wire and names some of them."""
    bench = Bench()
    agents = bench.agents(prefill(tp=64, heads=64, layers=100))
    for agent in agents:
        told = agent.descriptor
        group = changed(told.kv[0], layers=list(range(agent.rank, agent.rank + 100)))
        model = changed(told.model, name="m" * 4000 + str(agent.rank))
        agent.descriptor = changed(told, model=model, kv=[group])
        agent.join()
    last = agents[0].last(WorldForming)
    assert wire.decode(wire.encode(last, 1))[1] == last
    assert {found.field for found in last.findings} == {"model.name", "kv[full].layers"}
    assert all("and 56 more" in found.message for found in last.findings)


def test_what_a_refused_rank_leaves_behind_does_not_block_its_world() -> None:
    """A rank of another size in a forming round is told off; when it leaves the rest is sealed."""
    bench = Bench()
    agents = bench.agents(prefill(tp=2))
    stranger = bench.agents(prefill(tp=4))[3]
    for agent in (stranger, *agents):
        agent.join()
    assert not agents[0].told(WorldSealed)
    stranger.leave()
    assert agents[0].told(WorldSealed)
    assert agents[1].told(WorldSealed)


CHANGES: list[dict[str, Any]] = [
    {"model": "x"},
    {"group": "x"},
    {"role": "decode"},
    {"profile": "vllm"},
    {"transport": "nixl"},
    {"capabilities": ["x"]},
    {"heads": 16},
    {"dtype": "float16"},
    {"page_layout": "NHD"},
    {"page_size": 4},
    {"layers": 5},
    {"groups": ["full", "x"]},
    {"groups": ["x"]},
    {"state": [state("M")]},
    {"state": [state("M", dtype="float32")]},
    {"state": [state("M", size=8)]},
    {"state": [state("M", layers=3)]},
    {"pages": 99},
    {"host": "elsewhere"},
    {"tp": 4},
    {},
]


@given(st.lists(st.sampled_from(CHANGES), min_size=4, max_size=4), st.booleans())
def test_the_cheap_check_of_a_round_finds_what_the_full_one_finds(
    changes: list[dict[str, Any]],
    twice: bool,  # noqa: FBT001 - drawn
) -> None:
    """Whenever the rules see a disagreement, the counted traits see one too, ranks going or not."""
    bench = Bench()
    base = prefill(tp=2, pp=2, state=[state("M")])
    held = Round(b"token", 0)
    sessions = []
    for rank, change in enumerate(changes):
        described = base.but(**change).describe(rank)
        if twice and rank == 3:
            described = changed(described, coordinates=base.at(0))
        hello = Hello(world="p", rank=rank, incarnation=bytes(16), round=bytes(16))
        sessions.append(bench.core.sessions.register(b"\0", hello, described, 0))
        held.add(sessions[-1])
    while held.members:
        members = {rank: member.descriptor for rank, member in held.members.items()}
        assert held.check() == check_agreement(members)
        held.remove(sessions.pop())


def test_a_newer_round_that_becomes_live_again_asks_for_the_name() -> None:
    """Its last rank was away when the set was complete: the older round is probed on its return."""
    bench = Bench(Settings(resume=30_000))
    job = prefill(tp=2)
    old, new = bench.agents(job), bench.agents(job, "r2")
    new[0].join()
    old[0].join()
    new[1].hello()
    new[1].register()
    old[1].join()
    new[0].drop()
    new[1].beat()
    assert not new[1].told(WorldForming)
    assert bench.core.worlds.by_name["p"].unfit == 0
    new[0].reconnect()
    new[0].hello(session=new[0].session)
    assert codes(new[1].last(WorldForming).findings) == ["world_in_use"]
    assert not old[0].told(WorldForming)


def test_a_rank_that_stalls_or_goes_while_its_world_forms_is_no_loss_of_a_seal() -> None:
    """Unfit in a forming round: nothing is counted; the world seals when all are live."""
    bench = Bench(Settings(resume=30_000))
    agents = bench.agents(prefill(tp=2))
    agents[0].join()
    bench.wait(bench.settings.ttl, beating=())
    agents[0].drop()
    agents[1].join()
    assert not agents[1].told(WorldSealed)
    agents[0].reconnect()
    agents[0].hello(session=agents[0].session)
    assert agents[1].told(WorldSealed)
    assert bench.core.worlds.by_name["p"].unfit == 0


def test_a_rank_that_leaves_on_purpose_is_no_refusal() -> None:
    """A job that ends well leaves operators nothing to read; its world is forgotten."""
    bench = Bench()
    agents = bench.seal(prefill(tp=2))
    agents[0].leave("done")
    status = bench.query("status").status
    assert status is not None
    assert status.refusals == []
    assert "gone: left: done" in status.worlds[0].findings[-1].message
    agents[1].leave("done")
    status = bench.query("status").status
    assert status is not None
    assert status.worlds == []


def test_C04_a_crashed_world_is_shown_and_then_forgotten() -> None:
    """Status is unhealthy while it may come back, and healthy again once it is forgotten."""
    bench = Bench()
    agents = bench.seal(prefill(tp=1))
    agents[0].drop()
    bench.wait(10_000, beating=())
    status = bench.query("status").status
    assert status is not None
    assert not status.healthy
    assert status.worlds[0].state == "forming"
    bench.wait(61_000, beating=())
    status = bench.query("status").status
    assert status is not None
    assert status.healthy
    assert status.worlds == []


def test_a_job_that_ends_does_not_tell_the_square_of_its_ranks() -> None:
    """The first loss is told at once, the others together a little later."""
    bench = Bench()
    agents = bench.seal(prefill(tp=8))
    for agent in agents[1:7]:
        agent.leave("done")
    assert len(agents[7].told(WorldForming)) == 1
    bench.wait(100)
    told = agents[7].told(WorldForming)
    assert len(told) == 2
    assert told[-1].missing == [1, 2, 3, 4, 5, 6]
    assert len(told[-1].findings) == 5


def test_a_probe_asks_a_few_and_its_answer_holds_for_a_while() -> None:
    """Many newcomers of a name in use cost one probe, not one each."""
    bench = Bench()
    bench.seal(prefill(tp=32))
    newcomers = bench.agents(prefill(tp=32), "r2")
    for agent in newcomers:
        agent.hello()
        assert codes(rejected(agent.register())) == ["world_in_use"]
    asked = [one for one in bench.log if isinstance(one, Send) and isinstance(one.message, Probe)]
    assert 1 <= len(asked) <= 16


def test_partners_of_a_voided_round_hear_that_all_its_ranks_are_lost() -> None:
    """A destination need not wait for sources that a newer round has replaced."""
    bench = Bench()
    old, theirs = bench.pair(prefill(tp=2), decode(tp=1))
    for agent in old:
        agent.answers_probes = False
    (new, _) = bench.agents(prefill(tp=2), "r2")
    new.hello()
    new.register()
    bench.wait(1000, beating=())
    broken = theirs[0].last(PairBroken)
    assert (broken.source_lost, broken.lost_ranks) == (True, [0, 1])


def test_a_world_that_does_not_come_back_after_a_restart_is_dropped_from_the_store() -> None:
    """Its record is kept for as long as it may be confirmed."""
    bench = Bench()
    bench.seal(prefill())
    bench.restart()
    bench.wait(59_000, beating=())
    assert [record.world for record in bench.stored().worlds] == ["p"]
    bench.wait(2_000, beating=())
    assert bench.stored().worlds == []
