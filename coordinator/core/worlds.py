"""Worlds: rounds that form and never mix, sealing under a new epoch, and what breaks a seal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

from rankgate.coordinator.core.effects import Persist, Send
from rankgate.coordinator.core.judging import shape_of
from rankgate.coordinator.core.rounds import Round, World, forming_of, rank_missing, said
from rankgate.coordinator.core.rules.agreement import (
    check_order,
)
from rankgate.coordinator.core.sessions import Session, Sessions
from rankgate.coordinator.core.settings import Durable, SealedRecord, Settings
from rankgate.coordinator.core.tables import WORLD_TABLE, RankState, WorldState, change
from rankgate.coordinator.core.turn import Turn
from rankgate.proto.codes import Code
from rankgate.proto.digests import digest_of
from rankgate.proto.findings import Finding, Side, finding, has_error, ranks_text
from rankgate.proto.messages import Probe, WorldSealed

_ASKED = 16
"""Members of an older round that are asked whether they live; the first answer counts."""

_MOST_TOLD = 8
"""Losses named in one message."""

_QUIET_MS = 100
"""A round's members hear of a lost rank at once, and of further ones at most this often."""

_MAX_WORLDS = 4096
"""World names remembered; beyond it those without any rank are forgotten."""


class Worlds:
    """All worlds. Sealing and breaking are the only ways an epoch begins and ends.

    Invariant: epochs only ever grow, over all worlds and daemon starts, and are durable before
    anyone hears of them.
    """

    def __init__(
        self, turn: Turn, sessions: Sessions, settings: Settings, durable: Durable
    ) -> None:
        """Start with what the store holds: the epoch, and worlds that may be confirmed."""
        self._turn = turn
        self._sessions = sessions
        self._settings = settings
        self._epoch = durable.epoch
        self._unconfirmed = {record.world: record for record in durable.worlds}
        if self._unconfirmed:
            turn.deadlines.at(turn.now + settings.stall, self._forget_unconfirmed)
        self._probes: dict[str, list[Callable[[bool], None]]] = {}
        self.by_name: dict[str, World] = {}
        self.on_sealed: Callable[[World], None] = _unset
        self.on_broken: Callable[[World, Finding, list[Session], list[Session]], None] = _unset
        """(world, why, members and lost ranks to tell, ranks that are lost)"""
        self.on_forgotten: Callable[[World], None] = _unset
        self.partners: Callable[[World], list[Session]] = _no_partners

    # --- a rank comes ---------------------------------------------------------------------

    def admit(self, session: Session) -> Finding | None:
        """Count a rank on its first heartbeat, or return why not."""
        world = self.by_name.get(session.world) or self._add(session.world)
        forming = world.rounds.get(session.round)
        if forming is None:
            forming = world.rounds[session.round] = Round(session.round, self._turn.now)
            self._turn.deadlines.at(
                self._turn.now + self._settings.form_grace, lambda: self._grace(world, forming)
            )
        other = forming.members.get(session.rank)
        if other is not None:
            return self.refuse_duplicate(session, other)
        if world.sealed is forming:
            return self._refuse_extra(world, forming, session)
        self._sessions.start_counting(session)
        forming.add(session)
        if world.sealed is None:
            world.role, world.group = session.descriptor.role, session.descriptor.group
        self._turn.tell(
            f"world:{world.name}",
            "rank_counted",
            world=world.name,
            rank=session.rank,
            have=len(forming.members),
        )
        self._consider(world, forming)
        return None

    def _add(self, name: str) -> World:
        if len(self.by_name) >= _MAX_WORLDS:
            empty = [world for world in self.by_name.values() if not world.rounds]
            for world in empty[: len(empty) // 2 + 1]:
                del self.by_name[world.name]
                self.on_forgotten(world)
        world = self.by_name[name] = World(name, self._turn.now)
        return world

    def refuse_duplicate(self, later: Session, earlier: Session) -> Finding:
        """Return the finding that two live processes claim one rank (RG105), and tell the round."""
        sides = [
            Side(
                f"{who} process {session.incarnation.hex()[:8]} on {session.host}",
                f"rank {session.rank}",
            )
            for who, session in (("earlier", earlier), ("later", later))
        ]
        found = finding(Code.DUPLICATE_RANK, "rank", *sides)
        self._turn.refuse(f"world {later.world}", found)
        world = self.by_name[earlier.world]
        self._tell(world, world.rounds[earlier.round], [found])
        return found

    def _refuse_extra(self, world: World, sealed: Round, extra: Session) -> Finding:
        """Return the finding that a rank is beyond its sealed round's size, and tell the round."""
        found = finding(
            Code.RANKS_DISAGREE,
            "world_size",
            Side(f"{world.name} {ranks_text(sealed.members)}", str(sealed.size)),
            Side(f"{world.name} rank {extra.rank}", str(extra.descriptor.world_size)),
        )
        self._refuse(world, [found])
        self._tell(world, sealed, [found])
        return found

    def _consider(self, world: World, forming: Round) -> None:
        """Judge a round's agreement; seal it when it is complete and agrees."""
        complete = len(forming.members) == forming.size
        forming.findings = forming.check()
        if forming.overdue and not complete:
            forming.findings.append(rank_missing(world, forming))
        found = said(forming.findings)
        # Told when something new clashes and when the set is complete, not at every rank's coming.
        if found != forming.told or (found and complete):
            forming.told = found
            self._refuse(world, forming.findings)
            self._tell(world, forming)
        if found or not complete or not self._all_live(forming):
            return
        if world.sealed is None:
            self._seal(world, forming)
        else:
            self.probe(world, lambda alive: self._after_probe(world, forming, alive=alive))

    def _all_live(self, forming: Round) -> bool:
        return all(session.state is RankState.LIVE for session in forming.members.values())

    # --- an older round -------------------------------------------------------------------

    def holder(self, name: str, token: bytes) -> World | None:
        """Return the world if another round than ``token``'s is sealed under this name."""
        world = self.by_name.get(name)
        if world is None or world.sealed is None or world.sealed.token == token:
            return None
        return world

    def probe(self, world: World, then: Callable[[bool], None]) -> None:
        """Ask the sealed members whether any lives; ``then`` hears the answer within ``probe``."""
        waiting = self._probes.get(world.name)
        if waiting is not None:
            waiting.append(then)
            return
        if self._turn.now - world.alive_at < self._settings.probe:
            then(True)
            return
        asked = [peer for session in world.members() if (peer := session.peer) is not None][:_ASKED]
        waiting = self._probes[world.name] = [then]
        if not asked:
            self._resolve(world, alive=False)
            return
        for peer in asked:
            self._turn.effects.append(Send(peer, 0, Probe()))
        self._turn.deadlines.at(
            self._turn.now + self._settings.probe, lambda: self._probe_over(world, waiting)
        )

    def _probe_over(self, world: World, waiting: list[Callable[[bool], None]]) -> None:
        if self._probes.get(world.name) is waiting:  # not answered, and no later probe by now
            self._resolve(world, alive=False)

    def answered(self, session: Session) -> None:
        """A member of a sealed round lives."""
        world = self.by_name.get(session.world)
        if world is not None and world.sealed is not None and world.sealed.token == session.round:
            world.alive_at = self._turn.now
            self._resolve(world, alive=True)

    def _resolve(self, world: World, *, alive: bool) -> None:
        waiting = self._probes.pop(world.name, [])
        if waiting and not alive and world.sealed is not None:
            side = Side(f"older round {world.sealed.token.hex()[:8]}", "no answer to a probe")
            found = finding(Code.WORLD_BROKEN, f"world {world.name}", side)
            self._break(world, world.sealed, found, void=True)
        for then in waiting:
            then(alive)

    def _after_probe(self, world: World, forming: Round, *, alive: bool) -> None:
        if alive:  # else breaking the older round has considered this one
            forming.findings = [self.in_use(world, forming)]
            forming.told = said(forming.findings)
            self._tell(world, forming)

    def in_use(self, world: World, newcomer: Round | None, host: str = "") -> Finding:
        """Return the finding that another live round holds the name (RG108)."""
        older = ", ".join(sorted({s.host for s in world.members()}))
        if newcomer is not None:
            hosts = {s.host for s in newcomer.members.values()}
            host = ", ".join(sorted(hosts))
        found = finding(
            Code.WORLD_IN_USE,
            f"world {world.name}",
            Side("older round", f"on {older}, epoch {world.epoch}"),
            Side("newcomer", f"on {host}"),
        )
        self._turn.refuse(f"world {world.name}", found)
        return found

    # --- sealing and breaking -------------------------------------------------------------

    def _seal(self, world: World, forming: Round) -> None:
        members = [forming.members[rank] for rank in range(forming.size)]
        forming.members = dict(enumerate(members))
        forming.told = set()
        described = {session.rank: session.descriptor for session in members}
        forming.findings = list(check_order(described))
        shape = shape_of(described)
        world.state = change(WORLD_TABLE, world.state, WorldState.SEALED)
        world.since = self._turn.now
        world.sealed = forming
        world.size = forming.size
        world.shape = shape
        world.role, world.group = shape.role, members[0].descriptor.group
        world.unfit = 0
        world.broken_by = None
        world.receive_count = shape.layout.tp * shape.layout.cp
        world.digest = digest_of([world.name, shape.digest, [s.incarnation for s in members]])
        world.epoch = self._mint(world, forming, members)
        self._turn.tell(
            f"world:{world.name}",
            "world_sealed",
            world=world.name,
            epoch=world.epoch,
            size=forming.size,
            receive_count=world.receive_count,
        )
        sealed = WorldSealed(
            world=world.name,
            epoch=world.epoch,
            size=forming.size,
            receive_count=world.receive_count,
            digest=world.digest,
        )
        for session in members:
            self._sessions.push(session, sealed)
        self.on_sealed(world)

    def _mint(self, world: World, forming: Round, members: list[Session]) -> int:
        """Return a new epoch, or the durable one if just this set is confirmed after a restart."""
        record = self._unconfirmed.pop(world.name, None)
        incarnations = [session.incarnation for session in members]
        if (
            record is not None
            and (record.round, record.digest) == (forming.token, world.digest)
            and record.incarnations == incarnations
        ):
            return record.epoch
        self._epoch += 1
        sealed = SealedRecord(
            world=world.name,
            epoch=self._epoch,
            round=forming.token,
            digest=world.digest,
            incarnations=incarnations,
        )
        self._turn.effects.append(Persist(self._epoch, sealed))
        return self._epoch

    def gone(self, session: Session) -> None:
        """Take a lost rank out of its round; a sealed round is broken by it."""
        world = self.by_name.get(session.world)
        left = world.rounds.get(session.round) if world else None
        if world is None or left is None or left.members.get(session.rank) is not session:
            return
        side = Side(session.who, f"gone: {session.why}")
        found = finding(Code.WORLD_BROKEN, f"world {world.name}", side)
        left.remove(session)
        if world.sealed is left:
            self._break(world, left, found, lost=[session])
        if not left.members:
            world.rounds.pop(left.token, None)
            if session.left and not world.rounds:
                self._forget(world)
            else:
                self._forget_later(world)
            return
        self._consider(world, left)
        self._tell_loss(world, left, found)

    def _forget_unconfirmed(self) -> None:
        """Worlds that did not come back after a restart need not be kept."""
        for name in self._unconfirmed:
            self._turn.effects.append(Persist(self._epoch, removed=name))
        self._unconfirmed.clear()

    def _forget_later(self, world: World) -> None:
        """A world that crashed is shown for ``stall``; by then it is back, or has been replaced."""

        def look() -> None:
            if not world.rounds and self.by_name.get(world.name) is world:
                self._forget(world)

        self._turn.deadlines.at(self._turn.now + self._settings.stall, look)

    def _forget(self, world: World) -> None:
        """Drop a world without any rank: it left on purpose, or crashed and did not come back."""
        del self.by_name[world.name]
        self._unconfirmed.pop(world.name, None)
        self._turn.effects.append(Persist(self._epoch, removed=world.name))
        self._turn.tell(f"world:{world.name}", "world_left", world=world.name)
        self.on_forgotten(world)

    def _break(
        self,
        world: World,
        broken: Round,
        found: Finding,
        *,
        lost: list[Session] | None = None,
        void: bool = False,
    ) -> None:
        """End the seal of ``broken``, the sealed round; ``void`` ends its sessions as well."""
        world.state = change(WORLD_TABLE, world.state, WorldState.FORMING)
        world.since = self._turn.now
        world.sealed = None
        world.broken_by = found
        broken.began = self._turn.now
        broken.overdue = False
        broken.findings = []
        on_purpose = bool(lost) and all(session.left for session in lost or ())
        if not on_purpose:
            self._refuse(world, [found])
        self._turn.tell(
            f"world:{world.name}",
            "world_broken",
            "info" if on_purpose else "warning",
            world=world.name,
            epoch=world.epoch,
            why=found.message,
        )
        self._turn.effects.append(Persist(self._epoch, removed=world.name))
        members = list(broken.members.values())
        self.on_broken(world, found, [*(lost or []), *members], members if void else lost or [])
        if void:
            world.rounds.pop(broken.token, None)
            broken.members = {}
            for session in members:
                self._sessions.lose(session, "a newer round took the world's name", cut_off=False)
        else:
            self._turn.deadlines.at(
                self._turn.now + self._settings.form_grace, lambda: self._grace(world, broken)
            )
        for other in list(world.rounds.values()):
            if other is not broken and world.sealed is None:
                self._consider(world, other)
        for then in self._probes.pop(world.name, []):
            then(False)

    def fitness(self, session: Session, change_by: int) -> None:
        """Count members of a sealed round that are not live: no new grants meanwhile."""
        world = self.by_name[session.world]
        held = world.rounds[session.round]  # a rank that counts stands in its round
        if world.sealed is held:
            world.unfit += change_by
        elif change_by < 0:
            self._consider(world, held)

    # --- telling --------------------------------------------------------------------------

    def _grace(self, world: World, forming: Round) -> None:
        if world.sealed is forming or world.rounds.get(forming.token) is not forming:
            return
        if self._turn.now - forming.began < self._settings.form_grace or forming.overdue:
            return
        forming.overdue = True
        if len(forming.members) == forming.size:
            self._tell(world, forming)  # all are there, but not all alive
        else:
            self._consider(world, forming)

    def _refuse(self, world: World, findings: list[Finding]) -> None:
        name = world.name
        self._turn.refuse_all(
            f"world {name}", findings, subject=f"world:{name}", event="world_refused", world=name
        )

    def _tell(self, world: World, forming: Round, extra: list[Finding] | None = None) -> None:
        """Tell a round's members, and would-be partners when it is overdue or clashes."""
        message = forming_of(world, forming, extra or [])
        listeners: Iterator[Session] = chain(forming.members.values())
        if forming.overdue or has_error(forming.findings):
            listeners = chain(forming.members.values(), self.partners(world))
        for session in list(listeners):
            self._sessions.push(session, message)

    def _tell_loss(self, world: World, left: Round, found: Finding) -> None:
        """Tell of a lost rank; a job that ends loses them all, which must not cost their square."""
        left.untold.append(found)
        if self._turn.now >= left.quiet_until:
            self._tell_losses(world, left)
        elif len(left.untold) == 1:
            self._turn.deadlines.at(left.quiet_until, lambda: self._tell_losses(world, left))

    def _tell_losses(self, world: World, left: Round) -> None:
        untold, left.untold = left.untold, []
        left.quiet_until = self._turn.now + _QUIET_MS
        if untold and world.sealed is not left and world.rounds.get(left.token) is left:
            self._tell(world, left, untold[-_MOST_TOLD:])


def _unset(*_args: object) -> None:
    msg = "a part of the core is not wired"
    raise AssertionError(msg)


def _no_partners(_world: World) -> list[Session]:
    return []
