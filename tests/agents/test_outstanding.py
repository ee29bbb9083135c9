"""Requests that are repeated under one id until answered or given up."""

from __future__ import annotations

from itertools import pairwise

from msgspec import Struct

from rankgate.agents.outstanding import RETRY_FIRST, RETRY_LONGEST, Outstanding
from rankgate.proto.messages import Left, Pulse


def build() -> Struct:
    """Return a message."""
    return Pulse()


def test_repeats_keep_their_id_and_come_ever_more_slowly() -> None:
    """0.2 s doubling to 2 s, each spread by a quarter."""
    table, answers = Outstanding(1), []
    request = table.add("k", build, lambda answer, now: answers.append((answer, now)), 0)
    times = []
    for now in range(20_000):
        times += [now for _ in table.due(now)]
    gaps = [later - sooner for sooner, later in pairwise(times)]
    assert times[0] == 0
    expected = RETRY_FIRST
    for gap in gaps:
        assert 0.74 * expected <= gap <= 1.26 * expected
        expected = min(2 * expected, RETRY_LONGEST)
    assert request.sent == 0


def test_an_answer_belongs_to_its_owner_once() -> None:
    """A second answer under the same id, or one nobody asked for, finds no owner."""
    table, answers = Outstanding(1), []
    first = table.add("a", build, lambda _answer, now: answers.append(("a", now)), 0)
    table.add("b", build, lambda _answer, now: answers.append(("b", now)), 0)
    taken = table.answered(first.id)
    assert taken is first
    taken.on_answer(Left(), 5)
    assert answers == [("a", 5)]
    assert table.answered(first.id) is None
    assert table.answered(999) is None
    assert len(table) == 1


def test_what_is_given_up_tells_its_owner_and_is_never_sent_again() -> None:
    """At its deadline, once."""
    table = Outstanding(1)
    given_up: list[int] = []
    table.add("k", build, lambda _answer, _now: None, 0, until=500, on_timeout=given_up.append)
    for now in range(0, 3000, 10):
        sent = list(table.due(now))
        assert not sent or now < 500
    assert given_up == [500]
    assert table.next_deadline() is None


def test_a_repeat_does_not_move_the_time_of_its_first_sending() -> None:
    """The answer may be to the first: only that time bounds the answerer's clock from above."""
    table = Outstanding(1)
    request = table.add("k", build, lambda _answer, _now: None, 100)
    assert len(list(table.due(100))) == 1
    assert len(list(table.due(5000))) == 1
    assert request.sent == 100
