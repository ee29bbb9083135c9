"""The engine-facing rank agent, for a plain threaded scheduler that ticks.

Nothing here blocks on I/O except ``wait_…``: calls change the pure rank under a short lock, and one
background thread moves messages and bytes.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

from rankgate.agents.clock import boottime_ms
from rankgate.agents.describe import RankDescription
from rankgate.agents.errors import (
    AgentError,
    ClosedError,
    ForkedError,
    PagesError,
    PairRejectedError,
    StageError,
)
from rankgate.agents.events import AgentEvent, Arrived, Outcome, Unpolled
from rankgate.agents.handles import OpenKey, Pair, Stats, Transfer, view_of
from rankgate.agents.landing import check_pages
from rankgate.agents.link import LinkThread
from rankgate.agents.linking import LinkState, Registered, region_lengths
from rankgate.agents.rank import RankCore, Sealed
from rankgate.agents.reasons import check_session, not_ready, unregistered
from rankgate.agents.session import Identity
from rankgate.agents.sockets import LinkSocket, connect, make_context
from rankgate.agents.torchrun import read_environment, share_round
from rankgate.proto.codec import encode_blob
from rankgate.proto.codes import Code
from rankgate.proto.descriptor import Transport
from rankgate.proto.digests import digest_bytes
from rankgate.proto.findings import Finding, Side, finding
from rankgate.proto.messages import Metadata, OpenItem, OutcomeItem

Pages = Sequence[int] | Mapping[str, Sequence[int]]
Found = TypeVar("Found")

CREDIT_CHUNKS = 16
"""Chunks of about 1 MiB that a source may have under way on one link."""

_LEAVE_SECONDS = 1.0


class RankAgent:
    """One rank's agent.

    Invariant: every staged request is Released once and every opened one has one outcome, whatever
    fails; both are seen by ``poll`` in the order they happened. Who never polls loses, beyond
    65536 of them, the oldest Arrived and Outcome of transfers that have their outcome: their
    handles hold it. Nothing else is ever lost.
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
        self.daemon = daemon
        self._memory = {
            (cache.group.name, part): arrays
            for cache in description.kv
            for part, arrays in cache.memory().items()
        }
        metadata = description.metadata()
        blob = encode_blob(metadata)
        with ExitStack() as undo:
            self._context = make_context()
            undo.callback(self._context.destroy, 0)  # closes whatever socket was made of it
            self._bound = LinkSocket(self._context, daemon, link)
            undo.callback(self._bound.remove)
            daemon_socket = connect(self._context, daemon)
            self._begin(description, identity, world_size, blob, metadata)
            self._thread = LinkThread(
                self._context,
                daemon_socket,
                self._bound.socket,
                self._core,
                self._memory,
                self._turned,
                self._lock,
            )
            undo.pop_all()

    def _begin(
        self,
        description: RankDescription,
        identity: Identity,
        world_size: int,
        blob: bytes,
        metadata: Metadata,
    ) -> None:
        """Make what is known of this rank, and its core, which begins to greet the daemon."""
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
        self._events = Unpolled()
        self._transfers: dict[int, Transfer] = {}
        self._opened: dict[OpenKey, Transfer] = {}
        self._seconds = {"grant": 0.0, "data": 0.0, "outcome": 0.0}
        self._closed = False

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
            self.check_session()
            return True if self._core.session.rules is not None else None

        if self.wait_for(look, timeout) is None:
            with self._lock:
                raise unregistered(self._core.session, self.daemon, timeout)

    def wait_ready(self, world: str, timeout: float = 60.0) -> Pair:
        """Wait until the pair with ``world`` may open transfers.

        Raises:
            PairRejectedError: the daemon refuses the pair; the findings name field and values.
            NotReadyError: it is not ready in time; the text says what it waits for.
            RegistrationRejectedError, DaemonUnreachableError: this rank itself is not taken.
        """

        def look() -> Pair | None:
            self.check_session()
            pair = self._core.pair_with(world)
            if pair is None:
                return None
            if pair.state is LinkState.REJECTED:
                text = f"the pair of {self._core.identity.world} with {world} is refused"
                raise PairRejectedError(text, pair.findings)
            ready = pair.state is LinkState.READY and self._core.sealed is not None
            return view_of(pair, self._core.sealed) if ready else None

        found = self.wait_for(look, timeout)
        if found is None:
            with self._lock:
                raise not_ready(self._core, self.daemon, world, timeout)
        return found

    def check_session(self) -> None:
        """Raise if the daemon has refused this rank for good.

        Raises:
            RegistrationRejectedError, WireVersionError: it has.
        """
        check_session(self._core.session, self.daemon)

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
        daemon gives all of them the same transfer. Opening it again gives the same handle, and
        renews the grant, until it is denied or has its outcome.

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
        refused: list[Finding] = []

        with self._lock:
            self._check()
            pair = self._core.pair_with(source)
            if pair is None or pair.sending or pair.state is not LinkState.READY:
                raise not_ready(self._core, self.daemon, source, 0)
            key = (pair.epochs, request, attempt)
            transfer = self._opened.get(key)
            if transfer is None:
                transfer = Transfer(self, key, listed)
            elif transfer.pages != listed:
                sides = (
                    Side("opened", str(transfer.pages)[:200]),
                    Side("now", str(listed)[:200]),
                )
                found = finding(Code.CONFLICTING_OPEN, f"request {request}", *sides)
                raise PagesError(f"request {request} cannot be opened", [found])
            elif not transfer.id or key not in self._core.destination.table.landings:
                return transfer  # not answered yet, or nothing is left to come but the outcome
            resolve = partial(self._resolve, transfer, refused)
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
            self._opened[key] = transfer
        self._thread.wake()
        return transfer

    def poll(self) -> list[AgentEvent]:
        """Return what has happened since the last poll, in order; never waits.

        Raises:
            AgentError: the agent has failed or is closed.
        """
        with self._lock:
            self._check()
            return self._events.take()

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
        if self._thread.stop(_LEAVE_SECONDS):
            self._context.destroy(0)  # else the thread, a daemon, still uses its sockets
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
            return [
                view_of(pair, self._core.sealed) for pair in pairs if pair.state is LinkState.READY
            ]

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
            self._events.add(event)
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
        self._over(transfer)

    def _over(self, transfer: Transfer) -> None:
        self._transfers.pop(transfer.id, None)
        if self._opened.get(transfer.key) is transfer:
            del self._opened[transfer.key]

    def _resolve(
        self,
        transfer: Transfer,
        refused: list[Finding],
        number: int,
        denied: Finding | None,
        ended: OutcomeItem | None,
    ) -> None:
        """Take the answer to an open; to a repeat of one that was granted, it changes nothing."""
        if transfer.id or transfer.outcome is not None or transfer.denied is not None:
            return
        if ended is not None:
            request, outcome = transfer.request, ended.outcome
            transfer.outcome = Outcome(request, ended.transfer, outcome, ended.finding)
            self._events.add(transfer.outcome)
            self._over(transfer)
        elif denied is not None:
            refused.append(denied)
            transfer.denied = denied
            self._events.add(Outcome(transfer.request, 0, "denied", denied))
            self._over(transfer)
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
