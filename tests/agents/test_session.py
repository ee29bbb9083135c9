"""The conversation with the daemon: loud failures, order of pushes, resuming, its clock."""

from __future__ import annotations

import random
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace

from rankgate.agents.session import Identity, Session, SessionState, Ticks
from rankgate.proto.codec import WireError
from rankgate.proto.codes import Code
from rankgate.proto.findings import Side, finding
from rankgate.proto.messages import (
    Ack,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Leave,
    NeedHello,
    Open,
    Opened,
    Probe,
    ProbeAck,
    Refusal,
    Register,
    Registered,
    Rejected,
    Welcome,
    WorldSealed,
)
from tests.coordinator.core.harness import decode, id16

M = TypeVar("M", bound=Struct)
INSTANCE, CLOCK = id16("instance"), id16("boot")
WELCOME = Welcome(wire=1, instance=INSTANCE, start=1, clock=CLOCK, tick=5000)
REGISTERED = Registered(
    session=77, heartbeat=1000, ttl=5000, resume=2000, probe=1000, grant_ttl=60_000, tick=5000
)
IDENTITY = Identity(world="d", rank=0, incarnation=id16("me"), round=id16("round"))


class Talk:
    """A session and the daemon's side of it, played by the test."""

    def __init__(self) -> None:
        """Begin at 0 ms."""
        self.now = 0
        self.session = Session(IDENTITY, decode().describe(0), 0, seed=3)
        self.pushes: list[Any] = []
        self.fresh: list[bool] = []
        self.session.on_push = lambda message, _now: self.pushes.append(message)
        self.session.on_fresh = self.fresh.append

    def said(self) -> list[tuple[int, Struct]]:
        """Take what the session wants sent."""
        out, self.session.out = self.session.out, []
        return out

    def last(self, of: type[M]) -> tuple[int, M]:
        """Return id and message of the last one of a type that was said."""
        number, message = next(one for one in reversed(self.said()) if isinstance(one[1], of))
        assert isinstance(message, of)
        return number, message

    def hear(self, message_id: int, message: Struct) -> None:
        """Let a message arrive."""
        self.session.receive(message_id, message, self.now)

    def wait(self, ms: int) -> None:
        """Let time pass, as the I/O thread does."""
        until = self.now + ms
        while self.now < until:
            due = self.session.next_deadline()
            self.now = until if due is None else max(self.now + 1, min(due, until))
            self.session.tick(self.now)

    def live(self) -> Talk:
        """Go through Hello and Register to the first heartbeat."""
        self.hear(self.last(Hello)[0], WELCOME)
        self.hear(self.last(Register)[0], REGISTERED)
        return self


def sealed(epoch: int) -> WorldSealed:
    """Return a push."""
    return WorldSealed(world="d", epoch=epoch, size=1, receive_count=1, digest=id16("digest"))


def test_hello_register_and_a_heartbeat_at_once() -> None:
    """The first heartbeat comes with the session, the next ones as the daemon said (C22)."""
    talk = Talk().live()
    _, beat = talk.last(Heartbeat)
    assert beat == Heartbeat(session=77)
    talk.wait(5000)
    assert sum(isinstance(message, Heartbeat) for _, message in talk.said()) == 5


def test_without_an_answer_the_same_message_goes_out_again() -> None:
    """A lost Welcome costs a repeat under the same id, never a second conversation (D01)."""
    talk = Talk()
    talk.wait(3000)
    hellos = [(number, message) for number, message in talk.said() if isinstance(message, Hello)]
    assert len(hellos) >= 4
    assert len({number for number, _ in hellos}) == 1
    assert talk.session.answered_at == 0


def test_a_refusal_of_the_version_is_final_and_keeps_both_ranges() -> None:
    """Kind 0: the reader learns which versions the daemon speaks (A12)."""
    talk = Talk()
    talk.hear(talk.last(Hello)[0], Refusal(code="RG201", text="wire", min=2, max=3))
    assert talk.session.state is SessionState.REFUSED
    assert talk.session.refusal is not None
    assert (talk.session.refusal.min, talk.session.refusal.max) == (2, 3)
    talk.wait(5000)
    assert talk.said() == []


