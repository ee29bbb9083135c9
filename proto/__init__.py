"""Messages, descriptors, geometry and codes: the ground floor that does no I/O."""

if __name__ != "rankgate.proto":
    _HINT = "install the project (pip install -e .) and import rankgate.proto"
    raise ImportError(f"{__name__!r} is not importable under this name: {_HINT}")

__version__ = "0.1.0"
