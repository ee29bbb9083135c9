"""A rank as destination: it dials its sources, opens requests, takes their data, and ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from rankgate.agents.landing import Ended, Landing, LandingState, LandingTable
from rankgate.agents.ledger import REFUSED
from rankgate.agents.linking import LINK_MS, Epochs, LinkState, PairLinks, PeerLink, check_metadata
from rankgate.agents.outstanding import Outstanding
from rankgate.agents.session import SessionState
from rankgate.proto.batches import batches
from rankgate.proto.codes import Code
from rankgate.proto.findings import Finding, Side, clip, finding
from rankgate.proto.grants import read_grant
from rankgate.proto.limits import MAX_BATCH, MAX_REQUEST
from rankgate.proto.messages import (
    Chunk,
    Credit,
    Drain,
    Drained,
    End,
    EndItem,
    Open,
    Opened,
    OpenItem,
    OpenResult,
    OutcomeItem,
    PeerEnd,
    PeerHello,
    PeerWelcome,
    Present,
    Presented,
    Refusal,
    Rejected,
    SourceFailed,
)
from rankgate.proto.messages import Ended as EndedMessage

if TYPE_CHECKING:
    from rankgate.agents.rank import RankCore

LinkKey = tuple[Epochs, int]
Resolve = Callable[[int, Finding | None, OutcomeItem | None], None]
"""Called once an open is answered: (transfer or 0, denial, outcome it already has)."""

_ANSWER_MS = 60_000
_AGAIN_MS = 200
_LINK_AGAIN_MS = 500


class DestinationSide:
    """All dialed links of a rank, its landing table and its messages on their way.

    Invariant: every open is resolved once; every end is repeated to daemon and contacts until
    answered or the grant has ended.
    """

    def __init__(self, core: RankCore, credit: int, seed: int) -> None:
        """Start without links; ``credit`` is how many chunks a link may have under way."""
        self._core = core
        self._credit = credit
        pools = {group.name: group.pages for group in core.descriptor.kv}
        self.table = LandingTable(pools)
        self.out: list[tuple[LinkKey, int, Struct]] = []
        self.dials: list[tuple[LinkKey, str]] = []
        self.hangups: list[LinkKey] = []
        self._outstanding = Outstanding(seed + 1)
        self._taken: dict[LinkKey, int] = {}
        self._told: dict[LinkKey, int] = {}
        self._opening: list[tuple[OpenItem, Landing, Resolve]] = []
        self._ending: list[EndItem] = []
        self._aborts: dict[Landing, str] = {}
        """Asked for and aborted before the answer: why."""

    # --- linking --------------------------------------------------------------------------

    def dial(self, pair: PairLinks, now: int) -> None:
        """Dial every contact of a new pair, notices too."""
        for rank, link in pair.links.items():
            key = (pair.epochs, rank)
            self.dials.append((key, link.peer.address))
            self._hello(pair, link, key, now)

    def _hello(self, pair: PairLinks, link: PeerLink, key: LinkKey, now: int) -> None:
        identity, verdict = self._core.identity, pair.verdict
        hello = PeerHello(
            world=identity.world,
            epoch=verdict.destination_epoch,
            rank=identity.rank,
            incarnation=identity.incarnation,
            source_world=verdict.source,
            source_epoch=verdict.source_epoch,
            source_rank=link.peer.rank,
            source_incarnation=link.peer.incarnation,
            table_digest=verdict.table_digest,
            metadata=self._core.registered.blob,
        )

        def answered(answer: Struct, at: int) -> None:
            if link.up:
                return  # welcomed twice: the link's credit goes on counting from its beginning
            who = f"{verdict.source} rank {link.peer.rank} at {link.peer.address}"
            if isinstance(answer, PeerWelcome):
                wrong = check_metadata(answer.metadata, link, who)
                if wrong is None:
                    link.up = True
                    pair.findings = list(verdict.findings)
                    self._taken[key] = self._told[key] = 0
                    self._core.maybe_linked(pair, at)
                    return
                self._core.link_failed(pair, [wrong], at)
            elif isinstance(answer, Rejected) and answer.retryable:
                # The source may be behind, or another process may have its address for now.
                pair.findings = answer.findings
                if self._core.pairs.get(pair.epochs) is pair and not pair.broken:
                    self._hello(pair, link, key, at + _LINK_AGAIN_MS)
            elif isinstance(answer, Rejected):
                self._core.link_failed(pair, answer.findings, at)
            else:
                side = Side(who, f"answered {type(answer).__name__}")
                self._core.link_failed(pair, [finding(Code.LINK_FAILED, "links", side)], at)

        self._outstanding.add(key, lambda: hello, answered, now)

    def _hello_again(self, pair: PairLinks, rank: int, now: int) -> None:
        link, key = pair.links.get(rank), (pair.epochs, rank)
        if link is not None and link.up and self._core.pairs.get(pair.epochs) is pair:
            link.up = False
            self._hello(pair, link, key, now)

    def link_down(self, key: LinkKey, now: int) -> None:
        """A connection ended: what is incomplete over it has failed; link anew if it comes back."""
        epochs, rank = key
        self.table.source_lost(epochs, rank, "its connection ended")
        self._outstanding.drop(key)
        pair = self._core.pairs.get(epochs)
        link = pair.links.get(rank) if pair else None
        if pair is None or link is None or pair.state is LinkState.REJECTED:
            return
        link.up = False
        if not pair.broken:
            pair.until = max(pair.until, now + LINK_MS)
            self._hello(pair, link, key, now)

    def broken(self, pair: PairLinks) -> None:
        """Greet nobody of a broken pair any more; what is open over its links goes on."""
        for rank, link in pair.links.items():
            if not pair.sending and not link.up:
                self._outstanding.drop((pair.epochs, rank))

    def void(self) -> None:
        """Another daemon or clock: all landings have ended, and nobody is to be told of them."""
        self.table.void()
        for queue in (self.table.ended, self.table.drains, self._ending):
            queue.clear()

    def drop(self, pair: PairLinks, why: str) -> None:
        """Hang up on the sources of a pair."""
        if pair.sending:
            return
        for rank, link in pair.links.items():
            key = (pair.epochs, rank)
            link.up = False
            self.table.source_lost(pair.epochs, rank, why)
            self._outstanding.drop(key)
            self.hangups.append(key)
            self._taken.pop(key, None)
            self._told.pop(key, None)

    # --- opening --------------------------------------------------------------------------

    def open(
        self,
        item: OpenItem,
        pair: PairLinks,
        pages: Mapping[str, Sequence[int]],
        resolve: Resolve,
    ) -> None:
        """Take pages and ask for a grant; several opens of one turn go as one message."""
        landing: Landing | Finding
        if len(item.request) > MAX_REQUEST:  # one bad item would cost its whole message
            side = Side("the engine", f"{len(item.request)} characters")
            landing = finding(Code.REQUEST_INVALID, "request", side, detail=f"(max {MAX_REQUEST})")
        else:
            landing = self.table.ask(item.request, item.attempt, pair, pages)
        if isinstance(landing, Finding):
            self._core.refused(0, item.request, landing)
            resolve(0, landing, None)
            return
        self._opening.append((item, landing, resolve))

    def _send_opens(self, now: int) -> None:
        opening, self._opening = self._opening, []
        for first in range(0, len(opening), MAX_BATCH):
            self._send_open(opening[first : first + MAX_BATCH], now)

    def _send_open(self, batch: list[tuple[OpenItem, Landing, Resolve]], now: int) -> None:
        items = [item for item, _, _ in batch]
        # What no grant can outlive, the longest of the batch, is as long as an answer is worth.
        rules = self._core.session.rules
        ttl = max(item.ttl or (rules.grant_ttl if rules else _ANSWER_MS) for item in items)

        def build(session: int) -> Open:
            return Open(session=session, items=items)

        def answered(answer: Struct, at: int) -> None:
            results = answer.items if isinstance(answer, Opened) else []
            refused = answer.findings if isinstance(answer, Rejected) else []
            for index, (_, landing, resolve) in enumerate(batch):
                if index < len(results):
                    self._opened(landing, results[index], resolve, at)
                else:
                    found = refused[0] if refused else _unanswered(landing, answer)
                    self._deny(landing, resolve, found)

        def unanswered(_now: int) -> None:
            word = f"did not answer within {ttl} ms"
            if self._core.session.state is SessionState.REFUSED:
                word = "has refused this rank"
            for _, landing, resolve in batch:
                side = Side("the daemon", word)
                found = finding(Code.PAIR_NOT_READY, f"request {landing.request}", side)
                self._deny(landing, resolve, found)

        self._core.session.request(build, answered, now, now + ttl, unanswered)

    def _deny(self, landing: Landing, resolve: Resolve, why: Finding) -> None:
        self._aborts.pop(landing, None)
        self.table.denied(landing)
        resolve(0, why, None)

    def abort_asked(self, request: str, reason: str) -> None:
        """Abort opens without an answer: not sent, denied here; sent, aborted when granted."""
        for entry in [one for one in self._opening if one[1].request == request]:
            _, landing, resolve = entry
            if landing.state is LandingState.ASKED:
                self._opening.remove(entry)
                side = Side("the engine", reason or "aborted")
                found = finding(Code.ABORTED, f"request {request}", side)
                self._deny(landing, resolve, found)
        for landing in self.table.landings.values():
            if landing.request == request and landing.state is LandingState.ASKED:
                self._aborts[landing] = reason

    def _opened(self, landing: Landing, result: OpenResult, resolve: Resolve, now: int) -> None:
        reason = self._aborts.pop(landing, None)
        if not result.grant:
            self.table.denied(landing)
            if result.ended is not None:  # a repeat: the landing's own outcome, if not yet told
                self.table.outcome(result.ended)
            resolve(0, result.finding, result.ended)
            return
        grant = read_grant(result.grant)
        until = grant.issued + grant.ttl
        ranks = self.table.granted(landing, grant, result.grant, until)
        resolve(grant.transfer, None, None)
        if reason is not None:  # no source is to begin; they are drained like any other
            self._core.abort(landing.request, reason, now)
            return
        linked = landing.epochs in self._core.pairs
        for rank in ranks:
            if linked:
                self._present(landing, rank, now)
            else:  # a newer epoch took the pair's place while the grant was on its way
                self.table.source_lost(landing.epochs, rank, "the pair was dropped")

    def _until(self, landing: Landing, now: int) -> int:
        """Return when (ms, local) a landing's grant has ended by the earliest reckoning."""
        return now + landing.until - self._core.session.ticks.upper(now)

    def _present(self, landing: Landing, rank: int, now: int) -> None:
        key = (landing.epochs, rank)
        counts = {name: len(pages) for name, pages in landing.pages.items()}

        def answered(answer: Struct, at: int) -> None:
            if isinstance(answer, Presented):
                if answer.status == REFUSED and answer.finding is not None:
                    self.table.source_failed(landing.epochs, rank, landing.transfer, answer.finding)
            elif isinstance(answer, Rejected) and landing.state is LandingState.OPEN:
                if all(found.slug == Code.NO_SESSION.slug for found in answer.findings):
                    # The source no longer knows this link (another took its place): make it anew.
                    self._hello_again(landing.pair, rank, at)
                    self._present(landing, rank, at + _AGAIN_MS)
                else:
                    self.table.source_failed(
                        landing.epochs, rank, landing.transfer, answer.findings[0]
                    )

        self._outstanding.add(
            key,
            lambda: Present(grant=landing.sealed, counts=counts, credit=self._credit),
            answered,
            now,
            until=self._until(landing, now),
        )

    # --- what sources say -----------------------------------------------------------------

    def receive(self, key: LinkKey, message_id: int, message: Struct, now: int) -> None:
        """Take one message of a source, except chunks, whose bytes the transport applies."""
        if isinstance(message, SourceFailed):
            self.table.source_failed(key[0], key[1], message.transfer, clip(message.finding))
            return
        request = self._outstanding.answered(message_id)
        if request is not None:
            request.on_answer(message, now)

    def chunk_taken(self, key: LinkKey, chunk: Chunk, nbytes: int, *, applied: bool) -> None:
        """Note a chunk that was read from its link, and give credit for more."""
        if applied or (nbytes == 0 and chunk.pages == 0):
            self.table.took(*key, chunk)
        if key not in self._taken:
            return
        self._taken[key] += 1
        if self._taken[key] - self._told[key] >= max(1, self._credit // 2):
            self._told[key] = self._taken[key]
            self.out.append((key, 0, Credit(chunks=self._taken[key])))

    # --- ending ---------------------------------------------------------------------------

    def _say_ended(self, ended: Ended, now: int) -> None:
        landing = ended.landing
        self._ending.append(
            EndItem(transfer=landing.transfer, outcome=ended.outcome, finding=ended.finding)
        )
        grant = landing.grant
        if grant is None or landing.epochs not in self._core.pairs:
            return  # hung up: those sources hear the outcome from the daemon
        message = PeerEnd(grant=landing.sealed, outcome=ended.outcome)
        for rank in landing.pair.in_group(grant.source_dp):
            self._outstanding.add(
                (landing.epochs, rank),
                lambda: message,
                lambda _answer, _now: None,
                now,
                until=self._until(landing, now),
            )

    def _ask_drain(self, landing: Landing, rank: int, now: int) -> None:
        def answered(answer: Struct, _now: int) -> None:
            if isinstance(answer, Drained):
                self.table.drained(landing.epochs, rank, answer.transfer)

        message = Drain(grant=landing.sealed)
        key, until = (landing.epochs, rank), self._until(landing, now)
        self._outstanding.add(key, lambda: message, answered, now, until=until)

    def flush(self, now: int) -> None:
        """Send what this turn gathered."""
        drains, self.table.drains = self.table.drains, []
        for landing, rank in drains:
            if not landing.shares[rank].drained:  # it may be lost or hung up on since
                self._ask_drain(landing, rank, now)
        ended, self.table.ended = self.table.ended, []
        for each in ended:
            self._say_ended(each, now)
        if self._opening:
            self._send_opens(now)
        ending, self._ending = self._ending, []
        for batch in batches(ending):
            self._send_end(batch, now)
        for request in self._outstanding.due(now):
            self.out.append((request.key, request.id, request.build()))  # type: ignore[arg-type]

    def _send_end(self, items: list[EndItem], now: int) -> None:
        def build(session: int) -> End:
            return End(session=session, items=items)

        def answered(answer: Struct, _now: int) -> None:
            for result in answer.items if isinstance(answer, EndedMessage) else []:
                landing = self.table.by_transfer.get(result.transfer)
                if result.late and landing is not None:  # its push may have been another session's
                    self.table.outcome(
                        OutcomeItem(
                            request=landing.request,
                            transfer=result.transfer,
                            outcome=result.late,
                            source_epoch=landing.epochs[0],
                            destination_epoch=landing.epochs[1],
                            finding=landing.finding,
                        )
                    )

        self._core.session.request(build, answered, now)

    # --- time -----------------------------------------------------------------------------

    def tick(self, now: int) -> None:
        """Free what no source may write any more."""
        self.table.tick(self._core.session.ticks.lower(now))

    def next_deadline(self, now: int) -> int | None:
        """Return when (ms) something is due."""
        tick = self.table.next_deadline()
        ended = None if tick is None else now + tick - self._core.session.ticks.lower(now) + 1
        times = [self._outstanding.next_deadline(), ended]
        return min((time for time in times if time is not None), default=None)


def _unanswered(landing: Landing, answer: Struct) -> Finding:
    code, word = Code.PAIR_NOT_READY, f"answered an open with {type(answer).__name__}"
    if isinstance(answer, Refusal):
        code = next((each for each in Code if each.id == answer.code), code)
        word = answer.text
    return finding(code, f"request {landing.request}", Side("the daemon", word))