def test_a_refusal_of_one_message_is_its_answer_and_the_session_goes_on() -> None:
    """too_large answers that id alone; a heartbeat or a stranger that is refused ends nothing."""
    talk, answers = Talk().live(), []
    for word in ("first", "second"):
        talk.session.request(
            lambda session: Open(session=session, items=[]),
            lambda answer, _now, word=word: answers.append((word, answer)),  # type: ignore[misc]
            talk.now,
        )
    said = talk.said()
    first = next(number for number, message in said if isinstance(message, Open))
    beat = next(number for number, message in said if isinstance(message, Heartbeat))
    refusal = Refusal(code=Code.TOO_LARGE.id, text="too_large: 2 MiB")
    for number in (first, first, beat, 999):
        talk.hear(number, refusal)
    assert answers == [("first", refusal)]
    assert talk.session.state is SessionState.LIVE
    assert talk.session.refusal is None
    talk.wait(1000)
    assert talk.last(Heartbeat)[1].session == 77


@pytest.mark.parametrize("how", ["version", "register", "beat"])
def test_once_refused_for_good_nobody_waits_any_more(how: str) -> None:
    """What was asked and what is asked later is given up at once; nothing is due again."""
    talk, given_up = Talk(), list[str]()
    talk.hear(talk.last(Hello)[0], WELCOME)
    register, _ = talk.last(Register)
    if how != "register":
        talk.hear(register, REGISTERED)

    def ask(word: str) -> None:
        talk.session.request(
            lambda session: Open(session=session, items=[]),
            lambda _answer, _now: given_up.append("answered"),
            talk.now,
            on_timeout=lambda _now: given_up.append(word),
        )

    ask("before")
    assert given_up == []
    if how == "version":
        talk.hear(0, Refusal(code=Code.WIRE_VERSION.id, text="wire", min=2, max=3))
    elif how == "register":
        talk.hear(register, Refusal(code=Code.TOO_LARGE.id, text="too_large"))
    else:
        final = Rejected(findings=[finding(Code.DUPLICATE_RANK, "rank", Side("a", "b"))])
        talk.hear(talk.last(Heartbeat)[0], final)
    ask("after")
    assert talk.session.state is SessionState.REFUSED
    assert given_up == ["before", "after"]
    assert talk.fresh == ([] if how == "register" else [False])
    assert talk.session.next_deadline() is None
    talk.said()
    talk.wait(5000)
    assert talk.said() == []


def test_a_refusal_that_may_pass_is_tried_again_and_another_is_not() -> None:
    """world_in_use backs off and says Hello again; duplicate_rank ends it."""
    side = Side("host a", "round 1")
    talk = Talk()
    talk.hear(talk.last(Hello)[0], WELCOME)
    passing = Rejected(findings=[finding(Code.WORLD_IN_USE, "world", side)])
    talk.hear(talk.last(Register)[0], passing)
    assert talk.session.findings == passing.findings
    talk.wait(500)
    assert talk.said() == []
    talk.wait(2000)
    number, _ = talk.last(Hello)
    talk.hear(number, WELCOME)
    final = Rejected(findings=[finding(Code.DUPLICATE_RANK, "rank", side)])
    talk.hear(talk.last(Register)[0], final)
    assert talk.session.state is SessionState.REFUSED
    assert talk.session.findings == final.findings


def test_pushes_are_taken_in_order_once_each_and_acknowledged_together() -> None:
    """Out of order or repeated: dropped, the daemon repeats; one Ack for a burst."""
    talk = Talk().live()
    talk.said()
    for number in (2, 1, 1, 2, 4, 3):
        talk.hear(number, sealed(number))
    talk.session.acknowledge()
    talk.session.acknowledge()
    assert [message.epoch for message in talk.pushes] == [1, 2, 3]
    assert [message for _, message in talk.said()] == [Ack(session=77, acked=3)]
    talk.wait(1000)
    assert talk.last(Heartbeat)[1].acked == 3


def test_a_probe_is_answered_at_once_under_its_id() -> None:
    """A live member of an older round says so."""
    talk = Talk().live()
    talk.said()
    talk.hear(9, Probe())
    assert talk.said() == [(9, ProbeAck(session=77))]


