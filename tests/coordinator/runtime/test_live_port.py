"""Whatever arrives on the live port: it is answered or dropped, and the daemon goes on serving."""

from __future__ import annotations

import os
import pickle
import random
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest

from rankgate.proto.codec import encode
from rankgate.proto.codes import Code
from rankgate.proto.limits import MAX_BODY_BYTES, MAX_FRAME_BYTES
from rankgate.proto.messages import Heartbeat, Kind, NeedHello, Refusal, Rejected, Welcome
from tests.coordinator.runtime.live import Peer, Serving, hello, is_served


def header(kind: int = Kind.HELLO, version: int = 1, message_id: int = 7) -> bytes:
    """Return frame 1."""
    return struct.pack(">2sBBQ", b"RG", version, kind, message_id)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """One daemon for all of these, on ipc and tcp."""
    serving = Serving(tmp_path_factory.mktemp("live"))
    ready = serving.start("--listen", serving.agents, "--listen", "tcp://127.0.0.1:0", "--insecure")
    serving.tcp = ready["endpoints"][1]  # type: ignore[attr-defined]
    yield serving
    code, _ = serving.stop()
    serving.end()
    assert code == 0, "\n".join(serving.lines)


def nested(depth: int) -> bytes:
    """Return lists in lists."""
    return b"\x91" * depth + b"\xc0"


