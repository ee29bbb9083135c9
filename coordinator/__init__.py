"""The daemon: pure decisions in core, their execution in runtime, the command line in cli."""

if __name__ != "rankgate.coordinator":
    _HINT = "install the project (pip install -e .) and import rankgate.coordinator"
    raise ImportError(f"{__name__!r} is not importable under this name: {_HINT}")
