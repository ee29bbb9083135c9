"""Addresses that others can dial, and an agent that nobody answers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import zmq

from rankgate.agents.agent import RankAgent
from rankgate.agents.describe import RankDescription, describe_kv
from rankgate.agents.errors import DaemonUnreachableError, SettingError, WireVersionError
from rankgate.agents.handles import Transfer
from rankgate.agents.session import Identity
from rankgate.agents.sockets import LinkSocket, connect, make_context, route_address
from rankgate.proto.codec import decode_header, encode
from rankgate.proto.descriptor import Layout
from rankgate.proto.messages import Refusal


def description() -> RankDescription:
    """Return a rank with one small cache."""
    pools = [torch.zeros(4, 1, 2, 4)]
    cache = describe_kv("full", pools, pools, layers=[0], total_heads=1)
    return RankDescription(role="decode", layout=Layout(), kv=[cache])


def agent_of(daemon: str, **fields: str) -> RankAgent:
    """Return an agent that greets a daemon."""
    identity = Identity(world="d", rank=0, incarnation=os.urandom(16), round=os.urandom(16))
    return RankAgent(description(), identity=identity, world_size=1, daemon=daemon, **fields)


def bound(daemon: str, wanted: str = "") -> str:
    """Return the address that a link of an agent of this daemon gets; who dials it is answered."""
    context = make_context()
    try:
        link = LinkSocket(context, daemon, wanted)
        dialer = connect(context, link.address)
        dialer.send(b"question")
        assert link.socket.poll(5000), f"nobody answers at {link.address}"
        link.socket.send_multipart([link.socket.recv_multipart()[0], b"answer"])
        assert dialer.poll(5000)
        assert dialer.recv() == b"answer"
        link.remove()
    finally:
        context.destroy(0)
    return link.address


def test_over_tcp_the_route_towards_the_daemon_gives_the_address() -> None:
    """Never a wildcard, never a name; the port is the real one (C18, C20, C21)."""
    first, second = bound("tcp://127.0.0.1:9"), bound("tcp://127.0.0.1:9")
    for address in (first, second):
        assert address.startswith("tcp://127.0.0.1:")
        assert int(address.rpartition(":")[2]) > 0
    assert route_address("tcp://127.0.0.1:9") == "127.0.0.1"


def test_an_explicit_address_stays_verbatim(tmp_path: Path) -> None:
    """RANKGATE_LINK is bound as it was given (C20)."""
    wanted = f"ipc://{tmp_path}/mine"
    assert bound("ipc:///nowhere", wanted) == wanted


def test_an_address_that_cannot_be_bound_is_named() -> None:
    """A foreign address fails at once and says which (C18)."""
    with pytest.raises(SettingError, match=r"192\.0\.2\.1"):
        bound("ipc:///nowhere", "tcp://192.0.2.1:7000")
    with pytest.raises(SettingError, match=r"192\.0\.2\.1"):
        agent_of("ipc:///nowhere", link="tcp://192.0.2.1:7000")


@pytest.mark.parametrize("wildcard", ["tcp://*:0", "tcp://0.0.0.0:0", "tcp://[::]:0"])
def test_a_wildcard_is_no_address_for_others(wildcard: str) -> None:
    """Bound is not reachable: refused here, with what to give instead (C18)."""
    with pytest.raises(SettingError, match="one interface"):
        bound("ipc:///nowhere", wildcard)


def test_a_daemon_that_is_no_endpoint_is_named() -> None:
    """A misspelt endpoint is a setting, not a time-out."""
    context = make_context()
    with pytest.raises(SettingError, match="htp://x"):
        connect(context, "htp://x")
    context.term()


def test_without_a_daemon_the_wait_ends_in_time_and_close_does_not_hang(tmp_path: Path) -> None:
    """A typed error that names the endpoint; closing takes less than 2 s (D01, D06, D08)."""
    endpoint = f"ipc://{tmp_path}/nobody"
    agent = agent_of(endpoint)
    begun = time.monotonic()
    with pytest.raises(DaemonUnreachableError, match="nobody"):
        agent.wait_registered(0.3)
    assert time.monotonic() - begun < 2
    begun = time.monotonic()
    agent.close()
    agent.close()
    assert time.monotonic() - begun < 2


def test_a_process_whose_daemon_is_gone_still_exits(tmp_path: Path) -> None:
    """Even without close: linger is 0 and the thread is a daemon thread (D08)."""
    program = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from tests.agents.test_sockets import agent_of\n"
        "agent = agent_of(sys.argv[1])\n"
        "print('made')\n"
    )
    paths = [path for path in sys.path if path]
    done = subprocess.run(
        [sys.executable, "-c", program, f"ipc://{tmp_path}/nobody", *paths],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "made\n"


def test_a_daemon_of_another_version_is_said_to_be_one(tmp_path: Path) -> None:
    """Its kind-0 answer becomes WireVersionError with the versions that it speaks (A12)."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(f"ipc://{tmp_path}/daemon")
    agent = agent_of(f"ipc://{tmp_path}/daemon")
    try:
        assert router.poll(5000)
        route, header, _ = router.recv_multipart()
        refusal = Refusal(code="RG201", text="wire_version: too old", min=4, max=5)
        router.send_multipart([route, *encode(refusal, decode_header(header).id)])
        with pytest.raises(WireVersionError, match="wire 4 to 5"):
            agent.wait_registered(5)
        with pytest.raises(WireVersionError, match="wire 4 to 5"):
            Transfer(agent, ((1, 2), "req-1", 0), {}).wait()
    finally:
        agent.close()
        router.close(0)
        context.term()
