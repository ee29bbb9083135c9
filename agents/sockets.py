"""The agent's ZeroMQ sockets: one set of options, an address that others can reach."""

from __future__ import annotations

import os
import re
import shutil
import socket as posix
import tempfile
import threading
from urllib.parse import urlsplit

import zmq
from zmq.utils.monitor import parse_monitor_message

from rankgate.agents.errors import SettingError
from rankgate.proto.limits import MAX_DATA_FRAME_BYTES
from rankgate.proto.sockets import configure_socket, seed_routing_ids

_SEEDED: set[int] = set()
_SEEDING = threading.Lock()
_MAPPED = re.compile(r"tcp://\[::ffff:([0-9.]+)\]:")
_WILDCARDS = ("tcp://0.0.0.0:", "tcp://[::]:")


def make_context() -> zmq.Context[zmq.Socket[bytes]]:
    """Return a context of our own; libc's ``rand`` is seeded once per process before it."""
    with _SEEDING:
        if os.getpid() not in _SEEDED:
            seed_routing_ids(int.from_bytes(os.urandom(4), "big"))
            _SEEDED.add(os.getpid())
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.max_sockets = 8192
    return context


def connect(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """Return a DEALER on its way to the daemon.

    Raises:
        SettingError: the endpoint is none.
    """
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    # No receive limit: libzmq aborts the process when a heartbeat runs out on a connection that
    # broke while it was held back (libzmq issue 4364). The daemon bounds what it sends.
    configure_socket(socket, rcvhwm=0)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close(0)
        text = (
            f"the daemon's endpoint {endpoint!r} is none ({error.strerror}); use ipc:// or tcp://"
        )
        raise SettingError(text) from error
    return socket


def dial(
    context: zmq.Context[zmq.Socket[bytes]], address: str
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """Return a DEALER on its way to a source, and the monitor of its connection."""
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    # No heartbeats between agents, for the same reason: the daemon says who is gone.
    configure_socket(socket, maxmsgsize=MAX_DATA_FRAME_BYTES, heartbeat_ivl=0)
    monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    socket.connect(address)
    return socket, monitor


def disconnected(monitor: zmq.Socket[bytes]) -> bool:
    """Whether the monitored connection has ended since the last look."""
    ended = False
    while True:
        try:
            event = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return ended
        ended |= event["event"] == zmq.EVENT_DISCONNECTED


class LinkSocket:
    """The bound ROUTER that destinations dial.

    Invariant: ``address`` is what others can dial: never a wildcard, and with the real port
    (cases C18, C21). A private directory made for it goes with it.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], daemon: str, wanted: str) -> None:
        """Bind.

        Args:
            context: where the socket lives.
            daemon: the daemon's endpoint: over ipc, peers are on this host too.
            wanted: an endpoint to bind verbatim, or "".

        Raises:
            SettingError: the address cannot be bound; the text names it.
        """
        self._folder = ""
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        configure_socket(self.socket, heartbeat_ivl=0)
        self.socket.router_mandatory = True
        endpoint = wanted or self._endpoint(daemon)
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.socket.close(0)
            self.remove()
            text = f"cannot bind the link address {endpoint!r}: {error.strerror}; set RANKGATE_LINK"
            raise SettingError(text) from error
        self.address = plain_address(self.socket.getsockopt_string(zmq.LAST_ENDPOINT))
        if self.address.startswith(_WILDCARDS):
            self.socket.close(0)
            raise SettingError(
                f"nobody can dial the link address {endpoint!r}: give the address of one interface"
            )

    def _endpoint(self, daemon: str) -> str:
        if daemon.startswith("ipc://"):
            self._folder = tempfile.mkdtemp(prefix="rankgate-")
            return f"ipc://{self._folder}/link.sock"
        return f"tcp://{route_address(daemon)}:0"

    def remove(self) -> None:
        """Remove the private directory; the socket is closed by its owner."""
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def plain_address(endpoint: str) -> str:
    """Return an endpoint as people write it: an IPv4 address that IPv6 carries is undone."""
    return _MAPPED.sub(r"tcp://\1:", endpoint)


def route_address(daemon: str) -> str:
    """Return this host's address on the route towards the daemon, never a name (case C20).

    Raises:
        SettingError: there is no route.
    """
    parts = urlsplit(daemon)
    try:
        family, kind, _, _, place = posix.getaddrinfo(
            parts.hostname, parts.port, type=posix.SOCK_DGRAM
        )[0]
        with posix.socket(family, kind) as probe:
            probe.connect(place)
            host: str = probe.getsockname()[0]
    except OSError as error:
        text = f"no route to the daemon at {daemon!r} ({error}); set RANKGATE_LINK"
        raise SettingError(text) from error
    return f"[{host}]" if ":" in host else host
