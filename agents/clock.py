"""The agent's one clock: CLOCK_BOOTTIME, which goes on while the host sleeps (case C26)."""

from __future__ import annotations

import time


def boottime_ms() -> int:
    """Return milliseconds since the host booted."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000
