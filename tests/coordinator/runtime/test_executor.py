"""Effects in order: what must be durable first, and what may pass by."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from msgspec import Struct

from rankgate.coordinator.core.effects import CutOff, Effect, Judge, Note, Persist, Send, Show
from rankgate.coordinator.core.events import ClockTicked, Event, MessageRefused, VerdictReached
from rankgate.coordinator.runtime import executor as module
from rankgate.coordinator.runtime.executor import Executor
from rankgate.proto.codec import decode
from rankgate.proto.messages import Leave, Opened
from rankgate.proto.views import View
from tests.coordinator.core.harness import decode as decode_job
from tests.coordinator.core.harness import prefill
from tests.coordinator.runtime.live import WAIT


class FakeCore:
    """Gives the effects that a test lays out, one list a step."""

    def __init__(self) -> None:
        self.steps: list[list[Effect] | Exception] = []
        self.events: list[Event] = []

    def step(self, event: Event, _now: int) -> list[Effect]:
        """Take the next list."""
        self.events.append(event)
        if isinstance(event, ClockTicked) or not self.steps:
            return []
        effects = self.steps.pop(0)
        if isinstance(effects, Exception):
            raise effects
        return effects


class FakeStore:
    """Keeps writes until a test lets them be durable."""

    def __init__(self) -> None:
        self.writes: list[tuple[Persist, Callable[[BaseException | None], None]]] = []

    def write(self, persist: Persist, done: Callable[[BaseException | None], None]) -> None:
        """Keep one write."""
        self.writes.append((persist, done))

    def finish(self, error: BaseException | None = None) -> None:
        """Answer all writes so far."""
        writes, self.writes = self.writes, []
        for _, done in writes:
            done(error)


class FakeRouter:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, int]] = []
        self.bodies: list[bytes] = []
        self.cut: list[bytes] = []

    def send(self, peer: bytes, frames: list[bytes]) -> None:
        """Keep one message."""
        self.sent.append((peer, decode(frames)[0].id))
        self.bodies.append(frames[1])

    def cut_off(self, peer: bytes) -> None:
        """Keep one cut."""
        self.cut.append(peer)


class Desk:
    """An executor among fakes."""

    def __init__(self, late_after: int = 60_000) -> None:
        """Use the running loop."""
        self.core, self.store = FakeCore(), FakeStore()
        self.agents, self.operators = FakeRouter(), FakeRouter()
        self.fatal: list[str] = []
        self.pool = ThreadPoolExecutor(1)
        parts: Any = (self.core, self.store, self.pool)
        self.executor = Executor(
            asyncio.get_running_loop(), *parts, on_fatal=self.fatal.append, late_after=late_after
        )
        routers: Any = (self.agents, self.operators)
        self.executor.serve(*routers)

    def step(self, *effects: Effect) -> None:
        """Step an event that has these effects."""
        self.core.steps.append(list(effects))
        self.executor.step(MessageRefused(b"x", "c", "t"))

    async def settle(self) -> None:
        """Let the loop take what other threads handed it."""
        await asyncio.sleep(0)
        await asyncio.sleep(0)


@pytest.fixture
async def desk() -> Desk:
    """An executor among fakes."""
    return Desk()


def send(peer: bytes, number: int) -> Send:
    """Return a small message."""
    return Send(peer, number, Leave(session=number))


def answer(peer: bytes, number: int) -> Send:
    """Return an answer that names no epoch."""
    return Send(peer, number, Opened(tick=0, items=[]))


async def test_what_stands_after_persist_waits(desk: Desk) -> None:
    """What stands before it leaves at once, what stands after it when it is on disk."""
    desk.step(send(b"a", 1), Persist(epoch=1), send(b"b", 2), CutOff(b"c", "why"))
    assert desk.agents.sent == [(b"a", 1)]
    assert desk.agents.cut == []
    desk.store.finish()
    await desk.settle()
    assert desk.agents.sent == [(b"a", 1), (b"b", 2)]
    assert desk.agents.cut == [b"c"]


async def test_messages_to_one_peer_never_overtake(desk: Desk) -> None:
    """Later messages to a waiting peer wait too; answers to other peers' opens pass."""
    desk.step(Persist(epoch=1), send(b"a", 1))
    desk.step(send(b"a", 2), answer(b"b", 3))
    desk.step(Persist(epoch=2), send(b"b", 4))
    desk.step(send(b"a", 5), answer(b"b", 6), answer(b"c", 7), send(b"d", 9))
    assert desk.agents.sent == [(b"b", 3), (b"c", 7)]
    desk.store.finish()
    await desk.settle()
    assert [n for peer, n in desk.agents.sent if peer == b"a"] == [1, 2, 5]
    assert [n for peer, n in desk.agents.sent if peer == b"b"] == [3, 4, 6]
    assert [n for peer, n in desk.agents.sent if peer == b"d"] == [9]
    desk.step(send(b"a", 8))
    assert desk.agents.sent[-1] == (b"a", 8)


