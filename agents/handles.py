"""What an engine holds in its hands: a pair, a transfer, an agent's figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from msgspec import Struct

from rankgate.agents.errors import OpenDeniedError
from rankgate.agents.events import Outcome
from rankgate.agents.linking import Epochs, PairLinks
from rankgate.agents.rank import Sealed
from rankgate.proto.findings import Finding

Found = TypeVar("Found")


class Waiter(Protocol):
    """Whoever can wait for something that an agent will see."""

    def wait_for(self, look: Callable[[], Found | None], timeout: float | None) -> Found | None:
        """Return the first value that ``look`` finds, or None when time is up."""
        ...

    def check_session(self) -> None:
        """Raise if the daemon has refused this rank for good."""
        ...


class Pair(Struct, frozen=True, kw_only=True):
    """A ready pair, as this rank sees it; all numbers are the daemon's."""

    source: str
    source_epoch: int
    destination: str
    destination_epoch: int
    world_receive_count: int
    """Ranks of one DP group at this world's receiving stage, broadcast when it was sealed."""
    receive_count: int
    """Source rank: distinct destination ranks that must end before a release; else 0."""
    send_count: int
    """Destination rank: distinct source ranks whose data it must have; else 0."""
    contacts: list[tuple[int, str]]
    """(peer rank, ``data`` or ``notice``)."""


class Stats(Struct, frozen=True, kw_only=True):
    """What this agent has done so far."""

    bytes_sent: int
    bytes_received: int
    chunks_sent: int
    chunks_received: int
    staged: int
    staged_bytes: int
    landing: int
    seconds: dict[str, float]
    """Summed over this rank's opened transfers: ``grant`` (open to grant), ``data`` (grant to
    arrived), ``outcome`` (arrived to outcome)."""


OpenKey = tuple[Epochs, str, int]
"""(pair epochs, request, attempt): what an open is known by, here and at the daemon."""


class Transfer:
    """One opened request on a destination rank.

    Invariant: one handle a (pair, request, attempt) until it is denied or has its outcome, however
    often it is opened.
    """

    def __init__(self, waiter: Waiter, key: OpenKey, pages: Mapping[str, Sequence[int]]) -> None:
        """Made by ``RankAgent.open``."""
        self._waiter = waiter
        self.key = key
        self.pages = pages
        self.request = key[1]
        self.id = 0
        self.outcome: Outcome | None = None
        self.denied: Finding | None = None
        self.opened = time.monotonic()
        self.granted = 0.0
        self.arrived = 0.0

    def wait(self, timeout: float | None = None) -> Outcome:
        """Wait for the outcome: delivered, failed, expired or aborted.

        Args:
            timeout: seconds; None waits as long as the grant lives.

        Raises:
            OpenDeniedError: the daemon did not grant it.
            TimeoutError: no outcome in time.
            WireVersionError, RegistrationRejectedError: the daemon refuses this rank for good.
            AgentError: the agent has failed or is closed.
        """

        def look() -> Outcome | None:
            if self.outcome is None:
                self._waiter.check_session()
            if self.denied is not None:
                raise OpenDeniedError(f"request {self.request} is denied", [self.denied])
            return self.outcome

        found = self._waiter.wait_for(look, timeout)
        if found is None:
            raise TimeoutError(f"request {self.request}: no outcome within {timeout} s")
        return found


def view_of(pair: PairLinks, sealed: Sealed | None) -> Pair:
    """Return a pair as this rank sees it."""
    verdict = pair.verdict
    return Pair(
        source=verdict.source,
        source_epoch=verdict.source_epoch,
        destination=verdict.destination,
        destination_epoch=verdict.destination_epoch,
        world_receive_count=sealed.receive_count if sealed else 0,
        receive_count=verdict.receive_count,
        send_count=verdict.send_count,
        contacts=[(rank, link.kind) for rank, link in sorted(pair.links.items())],
    )