def test_need_hello_resumes_and_keeps_the_sequence() -> None:
    """The same daemon: the old session is offered, pushes go on where they were."""
    talk = Talk().live()
    talk.hear(1, sealed(1))
    number, _ = talk.last(Heartbeat)
    talk.hear(number, NeedHello(instance=INSTANCE))
    number, hello = talk.last(Hello)
    assert hello.session == 77
    talk.hear(number, replace(WELCOME, resumed=True))
    assert talk.session.session == 77
    assert talk.fresh == []
    talk.hear(2, sealed(2))
    assert len(talk.pushes) == 2


def test_a_daemon_that_forgot_is_registered_with_anew_and_the_sequence_begins_again() -> None:
    """Same instance and clock: nothing is void, but the pushes start at 1."""
    talk = Talk().live()
    talk.hear(1, sealed(1))
    talk.hear(talk.last(Heartbeat)[0], NeedHello(instance=INSTANCE))
    talk.hear(talk.last(Hello)[0], WELCOME)
    talk.hear(talk.last(Register)[0], replace(REGISTERED, session=99))
    assert talk.fresh == [False]
    talk.hear(1, sealed(2))
    assert [message.epoch for message in talk.pushes] == [1, 2]
    assert talk.session.session == 99


def test_another_instance_in_a_heartbeat_voids_all_grants() -> None:
    """A daemon with a new database is seen within one heartbeat (C02, C23)."""
    talk = Talk().live()
    other = id16("another")
    number, _ = talk.last(Heartbeat)
    talk.hear(number, HeartbeatAck(instance=other, clock=CLOCK, tick=6000))
    number, hello = talk.last(Hello)
    assert hello.session == 0
    talk.hear(number, replace(WELCOME, instance=other))
    assert talk.fresh == [True]


def test_a_request_is_repeated_until_answered_and_survives_a_new_session() -> None:
    """Its message is built anew for the session of the moment; the answer comes to its owner."""
    talk, answers = Talk().live(), []
    talk.said()
    talk.session.request(
        lambda session: Open(session=session, items=[]),
        lambda answer, _now: answers.append(answer),
        talk.now,
    )
    first, message = talk.last(Open)
    assert message.session == 77
    talk.hear(first, NeedHello(instance=INSTANCE))
    talk.hear(talk.last(Hello)[0], WELCOME)
    talk.hear(talk.last(Register)[0], replace(REGISTERED, session=99))
    second, message = talk.last(Open)
    assert (second, message.session) == (first, 99)
    talk.hear(second, Opened(tick=7000, items=[]))
    talk.hear(second, Opened(tick=7000, items=[]))
    assert answers == [Opened(tick=7000, items=[])]


def test_after_leaving_nothing_is_said_any_more() -> None:
    """Leave goes out once; what comes later is not looked at."""
    talk = Talk().live()
    talk.said()
    talk.session.leave("done")
    assert [message for _, message in talk.said()] == [Leave(session=77, reason="done")]
    talk.hear(1, sealed(1))
    talk.wait(10_000)
    assert talk.said() == []
    assert talk.pushes == []


@given(seed=st.integers(0, 1 << 30), offset=st.integers(-(10**9), 10**9))
def test_the_true_tick_lies_between_the_bounds_whatever_the_delays(seed: int, offset: int) -> None:
    """Upper from when a question was sent, lower from when its answer was read."""
    rng, ticks, now = random.Random(seed), Ticks(), 10**10
    for _ in range(40):
        sent = now
        answered = sent + rng.randrange(500)
        now = answered + rng.randrange(500)
        ticks.note(answered + offset, sent, now)
        later = now + rng.randrange(100_000)
        assert ticks.lower(later) <= later + offset <= ticks.upper(later)


def test_an_unreadable_push_makes_the_rank_register_anew() -> None:
    """What it said is lost, and every later push would be passed over: ask for all of it again."""
    talk = Talk().live()
    talk.said()
    talk.session.unreadable(WireError(Code.TOO_LARGE, "too large", id=9), talk.now)
    assert talk.session.session == 77  # not the next push: nothing is lost by it
    talk.session.unreadable(WireError(Code.TOO_LARGE, "too large", id=1), talk.now)
    assert talk.session.session == 0
    talk.wait(1000)
    number, hello = talk.last(Hello)
    assert hello.session == 0
    talk.hear(number, WELCOME)
    assert talk.last(Register)
