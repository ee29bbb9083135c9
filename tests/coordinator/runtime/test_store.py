"""What survives the daemon, and what stops it from starting."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rankgate.coordinator.core.effects import Persist
from rankgate.coordinator.core.settings import SealedRecord
from rankgate.coordinator.runtime.errors import ConfigurationError, StartError
from rankgate.coordinator.runtime.store import Store
from tests.coordinator.runtime.live import WAIT, clean_environment

CLOCK = bytes(range(16))


def record(world: str = "p", epoch: int = 3) -> SealedRecord:
    """Return a sealed world."""
    return SealedRecord(
        world=world, epoch=epoch, round=bytes(16), digest=b"d" * 16, incarnations=[b"i" * 16]
    )


def persist(store: Store, *written: Persist) -> list[BaseException | None]:
    """Write and wait; return what the callbacks heard."""
    heard: list[BaseException | None] = []
    last = threading.Event()

    def done(error: BaseException | None) -> None:
        heard.append(error)
        if len(heard) == len(written):
            last.set()

    for one in written:
        store.write(one, done)
    assert last.wait(WAIT)
    return heard


def test_a_fresh_directory_is_a_fresh_instance(tmp_path: Path) -> None:
    """Identity and key are random, the first start is number 1, nothing is durable yet."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, two = Store(tmp_path / "a", CLOCK), Store(tmp_path / "b", CLOCK)
    assert one.identity.start == 1
    assert one.identity.clock == CLOCK
    assert len(one.identity.instance) == 16
    assert len(one.identity.master) == 32
    assert one.identity.instance != two.identity.instance
    assert one.identity.master != two.identity.master
    assert one.durable.epoch == 0
    assert one.durable.worlds == []
    one.close()
    two.close()


def test_a_restart_keeps_everything_and_counts(tmp_path: Path) -> None:
    """Instance and key stay, the start number grows, epoch and worlds come back."""
    first = Store(tmp_path, CLOCK)
    assert (
        persist(
            first,
            Persist(epoch=3, sealed=record()),
            Persist(epoch=4, sealed=record("d", 4)),
            Persist(epoch=5, sealed=record("p", 5)),
        )
        == [None] * 3
    )
    first.close()
    second = Store(tmp_path, CLOCK)
    assert second.identity.instance == first.identity.instance
    assert second.identity.master == first.identity.master
    assert second.identity.start == 2
    assert second.durable.epoch == 5
    assert second.durable.worlds == [record("d", 4), record("p", 5)]
    persist(second, Persist(epoch=5, removed="d"))
    second.close()
    third = Store(tmp_path, CLOCK)
    assert third.durable.worlds == [record("p", 5)]
    third.close()


_WRITER = """
import sys, threading
from pathlib import Path
from rankgate.coordinator.core.effects import Persist
from rankgate.coordinator.runtime.store import Store
store = Store(Path(sys.argv[1]), bytes(16))
told = threading.Event()
def write(epoch):
    def done(error):
        print(epoch, flush=True)
        write(epoch + 1)
    store.write(Persist(epoch=epoch), done)
write(1)
threading.Event().wait()
"""


def test_what_was_reported_durable_survives_kill_9(tmp_path: Path) -> None:
    """A process killed at any moment has lost nothing that its callback had heard of."""
    command = [sys.executable, "-c", _WRITER, str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=clean_environment()
    ) as writer:
        assert writer.stdout is not None
        for _ in range(20):
            writer.stdout.readline()
        writer.kill()
        last = [int(line) for line in writer.stdout.read().split()] or [20]
    store = Store(tmp_path, CLOCK)
    assert store.durable.epoch >= last[-1]
    assert store.identity.start == 2
    store.close()


def test_one_daemon_a_directory(tmp_path: Path) -> None:
    """The second is told which directory and who has it; the first goes on."""
    first = Store(tmp_path, CLOCK)
    with pytest.raises(StartError, match=rf"{tmp_path}.*pid {os.getpid()}"):
        Store(tmp_path, CLOCK)
    assert persist(first, Persist(epoch=1)) == [None]
    first.close()
    Store(tmp_path, CLOCK).close()


def test_only_the_owner_reads_the_key(tmp_path: Path) -> None:
    """The database and what SQLite puts beside it have mode 0600, whatever the umask."""
    mask = os.umask(0)
    try:
        store = Store(tmp_path, CLOCK)
        persist(store, Persist(epoch=1))
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    finally:
        os.umask(mask)
    assert set(modes.values()) == {0o600}, modes
    store.close()


def test_every_commit_is_synced(tmp_path: Path) -> None:
    """WAL with synchronous=FULL: a power cut loses nothing that was reported durable."""
    store = Store(tmp_path, CLOCK)
    assert store._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert store._db.execute("PRAGMA synchronous").fetchone() == (2,)
    store.close()


def test_after_a_failed_write_nothing_more_is_written(tmp_path: Path) -> None:
    """A gap must not be papered over by what comes after it."""
    store = Store(tmp_path, CLOCK)
    persist(store, Persist(epoch=1))
    real = store._commit

    def fail(batch: list[Persist]) -> None:
        assert batch
        raise sqlite3.OperationalError("database or disk is full")

    store._commit = fail  # type: ignore[method-assign]
    (first,) = persist(store, Persist(epoch=2))
    store._commit = real  # type: ignore[method-assign]
    (second,) = persist(store, Persist(epoch=3))
    assert first is second
    assert "disk is full" in str(first)
    store.close()
    again = Store(tmp_path, CLOCK)
    assert again.durable.epoch == 1
    again.close()


def test_a_batch_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    """Each group of writes is one transaction."""
    store = Store(tmp_path, CLOCK)
    with pytest.raises(AttributeError):
        store._commit([Persist(epoch=7), Persist(epoch="x")])  # type: ignore[arg-type]
    assert persist(store, Persist(epoch=2)) == [None]
    store.close()
    again = Store(tmp_path, CLOCK)
    assert again.durable.epoch == 2
    again.close()


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    """It is not made silently: a typo would be a new instance."""
    with pytest.raises(ConfigurationError, match="nowhere does not exist"):
        Store(tmp_path / "nowhere", CLOCK)


def test_a_damaged_database_is_named(tmp_path: Path) -> None:
    """It stays as it is, and the directory is free again."""
    (tmp_path / "rankgate.db").write_bytes(b"this is no database" * 100)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r"rankgate\.db is damaged"):
            Store(tmp_path, CLOCK)


def test_another_schema_is_refused(tmp_path: Path) -> None:
    """A daemon never guesses what another version wrote."""
    store = Store(tmp_path, CLOCK)
    store._db.execute("UPDATE meta SET value = ? WHERE key = 'schema'", ((9).to_bytes(8, "big"),))
    store.close()
    with pytest.raises(ConfigurationError, match="schema 9; this daemon reads 1"):
        Store(tmp_path, CLOCK)
