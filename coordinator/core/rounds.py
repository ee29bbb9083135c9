"""One world name and its rounds: who counts, whether they agree, who is missing."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rankgate.coordinator.core.rules.agreement import Trait, check_agreement, traits_of
from rankgate.coordinator.core.sessions import Session
from rankgate.coordinator.core.tables import WorldState
from rankgate.coordinator.core.verdicts import WorldShape
from rankgate.proto.codes import Code
from rankgate.proto.descriptor import Coordinates
from rankgate.proto.findings import Finding, Side, finding, ranks_text
from rankgate.proto.messages import WorldForming

_MOST_FINDINGS = 32
"""Findings told in one message; each is bounded, so it stays readable."""


class Round:
    """The counted ranks of one world that carry one round token.

    Invariant: at most one member a rank; members of two tokens never meet in one round.
    """

    def __init__(self, token: bytes, began: int) -> None:
        """Begin empty at ``began`` (ms)."""
        self.token = token
        self.began = began
        self.members: dict[int, Session] = {}
        self.findings: list[Finding] = []
        self.told: set[tuple[str, str, int]] = set()
        self.overdue = False
        self.quiet_until = 0
        self.untold: list[Finding] = []
        """Losses to be told with the next message, which is then due at ``quiet_until``."""
        self.size = 1
        self._traits: Counter[Trait] = Counter()
        self._places: Counter[Coordinates] = Counter()

    def add(self, session: Session) -> None:
        """Count a rank."""
        self.members[session.rank] = session
        self._traits.update(traits_of(session.descriptor))
        self._places[session.descriptor.coordinates] += 1
        self._resize()

    def remove(self, session: Session) -> None:
        """Take a rank out."""
        del self.members[session.rank]
        for trait in traits_of(session.descriptor):
            _take_one(self._traits, trait)
        _take_one(self._places, session.descriptor.coordinates)
        if self.members:
            self._resize()

    def _resize(self) -> None:
        sizes = {trait.value: times for trait, times in self._traits.items() if trait.of == "size"}
        self.size = max(sizes, key=lambda size: (sizes[size], size))

    def check(self) -> list[Finding]:
        """Return where the ranks contradict each other; cheap as long as none deviates."""
        alike = len({trait.of for trait in self._traits}) == len(self._traits)
        if alike and len(self._places) == len(self.members):
            return []
        return check_agreement({rank: s.descriptor for rank, s in self.members.items()})

    def missing(self) -> list[int]:
        """Return the ranks that do not count yet."""
        return [rank for rank in range(self.size) if rank not in self.members]


class World:
    """One world name, with its sealed round (if any) and the rounds that form.

    Invariant: ``sealed`` is one of ``rounds``; epoch, shape and receive_count belong to the last
    seal and change only with it.
    """

    def __init__(self, name: str, now: int) -> None:
        """Begin unsealed."""
        self.name = name
        self.state = WorldState.FORMING
        self.since = now
        self.rounds: dict[bytes, Round] = {}
        self.sealed: Round | None = None
        self.epoch = 0
        self.receive_count = 0
        self.shape: WorldShape | None = None
        self.digest = b""
        self.role = ""
        self.group = ""
        self.unfit = 0
        self.broken_by: Finding | None = None
        self.size = 0
        """Ranks of the last seal; what is missing when all of them are gone."""
        self.alive_at = -(1 << 40)
        """When a member last answered a probe (ms)."""

    def latest(self) -> Round | None:
        """Return the sealed round, else the youngest one that forms."""
        return self.sealed or max(self.rounds.values(), key=lambda r: r.began, default=None)

    def members(self) -> list[Session]:
        """Return the sealed members by rank; empty when the world is not sealed."""
        return [] if self.sealed is None else list(self.sealed.members.values())

    def ranks_of(self, slots: tuple[int, ...]) -> list[int]:
        """Return the ranks at these slots, over all data-parallel groups."""
        wanted = set(slots)
        return [session.rank for session in self.members() if session.slot in wanted]


def forming_of(world: World, forming: Round, extra: list[Finding]) -> WorldForming:
    """Return what is said of a world that is not sealed."""
    return WorldForming(
        world=world.name,
        have=len(forming.members),
        size=forming.size,
        missing=forming.missing()[:1024],
        overdue=forming.overdue,
        findings=[*forming.findings, *extra][:_MOST_FINDINGS],
    )


def _take_one(counter: Counter[Any], key: object) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]  # what nobody has any more


def said(findings: list[Finding]) -> set[tuple[str, str, int]]:
    """Return what makes findings new to their hearers: another field, or another value of it."""
    return {(found.code, found.field, len(found.sides)) for found in findings}


def rank_missing(world: World, forming: Round) -> Finding:
    """Return the finding that names the ranks a round still waits for (RG104)."""
    return finding(
        Code.RANK_MISSING,
        f"world {world.name}",
        Side("registered", f"{ranks_text(forming.members)} of {forming.size}"),
        Side("missing", ranks_text(forming.missing())),
    )
