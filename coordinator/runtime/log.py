"""Logging: a console for people, JSON lines for machines, priorities for the journal."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, WrappedLogger

from rankgate.coordinator.core.effects import Note

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("auto", "console", "json")

_PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}
_NOTES_PER_SECOND = 200


def configure_logging(
    level: str = "info", form: str = "auto", stream: TextIO | None = None, *, journal: bool = False
) -> None:
    """Set up structlog once per process, and send uncaught errors and stdlib records there too.

    Args:
        level: one of LEVELS; lower facts are dropped.
        form: ``console``, ``json``, or ``auto`` (console on a terminal, JSON otherwise).
        stream: where to write; stderr by default.
        journal: every line, also of a traceback, begins with its ``<N>`` priority (case E07).
    """
    out = stream or sys.stderr
    console = form == "console" or (form == "auto" and out.isatty())
    steps: list[Any] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    render: Any
    if console:
        render = structlog.dev.ConsoleRenderer(
            colors=out.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    else:
        steps.append(structlog.processors.format_exc_info)
        render = structlog.processors.JSONRenderer(default=repr)
    steps.append(_prefixed(render) if journal else render)
    least: int = getattr(logging, level.upper())
    structlog.configure(
        processors=steps,
        wrapper_class=structlog.make_filtering_bound_logger(least),
        logger_factory=structlog.WriteLoggerFactory(file=out),
        cache_logger_on_first_use=stream is None,
    )
    logging.basicConfig(level=max(least, logging.WARNING), handlers=[_Bridge()], force=True)
    sys.excepthook = _uncaught


def is_journal(environment: Mapping[str, str], stream: TextIO) -> bool:
    """Whether ``stream`` goes to the journal: JOURNAL_STREAM names its device and inode.

    The variable alone is inherited by shells and pipes too, where prefixes would be noise.
    """
    try:
        device, inode = environment.get("JOURNAL_STREAM", "").split(":")
        held = os.fstat(stream.fileno())
    except (ValueError, OSError):
        return False
    return device == str(held.st_dev) and inode == str(held.st_ino)


class Notes:
    """Writes the core's notes and the runtime's failures.

    Invariant: at most 200 lines a second of one event, so that no peer can fill a disk; how many
    were left out stands in the event's next line as ``left_out``.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Count seconds of ``clock``."""
        self._log = structlog.get_logger()
        self._clock = clock
        self._second = 0
        self._written: dict[str, int] = {}
        self._left_out: dict[str, int] = {}

    def write(self, note: Note) -> None:
        """Write one fact, or count it."""
        name = note.event
        if (second := int(self._clock())) != self._second:
            self._second = second
            self._written.clear()
        written = self._written.get(name, 0)
        if written >= _NOTES_PER_SECOND:
            self._left_out[name] = self._left_out.get(name, 0) + 1
            return
        self._written[name] = written + 1
        fields = note.fields
        if name in self._left_out:
            fields = {**fields, "left_out": self._left_out.pop(name)}
        try:
            getattr(self._log, note.level)(name, **fields)
        except OSError:
            # Nobody reads the log any more (its pipe is closed): no reason to stop serving.
            self._left_out[name] = self._left_out.get(name, 0) + 1

    def failure(self, why: str, error: BaseException | None = None) -> None:
        """Write why the process must not go on, with the traceback."""
        self._log.error("daemon_failed", why=why, exc_info=error)


class _Bridge(logging.Handler):
    """Hands records of the standard library, such as asyncio's, on to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        level = record.levelname.lower()
        structlog.get_logger().log(
            getattr(logging, level.upper(), logging.WARNING),
            "library_message",
            logger=record.name,
            text=record.getMessage(),
            exc_info=record.exc_info or None,
        )


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    structlog.get_logger().critical("daemon_crashed", exc_info=(kind, error, trace))


def _prefixed(
    render: Callable[[WrappedLogger, str, EventDict], str | bytes],
) -> Callable[[WrappedLogger, str, EventDict], str]:
    """Return ``render`` with each of its lines under the record's priority."""

    def prefixed(logger: WrappedLogger, name: str, event: EventDict) -> str:
        priority = _PRIORITIES.get(str(event.get("level", name)), 6)
        lines = str(render(logger, name, event)).splitlines()
        return "\n".join(f"<{priority}>{line}" for line in lines)

    return prefixed
