"""The conversation with the daemon, without a socket or a clock.

Times are CLOCK_BOOTTIME in ms, given as arguments. What is to be sent collects in ``out``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import StrEnum

from msgspec import Struct

from rankgate.agents.outstanding import RETRY_FIRST, RETRY_LONGEST, Answer, Outstanding
from rankgate.agents.spread import Spread
from rankgate.proto.codec import WireError
from rankgate.proto.codes import Code
from rankgate.proto.descriptor import Descriptor
from rankgate.proto.findings import Finding
from rankgate.proto.messages import (
    MESSAGES,
    Ack,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Kind,
    Leave,
    NeedHello,
    Opened,
    Probe,
    ProbeAck,
    Refusal,
    Register,
    Registered,
    Rejected,
    Welcome,
)

_PUSHES = tuple(MESSAGES[kind] for kind in Kind if Kind.WORLD_SEALED <= kind <= Kind.ABORTING)
_OWN = "greeting"
_TICKS = 16


class Identity(Struct, frozen=True, kw_only=True):
    """Who a process is: never an address, a pid or a rank alone."""

    world: str
    rank: int
    incarnation: bytes
    round: bytes


class SessionState(StrEnum):
    """Where the conversation stands."""

    GREETING = "greeting"
    REGISTERING = "registering"
    LIVE = "live"
    REFUSED = "refused"
    LEFT = "left"


class Ticks:
    """Bounds on the daemon's clock, from what its answers said.

    Invariant: the true tick lies between ``lower(now)`` and ``upper(now)`` as long as both clocks
    run at one rate; only the last 16 answers count, so a drift is forgotten.
    """

    def __init__(self) -> None:
        """Know nothing."""
        self._offsets: deque[tuple[int, int]] = deque(maxlen=_TICKS)

    def note(self, tick: int, sent: int, read: int) -> None:
        """Take the tick of an answer read at ``read`` to a question sent at ``sent``."""
        self._offsets.append((tick - sent, tick - read))

    def upper(self, now: int) -> int:
        """Return the latest the daemon's tick can be."""
        return now + min((high for high, _ in self._offsets), default=0)

    def lower(self, now: int) -> int:
        """Return the earliest the daemon's tick can be."""
        return now + max((low for _, low in self._offsets), default=0)

    def forget(self) -> None:
        """Another clock: nothing known before holds."""
        self._offsets.clear()


