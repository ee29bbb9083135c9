"""systemd's notification protocol (sd_notify), as much of it as a daemon needs.

Written here since the libraries for it are unmaintained or need libsystemd for a datagram.
"""

from __future__ import annotations

import os
import socket


class Notifier:
    """Tells the service manager what the daemon is doing.

    Invariant: silent without NOTIFY_SOCKET; ``watchdog_seconds`` is half of what systemd waits,
    and None when the watchdog is off or meant for another process (case E02).
    """

    def __init__(self) -> None:
        """Read NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID."""
        address = os.environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._status = ""
        self.watchdog_seconds = _watchdog_seconds()

    def ready(self) -> None:
        """Say that the daemon serves."""
        self._send("READY=1")

    def stopping(self) -> None:
        """Say that the daemon stops on purpose."""
        self._send("STOPPING=1")

    def alive(self) -> None:
        """Say that the serving loop makes progress."""
        self._send("WATCHDOG=1")

    def status(self, text: str) -> None:
        """Show one line in ``systemctl status``, when it changes."""
        if text != self._status:
            self._status = text
            self._send(f"STATUS={text}")

    def _send(self, line: str) -> None:
        if not self._address:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
            channel.setblocking(False)
            try:
                channel.sendto(line.encode(), self._address)
            except OSError:
                return  # the manager is behind or restarts; it hears the next one


def _watchdog_seconds() -> float | None:
    usec, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not usec.isdigit() or int(usec) == 0 or (pid and pid != str(os.getpid())):
        return None
    return int(usec) / 2_000_000
