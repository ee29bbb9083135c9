"""Rank agents: pure session, ledger and landing, and the links that serve them.

What an engine needs stands here; everything else is reached by its module.
"""

if __name__ != "rankgate.agents":
    _HINT = "install the project (pip install -e .) and import rankgate.agents"
    raise ImportError(f"{__name__!r} is not importable under this name: {_HINT}")

from rankgate.agents.agent import RankAgent
from rankgate.agents.describe import KvCache, RankDescription, describe_kv
from rankgate.agents.errors import (
    AgentError,
    ClosedError,
    DaemonUnreachableError,
    ForkedError,
    NotReadyError,
    OpenDeniedError,
    PagesError,
    PairRejectedError,
    RegistrationRejectedError,
    SettingError,
    StageError,
    WireVersionError,
)
from rankgate.agents.events import Arrived, Broken, Outcome, Released, Wanted
from rankgate.agents.handles import Pair, Stats, Transfer

__all__ = [
    "AgentError",
    "Arrived",
    "Broken",
    "ClosedError",
    "DaemonUnreachableError",
    "ForkedError",
    "KvCache",
    "NotReadyError",
    "OpenDeniedError",
    "Outcome",
    "PagesError",
    "Pair",
    "PairRejectedError",
    "RankAgent",
    "RankDescription",
    "RegistrationRejectedError",
    "Released",
    "SettingError",
    "StageError",
    "Stats",
    "Transfer",
    "Wanted",
    "WireVersionError",
    "describe_kv",
]
