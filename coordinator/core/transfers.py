"""Transfers: opened over ready pairs, ended by destination ranks, one outcome each, remembered.

The hot path of the daemon: an open costs two look-ups, one seal and one result; nothing here
touches the store, and no list grows with history beyond what tombstones need.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence

from rankgate.coordinator.core.pairs import Epochs, Pair, Pairs
from rankgate.coordinator.core.rounds import World
from rankgate.coordinator.core.sessions import Session, Sessions
from rankgate.coordinator.core.settings import Identity, Settings
from rankgate.coordinator.core.tables import TRANSFER_TABLE, PairState, TransferState, change
from rankgate.coordinator.core.turn import Turn
from rankgate.coordinator.core.verdicts import SideName
from rankgate.coordinator.core.worlds import Worlds
from rankgate.proto.batches import batches
from rankgate.proto.codes import Code
from rankgate.proto.findings import Finding, Side, clip, finding, ranks_text
from rankgate.proto.grants import Grant, seal_grant
from rankgate.proto.messages import (
    Aborting,
    AbortingItem,
    AbortItem,
    AbortResult,
    EndItem,
    EndResult,
    OpenItem,
    OpenResult,
    Outcome,
    OutcomeItem,
)

_CONSTANTS = frozenset({"", "none", "null", "nil", "undefined", "0", "-1", "request", "id"})
"""Request ids that are no ids: every request of a careless client would share them."""

_MOST_MISSING = 64
"""Ranks named in an outcome; operators see all of them."""

_LATELY = 1000
"""Ended transfers that operators are shown."""

_OPEN_STATES = frozenset({TransferState.GRANTED, TransferState.ABORTING})


class Transfer:
    """One request's movement over a pair.

    Invariant: ``expected`` is fixed when it is granted and never changes; ``ended`` is a subset
    of it; the state becomes an outcome once, when all have ended or time is up.
    """

    __slots__ = (
        "destination_world",
        "ended",
        "epochs",
        "expected",
        "failures",
        "finding",
        "grant",
        "id",
        "item",
        "opened",
        "pair",
        "sources",
        "state",
        "until",
    )

    def __init__(
        self, transfer_id: int, item: OpenItem, pair: Pair, destination: World, now: int
    ) -> None:
        """Begin granted."""
        self.id = transfer_id
        self.item = item
        self.pair = pair
        self.epochs: Epochs = pair.epochs
        self.destination_world = destination
        self.state = TransferState.GRANTED
        self.opened = now
        self.until = 0
        self.grant = b""
        self.expected: Mapping[int, Session] = pair.receivers[item.destination_dp]
        self.sources: Sequence[Session] = pair.senders[item.source_dp]
        self.ended: set[int] = set()
        self.failures: dict[int, Finding] = {}
        self.finding: Finding | None = None

    @property
    def missing(self) -> list[int]:
        """Destination ranks that have not ended."""
        return sorted(self.expected.keys() - self.ended)

    def outcome(self) -> OutcomeItem:
        """Return the outcome as everyone is told it."""
        return OutcomeItem(
            transfer=self.id,
            request=self.item.request,
            attempt=self.item.attempt,
            source_epoch=self.epochs[0],
            destination_epoch=self.epochs[1],
            outcome=self.state.value,
            finding=self.finding,
            missing=self.missing[:_MOST_MISSING],
        )


class Transfers:
    """All transfers and tombstones.

    Invariant: at most one transfer a (pair epochs, request, attempt); an ended one answers with
    its outcome until ``issued + ttl + tombstone`` and is never evicted by count.
    """

    def __init__(
        self,
        turn: Turn,
        identity: Identity,
        settings: Settings,
        sessions: Sessions,
        worlds: Worlds,
        pairs: Pairs,
    ) -> None:
        """Start without transfers; ids grow over daemon starts."""
        self._turn = turn
        self._identity = identity
        self._settings = settings
        self._sessions = sessions
        self._worlds = worlds
        self._pairs = pairs
        self._next = identity.start << 32
        self.by_id: dict[int, Transfer] = {}
        self._by_key: dict[tuple[int, int, str, int], Transfer] = {}
        self._open: dict[Epochs, dict[int, Transfer]] = {}
        """Transfers without an outcome, so that a break costs only those."""
        self.lately: deque[Transfer] = deque(maxlen=_LATELY)
        self.totals: Counter[str] = Counter()
        self._named: list[Transfer] = []

    def running(self) -> list[Transfer]:
        """Return the transfers without an outcome, oldest first."""
        return [one for still in self._open.values() for one in still.values()]

    # --- opening --------------------------------------------------------------------------

    def open(self, session: Session, item: OpenItem) -> OpenResult:
        """Grant or deny one request, at once; a repeat renews the grant of the same transfer."""
        key = (item.source_epoch, item.destination_epoch, item.request, item.attempt)
        transfer = self._by_key.get(key)
        if transfer is None:
            return self._grant_new(session, item, key)
        if denied := self._conflict(session, transfer, item):
            return self._deny(session, denied)
        if transfer.state not in _OPEN_STATES:
            return OpenResult(ended=transfer.outcome())
        current = transfer.pair.state is PairState.READY and transfer.pair.epochs == transfer.epochs
        if transfer.state is TransferState.ABORTING or not current:
            return OpenResult(grant=transfer.grant)  # still known, never renewed
        self._issue(transfer, item.ttl)
        return OpenResult(grant=transfer.grant)

    def _grant_new(
        self, session: Session, item: OpenItem, key: tuple[int, int, str, int]
    ) -> OpenResult:
        pair = self._pairs.by_epochs.get((item.source_epoch, item.destination_epoch))
        if pair is None or pair.plan is None:
            return self._deny(session, self._no_pair(pair, item, session))
        source = self._worlds.by_name[pair.source]
        destination = self._worlds.by_name[pair.destination]
        if pair.state is not PairState.READY or source.unfit or destination.unfit:
            return self._deny(session, self._pairs.not_ready(pair))
        if denied := self._malformed(session, item, pair, source, destination):
            return self._deny(session, denied)
        if len(self.by_id) >= self._settings.max_transfers:
            side = Side("the daemon", f"{len(self.by_id)} transfers and tombstones")
            return self._deny(session, finding(Code.BUSY, "transfers", side))
        self._next += 1
        transfer = Transfer(self._next, item, pair, destination, self._turn.now)
        self.by_id[transfer.id] = transfer
        self._by_key[key] = transfer
        self._open.setdefault(transfer.epochs, {})[transfer.id] = transfer
        self.totals["granted"] += 1
        pair.transfers["granted"] += 1
        self._issue(transfer, item.ttl)
        self._turn.deadlines.at(transfer.until, lambda: self._wake(transfer))
        return OpenResult(grant=transfer.grant)

    def _issue(self, transfer: Transfer, ttl: int) -> None:
        ttl = min(ttl or self._settings.grant_ttl, self._settings.max_grant_ttl)
        now, item = self._turn.now, transfer.item
        transfer.until = max(transfer.until, now + ttl)
        grant = Grant(
            transfer=transfer.id,
            instance=self._identity.instance,
            clock=self._identity.clock,
            issued=now,
            ttl=transfer.until - now,
            source_epoch=item.source_epoch,
            destination_epoch=item.destination_epoch,
            source_dp=item.source_dp,
            destination_dp=item.destination_dp,
            request=item.request,
            attempt=item.attempt,
            payload=item.payload,
            table_digest=item.table_digest,
        )
        transfer.grant = seal_grant(grant, transfer.pair.key)

    def _malformed(
        self, session: Session, item: OpenItem, pair: Pair, source: World, destination: World
    ) -> Finding | None:
        if item.request.strip().lower() in _CONSTANTS:
            return finding(Code.REQUEST_INVALID, "request", Side(session.who, repr(item.request)))
        if not self._in_scope(session, item, pair):
            return self._outside(
                session, f"request {item.request}", destination, item.destination_dp
            )
        for field, dp, world in (
            ("source_dp", item.source_dp, source),
            ("destination_dp", item.destination_dp, destination),
        ):
            size = world.shape.layout.dp if world.shape else 1
            if dp >= size:
                side = Side(session.who, str(dp))
                detail = f"({world.name} has dp size {size})"
                return finding(Code.DP_RANK_UNKNOWN, field, side, detail=detail)
        if item.payload != "cache":
            side = Side(session.who, repr(item.payload))
            return finding(Code.VALUE_INVALID, "payload", side, detail="(known: cache)")
        if pair.plan is not None and item.table_digest != pair.plan.digest:
            sides = (
                Side(session.who, item.table_digest.hex()),
                Side("the daemon", pair.plan.digest.hex()),
            )
            return finding(Code.METADATA_MISMATCH, "table_digest", *sides)
        return self._claims(session, item, pair)

    def _claims(self, session: Session, item: OpenItem, pair: Pair) -> Finding | None:
        for claim in item.claims:
            if found := self._pairs.check_claim(pair, session, claim):
                if found.slug == "receive_count_mismatch":
                    self._pairs.refuse(pair, [found])
                return found
        return None

    def _conflict(self, session: Session, transfer: Transfer, item: OpenItem) -> Finding | None:
        if transfer.expected.get(session.rank) is not session:
            subject = f"request {item.request}"
            dp = transfer.item.destination_dp
            return self._outside(session, subject, transfer.destination_world, dp)
        first = transfer.item
        for field in ("source_dp", "destination_dp", "payload", "table_digest"):
            ours, theirs = getattr(first, field), getattr(item, field)
            if ours != theirs:
                sides = (Side(session.who, str(theirs)), Side("first open", str(ours)))
                return finding(Code.CONFLICTING_OPEN, field, *sides, detail=f"({item.request})")
        return None

    def _no_pair(self, pair: Pair | None, item: OpenItem, session: Session) -> Finding:
        if pair is not None:
            return self._pairs.not_ready(pair)
        return self._pairs.stale((item.source_epoch, item.destination_epoch), session)

    def _deny(self, session: Session, found: Finding) -> OpenResult:
        self.totals["denied"] += 1
        self._turn.refuse(f"open by {session.world}", found)
        return OpenResult(finding=found)

    # --- ending ---------------------------------------------------------------------------

    def end(self, session: Session, item: EndItem) -> EndResult:
        """Take one destination rank's end; only its first counts, and never after the outcome."""
        transfer = self.by_id.get(item.transfer)
        if transfer is None:
            return EndResult(transfer=item.transfer, finding=self._unknown(session, item.transfer))
        if transfer.expected.get(session.rank) is not session:
            outside = self._outside(
                session,
                f"transfer {item.transfer}",
                transfer.destination_world,
                transfer.item.destination_dp,
            )
            self._turn.refuse(f"transfer {item.transfer}", outside)
            return EndResult(transfer=item.transfer, finding=outside)
        if item.outcome not in {"delivered", "failed"}:
            side = Side(session.who, repr(item.outcome))
            wrong = finding(Code.VALUE_INVALID, "outcome", side, detail="(delivered or failed)")
            return EndResult(transfer=item.transfer, finding=wrong)
        if transfer.state not in _OPEN_STATES:
            return EndResult(transfer=item.transfer, late=transfer.state.value)
        if session.rank not in transfer.ended:
            transfer.ended.add(session.rank)
            if item.outcome == "failed":
                found = clip(item.finding) if item.finding else None
                transfer.failures[session.rank] = found or finding(
                    Code.TRANSPORT_FAILED,
                    f"transfer {item.transfer}",
                    Side(session.who, "failed"),
                )
            if len(transfer.ended) == len(transfer.expected):
                self._name_outcome(transfer)
        return EndResult(transfer=item.transfer)

    def _name_outcome(self, transfer: Transfer) -> None:
        if not transfer.failures:
            self._finish(transfer, TransferState.DELIVERED, None)
            return
        first = min(transfer.failures)
        state = TransferState.FAILED
        if transfer.state is TransferState.ABORTING:
            state = TransferState.ABORTED
        self._finish(transfer, state, transfer.finding or transfer.failures[first])

    def _finish(self, transfer: Transfer, to: TransferState, found: Finding | None) -> None:
        transfer.state = change(TRANSFER_TABLE, transfer.state, to)
        transfer.finding = found
        still = self._open[transfer.epochs]
        del still[transfer.id]
        self.lately.append(transfer)
        if not still:
            del self._open[transfer.epochs]
        self.totals[to.value] += 1
        transfer.pair.transfers[to.value] += 1
        self._named.append(transfer)
        if found is not None:
            self._turn.tell(
                f"pair:{transfer.pair.name}",
                "transfer_ended",
                "warning",
                transfer=transfer.id,
                request=transfer.item.request,
                outcome=to.value,
                code=found.code,
                message=found.message,
            )

    def flush(self) -> None:
        """Tell the outcomes named in this step, one message a rank."""
        if not self._named:
            return
        named, self._named = self._named, []
        scopes: defaultdict[tuple[int, int, int, int], list[Transfer]] = defaultdict(list)
        for transfer in named:
            item = transfer.item
            scopes[(*transfer.epochs, item.source_dp, item.destination_dp)].append(transfer)
        for transfers in scopes.values():
            listeners = self._scope(transfers[0])
            for batch in batches(transfers):
                message = Outcome(items=[transfer.outcome() for transfer in batch])
                for session in listeners:
                    self._sessions.push(session, message)

    def _scope(self, transfer: Transfer) -> list[Session]:
        """Return the ranks of both sides that the transfer concerns; a lost one hears nothing.

        As they were when it was granted: survivors of a broken world still hold its memory.
        """
        return [*transfer.sources, *transfer.expected.values()]

    # --- aborting and time ----------------------------------------------------------------

    def abort(self, session: Session, item: AbortItem) -> AbortResult:
        """Begin to abort a transfer; its destination ranks drain and end it."""
        transfer = self.by_id.get(item.transfer)
        if transfer is None:
            return AbortResult(
                transfer=item.transfer, finding=self._unknown(session, item.transfer)
            )
        if session not in self._scope(transfer):
            outside = self._outside(
                session,
                f"transfer {item.transfer}",
                transfer.destination_world,
                transfer.item.destination_dp,
            )
            return AbortResult(transfer=item.transfer, finding=outside)
        if transfer.state is TransferState.GRANTED:
            transfer.state = change(TRANSFER_TABLE, transfer.state, TransferState.ABORTING)
            transfer.finding = finding(
                Code.ABORTED,
                f"transfer {item.transfer}",
                Side(session.who, item.reason or "no reason given"),
            )
            message = Aborting(items=[AbortingItem(transfer=transfer.id, finding=transfer.finding)])
            for listener in self._scope(transfer):
                self._sessions.push(listener, message)
        return AbortResult(transfer=item.transfer, state=transfer.state.value)

    def _wake(self, transfer: Transfer) -> None:
        """At ``until`` the transfer expires; at ``until + tombstone`` it is forgotten."""
        now = self._turn.now
        if now < transfer.until:
            self._turn.deadlines.at(transfer.until, lambda: self._wake(transfer))
            return
        if transfer.state in _OPEN_STATES:
            aborting = transfer.state is TransferState.ABORTING
            found = transfer.finding or finding(
                Code.EXPIRED,
                f"transfer {transfer.id}",
                Side("ended", f"{len(transfer.ended)} of {len(transfer.expected)}"),
                Side("missing", f"{transfer.pair.destination} {ranks_text(transfer.missing)}"),
                detail=f"(request {transfer.item.request})",
            )
            to = TransferState.ABORTED if aborting else TransferState.EXPIRED
            self._finish(transfer, to, found)
        forget_at = transfer.until + self._settings.tombstone
        if now < forget_at:
            self._turn.deadlines.at(forget_at, lambda: self._wake(transfer))
            return
        item = transfer.item
        del self.by_id[transfer.id]
        del self._by_key[item.source_epoch, item.destination_epoch, item.request, item.attempt]

    def pair_broken(self, pair: Pair, epochs: Epochs, lost: SideName | None) -> None:
        """End what a lost destination can never end; loss of a source its destinations decide.

        With neither side lost the pair was refused: what it had granted fails.
        """
        if lost == "source":
            return
        for transfer in list(self._open.get(epochs, {}).values()):
            gone = [rank for rank, session in transfer.expected.items() if not session.counts]
            sides = [Side(pair.destination, f"{ranks_text(gone)} gone")] if gone else []
            found = finding(Code.DESTINATION_LOST, f"pair {pair.name}", *sides)
            if lost is None:
                found = pair.findings[-1]  # what the pair was refused for
            self._finish(transfer, TransferState.FAILED, transfer.finding or found)

    # --- words ----------------------------------------------------------------------------

    def _in_scope(self, session: Session, item: OpenItem, pair: Pair) -> bool:
        return pair.receivers.get(item.destination_dp, {}).get(session.rank) is session

    def _outside(self, session: Session, subject: str, destination: World, dp: int) -> Finding:
        ranks = [s.rank for s in destination.members() if s.dp == dp]
        scope = (
            f"{destination.name} {ranks_text(ranks)}" if ranks else f"{destination.name}: nobody"
        )
        return finding(
            Code.NOT_IN_SCOPE, subject, Side(session.who, "outside"), Side("in scope", scope)
        )

    def _unknown(self, session: Session, transfer: int) -> Finding:
        found = finding(Code.TRANSFER_UNKNOWN, "transfer", Side(session.who, str(transfer)))
        self._turn.refuse(f"transfers of {session.world}", found)
        return found
