"""No process outlives the demo."""

import os
import select
import sys
import time
from pathlib import Path

import pytest

from rankgate.coordinator.cli.demo.launch import Programs, descendants, torchrun

FOREVER = "import signal; print('up', flush=True); signal.pause()"
STUBBORN = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True);"
    " signal.pause()"
)
NESTED = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {FOREVER!r}])"


def wait_for(log: Path, word: str, seconds: float = 10.0) -> None:
    """Wait until a program's log holds a word."""
    deadline = time.monotonic() + seconds
    while word not in log.read_text():
        assert time.monotonic() < deadline, f"{word!r} never came: {log.read_text()!r}"
        select.select([], [], [], 0.01)


def test_leaving_ends_what_runs(tmp_path: Path) -> None:
    """A program is ended, with its exit code known, when the block is left by an error."""
    log = tmp_path / "log"
    programs = Programs()
    program = programs.start("p", [sys.executable, "-c", FOREVER], log, {})
    wait_for(log, "up")
    assert program.exit_code is None
    with pytest.raises(RuntimeError, match="on purpose"), programs:
        raise RuntimeError("on purpose")
    assert program.exit_code == -15


def test_a_stubborn_program_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM that is ignored is followed by SIGKILL."""
    monkeypatch.setattr("rankgate.coordinator.cli.demo.launch.PATIENCE_SECONDS", 0.1)
    log = tmp_path / "log"
    with Programs() as programs:
        program = programs.start("p", [sys.executable, "-c", STUBBORN], log, {})
        wait_for(log, "up")
    assert program.exit_code == -9


def test_only_descendants_are_killed(tmp_path: Path) -> None:
    """A process id that the program did not start is refused; a child's is killed."""
    log = tmp_path / "log"
    with Programs() as programs:
        program = programs.start("p", [sys.executable, "-c", NESTED], log, {})
        wait_for(log, "up")
        with pytest.raises(ProcessLookupError, match="was not started by p"):
            program.kill_descendant(os.getpid())
        (child,) = descendants(program.pid)
        program.kill_descendant(child)
        assert program.wait(time.monotonic() + 10)


def test_the_log_has_a_tail(tmp_path: Path) -> None:
    """The last lines say why a program ended."""
    with Programs() as programs:
        command = [sys.executable, "-c", "print(*range(40), sep='\\n'); raise SystemExit(3)"]
        program = programs.start("p", command, tmp_path / "log", {})
        assert program.wait(time.monotonic() + 10)
    assert program.exit_code == 3
    assert program.tail().splitlines()[-1] == "39"
    assert len(program.tail().splitlines()) == 15


def test_torchrun_is_given_the_worlds_name() -> None:
    """The rendezvous id is the world's name: with --standalone it would be a random one."""
    command = torchrun("decode", 4, 1, "some.module", "folder")
    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert {"--rdzv-id=decode", "--nproc-per-node=4", "--max-restarts=1"} <= set(command)
    assert command[-3:] == ["--module", "some.module", "folder"]
