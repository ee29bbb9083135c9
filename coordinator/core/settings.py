"""What the core is told at start: who the daemon is, its rules, and what it had made durable."""

from __future__ import annotations

from msgspec import Struct


class Settings(Struct, frozen=True, kw_only=True):
    """Timing rules and bounds; all times in ms. The daemon tells agents those they need.

    Invariant (checked by the configuration): ``ttl >= 3 * heartbeat`` (case C22) and no time is 0
    (case B22: 0 never means for ever).
    """

    heartbeat: int = 1000
    ttl: int = 5000
    """Without a heartbeat for this long a connected rank is stalled."""
    probe: int = 1000
    """How long a member of an older round has to answer a probe."""
    resume: int = 2000
    """How long a disconnected session may come back."""
    stall: int = 60_000
    """A rank stalled for this long is gone."""
    form_grace: int = 60_000
    """A world that is incomplete for this long is reported with its missing ranks."""
    grant_ttl: int = 60_000
    max_grant_ttl: int = 600_000
    tombstone: int = 5_000
    """An ended transfer is remembered until issued + ttl + this."""
    max_transfers: int = 1_000_000
    """Transfers and tombstones held; more opens are denied as busy."""
    max_unacked: int = 4096
    """Pushes a session may leave unacknowledged before it is cut off."""
    max_refusals: int = 256
    """Refusals kept for operators."""


class Identity(Struct, frozen=True, kw_only=True):
    """Who this daemon process is."""

    instance: bytes
    """16 random bytes of the database; everything of another instance is void."""
    start: int
    """How often this database was opened, from 1."""
    clock: bytes
    """16 bytes: the host's boot id."""
    master: bytes
    """32-byte key from which pair keys are derived; never shown."""


class SealedRecord(Struct, frozen=True, kw_only=True):
    """The durable part of a sealed world: enough to confirm it after a restart."""

    world: str
    epoch: int
    round: bytes
    digest: bytes
    incarnations: list[bytes]
    """By rank."""


class Durable(Struct, frozen=True, kw_only=True):
    """What the store holds; the core starts from it."""

    epoch: int = 0
    """Highest epoch ever minted."""
    worlds: list[SealedRecord] = []
