"""What one step works with: the time, and the effects it collects in order."""

from __future__ import annotations

from typing import Any

from rankgate.coordinator.core.deadlines import Deadlines
from rankgate.coordinator.core.effects import Effect, Note
from rankgate.coordinator.core.journal import Journal


class Turn:
    """Shared by all parts of the core during one step.

    Invariant: ``effects`` is emptied by the machine after each step and by nobody else.
    """

    def __init__(self, now: int, journal: Journal) -> None:
        """Begin at ``now`` (ms) with nothing to do."""
        self.now = now
        self.effects: list[Effect] = []
        self.deadlines = Deadlines()
        self.journal = journal

    def tell(self, subject: str, event: str, level: str = "info", **fields: Any) -> None:  # noqa: ANN401 - log fields
        """Log one fact and keep it in the subject's story."""
        self.effects.append(Note(event, level, fields))
        words = " ".join(f"{key}={value}" for key, value in fields.items())
        self.journal.record(subject, self.now, f"{event} {words}".rstrip())
