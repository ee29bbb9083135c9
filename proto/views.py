"""What operators are shown: the same structs on the wire, in ``-o json`` and in tables."""

from __future__ import annotations

from msgspec import Struct

from rankgate.proto.findings import Finding

VIEW_SCHEMA = 1
"""Version of the JSON that operators see; a field is never renamed or removed within one."""


class _Row(Struct, frozen=True, kw_only=True):
    """Base of all rows: every field is always written, so that scripts can rely on it."""


class WorldView(_Row, frozen=True, kw_only=True):
    """One world: its state, and what it waits for."""

    world: str
    role: str
    group: str
    state: str
    epoch: int
    size: int
    have: int
    missing: list[int]
    receive_count: int
    profile: str
    round: str
    """First 8 hex digits of the round token."""
    since_ms: int
    findings: list[Finding]


class RankView(_Row, frozen=True, kw_only=True):
    """One rank of one world."""

    world: str
    role: str
    rank: int
    state: str
    """``registering``, ``live``, ``stalled``, ``disconnected``, ``gone`` or ``missing``."""
    coordinates: str
    incarnation: str
    """First 8 hex digits."""
    host: str
    address: str
    engine: str
    heard_ms: int
    """Milliseconds since the daemon last heard from it."""
    unacked: int
    """Pushes not acknowledged yet."""
    staged: int
    staged_bytes: int
    landing: int


class PairCountView(_Row, frozen=True, kw_only=True):
    """One rank's counts in a pair."""

    side: str
    rank: int
    receive_count: int
    send_count: int
    linked: bool


class PairView(_Row, frozen=True, kw_only=True):
    """One pair of worlds: verdict, findings, counts."""

    source: str
    source_epoch: int
    destination: str
    destination_epoch: int
    state: str
    profile: str
    table_digest: str
    linked: int
    ranks: int
    waiting_for: list[str]
    findings: list[Finding]
    counts: list[PairCountView]
    """Left empty in ``status``."""
    transfers: dict[str, int]
    """Transfers by state, over the pair's life."""


class TransferView(_Row, frozen=True, kw_only=True):
    """One transfer: who has ended, who has not, and how long it has been waiting."""

    transfer: int
    request: str
    attempt: int
    source: str
    destination: str
    state: str
    ended: list[int]
    missing: list[int]
    age_ms: int
    left_ms: int
    finding: Finding | None


class RefusalView(_Row, frozen=True, kw_only=True):
    """One refusal the daemon gave or was told of, newest last; equal ones are counted."""

    about: str
    times: int
    ago_ms: int
    finding: Finding


class StatusView(_Row, frozen=True, kw_only=True):
    """The daemon at a glance."""

    version: str
    instance: str
    start: int
    uptime_ms: int
    endpoints: list[str]
    insecure: bool
    healthy: bool
    worlds: list[WorldView]
    pairs: list[PairView]
    transfers: dict[str, int]
    refusals: list[RefusalView]


class View(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answer to a Query: the asked view is set, or the finding that refuses it."""

    schema: int = VIEW_SCHEMA
    status: StatusView | None = None
    ranks: list[RankView] | None = None
    pairs: list[PairView] | None = None
    transfers: list[TransferView] | None = None
    story: list[str] | None = None
    finding: Finding | None = None
    next: int = 0
    """Where the rest of a long list begins: ask again with it as the offset; 0 is the end."""
