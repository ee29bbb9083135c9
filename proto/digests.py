"""Digests by which two programs prove that they speak of the same thing."""

from __future__ import annotations

import hashlib

import msgspec

_ENCODER = msgspec.msgpack.Encoder(order="deterministic")


def digest_of(value: object) -> bytes:
    """Return the BLAKE2b-128 (16 bytes) of a value's deterministic MessagePack."""
    return digest_bytes(_ENCODER.encode(value))


def digest_bytes(data: bytes) -> bytes:
    """Return the BLAKE2b-128 (16 bytes) of ``data``."""
    return hashlib.blake2b(data, digest_size=16).digest()