async def test_several_persists_of_a_step_are_one_wait(desk: Desk) -> None:
    """Nothing leaves before the last of them."""
    desk.step(Persist(epoch=1), send(b"a", 1), Persist(epoch=2), send(b"a", 2))
    (_, first), (_, second) = desk.store.writes
    first(None)
    await desk.settle()
    assert desk.agents.sent == []
    second(None)
    await desk.settle()
    assert desk.agents.sent == [(b"a", 1), (b"a", 2)]


async def test_a_failed_write_is_fatal(desk: Desk) -> None:
    """What depended on it never leaves, and nothing is stepped any more."""
    desk.step(Persist(epoch=1), send(b"a", 1))
    desk.store.finish(OSError("disk full"))
    await desk.settle()
    assert desk.fatal == ["the store failed: disk full"]
    seen = len(desk.core.events)
    desk.step(send(b"a", 2))
    assert desk.agents.sent == []
    assert len(desk.core.events) == seen


async def test_a_broken_invariant_is_fatal(desk: Desk) -> None:
    """The core is not stepped again: a restart is the fence."""
    desk.core.steps.append(AssertionError("story"))
    desk.executor.step(MessageRefused(b"x", "c", "t"))
    assert len(desk.fatal) == 1
    assert "story" in desk.fatal[0]
    desk.step(send(b"a", 1))
    assert desk.agents.sent == []


async def test_judging_happens_beside_the_loop(desk: Desk) -> None:
    """The verdict comes back as an event, with the shapes' digests."""
    source, destination = prefill(tp=2).shape(), decode_job(tp=4).shape()
    desk.step(Judge(source, destination))
    async with asyncio.timeout(WAIT):
        while len(desk.core.events) < 2:
            await asyncio.sleep(0.001)
    event = desk.core.events[1]
    assert isinstance(event, VerdictReached)
    assert event.source_digest == source.digest
    assert event.destination_digest == destination.digest
    assert event.judgement.plan is not None


async def test_judging_that_raises_is_fatal(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair must not wait for a verdict that never comes."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a rule")

    monkeypatch.setattr(module, "judge", fail)
    desk.step(Judge(prefill().shape(), decode_job().shape()))
    async with asyncio.timeout(WAIT):
        while not desk.fatal:
            await asyncio.sleep(0.001)
    assert "a rule" in desk.fatal[0]


async def test_a_message_to_many_is_encoded_once(desk: Desk) -> None:
    """Each gets its own id and the same bytes."""
    message: Struct = Leave(session=5)
    desk.step(*(Send(bytes([n]), n, message) for n in range(1, 9)))
    assert [number for _, number in desk.agents.sent] == list(range(1, 9))
    assert all(body is desk.agents.bodies[0] for body in desk.agents.bodies)


async def test_show_answers_on_the_operator_socket(desk: Desk) -> None:
    """Views never leave through the agents' socket."""
    desk.step(Show(b"o", 4, View(story=[])))
    assert desk.operators.sent == [(b"o", 4)]
    assert desk.agents.sent == []


async def test_notes_are_logged(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    """A note has no other effect."""
    del caplog
    desk.step(Note("a_fact", "debug", {"rank": 3}), send(b"a", 1))
    assert desk.agents.sent == [(b"a", 1)]


async def test_our_own_stall_is_told_before_anything_else() -> None:
    """After a pause longer than a heartbeat a tick goes before the first message."""
    desk = Desk(late_after=5)
    await asyncio.sleep(0.02)
    desk.step(send(b"a", 1))
    assert [type(event) for event in desk.core.events] == [ClockTicked, MessageRefused]
    desk.executor.step(ClockTicked())
    assert len(desk.core.events) == 3
