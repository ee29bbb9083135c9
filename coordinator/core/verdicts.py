"""What a judgement is made from and what comes out, without names, epochs and addresses.

Both are cached by two shape digests, so N equal ranks and every data-parallel group cost one
judgement; who is who is filled in afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from msgspec import Struct

from rankgate.proto.codes import Code
from rankgate.proto.descriptor import KvGroup, Layout, Model, StateComponent
from rankgate.proto.findings import Finding, Side, finding
from rankgate.proto.messages import Slice

SideName = Literal["source", "destination"]


class RankShape(Struct, frozen=True):
    """The caches of one slot; ``pages`` of its groups is 1, since pool size never decides."""

    kv: tuple[KvGroup, ...]
    state: tuple[StateComponent, ...]

    def group(self, name: str) -> KvGroup | None:
        """Return the KV group with this tag, if the rank holds it."""
        return next((group for group in self.kv if group.name == name), None)


class WorldShape(Struct, frozen=True, kw_only=True):
    """One data-parallel group of a sealed world, by slot.

    Invariant: the world's ranks agree, and all its data-parallel groups are alike (RG107).
    """

    role: str
    layout: Layout
    profile: str
    model: Model
    capabilities: tuple[str, ...]
    transport: str
    ranks: tuple[RankShape, ...]
    digest: bytes

    def group_names(self) -> tuple[str, ...]:
        """Return the tags of all KV groups, in first-seen order."""
        return tuple(dict.fromkeys(group.name for rank in self.ranks for group in rank.kv))

    def holders(self, name: str) -> list[tuple[int, KvGroup]]:
        """Return (slot, group) of every slot that holds the KV group ``name``."""
        return [
            (slot, group) for slot, rank in enumerate(self.ranks) if (group := rank.group(name))
        ]


class Stand(Struct, frozen=True):
    """One value in a ruling: which side's slots hold it."""

    side: SideName
    slots: tuple[int, ...]
    value: str


class Ruling(Struct, frozen=True):
    """A finding of a pair before names are known."""

    code: Code
    field: str
    stands: tuple[Stand, ...]
    detail: str = ""

    def name(self, who: Callable[[SideName, tuple[int, ...]], str]) -> Finding:
        """Return the finding; ``who`` names the ranks of a side's slots."""
        sides = [Side(who(stand.side, stand.slots), stand.value) for stand in self.stands]
        return finding(self.code, self.field, *sides, detail=self.detail)


class PlannedContact(Struct, frozen=True):
    """One contact inside a scope, from ``source`` slot to ``destination`` slot.

    ``slices`` is empty for a notice, which moves no bytes but is counted.
    """

    source: int
    destination: int
    slices: tuple[Slice, ...]

    @property
    def kind(self) -> str:
        """``data`` or ``notice``."""
        return "data" if self.slices else "notice"


class Plan(Struct, frozen=True):
    """All contacts of a pair inside one scope, and the counts that follow from them alone.

    Invariant: ``receive_counts[s] == |{d: contact(s, d)}| >= 1`` and
    ``send_counts[d] == |{s: contact(s, d) is data}|``.
    """

    profile: str
    by_source: tuple[tuple[PlannedContact, ...], ...]
    """Contacts of each source slot, by destination slot."""
    by_destination: tuple[tuple[PlannedContact, ...], ...]
    """The same contacts, of each destination slot, by source slot."""
    receive_counts: tuple[int, ...]
    send_counts: tuple[int, ...]
    digest: bytes

    @property
    def contacts(self) -> list[PlannedContact]:
        """Every contact once, by source slot."""
        return [contact for contacts in self.by_source for contact in contacts]


class Judgement(Struct, frozen=True):
    """All rulings on a pair of shapes; a plan only when none of them refuses."""

    rulings: tuple[Ruling, ...]
    plan: Plan | None
