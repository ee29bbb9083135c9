"""The codec: every kind there and back, and nothing a peer sends does more than a WireError."""

from __future__ import annotations

import struct
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankgate.proto.codec import (
    HEADER_BYTES,
    Header,
    WireError,
    decode,
    decode_blob,
    decode_header,
    encode,
    encode_blob,
    encode_header,
)
from rankgate.proto.codes import Code
from rankgate.proto.limits import MAX_BATCH, MAX_BODY_BYTES, MAX_DEPTH, MAX_TEXT
from rankgate.proto.messages import (
    KIND_OF,
    MESSAGES,
    Heartbeat,
    Hello,
    Kind,
    Metadata,
    Open,
    OpenItem,
    Refusal,
    Region,
    Rejected,
)
from tests.proto.strategies import any_message, of

ID = 0x0102030405060708
HELLO: dict[str, Any] = {
    "world": "p",
    "rank": 3,
    "incarnation": bytes(16),
    "round": bytes(range(16)),
}


def header(kind: int, version: int = 1) -> bytes:
    """Return a header made without the codec."""
    return struct.pack(">2sBBQ", b"RG", version, kind, ID)


def refused(kind: int, body: bytes, version: int = 1) -> WireError:
    """Return the error of a message that must be refused."""
    with pytest.raises(WireError) as caught:
        decode([header(kind, version), body])
    error = caught.value
    again = decode(encode(error.answer, error.id))[1]
    assert again == error.answer
    return error


def refused_hello(**changes: Any) -> WireError:  # noqa: ANN401 - any MessagePack value
    """Return the error of a Hello with some fields changed."""
    return refused(Kind.HELLO, msgpack.packb({**HELLO, **changes}))


# --- there and back ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(Kind), ids=lambda kind: kind.name.lower())
def test_every_kind_has_a_message_and_its_number(kind: Kind) -> None:
    """The tables are inverse; numbers are those of the specification for ever."""
    assert KIND_OF[MESSAGES[kind]] is kind
    assert MESSAGES[kind].__doc__


@given(any_message(), st.integers(0, (1 << 64) - 1))
def test_every_message_survives_the_wire(drawn: tuple[Kind, Any], number: int) -> None:
    """Encode, decode: the same header and the same message."""
    kind, message = drawn
    frames = encode(message, number)
    assert len(frames[0]) == HEADER_BYTES == 12
    assert decode(frames) == (Header(1, kind, number), message)
    assert decode([*frames, b"raw"])[1] == message


@given(any_message())
def test_every_message_is_plain_messagepack(drawn: tuple[Kind, Any]) -> None:
    """An independent client reads a map by field names, and what it writes is read the same."""
    kind, message = drawn
    frames = encode(message, ID)
    assert struct.unpack(">2sBBQ", frames[0]) == (b"RG", 1, kind, ID)
    plain = msgpack.unpackb(frames[1], strict_map_key=True)
    assert set(plain) <= {field.name for field in msgspec.structs.fields(type(message))}
    assert decode([header(kind), msgpack.packb(plain)])[1] == message
    assert decode([header(kind), msgpack.packb({**plain, "new field": [1, {"x": None}]})])[1] == (
        message
    )


def test_defaults_may_be_left_out_or_spelled_out() -> None:
    """Both forms are the same message; the codec leaves them out."""
    body = encode(Heartbeat(session=5), ID)[1]
    assert msgpack.unpackb(body) == {"session": 5}
    spelled = msgpack.packb({"session": 5, "acked": 0})
    assert decode([header(Kind.HEARTBEAT), spelled])[1] == Heartbeat(session=5)


def test_a_refusal_always_tells_the_range() -> None:
    """Kind 0 spells everything out, so that a peer of any version can read it."""
    body = encode(Refusal(code="RG201", text="x"), ID)[1]
    assert msgpack.unpackb(body) == {"code": "RG201", "text": "x", "min": 1, "max": 1}


def test_A38_numbers_of_64_bits_are_exact() -> None:
    """2^64 - 1 travels as itself; a float or one more is refused."""
    big = (1 << 64) - 1
    assert decode([header(Kind.HEARTBEAT), msgpack.packb({"session": big})])[1] == Heartbeat(
        session=big
    )
    assert refused(Kind.HEARTBEAT, msgpack.packb({"session": float(big)})).code is (
        Code.FIELD_INVALID
    )


def test_headers_are_made_and_read_alone() -> None:
    """A header for many peers is the one that encode makes."""
    made = encode_header(Kind.HEARTBEAT, ID)
    assert made == header(Kind.HEARTBEAT) == encode(Heartbeat(session=1), ID)[0]
    assert decode_header(encode_header(5, 0, version=9)) == Header(9, 5, 0)


