"""The core's one entry: ``step(event, now)`` changes the state and returns what is to be done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from rankgate.coordinator.core.effects import Effect, Send, Show
from rankgate.coordinator.core.events import (
    ClockTicked,
    Event,
    MessageArrived,
    MessageRefused,
    PeerDisconnected,
    QueryArrived,
    VerdictReached,
)
from rankgate.coordinator.core.journal import Journal
from rankgate.coordinator.core.pairs import Pairs
from rankgate.coordinator.core.rules.agreement import slot_of
from rankgate.coordinator.core.rules.descriptor import check_descriptor, check_name
from rankgate.coordinator.core.sessions import Session, Sessions
from rankgate.coordinator.core.settings import Durable, Identity, Settings
from rankgate.coordinator.core.showing import Showing
from rankgate.coordinator.core.tables import RankState
from rankgate.coordinator.core.transfers import Transfers
from rankgate.coordinator.core.turn import Turn
from rankgate.coordinator.core.worlds import Worlds
from rankgate.proto.codes import BY_ID, Code
from rankgate.proto.findings import Finding, Side, clip, finding, has_error
from rankgate.proto.messages import (
    KIND_OF,
    WIRE_MAX,
    WIRE_MIN,
    Abort,
    AbortAck,
    Ack,
    End,
    Ended,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Leave,
    Left,
    Linked,
    LinkedAck,
    NeedHello,
    Open,
    Opened,
    ProbeAck,
    Refusal,
    Register,
    Registered,
    Rejected,
    Report,
    Reported,
    Welcome,
)

_NEVER_ANSWERED = (Refusal, Rejected, NeedHello)
"""Two programs that refuse each other's refusals would do it for ever."""


