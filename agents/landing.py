"""The destination's landing table: which pages belong to which transfer, and what has arrived.

A range named in an open belongs to that transfer until every source with a data contact has
delivered its share or answered Drained, or the grant has certainly ended. Failure, abort and death
do not shorten this: else a late writer would write into another request's pages (case B16).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum

from rankgate.agents.chunks import CHUNK_BYTES, ChunkSpec, cut
from rankgate.agents.events import AgentEvent, Arrived
from rankgate.agents.events import Outcome as OutcomeEvent
from rankgate.agents.linking import Epochs, PairLinks, PeerLink
from rankgate.proto.codes import Code
from rankgate.proto.findings import Finding, Side, finding
from rankgate.proto.grants import Grant
from rankgate.proto.limits import MAX_PAGES_PER_REQUEST
from rankgate.proto.messages import Chunk, OutcomeItem, Slice


class LandingState(StrEnum):
    """A landing request: asked, open for data, ended either way, its pages free again."""

    ASKED = "asked"
    OPEN = "open"
    ARRIVED = "arrived"
    FAILED = "failed"
    DRAINED = "drained"


LANDING_TABLE: Mapping[LandingState, frozenset[LandingState]] = {
    LandingState.ASKED: frozenset({LandingState.OPEN, LandingState.DRAINED}),
    LandingState.OPEN: frozenset({LandingState.ARRIVED, LandingState.FAILED}),
    LandingState.ARRIVED: frozenset({LandingState.DRAINED}),
    LandingState.FAILED: frozenset({LandingState.DRAINED}),
    LandingState.DRAINED: frozenset(),
}


class Share:
    """What one source owes of a transfer.

    Invariant: a sequence number counts once; only the chunks of the cut that this end computes
    itself count, so a share is complete when all of them came.
    """

    __slots__ = ("done", "drained", "got", "link", "specs")

    def __init__(self, link: PeerLink, counts: Mapping[str, int], chunk_bytes: int) -> None:
        """Begin with nothing; ``counts`` are the request's pages by group."""
        self.link = link
        self.specs = list(cut(link.slices, counts, chunk_bytes))
        self.got: set[int] = set()
        self.done = False
        self.drained = False

    @property
    def total(self) -> int:
        """How many chunks it has; a share without data is one chunk without frames."""
        return max(1, len(self.specs))

    def expected(self, sequence: int) -> ChunkSpec | None:
        """Return what a chunk must be, or None if there is none of this number."""
        if sequence < len(self.specs):
            return self.specs[sequence]
        return None if sequence or self.specs else _EMPTY


_EMPTY = ChunkSpec(0, 0, 0, 0, 0)


