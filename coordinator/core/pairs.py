"""Pairs of sealed worlds: judged, told to every rank, linked, ready; re-judged on every seal."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import cast

from rankgate.coordinator.core.effects import Judge
from rankgate.coordinator.core.rounds import World, forming_of
from rankgate.coordinator.core.sessions import Session, Sessions
from rankgate.coordinator.core.settings import Identity
from rankgate.coordinator.core.tables import PAIR_TABLE, PairState, change
from rankgate.coordinator.core.turn import Turn
from rankgate.coordinator.core.verdicts import Judgement, Plan, SideName, WorldShape
from rankgate.coordinator.core.worlds import Worlds
from rankgate.proto.codes import Code
from rankgate.proto.findings import Finding, Side, clip, finding, has_error, ranks_text, world_ranks
from rankgate.proto.grants import pair_key
from rankgate.proto.messages import (
    Claim,
    Contact,
    Linked,
    PairBroken,
    PairReady,
    Peer,
    Verdict,
)

Epochs = tuple[int, int]

_DESTINATIONS: dict[str, frozenset[str]] = {"prefill": frozenset({"decode"})}
"""Which roles a role sends cache to; a role alone never implies that a pair exists."""

_MOST_FINDINGS = 32
"""Findings told in one message; each is bounded, so it stays readable."""

_MAX_JUDGEMENTS = 4096


class Pair:
    """One (source world, destination world).

    Invariant: ``plan`` is set exactly while the pair is linking or ready, and belongs to
    ``epochs``; ``key`` seals grants of these epochs only.
    """

    def __init__(self, source: str, destination: str) -> None:
        """Begin waiting for both worlds to be sealed."""
        self.source = source
        self.destination = destination
        self.state = PairState.WAITING
        self.epochs: Epochs = (0, 0)
        self.findings: list[Finding] = []
        self.plan: Plan | None = None
        self.key = b""
        self.linked: set[tuple[SideName, int]] = set()
        self.transfers: Counter[str] = Counter()
        self.profile = ""
        self.ranks = 0
        self.senders: dict[int, list[Session]] = {}
        """Source ranks by data-parallel group; shared and never changed, like receivers."""
        self.receivers: dict[int, dict[int, Session]] = {}
        """Destination ranks by data-parallel group; shared by all transfers, never changed."""

    @property
    def name(self) -> str:
        """``source:destination``, as operators write it."""
        return f"{self.source}:{self.destination}"


class Pairs:
    """All pairs, and the cache of judgements by two shape digests.

    Invariant: every rank of both worlds hears every verdict; no pair is ready before each of
    them has linked under the pair's current epochs and table digest.
    """

    def __init__(self, turn: Turn, identity: Identity, sessions: Sessions, worlds: Worlds) -> None:
        """Start without pairs."""
        self._turn = turn
        self._identity = identity
        self._sessions = sessions
        self._worlds = worlds
        self._judgements: OrderedDict[tuple[bytes, bytes], Judgement] = OrderedDict()
        self._asked: defaultdict[tuple[bytes, bytes], set[str]] = defaultdict(set)
        self.by_name: dict[tuple[str, str], Pair] = {}
        self.by_epochs: dict[Epochs, Pair] = {}
        self.on_broken: Callable[[Pair, Epochs, SideName | None], None] = _unset

    # --- judging --------------------------------------------------------------------------

    def world_sealed(self, world: World) -> None:
        """Judge the newly sealed world against every sealed world it may pair with."""
        for key in [key for key in self.by_name if world.name in key]:
            if not _may_pair(*(self._worlds.by_name[name] for name in key)):
                del self.by_name[key]  # it came back with another role or group
        for other in list(self._worlds.by_name.values()):
            for source, destination in ((world, other), (other, world)):
                if not _may_pair(source, destination):
                    continue
                key = (source.name, destination.name)
                pair = self.by_name.get(key)
                if pair is None:
                    pair = self.by_name[key] = Pair(*key)
                if source.sealed is not None and destination.sealed is not None:
                    self._ask(pair, source, destination)
                else:
                    self._tell_waiting(world, source if destination is world else destination)

    def _tell_waiting(self, world: World, partner: World) -> None:
        forming = partner.latest()
        if forming is not None and (forming.overdue or has_error(forming.findings)):
            message = forming_of(partner, forming, [])
            for session in world.members():
                self._sessions.push(session, message)

    def partners(self, world: World) -> list[Session]:
        """Return the ranks of sealed worlds that would pair with this one."""
        return [
            session
            for other in self._worlds.by_name.values()
            if _may_pair(world, other) or _may_pair(other, world)
            for session in other.members()
        ]

    def _ask(self, pair: Pair, source: World, destination: World) -> None:
        ours, theirs = cast("tuple[WorldShape, WorldShape]", (source.shape, destination.shape))
        key = (ours.digest, theirs.digest)
        judgement = self._judgements.get(key)
        if judgement is not None:
            self._judgements.move_to_end(key)
            self._deliver(pair, source, destination, judgement)
            return
        if not self._asked[key]:
            self._turn.effects.append(Judge(ours, theirs))
        self._asked[key].add(pair.name)

    def reached(self, key: tuple[bytes, bytes], judgement: Judgement) -> None:
        """Take a judgement and give the verdict on every pair that still has these shapes."""
        self._judgements[key] = judgement
        if len(self._judgements) > _MAX_JUDGEMENTS:
            self._judgements.popitem(last=False)
        for name in sorted(self._asked.pop(key, ())):
            source, destination = (self._worlds.by_name.get(part) for part in name.split(":"))
            if source is None or destination is None or not (source.sealed and destination.sealed):
                continue
            if not _may_pair(source, destination):
                continue
            shapes = (source.shape, destination.shape)
            if tuple(shape.digest if shape else b"" for shape in shapes) == key:
                pair = self.by_name[source.name, destination.name]
                self._deliver(pair, source, destination, judgement)

    def _deliver(self, pair: Pair, source: World, destination: World, judgement: Judgement) -> None:
        epochs = (source.epoch, destination.epoch)
        self._become_waiting(pair)
        pair.epochs = epochs
        self.by_epochs[epochs] = pair
        pair.linked.clear()
        pair.ranks = len(source.members()) + len(destination.members())
        pair.receivers, pair.senders = {}, {}
        for session in source.members():
            pair.senders.setdefault(session.dp, []).append(session)
        for session in destination.members():
            pair.receivers.setdefault(session.dp, {})[session.rank] = session
        pair.profile = source.shape.profile if source.shape else ""
        worlds = {"source": source, "destination": destination}

        def who(side: SideName, slots: tuple[int, ...]) -> str:
            world = worlds[side]
            return world_ranks(world.role, world.name, world.ranks_of(slots))

        pair.findings = [ruling.name(who) for ruling in judgement.rulings]
        pair.plan = judgement.plan
        if judgement.plan is None:
            self._reject(pair, pair.findings)
        else:
            pair.state = change(PAIR_TABLE, pair.state, PairState.LINKING)
            pair.key = pair_key(
                self._identity.master, source.name, epochs[0], destination.name, epochs[1]
            )
            self._turn.tell(
                f"pair:{pair.name}",
                "pair_accepted",
                pair=pair.name,
                epochs=f"{epochs[0]}:{epochs[1]}",
            )
        self._tell_verdict(pair, source, destination)

    def _tell_verdict(self, pair: Pair, source: World, destination: World) -> None:
        plan = pair.plan
        if plan is None:
            self._tell_refused(pair)
            return
        for sending, world, other in ((True, source, destination), (False, destination, source)):
            peers = _peers_by_slot(other)
            for session in world.members():
                verdict = self._verdict(pair, plan, session, peers, sending=sending)
                self._sessions.push(session, verdict)

    def _tell_refused(self, pair: Pair) -> None:
        refused = Verdict(
            source=pair.source,
            source_epoch=pair.epochs[0],
            destination=pair.destination,
            destination_epoch=pair.epochs[1],
            accepted=False,
            findings=pair.findings[:_MOST_FINDINGS],
            profile=pair.profile,
        )
        for session in self._everyone(pair):
            self._sessions.push(session, refused)

    def _verdict(
        self,
        pair: Pair,
        plan: Plan,
        session: Session,
        peers: dict[int, list[Peer]],
        *,
        sending: bool,
    ) -> Verdict:
        planned = (plan.by_source if sending else plan.by_destination)[session.slot]
        contacts = [
            Contact(
                slot=contact.destination if sending else contact.source,
                kind=contact.kind,
                slices=list(contact.slices),
            )
            for contact in planned
        ]
        return Verdict(
            source=pair.source,
            source_epoch=pair.epochs[0],
            destination=pair.destination,
            destination_epoch=pair.epochs[1],
            accepted=True,
            findings=pair.findings[:_MOST_FINDINGS],
            profile=pair.profile,
            table_digest=plan.digest,
            dp=session.dp,
            slot=session.slot,
            receive_count=plan.receive_counts[session.slot] if sending else 0,
            send_count=0 if sending else plan.send_counts[session.slot],
            contacts=contacts,
            peers=[peer for contact in contacts for peer in peers[contact.slot]],
            grant_key=pair.key if sending else b"",
        )

    # --- linking --------------------------------------------------------------------------

    def link(self, session: Session, message: Linked) -> list[Finding]:
        """Take a rank's report of its links; return why it is refused, or nothing."""
        epochs = (message.source_epoch, message.destination_epoch)
        pair = self.by_epochs.get(epochs)
        side = self._side(pair, session) if pair is not None else None
        if pair is None or side is None:
            return [self.stale(epochs, session)]
        if pair.plan is None:
            return pair.findings[:_MOST_FINDINGS]  # refused meanwhile; the verdict is on its way
        wrong = [
            found for claim in message.claims if (found := self.check_claim(pair, session, claim))
        ]
        if message.table_digest != pair.plan.digest:
            wrong.append(
                finding(
                    Code.METADATA_MISMATCH,
                    "table_digest",
                    Side(session.who, message.table_digest.hex()),
                    Side("the daemon", pair.plan.digest.hex()),
                )
            )
        said = [clip(found) for found in message.findings[:_MOST_FINDINGS]]
        if not wrong and said and all(found.retryable for found in said):
            self._relink(pair, said)
            return []
        wrong.extend(said)
        if wrong:
            self.refuse(pair, wrong)
            return wrong
        pair.linked.add((side, session.rank))
        if pair.state is PairState.LINKING and len(pair.linked) == pair.ranks:
            self._ready(pair)
        return []

    def _relink(self, pair: Pair, findings: list[Finding]) -> None:
        """A link could not be made or was lost: no grants until all have linked again.

        Everyone is told the verdict anew, which makes them report the links that stand and dial
        those that do not, so a fault that passes needs no operator.
        """
        if pair.state is PairState.READY:
            pair.state = change(PAIR_TABLE, pair.state, PairState.LINKING)
        self._refuse(pair, findings, "pair_link_lost")
        pair.linked.clear()
        source, destination = (self._worlds.by_name[n] for n in (pair.source, pair.destination))
        self._tell_verdict(pair, source, destination)

    def unlinked(self, pair: Pair) -> dict[str, list[int]]:
        """Return the ranks of both worlds that have not linked yet, by world name."""
        waiting = {}
        for side, name in (("source", pair.source), ("destination", pair.destination)):
            world = self._worlds.by_name.get(name)
            ranks = (
                [s.rank for s in world.members() if (side, s.rank) not in pair.linked]
                if world
                else []
            )
            if ranks:
                waiting[name] = ranks
        return waiting

    def check_claim(self, pair: Pair, session: Session, claim: Claim) -> Finding | None:
        """RG601: a count an engine computed itself must be the computed one (case B01)."""
        expected = self._expected(pair, session, claim.count)
        if expected is None:
            known = "known: world_receive_count, receive_count (sources), send_count (destinations)"
            side = Side(session.who, repr(claim.count))
            return finding(Code.VALUE_INVALID, "claims.count", side, detail=f"({known})")
        if expected == claim.value:
            return None
        return finding(
            Code.RECEIVE_COUNT_MISMATCH,
            claim.count,
            Side(session.who, str(claim.value)),
            Side("computed from the world sizes", str(expected)),
            detail=f"(pair {pair.name})",
        )

    def _expected(self, pair: Pair, session: Session, count: str) -> int | None:
        side, plan = self._side(pair, session), pair.plan
        destination = self._worlds.by_name.get(pair.destination)
        if count == "world_receive_count" and destination is not None:
            return destination.receive_count
        if plan is not None and (count, side) == ("receive_count", "source"):
            return plan.receive_counts[session.slot]
        if plan is not None and (count, side) == ("send_count", "destination"):
            return plan.send_counts[session.slot]
        return None

    def refuse(self, pair: Pair, findings: list[Finding]) -> None:
        """Reject a pair that was accepted: a rank's own numbers or links contradict the plan."""
        pair.findings = [*pair.findings, *findings]
        pair.plan = None
        self._reject(pair, findings)
        self.on_broken(pair, pair.epochs, None)
        self._tell_refused(pair)

    def _reject(self, pair: Pair, findings: list[Finding]) -> None:
        pair.state = change(PAIR_TABLE, pair.state, PairState.REJECTED)
        self._refuse(pair, findings, "pair_rejected")

    def _refuse(self, pair: Pair, findings: list[Finding], event: str) -> None:
        name = pair.name
        self._turn.refuse_all(
            f"pair {name}", findings, subject=f"pair:{name}", event=event, pair=name
        )

    def _ready(self, pair: Pair) -> None:
        pair.state = change(PAIR_TABLE, pair.state, PairState.READY)
        self._turn.tell(f"pair:{pair.name}", "pair_ready", pair=pair.name)
        ready = PairReady(
            source=pair.source,
            source_epoch=pair.epochs[0],
            destination=pair.destination,
            destination_epoch=pair.epochs[1],
        )
        for session in self._everyone(pair):
            self._sessions.push(session, ready)

    # --- breaking -------------------------------------------------------------------------

    def world_broken(
        self, world: World, found: Finding, told: list[Session], lost: list[Session]
    ) -> None:
        """End every pair of a world whose seal broke; both sides are told, lost ranks named."""
        lost_ranks = sorted(session.rank for session in lost)
        for pair in self.by_name.values():
            if world.name not in {pair.source, pair.destination} or pair.state is PairState.WAITING:
                continue
            epochs, is_source = pair.epochs, world.name == pair.source
            self._become_waiting(pair)
            self.on_broken(pair, epochs, "source" if is_source else "destination")
            broken = PairBroken(
                source=pair.source,
                source_epoch=epochs[0],
                destination=pair.destination,
                destination_epoch=epochs[1],
                findings=[found],
                source_lost=is_source,
                destination_lost=not is_source,
                lost_ranks=lost_ranks,
            )
            other = self._worlds.by_name.get(pair.destination if is_source else pair.source)
            for session in (*told, *(other.members() if other else ())):
                self._sessions.push(session, broken)

    def world_forgotten(self, world: World) -> None:
        """Drop the pairs of a world that left; all of them wait by now."""
        for key in [key for key in self.by_name if world.name in key]:
            del self.by_name[key]

    def _become_waiting(self, pair: Pair) -> None:
        self.by_epochs.pop(pair.epochs, None)
        if pair.state is not PairState.WAITING:
            pair.state = change(PAIR_TABLE, pair.state, PairState.WAITING)
        pair.plan = None
        pair.findings = []
        pair.linked.clear()

    # --- asking ---------------------------------------------------------------------------

    def stale(self, epochs: Epochs, session: Session) -> Finding:
        """Return the finding that these epochs are not current for this rank (RG904)."""
        current = [
            f"{pair.name} {pair.epochs[0]}:{pair.epochs[1]}"
            for pair in self.by_epochs.values()
            if session.world in {pair.source, pair.destination}
        ]
        return finding(
            Code.STALE_EPOCH,
            "epochs",
            Side(session.who, f"{epochs[0]}:{epochs[1]}"),
            Side("the daemon", ", ".join(current[:8]) or "no pair of this world"),
        )

    def not_ready(self, pair: Pair) -> Finding:
        """Return what the pair waits for (RG902)."""
        return finding(
            Code.PAIR_NOT_READY,
            f"pair {pair.name}",
            Side("the daemon", pair.state.value),
            detail="; ".join(self.waiting_for(pair)),
        )

    def waiting_for(self, pair: Pair) -> list[str]:
        """Return in words what stands between the pair and ready."""
        words = []
        for name in (pair.source, pair.destination):
            world = self._worlds.by_name.get(name)
            if world is None or world.sealed is None:
                forming = world.latest() if world else None
                if forming is None:
                    words.append(f"{name} is not sealed: none of its ranks is there")
                else:
                    missing = forming.missing()
                    gaps = f"missing {ranks_text(missing)}" if missing else "not all are live"
                    words.append(f"{name} is not sealed: {gaps}")
            elif world.unfit:
                bad = [s for s in world.members() if s.state.value != "live"]
                words.append(f"{name}: " + ", ".join(f"rank {s.rank} {s.state}" for s in bad[:8]))
        if pair.state is PairState.LINKING:
            words += [f"{name} {ranks_text(r)} to link" for name, r in self.unlinked(pair).items()]
        return words

    def _side(self, pair: Pair, session: Session) -> SideName | None:
        if self._is_member(pair.source, session):
            return "source"
        return "destination" if self._is_member(pair.destination, session) else None

    def _is_member(self, name: str, session: Session) -> bool:
        world = self._worlds.by_name.get(name)
        held = world.sealed if world else None
        return held is not None and held.members.get(session.rank) is session

    def _everyone(self, pair: Pair) -> Iterator[Session]:
        for name in (pair.source, pair.destination):
            yield from self._worlds.by_name[name].members()


def _may_pair(source: World, destination: World) -> bool:
    return (
        source.name != destination.name
        and destination.role in _DESTINATIONS.get(source.role, ())
        and source.group == destination.group
    )


def _peers_by_slot(world: World) -> dict[int, list[Peer]]:
    peers: dict[int, list[Peer]] = {}
    for session in world.members():
        peers.setdefault(session.slot, []).append(_peer(session))
    return peers


def _peer(session: Session) -> Peer:
    transport = session.descriptor.transport
    return Peer(
        rank=session.rank,
        dp=session.dp,
        slot=session.slot,
        incarnation=session.incarnation,
        address=transport.address,
        host=transport.host,
        metadata_digest=transport.metadata_digest,
    )


def _unset(*_args: object) -> None:
    msg = "a part of the core is not wired"
    raise AssertionError(msg)
