"""Log lines for people, machines and the journal (case E07)."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from rankgate.coordinator.core.effects import Note
from rankgate.coordinator.runtime.log import Notes, configure_logging, is_journal
from tests.coordinator.runtime.live import clean_environment


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """Leave logging as it was."""
    root, hook = logging.getLogger(), sys.excepthook
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], sys.excepthook = handlers, hook
    root.setLevel(level)
    structlog.reset_defaults()


def fail() -> None:
    """Log an error with a traceback."""
    try:
        int("two\nlines")
    except ValueError:
        structlog.get_logger().exception("it_failed", rank=3)


def test_json_is_one_line_a_record() -> None:
    """Also with a traceback, whose lines are inside the value."""
    out = io.StringIO()
    configure_logging("info", "json", out)
    structlog.get_logger().info("a_fact", rank=3, world="p")
    fail()
    first, second = (json.loads(line) for line in out.getvalue().splitlines())
    assert (first["event"], first["rank"], first["level"]) == ("a_fact", 3, "info")
    assert "ValueError" in second["exception"]
    assert second["exception"].count("\n") > 1


@pytest.mark.parametrize("form", ["json", "console"])
def test_under_the_journal_every_line_has_its_priority(form: str) -> None:
    """Each line of a traceback is an error too, or `journalctl -p err` shows a headless one."""
    out = io.StringIO()
    configure_logging("debug", form, out, journal=True)
    fail()
    lines = out.getvalue().splitlines()
    assert lines
    assert all(line.startswith("<3>") for line in lines), lines
    if form == "console":
        assert len(lines) > 3
    for level, priority in (("debug", 7), ("info", 6), ("warning", 4), ("critical", 2)):
        getattr(structlog.get_logger(), level)("a_fact")
        assert out.getvalue().splitlines()[-1].startswith(f"<{priority}>")


def test_elsewhere_no_line_has_a_prefix() -> None:
    """A terminal or a file shows plain text."""
    out = io.StringIO()
    configure_logging("info", "console", out)
    structlog.get_logger().warning("a_fact")
    assert not out.getvalue().startswith("<")
    assert "a_fact" in out.getvalue()


def test_the_journal_is_known_by_its_inode(tmp_path: Path) -> None:
    """An inherited JOURNAL_STREAM that is not this stream means nothing."""
    with (tmp_path / "log").open("w") as stream:
        held = os.fstat(stream.fileno())
        name = f"{held.st_dev}:{held.st_ino}"
        assert is_journal({"JOURNAL_STREAM": name}, stream)
        assert not is_journal({"JOURNAL_STREAM": f"{held.st_dev}:1"}, stream)
        assert not is_journal({"JOURNAL_STREAM": "x"}, stream)
        assert not is_journal({}, stream)


def test_lower_levels_are_dropped() -> None:
    """The level is the least that is written."""
    out = io.StringIO()
    configure_logging("warning", "json", out)
    structlog.get_logger().info("no")
    structlog.get_logger().warning("yes")
    assert [json.loads(line)["event"] for line in out.getvalue().splitlines()] == ["yes"]


def test_records_of_libraries_come_along() -> None:
    """What asyncio has to say is not lost between the lines."""
    out = io.StringIO()
    configure_logging("info", "json", out, journal=True)
    logging.getLogger("asyncio").error("it %s", "hurts")
    line = out.getvalue()
    assert line.startswith("<3>")
    fields = json.loads(line[3:])
    assert (fields["event"], fields["logger"], fields["text"]) == (
        "library_message",
        "asyncio",
        "it hurts",
    )


def test_a_crash_is_logged_as_one() -> None:
    """An error that nobody caught has its priority on each line, and exit code 1."""
    script = (
        "from rankgate.coordinator.runtime.log import configure_logging\n"
        "configure_logging('info', 'json', journal=True)\n"
        "1 / 0\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env=clean_environment(),
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("<2>")
    assert "ZeroDivisionError" in json.loads(line[3:])["exception"]


def test_one_event_cannot_fill_the_disk() -> None:
    """Beyond 200 a second lines are counted, and the count is in the next line."""
    out = io.StringIO()
    configure_logging("info", "json", out)
    now = [10.0]
    notes = Notes(lambda: now[0])
    for n in range(1000):
        notes.write(Note("message_refused", "warning", {"n": n}))
        now[0] += 0.0005
    notes.write(Note("other_fact", "info", {}))
    now[0] = 11.0
    notes.write(Note("message_refused", "warning", {"n": 1000}))
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert len(lines) == 202
    assert lines[-2]["event"] == "other_fact"
    assert lines[-1]["left_out"] == 800


def test_a_failure_is_logged_with_its_traceback() -> None:
    """Why a daemon ends is never only an exit code."""
    out = io.StringIO()
    configure_logging("info", "json", out)
    Notes().failure("the store failed", OSError("disk full"))
    fields = json.loads(out.getvalue())
    assert fields["event"] == "daemon_failed"
    assert "disk full" in fields["exception"]
