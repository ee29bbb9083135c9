"""Operators' views of the core's state; reads everything, changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from rankgate.coordinator.core.pairs import Pair
from rankgate.coordinator.core.rounds import World
from rankgate.coordinator.core.sessions import Session
from rankgate.coordinator.core.settings import Identity
from rankgate.coordinator.core.tables import PairState, WorldState
from rankgate.coordinator.core.transfers import Transfer
from rankgate.coordinator.core.turn import Turn
from rankgate.proto import __version__
from rankgate.proto.codes import Code
from rankgate.proto.findings import Side, finding
from rankgate.proto.messages import Query
from rankgate.proto.views import (
    PairCountView,
    PairView,
    RankView,
    RefusalView,
    StatusView,
    TransferView,
    View,
    WorldView,
)

if TYPE_CHECKING:
    from rankgate.coordinator.core.machine import Coordinator

_PAGE_ROWS = 2048
"""Rows in one answer: a few hundred KB, well below what a message may hold."""

_LONGEST_TEXT = 128
_MOST_ROWS = 1000
_MOST_REFUSALS = 32


class Showing:
    """Answers operators' questions from the live state.

    Invariant: an answer never changes the state, and is bounded in rows.
    """

    def __init__(
        self,
        turn: Turn,
        identity: Identity,
        core: Coordinator,
        *,
        endpoints: Sequence[str],
        insecure: bool,
    ) -> None:
        """Remember when the daemon started and where it listens."""
        self._turn = turn
        self._identity = identity
        self._core = core
        self._began = turn.now
        self._endpoints = list(endpoints)
        self._insecure = insecure

    def answer(self, query: Query) -> View:
        """Return the asked view, or the finding that no such view exists."""
        match query.view:
            case "status":
                return View(status=self._status())
            case "ranks":
                rows, after = _page(self._ranks(), query.offset)
                return View(ranks=rows, next=after)
            case "pairs":
                pairs, after = _page(list(self._core.pairs.by_name.values()), query.offset, _size)
                return View(pairs=[self._pair(pair) for pair in pairs], next=after)
            case "transfers":
                transfers, after = _page(self._transfers(), query.offset, lambda _row: 32)
                return View(transfers=transfers, next=after)
            case "story":
                return View(story=self._story(query.subject))
        known = "status, ranks, pairs, transfers, story"
        side = Side("the query", repr(query.view))
        return View(finding=finding(Code.VALUE_INVALID, "view", side, detail=f"(known: {known})"))

    def _status(self) -> StatusView:
        worlds = [self._world(world) for world in self._core.worlds.by_name.values()]
        pairs = [self._pair(pair, counts=False) for pair in self._core.pairs.by_name.values()]
        now = self._turn.now
        refusals = self._turn.journal.refusals()[-_MOST_REFUSALS:]
        return StatusView(
            version=__version__,
            instance=self._identity.instance.hex()[:8],
            start=self._identity.start,
            uptime_ms=now - self._began,
            endpoints=self._endpoints,
            insecure=self._insecure,
            healthy=all(world.state == WorldState.SEALED for world in worlds)
            and all(not world.unfit for world in self._core.worlds.by_name.values())
            and all(pair.state == PairState.READY for pair in pairs),
            worlds=worlds,
            pairs=pairs,
            transfers=self._totals(),
            refusals=[
                RefusalView(about=r.about, times=r.times, ago_ms=now - r.last, finding=r.finding)
                for r in refusals
            ],
        )

    def _totals(self) -> dict[str, int]:
        totals = dict(self._core.transfers.totals)
        ended = sum(totals.get(name, 0) for name in ("delivered", "failed", "expired", "aborted"))
        totals["open"] = totals.get("granted", 0) - ended
        return totals

    def _world(self, world: World) -> WorldView:
        latest = world.latest()
        findings = list(latest.findings) if latest else []
        if world.broken_by is not None:
            findings.append(world.broken_by)
        return WorldView(
            world=world.name,
            role=world.role,
            group=world.group,
            state=world.state.value,
            epoch=world.epoch,
            size=latest.size if latest else world.size,
            have=len(latest.members) if latest else 0,
            missing=(latest.missing() if latest else list(range(world.size)))[:_MOST_ROWS],
            receive_count=world.receive_count if world.sealed else 0,
            profile=world.shape.profile if world.shape else "",
            round=latest.token.hex()[:8] if latest else "",
            since_ms=self._turn.now - world.since,
            findings=findings,
        )

    def _ranks(self) -> list[RankView]:
        rows = []
        for world in self._core.worlds.by_name.values():
            for held in world.rounds.values():
                rows += [self._rank(session) for _, session in sorted(held.members.items())]
                rows += [_missing(world, rank) for rank in held.missing()]
        return rows

    def _rank(self, session: Session) -> RankView:
        described = session.descriptor
        at = described.coordinates
        return RankView(
            world=described.world,
            role=described.role,
            rank=described.rank,
            state=session.state.value,
            coordinates=f"pp{at.pp} dp{at.dp} cp{at.cp} tp{at.tp}",
            incarnation=session.incarnation.hex()[:8],
            host=described.transport.host[:_LONGEST_TEXT],
            address=described.transport.address[:_LONGEST_TEXT],
            engine=f"{described.software.engine} {described.software.version}".strip(),
            heard_ms=self._core.sessions.silence(session),
            unacked=len(session.outbox),
            staged=session.staged,
            staged_bytes=session.staged_bytes,
            landing=session.landing,
        )

    def _pair(self, pair: Pair, *, counts: bool = True) -> PairView:
        plan = pair.plan
        return PairView(
            source=pair.source,
            source_epoch=pair.epochs[0],
            destination=pair.destination,
            destination_epoch=pair.epochs[1],
            state=pair.state.value,
            profile=pair.profile,
            table_digest=plan.digest.hex() if plan else "",
            linked=len(pair.linked),
            ranks=pair.ranks,
            waiting_for=self._core.pairs.waiting_for(pair),
            findings=pair.findings,
            counts=list(self._counts(pair)) if counts else [],
            transfers=dict(pair.transfers),
        )

    def _counts(self, pair: Pair) -> list[PairCountView]:
        plan = pair.plan
        if plan is None:
            return []
        rows = []
        for side, name in (("source", pair.source), ("destination", pair.destination)):
            for session in self._core.worlds.by_name[name].members():
                sending = side == "source"
                rows.append(
                    PairCountView(
                        side=side,
                        rank=session.rank,
                        receive_count=plan.receive_counts[session.slot] if sending else 0,
                        send_count=0 if sending else plan.send_counts[session.slot],
                        linked=(side, session.rank) in pair.linked,
                    )
                )
        return rows

    def _transfers(self) -> list[TransferView]:
        """Return open transfers first, oldest first, then the latest ended ones."""
        still = sorted(self._core.transfers.running(), key=lambda transfer: transfer.opened)
        ended = list(self._core.transfers.lately)
        rows = still[:_MOST_ROWS]
        return [
            self._transfer(t) for t in (*rows, *reversed(ended[-(_MOST_ROWS - len(rows) or 1) :]))
        ]

    def _transfer(self, transfer: Transfer) -> TransferView:
        return TransferView(
            transfer=transfer.id,
            request=transfer.item.request,
            attempt=transfer.item.attempt,
            source=transfer.pair.source,
            destination=transfer.pair.destination,
            state=transfer.state.value,
            ended=sorted(transfer.ended),
            missing=transfer.missing,
            age_ms=self._turn.now - transfer.opened,
            left_ms=max(0, transfer.until - self._turn.now),
            finding=transfer.finding,
        )

    def _story(self, subject: str) -> list[str]:
        now = self._turn.now
        return [f"-{(now - at) / 1000:.3f} s {line}" for at, line in self._core.story(subject)]


def _missing(world: World, rank: int) -> RankView:
    return RankView(
        world=world.name,
        role=world.role,
        rank=rank,
        state="missing",
        coordinates="",
        incarnation="",
        host="",
        address="",
        engine="",
        heard_ms=0,
        unacked=0,
        staged=0,
        staged_bytes=0,
        landing=0,
    )


Row = TypeVar("Row")


def _page(
    rows: Sequence[Row], offset: int, weight: Callable[[Row], int] = lambda _row: 1
) -> tuple[list[Row], int]:
    """Return the rows from ``offset`` on that fit a message, and where the rest begins (or 0)."""
    page: list[Row] = []
    left = _PAGE_ROWS
    for row in rows[offset:]:
        left -= weight(row)
        if left < 0 and page:
            return page, offset + len(page)
        page.append(row)
    return page, 0


def _size(pair: Pair) -> int:
    return 16 + pair.ranks
