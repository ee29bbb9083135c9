"""Why a rank or a pair is not ready, as the error that an engine gets."""

from __future__ import annotations

from rankgate.agents.clock import boottime_ms
from rankgate.agents.errors import (
    AgentError,
    DaemonUnreachableError,
    NotReadyError,
    RegistrationRejectedError,
    WireVersionError,
)
from rankgate.agents.rank import RankCore
from rankgate.agents.session import Session, SessionState
from rankgate.proto import __version__


def check_session(session: Session, daemon: str) -> None:
    """Raise if the daemon has refused this rank for good.

    Raises:
        WireVersionError: no wire version in common.
        RegistrationRejectedError: the findings say why.
    """
    if session.refusal is not None:
        text = f"the daemon at {daemon} refuses this agent ({__version__})"
        bounds = f"it speaks wire {session.refusal.min} to {session.refusal.max}"
        raise WireVersionError(f"{text}: {session.refusal.text}; {bounds}")
    if session.state is SessionState.REFUSED:
        raise RegistrationRejectedError(f"the daemon refuses {_who(session)}", session.findings)


def unregistered(session: Session, daemon: str, timeout: float) -> AgentError:
    """Return the error of a rank that was not taken within ``timeout`` seconds."""
    if session.findings:
        text = f"{_who(session)} was not taken in {timeout:g} s"
        return RegistrationRejectedError(text, session.findings)
    text = f"no answer from a daemon at {daemon} within {timeout:g} s"
    return DaemonUnreachableError(f"{text}; is it running (`rankgate status`)?")


def not_ready(core: RankCore, daemon: str, world: str, timeout: float) -> AgentError:
    """Return the error that says what the pair with ``world`` waits for."""
    mine = core.identity.world
    found = [one for findings in core.findings.values() for one in findings]
    silent = boottime_ms() - core.session.answered_at
    if core.session.rules is None or silent > 3 * core.session.rules.ttl:
        text = f"no answer from the daemon at {daemon} for {silent / 1000:.1f} s"
        return DaemonUnreachableError(text)
    pair = core.pair_with(world)
    found += pair.findings if pair is not None else []
    if core.sealed is None:
        waits = f"{mine} is not sealed"
    elif pair is None:
        waits = f"no verdict on {mine} with {world}: {world} is not sealed, or no partner"
    else:
        down = [rank for rank, link in pair.links.items() if not link.up]
        waits = f"{mine} with {world} is {pair.state}"
        waits += f", no link with {world} ranks {down}" if down else ", others have to link"
    return NotReadyError(f"not ready within {timeout:g} s: {waits}", found)


def _who(session: Session) -> str:
    return f"{session.identity.world} rank {session.identity.rank}"
