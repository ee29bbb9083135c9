"""Sessions: who may speak, who lives, and pushes that arrive in order or not at all."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import Struct
from msgspec.structs import replace as changed

from rankgate.coordinator.core.deadlines import Deadlines
from rankgate.coordinator.core.effects import CutOff, Note, Send
from rankgate.coordinator.core.events import MessageRefused, PeerDisconnected
from rankgate.coordinator.core.machine import Coordinator
from rankgate.coordinator.core.sessions import Sessions
from rankgate.coordinator.core.settings import Durable, Settings
from rankgate.coordinator.core.tables import (
    PAIR_TABLE,
    RANK_TABLE,
    TRANSFER_TABLE,
    WORLD_TABLE,
    InvariantError,
    RankState,
    TransferState,
    change,
)
from rankgate.coordinator.core.worlds import Worlds
from rankgate.proto.codes import Code
from rankgate.proto.findings import Side, finding
from rankgate.proto.messages import (
    Abort,
    Ack,
    End,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Leave,
    Linked,
    NeedHello,
    Open,
    Outcome,
    PairBroken,
    PairReady,
    PeerWelcome,
    ProbeAck,
    Query,
    Refusal,
    Registered,
    Rejected,
    Report,
    Reported,
    ReportItem,
    Verdict,
    Welcome,
    WorldSealed,
)
from tests.coordinator.core.harness import (
    Agent,
    Bench,
    codes,
    decode,
    id16,
    need_hello,
    prefill,
    rejected,
)

SECOND = 1000


def state_of(bench: Bench, agent: Agent) -> str:
    """Return a rank's state as operators see it."""
    rows = bench.query("ranks").ranks or []
    return next((row.state for row in rows if row.rank == agent.rank), "unknown")


# --- greeting and registering --------------------------------------------------------------------


def test_C02_hello_is_answered_with_who_the_daemon_is() -> None:
    """Welcome carries instance, start number, clock id and tick."""
    bench = Bench(start=7)
    (agent,) = bench.agents(prefill())
    assert agent.hello() == Welcome(
        wire=1,
        instance=bench.identity.instance,
        start=7,
        clock=bench.identity.clock,
        tick=bench.now,
    )


def test_C22_the_daemon_says_the_liveness_rules() -> None:
    """Registered carries session and rules; a session id is never 0 and grows over starts."""
    bench = Bench(start=3)
    (agent,) = bench.agents(prefill())
    agent.hello()
    answer = agent.register()
    assert answer == Registered(
        session=(3 << 32) + 1,
        heartbeat=1000,
        ttl=5000,
        resume=2000,
        probe=1000,
        grant_ttl=60_000,
        tick=bench.now,
    )
    assert agent.register() == answer


def test_C02_a_heartbeat_is_answered_with_instance_clock_and_tick() -> None:
    """A change of the daemon is seen at the next heartbeat."""
    bench = Bench()
    (agent,) = bench.seal(prefill())
    bench.now += 5
    assert agent.beat() == HeartbeatAck(
        instance=bench.identity.instance, clock=bench.identity.clock, tick=bench.now
    )


def test_A12_another_wire_version_is_refused_with_the_range() -> None:
    """Versions are compared before anything else of Hello counts."""
    bench = Bench()
    (agent,) = bench.agents(prefill())
    for low, high in ((2, 9), (0, 0)):
        hello = Hello(
            wire_min=low,
            wire_max=high,
            world="none",
            rank=0,
            incarnation=agent.incarnation,
            round=agent.token,
        )
        answer = agent.ask(hello)
        assert isinstance(answer, Refusal)
        assert (answer.code, answer.min, answer.max) == ("RG201", 1, 1)
        assert f"{low} to {high}" in answer.text
    newer = Hello(
        wire_min=1, wire_max=9, world="p", rank=0, incarnation=agent.incarnation, round=agent.token
    )
    assert agent.ask(newer).wire == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["none", "None", "", "a b", "a/b", "-a", "a:b", "é", "a\n"])
def test_an_unusable_world_name_is_refused_at_hello(name: str) -> None:
    """torchrun's default 'none' and names that cannot be written in a command are RG101."""
    bench = Bench()
    (agent,) = bench.agents(prefill(name))
    (found,) = rejected(agent.hello())
    assert found.code == "RG101"
    assert repr(name) in found.message
    assert need_hello(agent.register())


