"""What systemd is told, and when (cases E01, E02)."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankgate.coordinator.runtime.notify import Notifier
from tests.coordinator.runtime.live import WAIT, Serving, is_served


class Manager:
    """The manager's end of NOTIFY_SOCKET."""

    def __init__(self, address: str) -> None:
        """Bind; ``@`` begins an abstract name."""
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)

    def hear(self, seconds: float = WAIT) -> str:
        """Return the next datagram."""
        self.socket.settimeout(seconds)
        return self.socket.recv(4096).decode()

    def until(self, wanted: str) -> list[str]:
        """Return what comes up to and with ``wanted``."""
        heard = [self.hear()]
        while heard[-1] != wanted:
            heard.append(self.hear())
        return heard

    def rest(self, quiet: float) -> list[str]:
        """Return what comes until nothing comes for ``quiet`` seconds (or too much has come)."""
        heard: list[str] = []
        try:
            while len(heard) < 100:
                heard.append(self.hear(quiet))
        except TimeoutError:
            pass
        return heard


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    """A manager at a path."""
    made = Manager(str(tmp_path / "notify"))
    yield made
    made.socket.close()


def test_nothing_is_said_without_a_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside systemd the notifier is silent and no watchdog runs."""
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"):
        monkeypatch.delenv(name, raising=False)
    notifier = Notifier()
    notifier.ready()
    notifier.stopping()
    assert notifier.watchdog_seconds is None


def test_an_abstract_name_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Systemd in containers uses names that begin with @."""
    manager = Manager(f"@rankgate-test-{os.getpid()}")
    monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
    Notifier().ready()
    assert manager.hear() == "READY=1"
    manager.socket.close()


def test_status_is_said_when_it_changes(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same line is not repeated."""
    monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
    notifier = Notifier()
    for text in ("a", "a", "b"):
        notifier.status(text)
    notifier.stopping()
    assert manager.until("STOPPING=1") == ["STATUS=a", "STATUS=b", "STOPPING=1"]


def test_a_manager_that_is_gone_is_no_error(
    manager: Manager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon serves on while its manager restarts."""
    monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
    notifier = Notifier()
    manager.socket.close()
    notifier.alive()
    (tmp_path / "notify").unlink()
    notifier.alive()


@pytest.mark.parametrize(
    ("usec", "pid", "seconds"),
    [
        ("20000000", None, 10.0),
        ("10000000", "me", 5.0),
        ("20000000", "1", None),
        ("0", None, None),
        ("soon", None, None),
    ],
)
def test_the_watchdog_is_fed_at_half_its_time(
    usec: str, pid: str | None, seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only by the process it is meant for."""
    monkeypatch.setenv("WATCHDOG_USEC", usec)
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    if pid is not None:
        monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()) if pid == "me" else pid)
    assert Notifier().watchdog_seconds == seconds


def test_ready_comes_after_the_sockets_are_bound(serving: Serving, manager: Manager) -> None:
    """Who waits for READY can connect at once; STOPPING comes before the sockets go."""
    serving.start(NOTIFY_SOCKET=manager.address)
    assert manager.until("READY=1")
    assert is_served(serving.agents)
    serving.signal(signal.SIGTERM)
    manager.until("STOPPING=1")
    assert serving.wait() == 0


def test_the_watchdog_hears_the_serving_loop(serving: Serving, manager: Manager) -> None:
    """Pings come at half the time while the loop runs, and stop with it."""
    serving.start(NOTIFY_SOCKET=manager.address, WATCHDOG_USEC="600000")
    manager.until("WATCHDOG=1")
    begun = time.monotonic()
    for _ in range(4):
        manager.until("WATCHDOG=1")
    taken = time.monotonic() - begun
    assert 0.9 < taken < 2.4  # 1.2 s; at the latest every 0.6
    serving.signal(signal.SIGSTOP)
    assert "WATCHDOG=1" not in manager.rest(0.7)[2:]  # the first ones were under way
    serving.signal(signal.SIGCONT)
    manager.until("WATCHDOG=1")


def test_the_watchdog_of_another_process_is_left_alone(serving: Serving, manager: Manager) -> None:
    """WATCHDOG_PID names the one that shall ping."""
    serving.start(
        "--heartbeat", "100ms", "--ttl", "1",
        NOTIFY_SOCKET=manager.address, WATCHDOG_USEC="200000", WATCHDOG_PID="1",
    )  # fmt: skip
    manager.until("READY=1")
    assert "WATCHDOG=1" not in manager.rest(0.5)
