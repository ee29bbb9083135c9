"""Frames to messages and back.

Frame 1 is a 12-byte header: ``"RG"``, wire version u8, kind u8, message id u64 big-endian.
Frame 2 is one MessagePack map by field names. Further frames are raw data and are not looked at.
Unknown fields are ignored; Ext types, non-finite floats, repeated keys, trailing bytes, over-long
and over-deep input are refused with a :class:`WireError`, which carries the answer to send.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgpack
import msgspec

from rankgate.proto.codes import Code
from rankgate.proto.findings import finding
from rankgate.proto.limits import MAX_BODY_BYTES, MAX_DEPTH, MAX_ITEMS
from rankgate.proto.messages import (
    KIND_OF,
    MESSAGES,
    WIRE_MAX,
    WIRE_MIN,
    Refusal,
    Rejected,
)

MAGIC: Final = b"RG"
_HEADER = struct.Struct(">2sBBQ")
HEADER_BYTES: Final = _HEADER.size

_ENCODER = msgspec.msgpack.Encoder()
_DECODERS: Final[dict[int, msgspec.msgpack.Decoder[Any]]] = {
    kind: msgspec.msgpack.Decoder(message) for kind, message in MESSAGES.items()
}


class Header(NamedTuple):
    """What frame 1 says."""

    version: int
    kind: int
    id: int


class WireError(ValueError):
    """A message that is refused; ``answer`` tells the sender why, under message id ``id``."""

    def __init__(self, code: Code, text: str, *, id: int = 0, field: str = "body") -> None:  # noqa: A002 - the wire's own term
        """Build the error and its answer: kind 0 where the reader may know nothing of us."""
        super().__init__(f"{code.id} {code.slug}: {text}")
        self.code = code
        self.text = text
        self.id = id
        self.answer: Refusal | Rejected
        if code in {Code.FIELD_INVALID, Code.BODY_INVALID}:
            self.answer = Rejected(findings=[finding(code, field, detail=text)])
        else:
            self.answer = Refusal(code=code.id, text=f"{code.slug}: {text}")


def encode(message: msgspec.Struct, id: int, *, version: int = WIRE_MAX) -> list[bytes]:  # noqa: A002 - the wire's own term
    """Return header and body frames of a message."""
    kind = KIND_OF[type(message)]
    return [_HEADER.pack(MAGIC, version, kind, id), _ENCODER.encode(message)]


def encode_header(kind: int, id: int, *, version: int = WIRE_MAX) -> bytes:  # noqa: A002 - the wire's own term
    """Return frame 1 alone, for a body that goes to many peers."""
    return _HEADER.pack(MAGIC, version, kind, id)


def decode_header(frame: bytes) -> Header:
    """Return what a header frame says, whatever its version.

    Raises:
        WireError: header_invalid, when it is not 12 bytes that begin with ``RG``.
    """
    if len(frame) != HEADER_BYTES or frame[:2] != MAGIC:
        seen = f"{len(frame)} bytes {bytes(frame[:12])!r}"
        text = f"frame 1 is {seen}; expected 12 that begin with b'RG'"
        raise WireError(Code.HEADER_INVALID, text)
    _, version, kind, message_id = _HEADER.unpack(frame)
    return Header(version, kind, message_id)


def decode(frames: Sequence[bytes]) -> tuple[Header, msgspec.Struct]:
    """Return the header and the message of at least two frames.

    The version is judged before the body is looked at (case A12), so a peer of another version
    gets an answer that it can read.

    Raises:
        WireError: with the answer to send; never anything else, whatever the bytes.
    """
    if not frames:
        raise WireError(Code.HEADER_INVALID, "no frame at all")
    header = decode_header(frames[0])
    if not WIRE_MIN <= header.version <= WIRE_MAX:
        text = f"wire version {header.version}; this side speaks {WIRE_MIN} to {WIRE_MAX}"
        raise WireError(Code.WIRE_VERSION, text, id=header.id)
    decoder = _DECODERS.get(header.kind)
    if decoder is None:
        text = f"kind {header.kind} is not one of wire version {header.version}"
        raise WireError(Code.KIND_UNKNOWN, text, id=header.id)
    if len(frames) < 2:  # noqa: PLR2004 - header and body
        raise WireError(Code.BODY_INVALID, "frame 2 is missing", id=header.id)
    return header, _decode_body(header, decoder, frames[1])


def _decode_body(
    header: Header, decoder: msgspec.msgpack.Decoder[Any], body: bytes
) -> msgspec.Struct:
    if len(body) > MAX_BODY_BYTES:
        text = f"the body is {len(body)} bytes; allowed are {MAX_BODY_BYTES}"
        raise WireError(Code.TOO_LARGE, text, id=header.id)
    try:
        message: msgspec.Struct = decoder.decode(body)
    except msgspec.ValidationError as error:
        loose = _strict(body, header.id)
        text, field = _explain(str(error), loose)
        raise WireError(Code.FIELD_INVALID, text, id=header.id, field=field) from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(Code.BODY_INVALID, str(error), id=header.id) from error
    # What a plain encoder writes again byte for byte holds no repeated key, Ext, or odd value;
    # only the rest (unknown fields, defaults spelled out) needs the slow and careful look.
    if _ENCODER.encode(message) != body:
        _strict(body, header.id)
    return message


def decode_blob(blob: bytes, of: type[msgspec.Struct]) -> Any:  # noqa: ANN401 - the type is asked for
    """Return a struct that travels as opaque bytes inside a message, such as Metadata.

    Raises:
        WireError: as for a body.
    """
    header = Header(WIRE_MAX, 0, 0)
    return _decode_body(header, msgspec.msgpack.Decoder(of), blob)


def encode_blob(value: msgspec.Struct) -> bytes:
    """Return the bytes that :func:`decode_blob` reads."""
    return _ENCODER.encode(value)


def _strict(body: bytes, message_id: int) -> Any:  # noqa: ANN401 - any MessagePack value
    try:
        value = msgpack.unpackb(
            body,
            raw=False,
            strict_map_key=True,
            object_pairs_hook=_unique,
            ext_hook=_no_ext,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
        )
        _check_depth(value, 0)
    except (ValueError, RecursionError) as error:  # msgpack's own errors are ValueErrors
        text = str(error) or type(error).__name__
        raise WireError(Code.BODY_INVALID, text, id=message_id) from error
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        msg = "a key is repeated in a map"
        raise ValueError(msg)
    return keys


def _no_ext(code: int, data: bytes) -> None:
    msg = f"Ext type {code} ({len(data)} bytes) is not allowed"
    raise ValueError(msg)


def _check_depth(value: object, depth: int) -> None:
    if depth > MAX_DEPTH:
        msg = f"nested deeper than {MAX_DEPTH}"
        raise ValueError(msg)
    if isinstance(value, dict):
        for item in value.values():
            _check_depth(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _check_depth(item, depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        msg = f"the number {value} is not finite"
        raise ValueError(msg)
    elif isinstance(value, msgpack.Timestamp):  # the Ext type that msgpack reads by itself
        msg = "Ext type -1 is not allowed"
        raise ValueError(msg)


def _explain(text: str, loose: object) -> tuple[str, str]:
    """Return msgspec's sentence with the offending value, and the field's path."""
    words, _, path = text.partition(" - at `")
    path = path.rstrip("`").rpartition("`")[2].removeprefix(" in ").removeprefix("$").lstrip(".")
    value = loose
    for step in path.replace("[", ".[").split("."):
        if step.startswith("[") and isinstance(value, list) and step[1:-1].isdigit():
            value = value[int(step[1:-1])]
        elif step and isinstance(value, dict) and step in value:
            value = value[step]
        elif step:
            break  # a key that msgspec does not tell: show the map
    shown = repr(value)
    return f"{words}; got {shown if len(shown) <= 80 else shown[:77] + '...'}", path or "body"  # noqa: PLR2004
