"""The daemon's ZeroMQ sockets: one context, one set of options; bound, or why not."""

from __future__ import annotations

import errno
import os
import socket as posix
import stat
from pathlib import Path

import zmq

from rankgate.coordinator.runtime.errors import ConfigurationError, StartError
from rankgate.proto.sockets import configure_socket, seed_routing_ids

_MAX_SOCKETS = 4096
_PROBE_SECONDS = 0.5


def make_context() -> zmq.Context[zmq.Socket[bytes]]:
    """Return a context whose socket limit is not ZeroMQ's 1023, with routing ids seeded."""
    seed_routing_ids(int.from_bytes(os.urandom(4), "big"))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.max_sockets = _MAX_SOCKETS
    return context


def make_router(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """Return an unbound ROUTER that says when a peer is gone or full instead of dropping.

    It sends no ZMTP heartbeats of its own: when a peer has filled its queue (RCVHWM) and its
    connection then breaks before that is read, libzmq's heartbeat timer runs into an assertion and
    aborts the whole process (libzmq issue 4364, seen with 4.3.5). Silent peers are noticed all the
    same: their own heartbeats carry a time to live, after which libzmq drops the connection.
    """
    router: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    configure_socket(router, heartbeat_ivl=0)
    router.router_mandatory = True
    return router


def bind(router: zmq.Socket[bytes], endpoint: str) -> str:
    """Bind and return the endpoint as bound (a port 0 resolved).

    Raises:
        ConfigurationError: the ipc directory is missing or not ours to write.
        StartError: another process holds the endpoint (case C21: never a silent port + 1).
    """
    path = ipc_path(endpoint)
    if path is not None:
        _prepare_ipc(path, endpoint)
    mask = os.umask(0o117)  # the socket is 0660 from its first instant on
    try:
        router.bind(endpoint)
    except zmq.ZMQError as error:
        text = f"cannot bind {endpoint}: {error.strerror}"
        if error.errno == zmq.EADDRINUSE:
            raise StartError(f"{text}; `ss -ltnp` shows who holds it") from error
        if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}:
            raise StartError(text) from error
        raise ConfigurationError(f"{text}; bind an address of this host") from error
    finally:
        os.umask(mask)
    if path is not None:
        path.chmod(0o660)
    return router.getsockopt_string(zmq.LAST_ENDPOINT)


def ipc_path(endpoint: str) -> Path | None:
    """Return the file of an ipc endpoint; None for tcp and abstract names."""
    name = endpoint.removeprefix("ipc://")
    return None if name == endpoint or name.startswith("@") else Path(name)


def _prepare_ipc(path: Path, endpoint: str) -> None:
    folder = path.parent
    if not folder.is_dir():
        raise ConfigurationError(f"cannot bind {endpoint}: directory {folder} does not exist")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigurationError(f"cannot bind {endpoint}: directory {folder} is not writable")
    if len(os.fsencode(path)) > 107:  # noqa: PLR2004 - sun_path
        raise ConfigurationError(f"cannot bind {endpoint}: the path is longer than 107 bytes")
    # libzmq unlinks what it finds there, even under a living daemon: look and ask first.
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigurationError(f"cannot bind {endpoint}: {path} is there and no socket")
    with posix.socket(posix.AF_UNIX, posix.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_SECONDS)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return  # left by a process that is gone
        except PermissionError as error:
            text = f"cannot bind {endpoint}: {path} belongs to another user"
            raise ConfigurationError(text) from error
        except OSError as error:  # a full backlog or a time-out: somebody holds it
            raise StartError(f"cannot bind {endpoint}: {error}") from error
    raise StartError(f"cannot bind {endpoint}: another process answers there")