def test_register_before_hello_is_answered_need_hello() -> None:
    """A daemon that was restarted under an agent asks it to begin anew."""
    bench = Bench()
    (agent,) = bench.agents(prefill())
    assert agent.register() == NeedHello(instance=bench.identity.instance)


def test_C07_register_must_name_the_process_that_said_hello() -> None:
    """World, rank, incarnation and round of both messages are compared; all differences named."""
    bench = Bench()
    agent, other = bench.agents(prefill(tp=2))
    stranger = bench.agents(prefill("q", tp=2), "r2", "2")[1]
    agent.hello()
    agent.descriptor, agent.incarnation = stranger.descriptor, stranger.incarnation
    agent.token = stranger.token
    found = rejected(agent.register())
    assert codes(found) == ["identity_mismatch"] * 4
    assert [item.field for item in found] == ["world", "rank", "incarnation", "round"]
    assert other.incarnation.hex() not in found[2].message


def test_a_descriptor_that_contradicts_itself_is_refused_with_all_findings() -> None:
    """Registration tells every finding at once, and the operator sees them."""
    bench = Bench()
    (agent,) = bench.agents(prefill())
    agent.descriptor = changed(agent.descriptor, role="cook", world_size=3)
    agent.hello()
    found = rejected(agent.register())
    assert set(codes(found)) == {"role_invalid", "world_size_invalid"}
    status = bench.query("status").status
    assert status is not None
    assert {row.finding.slug for row in status.refusals} == set(codes(found))


