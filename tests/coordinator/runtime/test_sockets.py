"""Sockets of the daemon: their options, and what keeps them from being bound."""

from __future__ import annotations

import os
import socket as posix
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from rankgate.coordinator.runtime.errors import ConfigurationError, StartError
from rankgate.coordinator.runtime.sockets import bind, ipc_path, make_context, make_router
from rankgate.proto.limits import MAX_FRAME_BYTES

Context = zmq.Context[zmq.Socket[bytes]]


@pytest.fixture
def context() -> Iterator[Context]:
    """A context that is ended with all its sockets."""
    made = make_context()
    yield made
    made.destroy(0)


@pytest.fixture
def router(context: Context) -> zmq.Socket[bytes]:
    """An unbound socket of the daemon."""
    return make_router(context)


def test_options_are_set_before_bind(context: Context, router: zmq.Socket[bytes]) -> None:
    """Bounds on frames and waits, and errors instead of silent loss."""
    assert router.linger == 0
    assert router.maxmsgsize == MAX_FRAME_BYTES
    assert router.handshake_ivl == 2000
    assert router.tcp_keepalive == 1
    assert context.get(zmq.MAX_SOCKETS) > 1023


def test_no_heartbeat_of_our_own(router: zmq.Socket[bytes]) -> None:
    """Its timer would abort the process under a flood that breaks off (libzmq issue 4364)."""
    assert router.heartbeat_ivl == 0


def test_the_socket_is_for_owner_and_group(router: zmq.Socket[bytes], tmp_path: Path) -> None:
    """Mode 0660, whatever the umask, which stays as it was."""
    mask = os.umask(0)
    try:
        bind(router, f"ipc://{tmp_path}/a.sock")
        assert os.umask(0o022) == 0
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "a.sock").stat().st_mode) == 0o660


def test_port_zero_is_resolved(router: zmq.Socket[bytes]) -> None:
    """What is returned can be connected to."""
    endpoint = bind(router, "tcp://127.0.0.1:0")
    assert not endpoint.endswith(":0")


def test_a_missing_directory_is_named(router: zmq.Socket[bytes], tmp_path: Path) -> None:
    """Failure to bind is fatal and says where (case E04)."""
    with pytest.raises(ConfigurationError, match=f"{tmp_path}/no does not exist"):
        bind(router, f"ipc://{tmp_path}/no/a.sock")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_directory_is_named(router: zmq.Socket[bytes], tmp_path: Path) -> None:
    """With its path."""
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigurationError, match="not writable"):
        bind(router, f"ipc://{tmp_path}/a.sock")


def test_a_path_that_is_too_long_is_refused(router: zmq.Socket[bytes], tmp_path: Path) -> None:
    """Before ZeroMQ would cut it."""
    with pytest.raises(ConfigurationError, match="longer than 107 bytes"):
        bind(router, f"ipc://{tmp_path}/{'x' * 100}")


def test_a_file_that_is_no_socket_is_kept(router: zmq.Socket[bytes], tmp_path: Path) -> None:
    """ZeroMQ would delete whatever is there."""
    (tmp_path / "a.sock").write_text("precious")
    with pytest.raises(ConfigurationError, match=r"a\.sock is there and no socket"):
        bind(router, f"ipc://{tmp_path}/a.sock")
    assert (tmp_path / "a.sock").read_text() == "precious"


def test_a_socket_left_behind_is_replaced(router: zmq.Socket[bytes], tmp_path: Path) -> None:
    """After kill -9 the file stays, and nobody answers there."""
    dead = posix.socket(posix.AF_UNIX)
    dead.bind(str(tmp_path / "a.sock"))
    dead.close()
    bind(router, f"ipc://{tmp_path}/a.sock")


@pytest.mark.parametrize("backlog", [1, 0], ids=["answering", "with a full backlog"])
def test_a_living_socket_is_left_alone(
    router: zmq.Socket[bytes], tmp_path: Path, backlog: int
) -> None:
    """Another daemon that answers, or is only too busy to, keeps its endpoint (case C21)."""
    path = tmp_path / "a.sock"
    with posix.socket(posix.AF_UNIX) as alive, posix.socket(posix.AF_UNIX) as waiting:
        alive.bind(str(path))
        alive.listen(backlog)
        if not backlog:
            waiting.connect(str(path))
        with pytest.raises(StartError, match=f"cannot bind ipc://{path}") as caught:
            bind(router, f"ipc://{path}")
        assert caught.value.exit_code == 75
    assert path.exists()


def test_a_busy_port_is_named(router: zmq.Socket[bytes]) -> None:
    """No other port is taken instead."""
    with posix.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        endpoint = f"tcp://127.0.0.1:{holder.getsockname()[1]}"
        with pytest.raises(StartError, match=endpoint) as caught:
            bind(router, endpoint)
    assert caught.value.exit_code == 75
    assert "ss -ltnp" in str(caught.value)


def test_an_address_of_another_host_is_a_configuration_error(router: zmq.Socket[bytes]) -> None:
    """Trying again would not help."""
    with pytest.raises(ConfigurationError, match="an address of this host"):
        bind(router, "tcp://192.0.2.1:5555")


def test_only_ipc_endpoints_have_files() -> None:
    """Abstract names and ports leave nothing behind."""
    assert ipc_path("ipc:///run/x.sock") == Path("/run/x.sock")
    assert ipc_path("ipc://@x") is None
    assert ipc_path("tcp://127.0.0.1:1") is None


def test_routing_ids_differ_between_processes() -> None:
    """The first number a ROUTER gives out is not the same in every process."""
    firsts = set()
    for _ in range(3):
        made = make_context()
        router = make_router(made)
        router.bind("inproc://x")
        dealer = made.socket(zmq.DEALER)
        dealer.connect("inproc://x")
        dealer.send(b"")
        assert router.poll(5000)
        firsts.add(router.recv_multipart()[0])
        made.destroy(0)
    assert len(firsts) == 3