# --- headers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "frame", [b"", b"RG", header(1)[:11], header(1) + b"x", b"XX" + header(1)[2:], b"GET / HTTP/1"]
)
def test_D16_what_has_no_header_is_refused_under_id_0(frame: bytes) -> None:
    """Random bytes, HTTP, or a header of another length: kind 0, nothing else."""
    with pytest.raises(WireError) as caught:
        decode([frame, b"\x80"])
    assert caught.value.code is Code.HEADER_INVALID
    assert caught.value.id == 0
    assert isinstance(caught.value.answer, Refusal)
    with pytest.raises(WireError):
        decode_header(frame)


def test_no_frames_and_missing_bodies_are_refused() -> None:
    """Nothing at all has no header; a header alone has no body."""
    with pytest.raises(WireError) as caught:
        decode([])
    assert caught.value.code is Code.HEADER_INVALID
    with pytest.raises(WireError) as caught:
        decode([header(Kind.HELLO)])
    assert caught.value.code is Code.BODY_INVALID
    assert caught.value.id == ID


@pytest.mark.parametrize("version", [0, 2, 255])
def test_A12_another_version_is_refused_before_the_body_is_looked_at(version: int) -> None:
    """An unreadable body of another version: kind 0 with the range, no decode error."""
    error = refused(Kind.HELLO, b"\xc1\xff not MessagePack", version)
    assert error.code is Code.WIRE_VERSION
    assert error.id == ID
    assert isinstance(error.answer, Refusal)
    assert (error.answer.code, error.answer.min, error.answer.max) == ("RG201", 1, 1)
    assert f"wire version {version}" in error.answer.text
    frames = encode(error.answer, error.id)
    plain = msgpack.unpackb(frames[1])
    assert (frames[0][3], plain["min"], plain["max"]) == (0, 1, 1)


def test_B20_an_unknown_kind_is_answered() -> None:
    """Every number that is no kind gets kind 0 under its own id; its body does not matter."""
    for kind in sorted(set(range(256)) - set(Kind)):
        error = refused(kind, b"\xc1")
        assert error.code is Code.KIND_UNKNOWN
        assert error.id == ID
        assert isinstance(error.answer, Refusal)
        assert f"kind {kind}" in error.text


# --- bodies --------------------------------------------------------------------------------------


def nested(depth: int) -> object:
    """Return ``depth`` lists in each other."""
    value: object = 0
    for _ in range(depth):
        value = [value]
    return value


GOOD = msgpack.packb(HELLO)
BAD_BODIES: dict[str, bytes] = {
    "empty": b"",
    "truncated": GOOD[:-1],
    "trailing": GOOD + b"\x00",
    "two maps": GOOD + GOOD,
    "invalid opcode": b"\x81\xa1x\xc1",
    "not UTF-8": msgpack.packb({**HELLO, "x": "?"}).replace(b"\xa1?", b"\xa1\xff"),
    "repeated field": b"\x85" + GOOD[1:] + msgpack.packb("rank") + b"\x07",
    "repeated unknown": b"\x86" + GOOD[1:] + 2 * (msgpack.packb("x") + b"\x07"),
    "repeated inside": msgpack.packb({**HELLO, "x": {"a": 1}}).replace(
        b"\x81\xa1a\x01", b"\x82\xa1a\x01\xa1a\x01"
    ),
    "Ext": msgpack.packb({**HELLO, "x": msgpack.ExtType(5, b"..")}),
    "Ext timestamp": msgpack.packb({**HELLO, "x": msgpack.Timestamp(1, 2)}),
    "Ext deep": msgpack.packb({**HELLO, "x": [{"y": [msgpack.ExtType(9, b"....")]}]}),
    "NaN": msgpack.packb({**HELLO, "x": float("nan")}),
    "inf": msgpack.packb({**HELLO, "x": [float("-inf")]}),
    "number as key": msgpack.packb(dict([*HELLO.items(), (5, 1)])),
    "too deep": msgpack.packb({**HELLO, "x": nested(MAX_DEPTH)}),
    "far too deep": msgpack.packb({**HELLO, "x": 0})[:-1] + b"\x91" * 100_000 + b"\x00",
    "long array": msgpack.packb({**HELLO, "x": [0] * ((1 << 16) + 1)}),
    "long map": msgpack.packb({**HELLO, "x": {str(i): 0 for i in range((1 << 16) + 1)}}),
    "huge array announced": msgpack.packb({**HELLO, "x": 0})[:-1] + b"\xdd\xff\xff\xff\xff",
    "huge text announced": msgpack.packb({**HELLO, "x": 0})[:-1] + b"\xdb\xff\xff\xff\xff",
}


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES)
def test_an_unreadable_body_is_refused_with_why(body: bytes) -> None:
    """RG203 under the message's id, as Rejected."""
    error = refused(Kind.HELLO, body)
    assert error.code is Code.BODY_INVALID
    assert error.id == ID
    assert isinstance(error.answer, Rejected)
    assert error.answer.findings[0].code == "RG203"
    assert error.text in error.answer.findings[0].message


