"""Rank agents: pure session, ledger and landing, and the links that serve them."""

if __name__ != "rankgate.agents":
    _HINT = "install the project (pip install -e .) and import rankgate.agents"
    raise ImportError(f"{__name__!r} is not importable under this name: {_HINT}")
