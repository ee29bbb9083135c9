"""The one clock: CLOCK_BOOTTIME, which goes on while the host sleeps and never steps (case C26)."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boottime_ms() -> int:
    """Return milliseconds since the host booted; the protocol's tick."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


def boot_id() -> bytes:
    """Return the 16 bytes that name this boot of the host: the protocol's clock id."""
    return uuid.UUID(_BOOT_ID.read_text().strip()).bytes
