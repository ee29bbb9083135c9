"""What survives the daemon: SQLite, one daemon a directory, written by one thread.

A write is durable before anything that depends on it leaves (raft's rule); the serving loop never
waits for the disk.
"""

from __future__ import annotations

import fcntl
import os
import queue
import sqlite3
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec

from rankgate.coordinator.core.effects import Persist
from rankgate.coordinator.core.settings import Durable, Identity, SealedRecord
from rankgate.coordinator.runtime.errors import ConfigurationError, StartError

SCHEMA = 1

_TABLES = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value BLOB NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS worlds (name TEXT PRIMARY KEY, record BLOB NOT NULL) STRICT;
"""

_Job = tuple[Persist, Callable[[BaseException | None], None]]


class Store:
    """The state directory of one daemon.

    Invariant: while open no other daemon has the directory; each Persist is one transaction that
    is on disk before its callback hears of it; writes happen in the order they were given.
    """

    def __init__(self, folder: Path, clock: bytes) -> None:
        """Open or create the database in ``folder`` and count this start.

        Raises:
            ConfigurationError: the directory is missing or not writable, or of another version.
            StartError: another daemon has it, or the disk refuses.
        """
        path = folder / "rankgate.db"
        with ExitStack() as undo:
            self._lock = _lock(folder)
            undo.callback(os.close, self._lock)
            try:
                self._open(path, clock)
            except (sqlite3.OperationalError, OSError) as error:
                raise StartError(f"cannot open {path}: {error}") from error
            except (sqlite3.DatabaseError, msgspec.DecodeError) as error:
                text = f"{path} is damaged: {error}; move it away to start anew"
                raise ConfigurationError(text) from error
            undo.pop_all()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="store", daemon=True)
        self._writer.start()

    def _open(self, path: Path, clock: bytes) -> None:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        path.chmod(0o600)
        # isolation_level None: transactions are begun and ended here, by name.
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.executescript(_TABLES)
        self._begin()
        self.identity = Identity(
            instance=self._meta("instance"),
            start=int.from_bytes(self._meta("start"), "big"),
            clock=clock,
            master=self._meta("master"),
        )
        self.durable = Durable(
            epoch=int.from_bytes(self._meta("epoch"), "big"),
            worlds=[
                msgspec.msgpack.decode(record, type=SealedRecord)
                for (record,) in self._db.execute("SELECT record FROM worlds ORDER BY name")
            ],
        )

    def write(self, persist: Persist, done: Callable[[BaseException | None], None]) -> None:
        """Write in the background; ``done`` is called from the writer's thread."""
        self._jobs.put((persist, done))

    def close(self) -> None:
        """Finish what was given, and let the directory go. A second call does nothing."""
        if not self._writer.is_alive():
            return
        self._jobs.put(None)
        self._writer.join()
        self._db.close()
        os.close(self._lock)

    def _begin(self) -> None:
        version = self._db.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
        if version is not None and int.from_bytes(version[0], "big") != SCHEMA:
            found = int.from_bytes(version[0], "big")
            raise ConfigurationError(f"the database has schema {found}; this daemon reads {SCHEMA}")
        self._db.execute("BEGIN IMMEDIATE")
        for key, first in (
            ("schema", SCHEMA.to_bytes(8, "big")),
            ("instance", os.urandom(16)),
            ("master", os.urandom(32)),
            ("epoch", bytes(8)),
            ("start", bytes(8)),
        ):
            self._db.execute("INSERT OR IGNORE INTO meta VALUES (?, ?)", (key, first))
        start = int.from_bytes(self._meta("start"), "big") + 1
        self._db.execute(
            "UPDATE meta SET value = ? WHERE key = 'start'", (start.to_bytes(8, "big"),)
        )
        self._db.execute("COMMIT")

    def _meta(self, key: str) -> bytes:
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return bytes(row[0])

    def _write(self) -> None:
        running = True
        failed: Exception | None = None
        while running:
            batch = [self._jobs.get()]
            while not self._jobs.empty():  # group commit: one sync for all that waits
                batch.append(self._jobs.get())
            running = None not in batch
            jobs = [job for job in batch if job is not None]
            try:
                if failed is None:  # after a gap nothing later may become durable
                    self._commit([persist for persist, _ in jobs])
            except Exception as error:  # noqa: BLE001 - whatever it was, nothing is durable
                failed = error
            for _, done in jobs:
                done(failed)

    def _commit(self, batch: list[Persist]) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            for persist in batch:
                epoch = persist.epoch.to_bytes(8, "big")
                self._db.execute("UPDATE meta SET value = ? WHERE key = 'epoch'", (epoch,))
                if persist.sealed is not None:
                    row = (persist.sealed.world, msgspec.msgpack.encode(persist.sealed))
                    self._db.execute("INSERT OR REPLACE INTO worlds VALUES (?, ?)", row)
                if persist.removed:
                    self._db.execute("DELETE FROM worlds WHERE name = ?", (persist.removed,))
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise


def _lock(folder: Path) -> int:
    if not folder.is_dir():
        raise ConfigurationError(f"state directory {folder} does not exist")
    try:
        handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigurationError(f"state directory {folder}: {error.strerror}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(handle, 32).decode(errors="replace").strip() or "unknown"
        os.close(handle)
        text = f"state directory {folder} belongs to a running daemon (pid {holder})"
        raise StartError(text) from None
    os.ftruncate(handle, 0)
    os.write(handle, f"{os.getpid()}\n".encode())
    return handle
