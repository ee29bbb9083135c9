"""Bounded field types shared by all messages; msgspec checks them while it decodes."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from rankgate.proto.limits import (
    MAX_ITEMS,
    MAX_NAME,
    MAX_PAGES,
    MAX_REQUEST,
    MAX_TEXT,
    MAX_WORLD_SIZE,
)

U32 = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
# msgspec cannot hold an upper bound of 2^64-1; MessagePack itself ends there.
U64 = Annotated[int, Meta(ge=0)]
Size = Annotated[int, Meta(ge=1, le=MAX_WORLD_SIZE)]
Rank = Annotated[int, Meta(ge=0, le=MAX_WORLD_SIZE - 1)]
Count = Annotated[int, Meta(ge=0, le=MAX_WORLD_SIZE)]
Layer = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
PageIndex = Annotated[int, Meta(ge=0, le=MAX_PAGES - 1)]
Milliseconds = Annotated[int, Meta(ge=0, le=(1 << 53) - 1)]
Id16 = Annotated[bytes, Meta(min_length=16, max_length=16)]
Digest = Annotated[bytes, Meta(min_length=16, max_length=16)]
Name = Annotated[str, Meta(max_length=MAX_NAME)]
Request = Annotated[str, Meta(max_length=MAX_REQUEST)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Layers = Annotated[list[Layer], Meta(max_length=MAX_ITEMS)]
Ranks = Annotated[list[Rank], Meta(max_length=MAX_ITEMS)]
Blob = Annotated[bytes, Meta(max_length=1 << 20)]