REFUSED = {
    "bad header": ([b"not a header", b"\x80"], Code.HEADER_INVALID, 0),
    "short header": ([b"RG", b"\x80"], Code.HEADER_INVALID, 0),
    "empty frames": ([b"", b""], Code.HEADER_INVALID, 0),
    "other version, unreadable body": ([header(version=9), b"\xc1\xff"], Code.WIRE_VERSION, 7),
    "unknown kind": ([header(kind=250), b"\x80"], Code.KIND_UNKNOWN, 7),
    "not for the daemon": ([header(kind=Kind.DRAINED), b"\x81\xa8transfer\x01"], None, 7),
    "no body": ([header()], Code.BODY_INVALID, 7),
    "truncated body": ([header(), encode(hello(), 7)[1][:-9]], Code.BODY_INVALID, 7),
    "trailing bytes": ([header(), encode(hello(), 7)[1] + b"\xc0"], Code.BODY_INVALID, 7),
    "deep": ([header(), b"\x82\xa5world\xa1w\xa1x" + nested(5000)], None, 7),
    "body too large": ([header(), bytes(MAX_BODY_BYTES + 1)], Code.TOO_LARGE, 7),
    "a wrong type": (
        [header(), msgpack.packb({"world": 3, "rank": 0})],
        Code.FIELD_INVALID,
        7,
    ),
    "a repeated key": (
        [header(Kind.LEAVE), b"\x82\xa7session\x01\xa7session\x02"],
        Code.BODY_INVALID,
        7,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_odd_frames_are_answered(daemon: Serving, name: str) -> None:
    """The sender hears why under its message id, and others are served."""
    frames, code, message_id = REFUSED[name]
    with Peer(daemon.agents) as peer:
        peer.raw(*frames)
        heard = peer.hear()
    assert heard is not None
    assert heard[0].id == message_id
    answer = heard[1]
    assert isinstance(answer, Refusal | Rejected)
    if code is not None:
        said = answer.code if isinstance(answer, Refusal) else answer.findings[0].code
        assert said == code.id
    assert is_served(daemon.agents)


def test_other_versions_hear_which_are_spoken(daemon: Serving) -> None:
    """Kind 0 carries the range, so that a newer peer can say what to upgrade."""
    with Peer(daemon.agents) as peer:
        peer.raw(header(version=200), os.urandom(40))
        heard = peer.hear()
    assert heard is not None
    answer = heard[1]
    assert isinstance(answer, Refusal)
    assert (answer.min, answer.max) == (1, 1)


@pytest.mark.parametrize(
    "frames",
    [
        encode(Refusal(code="x", text="y"), 5),
        encode(NeedHello(instance=bytes(16)), 5),
        encode(Rejected(findings=[]), 5),
        [header(Kind.REFUSAL), b"\xc1"],
    ],
    ids=["refusal", "need hello", "rejected", "unreadable refusal"],
)
def test_refusals_are_never_answered(daemon: Serving, frames: list[bytes]) -> None:
    """Or two programs would refuse each other for ever: the next answer is to the next request."""
    with Peer(daemon.agents) as peer:
        peer.raw(*frames)
        message_id = peer.say(hello())
        heard = peer.hear()
    assert heard is not None
    assert heard[0].id == message_id
    assert isinstance(heard[1], Welcome)


def test_a_chosen_routing_id_is_refused(daemon: Serving) -> None:
    """It could take another's place, or a number that the ROUTER is about to give out."""
    with Peer(daemon.agents, routing_id=b"me") as peer:  # type: ignore[arg-type]
        message_id = peer.say(hello())
        heard = peer.hear()
    assert heard is not None
    assert heard[0].id == message_id
    assert isinstance(heard[1], Refusal)
    assert "routing id" in heard[1].text
    assert is_served(daemon.agents)


class _Bomb:
    """Makes a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_is_only_bytes(daemon: Serving, tmp_path: Path) -> None:
    """A pickle bomb is no message and has no effect (case D17)."""
    bomb = pickle.dumps(_Bomb(tmp_path / "went off"))
    with Peer(daemon.agents) as peer:
        peer.raw(header(), bomb)
        heard = peer.hear()
        assert heard is not None
        assert isinstance(heard[1], Rejected)
        peer.raw(bomb)
        assert peer.hear() is not None
    assert not (tmp_path / "went off").exists()


def test_a_huge_frame_costs_its_sender_the_connection_only(daemon: Serving) -> None:
    """Above MAXMSGSIZE the connection ends; another one on the same port is not disturbed."""
    endpoint = daemon.tcp  # type: ignore[attr-defined]
    with Peer(endpoint) as good, Peer(endpoint) as bad:
        assert isinstance(good.ask(hello()), Welcome)
        assert isinstance(bad.ask(hello(rank=1)), Welcome)
        monitor = bad.socket.get_monitor_socket()
        bad.raw(header(), bytes(MAX_FRAME_BYTES + 1))
        assert monitor.poll(5000), "the connection stays"
        assert isinstance(good.ask(hello()), Welcome)
        assert isinstance(good.ask(Heartbeat(session=1)), NeedHello)
        bad.socket.disable_monitor()


@pytest.mark.parametrize(
    "said",
    [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", os.urandom(4096), b"\xff" * 64, b""],
    ids=["http", "random bytes", "half a greeting", "nothing"],
)
def test_other_protocols_on_the_port_do_nothing(daemon: Serving, said: bytes) -> None:
    """Port scanners and browsers are no peers (case D16)."""
    endpoint: str = daemon.tcp  # type: ignore[attr-defined]
    port = int(endpoint.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
        stranger.sendall(said)
        assert is_served(endpoint)
    assert is_served(endpoint)


@pytest.mark.parametrize("seed", range(3))
def test_random_messages_never_end_the_loop(daemon: Serving, seed: int) -> None:
    """Hundreds of broken messages of every kind, some of them nearly right."""
    dice = random.Random(seed)
    good = [encode(hello(), 1), encode(Heartbeat(session=5), 2)]
    with Peer(daemon.agents, sndhwm=0) as peer:
        for _ in range(300):
            first, body = (bytearray(frame) for frame in dice.choice(good))
            for _ in range(dice.randrange(4)):
                frame = dice.choice([first, body])
                frame[dice.randrange(len(frame))] = dice.randrange(256)
            peer.raw(bytes(first), bytes(body), *([b"raw"] * dice.randrange(3)))
        message_id = peer.say(hello())
        while (heard := peer.hear()) is not None:
            if heard[0].id == message_id and isinstance(heard[1], Welcome):
                break
        assert heard is not None
    assert is_served(daemon.agents)
