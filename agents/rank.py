"""One rank's whole conversation, pure: with the daemon, its sources, its destinations, its engine.

It joins session, linking, ledger and landing; what is to be sent or dialed collects in lists that
the I/O thread empties. A link is named by (pair epochs, peer rank) on both ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import Struct

from rankgate.agents.destination import DestinationSide
from rankgate.agents.events import AgentEvent, Broken
from rankgate.agents.linking import (
    LINGER_MS,
    LINK_MS,
    Epochs,
    LinkState,
    PairLinks,
    Registered,
    check_slices,
    link_failure,
)
from rankgate.agents.session import Identity, Session
from rankgate.agents.source import SourceSide
from rankgate.proto.descriptor import Descriptor
from rankgate.proto.findings import Finding, has_error
from rankgate.proto.messages import (
    Abort,
    AbortAck,
    Aborting,
    AbortItem,
    Claim,
    Linked,
    Outcome,
    PairBroken,
    PairReady,
    Rejected,
    Report,
    ReportItem,
    Verdict,
    WorldForming,
    WorldSealed,
)

_REPORT_MS = 500
_MOST_REPORTED = 64


class Sealed(NamedTuple):
    """What the daemon broadcast when this rank's world was sealed."""

    epoch: int
    size: int
    receive_count: int


