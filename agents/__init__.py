"""Rank agents: pure session, ledger and landing, and the links that serve them.

What an engine needs stands here; everything else is reached by its module.
"""

if __name__ != "rankgate.agents":
    _HINT = "install the project (pip install -e .) and import rankgate.agents"
    raise ImportError(f"{__name__!r} is not importable under this name: {_HINT}")

from rankgate.agents.agent import RankAgent
from rankgate.agents.describe import KvCache, RankDescription, describe_kv
from rankgate.agents.errors import AgentError
from rankgate.agents.events import Arrived, Broken, Outcome, Released, Wanted
from rankgate.agents.handles import Pair, Stats, Transfer

__all__ = [
    "AgentError",
    "Arrived",
    "Broken",
    "KvCache",
    "Outcome",
    "Pair",
    "RankAgent",
    "RankDescription",
    "Released",
    "Stats",
    "Transfer",
    "Wanted",
    "describe_kv",
]
