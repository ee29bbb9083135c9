"""A fleet in memory: the daemon's real core, real rank cores, real bytes, virtual time in ms.

Every message is encoded and decoded on its way. Channels keep their order, as ZeroMQ's do, but
each has its own delay, and control messages may be lost. The fleet is the judge of what no part
can see alone: bytes that arrive are compared, memory that was released is spoilt at once, so a
release that came too early shows as wrong bytes.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from rankgate.agents.chunks import cut
from rankgate.agents.events import AgentEvent, Arrived, Outcome, Released, Wanted
from rankgate.agents.ledger import Sending
from rankgate.agents.linking import LinkState, PairLinks, Registered, region_lengths
from rankgate.agents.rank import RankCore
from rankgate.agents.session import Identity as RankIdentity
from rankgate.coordinator.core.effects import CutOff, Effect, Judge, Persist, Send
from rankgate.coordinator.core.events import (
    ClockTicked,
    Event,
    MessageArrived,
    PeerDisconnected,
    VerdictReached,
)
from rankgate.coordinator.core.judging import judge
from rankgate.coordinator.core.machine import Coordinator
from rankgate.coordinator.core.settings import Durable, Identity, Settings
from rankgate.proto.codec import decode, decode_blob, encode, encode_blob
from rankgate.proto.descriptor import Descriptor
from rankgate.proto.digests import digest_bytes
from rankgate.proto.findings import Finding
from rankgate.proto.geometry import Interval, heads_of_rank
from rankgate.proto.messages import (
    Chunk,
    Credit,
    Metadata,
    OpenItem,
    OutcomeItem,
    PeerHello,
    Region,
    Slice,
    SourceFailed,
)
from tests.coordinator.core.harness import Job, id16

Key = tuple[str, int]
LinkKey = tuple[tuple[int, int], int]

SPOILT = 0xEE
CHUNK_BYTES = 96


class Cache:
    """The pages of one rank, as bytes; ``HND`` or ``NHD`` as the job says."""

    def __init__(self, job: Job, descriptor: Descriptor) -> None:
        """Allocate zeroed pools."""
        self.job = job
        self.descriptor = descriptor
        at = descriptor.coordinates
        total = 1 if job.kind == "mla" else job.heads
        self.heads: Interval = heads_of_rank(total, job.tp, at.tp)
        self.pools: dict[tuple[str, str], list[bytearray]] = {}
        self.item_lens: dict[tuple[str, str], int] = {}
        for group in descriptor.kv:
            for part, size in (("k", group.k_item_len), ("v", group.v_item_len)):
                if size:
                    self.pools[group.name, part] = [
                        bytearray(size * group.pages) for _ in group.layers
                    ]
                    self.item_lens[group.name, part] = size

    def metadata(self) -> bytes:
        """Return what is registered of it."""
        return encode_blob(
            Metadata(
                kind="zmq",
                regions=[
                    Region(group=group, part=part, layer=layer, length=len(pool))
                    for (group, part), pools in self.pools.items()
                    for layer, pool in enumerate(pools)
                ],
            )
        )

    def _page(self, request: str, layer_id: int, part: str, position: int, size: int) -> bytes:
        """Return what page ``position`` of a request must hold on this rank."""
        job, group = self.job, self.descriptor.kv[0]
        head_bytes = size // (self.heads.size * group.page_size)
        cells = {
            (head, token): _pattern(request, layer_id, part, head, position, token, head_bytes)
            for head in range(self.heads.start, self.heads.stop)
            for token in range(group.page_size)
        }
        heads, tokens = range(self.heads.start, self.heads.stop), range(group.page_size)
        if job.page_layout == "HND":
            return b"".join(cells[head, token] for head in heads for token in tokens)
        return b"".join(cells[head, token] for token in tokens for head in heads)

    def each(
        self, request: str, pages: Sequence[int]
    ) -> Iterator[tuple[bytearray, int, bytes, str]]:
        """Yield (pool, offset, expected bytes, where) for every page of a request."""
        for group in self.descriptor.kv:
            for part in ("k", "v"):
                size = self.item_lens.get((group.name, part), 0)
                for layer, pool in enumerate(self.pools.get((group.name, part), [])):
                    layer_id = group.layers[layer]
                    for position, page in enumerate(pages):
                        expected = self._page(request, layer_id, part, position, size)
                        yield pool, page * size, expected, f"{part}{layer_id} page {page}"

    def fill(self, request: str, pages: Sequence[int]) -> None:
        """Write what a prefill would have computed."""
        for pool, offset, expected, _ in self.each(request, pages):
            pool[offset : offset + len(expected)] = expected

    def wrong(self, request: str, pages: Sequence[int]) -> list[str]:
        """Return where the bytes of a request are not what they must be."""
        return [
            where
            for pool, offset, expected, where in self.each(request, pages)
            if pool[offset : offset + len(expected)] != expected
        ]

    def spoil(self, pages: Sequence[int]) -> None:
        """Overwrite pages that belong to nobody any more."""
        for pool, offset, expected, _ in self.each("", pages):
            pool[offset : offset + len(expected)] = bytes([SPOILT]) * len(expected)

    def gather(self, part: Slice, chunk: Chunk, pages: Sequence[int]) -> bytes:
        """Return the bytes of a chunk, as the protocol orders them."""
        return b"".join(
            bytes(pool[begin : begin + part.length])
            for pool, begin in self._runs(part, chunk, pages, source=True)
        )

    def scatter(self, part: Slice, chunk: Chunk, pages: Sequence[int], data: bytes) -> None:
        """Write the bytes of a chunk to their places."""
        for index, (pool, begin) in enumerate(self._runs(part, chunk, pages, source=False)):
            piece = data[index * part.length : (index + 1) * part.length]
            assert begin + part.length <= len(pool)
            pool[begin : begin + part.length] = piece

    def _runs(
        self, part: Slice, chunk: Chunk, pages: Sequence[int], *, source: bool
    ) -> Iterator[tuple[bytearray, int]]:
        first = part.source_layer if source else part.destination_layer
        offset = part.source_offset if source else part.destination_offset
        stride = part.source_stride if source else part.destination_stride
        size = self.item_lens[part.group, part.part]
        for layer in range(chunk.layer, chunk.layer + chunk.layers):
            pool = self.pools[part.group, part.part][first + layer]
            for page in pages[chunk.first : chunk.first + chunk.pages]:
                for run in range(part.count):
                    yield pool, page * size + offset + run * stride


def _pattern(*parts: Any) -> bytes:  # noqa: ANN401 - anything with a repr
    *what, size = parts
    return (digest_bytes(repr(what).encode()) * (size // 16 + 1))[:size]


class Rank:
    """One process: a rank core, its cache, and an engine that does what the test told it."""

    def __init__(self, fleet: Fleet, job: Job, rank: int, life: str) -> None:
        """Start to greet the daemon."""
        described = job.describe(rank)
        self.fleet = fleet
        self.job = job
        self.cache = Cache(job, described)
        blob = self.cache.metadata()
        self.key: Key = (job.name, rank)
        self.address = f"mem://{job.name}/{rank}/{life}"
        transport = replace(
            described.transport, address=self.address, metadata_digest=digest_bytes(blob)
        )
        self.descriptor = replace(described, transport=transport)
        registered = Registered(
            blob=blob,
            lengths=region_lengths(decode_blob(blob, Metadata)),
            item_lens=self.cache.item_lens,
        )
        identity = RankIdentity(
            world=job.name,
            rank=rank,
            incarnation=id16("incarnation", job.name, rank, life),
            round=id16("round", job.name, life),
        )
        self.core = RankCore(
            identity,
            self.descriptor,
            registered,
            fleet.now,
            claims={},
            seed=fleet.random.getrandbits(32),
            credit=3,
        )
        self.core.destination.table.chunk_bytes = CHUNK_BYTES
        self.alive = True
        self.paused = False
        self.peer = fleet.new_route()
        self.dialed: dict[LinkKey, bytes] = {}
        self.queue: list[tuple[Sending, list[Chunk]]] = []
        self.events: list[AgentEvent] = []
        self.staged: dict[str, list[int]] = {}
        self.opened: dict[str, list[int]] = {}
        self.answers: list[tuple[str, int, Finding | None, OutcomeItem | None]] = []
        self.sent_bytes = 0
        self.tick_at = -1

    # --- the engine -----------------------------------------------------------------------

    def pair(self, world: str) -> PairLinks:
        """Return the current pair with a world."""
        pair = self.core.pair_with(world)
        assert pair is not None, f"{self.key} has no pair with {world}"
        return pair

    def stage(self, request: str, pages: Sequence[int], ttl: int = 60_000) -> Finding | None:
        """Fill and stage a request's pages."""
        self.cache.fill(request, pages)
        held = {group.name: list(pages) for group in self.descriptor.kv}
        refused = self.core.stage(request, held, 0, ttl, self.fleet.now)
        if refused is None:
            self.staged[request] = list(pages)
        self.fleet.settle(self)
        return refused

    def open(self, request: str, world: str, pages: Sequence[int], **fields: Any) -> None:  # noqa: ANN401 - fields of OpenItem
        """Open a request into pages, which are zeroed first."""
        pair = self.pair(world)
        item = OpenItem(
            request=request,
            source_epoch=pair.epochs[0],
            destination_epoch=pair.epochs[1],
            destination_dp=self.descriptor.coordinates.dp,
            table_digest=pair.verdict.table_digest,
            **fields,
        )
        held = {group.name: list(pages) for group in self.descriptor.kv}

        def resolve(transfer: int, denied: Finding | None, ended: OutcomeItem | None) -> None:
            self.answers.append((request, transfer, denied, ended))
            if denied is None and ended is None:
                self.opened[request] = list(pages)

        self.core.destination.open(item, pair, held, resolve)
        self.fleet.settle(self)

    def told(self, of: type, request: str | None = None) -> list[Any]:
        """Return the events of one type, about one request if it is given."""
        return [
            event
            for event in self.events
            if isinstance(event, of)
            and (request is None or getattr(event, "request", None) == request)
        ]

    def take_events(self) -> None:
        """Let the engine see what happened, and judge it."""
        events, self.core.events = self.core.events, []
        for event in events:
            self.events.append(event)
            if isinstance(event, Released):
                # Whoever still reads these pages sends what nobody wants.
                self.cache.spoil(self.staged.pop(event.request))
                if event.reason == "delivered":
                    assert event.ended == event.receive_count, event
            elif isinstance(event, Arrived):
                wrong = self.cache.wrong(event.request, self.opened[event.request])
                assert not wrong, f"{self.key} {event}: {wrong}"
            elif isinstance(event, Outcome):
                first = self.fleet.outcomes.setdefault(event.transfer, event.outcome)
                # Only the daemon's word binds all: a rank that it can no longer tell says expired.
                deaf = self.fleet.start > 1 and "expired" in {first, event.outcome}
                assert first == event.outcome or deaf, f"{self.key} {event} against {first}"
                if event.delivered:
                    assert self.told(Arrived, event.request), f"{self.key} {event}"
            elif isinstance(event, Wanted) and self.fleet.stages_on_demand is not None:
                self.fleet.stages_on_demand(self, event.request)