class Session:
    """One rank's conversation with the daemon.

    Invariant: pushes reach ``on_push`` once each and in the daemon's order; every request is
    repeated until answered, or its owner told that time is up; ``session`` is 0 unless live. Once
    refused for good, no request waits: those there were, and those still to come, are given up.
    """

    def __init__(self, identity: Identity, descriptor: Descriptor, now: int, seed: int) -> None:
        """Begin greeting; ``seed`` spreads the repeats of many ranks."""
        self.identity = identity
        self.descriptor = descriptor
        self.state = SessionState.GREETING
        self.session = 0
        self.rules: Registered | None = None
        self.instance = b""
        self.clock = b""
        self.ticks = Ticks()
        self.findings: list[Finding] = []
        self.refusal: Refusal | None = None
        self.answered_at = now
        self.reconnect = False
        """Set when the connection itself must be made anew; cleared by whoever does it."""
        self.out: list[tuple[int, Struct]] = []
        self.on_push: Callable[[Struct, int], None] = lambda _message, _now: None
        self.on_live: Callable[[], None] = lambda: None
        self.on_fresh: Callable[[bool], None] = lambda _void: None
        self._outstanding = Outstanding(seed)
        self._spread = Spread(seed)
        self._seen = 0
        self._acked = 0
        self._beat_at: int | None = None
        self._resume = 0
        self._beat_id = 0
        self._beat_sent = 0
        self._say_hello(now)

    # --- sending --------------------------------------------------------------------------

    def request(
        self,
        build: Callable[[int], Struct],
        on_answer: Answer,
        now: int,
        until: int | None = None,
        on_timeout: Callable[[int], None] | None = None,
    ) -> None:
        """Send what ``build(session id)`` makes, repeated until answered.

        ``on_answer(message, now)`` gets the answer, which may be a Refusal of this one message;
        none comes after ``until`` (ms), or once this rank is refused: then ``on_timeout(now)``.
        """
        if self.state in {SessionState.LEFT, SessionState.REFUSED}:
            if on_timeout is not None:
                on_timeout(now)
            return
        self._outstanding.add(
            None, lambda: build(self.session), on_answer, now, until=until, on_timeout=on_timeout
        )
        self._repeat(now)

    def leave(self, reason: str) -> None:
        """Say goodbye; nothing more is repeated."""
        if self.session:
            goodbye = Leave(session=self.session, reason=reason)
            self.out.append((self._outstanding.new_id(), goodbye))
        self.state = SessionState.LEFT
        self._outstanding.clear()
        self._beat_at = None

    def _say_hello(self, now: int, delay: int = 0) -> None:
        identity, resume = self.identity, self._resume
        self.state = SessionState.GREETING
        self.session = 0
        self._beat_at = None
        hello = Hello(
            world=identity.world,
            rank=identity.rank,
            incarnation=identity.incarnation,
            round=identity.round,
            session=resume,
        )
        self._own_request(hello, self._welcomed, now, delay)

    def _own_request(self, message: Struct, on_answer: Answer, now: int, delay: int = 0) -> None:
        self._outstanding.drop(_OWN)
        added = self._outstanding.add(_OWN, lambda: message, on_answer, now)
        added.due = now + delay
        self._repeat(now)

    def _repeat(self, now: int) -> None:
        for request in self._outstanding.due(now, lambda each: bool(self.session or each.key)):
            self.out.append((request.id, request.build()))

    # --- receiving ------------------------------------------------------------------------

    def receive(self, message_id: int, message: Struct, now: int) -> None:
        """Take one message of the daemon."""
        if self.state in {SessionState.LEFT, SessionState.REFUSED}:
            return
        if isinstance(message, Refusal):
            self._refused_outright(message_id, message, now)
        elif isinstance(message, Probe):
            if self.session:
                self.out.append((message_id, ProbeAck(session=self.session)))
        elif isinstance(message, NeedHello):
            self._need_hello(message_id, message, now)
        elif isinstance(message, _PUSHES):
            self._push(message_id, message, now)
        elif message_id == self._beat_id:
            self._beaten(message, now)
        elif (request := self._outstanding.answered(message_id)) is not None:
            self.answered_at = now
            if isinstance(message, Opened | Registered | Welcome):
                self.ticks.note(message.tick, request.sent, now)
            request.on_answer(message, now)

    def _refused_outright(self, message_id: int, message: Refusal, now: int) -> None:
        """Another wire version is final, as is a refusal of the greeting itself.

        A connection that was cut off is made anew; any other refusal concerns one message, and is
        the answer to it.
        """
        if message.code == Code.NO_SESSION.id:
            if not self.reconnect:
                self.reconnect = True
                self._resume = 0
                self._outstanding.hurry(now)
                self._say_hello(now, RETRY_FIRST)
            return
        request = self._outstanding.answered(message_id)
        if message.code == Code.WIRE_VERSION.id or (request is not None and request.key == _OWN):
            self.refusal = message
            self._end(now)
        if request is not None and request.key != _OWN:
            self.answered_at = now
            request.on_answer(message, now)

    def _end(self, now: int) -> None:
        """Nothing is said any more: no push comes, and who waits for an answer gets none."""
        live, self.session = self.session, 0
        self.state = SessionState.REFUSED
        self._beat_at = None
        if live:
            self.on_fresh(False)  # grants hold as long as they live
        self._outstanding.give_up(now)

    def unreadable(self, error: WireError, now: int) -> None:
        """Take note of a message of the daemon's that cannot be read.

        If it was the next push, what it said is lost and all later ones would be passed over:
        register anew and hear everything again. Other answers are asked for again anyway.
        """
        if self.session and error.id == self._seen + 1:
            self._resume = 0
            self._say_hello(now, RETRY_FIRST)

    def _push(self, number: int, message: Struct, now: int) -> None:
        if self.session and number == self._seen + 1:
            self._seen = number
            self.on_push(message, now)

    def _need_hello(self, message_id: int, message: NeedHello, now: int) -> None:
        if self.state is SessionState.GREETING or not (
            message_id == self._beat_id or self._outstanding.knows(message_id)
        ):
            return
        self._resume = self.session if message.instance == self.instance else 0
        self._outstanding.hurry(now)
        self._say_hello(now)

    def _welcomed(self, message: Struct, now: int) -> None:
        if isinstance(message, Rejected):
            self._refused(message, now)
            return
        if not isinstance(message, Welcome):
            return
        other = (message.instance, message.clock) != (self.instance, self.clock)
        known = bool(self.instance)
        if other:
            self.ticks.forget()
            self.instance, self.clock = message.instance, message.clock
        if message.resumed:
            self.session = self._resume
            self.state = SessionState.LIVE
            self._beat(now)
            self._repeat(now)
            return
        if known and other:
            # Grants of another instance or clock are void, and so is what was still to be said
            # of them: its transfer ids could name this daemon's own transfers.
            self._outstanding.give_up(now)
        if known:
            self.on_fresh(other)
        self._seen = self._acked = 0
        self.state = SessionState.REGISTERING
        register = Register(
            incarnation=self.identity.incarnation,
            round=self.identity.round,
            descriptor=self.descriptor,
        )
        self._own_request(register, self._registered, now)

    def _registered(self, message: Struct, now: int) -> None:
        if isinstance(message, Rejected):
            self._refused(message, now)
        elif isinstance(message, Registered):
            self.rules = message
            self.session = self._resume = message.session
            self.state = SessionState.LIVE
            self.findings = []
            self._beat(now)
            self._repeat(now)
            self.on_live()

    def _refused(self, message: Rejected, now: int) -> None:
        """A refusal that may pass is tried again, slower each time; any other is final."""
        self.findings = message.findings
        if not message.retryable:
            self._end(now)
            return
        self.session = self._resume = 0
        self._say_hello(now, int(RETRY_LONGEST * 0.75 * self._spread()))

    # --- time -----------------------------------------------------------------------------

    def _beat(self, now: int) -> None:
        if self.rules is None:
            return
        # Never repeated: the next one comes soon enough, and lost ones must not pile up.
        self._beat_at = now + self.rules.heartbeat
        self._acked = self._seen
        self._beat_id, self._beat_sent = self._outstanding.new_id(), now
        self.out.append((self._beat_id, Heartbeat(session=self.session, acked=self._seen)))

    def _beaten(self, message: Struct, now: int) -> None:
        if isinstance(message, Rejected):
            self._refused(message, now)
        elif isinstance(message, HeartbeatAck):
            self.answered_at = now
            self.ticks.note(message.tick, self._beat_sent, now)
            if message.instance != self.instance:
                self._resume = 0
                self._say_hello(now)

    def tick(self, now: int) -> None:
        """Repeat what is due, beat, and acknowledge what was handled since."""
        if self.state in {SessionState.LEFT, SessionState.REFUSED}:
            return
        if self._beat_at is not None and now >= self._beat_at:
            self._beat(now)
        self._repeat(now)

    def acknowledge(self) -> None:
        """Acknowledge the pushes of one burst together."""
        if self.session and self._seen != self._acked:
            self._acked = self._seen
            self.out.append(
                (self._outstanding.new_id(), Ack(session=self.session, acked=self._seen))
            )

    def next_deadline(self) -> int | None:
        """Return when (ms) ``tick`` is due, if ever."""
        times = [self._beat_at, self._outstanding.next_deadline()]
        return min((time for time in times if time is not None), default=None)
