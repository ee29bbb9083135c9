"""Logging: a console for people, JSON lines for machines, priorities for the journal."""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, WrappedLogger

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("auto", "console", "json")

_PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}


def configure_logging(
    level: str = "info", form: str = "auto", stream: TextIO | None = None, *, journal: bool = False
) -> None:
    """Set up structlog once per process.

    Args:
        level: one of LEVELS; lower facts are dropped.
        form: ``console``, ``json``, or ``auto`` (console on a terminal, JSON otherwise).
        stream: where to write; stderr by default.
        journal: every line, also of a traceback, begins with its ``<N>`` priority (case E07).
    """
    out = stream or sys.stderr
    console = form == "console" or (form == "auto" and out.isatty())
    render: Any = structlog.processors.JSONRenderer()
    steps: list[Any] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if console:
        render = structlog.dev.ConsoleRenderer(colors=out.isatty())
    else:
        steps.append(structlog.processors.format_exc_info)
    steps.append(render)
    if journal:
        steps.insert(1, _note_priority)
        steps.append(_prefix_lines)
    structlog.configure(
        processors=steps,
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.WriteLoggerFactory(file=out),
        cache_logger_on_first_use=True,
    )


class _Priority:
    """Carries the level of the record being rendered from one processor to the last."""

    now = 6


def _note_priority(_logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
    _Priority.now = _PRIORITIES.get(name, 6)
    return event


def _prefix_lines(_logger: WrappedLogger, _name: str, text: str) -> str:
    return "\n".join(f"<{_Priority.now}>{line}" for line in text.splitlines())
