"""One set of ZeroMQ socket options for every socket of every part (cases D06, D08, D11, D16).

Nothing here touches a socket by itself: the caller hands one in, and the options are set by
pyzmq's attribute names, so that the ground floor needs no ZeroMQ.
"""

from __future__ import annotations

import ctypes
from typing import Final

from rankgate.proto.limits import MAX_FRAME_BYTES

SOCKET_OPTIONS: Final[dict[str, int]] = {
    "linger": 0,  # exit never waits for a peer that is gone (D08)
    "sndhwm": 1000,
    "rcvhwm": 1000,
    "maxmsgsize": MAX_FRAME_BYTES,  # before bind, on every socket (D16)
    "handshake_ivl": 2000,
    "heartbeat_ivl": 1000,  # a stopped host is noticed in 3 s, not in 2 h (D11)
    "heartbeat_timeout": 3000,
    "heartbeat_ttl": 3000,
    "connect_timeout": 2000,  # not the kernel's 127 s
    "reconnect_ivl": 50,
    "reconnect_ivl_max": 2000,
    "tcp_keepalive": 1,
    "tcp_keepalive_idle": 30,
    "tcp_keepalive_intvl": 10,
    "tcp_keepalive_cnt": 3,
    "ipv6": 1,
}
"""pyzmq attribute -> value; milliseconds, seconds (keepalive), messages or bytes."""


def configure_socket(socket: object, **overrides: int) -> None:
    """Set all options on a fresh pyzmq socket, before it binds or connects."""
    for name, value in {**SOCKET_OPTIONS, **overrides}.items():
        setattr(socket, name, value)


def seed_routing_ids(seed: int) -> None:
    """Seed libc's ``rand`` (32 bits), once per process and before its first socket.

    libzmq draws routing ids from ``rand`` and never seeds it, so they start alike in every
    process; a client that claims an id not yet given out would make the next connection abort
    the whole ROUTER process.
    """
    ctypes.CDLL(None).srand(ctypes.c_uint(seed & 0xFFFFFFFF))
