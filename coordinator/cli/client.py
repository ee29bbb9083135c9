"""Asks a running daemon: one socket, one question at a time, a bound on every wait."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import zmq
from msgspec.structs import replace

from rankgate.proto.codec import WireError, decode, decode_header, encode
from rankgate.proto.findings import Finding
from rankgate.proto.messages import Query, Refusal, Rejected
from rankgate.proto.sockets import configure_socket, seed_routing_ids
from rankgate.proto.views import View

ANSWER_SECONDS = 5.0
"""How long a question waits for its answer unless told otherwise."""


class OperatorError(Exception):
    """A question to the daemon that brought no view; the text says what to do next."""


class DaemonUnreachableError(OperatorError):
    """Nobody answers at the operator endpoint."""

    def __init__(self, endpoint: str, reason: str) -> None:
        """Say where nobody answers, why, and what to look at."""
        super().__init__(
            f"no daemon answers at {endpoint}: {reason}. Start it with `rankgate serve`, or say"
            " where it is with --operator or RANKGATE_OPERATOR."
        )
        self.endpoint = endpoint


class QueryRefusedError(OperatorError):
    """The daemon answered, but refused the question."""

    def __init__(self, text: str, findings: tuple[Finding, ...] = ()) -> None:
        """Keep the daemon's words."""
        super().__init__(text)
        self.findings = findings


class OperatorClient:
    """A connection to the daemon's operator socket; use it from one thread."""

    def __init__(self, endpoint: str) -> None:
        """Connect; that the daemon is there shows with the first answer."""
        self.endpoint = endpoint
        seed_routing_ids(int.from_bytes(os.urandom(4), "big"))
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        configure_socket(self._socket)
        self._asked = 0
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            reason = (
                f"ZeroMQ cannot connect to it ({error}); expected ipc://PATH or tcp://HOST:PORT"
            )
            raise DaemonUnreachableError(endpoint, reason) from error

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
        """Close the connection; nothing waits."""
        self._socket.close(linger=0)
        self._context.term()

    def ask(self, view: str, subject: str = "", *, timeout: float = ANSWER_SECONDS) -> View:
        """Return the daemon's answer.

        Args:
            view: ``status``, ``ranks``, ``pairs``, ``transfers`` or ``story``.
            subject: what a story is about.
            timeout: seconds to wait.

        Raises:
            DaemonUnreachableError: no answer in time, or no socket at an ipc path.
            QueryRefusedError: the daemon does not answer this question.
        """
        deadline = time.monotonic() + timeout
        whole = self._ask(Query(view=view, subject=subject), deadline, timeout)
        while whole.next:
            query = Query(view=view, subject=subject, offset=whole.next)
            more = self._ask(query, deadline, timeout)
            whole = replace(
                whole,
                ranks=_joined(whole.ranks, more.ranks),
                pairs=_joined(whole.pairs, more.pairs),
                transfers=_joined(whole.transfers, more.transfers),
                next=more.next,
            )
        return whole

    def _ask(self, query: Query, deadline: float, timeout: float) -> View:
        missing = missing_ipc(self.endpoint)
        if missing is not None:
            raise DaemonUnreachableError(self.endpoint, f"{missing} does not exist")
        self._asked += 1
        self._socket.send_multipart(encode(query, self._asked))
        while (left := deadline - time.monotonic()) > 0:
            if not self._socket.poll(max(1, int(left * 1000))):
                continue
            answer = self._read(self._socket.recv_multipart())
            if answer is not None:
                return answer
        raise DaemonUnreachableError(self.endpoint, f"no answer within {timeout:g} s")

    def _read(self, frames: list[bytes]) -> View | None:
        """Return the view in a message; None when it answers an older question."""
        try:
            # Kind 0 is the same in every version, so it is read before the version is judged.
            header = decode_header(frames[0]) if frames else None
            if header is not None and header.id not in {0, self._asked}:
                return None
            _, message = decode(frames)
        except WireError as error:
            raise QueryRefusedError(
                f"the answer of {self.endpoint} is unreadable: {error}"
            ) from error
        if isinstance(message, View):
            if message.finding is not None:
                raise QueryRefusedError(_words(message.finding), (message.finding,))
            return message
        if isinstance(message, Rejected):
            words = "; ".join(_words(found) for found in message.findings)
            raise QueryRefusedError(words, tuple(message.findings))
        if isinstance(message, Refusal):
            raise QueryRefusedError(
                f"the daemon refuses: {message.code} {message.text}; it speaks wire versions"
                f" {message.min} to {message.max}"
            )
        return None


def missing_ipc(endpoint: str) -> str | None:
    """Return the path of an ipc endpoint whose socket does not exist, else None."""
    path = endpoint.removeprefix("ipc://")
    if path == endpoint or path.startswith("@") or Path(path).exists():
        return None
    return path


def _words(found: Finding) -> str:
    hint = f" ({found.hint})" if found.hint else ""
    return f"{found.code} {found.slug}: {found.message}{hint}"


Row = TypeVar("Row")


def _joined(first: list[Row] | None, more: list[Row] | None) -> list[Row] | None:
    return None if first is None else [*first, *(more or [])]
