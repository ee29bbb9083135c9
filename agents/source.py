"""A rank as source: destinations that dial it, present grants, and end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from rankgate.agents.ledger import Ledger, Sending
from rankgate.agents.linking import Epochs, PairLinks, check_hello, check_metadata
from rankgate.proto.codes import Code
from rankgate.proto.findings import Finding, Side, finding
from rankgate.proto.grants import Grant
from rankgate.proto.messages import (
    WIRE_MAX,
    WIRE_MIN,
    Credit,
    Drain,
    Drained,
    PeerEnd,
    PeerEnded,
    PeerHello,
    PeerWelcome,
    Present,
    Presented,
    Refusal,
    Rejected,
    SourceFailed,
)

if TYPE_CHECKING:
    from rankgate.agents.rank import RankCore

LinkKey = tuple[Epochs, int]

_MAX_HELD = 4096
_MAX_HELD_BYTES = 32 << 20
"""Hellos of newer epochs that wait for our verdict, by number and by metadata."""
_UNREGISTERED_PROBE_MS = 1000
"""How long a hello is held before the daemon has said its rules."""


class Window:
    """How many chunks may be under way on one inbound link.

    Invariant: ``sent - taken <= credit``; all three count from the link's beginning.
    """

    __slots__ = ("credit", "sent", "taken")

    def __init__(self) -> None:
        """Begin without credit: a presentation brings it."""
        self.credit = 0
        self.sent = 0
        self.taken = 0

    @property
    def open(self) -> bool:
        """Whether one more chunk may go."""
        return self.sent - self.taken < self.credit


class SourceSide:
    """All inbound links of a rank, and its ledger.

    Invariant: ``routes`` and ``links`` are each other's inverse; only a link whose PeerHello was
    checked against the current verdict is in them.
    """

    def __init__(self, core: RankCore) -> None:
        """Start without links."""
        self._core = core
        self.ledger = Ledger(core.descriptor.transport.max_op)
        self.out: list[tuple[bytes, int, Struct]] = []
        """(route, message id, message) to be sent to destinations."""
        self.routes: dict[bytes, LinkKey] = {}
        self.links: dict[LinkKey, bytes] = {}
        self.windows: dict[LinkKey, Window] = {}
        self._held: dict[tuple[bytes, int], tuple[int, PeerHello]] = {}
        """(route, message id) -> (until when, hello): a repeat is held once."""

    def receive(self, route: bytes, message_id: int, message: Struct, now: int) -> None:
        """Take one message of a destination."""
        if isinstance(message, PeerHello):
            self._hello(route, message_id, message, now, hold=True)
            return
        key = self.routes.get(route)
        pair = self._core.pairs.get(key[0]) if key else None
        if key is None or pair is None:
            if not isinstance(message, Credit):
                side = Side("the sender", "no link")
                self._reject(route, message_id, finding(Code.NO_SESSION, "link", side))
            return
        match message:
            case Present():
                self._present(route, message_id, message, pair, key, now)
            case PeerEnd():
                transfer, found = self.ledger.peer_end(
                    pair, key[1], message.grant, now, message.outcome
                )
                self.out.append((route, message_id, PeerEnded(transfer=transfer, finding=found)))
                self._refused(transfer, found)
            case Drain():
                self._drain(route, message_id, message, pair, key[1], now)
            case Credit():
                window = self.windows[key]
                window.taken = max(window.taken, min(message.chunks, window.sent))
            case _:
                kind = type(message).__name__
                text = f"{Code.KIND_UNKNOWN.slug}: {kind} is not for a source"
                refusal = Refusal(code=Code.KIND_UNKNOWN.id, text=text)
                self.out.append((route, message_id, refusal))

    # --- linking --------------------------------------------------------------------------

    def pair_accepted(self, pair: PairLinks, now: int) -> None:
        """Answer the hellos that came before this pair's verdict."""
        for key, (_, hello) in list(self._held.items()):
            if (hello.source_epoch, hello.epoch) == pair.epochs:
                del self._held[key]
                self._hello(*key, hello, now, hold=False)

    def _hello(
        self, route: bytes, message_id: int, hello: PeerHello, now: int, *, hold: bool
    ) -> None:
        if not hello.wire_min <= WIRE_MAX or hello.wire_max < WIRE_MIN:
            text = f"{Code.WIRE_VERSION.slug}: this side speaks {WIRE_MIN} to {WIRE_MAX}"
            self.out.append((route, message_id, Refusal(code=Code.WIRE_VERSION.id, text=text)))
            return
        epochs = (hello.source_epoch, hello.epoch)
        pair = self._core.pairs.get(epochs)
        if pair is None or not pair.sending or not pair.verdict.accepted:
            known = max((pair.epochs for pair in self._core.pairs.values()), default=(0, 0))
            if hold and max(epochs) > max(known) and self._may_hold(hello):
                rules = self._core.session.rules
                probe = rules.probe if rules else _UNREGISTERED_PROBE_MS
                self._held.setdefault((route, message_id), (now + probe, hello))
                return
            sides = (
                Side(f"{hello.world} rank {hello.rank}", f"{epochs[0]}:{epochs[1]}"),
                Side(f"{self._core.identity.world} rank {self._core.identity.rank}", str(known)),
            )
            self._reject(route, message_id, finding(Code.STALE_EPOCH, "epochs", *sides))
            return
        if wrong := self._check(pair, hello):
            self._reject(route, message_id, wrong)
            return
        self._connect(route, (epochs, hello.rank))
        pair.links[hello.rank].up = True
        welcome = PeerWelcome(wire=WIRE_MAX, metadata=self._core.registered.blob)
        self.out.append((route, message_id, welcome))
        self._core.maybe_linked(pair, now)

    def _may_hold(self, hello: PeerHello) -> bool:
        held = sum(len(other.metadata) for _, other in self._held.values())
        return len(self._held) < _MAX_HELD and held + len(hello.metadata) <= _MAX_HELD_BYTES

    def _check(self, pair: PairLinks, hello: PeerHello) -> Finding | None:
        me = (self._core.identity.rank, self._core.identity.incarnation)
        if wrong := check_hello(pair, hello, me):
            return wrong
        link = pair.links[hello.rank]
        return check_metadata(hello.metadata, link, f"{hello.world} rank {hello.rank}")

    def _connect(self, route: bytes, key: LinkKey) -> None:
        if self.links.get(key) == route:
            return  # a repeat of the same hello
        self.routes.pop(self.links.get(key, b""), None)
        self.links[key] = route
        self.routes[route] = key
        self.windows[key] = Window()

    def _reject(self, route: bytes, message_id: int, found: Finding) -> None:
        self.out.append((route, message_id, Rejected(findings=[found])))
        self._core.refused(0, "", found)

    def drop(self, pair: PairLinks) -> None:
        """Forget the inbound links of a pair, and what was shown over them."""
        self.ledger.pair_broken(pair.epochs)
        for key in [key for key in self.links if key[0] == pair.epochs]:
            self.routes.pop(self.links.pop(key), None)
            del self.windows[key]

    # --- transfers ------------------------------------------------------------------------

    def _present(
        self,
        route: bytes,
        message_id: int,
        message: Present,
        pair: PairLinks,
        key: LinkKey,
        now: int,
    ) -> None:
        upper = self._core.session.ticks.upper(now)
        status, transfer, found = self.ledger.present(
            pair, key[1], message.grant, message.counts, upper, now
        )
        self.windows[key].credit = message.credit
        answer = Presented(transfer=transfer, status=status, finding=found)
        self.out.append((route, message_id, answer))
        self._refused(transfer, found)

    def _drain(
        self,
        route: bytes,
        message_id: int,
        message: Drain,
        pair: PairLinks,
        rank: int,
        now: int,
    ) -> None:
        grant = self.ledger.check(pair, rank, message.grant, data=True)
        if not isinstance(grant, Grant):
            self._reject(route, message_id, grant)
            return
        # The answer follows the chunks already handed to this link, so nothing comes after it.
        self.ledger.drain(grant.transfer, rank, now)
        self.out.append((route, message_id, Drained(transfer=grant.transfer)))

    def sendable(self, sending: Sending, now: int) -> bool:
        """Whether one more operation of a share may start."""
        return now < sending.stop and self.ledger.may_start(sending)

    def failed(self, sending: Sending, found: Finding) -> None:
        """The transport could not send a share: say so to its destination (case B11)."""
        self.ledger.failures.append((sending.epochs, sending.rank, sending.transfer, found))

    def _refused(self, transfer: int, found: Finding | None) -> None:
        if found is not None:
            self._core.refused(transfer, "", found)

    # --- time -----------------------------------------------------------------------------

    def tick(self, now: int) -> None:
        """Answer hellos that waited in vain; end what is too old; tell failures."""
        for key, (until, hello) in list(self._held.items()):
            if now >= until:
                del self._held[key]
                self._hello(*key, hello, now, hold=False)
        self.ledger.tick(now)
        self.flush_failures()

    def flush_failures(self) -> None:
        """Tell destinations what cannot be sent."""
        failures, self.ledger.failures = self.ledger.failures, []
        for epochs, rank, transfer, found in failures:
            self._core.refused(transfer, "", found)
            route = self.links.get((epochs, rank))
            if route is not None:
                self.out.append((route, 0, SourceFailed(transfer=transfer, finding=found)))

    def next_deadline(self) -> int | None:
        """Return when (ms) something is due."""
        times = [until for until, _ in self._held.values()]
        due = self.ledger.next_deadline()
        return min([*times, *([due] if due is not None else [])], default=None)
