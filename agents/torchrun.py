"""What torchrun tells a rank, and how the ranks of one start agree on a round token.

The elastic agent's store lives on over restarts, so it still holds the keys of earlier rounds,
and nodes can disagree on the attempt's number. Hence one safe rule: every rank writes its
incarnation under its rank; rank 0 publishes {token, the N incarnations} once none of them stands
in the record before; a rank takes a token only from a record that names its own incarnation.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Protocol

import msgspec

from rankgate.agents.errors import SettingError
from rankgate.proto.findings import ranks_text
from rankgate.proto.limits import MAX_NAME

_POLL_SECONDS = 0.01
_POLL_LONGEST_SECONDS = 0.2
_UNUSABLE = frozenset({"", "none"})
_ID_BYTES = 16


class Store(Protocol):
    """The part of torch's Store that agreeing needs."""

    def set(self, key: str, value: str) -> None:
        """Write a key."""
        ...

    def get(self, key: str) -> bytes:
        """Return a key's value."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""
        ...


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where torchrun put this process, and whom it should talk to."""

    world: str
    rank: int
    world_size: int
    daemon: str
    """The daemon's endpoint."""
    master: tuple[str, int] | None
    """Address of torchrun's store; None when there is none."""
    round: bytes | None
    """The round token, if the environment gives it."""


class Record(msgspec.Struct, frozen=True):
    """What rank 0 publishes: the token of one round and the processes that it is for, by rank."""

    token: bytes
    incarnations: list[bytes]


def read_environment(
    env: Mapping[str, str], *, world: str | None = None, daemon: str | None = None
) -> Place:
    """Return this process' place.

    Args:
        env: the environment: RANK, WORLD_SIZE, TORCHELASTIC_RUN_ID, MASTER_ADDR, MASTER_PORT,
            RANKGATE_WORLD, RANKGATE_ROUND (32 hex digits), RANKGATE_DAEMON.
        world: a name that goes over RANKGATE_WORLD, which goes over torchrun's run id.
        daemon: an endpoint that goes over RANKGATE_DAEMON.

    Raises:
        SettingError: a value is missing or cannot work; the text says which and what to do.
    """
    rank, size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    if not 0 <= rank < size:
        raise SettingError(f"RANK={rank} is not below WORLD_SIZE={size}")
    endpoint = daemon or env.get("RANKGATE_DAEMON", "")
    if not endpoint:
        raise SettingError("no daemon: set RANKGATE_DAEMON to its endpoint, such as ipc:///…")
    return Place(
        world=_world(env, world),
        rank=rank,
        world_size=size,
        daemon=endpoint,
        master=_master(env),
        round=_round(env),
    )


def _number(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "")
    if not text.isdigit():
        raise SettingError(f"{name}={text!r} is no number; start the engine under torchrun")
    return int(text)


def _world(env: Mapping[str, str], given: str | None) -> str:
    name = given or env.get("RANKGATE_WORLD") or env.get("TORCHELASTIC_RUN_ID", "")
    if name.strip().lower() in _UNUSABLE:
        raise SettingError(
            f"the world has no usable name ({name!r}): every torchrun without an id is called"
            " 'none'; give torchrun --rdzv-id, or set RANKGATE_WORLD"
        )
    if len(name.encode()) > MAX_NAME:
        raise SettingError(f"the world's name {name!r} is longer than {MAX_NAME} bytes")
    return name


def _master(env: Mapping[str, str]) -> tuple[str, int] | None:
    host, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    return (host, int(port)) if host and port.isdigit() else None


def _round(env: Mapping[str, str]) -> bytes | None:
    text = env.get("RANKGATE_ROUND", "")
    if not text:
        return None
    try:
        token = bytes.fromhex(text)
    except ValueError:
        token = b""
    if len(token) != _ID_BYTES:
        raise SettingError(f"RANKGATE_ROUND={text!r} is not 32 hex digits")
    return token


def share_round(place: Place, incarnation: bytes, timeout: float) -> bytes:
    """Return the token that all ranks of this start share.

    Args:
        place: this process' place.
        incarnation: 16 random bytes of this process.
        timeout: seconds until it is given up.

    Raises:
        SettingError: no store, or ranks that did not write in time, each named.
    """
    if place.round is not None:
        return place.round
    if place.world_size == 1:
        return os.urandom(_ID_BYTES)
    if place.master is None:
        raise SettingError(
            "the ranks cannot share a round token: MASTER_ADDR and MASTER_PORT are not set;"
            " start them under torchrun, or set RANKGATE_ROUND to 32 hex digits"
        )
    deadline = time.monotonic() + timeout
    store = connect_store(place.master, timeout)
    return agree(
        store,
        place,
        incarnation,
        new_token=lambda: os.urandom(_ID_BYTES),
        pause=_pause(deadline),
    )


