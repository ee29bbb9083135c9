"""Follows a run: the ranks' journals, and the daemon's own views."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rankgate.coordinator.cli.demo.job import DECODE, PREFILL, Counts, Folder, Job
from rankgate.proto.findings import Finding


@dataclass(slots=True)
class RankNotes:
    """What one rank's journal has said so far; per life where a restart begins anew."""

    world: str
    rank: int
    pid: int = 0
    lives: int = 0
    registered_at: float | None = None
    epochs: list[int] = field(default_factory=list)
    """Of its own world, every one it was told."""
    counts: Counts | None = None
    first_registered_at: float | None = None
    first_linked_at: float | None = None
    refused_at: float | None = None
    findings: list[Finding] = field(default_factory=list)
    """Of refusals, in the order they were told."""
    broken: list[Finding] = field(default_factory=list)
    """Why a pair that was ready broke."""
    delivered: dict[str, int] = field(default_factory=dict)
    """Request -> this rank's bytes of it, verified."""
    failed: dict[str, list[str]] = field(default_factory=dict)
    """Request -> code of each attempt that did not deliver."""
    staged: int = 0
    complete: bool = False
    error: str = ""

    def take(self, event: dict[str, Any]) -> None:
        """Take one journal entry."""
        match event["event"]:
            case "started":
                self.pid, self.lives, self.staged = event["pid"], self.lives + 1, 0
            case "registered":
                self.registered_at = event["at"]
                self.first_registered_at = self.first_registered_at or event["at"]
            case "ready":
                self.counts = msgspec.convert(event["counts"], Counts)
                self.first_linked_at = self.first_linked_at or event["at"]
                self.epochs.append(event["epoch"])
            case "refused":
                self.refused_at = event["at"]
                self.findings += msgspec.convert(event["findings"], list[Finding])
            case "broken":
                self.broken += msgspec.convert(event["findings"], list[Finding])
            case "delivered":
                self.delivered[event["request"]] = event["bytes"]
            case "failed":
                self.failed.setdefault(event["request"], []).append(event["code"])
            case "staged":
                self.staged = event["now"]
            case "complete":
                self.complete = True
            case "error":
                self.error = event["text"]
            case _:
                pass


class Watch:
    """All journals of a run, read as they grow."""

    def __init__(self, folder: Folder, job: Job) -> None:
        """Expect one journal a rank."""
        self.ranks = [
            RankNotes(world, rank) for world in (PREFILL, DECODE) for rank in range(job.tp(world))
        ]
        self._paths = [folder.journal(notes.world, notes.rank) for notes in self.ranks]
        self._offsets = [0] * len(self.ranks)

    def read(self) -> None:
        """Take whatever has been appended since the last time."""
        for index, path in enumerate(self._paths):
            self._offsets[index] += self._read_one(path, self._offsets[index], self.ranks[index])

    @staticmethod
    def _read_one(path: Path, offset: int, notes: RankNotes) -> int:
        try:
            with path.open("rb") as file:
                file.seek(offset)
                text = file.read()
        except FileNotFoundError:
            return 0
        whole = text[: text.rfind(b"\n") + 1]  # a line may still be on its way
        for line in whole.splitlines():
            notes.take(json.loads(line))
        return len(whole)

    def of(self, world: str) -> list[RankNotes]:
        """Return the notes of one world's ranks."""
        return [notes for notes in self.ranks if notes.world == world]

    @property
    def error(self) -> str:
        """The first error that a rank could not handle, with its name; empty when none."""
        return next((f"{n.world} rank {n.rank}: {n.error}" for n in self.ranks if n.error), "")

    @property
    def delivered(self) -> int:
        """Requests that every decode rank holds, verified."""
        return len(set.intersection(*(set(notes.delivered) for notes in self.of(DECODE))))

    @property
    def bytes_verified(self) -> int:
        """Bytes that decode ranks have taken and verified."""
        return sum(sum(notes.delivered.values()) for notes in self.of(DECODE))

    @property
    def staged(self) -> int:
        """Requests that prefill ranks hold staged, over all ranks."""
        return sum(notes.staged for notes in self.of(PREFILL))

    @property
    def decode_complete(self) -> bool:
        """Whether every decode rank has had all its requests."""
        return all(notes.complete for notes in self.of(DECODE))
