"""Messages that are repeated under one id until they are answered or their time is up."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator

from msgspec import Struct

from rankgate.agents.spread import Spread

RETRY_FIRST = 200
RETRY_LONGEST = 2000

Answer = Callable[[Struct, int], None]


class Request:
    """One message on its way; times in ms."""

    __slots__ = (
        "build",
        "due",
        "id",
        "interval",
        "key",
        "on_answer",
        "on_timeout",
        "sent",
        "until",
    )

    def __init__(
        self, request_id: int, key: Hashable, build: Callable[[], Struct], on_answer: Answer
    ) -> None:
        """Begin unsent."""
        self.id = request_id
        self.key = key
        self.build = build
        self.on_answer = on_answer
        self.on_timeout: Callable[[int], None] | None = None
        self.sent = -1
        self.due = 0
        self.interval = RETRY_FIRST
        self.until: int | None = None


class Outstanding:
    """Requests by id.

    Invariant: ``on_answer`` is called at most once a request, and never after ``until``; a
    request that is dropped is never sent again.
    """

    def __init__(self, seed: int) -> None:
        """Start empty; ``seed`` spreads the repeats of many ranks."""
        self._spread = Spread(seed)
        self._by_id: dict[int, Request] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def new_id(self) -> int:
        """Return an id for a message that is sent once."""
        self._last += 1
        return self._last

    def add(
        self,
        key: Hashable,
        build: Callable[[], Struct],
        on_answer: Answer,
        now: int,
        *,
        until: int | None = None,
        on_timeout: Callable[[int], None] | None = None,
    ) -> Request:
        """Add a message; ``due`` hands it out at once and then again, ever more slowly.

        Args:
            key: whom it goes to, for ``drop`` and for the caller.
            build: makes the message each time it is sent.
            on_answer: called with (answer, now).
            now: ms.
            until: ms after which it is given up.
            on_timeout: called with now when it is given up.
        """
        request = Request(self.new_id(), key, build, on_answer)
        request.due, request.until, request.on_timeout = now, until, on_timeout
        self._by_id[request.id] = request
        return request

    def answered(self, request_id: int) -> Request | None:
        """Take the request that an answer belongs to; None for a repeat or a stranger."""
        return self._by_id.pop(request_id, None)

    def knows(self, request_id: int) -> bool:
        """Whether a request with this id waits for its answer."""
        return request_id in self._by_id

    def drop(self, key: Hashable) -> None:
        """Forget all messages to one receiver."""
        for request in [each for each in self._by_id.values() if each.key == key]:
            del self._by_id[request.id]

    def clear(self) -> None:
        """Forget everything."""
        self._by_id.clear()

    def give_up(self, now: int) -> None:
        """Give everything up, as if its time were up."""
        requests, self._by_id = list(self._by_id.values()), {}
        for request in requests:
            if request.on_timeout is not None:
                request.on_timeout(now)

    def hurry(self, now: int) -> None:
        """Make every request due now, as after a new connection."""
        for request in self._by_id.values():
            request.due, request.interval = now, RETRY_FIRST

    def due(self, now: int, ready: Callable[[Request], bool] | None = None) -> Iterator[Request]:
        """Yield what is to be sent now, noting it as sent; give up what is too old."""
        for request in list(self._by_id.values()):
            if request.until is not None and now >= request.until:
                if self._by_id.pop(request.id, None) and request.on_timeout is not None:
                    request.on_timeout(now)
            elif now >= request.due and (ready is None or ready(request)):
                # Of repeats, the answer may belong to the first: only its time bounds the
                # answerer's clock from above.
                request.sent = now if request.sent < 0 else request.sent
                request.due = now + int(request.interval * self._spread())
                request.interval = min(request.interval * 2, RETRY_LONGEST)
                yield request

    def next_deadline(self) -> int | None:
        """Return when (ms) something is due."""
        times = [
            each.due if each.until is None else min(each.due, each.until)
            for each in self._by_id.values()
        ]
        return min(times, default=None)