class RankCore:
    """Everything a rank decides.

    Invariant: the same calls at the same times give the same messages; nothing here waits,
    reads a clock, or touches a socket or a tensor.
    """

    def __init__(
        self,
        identity: Identity,
        descriptor: Descriptor,
        registered: Registered,
        now: int,
        *,
        claims: Mapping[str, int],
        seed: int,
        credit: int,
    ) -> None:
        """Begin to greet the daemon."""
        self.identity = identity
        self.descriptor = descriptor
        self.claims = [Claim(count=name, value=value) for name, value in claims.items()]
        self.registered = registered
        self.session = Session(identity, descriptor, now, seed)
        self.session.on_push = self._push
        self.session.on_fresh = self._fresh
        self.session.on_live = self._registered
        self.pairs: dict[Epochs, PairLinks] = {}
        self.sealed: Sealed | None = None
        self.findings: dict[str, list[Finding]] = {}
        """Latest findings by world: one's own and those that would pair with it."""
        self.reports: list[ReportItem] = []
        self._reported: tuple[int, int, int] = (0, 0, 0)
        self._report_at = 0
        self.events: list[AgentEvent] = []
        self.source = SourceSide(self)
        self.destination = DestinationSide(self, credit, seed)
        self._pushes: dict[type[Struct], Callable[[Any, int], None]] = {
            WorldSealed: self._world_sealed,
            WorldForming: self._world_forming,
            Verdict: self._verdict,
            PairReady: self._pair_ready,
            PairBroken: self._pair_broken,
            Outcome: self._outcome,
            Aborting: self._aborting,
        }

    # --- the daemon's pushes --------------------------------------------------------------

    def _push(self, message: Struct, now: int) -> None:
        self._pushes[type(message)](message, now)

    def _fresh(self, void: bool) -> None:  # noqa: FBT001 - the session's word
        """A new session: verdicts come again; grants of another instance or clock are void."""
        self.sealed = None
        self.destination.table.deafen()
        for pair in self.pairs.values():
            if pair.state is LinkState.READY:
                pair.state = LinkState.LINKED
        if void:
            for pair in list(self.pairs.values()):
                self.drop(pair, "the daemon was replaced")
            self.source.ledger.void()
            self.destination.void()

    def _registered(self) -> None:
        """From now on only this daemon's grants hold."""
        self.source.ledger.origin = (self.session.instance, self.session.clock)

    def _world_sealed(self, message: WorldSealed, _now: int) -> None:
        self.sealed = Sealed(message.epoch, message.size, message.receive_count)
        self.findings.pop(message.world, None)

    def _world_forming(self, message: WorldForming, _now: int) -> None:
        if message.world == self.identity.world:
            self.sealed = None
        self._found(message.world, message.findings)

    def _found(self, world: str, findings: list[Finding]) -> None:
        if findings and has_error(findings):
            self.events.append(Broken(world, findings))
        self.findings[world] = findings

    def _verdict(self, verdict: Verdict, now: int) -> None:
        sending = verdict.source == self.identity.world
        pair = PairLinks(verdict, sending=sending, now=now)
        for other in list(self.pairs.values()):
            if other.other == pair.other and other.epochs != pair.epochs:
                self.drop(other, "a newer epoch took its place")
        known = self.pairs.get(pair.epochs)
        self._found(pair.other, verdict.findings)
        if not verdict.accepted:
            if known is not None:
                self.drop(known, "the pair was refused")
            self.pairs[pair.epochs] = pair
            return
        if known is not None and known.state is LinkState.REJECTED:
            self.drop(known, "linked anew")  # hung up on before: dialed and greeted again
            known = None
        if known is not None and known.verdict.table_digest == verdict.table_digest:
            known.until, known.findings = pair.until, pair.findings
            known.state = LinkState.LINKING
            self.maybe_linked(known, now)
            return
        self.pairs[pair.epochs] = pair
        slices = [part for link in pair.links.values() for part in link.slices]
        if wrong := check_slices(slices, self.registered, sending=sending):
            self.link_failed(pair, [wrong], now)
        elif sending:
            self.source.pair_accepted(pair, now)
        else:
            self.destination.dial(pair, now)
        self.maybe_linked(pair, now)

    def _pair_ready(self, message: PairReady, _now: int) -> None:
        pair = self.pairs.get((message.source_epoch, message.destination_epoch))
        if pair is not None and pair.state is not LinkState.REJECTED:
            pair.state = LinkState.READY

    def _pair_broken(self, message: PairBroken, now: int) -> None:
        pair = self.pairs.get((message.source_epoch, message.destination_epoch))
        if pair is None:
            return
        if pair.state is LinkState.READY:
            pair.state = LinkState.LINKED
        self._found(pair.other, message.findings)
        self.source.ledger.pair_broken(pair.epochs)
        if message.source_lost or message.destination_lost:
            pair.broken, pair.until = True, now + LINGER_MS
            self.destination.broken(pair)
        if message.source_lost and not pair.sending:
            for rank in message.lost_ranks:
                self.destination.table.source_lost(pair.epochs, rank, "gone")

    def _outcome(self, message: Outcome, now: int) -> None:
        for item in message.items:
            epochs = (item.source_epoch, item.destination_epoch)
            pair = self.pairs.get(epochs)
            if pair is None or pair.sending:
                count = pair.verdict.receive_count if pair else 0
                self.source.ledger.outcome(item.transfer, item.request, item.outcome, now, count)
            self.destination.table.outcome(item)

    def _aborting(self, message: Aborting, now: int) -> None:
        for item in message.items:
            self.source.ledger.aborting(item.transfer, item.finding, now)
            self.destination.table.aborting(item.transfer, item.finding)

    # --- linking --------------------------------------------------------------------------

    def maybe_linked(self, pair: PairLinks, now: int) -> None:
        """Report that all links of a pair stand, once they do."""
        if pair.state is not LinkState.LINKING or pair.broken or not pair.complete:
            return
        pair.state = LinkState.LINKED
        self._say_linked(pair, [], now)

    def link_failed(self, pair: PairLinks, findings: list[Finding], now: int) -> None:
        """Report that a pair cannot be linked, and why."""
        if pair.state is LinkState.REJECTED or pair.broken:
            return
        pair.state = LinkState.REJECTED
        pair.findings = [*pair.verdict.findings, *findings]
        self.destination.drop(pair, "linking failed")
        self._say_linked(pair, findings, now)

    def _say_linked(self, pair: PairLinks, findings: list[Finding], now: int) -> None:
        def build(session: int) -> Linked:
            return Linked(
                session=session,
                source_epoch=pair.epochs[0],
                destination_epoch=pair.epochs[1],
                table_digest=pair.verdict.table_digest,
                claims=self.claims,
                findings=findings,
            )

        def answered(answer: Struct, _now: int) -> None:
            if isinstance(answer, Rejected) and pair.state is LinkState.LINKED:
                pair.findings = answer.findings

        self.session.request(build, answered, now)

    def drop(self, pair: PairLinks, why: str) -> None:
        """Let a pair and its links go; what is incomplete over them has failed."""
        self.pairs.pop(pair.epochs, None)
        self.source.drop(pair)
        self.destination.drop(pair, why)

    def pair_with(self, world: str) -> PairLinks | None:
        """Return the current pair with a world."""
        return next((pair for pair in self.pairs.values() if pair.other == world), None)

    # --- the engine -----------------------------------------------------------------------

    def stage(
        self, request: str, pages: Mapping[str, Sequence[int]], nbytes: int, ttl: int, now: int
    ) -> Finding | None:
        """Stage a request; return why not."""
        return self.source.ledger.stage(request, pages, nbytes, now + ttl, now)

    def abort(self, request: str, reason: str, now: int) -> None:
        """Abort what is known of a request on this rank, and what has only been asked for."""
        transfers = {
            landing.transfer
            for landing in self.destination.table.landings.values()
            if landing.request == request and landing.transfer
        }
        staged = self.source.ledger.staged.get(request)
        if staged is not None and staged.transfer:
            transfers.add(staged.transfer)
        self.source.ledger.withdraw(request, "aborted")
        self.destination.abort_asked(request, reason)
        if transfers:
            items = [AbortItem(transfer=one, reason=reason) for one in sorted(transfers)]

            def build(session: int) -> Abort:
                return Abort(session=session, items=items)

            def answered(answer: Struct, _now: int) -> None:
                if isinstance(answer, AbortAck):
                    self.reports += [
                        ReportItem(transfer=item.transfer, request=request, finding=item.finding)
                        for item in answer.items
                        if item.finding is not None
                    ]

            self.session.request(build, answered, now)

    def refused(self, transfer: int, request: str, found: Finding) -> None:
        """Keep a local refusal for the daemon's operators."""
        if len(self.reports) < _MOST_REPORTED:
            self.reports.append(ReportItem(transfer=transfer, request=request, finding=found))

    # --- turns ----------------------------------------------------------------------------

    def tick(self, now: int) -> None:
        """Look at everything that has a time."""
        self.session.tick(now)
        self.source.tick(now)
        self.destination.tick(now)
        for pair in list(self.pairs.values()):
            if pair.broken:
                self._let_go(pair, now)
            elif pair.state is LinkState.LINKING and now >= pair.until:
                # What may pass is shown and tried on; a refusal would outlive its cause.
                pair.until = now + LINK_MS
                pair.findings = [link_failure(pair)]
                self.refused(0, "", pair.findings[0])
        self._report(now)

    def _let_go(self, pair: PairLinks, now: int) -> None:
        """Drop a broken pair once nothing is open over it; grants end, so that comes."""
        if self.destination.table.holds(pair.epochs) or self.source.ledger.holds(pair.epochs):
            pair.until = now + LINGER_MS
        elif now >= pair.until:
            self.drop(pair, "the pair is broken")

    def flush(self, now: int) -> None:
        """End a turn: send what was gathered as batches, acknowledge what was handled."""
        self.destination.flush(now)
        self.session.acknowledge()
        ledger, table = self.source.ledger, self.destination.table
        for queue in (ledger.events, table.events):
            self.events.extend(queue)
            queue.clear()

    def next_deadline(self, now: int) -> int:
        """Return when (ms) ``tick`` is due."""
        times = [
            self.session.next_deadline(),
            self.source.next_deadline(),
            self.destination.next_deadline(now),
            *(
                pair.until
                for pair in self.pairs.values()
                if pair.broken or pair.state is LinkState.LINKING
            ),
        ]
        return min((time for time in times if time is not None), default=now + _REPORT_MS)

    def _report(self, now: int) -> None:
        ledger = self.source.ledger
        figures = (len(ledger.staged), ledger.staged_bytes, len(self.destination.table.landings))
        if now < self._report_at or not (self.reports or figures != self._reported):
            return
        self._report_at = now + _REPORT_MS
        self._reported, reports, self.reports = figures, self.reports, []

        def build(session: int) -> Report:
            return Report(
                session=session,
                items=reports,
                staged=figures[0],
                staged_bytes=figures[1],
                landing=figures[2],
            )

        self.session.request(build, lambda _answer, _now: None, now, until=now + 5 * _REPORT_MS)
