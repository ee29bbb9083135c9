"""The I/O thread: its wake-up outlives it, it reads what is ready, and it leaves nothing open."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import Any, Never

import pytest

from rankgate.agents import agent as agents
from rankgate.agents.errors import AgentError
from rankgate.agents.link import Dialed, LinkThread
from tests.agents.engines import wait_until
from tests.agents.test_sockets import agent_of


def broken(*_arguments: object, **_fields: object) -> Never:
    """Fail as a bug would."""
    text = "a bug"
    raise ValueError(text)


def descriptors() -> set[str]:
    """Return what this process has open, by number and target."""
    folder = Path("/proc/self/fd")
    return {f"{each.name} {each.readlink()}" for each in folder.iterdir() if each.is_symlink()}


def test_after_a_failure_of_the_thread_closing_writes_into_no_foreign_file(tmp_path: Path) -> None:
    """The eventfd stays open until close, so its number can be nobody else's before."""
    agent = agent_of(f"ipc://{tmp_path}/nobody")
    thread = agent._thread
    agent._core.tick = broken  # type: ignore[method-assign]
    thread.wake()
    thread._thread.join(10)
    assert isinstance(thread.failure, ValueError)
    with pytest.raises(AgentError, match="a bug"):
        agent.poll()
    assert f"{thread._wake} anon_inode:[eventfd]" in descriptors()
    agent.close()
    assert thread._wake == -1
    thread.wake()
    assert thread.stop(0)


def test_a_connection_where_nothing_came_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns that another socket or the engine caused cost nothing per link."""
    reads: list[object] = []
    turns = threading.Event()

    def read(_thread: LinkThread, dialed: Dialed) -> bool:
        reads.append(dialed.key)
        return False

    monkeypatch.setattr(LinkThread, "_read_dialed", read)
    with agent_of(f"ipc://{tmp_path}/nobody") as agent:
        thread = agent._thread
        with thread.lock:
            agent._core.destination.dials.append((((1, 2), 0), f"ipc://{tmp_path}/source"))
        thread.wake()
        wait_until(lambda: thread._dialed, "dialed")
        thread._on_turn = turns.set
        for _ in range(20):
            turns.clear()
            thread.wake()
            assert turns.wait(10)
    assert reads == []


def test_an_agent_that_cannot_start_leaves_no_socket_and_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever fails after the sockets exist, they and the private directory go with it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(agents, "RankCore", broken)
    before = descriptors()
    with pytest.raises(ValueError, match="a bug"):
        agent_of(f"ipc://{tmp_path}/nobody")
    assert list(tmp_path.iterdir()) == []
    assert descriptors() == before


def test_a_thread_that_does_not_end_keeps_its_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a join in vain nothing is closed under the thread: it fails on nothing, and ends."""
    held, entered = threading.Event(), threading.Event()
    monkeypatch.setattr(agents, "_LEAVE_SECONDS", 0.01)
    agent = agent_of(f"ipc://{tmp_path}/nobody")
    thread = agent._thread
    pump: Any = thread.sender.pump

    def stuck(now: int) -> bool:
        entered.set()
        assert held.wait(10)
        done: bool = pump(now)
        return done

    thread.sender.pump = stuck  # type: ignore[method-assign]
    thread.wake()
    assert entered.wait(10)
    agent.close()
    assert not agent._context.closed
    held.set()
    thread._thread.join(10)
    assert not thread._thread.is_alive()
    assert thread.failure is None
    assert thread.stop(0)
    agent._context.destroy(0)
