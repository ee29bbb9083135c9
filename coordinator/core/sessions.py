"""Sessions: who is connected, who is alive, and the numbered pushes each still has to confirm."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from msgspec import Struct

from rankgate.coordinator.core.effects import CutOff, Send
from rankgate.coordinator.core.settings import Identity, Settings
from rankgate.coordinator.core.tables import RANK_TABLE, RankState, change
from rankgate.coordinator.core.turn import Turn
from rankgate.proto.descriptor import Descriptor
from rankgate.proto.findings import world_ranks
from rankgate.proto.messages import Hello, Register

_RETRY_FIRST = 200
_RETRY_LONGEST = 2000
_RETRY_BURST = 64


class Session:
    """One registered process.

    Invariant: ``outbox`` holds the pushes numbered ``acked + 1 .. pushed``, in order; they are
    sent again from the oldest until acknowledged. A session that is gone never lives again.
    """

    __slots__ = (
        "acked",
        "descriptor",
        "dp",
        "heard",
        "id",
        "incarnation",
        "landing",
        "left",
        "outbox",
        "peer",
        "pushed",
        "retry",
        "retry_at",
        "round",
        "slot",
        "staged",
        "staged_bytes",
        "state",
        "watch_at",
        "why",
    )

    def __init__(
        self,
        session_id: int,
        peer: bytes,
        hello: Hello,
        descriptor: Descriptor,
        slot: int,
        heard: int,
    ) -> None:
        """Begin as registering: it does not count before its first heartbeat."""
        self.id = session_id
        self.peer: bytes | None = peer
        self.incarnation = hello.incarnation
        self.round = hello.round
        self.descriptor = descriptor
        self.dp = descriptor.coordinates.dp
        self.slot = slot
        self.state = RankState.REGISTERING
        self.heard = heard  # on the liveness clock
        self.why = ""
        self.left = False  # it said so itself
        self.outbox: deque[tuple[int, Struct]] = deque()
        self.pushed = 0
        self.acked = 0
        self.retry = _RETRY_FIRST
        self.retry_at = 0  # 0: no retry is scheduled
        self.watch_at = 0  # the one deadline that still looks after it
        self.staged = 0
        self.staged_bytes = 0
        self.landing = 0

    @property
    def world(self) -> str:
        """Name of its world."""
        return self.descriptor.world

    @property
    def rank(self) -> int:
        """Rank in its world."""
        return self.descriptor.rank

    @property
    def who(self) -> str:
        """Its name in findings, such as ``decode d0 rank 3``."""
        return world_ranks(self.descriptor.role, self.world, [self.rank])

    @property
    def host(self) -> str:
        """Host name it declared, for people."""
        return self.descriptor.transport.host

    def registered_by(self, message: Register) -> bool:
        """Whether just this message made the session."""
        same = (self.incarnation, self.round) == (message.incarnation, message.round)
        return same and self.descriptor == message.descriptor

    @property
    def counts(self) -> bool:
        """Whether it is a member of its round: it has heartbeat and is not gone."""
        return self.state not in {RankState.REGISTERING, RankState.GONE}


class Sessions:
    """All sessions by id and by connection, and their liveness.

    Invariant: liveness is measured on a clock that stands still while the daemon itself stalled,
    so our own stall kills nobody; a rank that is lost is reported once, through ``on_gone``.
    """

    def __init__(self, turn: Turn, identity: Identity, settings: Settings) -> None:
        """Start without sessions."""
        self._turn = turn
        self._settings = settings
        self._next = identity.start << 32
        self.by_id: dict[int, Session] = {}
        self.by_peer: dict[bytes, Session] = {}
        self.hellos: dict[bytes, Hello] = {}
        self._slow: list[Session] = []
        self._shift = 0
        self._ticked = turn.now
        self.on_live: Callable[[Session], None] = _unset
        self.on_unfit: Callable[[Session], None] = _unset
        self.on_gone: Callable[[Session], None] = _unset

    # --- coming ---------------------------------------------------------------------------

    def greet(self, peer: bytes, hello: Hello) -> bool:
        """Take a Hello; return whether it resumes its old session."""
        self.hellos[peer] = hello
        session = self.by_id.get(hello.session) if hello.session else None
        if session is None or session.incarnation != hello.incarnation:
            return False
        if session.peer is not None and session.peer != peer:
            self.by_peer.pop(session.peer, None)
            self.hellos.pop(session.peer, None)
        session.peer = peer
        self.by_peer[peer] = session
        self.heard(session)
        return True

    def resend(self, peer: bytes) -> None:
        """Repeat what a resumed session has not acknowledged, behind its Welcome."""
        self._resend(self.by_peer[peer])

    def register(self, peer: bytes, hello: Hello, descriptor: Descriptor, slot: int) -> Session:
        """Return a new session for a process whose descriptor is sound."""
        self._next += 1
        session = Session(self._next, peer, hello, descriptor, slot, self._clock())
        self.by_id[session.id] = session
        self.by_peer[peer] = session
        self._watch(session)
        return session

    def heard(self, session: Session) -> None:
        """Note a sign of life; a stalled or disconnected rank is live again."""
        session.heard = self._clock()
        if session.state in {RankState.STALLED, RankState.DISCONNECTED}:
            session.state = change(RANK_TABLE, session.state, RankState.LIVE)
            self._watch(session)
            self.on_live(session)

    def start_counting(self, session: Session) -> None:
        """First heartbeat: the rank is live."""
        session.state = change(RANK_TABLE, session.state, RankState.LIVE)

    # --- pushes ---------------------------------------------------------------------------

    def push(self, session: Session, message: Struct) -> None:
        """Send the next numbered push; it is repeated until acknowledged."""
        if session.state is RankState.GONE:
            return
        session.pushed += 1
        session.outbox.append((session.pushed, message))
        if len(session.outbox) > self._settings.max_unacked:
            self._slow.append(session)  # lost by shed: whoever pushes is in the middle of telling
            return
        if session.peer is not None:
            self._turn.effects.append(Send(session.peer, session.pushed, message))
        if not session.retry_at:
            self._schedule_retry(session)

    def acknowledge(self, session: Session, acked: int) -> None:
        """Forget the pushes up to ``acked``; a number not given out yet is ignored."""
        if not session.acked < acked <= session.pushed:
            return
        session.acked = acked
        session.retry = _RETRY_FIRST
        while session.outbox and session.outbox[0][0] <= acked:
            session.outbox.popleft()

    def shed(self) -> bool:
        """Lose those who left too many pushes unacknowledged; return whether there were any."""
        slow, self._slow = self._slow, []
        for session in slow:
            self.lose(session, f"{len(session.outbox)} pushes unacknowledged")
        return bool(slow)

    def _schedule_retry(self, session: Session) -> None:
        # A fixed spread per session keeps a thousand of them from repeating in one instant.
        session.retry_at = self._turn.now + session.retry + session.id * 37 % 50
        self._turn.deadlines.at(session.retry_at, lambda: self._retry(session))

    def _retry(self, session: Session) -> None:
        session.retry_at = 0
        if session.state is RankState.GONE or not session.outbox:
            return
        self._resend(session)
        session.retry = min(session.retry * 2, _RETRY_LONGEST)
        self._schedule_retry(session)

    def _resend(self, session: Session) -> None:
        if session.peer is not None:
            for number, message in list(session.outbox)[:_RETRY_BURST]:
                self._turn.effects.append(Send(session.peer, number, message))

    # --- going ----------------------------------------------------------------------------

    def disconnect(self, peer: bytes, reason: str) -> None:
        """Note a lost connection; the session may come back within ``resume``."""
        self.hellos.pop(peer, None)
        session = self.by_peer.pop(peer, None)
        if session is None:
            return
        session.peer = None
        session.why = reason
        if session.state is RankState.REGISTERING:
            self.lose(session, reason)
            return
        was_live = session.state is RankState.LIVE
        session.state = change(RANK_TABLE, session.state, RankState.DISCONNECTED)
        session.heard = self._clock()
        self._watch(session)
        if was_live:
            self.on_unfit(session)

    def lose(self, session: Session, reason: str, *, cut_off: bool = True) -> None:
        """End a session for good; ``on_gone`` tells its world once."""
        if session.state is RankState.GONE:
            return
        counted = session.counts
        session.state = change(RANK_TABLE, session.state, RankState.GONE)
        session.why = reason
        session.outbox.clear()
        self.by_id.pop(session.id, None)
        if session.peer is not None and self.by_peer.get(session.peer) is session:
            del self.by_peer[session.peer]
            if cut_off:
                self.hellos.pop(session.peer, None)
                self._turn.effects.append(CutOff(session.peer, reason))
        if counted:
            self.on_gone(session)

    # --- liveness -------------------------------------------------------------------------

    def tick(self) -> None:
        """Shift the liveness clock by what this tick came late."""
        period = self._settings.heartbeat
        late = self._turn.now - self._ticked - period
        if late > 0:
            self._shift += late
            clock = self._clock()
            for session in self.by_id.values():  # heard before this tick shifted the clock
                session.heard = min(session.heard, clock)
        self._ticked = self._turn.now

    def silence(self, session: Session) -> int:
        """Return for how many ms of the liveness clock nothing was heard."""
        return self._clock() - session.heard

    def _clock(self) -> int:
        return self._turn.now - self._shift

    def _watch(self, session: Session) -> None:
        left = max(1, self._limit(session) - self.silence(session))
        session.watch_at = when = self._turn.now + left
        self._turn.deadlines.at(when, lambda: self._check_and_watch(session, when))

    def _limit(self, session: Session) -> int:
        if session.state is RankState.STALLED:
            return self._settings.stall
        if session.state is RankState.DISCONNECTED:
            return self._settings.resume
        return self._settings.ttl

    def _check_and_watch(self, session: Session, when: int) -> None:
        if session.watch_at != when:
            return  # another watch took its place
        self._check(session)
        if session.state is not RankState.GONE:
            self._watch(session)

    def _check(self, session: Session) -> None:
        if session.state is RankState.GONE or self.silence(session) < self._limit(session):
            return
        if session.state is RankState.REGISTERING:
            self.lose(session, "no heartbeat ever")
        elif session.state is RankState.LIVE:
            session.state = change(RANK_TABLE, session.state, RankState.STALLED)
            session.why = f"no heartbeat for {self.silence(session)} ms"
            self.on_unfit(session)
        else:
            self.lose(session, session.why or session.state.value)


def _unset(_session: Session) -> None:
    msg = "a part of the core is not wired"
    raise AssertionError(msg)