class Landing:
    """One request that this destination rank has opened.

    Invariant: ends once; once it has ended no byte of it is applied any more.
    """

    __slots__ = (
        "attempt",
        "deaf",
        "epochs",
        "finding",
        "grant",
        "outcome",
        "pages",
        "pair",
        "request",
        "sealed",
        "shares",
        "state",
        "until",
    )

    def __init__(
        self, request: str, attempt: int, pair: PairLinks, pages: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Begin asked for."""
        self.request = request
        self.attempt = attempt
        self.pair = pair
        self.epochs: Epochs = pair.epochs
        self.pages = pages
        self.state = LandingState.ASKED
        self.grant: Grant | None = None
        self.sealed = b""
        self.until = 0
        self.shares: dict[int, Share] = {}
        self.finding: Finding | None = None
        self.outcome = ""
        self.deaf = False

    @property
    def transfer(self) -> int:
        """Its transfer id; 0 before the grant."""
        return self.grant.transfer if self.grant else 0

    def become(self, to: LandingState) -> None:
        """Change state as the table allows."""
        if to not in LANDING_TABLE[self.state]:
            msg = f"landing request {self.request} may not go from {self.state} to {to}"
            raise RuntimeError(msg)
        self.state = to


class Ended:
    """This rank has ended a transfer and has to say so to the daemon and to all contacts."""

    __slots__ = ("finding", "landing", "outcome")

    def __init__(self, landing: Landing, outcome: str, why: Finding | None) -> None:
        """``outcome`` is delivered or failed."""
        self.landing = landing
        self.outcome = outcome
        self.finding = why


class LandingTable:
    """All pages that belong to transfers on a destination rank.

    Invariant: no page belongs to two transfers; no chunk is applied unless its transfer is open
    and the chunk lies within the plan and the request's pages.
    """

    def __init__(self, pools: Mapping[str, int]) -> None:
        """Start empty; ``pools`` gives the pages of each group's pool."""
        self.chunk_bytes = CHUNK_BYTES
        """What a chunk aims at, the same on both ends."""
        self._pools = pools
        self._owner: dict[tuple[str, int], Landing] = {}
        self.landings: dict[tuple[Epochs, str, int], Landing] = {}
        self.by_transfer: dict[int, Landing] = {}
        self.events: list[AgentEvent] = []
        self.ended: list[Ended] = []
        self.drains: list[tuple[Landing, int]] = []
        """(landing, source rank) to be asked to drain."""

    def ask(
        self, request: str, attempt: int, pair: PairLinks, pages: Mapping[str, Sequence[int]]
    ) -> Landing | Finding:
        """Take pages for a request, or say why not: pages_invalid, range_busy."""
        held = {name: tuple(listed) for name, listed in pages.items()}
        key = (pair.epochs, request, attempt)
        known = self.landings.get(key)
        if known is not None:
            if known.pages == held:
                return known
            sides = (Side("opened", str(known.pages)[:200]), Side("now", str(held)[:200]))
            return finding(Code.CONFLICTING_OPEN, f"request {request}", *sides)
        if wrong := self._check_pages(request, held):
            return wrong
        landing = Landing(request, attempt, pair, held)
        self.landings[key] = landing
        self._owner.update(dict.fromkeys(_places(held), landing))
        return landing

    def _check_pages(self, request: str, pages: Mapping[str, tuple[int, ...]]) -> Finding | None:
        for group, listed in pages.items():
            pool = self._pools.get(group)
            field = f"pages[{group}]"
            if pool is None:
                side = Side("this rank", f"no group {group!r}; it has {sorted(self._pools)}")
                return finding(Code.PAGES_INVALID, field, side)
            if wrong := check_pages(listed, pool):
                return finding(Code.PAGES_INVALID, field, Side(f"request {request}", wrong))
            busy = [page for page in listed if (group, page) in self._owner]
            if busy:
                holder = self._owner[group, busy[0]]
                return finding(
                    Code.RANGE_BUSY,
                    field,
                    Side(f"request {request}", f"pages {busy[:16]}"),
                    Side(f"request {holder.request}", f"holds them ({holder.state})"),
                )
        return None

    def denied(self, landing: Landing) -> None:
        """No grant came: the pages are free at once, since no source ever heard of them."""
        if landing.state is LandingState.ASKED:
            self._free(landing)

    def granted(self, landing: Landing, grant: Grant, sealed: bytes, until: int) -> list[int]:
        """Take a grant, or a renewed one; return the source ranks to present it to."""
        if landing.state is not LandingState.ASKED and until <= landing.until:
            return []  # the grant again, or an older one
        landing.until = max(landing.until, until)
        landing.sealed = sealed
        if landing.state is LandingState.OPEN:
            shares = landing.shares.items()
            return [rank for rank, share in shares if not (share.done or share.drained)]
        if landing.state is not LandingState.ASKED:
            return []
        landing.grant = grant
        landing.become(LandingState.OPEN)
        self.by_transfer[grant.transfer] = landing
        counts = {name: len(listed) for name, listed in landing.pages.items()}
        group = landing.pair.in_group(grant.source_dp)
        landing.shares = {
            rank: Share(link, counts, self.chunk_bytes)
            for rank, link in group.items()
            if link.is_data
        }
        if not landing.shares:
            self._arrive(landing)  # nothing is owed to this rank
        return list(landing.shares)

    # --- what sources send ----------------------------------------------------------------

    def place(
        self, epochs: Epochs, rank: int, chunk: Chunk
    ) -> tuple[Slice, tuple[int, ...]] | None:
        """Judge a chunk before its bytes are read; None means: drop them.

        Returns:
            The slice it belongs to and the request's pages. A chunk that is not the one of its
            number in the cut fails the transfer; one without data has nothing to be placed.
        """
        landing, share = self._expecting(epochs, rank, chunk)
        if landing is None or share is None:
            return None
        sent = ChunkSpec(chunk.slice, chunk.layer, chunk.layers, chunk.first, chunk.pages)
        planned = share.expected(chunk.sequence)
        if sent == planned and chunk.total == share.total:
            if not share.specs:
                return None
            part = share.link.slices[sent.slice]
            return part, landing.pages[part.group]
        sides = (
            Side(f"{landing.pair.other} rank {rank}", f"{_words(sent)} of {chunk.total}"),
            Side("the plan", f"{_words(planned)} of {share.total}"),
        )
        self.fail(landing, finding(Code.TRANSPORT_FAILED, f"chunk {chunk.sequence}", *sides))
        return None

    def _expecting(
        self, epochs: Epochs, rank: int, chunk: Chunk
    ) -> tuple[Landing | None, Share | None]:
        """Return the open landing and the share that still lack a chunk of this number."""
        landing = self.by_transfer.get(chunk.transfer)
        if landing is None or landing.state is not LandingState.OPEN or landing.epochs != epochs:
            return None, None
        share = landing.shares.get(rank)
        if share is None or share.done or chunk.sequence in share.got:
            return None, None
        return landing, share

    def wrong_size(self, epochs: Epochs, rank: int, chunk: Chunk, got: int, expected: int) -> None:
        """A data frame has another length than its chunk gives: the transfer fails."""
        landing, _ = self._expecting(epochs, rank, chunk)
        if landing is not None:
            sides = (
                Side(f"{landing.pair.other} rank {rank}", f"{got} bytes"),
                Side("the plan", f"{expected} bytes"),
            )
            self.fail(landing, finding(Code.TRANSPORT_FAILED, f"chunk {chunk.sequence}", *sides))

    def took(self, epochs: Epochs, rank: int, chunk: Chunk) -> None:
        """Note a chunk that was placed and whose bytes are applied (or that has none)."""
        landing, share = self._expecting(epochs, rank, chunk)
        if landing is None or share is None:
            return
        share.got.add(chunk.sequence)
        if len(share.got) < share.total:
            return
        share.done = True
        if all(each.done for each in landing.shares.values()):
            self._arrive(landing)

    def _arrive(self, landing: Landing) -> None:
        landing.become(LandingState.ARRIVED)
        self.events.append(Arrived(landing.request, landing.transfer))
        self.ended.append(Ended(landing, "delivered", None))
        self._settle(landing)

    def source_failed(self, epochs: Epochs, rank: int, transfer: int, why: Finding) -> None:
        """A source cannot send its share, or refused the presentation."""
        landing = self.by_transfer.get(transfer)
        if landing is not None and landing.epochs == epochs and rank in landing.shares:
            landing.shares[rank].drained = True
            self.fail(landing, why)

    def source_lost(self, epochs: Epochs, rank: int, why: str) -> None:
        """A link is gone: what is incomplete of it fails, what is complete stays delivered."""
        for landing in list(self.by_transfer.values()):
            share = landing.shares.get(rank) if landing.epochs == epochs else None
            if share is None:
                continue
            share.drained = True  # this transport's bytes are applied here, so none can follow
            if landing.state is LandingState.OPEN and not share.done:
                side = Side(f"{landing.pair.other} rank {rank}", why)
                self.fail(landing, finding(Code.SOURCE_LOST, f"request {landing.request}", side))
            self._settle(landing)

    def drained(self, epochs: Epochs, rank: int, transfer: int) -> None:
        """A source says that nothing of the transfer is under way."""
        landing = self.by_transfer.get(transfer)
        if landing is not None and landing.epochs == epochs and rank in landing.shares:
            landing.shares[rank].drained = True
            self._settle(landing)

    # --- ends -----------------------------------------------------------------------------

    def fail(self, landing: Landing, why: Finding) -> None:
        """End a landing failed; its pages stay its own until its sources have drained."""
        if landing.state is not LandingState.OPEN:
            return
        landing.become(LandingState.FAILED)
        landing.finding = why
        self.ended.append(Ended(landing, "failed", why))
        self._drain(landing)

    def aborting(self, transfer: int, why: Finding) -> None:
        """The daemon is aborting a transfer."""
        landing = self.by_transfer.get(transfer)
        if landing is not None:
            self.fail(landing, why)

    def outcome(self, item: OutcomeItem) -> None:
        """Take the daemon's outcome; a landing still open has nothing left to say."""
        landing = self.by_transfer.get(item.transfer)
        if landing is None or landing.outcome:
            return
        landing.outcome = item.outcome
        self.events.append(OutcomeEvent(landing.request, item.transfer, item.outcome, item.finding))
        if landing.state is LandingState.OPEN:
            landing.become(LandingState.FAILED)
            landing.finding = item.finding
            self._drain(landing)
        elif landing.state is LandingState.DRAINED:
            del self.by_transfer[item.transfer]

    def deafen(self) -> None:
        """Note that the session which would hear of these outcomes is gone."""
        for landing in self.by_transfer.values():
            landing.deaf = True

    def holds(self, epochs: Epochs) -> bool:
        """Whether a request of this pair still has its pages."""
        return any(landing.epochs == epochs for landing in self.landings.values())

    def void(self) -> None:
        """Another daemon or clock: end what was granted before, which nobody will tell of.

        The caller has hung up on the sources, so nothing can follow; ``until`` counts on a clock
        that is gone and must not be compared with another.
        """
        for landing in list(self.by_transfer.values()):
            why = landing.finding or finding(
                Code.EXPIRED,
                f"request {landing.request}",
                Side("granted by", "another instance or clock of the daemon"),
            )
            self._end_unheard(landing, why)

    def _end_unheard(self, landing: Landing, why: Finding) -> None:
        """End a landing for good: the engine hears its outcome, if it has not, from here."""
        if not landing.outcome:
            landing.outcome = "expired"
            self.events.append(OutcomeEvent(landing.request, landing.transfer, "expired", why))
        self._give_back(landing, why)
        self.by_transfer.pop(landing.transfer, None)

    def _give_back(self, landing: Landing, why: Finding) -> None:
        self.fail(landing, why)
        for share in landing.shares.values():
            share.drained = True
        self._settle(landing)

    def _drain(self, landing: Landing) -> None:
        for rank, share in landing.shares.items():
            if not share.done and not share.drained:
                self.drains.append((landing, rank))
        self._settle(landing)

    def _settle(self, landing: Landing) -> None:
        if landing.state not in {LandingState.ARRIVED, LandingState.FAILED}:
            return
        if all(share.done or share.drained for share in landing.shares.values()):
            self._free(landing)

    def _free(self, landing: Landing) -> None:
        landing.become(LandingState.DRAINED)
        for place in _places(landing.pages):
            self._owner.pop(place, None)
        self.landings.pop((landing.epochs, landing.request, landing.attempt), None)
        if landing.outcome:
            self.by_transfer.pop(landing.transfer, None)

    # --- time -----------------------------------------------------------------------------

    def tick(self, lower: int) -> None:
        """Free what no source may write any more: ``lower`` (tick, ms) is past the grant's end.

        The daemon's outcome may come later. If the session that would have heard it is gone,
        nobody will tell it any more, and the engine must not wait for ever (case B22).
        """
        for landing in list(self.by_transfer.values()):
            if landing.grant is None or lower <= landing.until:
                continue
            why = landing.finding or _expired(landing)
            if landing.deaf or landing.outcome:
                self._end_unheard(landing, why)
            else:
                self._give_back(landing, why)

    def next_deadline(self) -> int | None:
        """Return the earliest tick (ms) at which a grant has certainly ended."""
        times = [
            landing.until
            for landing in self.by_transfer.values()
            if landing.deaf or landing.state is not LandingState.DRAINED
        ]
        return min(times, default=None)


def _expired(landing: Landing) -> Finding:
    side = Side("arrived", f"{sum(share.done for share in landing.shares.values())} shares")
    total = Side("sources", str(len(landing.shares)))
    return finding(Code.EXPIRED, f"request {landing.request}", side, total)


def _words(spec: ChunkSpec | None) -> str:
    if spec is None:
        return "no such chunk"
    layers, pages = f"{spec.layer}+{spec.layers}", f"{spec.first}+{spec.pages}"
    return f"slice {spec.slice}, layers {layers}, pages {pages}"


def check_pages(pages: Sequence[int], pool: int) -> str:
    """Return what is wrong with a list of page indices, or nothing."""
    if len(pages) > MAX_PAGES_PER_REQUEST:
        return f"{len(pages)} pages; allowed are {MAX_PAGES_PER_REQUEST}"
    outside = [page for page in pages if not 0 <= page < pool]
    if outside:
        return f"page {outside[0]} is outside the pool of {pool} pages (0 to {pool - 1})"
    if len(set(pages)) != len(pages):
        twice = next(page for page, times in Counter(pages).items() if times > 1)
        return f"page {twice} stands more than once"
    return ""


def _places(pages: Mapping[str, tuple[int, ...]]) -> list[tuple[str, int]]:
    return [(group, page) for group, listed in pages.items() for page in listed]