def test_the_limits_themselves_are_allowed() -> None:
    """Just as deep, just as long, just as large as allowed is fine."""
    for value in (nested(MAX_DEPTH - 1), [0] * (1 << 16), {str(i): 0 for i in range(1 << 16)}):
        assert decode([header(Kind.HELLO), msgpack.packb({**HELLO, "x": value})])[1].rank == 3  # type: ignore[attr-defined]
    room = MAX_BODY_BYTES - len(msgpack.packb({**HELLO, "x": bytes(1 << 16)})) + (1 << 16)
    exact = msgpack.packb({**HELLO, "x": bytes(room)})
    assert len(exact) == MAX_BODY_BYTES
    assert decode([header(Kind.HELLO), exact])[1].rank == 3  # type: ignore[attr-defined]


def test_D16_an_oversize_body_is_refused_unread() -> None:
    """One byte more: RG206 with both sizes, whatever it holds."""
    error = refused(Kind.HELLO, bytes(MAX_BODY_BYTES + 1))
    assert error.code is Code.TOO_LARGE
    assert isinstance(error.answer, Refusal)
    assert str(MAX_BODY_BYTES + 1) in error.text
    assert str(MAX_BODY_BYTES) in error.text


def test_D17_a_pickle_is_no_message() -> None:
    """Bytes that would run code elsewhere are unreadable here."""
    bomb = b"cos\nsystem\n(S'false'\ntR."
    assert refused(Kind.HELLO, bomb).code in {Code.BODY_INVALID, Code.FIELD_INVALID}


# --- fields --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("rank", "3", "'3'"),
        ("rank", -1, "-1"),
        ("rank", 1 << 32, str(1 << 32)),
        ("rank", 1.0, "1.0"),
        ("rank", 0.5, "0.5"),
        ("rank", True, "True"),
        ("rank", None, "None"),
        ("rank", [3], "[3]"),
        ("world", 5, "5"),
        ("world", b"p", "b'p'"),
        ("world", "x" * 65, "'xxx"),
        ("incarnation", bytes(15), "b'"),
        ("incarnation", bytes(17), "b'"),
        ("incarnation", "x" * 16, "'xxxxxxxxxxxxxxxx'"),
    ],
)
def test_a_wrong_field_is_named_with_its_value(field: str, value: object, shown: str) -> None:
    """RG204 has the field's path and what was sent."""
    error = refused_hello(**{field: value})
    assert error.code is Code.FIELD_INVALID
    assert isinstance(error.answer, Rejected)
    (found,) = error.answer.findings
    assert found.field == field
    assert found.field in found.message
    assert shown in found.message


def test_a_wrong_field_deep_inside_is_named_by_its_path() -> None:
    """Lists are indexed, maps are entered; the value is that of the place."""
    item = {"request": "r", "source_epoch": 1, "destination_epoch": 2, "table_digest": bytes(16)}
    bad = {**item, "source_epoch": "one"}
    error = refused(Kind.OPEN, msgpack.packb({"session": 1, "items": [item, bad]}))
    assert isinstance(error.answer, Rejected)
    assert error.answer.findings[0].field == "items[1].source_epoch"
    assert "'one'" in error.answer.findings[0].message


def test_a_wrong_value_in_a_map_is_shown_with_its_map() -> None:
    """The decoder does not tell the key, so the whole (short) map is shown."""
    body = msgpack.packb({"grant": b"", "counts": {"full": -1}, "credit": 1})
    error = refused(Kind.PRESENT, body)
    assert isinstance(error.answer, Rejected)
    assert error.answer.findings[0].field == "counts[...]"
    assert "{'full': -1}" in error.answer.findings[0].message


def test_long_values_are_shortened() -> None:
    """A refusal never carries a flood back."""
    error = refused_hello(rank="9" * 100_000)
    assert isinstance(error.answer, Rejected)
    assert len(error.answer.findings[0].message) < 300
    assert "..." in error.answer.findings[0].message