@pytest.mark.parametrize(
    "message",
    [
        Heartbeat(session=5),
        Open(session=5, items=[]),
        End(session=5, items=[]),
        Abort(session=5, items=[]),
        Report(session=5),
        ProbeAck(session=5),
        Leave(session=5),
        Linked(session=5, source_epoch=1, destination_epoch=2, table_digest=bytes(16)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_without_a_valid_session_everything_is_answered_need_hello(message: Struct) -> None:
    """A session belongs to one connection; another's number is no session."""
    bench = Bench()
    (owner,) = bench.seal(prefill())
    (stranger,) = bench.agents(decode())
    named = changed(message, session=owner.session)
    assert need_hello(stranger.ask(message))
    assert need_hello(stranger.ask(named))


def test_an_ack_is_never_answered() -> None:
    """Neither with a session nor without one."""
    bench = Bench()
    (agent,) = bench.seal(prefill())
    (stranger,) = bench.agents(decode())
    assert not any(
        isinstance(e, Send) for e in bench.say(agent, Ack(session=agent.session, acked=1))
    )
    assert bench.say(stranger, Ack(session=1, acked=1)) == []


def test_a_kind_that_is_not_for_the_daemon_is_refused_and_counted() -> None:
    """A known kind in the wrong direction gets kind 0 and changes nothing."""
    bench = Bench()
    (agent,) = bench.seal(prefill())
    answer = agent.ask(PeerWelcome(wire=1, metadata=b""))
    assert isinstance(answer, Refusal)
    assert answer.code == "RG205"
    assert "kind 65 (peer_welcome)" in answer.text
    assert isinstance(agent.ask(Query(view="status")), Refusal)
    status = bench.query("status").status
    assert status is not None
    assert [row.about for row in status.refusals] == ["p rank 0", "p rank 0"]


@pytest.mark.parametrize(
    "answer",
    [Refusal(code="RG205", text="x"), Rejected(findings=[]), NeedHello(instance=bytes(16))],
)
def test_a_refusal_is_never_answered_with_a_refusal(answer: Struct) -> None:
    """Two programs that refuse each other's refusals would do it for ever."""
    bench = Bench()
    (agent,) = bench.seal(prefill())
    effects = bench.say(agent, answer)
    assert not any(isinstance(effect, Send) for effect in effects)


def test_bytes_that_were_no_message_are_counted_by_sender() -> None:
    """What the runtime refused is shown once with a count, for ranks and for unknown peers."""
    bench = Bench()
    (agent,) = bench.seal(prefill())
    for peer in (agent.peer, agent.peer, b"\0nobody"):
        bench.step(MessageRefused(peer, "RG203", "trailing bytes"))
    bench.step(MessageRefused(b"\0nobody", "no such code", "x"))
    status = bench.query("status").status
    assert status is not None
    seen = [(row.about, row.times, row.finding.code) for row in status.refusals]
    assert seen == [
        ("p rank 0", 2, "RG203"),
        ("an unknown peer", 1, "RG203"),
        ("an unknown peer", 1, "RG203"),
    ]


def test_a_report_is_taken_and_shown() -> None:
    """What a rank refused by itself and how much it holds reach the operator's views."""
    bench = Bench()
    (agent,) = bench.seal(prefill())
    found = finding(Code.RANGE_BUSY, "pages", Side("d rank 0", "14-32"))
    items = [ReportItem(request="r7", finding=found), ReportItem(finding=found)]
    report = Report(session=agent.session, items=items, staged=3, staged_bytes=9, landing=2)
    assert agent.ask(report) == Reported()
    row = (bench.query("ranks").ranks or [])[0]
    assert (row.staged, row.staged_bytes, row.landing) == (3, 9, 2)
    status = bench.query("status").status
    assert status is not None
    assert [item.about for item in status.refusals] == ["p rank 0 request r7", "p rank 0"]


# --- liveness ------------------------------------------------------------------------------------


def test_C22_an_idle_rank_that_beats_lives_for_ever() -> None:
    """Ten times ttl without any request changes nothing."""
    bench = Bench()
    (agent,) = bench.seal(prefill())
    bench.wait(10 * bench.settings.ttl)
    assert state_of(bench, agent) == "live"


def test_C22_a_rank_that_never_beats_is_dropped_at_ttl() -> None:
    """Registered and silent: gone after ttl, and never counted."""
    bench = Bench()
    (agent,) = bench.agents(prefill())
    agent.hello()
    agent.register()
    bench.wait(bench.settings.ttl - 1, beating=())
    assert agent.session in bench.core.sessions.by_id
    bench.wait(1, beating=())
    assert agent.session not in bench.core.sessions.by_id
    assert agent.cut_off() == "no heartbeat ever"
    assert bench.core.worlds.by_name == {}


def test_a_silent_rank_is_stalled_at_ttl_and_gone_at_stall() -> None:
    """Connected without heartbeat: no new grants, the seal stays; much later it is gone."""
    bench = Bench()
    ours, theirs = bench.pair(prefill(), decode())
    bench.wait(bench.settings.ttl - 1, beating=theirs)
    assert (bench.query("ranks").ranks or [])[0].state == "live"
    bench.wait(1, beating=theirs)
    assert (bench.query("ranks").ranks or [])[0].state == "stalled"
    assert bench.core.worlds.by_name["p"].sealed is not None
    assert theirs[0].open("r1").finding.slug == "pair_not_ready"  # type: ignore[union-attr]
    bench.wait(bench.settings.stall - bench.settings.ttl - 1, beating=theirs)
    assert (bench.query("ranks").ranks or [])[0].state == "stalled"
    assert not theirs[0].told(PairBroken)
    bench.wait(1, beating=theirs)
    assert theirs[0].last(PairBroken).lost_ranks == [0]
    assert ours[0].cut_off().startswith("no heartbeat for")
    assert need_hello(ours[0].beat())


def test_a_stalled_rank_that_beats_again_may_stall_again_at_once() -> None:
    """The second stall is seen ttl after the last heartbeat, not at the end of the first watch."""
    bench = Bench()
    (agent,) = bench.seal(prefill())
    bench.wait(bench.settings.ttl + SECOND, beating=())
    assert state_of(bench, agent) == "stalled"
    for _ in range(3):
        agent.beat()
        assert state_of(bench, agent) == "live"
        bench.wait(bench.settings.ttl - 1, beating=())
        assert state_of(bench, agent) == "live"
        bench.wait(1, beating=())
        assert state_of(bench, agent) == "stalled"


def test_any_number_of_stalls_leaves_few_deadlines() -> None:
    """Being watched costs a session a bounded number of deadlines, however often it comes back."""
    bench = Bench(Settings(stall=600_000, form_grace=100))
    (agent,) = bench.seal(prefill())
    for _ in range(50):
        bench.wait(bench.settings.ttl, beating=())
        agent.beat()
    assert len(bench.core._turn.deadlines._heap) <= 60


def test_a_resumed_rank_is_watched_like_any_other() -> None:
    """After a reconnect the next silence is seen ttl later."""
    bench = Bench()
    (agent,) = bench.seal(prefill())
    bench.wait(bench.settings.ttl + SECOND, beating=())
    agent.drop()
    agent.reconnect()
    agent.hello(session=agent.session)
    bench.wait(bench.settings.ttl, beating=())
    assert state_of(bench, agent) == "stalled"


def test_a_disconnected_rank_comes_back_within_resume() -> None:
    """The same session resumed in time: the seal stays and nobody hears of it."""
    bench = Bench()
    ours, theirs = bench.pair(prefill(tp=2), decode())
    ours[0].drop()
    assert state_of(bench, ours[0]) == "disconnected"
    assert theirs[0].open("r1").finding.slug == "pair_not_ready"  # type: ignore[union-attr]
    bench.wait(bench.settings.resume - 1, beating=(ours[1], theirs[0]))
    ours[0].reconnect()
    answer = ours[0].hello(session=ours[0].session)
    assert answer.resumed  # type: ignore[attr-defined]
    assert isinstance(ours[0].beat(), HeartbeatAck)
    assert theirs[0].open("r1").grant
    assert not theirs[0].told(PairBroken)


def test_a_disconnected_rank_is_gone_after_resume() -> None:
    """Too late is too late: the old session is answered NeedHello and not resumed."""
    bench = Bench()
    ours, theirs = bench.pair(prefill(tp=2), decode())
    ours[0].drop("host unreachable")
    bench.wait(bench.settings.resume, beating=(ours[1], theirs[0]))
    told = theirs[0].last(PairBroken)
    assert told.source_lost
    assert told.lost_ranks == [0]
    assert "host unreachable" in told.findings[0].message
    ours[0].reconnect()
    assert not ours[0].hello(session=ours[0].session).resumed  # type: ignore[attr-defined]
    assert need_hello(ours[0].beat())


def test_another_process_cannot_resume_a_session() -> None:
    """A session is resumed by its own incarnation only."""
    bench = Bench()
    (agent,) = bench.seal(prefill())
    agent.reconnect()
    agent.incarnation = id16("another")
    assert not agent.hello(session=agent.session).resumed  # type: ignore[attr-defined]


def test_a_resume_over_a_new_connection_voids_the_old_one() -> None:
    """The old routing id is forgotten even if its loss was never noticed (D02)."""
    bench = Bench()
    (agent,) = bench.seal(prefill())
    old = agent.peer
    agent.reconnect()
    assert agent.hello(session=agent.session).resumed  # type: ignore[attr-defined]
    assert set(bench.core.sessions.by_peer) == {agent.peer}
    assert old not in bench.core.sessions.hellos
    bench.step(PeerDisconnected(old, "late notice"))
    assert state_of(bench, agent) == "live"


def test_a_resume_over_the_same_connection_is_fine() -> None:
    """A repeated Hello with its session changes nothing."""
    bench = Bench()
    (agent,) = bench.seal(prefill())
    assert agent.hello(session=agent.session).resumed  # type: ignore[attr-defined]
    assert isinstance(agent.beat(), HeartbeatAck)


def test_D02_five_restarts_leave_one_registration() -> None:
    """Killed and restarted five times: only the newest incarnation is left."""
    bench = Bench()
    agents = [bench.agents(prefill(), f"r{life}")[0] for life in range(6)]
    agent = agents[-1]
    for agent in agents:
        agent.answers_probes = False
        agent.hello()
        agent.register()
        bench.wait(bench.settings.probe, beating=())
        if late := bench.late(agent.last_id):
            agent.registered(late)
        agent.beat()
    assert [s.incarnation for s in bench.core.sessions.by_id.values()] == [agent.incarnation]
    assert agent.last(WorldSealed).epoch == 6


def test_a_registering_rank_that_hangs_up_is_forgotten_at_once() -> None:
    """It never counted, so nobody is told."""
    bench = Bench()
    (agent,) = bench.agents(prefill())
    agent.hello()
    agent.register()
    agent.drop()
    assert bench.core.sessions.by_id == {}
    assert bench.core.sessions.hellos == {}


def test_a_peer_that_only_said_hello_leaves_nothing_when_it_goes() -> None:
    """Nor does one that never said anything."""
    bench = Bench()
    (agent,) = bench.agents(prefill())
    agent.hello()
    agent.drop()
    bench.step(PeerDisconnected(b"\0nobody", "gone"))
    assert bench.core.sessions.hellos == {}
    assert bench.core.sessions.by_peer == {}


def test_our_own_stall_kills_nobody() -> None:
    """A tick that comes an hour late shifts all liveness deadlines by that hour."""
    bench = Bench()
    ours, theirs = bench.pair(prefill(tp=2), decode())
    bench.tick(SECOND)
    bench.tick(3_600_000)
    rows = bench.query("ranks").ranks or []
    assert {row.state for row in rows} == {"live"}
    bench.wait(bench.settings.ttl - 2 * SECOND - 1, beating=())
    assert {row.state for row in bench.query("ranks").ranks or []} == {"live"}
    bench.wait(1, beating=())
    assert {row.state for row in bench.query("ranks").ranks or []} == {"stalled"}
    assert not theirs[0].told(PairBroken)
    assert not ours[0].cut_off()


def test_our_own_stall_does_not_delay_what_it_was_heard_in() -> None:
    """A heartbeat read after a stall, before its tick, does not buy a rank the stall's length."""
    bench = Bench()
    (agent,) = bench.seal(prefill())
    bench.tick(SECOND)
    bench.now += 60_000
    agent.beat()
    bench.tick()
    assert (bench.query("ranks").ranks or [])[0].heard_ms == 0
    bench.wait(bench.settings.ttl, beating=())
    assert state_of(bench, agent) == "stalled"


def test_C26_a_clock_that_goes_backwards_changes_nothing() -> None:
    """Time handed in never runs backwards inside; nothing expires, nothing revives."""
    bench = Bench()
    ours, theirs = bench.pair(prefill(), decode())
    grant = theirs[0].grant("r1")
    before = bench.now
    bench.now -= 3_600_000
    bench.step(PeerDisconnected(b"\0nobody", "x"))
    agent_answer = ours[0].beat()
    assert agent_answer.tick == before  # type: ignore[attr-defined]
    assert {row.state for row in bench.query("ranks").ranks or []} == {"live"}
    assert bench.core.transfers.by_id[grant.transfer].state is TransferState.GRANTED
    bench.now = before
    assert state_of(bench, ours[0]) == "live"


def test_a_disconnected_rank_survives_our_own_stall() -> None:
    """The time to resume is measured on the same clock."""
    bench = Bench()
    (agent,) = bench.seal(prefill())
    bench.tick(SECOND)
    agent.drop()
    bench.tick(30_000)
    assert state_of(bench, agent) == "disconnected"
    bench.wait(bench.settings.resume, beating=())
    assert state_of(bench, agent) == "unknown"


# --- the push stream -----------------------------------------------------------------------------


def test_pushes_are_numbered_from_one_without_gaps() -> None:
    """Each session has its own stream."""
    bench = Bench()
    ours, theirs = bench.pair(prefill(tp=2), decode())
    for agent in (*ours, *theirs):
        assert [number for number, _ in agent.seen] == [1, 2, 3]
        assert [type(message) for message in agent.pushes] == [WorldSealed, Verdict, PairReady]


def test_pushes_are_repeated_from_the_oldest_until_acknowledged() -> None:
    """Unacknowledged pushes come again in order, ever slower; an ack ends it."""
    bench = Bench()
    ours, theirs = bench.seal(prefill()), bench.agents(decode())
    ours[0].acks = False
    theirs[0].join()
    ours[0].seen.clear()
    bench.wait(300, beating=())
    assert [number for number, _ in ours[0].seen] == [2]
    bench.say(ours[0], Ack(session=ours[0].session, acked=0))
    ours[0].seen.clear()
    bench.wait(2 * SECOND, beating=theirs)
    assert 2 <= len(ours[0].seen) <= 4
    assert {number for number, _ in ours[0].seen} == {2}
    bench.say(ours[0], Ack(session=ours[0].session, acked=2))
    ours[0].seen.clear()
    bench.wait(4 * SECOND, beating=theirs)
    assert ours[0].seen == []


def test_a_partial_ack_leaves_the_rest() -> None:
    """Acknowledging 1 of 2 repeats only 2; numbers not given out yet and old ones are ignored."""
    bench = Bench()
    (agent,) = bench.agents(prefill())
    agent.acks = False
    agent.join()
    bench.seal(decode())
    session = bench.core.sessions.by_id[agent.session]
    assert [number for number, _ in session.outbox] == [1, 2]
    for acked in (99, 3, 1, 0, 1):
        bench.say(agent, Ack(session=agent.session, acked=acked))
    assert [number for number, _ in session.outbox] == [2]
    agent.seen.clear()
    bench.wait(500, beating=())
    assert {number for number, _ in agent.seen} == {2}


def test_a_resumed_session_gets_the_rest_at_once() -> None:
    """What was pushed while the rank was away arrives with its reconnect, in order."""
    bench = Bench()
    ours = bench.seal(prefill(tp=2))
    ours[0].drop()
    bench.seal(decode())
    assert not ours[0].told(Verdict)
    assert ours[1].told(Verdict)
    ours[0].reconnect()
    ours[0].hello(session=ours[0].session)
    assert len(ours[0].told(Verdict)) == 1
    assert [number for number, _ in ours[0].seen] == [1, 2]


def test_while_away_nothing_is_sent_into_the_void() -> None:
    """Pushes of a disconnected session wait; no Send names its old connection."""
    bench = Bench()
    ours = bench.seal(prefill(tp=2))
    theirs = bench.seal(decode())
    ours[1].acks = False
    bench.link(*ours, *theirs)
    gone = ours[1].peer
    ours[1].drop()
    bench.log.clear()
    bench.wait(SECOND, beating=(ours[0], theirs[0]))
    assert not [e for e in bench.log if isinstance(e, Send) and e.peer == gone]
    ours[1].reconnect()
    ours[1].acks = True
    ours[1].hello(session=ours[1].session)
    assert ours[1].told(PairReady)


def test_too_many_unacknowledged_pushes_cut_a_rank_off() -> None:
    """A rank that takes nothing is lost, its world is broken, and everyone else goes on."""
    bench = Bench(Settings(max_unacked=5))
    ours, theirs = bench.pair(prefill(tp=2), decode())
    ours[0].acks = False
    for number in range(6):
        transfer = theirs[0].grant(f"r{number}").transfer
        theirs[0].end(transfer)
    assert ours[0].cut_off() == "6 pushes unacknowledged"
    assert need_hello(ours[0].beat())
    assert theirs[0].last(PairBroken).lost_ranks == [0]
    assert len(theirs[0].outcomes()) == 6
    assert len(ours[1].outcomes()) == 6


def test_a_rank_cut_off_while_a_verdict_is_told_confuses_nobody() -> None:
    """The others hear the accepted verdict, then that the pair is broken; nothing in between."""
    bench = Bench(Settings(max_unacked=3))
    ours = bench.agents(prefill(tp=3, heads=3))
    ours[1].acks = False
    for agent in ours:
        agent.join()
    for name in ("d1", "d2"):
        bench.seal(decode(name, heads=3))
    assert not ours[1].cut_off()
    theirs = bench.seal(decode("d3", heads=3))
    assert ours[1].cut_off() == "4 pushes unacknowledged"
    for agent in theirs:
        told = [m for m in agent.pushes if isinstance(m, Verdict | PairBroken)]
        about = [m for m in told if m.destination == "d3"]
        assert [type(m) for m in about] == [Verdict, PairBroken]
        assert isinstance(about[0], Verdict)
        assert about[0].accepted


def test_a_rank_cut_off_while_ready_is_told_confuses_nobody() -> None:
    """PairReady never comes after the PairBroken of the same epochs."""
    bench = Bench(Settings(max_unacked=4))
    ours = bench.agents(prefill(tp=3, heads=3))
    ours[1].acks = False
    for agent in ours:
        agent.join()
    theirs = [bench.seal(decode(name, heads=3)) for name in ("d1", "d2", "d3")][2]
    assert not ours[1].cut_off()
    bench.link(*ours, *theirs)
    assert ours[1].cut_off() == "5 pushes unacknowledged"
    for agent in (ours[0], ours[2], *theirs):
        told = [m for m in agent.pushes if isinstance(m, PairReady | PairBroken)]
        about = [m for m in told if m.destination == "d3"]
        assert [type(m) for m in about] == [PairReady, PairBroken]


def test_a_rank_cut_off_while_outcomes_are_told_loses_no_outcome() -> None:
    """What its loss ends is told in the same step, not at the next event."""
    bench = Bench(Settings(max_unacked=5))
    ours, theirs = bench.pair(prefill(), decode(tp=2))
    granted = [theirs[0].grant(f"r{n}").transfer for n in range(7)]
    theirs[1].acks = False
    for transfer in granted[:6]:
        assert not theirs[1].cut_off()
        theirs[0].end(transfer)
        theirs[1].end(transfer)
    assert theirs[1].cut_off()
    assert [o.transfer for o in ours[0].outcomes()] == granted
    assert [o.outcome for o in theirs[0].outcomes()] == ["delivered"] * 6 + ["failed"]
    assert bench.core.transfers.by_id[granted[6]].state is TransferState.FAILED


def test_a_stream_longer_than_a_burst_is_repeated_in_bursts() -> None:
    """A repeat never floods: 64 at a time, from the oldest."""
    bench = Bench()
    ours, theirs = bench.pair(prefill(), decode())
    ours[0].acks = False
    for number in range(80):
        theirs[0].end(theirs[0].grant(f"r{number}").transfer)
    ours[0].seen.clear()
    bench.wait(300, beating=())
    assert [number for number, _ in ours[0].seen] == list(range(4, 68))


# --- leaving, and parts of the core --------------------------------------------------------------


def test_a_rank_that_leaves_is_gone_at_once() -> None:
    """Left is answered, and the session is over."""
    bench = Bench()
    ours, theirs = bench.pair(prefill(tp=2), decode())
    ours[0].leave()
    assert theirs[0].told(PairBroken)
    assert need_hello(ours[0].beat())
    assert not ours[0].cut_off()


def test_notes_tell_an_operator_of_every_refused_registration() -> None:
    """One warning with code and words per finding."""
    bench = Bench()
    (agent,) = bench.agents(prefill("none"))
    agent.hello()
    notes = [e for e in bench.log if isinstance(e, Note)]
    assert [(note.event, note.level) for note in notes] == [("registration_rejected", "warning")]
    assert notes[0].fields["slug"] == "world_name_invalid"


def test_cutting_off_is_an_effect_for_the_runtime() -> None:
    """A rank that is gone for silence is cut off by name and reason."""
    bench = Bench()
    (agent,) = bench.seal(prefill())
    bench.wait(bench.settings.stall, beating=())
    assert [e.peer for e in bench.log if isinstance(e, CutOff)] == [agent.peer]


def test_every_illegal_change_of_state_raises() -> None:
    """The tables allow what they list and nothing else; ends of life allow nothing."""
    tables: list[Any] = [RANK_TABLE, WORLD_TABLE, PAIR_TABLE, TRANSFER_TABLE]
    for table in tables:
        for state, allowed in table.items():
            for to in table:
                if to in allowed:
                    assert change(table, state, to) is to
                else:
                    with pytest.raises(InvariantError, match=f"{state} may not become {to}"):
                        change(table, state, to)
    assert not RANK_TABLE[RankState.GONE]


def test_deadlines_wake_in_order_of_time_and_once() -> None:
    """Equal times wake in the order they were set; the next one is always known."""
    deadlines, woken = Deadlines(), []
    assert deadlines.next() is None
    for when, name in ((5, "b"), (3, "a"), (5, "c"), (9, "d")):
        deadlines.at(when, lambda name=name: woken.append(name))  # type: ignore[misc]
    deadlines.run(2)
    assert woken == []
    deadlines.run(5)
    assert woken == ["a", "b", "c"]
    assert deadlines.next() == 9


def test_the_same_events_give_the_same_effects() -> None:
    """Two cores fed alike answer alike: replay needs nothing but the events."""

    def run() -> list[object]:
        bench = Bench()
        ours, theirs = bench.pair(prefill(tp=4), decode(tp=2))
        theirs[0].end(theirs[0].grant("r1").transfer)
        ours[0].drop()
        bench.wait(10 * SECOND)
        return [repr(effect) for effect in bench.log]

    assert run() == run()


def test_unwired_parts_of_the_core_fail_loudly() -> None:
    """A part that was not connected is a defect of ours."""
    bench = Bench()
    core: Coordinator = bench.core
    bare = Sessions(core._turn, bench.identity, bench.settings)
    (agent,) = bench.seal(prefill())
    session = core.sessions.by_id[agent.session]
    with pytest.raises(AssertionError, match="not wired"):
        bare.on_gone(session)
    worlds = Worlds(core._turn, bare, bench.settings, Durable())
    with pytest.raises(AssertionError, match="not wired"):
        worlds.on_sealed(core.worlds.by_name["p"])
    assert worlds.partners(core.worlds.by_name["p"]) == []
    assert not agent.told(Outcome)