class Coordinator:
    """Every decision of the daemon, without sockets, clock, log or randomness.

    Invariant: equal events at equal times give equal effects. Illegal input changes nothing and
    is answered with a typed refusal; a broken invariant raises InvariantError.
    """

    def __init__(
        self,
        identity: Identity,
        settings: Settings,
        durable: Durable,
        now: int,
        *,
        endpoints: Sequence[str] = (),
        insecure: bool = False,
    ) -> None:
        """Start at ``now``, CLOCK_BOOTTIME in ms, from what the store holds."""
        self._identity = identity
        self._settings = settings
        self._turn = turn = Turn(now, Journal(settings.max_refusals))
        self.sessions = Sessions(turn, identity, settings)
        self.worlds = Worlds(turn, self.sessions, settings, durable)
        self.pairs = Pairs(turn, identity, self.sessions, self.worlds)
        self.transfers = Transfers(turn, identity, settings, self.sessions, self.worlds, self.pairs)
        self._showing = Showing(turn, identity, self, endpoints=tuple(endpoints), insecure=insecure)
        self.sessions.on_live = lambda session: self.worlds.fitness(session, -1)
        self.sessions.on_unfit = lambda session: self.worlds.fitness(session, +1)
        self.sessions.on_gone = self.worlds.gone
        self.worlds.on_sealed = self.pairs.world_sealed
        self.worlds.on_broken = self.pairs.world_broken
        self.worlds.on_forgotten = self.pairs.world_forgotten
        self.worlds.partners = self.pairs.partners
        self.pairs.on_broken = self.transfers.pair_broken
        self._registering: dict[bytes, int] = {}
        self._events: dict[type, Callable[[Any], None]] = {
            MessageArrived: self._message,
            MessageRefused: self._refused,
            PeerDisconnected: lambda event: self._disconnected(event.peer, event.reason),
            ClockTicked: lambda _event: self.sessions.tick(),
            VerdictReached: lambda event: self.pairs.reached(
                (event.source_digest, event.destination_digest), event.judgement
            ),
            QueryArrived: lambda event: turn.effects.append(
                Show(event.peer, event.id, self._showing.answer(event.query))
            ),
        }
        self._with_session: dict[type[Struct], Callable[[Session, Any], Struct | None]] = {
            Heartbeat: self._heartbeat,
            Ack: self._ack,
            Open: self._open,
            End: self._end,
            Abort: self._abort,
            Linked: self._linked,
            Report: self._report,
            ProbeAck: self._probe_ack,
            Leave: self._leave,
        }

    def step(self, event: Event, now: int) -> list[Effect]:
        """Take one event at ``now`` (ms, never backwards) and return its effects in order."""
        turn = self._turn
        turn.now = max(now, turn.now)
        self._events[type(event)](event)
        turn.deadlines.run(turn.now)
        self.transfers.flush()
        while self.sessions.shed():
            self.transfers.flush()
        effects, turn.effects = turn.effects, []
        return effects

    def next_deadline(self) -> int | None:
        """Return when (ms) ClockTicked should be stepped next, if nothing happens before."""
        return self._turn.deadlines.next()

    def story(self, subject: str) -> list[tuple[int, str]]:
        """Return why a ``world:…`` or ``pair:…`` is as it is: times (ms) and facts."""
        return self._turn.journal.story(subject)

    # --- messages -------------------------------------------------------------------------

    def _message(self, event: MessageArrived) -> None:
        message = event.message
        answer: Struct | None
        handle = self._with_session.get(type(message))
        if handle is not None:
            answer = self._in_session(event.peer, message, handle)
        elif isinstance(message, Hello):
            answer = self._hello(event.peer, event.id, message)
        elif isinstance(message, Register):
            answer = self._register(event.peer, event.id, message)
        else:
            refused = self._unexpected(event.peer, message)
            answer = None if isinstance(message, _NEVER_ANSWERED) else refused
        if answer is not None:
            self._turn.effects.append(Send(event.peer, event.id, answer))

    def _in_session(
        self,
        peer: bytes,
        message: Any,  # noqa: ANN401 - one of the structs that name a session
        handle: Callable[[Session, Any], Struct | None],
    ) -> Struct | None:
        session = self.sessions.by_peer.get(peer)
        if session is not None and session.id == message.session:
            return handle(session, message)
        if isinstance(message, Ack):
            return None  # never answered
        return NeedHello(instance=self._identity.instance)

    def _unexpected(self, peer: bytes, message: Struct) -> Refusal:
        kind = KIND_OF[type(message)]
        text = f"kind {kind.value} ({kind.name.lower()}) is not for the daemon"
        self._refused(MessageRefused(peer, Code.KIND_UNKNOWN.id, text))
        return Refusal(code=Code.KIND_UNKNOWN.id, text=f"{Code.KIND_UNKNOWN.slug}: {text}")

    def _refused(self, event: MessageRefused) -> None:
        session = self.sessions.by_peer.get(event.peer)
        about = f"{session.world} rank {session.rank}" if session else "an unknown peer"
        code = BY_ID.get(event.code, Code.BODY_INVALID)
        found = finding(code, "message", detail=event.text)
        self._turn.refuse(about, found)
        self._turn.tell(
            "daemon", "message_refused", "warning", about=about, code=code.id, text=event.text
        )

    def _disconnected(self, peer: bytes, reason: str) -> None:
        self._registering.pop(peer, None)
        self.sessions.disconnect(peer, reason)

    # --- session --------------------------------------------------------------------------

    def _hello(self, peer: bytes, message_id: int, message: Hello) -> Struct | None:
        wire = min(message.wire_max, WIRE_MAX)
        if wire < max(message.wire_min, WIRE_MIN):
            sides = f"peer speaks {message.wire_min} to {message.wire_max}"
            text = f"{sides}, this side {WIRE_MIN} to {WIRE_MAX}"
            self._refused(MessageRefused(peer, Code.WIRE_VERSION.id, text))
            return Refusal(code=Code.WIRE_VERSION.id, text=f"{Code.WIRE_VERSION.slug}: {text}")
        if bad := list(check_name(message.world, message.rank)):
            return self._reject(f"world {message.world!r}", bad)
        resumed = self.sessions.greet(peer, message)
        welcome = Welcome(
            wire=wire,
            instance=self._identity.instance,
            start=self._identity.start,
            clock=self._identity.clock,
            tick=self._turn.now,
            resumed=resumed,
        )
        self._turn.effects.append(Send(peer, message_id, welcome))
        if resumed:
            self.sessions.resend(peer)
        return None

    def _register(self, peer: bytes, message_id: int, message: Register) -> Struct | None:
        hello = self.sessions.hellos.get(peer)
        descriptor = message.descriptor
        if hello is None:
            return NeedHello(instance=self._identity.instance)
        session = self.sessions.by_peer.get(peer)
        if session is not None and session.registered_by(message):
            return self._registered(session)  # a repeat gets the same answer
        findings = check_descriptor(descriptor)
        findings += _same_identity(hello, message)
        if has_error(findings):
            return self._reject(f"world {descriptor.world} rank {descriptor.rank}", findings)
        if session is not None:
            self.sessions.lose(session, "registered anew as another", cut_off=False)
        if (held := self.worlds.holder(descriptor.world, hello.round)) is None:
            return self._admit(peer, message)
        if peer not in self._registering:
            self._registering[peer] = message_id
            self.worlds.probe(held, lambda alive: self._probed(peer, message, alive=alive))
        return None

    def _probed(self, peer: bytes, message: Register, *, alive: bool) -> None:
        message_id = self._registering.pop(peer, None)
        hello = self.sessions.hellos.get(peer)
        if message_id is None or hello is None or _same_identity(hello, message):
            return  # gone, or by now another process on this connection
        held = self.worlds.holder(message.descriptor.world, message.round)
        if alive and held is not None:
            host = message.descriptor.transport.host
            answer: Struct = Rejected(findings=[self.worlds.in_use(held, None, host)])
        else:
            answer = self._admit(peer, message)
        self._turn.effects.append(Send(peer, message_id, answer))

    def _admit(self, peer: bytes, message: Register) -> Struct:
        hello, descriptor = self.sessions.hellos[peer], message.descriptor
        for old in [s for s in self._holders(message) if s.incarnation == message.incarnation]:
            self.sessions.lose(old, "registered anew", cut_off=False)
        session = self.sessions.register(
            peer, hello, descriptor, slot_of(descriptor.coordinates, descriptor.layout)
        )
        if others := self._holders(message):
            found = self.worlds.refuse_duplicate(session, others[0])
            self.sessions.lose(session, found.slug, cut_off=False)
            return Rejected(findings=[found])
        return self._registered(session)

    def _holders(self, message: Register) -> list[Session]:
        """Return the counted session that holds this rank of this round, if any."""
        world = self.worlds.by_name.get(message.descriptor.world)
        held = world.rounds.get(message.round) if world else None
        session = held.members.get(message.descriptor.rank) if held else None
        return [session] if session else []

    def _registered(self, session: Session) -> Registered:
        rules = self._settings
        return Registered(
            session=session.id,
            heartbeat=rules.heartbeat,
            ttl=rules.ttl,
            resume=rules.resume,
            probe=rules.probe,
            grant_ttl=rules.grant_ttl,
            tick=self._turn.now,
        )

    def _reject(self, about: str, findings: list[Finding]) -> Rejected:
        self._turn.refuse_all(
            about, findings, subject="daemon", event="registration_rejected", about=about
        )
        return Rejected(findings=findings)

    def _heartbeat(self, session: Session, message: Heartbeat) -> Struct:
        self.sessions.heard(session)
        self.sessions.acknowledge(session, message.acked)
        if session.state is RankState.REGISTERING and (found := self.worlds.admit(session)):
            self.sessions.lose(session, found.slug, cut_off=False)
            return Rejected(findings=[found])
        return HeartbeatAck(
            instance=self._identity.instance, clock=self._identity.clock, tick=self._turn.now
        )

    def _ack(self, session: Session, message: Ack) -> None:
        self.sessions.acknowledge(session, message.acked)

    def _probe_ack(self, session: Session, _message: ProbeAck) -> None:
        self.sessions.heard(session)
        self.worlds.answered(session)

    def _leave(self, session: Session, message: Leave) -> Left:
        reason = f"left: {message.reason}" if message.reason else "left"
        session.left = True
        self.sessions.lose(session, reason, cut_off=False)
        return Left()

    # --- requests -------------------------------------------------------------------------

    def _open(self, session: Session, message: Open) -> Opened:
        grant = self.transfers.open
        items = [grant(session, item) for item in message.items]
        return Opened(tick=self._turn.now, items=items)

    def _end(self, session: Session, message: End) -> Ended:
        items = [self.transfers.end(session, item) for item in message.items]
        return Ended(tick=self._turn.now, items=items)

    def _abort(self, session: Session, message: Abort) -> AbortAck:
        return AbortAck(items=[self.transfers.abort(session, item) for item in message.items])

    def _linked(self, session: Session, message: Linked) -> Struct:
        findings = self.pairs.link(session, message)
        return Rejected(findings=findings) if findings else LinkedAck()

    def _report(self, session: Session, message: Report) -> Reported:
        session.staged = message.staged
        session.staged_bytes = message.staged_bytes
        session.landing = message.landing
        for item in message.items:
            about = f"{session.world} rank {session.rank}"
            about += f" request {item.request}" if item.request else ""
            self._turn.refuse(about, clip(item.finding))
        return Reported()


def _same_identity(hello: Hello, message: Register) -> list[Finding]:
    """Return where Register names another process than Hello did on this connection."""
    descriptor = message.descriptor
    pairs = (
        ("world", hello.world, descriptor.world),
        ("rank", hello.rank, descriptor.rank),
        ("incarnation", hello.incarnation.hex(), message.incarnation.hex()),
        ("round", hello.round.hex(), message.round.hex()),
    )
    return [
        finding(Code.IDENTITY_MISMATCH, field, Side("Hello", str(a)), Side("Register", str(b)))
        for field, a, b in pairs
        if a != b
    ]