@pytest.mark.parametrize("missing", list(HELLO))
def test_a_missing_field_is_named(missing: str) -> None:
    """The message says which one."""
    body = {name: value for name, value in HELLO.items() if name != missing}
    error = refused(Kind.HELLO, msgpack.packb(body))
    assert error.code is Code.FIELD_INVALID
    assert f"`{missing}`" in error.text


@pytest.mark.parametrize("body", [[1, 2], 5, None, "x", {b"world": "p"}, {1: 2}])
def test_a_body_that_is_no_map_by_names_is_refused(body: object) -> None:
    """Arrays, numbers, nothing, or maps by other keys."""
    error = refused(Kind.HELLO, msgpack.packb(body))
    assert error.code in {Code.FIELD_INVALID, Code.BODY_INVALID}


def test_C08_batches_are_bounded() -> None:
    """One item more than allowed is RG204."""
    item = OpenItem(request="r", source_epoch=1, destination_epoch=2, table_digest=bytes(16))
    assert decode(encode(Open(session=1, items=[item] * MAX_BATCH), ID))
    error = refused(Kind.OPEN, encode(Open(session=1, items=[item] * (MAX_BATCH + 1)), ID)[1])
    assert error.code is Code.FIELD_INVALID
    assert "items" in error.text or "items" in error.answer.findings[0].field  # type: ignore[union-attr]


# --- whatever the bytes --------------------------------------------------------------------------


def never_more_than_a_wire_error(frames: list[bytes]) -> None:
    """Decode; the only exception is WireError, and its answer can be sent and read."""
    error: WireError | None = None
    try:
        seen, message = decode(frames)
    except WireError as caught:
        error = caught
    else:
        assert decode(encode(message, seen.id))[1] == message
    if error is not None:
        assert decode(encode(error.answer, error.id))[1] == error.answer
        assert len(error.text) < MAX_TEXT


@given(st.lists(st.binary(max_size=64), max_size=3))
def test_arbitrary_frames(frames: list[bytes]) -> None:
    """Any frames at all."""
    never_more_than_a_wire_error(frames)


@given(st.sampled_from(list(Kind)), st.binary(max_size=200))
def test_arbitrary_bodies(kind: Kind, body: bytes) -> None:
    """Any bytes under any kind."""
    never_more_than_a_wire_error([header(kind), body])


_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=20)
)
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(any_message(), st.data())
def test_mutated_bytes_of_valid_messages(drawn: tuple[Kind, Any], data: st.DataObject) -> None:
    """Flip, cut, insert or repeat bytes anywhere."""
    kind, message = drawn
    body = bytearray(encode(message, ID)[1])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body)))
        size = data.draw(st.integers(0, 4))
        body[at : at + size] = data.draw(st.binary(max_size=4) | st.just(bytes(body[at:])))
    never_more_than_a_wire_error([header(kind), bytes(body)])


@given(any_message(), st.data())
def test_mutated_values_of_valid_messages(drawn: tuple[Kind, Any], data: st.DataObject) -> None:
    """Put any value at any place of a valid message."""
    kind, message = drawn
    plain = msgpack.unpackb(encode(message, ID)[1])
    place: Any = plain
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            break
        key = data.draw(st.sampled_from(keys))
        deeper = isinstance(place[key], dict | list) and len(place[key])
        if deeper and data.draw(st.booleans()):
            place = place[key]
            continue
        place[key] = data.draw(_VALUES)
        break
    never_more_than_a_wire_error([header(kind), msgpack.packb(plain)])


# --- blobs ---------------------------------------------------------------------------------------


@given(of(Metadata))
def test_blobs_travel_like_bodies(metadata: Metadata) -> None:
    """Structs inside messages are read with the same care."""
    assert decode_blob(encode_blob(metadata), Metadata) == metadata


@pytest.mark.parametrize(
    "blob", [b"", b"\xc1", b"\x80", encode_blob(Region(group="g", part="k", layer=0, length=1))]
)
def test_a_broken_blob_is_a_wire_error(blob: bytes) -> None:
    """Never anything else."""
    with pytest.raises(WireError) as caught:
        decode_blob(blob, Metadata)
    assert caught.value.id == 0


def test_a_hello_of_wire_1_as_another_program_would_send_it() -> None:
    """Made by hand from the specification."""
    body = b"\x84\xa5world\xa1p\xa4rank\x03\xabincarnation\xc4\x10" + bytes(16)
    body += b"\xa5round\xc4\x10" + bytes(range(16))
    _, message = decode([b"RG\x01\x01" + bytes(7) + b"\x09", body])
    assert message == Hello(world="p", rank=3, incarnation=bytes(16), round=bytes(range(16)))
