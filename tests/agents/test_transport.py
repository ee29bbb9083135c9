"""The zmq transport over real sockets: credit bounds it, wrong sizes fail, memory is held."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from rankgate.agents.chunks import CHUNK_BYTES
from rankgate.agents.events import Released
from rankgate.agents.landing import LandingTable
from rankgate.agents.ledger import Ledger
from rankgate.agents.sockets import dial, make_context
from rankgate.agents.source import LinkKey, Window
from rankgate.agents.transports.zmq import ChunkReceiver, ChunkSender
from rankgate.proto.codec import decode, encode
from rankgate.proto.messages import Chunk, Pulse
from rankgate.proto.sockets import configure_socket
from tests.agents.pairs import EPOCHS, grant_of, pair_of, sealed, whole

KEY: LinkKey = (EPOCHS, 0)
PAGE = 1 << 16
SLICE = whole(layers=2, length=PAGE)
HERE, THERE = [5, 6, 7, 1], [0, 2, 3, 4]


class Source:
    """What the sender needs of a source side."""

    def __init__(self, route: bytes) -> None:
        """Hold one request for one destination that is linked."""
        self.ledger = Ledger(1000)
        self.pair = pair_of(["data"], sending=True)
        self.pair.links[0].slices = [SLICE]
        self.links = {KEY: route}
        self.windows = {KEY: Window()}
        self.failures: list[Any] = []

    def sendable(self, _sending: object, _now: int) -> bool:
        """Say yes."""
        return True

    def failed(self, _sending: object, found: object) -> None:
        """Remember why."""
        self.failures.append(found)


class Destination:
    """What the receiver needs of a destination side."""

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        """Open one request into pages."""
        self.table = LandingTable({"full": 8})
        self.table.chunk_bytes = chunk_bytes
        pair = pair_of(["data"], sending=False)
        pair.links[0].slices = [SLICE]
        landing = self.table.ask("r", 0, pair, {"full": THERE})
        assert not isinstance(landing, tuple)
        self.table.granted(landing, grant_of(), sealed(), 11_000)  # type: ignore[arg-type]
        self.taken: list[tuple[Chunk, int, bool]] = []

    def chunk_taken(self, key: LinkKey, chunk: Chunk, nbytes: int, *, applied: bool) -> None:
        """Tell the table, and remember."""
        self.taken.append((chunk, nbytes, applied))
        if applied:
            self.table.took(*key, chunk)


class Wire:
    """A source's ROUTER and a destination's DEALER that dialed it."""

    def __init__(self, folder: Path) -> None:
        """Connect them; the route is known by then."""
        self.context = make_context()
        self.router: zmq.Socket[bytes] = self.context.socket(zmq.ROUTER)
        configure_socket(self.router)
        self.router.router_mandatory = True
        self.router.bind(f"ipc://{folder}/link")
        self.dealer, self.monitor = dial(self.context, f"ipc://{folder}/link")
        self.dealer.send_multipart(encode(Pulse(), 0))
        assert self.router.poll(5000)
        self.route = self.router.recv_multipart()[0]
        generator = np.random.default_rng(1)
        self.source_pools = [
            generator.integers(0, 256, (8, PAGE), dtype=np.uint8) for _ in range(2)
        ]
        self.pools = [np.zeros((8, PAGE), dtype=np.uint8) for _ in range(2)]
        self.source = Source(self.route)
        side: Any = self.source
        sending = {("full", "k"): self.source_pools}
        self.sender = ChunkSender(self.router, sending, side, threading.RLock())
        self.take(Destination())

    def take(self, destination: Destination) -> None:
        """Receive for a destination side."""
        self.destination = destination
        side: Any = destination
        self.receiver = ChunkReceiver({("full", "k"): self.pools}, side, threading.RLock())

    def stage(self) -> None:
        """Stage the request and let its destination present."""
        ledger = self.source.ledger
        ledger.stage("r", {"full": HERE}, 0, 60_000, 0)
        status, _, found = ledger.present(self.source.pair, 0, sealed(), {"full": 4}, 2000, 0)
        assert status == "accepted", found
        self.sender.add(ledger.sendings.pop())

    def receive(self) -> bool:
        """Take one chunk from the link, if one is there."""
        if not self.dealer.poll(50):
            return False
        frames = [self.dealer.recv(), self.dealer.recv()]
        _, message = decode(frames)
        assert isinstance(message, Chunk)
        self.receiver.receive(self.dealer, KEY, message)
        return True

    def send_raw(self, chunk: Chunk, *data: bytes) -> None:
        """Send a chunk that the sender would not."""
        self.router.send_multipart([self.route, *encode(chunk, 0), *data])
        until(self.receive)

    def close(self) -> None:
        """Close everything."""
        self.dealer.disable_monitor()
        for socket in (self.monitor, self.dealer, self.router):
            socket.close(0)
        self.context.term()


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    """Two connected ends."""
    wire = Wire(tmp_path)
    yield wire
    wire.close()


def until(fact: Callable[[], object]) -> None:
    """Wait for a fact, with a bound."""
    end = time.monotonic() + 10
    while not fact():
        assert time.monotonic() < end


def whole_chunk(**changes: int) -> Chunk:
    """Return the one chunk that would carry everything."""
    fields = {"transfer": 7, "sequence": 0, "total": 1, "layers": 2, "pages": 4, **changes}
    return Chunk(**fields)


def test_bytes_arrive_page_by_page_and_nothing_else_changes(wire: Wire) -> None:
    """All chunks of a share, over a real socket, into other pages."""
    wire.source.windows[KEY].credit = 100
    wire.stage()
    until(lambda: (wire.sender.pump(0), wire.receive(), wire.destination.table.ended)[-1])
    for ours, theirs in zip(wire.source_pools, wire.pools, strict=True):
        expected = np.zeros_like(theirs)
        expected[THERE] = ours[HERE]
        assert np.array_equal(theirs, expected)
    assert wire.sender.nbytes == wire.receiver.nbytes == 2 * 4 * PAGE


def test_no_more_chunks_are_under_way_than_credit_allows(wire: Wire) -> None:
    """Without credit nothing goes; each taken chunk lets one more go: memory stays bounded."""
    wire.stage()
    job = wire.sender._jobs[KEY][0]
    total = job.total
    window = wire.source.windows[KEY]
    wire.sender.pump(0)
    assert wire.sender.chunks == 0
    for credit in range(1, total + 1):
        window.credit = 1
        window.taken = credit - 1
        wire.sender.pump(0)
        wire.sender.pump(0)
        assert wire.sender.chunks == credit
        until(wire.receive)
    assert wire.destination.table.ended[0].outcome == "delivered"


def test_memory_is_held_until_the_socket_has_let_it_go(wire: Wire) -> None:
    """The end is counted while libzmq may still read: released only when the tracker is done."""
    wire.source.windows[KEY].credit = 100
    wire.stage()
    wire.sender.pump(0)
    ledger = wire.source.ledger
    ledger.outcome(7, "r", "delivered", 0)
    if wire.sender.waiting:
        assert "r" in ledger.staged
    until(lambda: (wire.receive(), wire.sender.pump(0), not wire.sender.waiting)[-1])
    assert [type(event) for event in ledger.events] == [Released]


@pytest.mark.parametrize("size", [0, 1, 8 * PAGE - 1, 8 * PAGE + 1])
def test_a_frame_of_another_size_fails_the_transfer_and_names_both(wire: Wire, size: int) -> None:
    """Nothing outside the transfer's own pages is written, whatever comes."""
    wire.send_raw(whole_chunk(), b"\x55" * size)
    (ended,) = wire.destination.table.ended
    assert ended.finding is not None
    assert ended.finding.slug == "transport_failed"
    assert str(size) in ended.finding.message
    assert str(8 * PAGE) in ended.finding.message
    for pool in wire.pools:
        others = [page for page in range(8) if page not in THERE]
        assert not pool[others].any()


