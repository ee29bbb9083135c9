"""Golden bytes of wire 1: read by the codec, and by a client that knows MessagePack and no more."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import msgpack
import pytest

from rankgate.proto.codec import Header, decode, encode
from rankgate.proto.messages import KIND_OF, MESSAGES, Kind

VECTORS = json.loads(
    (Path(__file__).parents[2] / "proto" / "vectors" / "messages.json").read_text("utf-8")
)
EACH = pytest.mark.parametrize(
    "vector", VECTORS["messages"], ids=[vector["about"] for vector in VECTORS["messages"]]
)


def meaning(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Return a JSON value with its bytes restored."""
    if isinstance(value, dict):
        if set(value) == {"hex"}:
            return bytes.fromhex(value["hex"])
        return {key: meaning(item) for key, item in value.items()}
    if isinstance(value, list):
        return [meaning(item) for item in value]
    return value


@EACH
def test_an_independent_client_reads_the_golden_bytes(vector: dict[str, Any]) -> None:
    """struct and msgpack alone give the header and the meaning."""
    header, body = map(bytes.fromhex, vector["frames"])
    assert struct.unpack(">2sBBQ", header) == (
        b"RG",
        VECTORS["wire"],
        vector["kind"],
        vector["id"],
    )
    assert msgpack.unpackb(body, strict_map_key=True) == meaning(vector["body"])


@EACH
def test_the_codec_reads_and_writes_the_golden_bytes(vector: dict[str, Any]) -> None:
    """These bytes never change within wire 1."""
    frames = [bytes.fromhex(frame) for frame in vector["frames"]]
    header, message = decode(frames)
    assert header == Header(VECTORS["wire"], vector["kind"], vector["id"])
    assert type(message) is MESSAGES[Kind(vector["kind"])]
    assert type(message).__name__ == vector["name"]
    assert KIND_OF[type(message)] == vector["kind"]
    assert encode(message, vector["id"]) == frames


@EACH
def test_what_an_independent_client_writes_is_read_the_same(vector: dict[str, Any]) -> None:
    """Another encoder, another order of fields: the same message."""
    frames = [bytes.fromhex(frame) for frame in vector["frames"]]
    plain = meaning(vector["body"])
    turned = dict(reversed(list(plain.items())))
    for body in (plain, turned):
        assert decode([frames[0], msgpack.packb(body)])[1] == decode(frames)[1]


def test_the_vectors_cover_every_conversation() -> None:
    """Session, pushes, requests and agent to agent each have golden bytes."""
    kinds = {vector["kind"] for vector in VECTORS["messages"]}
    assert {0, 1, 3, 4, 5, 8} <= kinds
    assert {16, 18, 21} <= kinds
    assert {32, 34, 35, 36} <= kinds
    assert {64, 68} <= kinds
