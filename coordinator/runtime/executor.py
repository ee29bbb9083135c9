"""Carries the core's effects out, in order, and brings what happens back as events."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Executor as Pool
from typing import Any

from msgspec import Struct

from rankgate.coordinator.core.effects import CutOff, Effect, Judge, Note, Persist, Send, Show
from rankgate.coordinator.core.events import ClockTicked, Event, VerdictReached
from rankgate.coordinator.core.judging import judge
from rankgate.coordinator.core.machine import Coordinator
from rankgate.coordinator.runtime.clock import boottime_ms
from rankgate.coordinator.runtime.log import Notes
from rankgate.coordinator.runtime.router import Router
from rankgate.coordinator.runtime.store import Store
from rankgate.proto.codec import encode, encode_header
from rankgate.proto.messages import (
    KIND_OF,
    AbortAck,
    Ended,
    HeartbeatAck,
    NeedHello,
    Opened,
    Probe,
    Reported,
)

_MAY_PASS = frozenset({Opened, Ended, AbortAck, HeartbeatAck, Reported, Probe, NeedHello})
"""Answers that name no epoch which the asker does not know already; they never wait for a disk."""


class _Held:
    """Effects that wait until what stands before them is on disk."""

    __slots__ = ("effects", "peers")

    def __init__(self) -> None:
        self.effects: list[Effect] = []
        self.peers: Counter[bytes] = Counter()


class Executor:
    """Steps the core and does what it says.

    Invariant: what stands after a Persist leaves only once that is durable; so does every later
    message that may name its epoch, and every later message to the same peers. Answers to opens,
    ends and heartbeats of other peers pass.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        core: Coordinator,
        store: Store,
        pool: Pool,
        *,
        on_fatal: Callable[[str], None],
        late_after: int = 1000,
    ) -> None:
        """Wire the core to the store and the judging pool; routers come by ``serve``.

        Args:
            loop: the serving loop; ``step`` is called on it alone.
            core: what decides.
            store: where Persist goes.
            pool: one thread beside the loop, where Judge goes.
            on_fatal: hears, once or more, why this process must not go on.
            late_after: ms without a tick after which any event is preceded by one.
        """
        self._loop = loop
        self._core = core
        self._store = store
        self._pool = pool
        self._on_fatal = on_fatal
        self._held: deque[_Held] = deque()
        self._held_peers: Counter[bytes] = Counter()
        self._last: Struct | None = None
        self._body = b""
        self._late_after = late_after
        self._late_at = boottime_ms() + late_after
        self._failed = False
        self._notes = Notes()
        self._agents: Router | None = None
        self._operators: Router | None = None
        self.after_step: Callable[[], None] = lambda: None
        self._do: dict[type, Callable[[Any], None]] = {
            Send: self._send,
            Show: self._show,
            Judge: self._judge,
            CutOff: self._cut_off,
            Note: self._notes.write,
        }

    def serve(self, agents: Router, operators: Router) -> None:
        """Send through these from now on."""
        self._agents, self._operators = agents, operators

    def step(self, event: Event) -> None:
        """Step the core once and carry its effects out."""
        if self._failed:
            return
        now = boottime_ms()
        try:
            if now >= self._late_at or type(event) is ClockTicked:
                self._late_at = now + self._late_after
                if type(event) is not ClockTicked:
                    # This process stood still: the core must hear of that before it weighs how
                    # long others were silent, or our own stall would count against them.
                    self._carry(self._core.step(ClockTicked(), now))
            effects = self._core.step(event, now)
            if effects:
                self._carry(effects)
        except Exception as error:  # noqa: BLE001 - a broken invariant: fenced by a restart
            self._fail(f"{type(event).__name__} broke the core: {error!r}", error)
            return
        self.after_step()

    def _fail(self, why: str, error: BaseException | None) -> None:
        self._failed = True
        self._notes.failure(why, error)
        self._on_fatal(why)

    def _carry(self, effects: list[Effect]) -> None:
        for index, effect in enumerate(effects):
            if type(effect) is Persist:
                self._hold(effects[index:])
                return
            if self._held and type(effect) is Send and self._must_wait(effect):
                self._keep(self._held[-1], effect)
                continue
            self._do[type(effect)](effect)

    def _must_wait(self, send: Send) -> bool:
        """Whether a message may name an epoch that is not on disk yet, or would overtake one."""
        return send.peer in self._held_peers or type(send.message) not in _MAY_PASS

    def _hold(self, effects: list[Effect]) -> None:
        held = _Held()
        persists = [effect for effect in effects if isinstance(effect, Persist)]
        for effect in effects:
            if not isinstance(effect, Persist):
                self._keep(held, effect)
        self._held.append(held)
        for persist in persists[:-1]:
            self._store.write(persist, self._written)
        self._store.write(persists[-1], lambda error: self._written(error, release=True))

    def _keep(self, held: _Held, effect: Effect) -> None:
        held.effects.append(effect)
        if isinstance(effect, Send):
            held.peers[effect.peer] += 1
            self._held_peers[effect.peer] += 1

    def _written(self, error: BaseException | None, *, release: bool = False) -> None:
        """Hear from the writer's thread; batches are released in the order they were given."""
        if error is not None:
            why = f"the store failed: {error}"
            self._loop.call_soon_threadsafe(self._fail, why, error)
        elif release:
            self._loop.call_soon_threadsafe(self._release)

    def _release(self) -> None:
        if self._failed:
            return
        held = self._held.popleft()
        self._held_peers -= held.peers
        try:
            for effect in held.effects:
                self._do[type(effect)](effect)
        except Exception as error:  # noqa: BLE001 - as in step
            self._fail(f"an effect failed: {error!r}", error)

    # --- effects --------------------------------------------------------------------------

    def _send(self, effect: Send) -> None:
        message = effect.message
        if message is not self._last:  # one verdict goes to many ranks: encode it once
            frames = encode(message, effect.id)
            self._last, self._body = message, frames[1]
        else:
            frames = [encode_header(KIND_OF[type(message)], effect.id), self._body]
        if self._agents is not None:
            self._agents.send(effect.peer, frames)

    def _show(self, effect: Show) -> None:
        if self._operators is not None:
            self._operators.send(effect.peer, encode(effect.view, effect.id))

    def _judge(self, effect: Judge) -> None:
        source, destination = effect.source, effect.destination
        future = self._loop.run_in_executor(self._pool, judge, source, destination)

        def done(judged: asyncio.Future[Any]) -> None:
            if judged.cancelled():
                return
            if (error := judged.exception()) is not None:
                self._fail(f"judging failed: {error!r}", error)
                return
            self.step(VerdictReached(source.digest, destination.digest, judged.result()))

        future.add_done_callback(done)

    def _cut_off(self, effect: CutOff) -> None:
        if self._agents is not None:
            self._agents.cut_off(effect.peer)
