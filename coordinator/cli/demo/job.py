"""What one run of the demo is about, and what its processes write down for each other.

The folder of a run::

    job.json               the Job, written by the demo, read by every rank
    finish                 the demo's word that ranks may leave
    journal/WORLD-R.jsonl  one JSON object a line, appended by rank R of WORLD as things happen
    result/WORLD-R.json    the rank's Result, written once when it leaves
    log/NAME.log           output of the daemon and of each torchrun
    tmp/                   the ranks' temporary files
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from rankgate.coordinator.cli.demo.model import CacheModel
from rankgate.proto.findings import Finding
from rankgate.proto.geometry import item_len

PREFILL: Final = "prefill"
DECODE: Final = "decode"
GROUP: Final = "full"
"""Tag of the one KV group."""


class Job(Struct, frozen=True, kw_only=True):
    """One run; the same for every rank."""

    daemon: str
    model: CacheModel
    prefill_tp: int
    decode_tp: int
    page_size: int
    pages: int
    """Most pages of one request."""
    requests: int
    concurrency: int
    seed: int
    profile: str
    fault: str
    deadline: float
    """CLOCK_MONOTONIC seconds at which ranks give up; the clock of all processes of a host."""

    @property
    def pool(self) -> int:
        """Pages in each rank's pool: twice what is under way, so that pages wander."""
        return self.pages * self.room

    @property
    def room(self) -> int:
        """Requests that a pool has pages for, whatever their lengths."""
        return 2 * self.concurrency

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers, K and V, before sharding."""
        model = self.model
        part = item_len(self.page_size, model.kv_heads, model.head_dim, model.dtype)
        return 2 * len(model.layers) * part

    @property
    def total_bytes(self) -> int:
        """Bytes of all requests, each counted once."""
        return self.page_bytes * sum(self.pages_of(index) for index in range(self.requests))

    def tp(self, world: str) -> int:
        """Return a world's tensor-parallel size, which is its size."""
        return self.prefill_tp if world == PREFILL else self.decode_tp

    def request(self, index: int) -> str:
        """Return the id of the run's request ``index``."""
        return f"demo-{self.seed:08x}-{index:04d}"

    def index_of(self, request: str) -> int:
        """Return the index of a request id of this run."""
        return int(request.rpartition("-")[2])

    def pages_of(self, index: int) -> int:
        """Return how many pages a request takes: from ``pages`` down to 1, by turns."""
        return 1 + (self.pages - 1 - index) % self.pages


class Counts(Struct, frozen=True, kw_only=True):
    """What the daemon told one rank of the pair."""

    source_epoch: int
    destination_epoch: int
    world_receive_count: int
    receive_count: int
    send_count: int


class Result(Struct, kw_only=True):
    """What one rank has done and seen by the time it leaves."""

    world: str
    rank: int
    counts: Counts | None = None
    outcomes: dict[str, int] = {}
    """Destination: transfers by outcome. Source: staged requests by how they were released."""
    bytes_moved: int = 0
    """Bytes of cache that this rank's transport sent (source) or took (destination)."""
    bytes_verified: int = 0
    mismatched_bytes: int = 0
    first_mismatch: str = ""
    stray_bytes: int = 0
    """Bytes in pages that belong to no request and should be zero."""
    staged_left: int = 0
    landing_left: int = 0
    released_at_count: int = 0
    """Delivered requests released when exactly receive_count ranks had ended."""
    released_by_outcome: int = 0
    """Delivered requests whose outcome overtook the last rank's end."""
    released_otherwise: int = 0
    """Delivered requests released at any other count; there must be none."""
    findings: list[Finding] = []
    seconds: dict[str, float] = {}


class Folder:
    """Paths and files of one run's folder."""

    def __init__(self, root: Path) -> None:
        """Take a folder that exists."""
        self.root = root

    def prepare(self, job: Job) -> None:
        """Write the job and make the sub-folders."""
        for name in ("journal", "result", "log", "tmp"):
            (self.root / name).mkdir(exist_ok=True)
        (self.root / "job.json").write_bytes(msgspec.json.encode(job))

    def job(self) -> Job:
        """Return the job."""
        return msgspec.json.decode((self.root / "job.json").read_bytes(), type=Job)

    def finish(self) -> None:
        """Tell all ranks to leave."""
        (self.root / "finish").touch()

    @property
    def finished(self) -> bool:
        """Whether ranks may leave."""
        return (self.root / "finish").exists()

    def journal(self, world: str, rank: int) -> Path:
        """Return the path of a rank's journal."""
        return self.root / "journal" / f"{world}-{rank}.jsonl"

    def log(self, name: str) -> Path:
        """Return the path of a program's log."""
        return self.root / "log" / f"{name}.log"

    def write_result(self, result: Result) -> None:
        """Write a rank's result in one step, so that nobody reads half of it."""
        path = self.root / "result" / f"{result.world}-{result.rank}.json"
        draft = path.with_suffix(".draft")
        draft.write_bytes(msgspec.json.encode(result))
        draft.replace(path)

    def results(self) -> list[Result]:
        """Return the results that have been written, by world and rank."""
        paths = (self.root / "result").glob("*.json")
        found = [msgspec.json.decode(path.read_bytes(), type=Result) for path in paths]
        return sorted(found, key=lambda each: (each.world != PREFILL, each.rank))


class Journal:
    """A rank's diary: one short append an event, so that others can follow while it runs."""

    def __init__(self, path: Path) -> None:
        """Open for appending; a restarted rank goes on in the same file."""
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, event: str, **fields: Any) -> None:  # noqa: ANN401 - any JSON
        """Append one event with the time of the host's monotonic clock."""
        self._file.write(json.dumps({"event": event, "at": time.monotonic(), **fields}) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
