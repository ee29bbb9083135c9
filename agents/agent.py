"""The engine-facing rank agent, for a plain threaded scheduler that ticks.

Nothing here blocks on I/O except ``wait_…``: calls change the pure rank under a short lock, and one
background thread moves messages and bytes.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self, TypeVar

from msgspec import Struct

from rankgate.agents.clock import boottime_ms
from rankgate.agents.describe import RankDescription
from rankgate.agents.errors import (
    AgentError,
    ClosedError,
    DaemonUnreachableError,
    ForkedError,
    NotReadyError,
    OpenDeniedError,
    PagesError,
    PairRejectedError,
    RegistrationRejectedError,
    StageError,
    WireVersionError,
)
from rankgate.agents.events import AgentEvent, Arrived, Outcome
from rankgate.agents.landing import check_pages
from rankgate.agents.link import LinkThread
from rankgate.agents.linking import LinkState, PairLinks, Registered, region_lengths
from rankgate.agents.rank import RankCore, Sealed
from rankgate.agents.session import Identity, SessionState
from rankgate.agents.sockets import LinkSocket, connect, make_context
from rankgate.agents.torchrun import read_environment, share_round
from rankgate.proto import __version__
from rankgate.proto.codec import encode_blob
from rankgate.proto.codes import Code
from rankgate.proto.descriptor import Transport
from rankgate.proto.digests import digest_bytes
from rankgate.proto.findings import Finding, Side, finding
from rankgate.proto.messages import OpenItem, OutcomeItem

Pages = Sequence[int] | Mapping[str, Sequence[int]]
Found = TypeVar("Found")

CREDIT_CHUNKS = 16
"""Chunks of about 1 MiB that a source may have under way on one link."""

_MAX_EVENTS = 1 << 20
_LEAVE_SECONDS = 1.0


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


class Transfer:
    """One opened request on a destination rank."""

    def __init__(self, agent: RankAgent, request: str) -> None:
        """Made by ``RankAgent.open``."""
        self._agent = agent
        self.request = request
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
            AgentError: the agent has failed or is closed.
        """

        def look() -> Outcome | None:
            if self.denied is not None:
                raise OpenDeniedError(f"request {self.request} is denied", [self.denied])
            return self.outcome

        found = self._agent.wait_for(look, timeout)
        if found is None:
            raise TimeoutError(f"request {self.request}: no outcome within {timeout} s")
        return found