def test_a_frame_that_would_land_in_place_is_checked_as_well(wire: Wire) -> None:
    """Two pages in a row are received into the cache itself; a longer frame ends there."""
    wire.take(Destination(2 * PAGE))
    chunk = whole_chunk(sequence=1, layers=1, first=2, pages=2, total=4)
    wire.send_raw(chunk, b"\x55" * (3 * PAGE))
    assert wire.destination.table.ended[0].outcome == "failed"
    assert not wire.pools[0][5:].any()
    assert not wire.pools[0][:3].any()


def test_a_chunk_without_its_frame_fails_the_transfer(wire: Wire) -> None:
    """It names pages and carries none: said at once instead of waited for."""
    wire.send_raw(whole_chunk())
    (ended,) = wire.destination.table.ended
    assert ended.finding is not None
    assert ended.finding.slug == "transport_failed"
    assert "0 bytes" in ended.finding.message


def test_chunks_of_ended_transfers_are_read_and_dropped(wire: Wire) -> None:
    """Late data is not applied, and the link goes on after it (B16)."""
    table = wire.destination.table
    table.source_lost(EPOCHS, 0, "x")
    wire.send_raw(whole_chunk(), b"\x55" * (8 * PAGE))
    wire.send_raw(whole_chunk(transfer=99), b"\x55" * 3, b"more", b"frames")
    assert not any(pool.any() for pool in wire.pools)
    assert [applied for _, _, applied in wire.destination.taken] == [False, False]
    assert not wire.dealer.poll(20)


def test_a_destination_that_is_gone_fails_its_share_alone(wire: Wire) -> None:
    """EHOSTUNREACH is not an exception of the thread: the share ends with transport_failed."""
    wire.source.windows[KEY].credit = 100
    wire.source.links[KEY] = b"\0nobody"
    wire.stage()
    wire.sender.pump(0)
    assert [found.slug for found in wire.source.failures] == ["transport_failed"]
    wire.sender.pump(0)
    assert len(wire.source.failures) == 1
