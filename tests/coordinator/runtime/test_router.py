"""The ROUTER on the loop: order, bounds, and who is gone, with real sockets and processes."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from rankgate.coordinator.runtime.router import Router
from rankgate.coordinator.runtime.sockets import bind, make_context, make_router
from rankgate.proto.codec import decode, encode
from rankgate.proto.messages import Ack, Kind, Leave, Pulse, Refusal
from tests.coordinator.runtime.live import WAIT, Peer, clean_environment

_SILENT_PEER = """
import sys, time, zmq
socket = zmq.Context().socket(zmq.DEALER)
socket.connect(sys.argv[1])
socket.send_multipart([b"here", b"I am"])
print(flush=True)
time.sleep(600)
"""

_BEATING = "socket.heartbeat_ivl, socket.heartbeat_ttl = 50, 300; "


def start(command: list[str]) -> subprocess.Popen[str]:
    """Start a process of the test's own that can be spoken to."""
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )


def line_of(process: subprocess.Popen[str]) -> str:
    """Return its next line."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def nod_to(process: subprocess.Popen[str]) -> None:
    """Let it go on."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


class House:
    """A router and what it reports."""

    def __init__(self, folder: Path, **bounds: int) -> None:
        """Bind in ``folder`` on the running loop."""
        self.context = make_context()
        socket = make_router(self.context)
        self.endpoint = bind(socket, f"ipc://{folder}/r.sock")
        self.messages: list[tuple[bytes, list[bytes]]] = []
        self.gone: list[tuple[bytes, str, float]] = []
        self.router = Router(
            asyncio.get_running_loop(),
            socket,
            on_message=self.message,
            on_gone=self.lost,
            **bounds,
        )

    def message(self, peer: bytes, frames: list[bytes]) -> None:
        """Note a message."""
        self.messages.append((peer, frames))

    def lost(self, peer: bytes, reason: str) -> None:
        """Note a loss."""
        self.gone.append((peer, reason, time.monotonic()))

    async def until_messages(self, count: int) -> None:
        """Wait for so many messages in all."""
        await self.until(lambda: len(self.messages) >= count)

    async def until_gone(self, count: int) -> None:
        """Wait for so many losses in all."""
        await self.until(lambda: len(self.gone) >= count)

    async def until(self, done: Callable[[], bool]) -> None:
        """Wait until it is so."""
        async with asyncio.timeout(WAIT):
            while not done():
                await asyncio.sleep(0.005)


def number(frames: list[bytes]) -> int:
    """Return the message id of frames."""
    return decode(frames)[0].id


async def hear(peer: Peer, count: int) -> list[int]:
    """Return the ids of the next messages, Pulses left out, without stopping the loop."""

    def read() -> list[int]:
        heard = [peer.hear() for _ in range(count)]
        return [one[0].id for one in heard if one is not None]

    return await asyncio.to_thread(read)


async def test_a_killed_process_is_noticed_at_once(tmp_path: Path) -> None:
    """Kill -9 closes its connection; the sweep that follows finds whose it was."""
    house = House(tmp_path)
    command = [sys.executable, "-c", _SILENT_PEER, house.endpoint]
    with start(command) as victim, Peer(house.endpoint) as other:
        try:
            await house.until_messages(1)
            other.say(Leave(session=1))
            await house.until_messages(2)
            begun = time.monotonic()
            victim.send_signal(signal.SIGKILL)
            await house.until_gone(1)
        finally:
            victim.kill()
    (peer, reason, when) = house.gone[0]
    assert reason == "unreachable"
    assert peer == house.messages[0][0]
    assert when - begun < 1.0  # 0.05 to 0.1 on a quiet machine
    assert house.router.peers == 1
    house.router.close()
    house.context.destroy(0)


async def test_a_stopped_process_is_noticed_by_its_silence(tmp_path: Path) -> None:
    """The peer's heartbeats carry a time to live; no end of the connection is needed."""
    house = House(tmp_path)
    script = _SILENT_PEER.replace("socket.connect", _BEATING + "socket.connect")
    command = [sys.executable, "-c", script, house.endpoint]
    with start(command) as victim:
        try:
            await house.until_messages(1)
            await asyncio.sleep(0.2)  # a heartbeat or two
            assert house.gone == []
            victim.send_signal(signal.SIGSTOP)
            await house.until_gone(1)
        finally:
            victim.kill()
    house.router.close()
    house.context.destroy(0)