class RankAgent:
    """One rank's agent.

    Invariant: every staged request is Released once and every opened one has one outcome, whatever
    fails; both are seen by ``poll`` in the order they happened.
    """

    def __init__(
        self,
        description: RankDescription,
        *,
        identity: Identity,
        world_size: int,
        daemon: str,
        link: str = "",
    ) -> None:
        """Bind the link, connect to the daemon and begin to register.

        Args:
            description: what this rank is; its caches are registered as they are now.
            identity: world, rank, incarnation and round token.
            world_size: ranks of the world.
            daemon: the daemon's endpoint.
            link: endpoint to bind for peers, verbatim; chosen when empty.
        """
        self._pid = os.getpid()
        self._memory = {
            (cache.group.name, part): arrays
            for cache in description.kv
            for part, arrays in cache.memory().items()
        }
        metadata = description.metadata()
        blob = encode_blob(metadata)
        self._context = make_context()
        try:
            self._bound = LinkSocket(self._context, daemon, link)
        except AgentError:
            self._context.term()
            raise
        try:
            daemon_socket = connect(self._context, daemon)
        except AgentError:
            self._bound.socket.close(0)
            self._bound.remove()
            self._context.term()
            raise
        transport = Transport(
            kind="zmq",
            address=self._bound.address,
            host=socket.gethostname()[:256],
            metadata_digest=digest_bytes(blob),
        )
        descriptor = description.descriptor(
            world=identity.world, rank=identity.rank, world_size=world_size, transport=transport
        )
        self._pools = {group.name: group.pages for group in descriptor.kv}
        self._page_bytes = {
            group.name: len(group.layers) * (group.k_item_len + group.v_item_len)
            for group in descriptor.kv
        }
        item_lens = {
            (cache.group.name, part): size
            for cache in description.kv
            for part, _, size in cache.parts()
        }
        self.daemon = daemon
        self._core = RankCore(
            identity,
            descriptor,
            Registered(blob, region_lengths(metadata), item_lens),
            boottime_ms(),
            claims=description.claims,
            seed=int.from_bytes(identity.incarnation[:8], "big"),
            credit=CREDIT_CHUNKS,
        )
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._events: deque[AgentEvent] = deque(maxlen=_MAX_EVENTS)
        self._transfers: dict[int, Transfer] = {}
        self._seconds = {"grant": 0.0, "data": 0.0, "outcome": 0.0}
        self._closed = False
        self._thread = LinkThread(
            self._context,
            daemon_socket,
            self._bound.socket,
            self._core,
            self._memory,
            self._turned,
            self._lock,
        )

    @classmethod
    def from_env(
        cls, description: RankDescription, daemon: str | None = None, timeout: float = 60.0
    ) -> Self:
        """Make the agent of a process that torchrun started, and register it.

        Reads RANK, WORLD_SIZE, TORCHELASTIC_RUN_ID, MASTER_ADDR, MASTER_PORT; RANKGATE_WORLD,
        RANKGATE_DAEMON, RANKGATE_ROUND and RANKGATE_LINK go over them. The round token is shared
        over torchrun's own store.

        Args:
            description: what this rank is.
            daemon: the daemon's endpoint; RANKGATE_DAEMON by default.
            timeout: seconds until registration has failed.

        Raises:
            SettingError: the environment cannot work, or ranks are missing at the store.
            RegistrationRejectedError: the daemon refuses this rank; the findings say why.
            WireVersionError: it speaks another wire version.
            DaemonUnreachableError: it does not answer in time.
        """
        deadline = time.monotonic() + timeout
        place = read_environment(os.environ, world=description.world, daemon=daemon)
        incarnation = os.urandom(16)
        identity = Identity(
            world=place.world,
            rank=place.rank,
            incarnation=incarnation,
            round=share_round(place, incarnation, timeout),
        )
        agent = cls(
            description,
            identity=identity,
            world_size=place.world_size,
            daemon=place.daemon,
            link=os.environ.get("RANKGATE_LINK", ""),
        )
        try:
            agent.wait_registered(max(0.0, deadline - time.monotonic()))
        except BaseException:
            agent.close()
            raise
        return agent

    # --- waiting --------------------------------------------------------------------------

    def wait_registered(self, timeout: float) -> None:
        """Wait until the daemon has taken this rank.

        Raises:
            RegistrationRejectedError, WireVersionError, DaemonUnreachableError: why not.
        """

        def look() -> bool | None:
            self._check_session()
            return True if self._core.session.rules is not None else None

        if self.wait_for(look, timeout) is None:
            raise self._unregistered(timeout)

    def wait_ready(self, world: str, timeout: float = 60.0) -> Pair:
        """Wait until the pair with ``world`` may open transfers.

        Raises:
            PairRejectedError: the daemon refuses the pair; the findings name field and values.
            NotReadyError: it is not ready in time; the text says what it waits for.
            RegistrationRejectedError, DaemonUnreachableError: this rank itself is not taken.
        """

        def look() -> Pair | None:
            self._check_session()
            pair = self._core.pair_with(world)
            if pair is None:
                return None
            if pair.state is LinkState.REJECTED:
                text = f"the pair of {self._core.identity.world} with {world} is refused"
                raise PairRejectedError(text, pair.findings)
            ready = pair.state is LinkState.READY and self._core.sealed is not None
            return self._view(pair) if ready else None

        found = self.wait_for(look, timeout)
        if found is None:
            with self._lock:
                raise self._not_ready(world, timeout)
        return found

    def wait_for(self, look: Callable[[], Found | None], timeout: float | None) -> Found | None:
        """Return the first value that ``look`` finds under the lock, or None when time is up.

        Raises:
            AgentError: the agent has failed or is closed, or ``look`` says so.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                self._check()
                found = look()
                if found is not None:
                    return found
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._changed.wait(left)

    # --- the engine's calls -----------------------------------------------------------------

    def stage(self, request: str, pages: Pages, ttl: float = 60.0) -> None:
        """Hold a request's pages for its destinations until they are Released.

        Args:
            request: the request id.
            pages: page indices in token order, of the only KV group or by group name. They must
                not be written before Released.
            ttl: seconds after which they are given back if no destination came.

        Raises:
            PagesError: a page outside the pool, or twice.
            StageError: too much is staged, or the request is staged with other pages.
        """
        listed = self._listed(pages)
        for group, numbers in listed.items():
            if wrong := check_pages(numbers, self._pools[group]):
                side = Side(f"request {request}", wrong)
                found = finding(Code.PAGES_INVALID, f"pages[{group}]", side)
                raise PagesError(f"request {request} cannot be staged", [found])
        nbytes = sum(len(numbers) * self._page_bytes[group] for group, numbers in listed.items())
        with self._lock:
            self._check()
            refused = self._core.stage(request, listed, nbytes, int(ttl * 1000), boottime_ms())
        if refused is not None:
            raise StageError(f"request {request} cannot be staged", [refused])
        self._thread.wake()

    def open(
        self,
        request: str,
        *,
        source: str,
        pages: Pages,
        source_dp: int = 0,
        attempt: int = 0,
        ttl: float | None = None,
    ) -> Transfer:
        """Ask for a request's data into these pages; returns at once.

        Every rank of the destination DP group opens the request, each with its own pages; the
        daemon gives all of them the same transfer.

        Args:
            request: the request id, the same as the source stages.
            source: name of the source world.
            pages: page indices in token order, of the only KV group or by group name.
            source_dp: the source's data-parallel rank.
            attempt: a higher number asks again after a failed attempt.
            ttl: seconds the grant lives; the daemon's default if None.

        Raises:
            NotReadyError: the pair is not ready.
            PagesError: pages that do not exist, stand twice, or still belong to a transfer.
        """
        listed = self._listed(pages)
        transfer = Transfer(self, request)
        refused: list[Finding] = []

        def resolve(number: int, denied: Finding | None, ended: OutcomeItem | None) -> None:
            if denied is not None and not transfer.id:
                refused.append(denied)
            self._resolve(transfer, number, denied, ended)

        with self._lock:
            self._check()
            pair = self._core.pair_with(source)
            if pair is None or pair.sending or pair.state is not LinkState.READY:
                raise self._not_ready(source, 0)
            item = OpenItem(
                request=request,
                attempt=attempt,
                source_epoch=pair.epochs[0],
                destination_epoch=pair.epochs[1],
                source_dp=source_dp,
                destination_dp=pair.verdict.dp,
                table_digest=pair.verdict.table_digest,
                ttl=0 if ttl is None else int(ttl * 1000),
            )
            self._core.destination.open(item, pair, listed, resolve)
            if refused:
                raise PagesError(f"request {request} cannot be opened", refused)
        self._thread.wake()
        return transfer

    def poll(self) -> list[AgentEvent]:
        """Return what has happened since the last poll, in order; never waits.

        Raises:
            AgentError: the agent has failed or is closed.
        """
        with self._lock:
            self._check()
            events = list(self._events)
            self._events.clear()
            return events

    def abort(self, request: str, why: str) -> None:
        """Abort a request on both sides; its outcome and its release still come, once each."""
        with self._lock:
            self._check()
            self._core.abort(request, why, boottime_ms())
        self._thread.wake()

    def close(self) -> None:
        """Leave and close; may be called twice, and never waits long for a dead daemon."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        with self._changed:
            self._core.session.leave("closed by the engine")
            self._changed.notify_all()
        self._thread.stop(_LEAVE_SECONDS)
        self._context.destroy(0)
        self._bound.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    # --- looking --------------------------------------------------------------------------

    @property
    def world(self) -> Sealed | None:
        """Epoch, size and receive_count of this rank's world; None while it is not sealed."""
        with self._lock:
            return self._core.sealed

    @property
    def findings(self) -> dict[str, list[Finding]]:
        """Latest findings by world: this rank's own and those that would pair with it."""
        with self._lock:
            return {name: list(found) for name, found in self._core.findings.items()}

    @property
    def pairs(self) -> list[Pair]:
        """The pairs that are ready."""
        with self._lock:
            pairs = self._core.pairs.values()
            return [self._view(pair) for pair in pairs if pair.state is LinkState.READY]

    def stats(self) -> Stats:
        """Return what this agent has done so far."""
        sender, receiver = self._thread.sender, self._thread.receiver
        with self._lock:
            ledger = self._core.source.ledger
            return Stats(
                bytes_sent=sender.nbytes,
                bytes_received=receiver.nbytes,
                chunks_sent=sender.chunks,
                chunks_received=receiver.chunks,
                staged=len(ledger.staged),
                staged_bytes=ledger.staged_bytes,
                landing=len(self._core.destination.table.landings),
                seconds=dict(self._seconds),
            )

    # --- the thread's side (under the lock) ---------------------------------------------------

    def _turned(self) -> None:
        """Take what a turn has brought, and wake who waits."""
        events, self._core.events = self._core.events, []
        for event in events:
            self._events.append(event)
            if isinstance(event, Arrived | Outcome):
                self._note(event)
        self._changed.notify_all()

    def _note(self, event: Arrived | Outcome) -> None:
        transfer = self._transfers.get(event.transfer)
        if transfer is None:
            return
        now = time.monotonic()
        if isinstance(event, Arrived):
            transfer.arrived = now
            self._seconds["data"] += now - transfer.granted
            return
        transfer.outcome = event
        if transfer.arrived:
            self._seconds["outcome"] += now - transfer.arrived
        del self._transfers[event.transfer]

    def _resolve(
        self, transfer: Transfer, number: int, denied: Finding | None, ended: OutcomeItem | None
    ) -> None:
        if ended is not None:
            request, outcome = transfer.request, ended.outcome
            transfer.outcome = Outcome(request, ended.transfer, outcome, ended.finding)
            self._events.append(transfer.outcome)
        elif denied is not None:
            transfer.denied = denied
            self._events.append(Outcome(transfer.request, 0, "denied", denied))
        else:
            transfer.id = number
            transfer.granted = time.monotonic()
            self._seconds["grant"] += transfer.granted - transfer.opened
            self._transfers[number] = transfer
        self._changed.notify_all()

    # --- words ----------------------------------------------------------------------------

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedError(
                "this agent was made before a fork; sockets do not survive one: make a new agent"
                " in the child"
            )
        if self._closed:
            raise ClosedError("this agent is closed")
        if self._thread.failure is not None:
            text = f"the agent's thread has failed: {self._thread.failure!r}"
            raise AgentError(text) from self._thread.failure

    def _check_session(self) -> None:
        session = self._core.session
        if session.refusal is not None:
            text = f"the daemon at {self.daemon} refuses this agent ({__version__})"
            bounds = f"it speaks wire {session.refusal.min} to {session.refusal.max}"
            raise WireVersionError(f"{text}: {session.refusal.text}; {bounds}")
        if session.state is SessionState.REFUSED:
            who = f"{session.identity.world} rank {session.identity.rank}"
            raise RegistrationRejectedError(f"the daemon refuses {who}", session.findings)

    def _unregistered(self, timeout: float) -> AgentError:
        with self._lock:
            findings = self._core.session.findings
        who = f"{self._core.identity.world} rank {self._core.identity.rank}"
        if findings:
            return RegistrationRejectedError(f"{who} was not taken in {timeout:g} s", findings)
        text = f"no answer from a daemon at {self.daemon} within {timeout:g} s"
        return DaemonUnreachableError(f"{text}; is it running (`rankgate status`)?")

    def _not_ready(self, world: str, timeout: float) -> AgentError:
        """Return the error that says what the pair with a world waits for."""
        core = self._core
        mine = core.identity.world
        found = [one for findings in core.findings.values() for one in findings]
        silent = boottime_ms() - core.session.answered_at
        if core.session.rules is None or silent > 3 * core.session.rules.ttl:
            text = f"no answer from the daemon at {self.daemon} for {silent / 1000:.1f} s"
            return DaemonUnreachableError(text)
        pair = core.pair_with(world)
        found += pair.findings if pair is not None else []
        if core.sealed is None:
            waits = f"{mine} is not sealed"
        elif pair is None:
            waits = f"no verdict on {mine} with {world}: {world} is not sealed, or no partner"
        else:
            down = [rank for rank, link in pair.links.items() if not link.up]
            waits = f"{mine} with {world} is {pair.state}"
            waits += f", no link with {world} ranks {down}" if down else ", others have to link"
        return NotReadyError(f"not ready within {timeout:g} s: {waits}", found)

    def _view(self, pair: PairLinks) -> Pair:
        verdict, sealed = pair.verdict, self._core.sealed
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

    def _listed(self, pages: Pages) -> dict[str, list[int]]:
        if isinstance(pages, Mapping):
            listed = {name: [int(page) for page in numbers] for name, numbers in pages.items()}
        elif len(self._pools) == 1:
            listed = {next(iter(self._pools)): [int(page) for page in pages]}
        else:
            raise PagesError(f"this rank has groups {sorted(self._pools)}: give pages by group")
        if unknown := sorted(set(listed) - set(self._pools)):
            raise PagesError(f"no KV group {unknown[0]!r}; this rank has {sorted(self._pools)}")
        return listed
