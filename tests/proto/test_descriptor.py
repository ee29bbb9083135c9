"""Descriptors, digests, limits and socket options."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import msgpack
import msgspec
import pytest

from rankgate.proto import limits
from rankgate.proto.codec import WireError, decode, encode
from rankgate.proto.descriptor import (
    Coordinates,
    Descriptor,
    KvGroup,
    Layout,
    Model,
    Software,
    StateComponent,
    Transport,
)
from rankgate.proto.digests import digest_bytes, digest_of
from rankgate.proto.messages import Kind, Register, Slice
from rankgate.proto.sockets import SOCKET_OPTIONS, configure_socket, seed_routing_ids

DEEPSEEK = Descriptor(
    world="prefill-0",
    role="prefill",
    rank=5,
    world_size=8,
    coordinates=Coordinates(tp=5),
    layout=Layout(tp=8),
    software=Software(engine="sglang", version="0.5.16", agent="0.1.0"),
    model=Model(
        name="deepseek-ai/DeepSeek-V3", revision="e815299b0bcbac849fa540c768ef21845365c9eb"
    ),
    kv=[
        KvGroup(
            name="full",
            kind="mla",
            dtype="bfloat16",
            page_size=64,
            pages=32_768,
            total_heads=1,
            local_heads=1,
            head_dim=576,
            v_head_dim=0,
            layers=list(range(61)),
            k_item_len=64 * 576 * 2,
        )
    ],
    transport=Transport(
        kind="zmq",
        address="tcp://prefill-0-node-17.cluster.local:45017",
        host="prefill-0-node-17",
        metadata_digest=bytes(range(16)),
    ),
)


def registration(descriptor: Descriptor) -> bytes:
    """Return the body of a Register."""
    return encode(Register(incarnation=bytes(16), round=bytes(16), descriptor=descriptor), 1)[1]


def test_a_61_layer_model_registers_in_about_a_kilobyte() -> None:
    """Uniform layers are one group: at most 1.5 KB, also with a window and a state."""
    assert len(registration(DEEPSEEK)) <= 1024
    swa = msgspec.structs.replace(DEEPSEEK.kv[0], name="swa", layers=list(range(1, 61, 2)))
    state = StateComponent(
        kind="MAMBA", dtype="float32", layers=list(range(0, 61, 2)), item_lens=[1 << 20] * 31
    )
    hybrid = msgspec.structs.replace(DEEPSEEK, kv=[*DEEPSEEK.kv, swa], state=[state])
    assert len(registration(hybrid)) <= 1536


def test_D16_a_huge_descriptor_fits_the_limit() -> None:
    """512 layers in 64 groups are far below the largest body."""
    groups = [
        msgspec.structs.replace(DEEPSEEK.kv[0], name=f"g{n}", layers=list(range(512)))
        for n in range(64)
    ]
    assert len(registration(msgspec.structs.replace(DEEPSEEK, kv=groups))) < limits.MAX_BODY_BYTES


def test_a_descriptor_survives_the_wire() -> None:
    """There and back, with 64-bit lengths."""
    large = msgspec.structs.replace(DEEPSEEK.kv[0], k_item_len=(1 << 64) - 1)
    described = msgspec.structs.replace(DEEPSEEK, kv=[large])
    register = Register(incarnation=bytes(16), round=bytes(16), descriptor=described)
    assert decode(encode(register, 1))[1] == register


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("kv[0].page_size", 0),
        ("kv[0].page_size", -64),
        ("kv[0].page_size", 64.0),
        ("kv[0].pages", 1 << 40),
        ("kv[0].total_heads", 0),
        ("kv[0].local_heads", -1),
        ("kv[0].head_dim", 1 << 30),
        ("kv[0].layers[0]", -1),
        ("kv[0].k_item_len", -1),
        ("layout.tp", 0),
        ("layout.tp", 1 << 20),
        ("coordinates.tp", -1),
        ("rank", -1),
        ("world_size", 0),
        ("transport.metadata_digest", bytes(15)),
    ],
)
def test_impossible_sizes_are_refused_with_their_path(path: str, value: object) -> None:
    """Negative, zero, huge and non-integer sizes never reach a rule."""
    plain = msgpack.unpackb(registration(DEEPSEEK))
    place = plain["descriptor"]
    steps = path.replace("[", ".[").split(".")
    for step in steps[:-1]:
        place = place[int(step[1:-1]) if step[0] == "[" else step]
    last = steps[-1]
    place[int(last[1:-1]) if last[0] == "[" else last] = value
    with pytest.raises(WireError) as caught:
        decode(
            [
                encode(Register(incarnation=bytes(16), round=bytes(16), descriptor=DEEPSEEK), 7)[0],
                msgpack.packb(plain),
            ]
        )
    assert caught.value.id == 7
    (found,) = caught.value.answer.findings  # type: ignore[union-attr]
    assert found.code == "RG204"
    assert found.field == f"descriptor.{path}"
    assert str(value)[:20] in found.message


def test_sizes_of_a_layout() -> None:
    """dcp lies inside tp and does not multiply."""
    layout = Layout(pp=2, dp=3, cp=5, tp=8, dcp=4)
    assert (layout.world_size, layout.slots) == (240, 80)


def test_bytes_of_a_slice() -> None:
    """Layers x runs x length, for one page."""
    piece = Slice(
        group="full",
        part="k",
        source_layer=0,
        destination_layer=0,
        layers=3,
        source_offset=0,
        destination_offset=0,
        length=5,
        count=7,
    )
    assert piece.page_bytes == 105


def test_digests_follow_content_and_not_order_of_keys() -> None:
    """Equal values have one digest on every machine; any difference shows."""
    assert digest_of({"a": 1, "b": [2]}) == digest_of({"b": [2], "a": 1})
    assert digest_of(DEEPSEEK) == digest_of(msgspec.structs.replace(DEEPSEEK))
    assert digest_of(DEEPSEEK) != digest_of(msgspec.structs.replace(DEEPSEEK, rank=6))
    assert digest_bytes(b"").hex() == "cae66941d9efbd404e4d88758ea67670"
    assert digest_of([1, "a"]) == digest_bytes(msgpack.packb([1, "a"]))


def test_D08_every_socket_gets_the_same_options() -> None:
    """Linger 0, bounded sizes, heartbeats, keepalive; single ones can be overridden."""
    socket = SimpleNamespace()
    configure_socket(socket, rcvhwm=5)
    assert vars(socket) == {**SOCKET_OPTIONS, "rcvhwm": 5}
    assert socket.linger == 0
    assert socket.maxmsgsize == limits.MAX_FRAME_BYTES >= limits.MAX_BODY_BYTES
    assert socket.heartbeat_ivl > 0
    assert socket.tcp_keepalive == 1


def test_routing_ids_are_seeded_from_32_bits() -> None:
    """libc's rand starts elsewhere for another seed, whatever its size."""
    program = (
        "import ctypes, sys\n"
        "from rankgate.proto.sockets import seed_routing_ids\n"
        "seed_routing_ids(int(sys.argv[1]))\n"
        "print(ctypes.CDLL(None).rand())\n"
    )

    def first(seed: int) -> str:
        command = [sys.executable, "-c", program, str(seed)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert first(1) == first(1 + (1 << 40))
    assert first(1) != first(2)
    seed_routing_ids(1 << 70)


def test_limits_fit_each_other() -> None:
    """A full batch of the largest items still fits a body."""
    assert limits.MAX_BODY_BYTES < limits.MAX_FRAME_BYTES < limits.MAX_DATA_FRAME_BYTES
    assert limits.MAX_BATCH * 512 <= limits.MAX_BODY_BYTES
    assert limits.MAX_ITEMS >= limits.MAX_WORLD_SIZE
    assert limits.MAX_PAGES_PER_REQUEST <= limits.MAX_ITEMS
    assert int(Kind.REFUSAL) == 0