_FLOODER = """
import os, sys, zmq
socket = zmq.Context().socket(zmq.DEALER)
socket.sndhwm = 0
socket.connect(sys.argv[1])
for _ in range(100_000):
    socket.send(b"x" * 100)
print("sent", flush=True)
sys.stdin.readline()
os.kill(os.getpid(), 9)
"""

_SLOW_OWNER = """
import asyncio, sys, time
from rankgate.coordinator.runtime.router import Router
from rankgate.coordinator.runtime.sockets import bind, make_context, make_router

async def main():
    context = make_context()
    socket = make_router(context)
    bind(socket, sys.argv[1])
    gone = asyncio.Event()
    router = Router(asyncio.get_running_loop(), socket, on_message=lambda *_: None,
                    on_gone=lambda *_: gone.set())
    print("bound", flush=True)
    sys.stdin.readline()
    time.sleep(2.5)  # longer than two ZMTP heartbeats
    await asyncio.wait_for(gone.wait(), 10)
    print("alive", flush=True)

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_flood_that_breaks_off_does_not_abort_the_process(tmp_path: Path) -> None:
    """libzmq must not meet its assertion when a full connection breaks while we are busy."""
    endpoint = f"ipc://{tmp_path}/r.sock"
    with start([sys.executable, "-c", _SLOW_OWNER, endpoint]) as owner:
        try:
            assert line_of(owner) == "bound"
            with start([sys.executable, "-c", _FLOODER, endpoint]) as flooder:
                nod_to(owner)
                assert line_of(flooder) == "sent"
                nod_to(flooder)
                flooder.wait(WAIT)
            assert line_of(owner) == "alive"
            assert owner.wait(WAIT) == 0
        finally:
            owner.kill()


async def test_all_of_many_losses_are_noticed(tmp_path: Path) -> None:
    """Connections that end one after the other are all found, not only the first ones."""
    house = House(tmp_path)
    peers = [Peer(house.endpoint) for _ in range(40)]
    for peer in peers:
        peer.say(Leave(session=1))
    await house.until_messages(40)
    for peer in peers:
        peer.close()
        await asyncio.sleep(0.003)  # spread over several sweeps
    await house.until_gone(40)
    assert len({peer for peer, _, _ in house.gone}) == 40
    assert house.router.peers == 0
    house.router.close()
    house.context.destroy(0)


async def test_a_slow_peer_gets_everything_in_order(tmp_path: Path) -> None:
    """What does not fit into ZeroMQ's queue waits here and keeps its order."""
    house = House(tmp_path)
    with Peer(house.endpoint, rcvhwm=10) as peer:
        peer.say(Leave(session=1))
        await house.until_messages(1)
        name = house.messages[0][0]
        body = [b"\x81\xa7session\x01"]
        for n in range(1, 2801):  # beyond both high-water marks and the kernel's buffers
            house.router.send(name, [encode(Leave(session=1), n)[0], *body])
        assert await hear(peer, 2800) == list(range(1, 2801))
    assert not house.gone or house.gone[0][1] == "unreachable"
    house.router.close()
    house.context.destroy(0)


async def test_a_peer_that_never_reads_is_cut_off_alone(tmp_path: Path) -> None:
    """Its bounded queue overflows, it is reported once, and others get every message."""
    house = House(tmp_path, max_queued=50)
    with Peer(house.endpoint, rcvhwm=10) as slow, Peer(house.endpoint) as good:
        slow.say(Leave(session=1))
        await house.until_messages(1)
        good.say(Leave(session=2))
        await house.until_messages(2)
        slow_name, good_name = (peer for peer, _ in house.messages)
        payload = b"\xc4\x00" * 2000
        sent = 0
        while not house.gone and sent < 20_000:
            sent += 1
            frames = [encode(Leave(session=1), sent)[0], b"\x81\xa7session\x01", payload]
            house.router.send(slow_name, frames)
            house.router.send(good_name, frames)
            if sent % 100 == 0:
                assert await hear(good, 100) == list(range(sent - 99, sent + 1))
        await house.until_gone(1)
        assert [(peer, reason[:5]) for peer, reason, _ in house.gone] == [(slow_name, "slow:")]
        for n in range(200):
            house.router.send(slow_name, [encode(Leave(session=1), n)[0], payload])
        message_id = good.say(Leave(session=2))
        await house.until_messages(3)
        assert number(house.messages[2][1]) == message_id
    house.router.close()
    house.context.destroy(0)


