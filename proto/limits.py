"""Bounds on everything a peer may send; one place, so that they can be read at a glance.

They exist to keep one peer from costing another its service (cases D16, C08). Each number is far
above what a real engine needs: a 61-layer descriptor is about 1 KB.
"""

MAX_FRAME_BYTES = 4 << 20
"""Largest control frame in bytes; libzmq drops a peer that sends more (MAXMSGSIZE)."""

MAX_BODY_BYTES = 1 << 20
"""Largest body (frame 2) in bytes of any control message."""

MAX_DATA_FRAME_BYTES = 64 << 20
"""Largest raw data frame in bytes between agents."""

MAX_DEPTH = 16
"""Deepest nesting of arrays and maps in a body."""

MAX_ITEMS = 1 << 16
"""Longest array or map in a body."""

MAX_COMPONENTS = 1024
"""Most KV groups, state components or capabilities of one rank, and findings in one message."""

MAX_BATCH = 1024
"""Most opens, grants, ends or outcomes in one message."""

MAX_NAME = 64
"""Longest world, group or component name, in characters."""

MAX_REQUEST = 128
"""Longest request id, in characters."""

MAX_TEXT = 4096
"""Longest human text a peer may send, in characters."""

MAX_WORLD_SIZE = 1 << 16
"""Largest world size in ranks."""

MAX_PAGES = 1 << 31
"""Largest page pool, in pages."""

MAX_PAGES_PER_REQUEST = 1 << 15
"""Most pages one request may name on one rank."""

U64_MAX = (1 << 64) - 1
"""Addresses and byte lengths are exact integers up to this (case A38)."""
