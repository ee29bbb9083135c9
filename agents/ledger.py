"""The source's ledger: what is staged, who still has to end, and when memory may be released.

Staged memory has two holders: the *contacts* (receive_count distinct ends, an outcome, expiry) and
the *transport* (operations started and not seen complete). Every outcome empties only the first;
memory is released when both are empty, exactly once (cases B01, B02, B09, B15).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import TypeVar

from rankgate.agents.events import AgentEvent, Released, Wanted
from rankgate.agents.linking import Epochs, PairLinks, PeerLink
from rankgate.proto.codes import Code
from rankgate.proto.findings import Finding, Side, finding
from rankgate.proto.grants import Grant, GrantError, open_grant

MAX_STAGED = 4096
MAX_PARKED = 1024
MAX_EARLY = 4096
Key = TypeVar("Key")
Value = TypeVar("Value")

DELIVERED = "delivered"
ACCEPTED, PARKED, ENDED, REFUSED = "accepted", "parked", "ended", "refused"
"""What a presentation is answered with."""
_LOOK_MS = 50
"""How often, at most, all deadlines are looked at: requests end that much later at worst."""


class StagedState(StrEnum):
    """A staged request: waiting, being sent, closed for new operations, given back."""

    STAGED = "staged"
    SENDING = "sending"
    CLOSED = "closed"
    RELEASED = "released"


STAGED_TABLE: Mapping[StagedState, frozenset[StagedState]] = {
    StagedState.STAGED: frozenset({StagedState.SENDING, StagedState.CLOSED}),
    StagedState.SENDING: frozenset({StagedState.CLOSED}),
    StagedState.CLOSED: frozenset({StagedState.RELEASED}),
    StagedState.RELEASED: frozenset(),
}


class Staged:
    """One request's pages on this source rank.

    Invariant: ``receive_count`` is set with the transfer and never changes; ``ended`` holds
    distinct destination ranks, all of them contacts; ``operations`` is never negative.
    """

    __slots__ = (
        "ended",
        "epochs",
        "failed",
        "nbytes",
        "operations",
        "pages",
        "reason",
        "receive_count",
        "request",
        "sending",
        "state",
        "transfer",
        "until",
    )

    def __init__(
        self, request: str, pages: Mapping[str, tuple[int, ...]], nbytes: int, until: int
    ) -> None:
        """Begin without a transfer."""
        self.request = request
        self.pages = pages
        self.nbytes = nbytes
        self.until = until
        self.state = StagedState.STAGED
        self.transfer = 0
        self.epochs: Epochs | None = None
        """Of the pair whose grant bound it to its transfer."""
        self.receive_count = 0
        self.ended: set[int] = set()
        self.failed = False
        self.sending: dict[int, Sending] = {}
        self.operations = 0
        self.reason = ""

    def become(self, to: StagedState) -> None:
        """Change state as the table allows."""
        if to not in STAGED_TABLE[self.state]:
            msg = f"staged request {self.request} may not go from {self.state} to {to}"
            raise RuntimeError(msg)
        self.state = to


class EarlyEnds:
    """Ends of a transfer whose request is not staged yet: a notice contact sees no grant before."""

    __slots__ = ("at", "grant", "outcomes", "pair")

    def __init__(self, pair: PairLinks, grant: Grant, now: int) -> None:
        """Begin without an end."""
        self.pair = pair
        self.grant = grant
        self.outcomes: dict[int, str] = {}
        self.at = now


class Presentation:
    """A grant that a destination rank has shown, checked and in scope."""

    __slots__ = ("counts", "epochs", "grant", "link", "pair", "rank", "until")

    def __init__(
        self, pair: PairLinks, link: PeerLink, grant: Grant, counts: Mapping[str, int], until: int
    ) -> None:
        """Remember who presented what; ``until`` (ms, local) is when the grant ends."""
        self.pair = pair
        self.link = link
        self.rank = link.peer.rank
        self.epochs: Epochs = pair.epochs
        self.grant = grant
        self.counts = counts
        self.until = until


class Sending:
    """One contact's share of a transfer, to be sent; a renewed grant moves ``stop``.

    No operation may start after ``stop`` (ms, local): it could still write after the grant ended.
    """

    __slots__ = ("epochs", "link", "rank", "request", "staged", "stop", "transfer")

    def __init__(self, shown: Presentation, staged: Staged, max_op: int) -> None:
        """Begin unsent."""
        self.epochs = shown.epochs
        self.rank = shown.rank
        self.link = shown.link
        self.transfer = shown.grant.transfer
        self.request = staged.request
        self.staged = staged
        self.stop = shown.until - max_op


class Ledger:
    """All staged requests of a source rank.

    Invariant: a request is Released once, never before ``receive_count`` distinct ranks have
    ended or an outcome is known, and never while an operation of it is under way.
    """

    def __init__(self, max_op: int, *, max_staged: int = MAX_STAGED) -> None:
        """Start empty; ``max_op`` (ms) is the transport's longest operation."""
        self._max_op = max_op
        self._max_staged = max_staged
        self.origin: tuple[bytes, bytes] | None = None
        """Instance and clock id of the daemon whose grants hold, once it is known."""
        self.staged: dict[str, Staged] = {}
        self._by_transfer: dict[int, Staged] = {}
        self._parked: dict[tuple[int, int], Presentation] = {}
        self._early: dict[int, EarlyEnds] = {}
        self._done: dict[int, tuple[int, str]] = {}
        self._delivered: dict[str, tuple[int, int, int]] = {}
        """Delivered before it was staged: request -> (transfer, receive_count, when), as a notice
        contact may be late."""
        self._drained: dict[tuple[int, int], int] = {}
        """(transfer, rank) that was told nothing more comes -> when."""
        self._aborting: dict[int, tuple[int, Finding]] = {}
        """Transfers of which nothing more may start -> (when, why)."""
        self._now = 0
        self._due: int | None = None
        """No deadline is earlier than this."""
        self.staged_bytes = 0
        """Bytes of all staged requests on this rank."""
        self.events: list[AgentEvent] = []
        self.sendings: list[Sending] = []
        self.failures: list[tuple[Epochs, int, int, Finding]] = []
        """(epochs, rank, transfer, why) to tell as SourceFailed."""

    # --- the engine -----------------------------------------------------------------------

    def stage(
        self, request: str, pages: Mapping[str, Sequence[int]], nbytes: int, until: int, now: int
    ) -> Finding | None:
        """Hold a request's pages until released; an equal repeat is the same (case B03).

        Returns:
            Why not: staging_full (case B18) or conflicting_stage.
        """
        held = {name: tuple(listed) for name, listed in pages.items()}
        known = self.staged.get(request)
        if known is not None:
            if known.pages == held:
                return None
            sides = (Side("staged", str(known.pages)[:200]), Side("now", str(held)[:200]))
            return finding(Code.CONFLICTING_STAGE, f"request {request}", *sides)
        if len(self.staged) >= self._max_staged:
            side = Side("this rank", f"{len(self.staged)} requests, {self.staged_bytes} bytes")
            return finding(Code.STAGING_FULL, f"request {request}", side)
        self._now = max(self._now, now)
        staged = self.staged[request] = Staged(request, held, nbytes, until)
        self.staged_bytes += nbytes
        self._note_due(until)
        if request in self._delivered:
            staged.transfer, staged.receive_count, _ = self._delivered.pop(request)
            self._close(staged, DELIVERED)
            return None
        for key, shown in list(self._parked.items()):
            if shown.grant.request == request:
                del self._parked[key]
                if wrong := self._accept(shown, staged):
                    self.failures.append((shown.epochs, shown.rank, shown.grant.transfer, wrong))
        for transfer, early in list(self._early.items()):
            if early.grant.request != request:
                continue
            del self._early[transfer]
            if self._attach(early.grant, early.pair, staged) is None:
                for rank, outcome in early.outcomes.items():
                    self._end(staged, rank, outcome)
        return None

    # --- destinations ---------------------------------------------------------------------

    def check(self, pair: PairLinks, rank: int, sealed: bytes, *, data: bool) -> Grant | Finding:
        """Return a grant that this contact may show, or the finding that refuses it."""
        link = pair.links.get(rank)
        who = f"{pair.other} rank {rank}"
        try:
            grant = open_grant(sealed, pair.verdict.grant_key)
        except GrantError as error:
            return finding(Code.GRANT_INVALID, "grant", Side(who, str(error)))
        if self.origin is not None and (grant.instance, grant.clock) != self.origin:
            sides = (
                Side(who, f"a grant of daemon {grant.instance.hex()[:8]}"),
                Side("this rank", f"daemon {self.origin[0].hex()[:8]}, or its host has restarted"),
            )
            return finding(Code.GRANT_INVALID, "grant.instance", *sides)
        if (grant.source_epoch, grant.destination_epoch) != pair.epochs:
            shown = f"{grant.source_epoch}:{grant.destination_epoch}"
            current = f"{pair.epochs[0]}:{pair.epochs[1]}"
            sides = (Side(who, shown), Side("this rank", current))
            return finding(Code.STALE_EPOCH, "grant.epochs", *sides)
        inside = link is not None and link.peer.dp == grant.destination_dp
        if not inside or grant.source_dp != pair.verdict.dp or (data and not link.is_data):  # type: ignore[union-attr]
            detail = f"(transfer {grant.transfer} of request {grant.request})"
            return finding(
                Code.NOT_IN_SCOPE, "rank", Side(who, "no contact of this transfer"), detail=detail
            )
        return grant

    def present(
        self,
        pair: PairLinks,
        rank: int,
        sealed: bytes,
        counts: Mapping[str, int],
        upper: int,
        now: int,
    ) -> tuple[str, int, Finding | None]:
        """Judge a presentation before any byte moves.

        Args:
            pair: the pair it came over.
            rank: the presenting destination rank.
            sealed: the grant's bytes.
            counts: pages by group that the destination has ready.
            upper: the latest the daemon's tick can be (ms).
            now: local time (ms).

        Returns:
            (``accepted`` | ``parked`` | ``ended`` | ``refused``, transfer or 0, why refused).
        """
        grant = self.check(pair, rank, sealed, data=True)
        if isinstance(grant, Finding):
            return REFUSED, 0, grant
        who = f"{pair.other} rank {rank}"
        left = grant.issued + grant.ttl - upper
        if left <= 0:
            side = Side(who, f"a grant that ended {-left} ms ago or earlier")
            return REFUSED, grant.transfer, finding(Code.GRANT_EXPIRED, "grant", side)
        if self._done.get(grant.transfer, (0, ""))[1] == DELIVERED:
            return ENDED, grant.transfer, None  # a late repeat; everyone has ended
        if (grant.transfer, rank) in self._drained:
            return ENDED, grant.transfer, None  # a late repeat; it wants nothing any more
        if grant.transfer in self._aborting:
            return REFUSED, grant.transfer, self._aborting[grant.transfer][1]
        if grant.transfer in self._done:
            side = Side(f"transfer {grant.transfer}", f"already {self._done[grant.transfer][1]}")
            return REFUSED, grant.transfer, finding(Code.TRANSFER_UNKNOWN, "transfer", side)
        shown = Presentation(pair, pair.links[rank], grant, counts, now + left)
        staged = self.staged.get(grant.request)
        if staged is None or 0 < staged.transfer < grant.transfer:
            return self._park(shown)  # a later attempt waits for the end of the one before
        refused = self._accept(shown, staged)
        return REFUSED if refused else ACCEPTED, grant.transfer, refused

    def _park(self, shown: Presentation) -> tuple[str, int, Finding | None]:
        key = (shown.grant.transfer, shown.rank)
        if key not in self._parked and len(self._parked) >= MAX_PARKED:
            side = Side("this rank", f"{len(self._parked)} presentations wait for staging")
            return REFUSED, shown.grant.transfer, finding(Code.STAGING_FULL, "parked", side)
        request = shown.grant.request
        if request not in self.staged and not self._is_wanted(request):
            self.events.append(Wanted(request))
        if key in self._parked:  # a renewed grant, or a late repeat of the first
            shown.until = max(shown.until, self._parked[key].until)
        self._parked[key] = shown
        self._note_due(shown.until)
        return PARKED, shown.grant.transfer, None

    def _is_wanted(self, request: str) -> bool:
        return any(parked.grant.request == request for parked in self._parked.values())

    def _accept(self, shown: Presentation, staged: Staged) -> Finding | None:
        if wrong := self._attach(shown.grant, shown.pair, staged):
            return wrong
        touched = {part.group for part in shown.link.slices}
        for group in sorted(touched):
            ours, theirs = len(staged.pages.get(group, ())), shown.counts.get(group, 0)
            if ours != theirs:
                return finding(
                    Code.PAGES_INVALID,
                    f"pages[{group}]",
                    Side("staged here", f"{ours} pages"),
                    Side(f"{shown.pair.other} rank {shown.rank}", f"{theirs} pages"),
                    detail=f"(request {staged.request})",
                )
        staged.until = max(staged.until, shown.until)
        known = staged.sending.get(shown.rank)
        if known is not None:
            known.stop = max(known.stop, shown.until - self._max_op)
        elif staged.state is not StagedState.CLOSED:
            if staged.state is StagedState.STAGED:
                staged.become(StagedState.SENDING)
            staged.sending[shown.rank] = Sending(shown, staged, self._max_op)
            self.sendings.append(staged.sending[shown.rank])
        return None

    def _attach(self, grant: Grant, pair: PairLinks, staged: Staged) -> Finding | None:
        """Bind a staged request to its transfer, once; the count comes from the verdict alone."""
        if staged.transfer == grant.transfer:
            return None
        if staged.transfer:
            sides = (
                Side("staged for", f"transfer {staged.transfer}"),
                Side("presented", f"transfer {grant.transfer}"),
            )
            return finding(Code.CONFLICTING_STAGE, f"request {staged.request}", *sides)
        staged.transfer, staged.epochs = grant.transfer, pair.epochs
        staged.receive_count = sum(
            link.peer.dp == grant.destination_dp for link in pair.links.values()
        )
        self._by_transfer[grant.transfer] = staged
        return None

    def peer_end(
        self, pair: PairLinks, rank: int, sealed: bytes, now: int, outcome: str = DELIVERED
    ) -> tuple[int, Finding | None]:
        """Count a destination rank's end, once; a repeat changes nothing (case B02)."""
        grant = self.check(pair, rank, sealed, data=False)
        if isinstance(grant, Finding):
            return 0, grant
        if grant.transfer in self._done:
            return grant.transfer, None
        staged = self.staged.get(grant.request)
        if staged is None:
            early = self._early.setdefault(grant.transfer, EarlyEnds(pair, grant, now))
            if len(self._early) > MAX_EARLY:
                self._early.pop(next(iter(self._early)))
            early.outcomes.setdefault(rank, outcome)
            return grant.transfer, None
        if wrong := self._attach(grant, pair, staged):
            return grant.transfer, wrong
        self._end(staged, rank, outcome)
        return grant.transfer, None

    def _end(self, staged: Staged, rank: int, outcome: str) -> None:
        if rank in staged.ended:
            return
        staged.ended.add(rank)
        # All accounted for with one failure is a failure, never a delivery (case B11).
        staged.failed |= outcome != DELIVERED
        if len(staged.ended) >= staged.receive_count:
            wrong = "aborted" if staged.transfer in self._aborting else "failed"
            self._close(staged, wrong if staged.failed else DELIVERED)

    def pair_broken(self, epochs: Epochs) -> None:
        """Forget what a broken pair's destinations had shown; the daemon names outcomes."""
        for key in [key for key, shown in self._parked.items() if shown.epochs == epochs]:
            del self._parked[key]

    def holds(self, epochs: Epochs) -> bool:
        """Whether a staged request still waits for ends over a pair."""
        return any(
            staged.epochs == epochs and staged.state is not StagedState.CLOSED
            for staged in self.staged.values()
        )

    def drain(self, transfer: int, rank: int, now: int) -> None:
        """Start nothing more for one destination rank: what it had shown is forgotten."""
        self._drained.setdefault((transfer, rank), now)
        self._parked.pop((transfer, rank), None)

    def may_start(self, sending: Sending) -> bool:
        """Whether one more operation of a share may start, as far as ends go."""
        return (
            sending.staged.state is StagedState.SENDING
            and sending.rank not in sending.staged.ended
            and (sending.transfer, sending.rank) not in self._drained
            and sending.transfer not in self._aborting
        )

    # --- the daemon and the transport ------------------------------------------------------

    def aborting(self, transfer: int, why: Finding, now: int) -> None:
        """The daemon is aborting a transfer: nothing more of it starts; its outcome releases."""
        self._aborting.setdefault(transfer, (now, why))
        for key in [key for key in self._parked if key[0] == transfer]:
            del self._parked[key]

    def void(self) -> None:
        """Another daemon, or another clock: what was granted before holds nothing any more."""
        for known in (self._parked, self._early, self._delivered, self._drained, self._aborting):
            known.clear()
        for staged in list(self.staged.values()):
            if staged.transfer:
                self._close(staged, "expired")
        self._done.clear()

    def outcome(
        self, transfer: int, request: str, outcome: str, now: int, receive_count: int = 0
    ) -> None:
        """Take the daemon's outcome: the contacts hold the memory no longer.

        ``receive_count`` is the verdict's, for a request whose grant this rank never saw.
        """
        known = transfer in self._done
        self._done[transfer] = (now, outcome)
        self._early.pop(transfer, None)
        for key in [key for key in self._parked if key[0] == transfer]:
            del self._parked[key]
        staged = self._by_transfer.get(transfer)
        if staged is None and not known:  # else it is staged anew, for a later attempt
            staged = self.staged.get(request)
        if staged is not None and staged.transfer in {0, transfer}:
            staged.transfer = transfer
            staged.receive_count = staged.receive_count or receive_count
            self._close(staged, outcome)
        elif staged is None and not known and outcome == DELIVERED:
            self._delivered[request] = (transfer, receive_count, now)

    def withdraw(self, request: str, reason: str) -> None:
        """Give a request up that no transfer is known of."""
        staged = self.staged.get(request)
        if staged is not None and not staged.transfer:
            self._close(staged, reason)

    def operation_started(self, staged: Staged) -> None:
        """The transport reads a request's memory from now on."""
        staged.operations += 1

    def operation_done(self, staged: Staged) -> None:
        """One operation no longer reads the memory."""
        staged.operations -= 1
        self._release(staged)

    def _close(self, staged: Staged, reason: str) -> None:
        if staged.state in {StagedState.CLOSED, StagedState.RELEASED}:
            return
        staged.become(StagedState.CLOSED)
        staged.reason = reason
        self._release(staged)

    def _release(self, staged: Staged) -> None:
        if staged.state is not StagedState.CLOSED or staged.operations:
            return
        staged.become(StagedState.RELEASED)
        del self.staged[staged.request]
        self.staged_bytes -= staged.nbytes
        if staged.transfer:
            self._by_transfer.pop(staged.transfer, None)
            self._done.setdefault(staged.transfer, (self._now, staged.reason))
        # The daemon names a delivery only when all have ended, so its word counts for the rest.
        ended = len(staged.ended)
        ended = staged.receive_count if staged.reason == DELIVERED else ended
        self.events.append(Released(staged.request, staged.reason, ended, staged.receive_count))
        if self._is_wanted(staged.request):
            self.events.append(Wanted(staged.request))

    # --- time -----------------------------------------------------------------------------

    def tick(self, now: int) -> None:
        """End what is too old: parked presentations, and staged requests nobody came for."""
        self._now = max(self._now, now)
        self._forget(now - _REMEMBER_MS)
        if self._due is None or now < self._due:
            return
        for key, shown in list(self._parked.items()):
            if now >= shown.until:
                del self._parked[key]
                side = Side("this rank", f"request {shown.grant.request} not staged in time")
                why = finding(Code.NOT_STAGED, "request", side)
                self.failures.append((shown.epochs, shown.rank, shown.grant.transfer, why))
        for staged in list(self.staged.values()):
            if now >= staged.until:
                self._close(staged, "expired")
        times = [shown.until for shown in self._parked.values()]
        times += [s.until for s in self.staged.values() if s.state is not StagedState.CLOSED]
        self._due = max(min(times), now + _LOOK_MS) if times else None

    def _forget(self, before: int) -> None:
        _drop_old(self._done, lambda done: done[0] < before)
        _drop_old(self._early, lambda early: early.at < before)
        _drop_old(self._delivered, lambda delivered: delivered[2] < before)
        _drop_old(self._drained, lambda at: at < before)
        _drop_old(self._aborting, lambda aborting: aborting[0] < before)

    def _note_due(self, until: int) -> None:
        self._due = until if self._due is None else min(self._due, until)

    def next_deadline(self) -> int | None:
        """Return when (ms) something may be too old."""
        return self._due


_REMEMBER_MS = 600_000
"""How long an ended transfer's late presentations are recognised: the longest life of a grant."""


def _drop_old(known: dict[Key, Value], old: Callable[[Value], bool]) -> None:
    """Forget what is old of entries in order of time."""
    while known and old(next(iter(known.values()))):
        del known[next(iter(known))]
