"""A real daemon in a process of its own, and peers that talk to it over real sockets."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import zmq
from msgspec import Struct

from rankgate.proto.codec import Header, decode, encode
from rankgate.proto.descriptor import Descriptor
from rankgate.proto.digests import digest_bytes
from rankgate.proto.messages import (
    Ack,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Pulse,
    Query,
    Register,
    Registered,
    Welcome,
)
from rankgate.proto.sockets import configure_socket, seed_routing_ids
from rankgate.proto.views import View

WAIT = 10.0
"""Seconds after which what a test waits for is taken as never coming."""

PYTHONPATH = os.pathsep.join(path for path in sys.path if path)


def clean_environment(**more: str) -> dict[str, str]:
    """Return the environment without anything that would set up the daemon."""
    gone = ("RANKGATE_", "NOTIFY_SOCKET", "WATCHDOG_", "JOURNAL_STREAM", "STATE_DIR", "RUNTIME_DIR")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(gone)}
    return {**kept, "PYTHONPATH": PYTHONPATH, **more}


class Serving:
    """One ``rankgate serve``; its log lines can be waited for.

    Invariant: ``end`` leaves no process behind, whatever the test did.
    """

    def __init__(self, folder: Path) -> None:
        """Use ``folder`` for sockets and state."""
        self.folder = folder
        self.agents = f"ipc://{folder}/agents.sock"
        self.operator = f"ipc://{folder}/operator.sock"
        self.state = folder / "state"
        self.state.mkdir(exist_ok=True)
        self.process: subprocess.Popen[str] | None = None
        self.lines: list[str] = []
        self._new: queue.Queue[str | None] = queue.Queue()

    def start(self, *flags: str, wait: str = "daemon_ready", **variables: str) -> dict[str, Any]:
        """Start it and wait for a log line; return that line's fields."""
        command = [sys.executable, "-m", "rankgate.coordinator.cli", "serve"]
        command += ["--state-dir", str(self.state), "--operator", self.operator]
        command += ["--log-format", "json", *flags]
        if "--listen" not in flags:
            command += ["--listen", self.agents]
        self._new = queue.Queue()
        self.process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            env=clean_environment(**variables),
        )
        threading.Thread(target=self._read, args=(self.process, self._new), daemon=True).start()
        return self.logged(wait)

    def _read(self, process: subprocess.Popen[str], new: queue.Queue[str | None]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            self.lines.append(line.rstrip("\n"))
            new.put(line)
        process.stderr.close()
        new.put(None)

    def logged(self, event: str, seconds: float = WAIT) -> dict[str, Any]:
        """Wait for the next line of an event."""
        end = time.monotonic() + seconds
        while True:
            line = self._new.get(timeout=max(0.01, end - time.monotonic()))
            if line is None:
                raise AssertionError(f"no {event} before the end:\n" + "\n".join(self.lines))
            try:
                fields: dict[str, Any] = json.loads(line)
            except ValueError:
                continue
            if fields.get("event") == event:
                return fields

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self.process is not None
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self) -> tuple[int, float]:
        """Stop it as systemd would; return exit code and seconds."""
        begun = time.monotonic()
        self.signal(signal.SIGTERM)
        return self.wait(), time.monotonic() - begun

    def wait(self) -> int:
        """Wait for its end; return the exit code."""
        assert self.process is not None
        return self.process.wait(WAIT)

    def end(self) -> None:
        """Kill what is left."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(WAIT)


class Peer:
    """A DEALER that speaks the wire by hand."""

    def __init__(self, endpoint: str, **options: int) -> None:
        """Connect; ``options`` are pyzmq attributes that differ from the project's."""
        seed_routing_ids(int.from_bytes(os.urandom(4), "big"))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        # No heartbeats: libzmq aborts this process when one runs out on a connection that broke
        # while it was held back by rcvhwm (libzmq issue 4364), as a deaf peer's is.
        quiet = {"reconnect_ivl": -1, "heartbeat_ivl": 0}
        configure_socket(self.socket, **{**quiet, **options})
        self.socket.connect(endpoint)
        self._ids = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._context.destroy(0)

    def raw(self, *frames: bytes) -> None:
        """Send frames as they are."""
        assert self.socket.poll(int(WAIT * 1000), zmq.POLLOUT), "cannot send"
        self.socket.send_multipart(frames)

    def say(self, message: Struct) -> int:
        """Send a message under a new id and return that."""
        self._ids += 1
        self.raw(*encode(message, self._ids))
        return self._ids

    def hear(self, seconds: float = WAIT) -> tuple[Header, Struct] | None:
        """Return the next message that is no Pulse, or None when none comes in time."""
        end = time.monotonic() + seconds
        while self.socket.poll(max(0, int((end - time.monotonic()) * 1000))):
            heard = decode(self.socket.recv_multipart())
            if not isinstance(heard[1], Pulse):
                return heard
        return None

    def ask(self, message: Struct) -> Struct:
        """Send a request and return its answer; pushes in between are dropped."""
        message_id = self.say(message)
        while True:
            heard = self.hear()
            assert heard is not None, f"no answer to {type(message).__name__}"
            if heard[0].id == message_id:
                return heard[1]


def hello(world: str = "w", rank: int = 0, life: str = "") -> Hello:
    """Return a Hello of a process that ``life`` tells apart."""
    return Hello(
        world=world,
        rank=rank,
        incarnation=digest_bytes(f"{world} {rank} {life}".encode()),
        round=digest_bytes(world.encode()),
    )


def is_served(endpoint: str) -> bool:
    """Whether a newcomer's Hello is answered."""
    with Peer(endpoint) as peer:
        return isinstance(peer.ask(hello()), Welcome)


def ask_operator(endpoint: str, view: str, subject: str = "") -> View:
    """Return the daemon's answer to a query."""
    with Peer(endpoint) as peer:
        answer = peer.ask(Query(view=view, subject=subject))
        assert isinstance(answer, View)
        return answer


class Rank(Peer):
    """A peer that registers as a rank and takes its pushes in order."""

    def __init__(self, endpoint: str, descriptor: Descriptor) -> None:
        """Connect."""
        super().__init__(endpoint)
        self.descriptor = descriptor
        self.session = 0
        self.taken = 0

    def join(self) -> Registered:
        """Say Hello, register, beat."""
        said = hello(self.descriptor.world, self.descriptor.rank)
        assert isinstance(self.ask(said), Welcome)
        registered = self.ask(
            Register(incarnation=said.incarnation, round=said.round, descriptor=self.descriptor)
        )
        assert isinstance(registered, Registered), registered
        self.session = registered.session
        self.say(Heartbeat(session=self.session))
        return registered

    def pushed(self, of: type[Struct]) -> Struct:
        """Return the next push of a type, acknowledging all that come."""
        while True:
            heard = self.hear()
            assert heard is not None, f"no {of.__name__}"
            header, message = heard
            if isinstance(message, HeartbeatAck) or header.id != self.taken + 1:
                continue
            self.taken = header.id
            self.say(Ack(session=self.session, acked=self.taken))
            if isinstance(message, of):
                return message


def wait_until(true: Any, seconds: float = WAIT) -> None:  # noqa: ANN401 - any callable
    """Ask again, with short pauses, until it is so."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


def frames_of(*parts: Sequence[bytes]) -> list[bytes]:
    """Return all frames in one list."""
    return [frame for part in parts for frame in part]
