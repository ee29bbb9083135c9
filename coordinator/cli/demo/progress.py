"""What a person sees while the demo runs: on a terminal a live picture, elsewhere a few lines.

Everything goes to stderr; stdout is for the report.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from rankgate.coordinator.cli.demo.job import Job
from rankgate.coordinator.cli.demo.watch import Watch
from rankgate.proto.findings import ranks_text
from rankgate.proto.views import PairView, StatusView, WorldView

_QUARTERS = 4


class Show:
    """The demo's running commentary."""

    def __init__(self, console: Console | None = None) -> None:
        """Write to stderr unless told otherwise."""
        self._console = console or Console(stderr=True, highlight=False)
        self._bar = Progress(
            TextColumn("requests"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            console=self._console,
        )
        self._task = self._bar.add_task("requests", total=None, rate="")
        self._lines: list[Text] = []
        self._said: set[str] = set()
        self._live: Live | None = None
        self._began: float | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(
                get_renderable=self._picture, console=self._console, refresh_per_second=8
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, line: str) -> None:
        """Print a line once, above the live picture if there is one."""
        if line not in self._said:
            self._said.add(line)
            self._console.print(Text(line))

    def update(self, job: Job, watch: Watch, status: StatusView | None) -> None:
        """Take the newest state of the run."""
        lines = [_world_line(world) for world in status.worlds] if status else []
        lines = lines or [f"{len(watch.ranks)} ranks start up; torch takes its time"]
        lines += [_pair_line(pair) for pair in status.pairs] if status else []
        if self._live is not None:
            self._lines = [Text(line) for line in lines]
        else:
            for line in lines:
                self.say(line)
        done = watch.delivered
        if self._began is None and watch.bytes_verified:
            self._began = time.monotonic()
        rate = self._rate(watch.bytes_verified)
        self._bar.update(self._task, total=job.requests, completed=done, rate=rate)
        if self._live is None and done:
            quarter = done * _QUARTERS // job.requests
            if quarter and f"quarter {quarter}" not in self._said:
                self._said.add(f"quarter {quarter}")
                self.say(f"requests {done}/{job.requests} {rate}")

    def _rate(self, count: int) -> str:
        if self._began is None:
            return ""
        rate = count / 1e6 / max(time.monotonic() - self._began, 0.1)
        return f"{rate:.1f} MB/s verified"

    def _picture(self) -> RenderableType:
        return Group(*self._lines, self._bar)


def _world_line(world: WorldView) -> str:
    line = f"world {world.world}: {world.state} {world.have}/{world.size} ranks"
    if world.state == "sealed":
        return f"{line}, epoch {world.epoch}, receive_count {world.receive_count}"
    return f"{line}, {ranks_text(world.missing)} missing" if world.missing else line


def _pair_line(pair: PairView) -> str:
    codes = ", ".join(f"{found.code} {found.slug}" for found in pair.findings if found.is_error)
    return (
        f"pair {pair.source} → {pair.destination}: {pair.state},"
        f" {pair.linked}/{pair.ranks} ranks linked{f', {codes}' if codes else ''}"
    )
