"""Starts the demo's processes and ends them, whatever happens: no process outlives the demo."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

PATIENCE_SECONDS = 4.0
"""How long a process may take to end after SIGTERM before its group is killed."""

_PR_SET_PDEATHSIG = 1
_TAIL_LINES = 15


class Program:
    """One child process in a session of its own, with its output in a log file."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str]
    ) -> None:
        """Start it."""
        self.name = name
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603 - our own command, no shell
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**_inherited(), **env},
                start_new_session=True,
                preexec_fn=end_with_parent,  # noqa: PLW1509 - the demo has one thread here
            )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._process.poll()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to its process group, while the process is ours to signal."""
        if self.exit_code is None:
            os.killpg(self._process.pid, number)

    def kill_descendant(self, pid: int) -> None:
        """Kill -9 one process that this one has started, and no other."""
        if pid not in descendants(self._process.pid):
            msg = f"process {pid} was not started by {self.name} ({self._process.pid})"
            raise ProcessLookupError(msg)
        os.kill(pid, signal.SIGKILL)

    def wait(self, deadline: float) -> bool:
        """Wait for its end until a monotonic deadline; return whether it has ended."""
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    def tail(self) -> str:
        """Return the last lines of its log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])


class Programs:
    """All processes of a run; leaving the ``with`` block ends those that still run."""

    def __init__(self) -> None:
        """Start with none."""
        self._programs: list[Program] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.stop()

    def start(
        self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str]
    ) -> Program:
        """Start a process and remember it."""
        program = Program(name, command, log, env)
        self._programs.append(program)
        return program

    def stop(self) -> None:
        """End everything that runs, last started first: SIGTERM, then SIGKILL to the group."""
        running = [program for program in reversed(self._programs) if program.exit_code is None]
        for program in running:
            program.signal(signal.SIGTERM)
        deadline = time.monotonic() + PATIENCE_SECONDS
        for program in running:
            if not program.wait(deadline):
                program.signal(signal.SIGKILL)
                program.wait(deadline + PATIENCE_SECONDS)


def _inherited() -> dict[str, str]:
    """Return this process' environment without settings that are meant for another daemon."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RANKGATE_")}


def end_with_parent(how: signal.Signals = signal.SIGTERM) -> None:
    """Ask the kernel to end this process when its parent dies, even by kill -9."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, how, 0, 0, 0)


def descendants(pid: int) -> set[int]:
    """Return the processes below a process, by the kernel's own list."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text(encoding="ascii").split()):
            found |= {child} | descendants(child)
    return found


def python(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module with this interpreter."""
    return [sys.executable, "-m", module, *arguments]


def torchrun(world: str, size: int, restarts: int, module: str, *arguments: str) -> list[str]:
    """Return the command of one world: torchrun's own program on a free port of this host.

    The rendezvous id is the world's name: torchrun hands it to every rank.
    """
    return python(
        "torch.distributed.run",
        f"--nproc-per-node={size}",
        "--nnodes=1",
        f"--rdzv-id={world}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
        "--local-addr=localhost",
        f"--max-restarts={restarts}",
        "--monitor-interval=0.1",
        "--module",
        module,
        *arguments,
    )
