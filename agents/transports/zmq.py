"""The zmq transport: chunks over the links themselves, under credit.

The destination applies the bytes, so nothing can be written after it has refused.
Whole pages that lie together are sent from the cache's own memory, without a copy; the tracker of
such a message is an operation that holds the staged request until libzmq lets the memory go.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager

import zmq

from rankgate.agents.chunks import CHUNK_BYTES, ChunkSpec, chunk_bytes_of, cut
from rankgate.agents.destination import DestinationSide
from rankgate.agents.ledger import Sending, Staged
from rankgate.agents.source import LinkKey, SourceSide
from rankgate.agents.transports.memory import Memory, contiguous, gather, scatter
from rankgate.proto.codec import encode
from rankgate.proto.codes import Code
from rankgate.proto.findings import Side, finding
from rankgate.proto.messages import Chunk

_PER_PUMP = 32
_ZERO_COPY_BYTES = 1 << 16
"""Below this libzmq's bookkeeping costs more than the copy."""

Lock = AbstractContextManager[object]


class _Job:
    """One contact's share on its way: which chunks are left."""

    __slots__ = ("left", "sending", "sequence", "total")

    def __init__(self, sending: Sending, specs: list[ChunkSpec]) -> None:
        self.sending = sending
        self.left = deque(specs)
        self.sequence = 0
        self.total = max(1, len(specs))