def connect_store(master: tuple[str, int], timeout: float) -> Store:
    """Return a client of torchrun's store; no process group is needed.

    Raises:
        SettingError: nothing answers at the address.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, port = master
    try:
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=max(timeout, 1.0)))
    except (RuntimeError, ValueError, OSError) as error:
        raise SettingError(f"torchrun's store at {host}:{port} does not answer: {error}") from error


def _pause(deadline: float) -> Callable[[], bool]:
    """Return a function that waits a little longer each time, and False when time is up."""
    wait = _POLL_SECONDS

    def pause() -> bool:
        nonlocal wait
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(wait, left))
        wait = min(wait * 2, _POLL_LONGEST_SECONDS)
        return True

    return pause


def agree(
    store: Store,
    place: Place,
    incarnation: bytes,
    *,
    new_token: Callable[[], bytes],
    pause: Callable[[], bool],
) -> bytes:
    """Return the round token by the safe rule of this module.

    Args:
        store: torchrun's store, with whatever earlier rounds left in it.
        place: world, rank and size of this process.
        incarnation: 16 random bytes of this process.
        new_token: makes a token; asked on rank 0 only.
        pause: waits a moment; False when time is up.

    Raises:
        SettingError: time is up; the text names the ranks that are missing.
    """
    keys = Keys(place.world)
    store.set(keys.rank(place.rank), incarnation.hex())
    if place.rank == 0:
        done = _publisher(store, place, keys, new_token())
    else:
        done = _taker(store, place, keys, incarnation)
    while (token := done()) is None:
        if not pause():
            raise SettingError(_too_late(store, place, keys))
    return token


class Keys:
    """Names of one world's keys in the store."""

    def __init__(self, world: str) -> None:
        """Take the world's name."""
        self._prefix = f"rankgate/{world}"
        self.record = f"{self._prefix}/record"

    def rank(self, rank: int) -> str:
        """Return the key under which a rank writes its incarnation."""
        return f"{self._prefix}/rank/{rank}"

    def taken(self, rank: int) -> str:
        """Return the key under which a rank says that it has the token."""
        return f"{self._prefix}/taken/{rank}"


def _publisher(store: Store, place: Place, keys: Keys, token: bytes) -> Callable[[], bytes | None]:
    """Rank 0: publish until every rank has taken the token.

    A start that was cut short leaves incarnations that no record names; they look new. When the
    living rank overwrites its own, the record is published again, under the same token.
    """
    before = set(_record(store, keys.record).incarnations)
    published: list[bytes] = []

    def step() -> bytes | None:
        nonlocal published
        found = _values(store, place, keys.rank)
        fresh = [one for one in found if one is not None and one not in before]
        if len(fresh) < place.world_size:
            return None
        if fresh != published:
            store.set(keys.record, msgspec.json.encode(Record(token, fresh)).decode())
            published = fresh
        return token if _values(store, place, keys.taken)[1:] == fresh[1:] else None

    return step


def _taker(
    store: Store, place: Place, keys: Keys, incarnation: bytes
) -> Callable[[], bytes | None]:
    """Any other rank: take the token from a record that names this very process."""

    def step() -> bytes | None:
        record = _record(store, keys.record)
        if incarnation not in record.incarnations:
            return None
        store.set(keys.taken(place.rank), incarnation.hex())
        return record.token

    return step


def _record(store: Store, key: str) -> Record:
    if not store.check([key]):
        return Record(b"", [])
    try:
        return msgspec.json.decode(bytes(store.get(key)), type=Record)
    except msgspec.DecodeError:
        return Record(b"", [])


def _values(store: Store, place: Place, key: Callable[[int], str]) -> list[bytes | None]:
    names = [key(rank) for rank in range(place.world_size)]
    return [_bytes(store, name) if store.check([name]) else None for name in names]


def _bytes(store: Store, name: str) -> bytes:
    return bytes.fromhex(bytes(store.get(name)).decode())


def _too_late(store: Store, place: Place, keys: Keys) -> str:
    written, taken = _values(store, place, keys.rank), _values(store, place, keys.taken)
    # On other ranks the record that is there names an earlier start, so its processes are old.
    old = _record(store, keys.record).incarnations if place.rank else []
    missing = [rank for rank, one in enumerate(written) if one is None or one in old]
    if place.rank == 0 and not missing:
        missing = [rank for rank, one in enumerate(written) if rank and taken[rank] != one]
    who = f"{ranks_text(missing)} said nothing" if missing else "rank 0 published nothing"
    return f"no round token of world {place.world!r} in time: {who}"
