"""Makes the checkout's root importable, so that test files can share what is in live.py."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = str(Path(__file__).resolve().parents[3])
if ROOT not in sys.path:
    sys.path.append(ROOT)

from tests.coordinator.runtime.live import Serving  # noqa: E402 - the path comes first


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    """A daemon that is not started yet; whatever it became is ended."""
    daemon = Serving(tmp_path)
    yield daemon
    daemon.end()