class ChunkSender:
    """Sends shares over inbound links, each as far as its credit goes.

    Invariant: chunks of one link keep their order; an operation is counted before its memory is
    handed over and done only when libzmq no longer reads it.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], memory: Memory, side: SourceSide, lock: Lock
    ) -> None:
        """Send through a bound ROUTER; ``lock`` guards ``side``, never a copy."""
        self._socket = socket
        self._memory = memory
        self._side = side
        self._lock = lock
        self._jobs: dict[LinkKey, deque[_Job]] = {}
        self._trackers: deque[tuple[zmq.MessageTracker, Staged]] = deque()
        self.chunks = 0
        self.nbytes = 0

    @property
    def waiting(self) -> bool:
        """Whether operations are under way whose end must be looked for."""
        return bool(self._trackers)

    def add(self, sending: Sending) -> None:
        """Queue a share."""
        counts = {name: len(pages) for name, pages in sending.staged.pages.items()}
        job = _Job(sending, list(cut(sending.link.slices, counts, CHUNK_BYTES)))
        self._jobs.setdefault((sending.epochs, sending.rank), deque()).append(job)

    def pump(self, now: int) -> bool:
        """Send what credit and socket allow, link by link; return whether more could go now."""
        self._reap()
        sent, more = 0, False
        for key in list(self._jobs):
            while sent < _PER_PUMP:
                with self._lock:
                    job = self._next(key, now)
                if job is None:
                    break
                if not self._send(key, job):
                    more = True
                    break
                sent += 1
        return more or sent >= _PER_PUMP

    def _next(self, key: LinkKey, now: int) -> _Job | None:
        """Return the job whose next chunk may go, letting go of those that may not go on."""
        jobs = self._jobs.get(key)
        while jobs:
            job = jobs[0]
            if key not in self._side.links or job.sequence >= job.total:
                jobs.popleft()
            elif not self._side.sendable(job.sending, now):
                jobs.popleft()
                if now >= job.sending.stop:
                    side = Side("this rank", f"{job.sequence} of {job.total} chunks sent in time")
                    why = finding(Code.GRANT_EXPIRED, f"request {job.sending.request}", side)
                    self._side.failed(job.sending, why)
            else:
                return job if self._side.windows[key].open else None
        self._jobs.pop(key, None)
        return None

    def _send(self, key: LinkKey, job: _Job) -> bool:
        """Send one chunk; return False when the socket takes no more at the moment."""
        sending = job.sending
        spec = job.left[0] if job.left else None
        header = Chunk(
            transfer=sending.transfer,
            sequence=job.sequence,
            total=job.total,
            **(spec._asdict() if spec else {}),
        )
        frames: list[bytes | memoryview] = [self._side.links[key], *encode(header, 0)]
        held = False
        if spec is not None:
            part = sending.link.slices[spec.slice]
            pages = sending.staged.pages[part.group]
            data = contiguous(self._memory, part, spec, pages, sending=True)
            held = data is not None and data.nbytes >= _ZERO_COPY_BYTES
            if data is None:
                data = gather(self._memory, part, spec, pages)
            frames.append(data.reshape(-1).data)
        try:
            tracker = self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False, track=held)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            with self._lock:
                why = Side(f"rank {sending.rank}", "its connection ended")
                self._side.failed(sending, finding(Code.TRANSPORT_FAILED, "link", why))
                self._jobs.pop(key, None)
            return True
        with self._lock:
            window = self._side.windows.get(key)
            if window is not None:
                window.sent += 1
            if held and tracker is not None:
                self._side.ledger.operation_started(sending.staged)
                self._trackers.append((tracker, sending.staged))
        if spec is not None:
            job.left.popleft()
            self.nbytes += chunk_bytes_of(sending.link.slices[spec.slice], spec)
        job.sequence += 1
        self.chunks += 1
        return True

    def _reap(self) -> None:
        """End the operations whose memory libzmq has let go."""
        for _ in range(len(self._trackers)):
            tracker, staged = self._trackers.popleft()
            if not tracker.done:
                self._trackers.append((tracker, staged))
                continue
            with self._lock:
                self._side.ledger.operation_done(staged)


class ChunkReceiver:
    """Takes chunks from dialed links into the cache.

    Invariant: bytes are applied only where the landing table has said so, and never more than
    the chunk's own length.
    """

    def __init__(self, memory: Memory, side: DestinationSide, lock: Lock) -> None:
        """Write into ``memory``; ``lock`` guards ``side``, never a copy."""
        self._memory = memory
        self._side = side
        self._lock = lock
        self.chunks = 0
        self.nbytes = 0

    def receive(self, socket: zmq.Socket[bytes], key: LinkKey, chunk: Chunk) -> None:
        """Read the data frame of a chunk whose header was read, if it has one."""
        with self._lock:
            placed = self._side.table.place(key[0], key[1], chunk)
        if placed is None:
            _skip(socket)
            self._note(key, chunk, 0, applied=False)
            return
        part, pages = placed
        spec = ChunkSpec(chunk.slice, chunk.layer, chunk.layers, chunk.first, chunk.pages)
        expected = chunk_bytes_of(part, spec)
        if not socket.getsockopt(zmq.RCVMORE):  # a header alone, though it names pages
            with self._lock:
                self._side.table.wrong_size(*key, chunk, 0, expected)
            self._note(key, chunk, 0, applied=False)
            return
        own = contiguous(self._memory, part, spec, pages, sending=False)
        if own is not None:
            got = socket.recv_into(own.reshape(-1).data, flags=zmq.NOBLOCK)
        else:
            frame = socket.recv(zmq.NOBLOCK, copy=False)
            got = len(frame)
            if got == expected:
                scatter(self._memory, part, spec, pages, frame.buffer)
        _skip(socket)
        if got != expected:
            with self._lock:
                self._side.table.wrong_size(*key, chunk, got, expected)
        self._note(key, chunk, got, applied=got == expected)

    def _note(self, key: LinkKey, chunk: Chunk, nbytes: int, *, applied: bool) -> None:
        self.chunks += 1
        self.nbytes += nbytes if applied else 0
        with self._lock:
            self._side.chunk_taken(key, chunk, nbytes, applied=applied)


def _skip(socket: zmq.Socket[bytes]) -> None:
    """Read what is left of a message and forget it."""
    while socket.getsockopt(zmq.RCVMORE):
        socket.recv(zmq.NOBLOCK, copy=False)