class Fleet:
    """The daemon, all ranks and the wires between them."""

    def __init__(
        self,
        *,
        seed: int = 0,
        loss: float = 0.0,
        delay: int = 3,
        settings: Settings | None = None,
    ) -> None:
        """Start a daemon.

        Args:
            seed: everything random follows from it.
            loss: probability that one control message is lost.
            delay: most ms that a message takes.
            settings: the daemon's rules.
        """
        self.random = random.Random(seed)
        self.loss = loss
        self.delay = delay
        self.now = 1_000_000
        self.settings = settings or Settings()
        self.durable = Durable()
        self.start = 0
        self.zero = 0
        self.ranks: dict[Key, Rank] = {}
        self.gone: list[Rank] = []
        self.outcomes: dict[int, str] = {}
        self.stages_on_demand: Callable[[Rank, str], None] | None = None
        self.messages = 0
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._sequence = 0
        self._last: defaultdict[object, int] = defaultdict(int)
        self._routes = 0
        self._inbound: dict[bytes, tuple[Rank, Rank, LinkKey]] = {}
        self._daemon_tick = -1
        self.boot()

    def new_route(self) -> bytes:
        """Return a routing id that was never used."""
        self._routes += 1
        return b"\0" + self._routes.to_bytes(4, "big")

    # --- the daemon -----------------------------------------------------------------------

    def boot(self, clock: str = "boot", zero: int = 0) -> None:
        """Start the daemon, with what its store holds; all connections are new.

        Args:
            clock: the boot of its host, which another ``zero`` needs.
            zero: when its clock was 0.
        """
        self.start += 1
        self.zero = zero
        identity = Identity(
            instance=id16("instance"), start=self.start, clock=id16(clock), master=bytes(32)
        )
        self.daemon = Coordinator(identity, self.settings, self.durable, self.now - zero)
        for rank in self.ranks.values():
            rank.peer = self.new_route()

    def step(self, event: Event) -> None:
        """Step the daemon and carry out its effects."""
        self._carry_out(self.daemon.step(event, self.now - self.zero))
        due = self.daemon.next_deadline()
        pace = self.now + self.settings.heartbeat // 2
        when = pace if due is None else max(self.now + 1, min(due + self.zero, pace))
        if not self.now < self._daemon_tick <= when:
            self._daemon_tick = when
            self._at(when, self._tick_daemon)

    def _tick_daemon(self) -> None:
        if self._daemon_tick == self.now:
            self.step(ClockTicked())

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self._to_rank(effect.peer, effect.id, effect.message)
                case Judge():
                    ours, theirs = effect.source, effect.destination
                    reached = VerdictReached(ours.digest, theirs.digest, judge(ours, theirs))
                    self._at(self.now + 1, partial(self.step, reached))
                case Persist():
                    self._persist(effect)
                case CutOff():
                    for rank in self.ranks.values():
                        if rank.peer == effect.peer:
                            rank.peer = self.new_route()

    def _persist(self, effect: Persist) -> None:
        worlds = {record.world: record for record in self.durable.worlds}
        if effect.sealed is not None:
            worlds[effect.sealed.world] = effect.sealed
        worlds.pop(effect.removed, None)
        epoch = max(self.durable.epoch, effect.epoch)
        self.durable = Durable(epoch=epoch, worlds=list(worlds.values()))

    def _to_rank(self, peer: bytes, message_id: int, message: Struct) -> None:
        rank = next((one for one in self.ranks.values() if one.peer == peer), None)
        if rank is None:
            self._at(self.now + 1, lambda: self.step(PeerDisconnected(peer, "unreachable")))
            return

        def arrive() -> None:
            if rank.alive and rank.peer == peer:
                rank.core.session.receive(message_id, wired(message, message_id), self.now)
                self.settle(rank)

        self._carry(("down", peer), arrive, lossy=True, to=rank)

    # --- ranks ----------------------------------------------------------------------------

    def launch(self, job: Job, life: str = "r1") -> list[Rank]:
        """Start all ranks of a job; earlier ones of its name are gone."""
        ranks = []
        for number in range(job.size):
            rank = Rank(self, job, number, life)
            self.ranks[rank.key] = rank
            ranks.append(rank)
        for rank in ranks:
            self.settle(rank)
        return ranks

    def kill(self, rank: Rank) -> None:
        """End a process: its connections break, nothing it had under way arrives."""
        rank.alive = False
        self.ranks.pop(rank.key, None)
        self.gone.append(rank)
        peer = rank.peer
        self._at(self.now + 2, lambda: self.step(PeerDisconnected(peer, "killed")))
        for route, (source, destination, key) in list(self._inbound.items()):
            if rank in {source, destination}:
                del self._inbound[route]
                if destination.alive:
                    self._at(self.now + 2, partial(self._link_down, destination, key))

    def _link_down(self, rank: Rank, key: LinkKey) -> None:
        if rank.alive and rank.dialed.pop(key, None) is not None:
            rank.core.destination.link_down(key, self.now)
            self.settle(rank)

    def settle(self, rank: Rank) -> None:
        """Do one turn of a rank's I/O thread."""
        if not rank.alive or rank.paused:
            return
        core, now = rank.core, self.now
        core.tick(now)
        for _ in range(8):
            core.flush(now)
            self._pump(rank)
            self._empty(rank)
        rank.take_events()
        when = max(now + 1, core.next_deadline(now))
        if not now < rank.tick_at <= when:
            rank.tick_at = when
            self._at(when, lambda: self.settle(rank) if rank.tick_at == self.now else None)

    def _empty(self, rank: Rank) -> None:
        core = rank.core
        for key, address in _taken(core.destination.dials):
            self._dial(rank, key, address)
        for key in _taken(core.destination.hangups):
            self._inbound.pop(rank.dialed.pop(key, b""), None)
        for message_id, message in _taken(core.session.out):
            self._to_daemon(rank, message_id, message)
        for key, message_id, message in _taken(core.destination.out):
            route = rank.dialed.get(key)
            if route is None:  # a DEALER connects again by itself
                address = next(
                    link.peer.address
                    for pair in core.pairs.values()
                    for number, link in pair.links.items()
                    if (pair.epochs, number) == key
                )
                route = self._dial(rank, key, address)
            if route is not None:
                self._to_source(rank, route, message_id, message)
        for route, message_id, message in _taken(core.source.out):
            self._to_destination(route, message_id, message)

    def _to_daemon(self, rank: Rank, message_id: int, message: Struct) -> None:
        peer = rank.peer

        def arrive() -> None:
            if rank.alive and rank.peer == peer:
                self.step(MessageArrived(peer, message_id, wired(message, message_id)))

        self._carry(("up", peer), arrive, lossy=True)

    # --- between ranks --------------------------------------------------------------------

    def _dial(self, rank: Rank, key: LinkKey, address: str) -> bytes | None:
        source = next((one for one in self.ranks.values() if one.address == address), None)
        if source is None:
            return None
        route = self.new_route()
        rank.dialed[key] = route
        self._inbound[route] = (source, rank, key)
        return route

    def _to_source(self, rank: Rank, route: bytes, message_id: int, message: Struct) -> None:
        found = self._inbound.get(route)
        if found is None:
            return  # the connection has just broken
        source = found[0]

        def arrive() -> None:
            if source.alive and route in self._inbound:
                source.core.source.receive(route, message_id, wired(message, message_id), self.now)
                self.settle(source)

        lossy = not isinstance(message, Credit)
        self._carry(("dial", route), arrive, lossy=lossy, to=source)
        if isinstance(message, PeerHello):
            assert rank.alive

    def _to_destination(
        self, route: bytes, message_id: int, message: Struct, data: bytes = b""
    ) -> None:
        found = self._inbound.get(route)
        if found is None:
            return
        _, rank, key = found

        def arrive() -> None:
            if rank.alive and rank.dialed.get(key) == route:
                self._at_destination(rank, key, message_id, wired(message, message_id), data)

        lossy = not isinstance(message, Chunk | SourceFailed)
        self._carry(("answer", route), arrive, lossy=lossy, to=rank)

    def _at_destination(
        self, rank: Rank, key: LinkKey, message_id: int, message: Struct, data: bytes
    ) -> None:
        side = rank.core.destination
        if isinstance(message, Chunk):
            placed = side.table.place(key[0], key[1], message)
            if placed is not None and data:
                part, pages = placed
                expected = message.layers * message.pages * part.count * part.length
                if len(data) == expected:
                    rank.cache.scatter(part, message, pages, data)
                else:
                    side.table.wrong_size(*key, message, len(data), expected)
                    placed = None
            applied = placed is not None and bool(data)
            side.chunk_taken(key, message, len(data) if applied else 0, applied=applied)
        else:
            side.receive(key, message_id, message, self.now)
        self.settle(rank)

    def _pump(self, rank: Rank) -> None:
        """Send chunks as far as credit goes."""
        side = rank.core.source
        for sending in _taken(side.ledger.sendings):
            rank.queue.append((sending, chunks_of(sending)))
            side.ledger.operation_started(sending.staged)
        for entry in list(rank.queue):
            sending, chunks = entry
            key = (sending.epochs, sending.rank)
            route, window = side.links.get(key), side.windows.get(key)
            while chunks and window is not None and route is not None and window.open:
                if not side.sendable(sending, self.now):
                    break
                chunk = chunks.pop(0)
                data = b""
                if chunk.pages:
                    part = sending.link.slices[chunk.slice]
                    data = rank.cache.gather(part, chunk, sending.staged.pages[part.group])
                window.sent += 1
                rank.sent_bytes += len(data)
                self._to_destination(route, 0, chunk, data)
            if not chunks or route is None or not side.sendable(sending, self.now):
                rank.queue.remove(entry)
                side.ledger.operation_done(sending.staged)

    # --- time -----------------------------------------------------------------------------

    def _carry(
        self, channel: object, arrive: Callable[[], None], *, lossy: bool, to: Rank | None = None
    ) -> None:
        self.messages += 1
        if lossy and self.random.random() < self.loss:
            return
        due = max(self._last[channel], self.now + self.random.randint(1, self.delay))
        self._last[channel] = due

        def when_awake() -> None:
            if to is not None and to.paused:
                self._at(self.now + 50, when_awake)
            else:
                arrive()

        self._at(due, when_awake)

    def _at(self, when: int, do: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._due, (when, self._sequence, do))

    def run(self, ms: int) -> None:
        """Let time pass."""
        self.until(lambda: False, ms, must=False)

    def until(self, fact: Callable[[], bool], ms: int = 60_000, *, must: bool = True) -> None:
        """Let time pass until a fact holds.

        Raises:
            AssertionError: it does not hold after ``ms``.
        """
        end = self.now + ms
        while not fact():
            if not self._due or self._due[0][0] > end:
                self.now = end
                assert not must, f"not so after {ms} ms: {self.describe()}"
                return
            self.now, _, do = heapq.heappop(self._due)
            do()

    def ready(self, *jobs: Job, ms: int = 30_000) -> None:
        """Run until every rank of the jobs is in a ready pair and in none that is not."""
        names = {job.name for job in jobs}

        def fact() -> bool:
            ranks = [rank for rank in self.ranks.values() if rank.job.name in names]
            return all(
                rank.core.pairs
                and all(pair.state is LinkState.READY for pair in rank.core.pairs.values())
                for rank in ranks
            )

        self.until(fact, ms)

    def of(self, job: Job) -> list[Rank]:
        """Return the living ranks of a job, by rank."""
        return [rank for (name, _), rank in sorted(self.ranks.items()) if name == job.name]

    def describe(self) -> str:
        """Return where everyone stands, for failures."""
        pairs = {name: pair.state.value for name, pair in self.daemon.pairs.by_name.items()}
        words = [f"pairs {pairs}"]
        for key, rank in sorted(self.ranks.items()):
            states = [pair.state.value for pair in rank.core.pairs.values()]
            landings = rank.core.destination.table.landings
            words.append(
                f"{key} {rank.core.session.state} {states} staged={list(rank.staged)}"
                f" landing={[(one.request, one.state) for one in landings.values()]}"
            )
        return "\n".join(words)


def chunks_of(sending: Sending) -> list[Chunk]:
    """Return the chunks of one share, in order."""
    counts: Mapping[str, int] = {name: len(pages) for name, pages in sending.staged.pages.items()}
    specs = list(cut(sending.link.slices, counts, CHUNK_BYTES))
    if not specs:
        return [Chunk(transfer=sending.transfer, sequence=0, total=1)]
    return [
        Chunk(
            transfer=sending.transfer,
            sequence=index,
            total=len(specs),
            slice=spec.slice,
            layer=spec.layer,
            layers=spec.layers,
            first=spec.first,
            pages=spec.pages,
        )
        for index, spec in enumerate(specs)
    ]


def wired(message: Struct, message_id: int) -> Struct:
    """Return a message as its receiver decodes it."""
    header, decoded = decode(encode(message, message_id))
    assert header.id == message_id
    return decoded


def _taken(queue: list[Any]) -> list[Any]:
    items = list(queue)
    queue.clear()
    return items
