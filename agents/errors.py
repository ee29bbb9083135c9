"""What can go wrong for an engine, typed; each error carries the findings that explain it."""

from __future__ import annotations

from collections.abc import Sequence

from rankgate.proto.findings import Finding


class AgentError(Exception):
    """Base of all errors of the agent library.

    ``findings`` holds the refusals behind it, each with a stable code; it may be empty.
    """

    def __init__(self, text: str, findings: Sequence[Finding] = ()) -> None:
        """Join the findings' messages and hints into the text."""
        lines = [text, *(f"  {one.code} {one.message}\n    hint: {one.hint}" for one in findings)]
        super().__init__("\n".join(lines))
        self.findings = list(findings)


class SettingError(AgentError):
    """The environment or the description cannot work; nothing was sent."""


class DaemonUnreachableError(AgentError):
    """No answer from the daemon in time."""


class WireVersionError(AgentError):
    """The daemon speaks no wire version in common."""


class RegistrationRejectedError(AgentError):
    """The daemon refuses this rank; the findings say which field and why."""


class PairRejectedError(AgentError):
    """The daemon refuses the pair; the findings say which field differs and who holds what."""


class NotReadyError(AgentError):
    """The pair is not ready in time; the text says what it waits for."""


class OpenDeniedError(AgentError):
    """A request was not granted; ``findings[0].retryable`` says whether to try again."""


class StageError(AgentError):
    """A request cannot be staged: too many, or other pages than before."""


class PagesError(AgentError):
    """Pages that do not exist, stand twice, or still belong to another transfer."""


class ForkedError(AgentError, RuntimeError):
    """An agent was used in a forked child; make a new one there (case D09)."""


class ClosedError(AgentError):
    """The agent is closed."""