async def test_the_queue_is_bounded_in_bytes(tmp_path: Path) -> None:
    """A few large messages cut off as well as many small ones."""
    house = House(tmp_path, max_queued_bytes=1 << 20)
    with Peer(house.endpoint, rcvhwm=1) as slow:
        slow.say(Leave(session=1))
        await house.until_messages(1)
        name = house.messages[0][0]
        for n in range(2000):
            house.router.send(name, [encode(Leave(session=1), n)[0], bytes(100_000)])
        await house.until_gone(1)
    assert "bytes" in house.gone[0][1]
    house.router.close()
    house.context.destroy(0)


async def test_who_was_cut_off_is_told_to_connect_anew(tmp_path: Path) -> None:
    """Later messages are refused under their ids and never reach the core."""
    house = House(tmp_path)
    with Peer(house.endpoint) as peer:
        peer.say(Leave(session=1))
        await house.until_messages(1)
        name = house.messages[0][0]
        house.router.cut_off(name)
        house.router.send(name, encode(Leave(session=1), 99))
        message_id = peer.say(Leave(session=1))
        heard = await asyncio.to_thread(peer.hear)
        assert heard is not None
        assert heard[0].id == message_id
        assert isinstance(heard[1], Refusal)
        assert "anew" in heard[1].text
        assert len(house.messages) == 1
    await house.until(lambda: house.router.peers == 0)
    assert house.gone == []  # it was the core that cut it off
    house.router.close()
    house.context.destroy(0)


async def test_no_message_lies_unseen_between_sends(tmp_path: Path) -> None:
    """The edge-triggered descriptor is read again after every burst of sends."""
    house = House(tmp_path)

    def echo(peer: bytes, frames: list[bytes]) -> None:
        house.router.send(peer, frames)

    house.router._on_message = echo
    peers = [Peer(house.endpoint) for _ in range(4)]

    def ping(peer: Peer) -> float:
        slowest = 0.0
        for n in range(300):
            begun = time.monotonic()
            peer.raw(*encode(Leave(session=1), n))
            heard = peer.hear()
            assert heard is not None
            assert heard[0].id == n
            slowest = max(slowest, time.monotonic() - begun)
        return slowest

    slowest = await asyncio.gather(*(asyncio.to_thread(ping, peer) for peer in peers))
    # An edge that only the safety poll finds costs a quarter of a second, again and again.
    assert sorted(slowest)[1] < 0.2
    for peer in peers:
        peer.close()
    house.router.close()
    house.context.destroy(0)


async def test_a_flood_leaves_the_loop_its_turns(tmp_path: Path) -> None:
    """Reading the socket empty before a deadline ends in time while one peer never pauses."""
    house = House(tmp_path)
    house.router._on_message = lambda *_: time.sleep(0.0002)  # handling is slower than the flood
    stop = asyncio.Event()
    frames = encode(Ack(session=1, acked=1), 1)

    def flood() -> None:
        with Peer(house.endpoint) as peer:
            while not stop.is_set():
                try:
                    peer.socket.send_multipart(frames, zmq.NOBLOCK)
                except zmq.Again:
                    peer.socket.poll(10, zmq.POLLOUT)

    flooding = asyncio.create_task(asyncio.to_thread(flood))
    try:
        await house.until(lambda: house.router.peers == 1)
        async with asyncio.timeout(WAIT):
            while house.router.drain():  # until the flood is faster than we are
                await asyncio.sleep(0)
    finally:
        stop.set()
    await flooding
    house.router.close()
    house.context.destroy(0)


async def test_a_sweep_asks_everybody_once(tmp_path: Path) -> None:
    """A Pulse carries id 0, so it is no push and needs no answer."""
    house = House(tmp_path)
    with Peer(house.endpoint) as peer:
        peer.say(Leave(session=1))
        await house.until_messages(1)
        house.router.sweep()

        def read() -> list[bytes]:
            assert peer.socket.poll(int(WAIT * 1000))
            return peer.socket.recv_multipart()

        header, message = decode(await asyncio.to_thread(read))
    assert (header.kind, header.id) == (Kind.PULSE, 0)
    assert isinstance(message, Pulse)
    house.router.close()
    house.context.destroy(0)


async def test_a_closed_router_takes_sends_and_a_second_close(tmp_path: Path) -> None:
    """What is still to be sent when the daemon stops is dropped."""
    house = House(tmp_path)
    with Peer(house.endpoint) as peer:
        peer.say(Leave(session=1))
        await house.until_messages(1)
        house.router.close()
        house.router.send(house.messages[0][0], encode(Leave(session=1), 1))
        house.router.sweep()
        house.router.close()
    house.context.destroy(0)
