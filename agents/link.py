"""The agent's one I/O thread: it owns every socket, and carries out what the pure rank decides."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import zmq

from rankgate.agents.clock import boottime_ms
from rankgate.agents.sockets import dial, disconnected
from rankgate.agents.source import LinkKey
from rankgate.agents.transports.zmq import ChunkReceiver, ChunkSender
from rankgate.proto.codec import WireError, decode, encode
from rankgate.proto.messages import Chunk

if TYPE_CHECKING:
    from rankgate.agents.rank import RankCore
    from rankgate.agents.transports.memory import Memory

_ROUTING_ID_BYTES = 5
"""libzmq's own routing ids: a zero byte and a 32-bit number."""
_PER_TURN = 64
_LONGEST_WAIT_MS = 200
_REAP_MS = 2
_MAX_BACKLOG = 10_000
_LEAVE_MS = 200
"""How long a closing agent tries to get its goodbye out."""


class Dialed:
    """One connection to a source, and the monitor that says when it ends."""

    __slots__ = ("key", "monitor", "socket")

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], key: LinkKey, address: str) -> None:
        """Begin to connect."""
        self.key = key
        self.socket, self.monitor = dial(context, address)

    def close(self) -> None:
        """Hang up at once."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)


class LinkThread:
    """Runs a rank: reads sockets in bursts, steps the pure core, sends what it wants sent.

    Invariant: sockets are used by this thread alone; the core is touched only under ``lock``,
    which is never held while bytes are copied or a socket is waited for. ``_wake`` is written to
    only while it is open: whoever stops the thread closes it, once the thread has ended.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        daemon: zmq.Socket[bytes],
        router: zmq.Socket[bytes],
        core: RankCore,
        memory: Memory,
        on_turn: Callable[[], None],
        lock: threading.RLock,
    ) -> None:
        """Take over connected and bound sockets; ``on_turn`` runs under the lock, once a turn."""
        self.lock = lock
        self.core = core
        self.failure: BaseException | None = None
        self._context = context
        self._daemon = daemon
        self._router = router
        self._on_turn = on_turn
        self._dialed: dict[LinkKey, Dialed] = {}
        self._by_socket: dict[zmq.Socket[bytes], Dialed] = {}
        """Each connection by its socket and by its monitor."""
        self._backlogs: dict[bytes, deque[list[bytes]]] = {}
        self._waking = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.sender = ChunkSender(router, memory, core.source, lock)
        self.receiver = ChunkReceiver(memory, core.destination, lock)
        self._poller = zmq.Poller()
        for source in (daemon, router, self._wake):
            self._poller.register(source, zmq.POLLIN)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="rankgate-agent", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            os.close(self._wake)
            raise

    def wake(self) -> None:
        """Make the thread look at the core now; nothing once it has been stopped."""
        with self._waking:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def stop(self, timeout: float) -> bool:
        """Send what is queued and end; return whether the thread has, and closed its sockets."""
        self._stopping = True
        self.wake()
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False  # it still reads what would be closed here
        with self._waking:
            wake, self._wake = self._wake, -1
            if wake >= 0:
                os.close(wake)
        return True

    # --- the loop -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            wait = 0
            while not self._stopping:
                wait = self._turn(self._ready(wait))
            self._turn(self._ready(0))
        except BaseException as error:  # noqa: BLE001 - the engine is told, on its own thread
            self.failure = error
            with self.lock:
                self._on_turn()
        finally:
            for dialed in self._dialed.values():
                dialed.close()
            self._daemon.close(_LEAVE_MS)
            self._router.close(0)

    def _ready(self, wait: int) -> set[zmq.Socket[bytes] | int]:
        """Wait up to ``wait`` ms; return what can be read: what was not read to its end, again."""
        return {source for source, _ in self._poller.poll(wait)}

    def _turn(self, ready: set[zmq.Socket[bytes] | int]) -> int:
        """Do everything that can be done now; return how long (ms) to wait for more."""
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        more = self._daemon in ready and self._read_daemon()
        more |= self._router in ready and self._read_router()
        known = self._by_socket
        for dialed in dict.fromkeys(known[each] for each in ready if each in known):
            if self._read_dialed(dialed):
                more = True  # what came before the end of a connection counts
            elif dialed.monitor in ready:
                self._look_at(dialed)
        now = boottime_ms()
        with self.lock:
            self.core.tick(now)
            sendings, self.core.source.ledger.sendings = self.core.source.ledger.sendings, []
        for sending in sendings:
            self.sender.add(sending)
        blocked = self.sender.pump(now)
        with self.lock:
            now = boottime_ms()
            self.core.source.flush_failures()
            self.core.flush(now)
            self._connect()
            self._send()
            self._on_turn()
            due = self.core.next_deadline(now)
        if more:
            return 0
        if blocked or self.sender.waiting or self._backlogs:
            return _REAP_MS
        return max(0, min(due - now, _LONGEST_WAIT_MS))

    # --- reading --------------------------------------------------------------------------

    def _read_daemon(self) -> bool:
        for _ in range(_PER_TURN):
            try:
                frames = self._daemon.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            try:
                header, message = decode(frames)
            except WireError as error:
                with self.lock:
                    self.core.session.unreadable(error, boottime_ms())
                continue
            with self.lock:
                self.core.session.receive(header.id, message, boottime_ms())
        return True

    def _read_router(self) -> bool:
        for _ in range(_PER_TURN):
            try:
                route, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            if len(route) != _ROUTING_ID_BYTES or route[0]:
                continue  # a routing id that the client chose
            try:
                header, message = decode(frames)
            except WireError as error:
                self._send_to(route, encode(error.answer, error.id))
                continue
            with self.lock:
                self.core.source.receive(route, header.id, message, boottime_ms())
        return True

    def _read_dialed(self, dialed: Dialed) -> bool:
        socket = dialed.socket
        for _ in range(_PER_TURN):
            try:
                frames = [socket.recv(zmq.NOBLOCK)]
            except zmq.Again:
                return False
            if socket.getsockopt(zmq.RCVMORE):
                frames.append(socket.recv(zmq.NOBLOCK))
            try:
                header, message = decode(frames)
            except WireError:
                while socket.getsockopt(zmq.RCVMORE):
                    socket.recv(zmq.NOBLOCK)
                continue
            if isinstance(message, Chunk):
                self.receiver.receive(socket, dialed.key, message)
                continue
            while socket.getsockopt(zmq.RCVMORE):
                socket.recv(zmq.NOBLOCK)
            with self.lock:
                self.core.destination.receive(dialed.key, header.id, message, boottime_ms())
        return True

    def _look_at(self, dialed: Dialed) -> None:
        if disconnected(dialed.monitor):
            with self.lock:
                self.core.destination.link_down(dialed.key, boottime_ms())

    # --- sending (under the lock) -----------------------------------------------------------

    def _connect(self) -> None:
        destination = self.core.destination
        hangups, destination.hangups = destination.hangups, []
        for key in hangups:
            if (dialed := self._dialed.pop(key, None)) is not None:
                for each in (dialed.socket, dialed.monitor):
                    self._poller.unregister(each)
                    del self._by_socket[each]
                dialed.close()
        dials, destination.dials = destination.dials, []
        for key, address in dials:
            if key not in self._dialed:
                dialed = self._dialed[key] = Dialed(self._context, key, address)
                for each in (dialed.socket, dialed.monitor):
                    self._poller.register(each, zmq.POLLIN)
                    self._by_socket[each] = dialed

    def _send(self) -> None:
        session = self.core.session
        if session.reconnect:
            session.reconnect = False
            endpoint = self._daemon.getsockopt_string(zmq.LAST_ENDPOINT)
            self._daemon.disconnect(endpoint)
            self._daemon.connect(endpoint)
        out, session.out = session.out, []
        for message_id, message in out:
            # A full pipe drops it: what matters is repeated until answered.
            _try_send(self._daemon, encode(message, message_id))
        source, destination = self.core.source, self.core.destination
        answers, source.out = source.out, []
        for route in list(self._backlogs):
            self._flush_backlog(route)
        for route, message_id, answer in answers:
            self._send_to(route, encode(answer, message_id))
        asks, destination.out = destination.out, []
        for key, message_id, ask in asks:
            dialed = self._dialed.get(key)
            if dialed is not None:
                _try_send(dialed.socket, encode(ask, message_id))

    def _send_to(self, route: bytes, frames: list[bytes]) -> None:
        backlog = self._backlogs.get(route)
        if backlog is None and _try_send(self._router, [route, *frames]):
            return
        backlog = self._backlogs.setdefault(route, deque(maxlen=_MAX_BACKLOG))
        backlog.append(frames)

    def _flush_backlog(self, route: bytes) -> None:
        backlog = self._backlogs[route]
        while backlog and _try_send(self._router, [route, *backlog[0]]):
            backlog.popleft()
        if not backlog:
            del self._backlogs[route]


def _try_send(socket: zmq.Socket[bytes], frames: list[bytes]) -> bool:
    """Send without waiting; False when the pipe is full. To a peer that is gone, drop it."""
    try:
        socket.send_multipart(frames, zmq.NOBLOCK)
    except zmq.Again:
        return False
    except zmq.ZMQError as error:
        if error.errno != zmq.EHOSTUNREACH:
            raise
    return True
