"""Grants: the daemon's authorization of one transfer, checkable without a round trip.

A grant is its body's MessagePack followed by a 16-byte keyed BLAKE2b. The key belongs to one pair
of epochs and is given to source ranks only, so a source can check what a destination presents,
and nobody else can make one.
"""

from __future__ import annotations

import hashlib
import hmac

import msgspec

from rankgate.proto.fields import U32, U64, Digest, Id16, Milliseconds, Name, Rank, Request

MAC_BYTES = 16
MAX_GRANT_BYTES = 1024


class GrantError(ValueError):
    """A grant that cannot be read, or whose seal does not fit."""


class Grant(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One request's movement over a pair, and until when sources may act on it.

    Times are ticks: milliseconds of the daemon host's CLOCK_BOOTTIME, whose boot id is ``clock``.
    """

    transfer: U64
    instance: Id16
    clock: Id16
    issued: Milliseconds
    ttl: Milliseconds
    source_epoch: U64
    destination_epoch: U64
    source_dp: Rank = 0
    destination_dp: Rank = 0
    request: Request
    attempt: U32 = 0
    payload: Name = "cache"
    table_digest: Digest


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Grant)


def pair_key(
    master: bytes, source: str, source_epoch: int, destination: str, destination_epoch: int
) -> bytes:
    """Return the 32-byte grant key of one pair of sealed worlds."""
    text = f"{source}\0{source_epoch}\0{destination}\0{destination_epoch}"
    return hashlib.blake2b(
        text.encode(), key=master, digest_size=32, person=b"rankgate-grant"
    ).digest()


def seal_grant(grant: Grant, key: bytes) -> bytes:
    """Return the grant's bytes: body and 16-byte seal."""
    body = _ENCODER.encode(grant)
    return body + hashlib.blake2b(body, key=key, digest_size=MAC_BYTES).digest()


def read_grant(sealed: bytes) -> Grant:
    """Return the grant without checking its seal; for ranks that only hand it on.

    Raises:
        GrantError: too short, too long or not a grant.
    """
    if not MAC_BYTES < len(sealed) <= MAX_GRANT_BYTES:
        msg = f"a grant of {len(sealed)} bytes; expected {MAC_BYTES + 1}..{MAX_GRANT_BYTES}"
        raise GrantError(msg)
    try:
        return _DECODER.decode(sealed[:-MAC_BYTES])
    except (msgspec.DecodeError, RecursionError) as error:
        msg = f"a grant that cannot be read: {error}"
        raise GrantError(msg) from error


def open_grant(sealed: bytes, key: bytes) -> Grant:
    """Return the grant after checking its seal.

    Raises:
        GrantError: unreadable, or sealed under another key.
    """
    grant = read_grant(sealed)
    expected = hashlib.blake2b(sealed[:-MAC_BYTES], key=key, digest_size=MAC_BYTES).digest()
    if not hmac.compare_digest(expected, sealed[-MAC_BYTES:]):
        msg = f"the seal of the grant for request {grant.request!r} does not fit"
        raise GrantError(msg)
    return grant
