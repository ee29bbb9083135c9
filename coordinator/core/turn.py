"""What one step works with: the time, and the effects it collects in order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rankgate.coordinator.core.deadlines import Deadlines
from rankgate.coordinator.core.effects import Effect, Note
from rankgate.coordinator.core.journal import Journal
from rankgate.proto.findings import Finding


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

    def refuse(self, about: str, found: Finding) -> None:
        """Count one refusal for operators."""
        self.journal.refuse(about, found, self.now)

    def refuse_all(
        self,
        about: str,
        findings: Iterable[Finding],
        /,
        *,
        subject: str,
        event: str,
        **who: Any,  # noqa: ANN401 - log fields
    ) -> None:
        """Count refusals for operators, and tell each in the log and in the subject's story."""
        for found in findings:
            self.refuse(about, found)
            self.tell(
                subject,
                event,
                "warning",
                **who,
                code=found.code,
                slug=found.slug,
                message=found.message,
            )
