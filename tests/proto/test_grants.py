"""Grants: what was sealed for one pair of epochs opens under its key and under no other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rankgate.proto.grants import (
    MAC_BYTES,
    MAX_GRANT_BYTES,
    Grant,
    GrantError,
    open_grant,
    pair_key,
    read_grant,
    seal_grant,
)
from rankgate.proto.limits import MAX_REQUEST
from tests.proto.strategies import of

MASTER = bytes(range(32))
KEY = pair_key(MASTER, "p", 1, "d", 2)
GRANT = Grant(
    transfer=1 << 33,
    instance=bytes(16),
    clock=bytes(range(16)),
    issued=123_456,
    ttl=60_000,
    source_epoch=1,
    destination_epoch=2,
    request="r1",
    table_digest=bytes(16),
)


@given(of(Grant))
def test_a_grant_opens_under_its_key(grant: Grant) -> None:
    """Sealed, read without a key, and opened: always the same grant."""
    sealed = seal_grant(grant, KEY)
    assert read_grant(sealed) == grant
    assert open_grant(sealed, KEY) == grant


@given(st.data())
def test_any_altered_byte_is_noticed(data: st.DataObject) -> None:
    """Flip any bits of body or seal: refused, or at least never another grant."""
    sealed = bytearray(seal_grant(GRANT, KEY))
    at = data.draw(st.integers(0, len(sealed) - 1))
    sealed[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(GrantError):
        open_grant(bytes(sealed), KEY)


def test_other_keys_do_not_fit() -> None:
    """Another master, world, epoch or direction has another key; the message names the request."""
    sealed = seal_grant(GRANT, KEY)
    others = [
        pair_key(bytes(32), "p", 1, "d", 2),
        pair_key(MASTER, "q", 1, "d", 2),
        pair_key(MASTER, "p", 2, "d", 2),
        pair_key(MASTER, "p", 1, "d", 3),
        pair_key(MASTER, "d", 2, "p", 1),
        pair_key(MASTER, "p", 11, "d", 2),
    ]
    assert len({KEY, *others}) == len(others) + 1
    for key in others:
        assert len(key) == 32
        with pytest.raises(GrantError, match="'r1' does not fit"):
            open_grant(sealed, key)


def test_an_older_epochs_grant_does_not_open_under_the_new_epochs_key() -> None:
    """What was granted before a world re-formed is worth nothing after."""
    old = seal_grant(GRANT, KEY)
    with pytest.raises(GrantError):
        open_grant(old, pair_key(MASTER, "p", 3, "d", 2))


@pytest.mark.parametrize("length", [0, 1, MAC_BYTES, MAX_GRANT_BYTES + 1])
def test_grants_of_impossible_length_are_refused(length: int) -> None:
    """Too short for a seal, or longer than any grant."""
    with pytest.raises(GrantError, match=f"of {length} bytes"):
        read_grant(bytes(length))


@given(st.binary(max_size=MAX_GRANT_BYTES))
def test_bytes_that_are_no_grant_are_refused(data: bytes) -> None:
    """Only GrantError, whatever the bytes."""
    with pytest.raises(GrantError):
        open_grant(data, KEY)


def test_deep_and_wrong_bodies_are_refused() -> None:
    """Nesting beyond all bounds and a body of another shape."""
    for body in (b"\x81\xa1x" + b"\x91" * 900, b"\x80", b"\x90", b"\xc1"):
        with pytest.raises(GrantError, match="cannot be read"):
            read_grant(body + bytes(MAC_BYTES))


def test_the_largest_grant_fits() -> None:
    """The longest request id in the widest characters stays below the bound."""
    largest = replace(
        GRANT,
        request="\U0001f680" * MAX_REQUEST,
        transfer=(1 << 64) - 1,
        source_epoch=(1 << 64) - 1,
        destination_epoch=(1 << 64) - 1,
        issued=(1 << 53) - 1,
        ttl=(1 << 53) - 1,
        source_dp=(1 << 16) - 1,
        destination_dp=(1 << 16) - 1,
        attempt=(1 << 32) - 1,
        payload="embedding",
    )
    sealed = seal_grant(largest, KEY)
    assert len(sealed) <= MAX_GRANT_BYTES
    assert open_grant(sealed, KEY) == largest


def test_keys_and_seals_are_the_same_on_every_machine() -> None:
    """Fixed bytes: another program derives the same key and seal (BLAKE2b, keyed)."""
    assert KEY.hex() == "95c6f7b85b0cac0802ba9ba7fc6a9fae1f7ba01699a190dcc63ff3cbb16204f6"
    assert seal_grant(GRANT, KEY)[-MAC_BYTES:].hex() == "1f86b51c92cdb2f3a24f5d02339f6776"
