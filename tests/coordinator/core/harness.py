"""A bench for the core: jobs that describe worlds, fake agents, and virtual time in ms.

Nothing here knows how the core decides. Agents answer as a well-behaved agent would: pushes are
taken in order and acknowledged, everything else is done when a test says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from msgspec import Struct

from rankgate.coordinator.core.effects import CutOff, Effect, Judge, Note, Persist, Send, Show
from rankgate.coordinator.core.events import (
    ClockTicked,
    Event,
    MessageArrived,
    PeerDisconnected,
    QueryArrived,
    VerdictReached,
)
from rankgate.coordinator.core.judging import judge, shape_of
from rankgate.coordinator.core.machine import Coordinator
from rankgate.coordinator.core.settings import Durable, Identity, SealedRecord, Settings
from rankgate.coordinator.core.verdicts import WorldShape
from rankgate.proto.descriptor import (
    Coordinates,
    Descriptor,
    KvGroup,
    Layout,
    Model,
    Software,
    StateComponent,
    Transport,
)
from rankgate.proto.digests import digest_bytes
from rankgate.proto.findings import Finding
from rankgate.proto.geometry import heads_of_rank, item_len
from rankgate.proto.grants import Grant, read_grant
from rankgate.proto.messages import (
    Abort,
    Aborting,
    AbortItem,
    AbortResult,
    Ack,
    Claim,
    End,
    EndItem,
    EndResult,
    Heartbeat,
    Hello,
    Leave,
    Linked,
    NeedHello,
    Open,
    OpenItem,
    OpenResult,
    Outcome,
    OutcomeItem,
    PairBroken,
    PairReady,
    Probe,
    ProbeAck,
    Pulse,
    Query,
    Register,
    Registered,
    Rejected,
    Verdict,
    Welcome,
    WorldForming,
    WorldSealed,
)
from rankgate.proto.views import View

PUSHES = (WorldSealed, WorldForming, Verdict, PairReady, PairBroken, Outcome, Aborting)
M = TypeVar("M", bound=Struct)


def id16(*parts: object) -> bytes:
    """Return 16 bytes that follow from ``parts`` alone."""
    return digest_bytes(repr(parts).encode())


# --- what worlds say -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Job:
    """One torchrun job: everything its ranks will declare."""

    name: str
    role: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    dcp: int = 1
    heads: int = 8
    head_dim: int = 4
    v_head_dim: int | None = None
    kind: str = "gqa"
    dtype: str = "bfloat16"
    page_size: int = 2
    pages: int = 16
    page_layout: str = "HND"
    layers: Sequence[Sequence[int]] | int = 4
    """Layer ids by pipeline stage, or how many in all (split evenly)."""
    profile: str = "native"
    group: str = ""
    model: str = "m"
    capabilities: Sequence[str] = ()
    transport: str = "zmq"
    state: Sequence[StateComponent] = ()
    groups: Sequence[str] = ("full",)
    host: str = "host"

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def slots(self) -> int:
        """Ranks of one data-parallel group."""
        return self.pp * self.cp * self.tp

    def stage(self, pp: int) -> list[int]:
        """Return the layer ids of one pipeline stage."""
        if not isinstance(self.layers, int):
            return list(self.layers[pp])
        return list(range(pp * self.layers // self.pp, (pp + 1) * self.layers // self.pp))

    def at(self, rank: int) -> Coordinates:
        """Return the coordinates of a rank, numbered as SGLang does."""
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coordinates(pp=pp, dp=dp, cp=cp, tp=tp)

    def kv(self, name: str, at: Coordinates) -> KvGroup:
        """Return one KV group of the rank at ``at``."""
        mla = self.kind == "mla"
        total = 1 if mla else self.heads
        local = 1 if mla else heads_of_rank(total, self.tp, at.tp).size
        v_dim = self.head_dim if self.v_head_dim is None else self.v_head_dim
        v_dim = 0 if mla else v_dim
        return KvGroup(
            name=name,
            kind=self.kind,
            dtype=self.dtype,
            layout=self.page_layout,
            page_size=self.page_size,
            pages=self.pages,
            total_heads=total,
            local_heads=local,
            head_dim=self.head_dim,
            v_head_dim=v_dim,
            layers=self.stage(at.pp),
            k_item_len=item_len(self.page_size, local, self.head_dim, self.dtype),
            v_item_len=item_len(self.page_size, local, v_dim, self.dtype),
        )

    def describe(self, rank: int) -> Descriptor:
        """Return what ``rank`` registers."""
        at = self.at(rank)
        return Descriptor(
            world=self.name,
            role=self.role,
            group=self.group,
            rank=rank,
            world_size=self.size,
            coordinates=at,
            layout=Layout(pp=self.pp, dp=self.dp, cp=self.cp, tp=self.tp, dcp=self.dcp),
            software=Software(engine="fake", version="1"),
            model=Model(name=self.model, revision="r1"),
            kv=[self.kv(name, at) for name in self.groups],
            state=list(self.state),
            transport=Transport(
                kind=self.transport,
                address=f"tcp://10.0.0.1:{9000 + rank}",
                host=self.host,
                metadata_digest=id16(self.name, rank),
            ),
            capabilities=list(self.capabilities),
            profile=self.profile,
        )

    def members(self) -> dict[int, Descriptor]:
        """Return every rank's descriptor."""
        return {rank: self.describe(rank) for rank in range(self.size)}

    def shape(self) -> WorldShape:
        """Return the shape of the whole job."""
        return shape_of(self.members())

    def but(self, **changes: Any) -> Job:  # noqa: ANN401 - any of the fields
        """Return the job with some fields changed."""
        return replace(self, **changes)


def prefill(name: str = "p", /, **fields: Any) -> Job:  # noqa: ANN401 - fields of Job
    """Return a prefill job."""
    return Job(name=name, role="prefill", **fields)


def decode(name: str = "d", /, **fields: Any) -> Job:  # noqa: ANN401 - fields of Job
    """Return a decode job."""
    return Job(name=name, role="decode", **fields)


def state(kind: str, *, dtype: str = "bfloat16", layers: int = 2, size: int = 64) -> StateComponent:
    """Return a state component of ``layers`` layers."""
    return StateComponent(
        kind=kind, dtype=dtype, layers=list(range(layers)), item_lens=[size] * layers
    )


# --- the bench -----------------------------------------------------------------------------------


class Agent:
    """A process with one rank: it takes pushes in order and remembers what it was told."""

    def __init__(self, bench: Bench, descriptor: Descriptor, token: bytes, life: str) -> None:
        """Begin with a connection of its own and nothing said."""
        self.bench = bench
        self.descriptor = descriptor
        self.token = token
        self.incarnation = id16("incarnation", descriptor.world, descriptor.rank, life)
        self.peer = bench.new_peer()
        self.session = 0
        self.taken = 0
        self.pushes: list[Struct] = []
        self.seen: list[tuple[int, Struct]] = []
        self.acks = True
        self.answers_probes = True
        self.cut = ""

    @property
    def rank(self) -> int:
        """Its rank."""
        return self.descriptor.rank

    def hello(self, *, session: int = 0) -> Struct:
        """Say Hello and return the answer."""
        answer = self.ask(
            Hello(
                world=self.descriptor.world,
                rank=self.rank,
                incarnation=self.incarnation,
                round=self.token,
                session=session,
            )
        )
        if isinstance(answer, Welcome) and not answer.resumed:
            self.taken = 0
        return answer

    def register(self) -> Struct | None:
        """Register the descriptor; return the answer, or None if it is still open."""
        self.last_id, answers = self.bench.request(
            self,
            Register(incarnation=self.incarnation, round=self.token, descriptor=self.descriptor),
        )
        return self.registered(answers)

    def registered(self, answers: Sequence[Struct]) -> Struct | None:
        """Take the answer to Register, whenever it comes."""
        if not answers:
            return None
        (answer,) = answers
        if isinstance(answer, Registered):
            self.session, self.taken, self.seen = answer.session, 0, []
        return answer

    def beat(self) -> Struct:
        """Send a heartbeat and return the answer."""
        return self.ask(Heartbeat(session=self.session, acked=self.taken if self.acks else 0))

    def join(self) -> Agent:
        """Say Hello, register, beat."""
        self.hello()
        answer = self.register()
        assert isinstance(answer, Registered), answer
        self.beat()
        return self

    def ask(self, message: Struct) -> Struct:
        """Send a request and return its one answer."""
        _, answers = self.bench.request(self, message)
        (answer,) = answers
        return answer

    def reconnect(self) -> None:
        """Take a fresh connection, as after a broken one."""
        self.bench.peers.pop(self.peer, None)
        self.peer = self.bench.new_peer()
        self.bench.peers[self.peer] = self

    def take(self, number: int, message: Struct) -> None:
        """Take one push: in order, each once."""
        self.seen.append((number, message))
        if number == self.taken + 1:
            self.taken = number
            self.pushes.append(message)
        if self.acks:
            self.bench.tell(self, Ack(session=self.session, acked=self.taken))

    def told(self, of: type[M]) -> list[M]:
        """Return everything of one type that was pushed, in order."""
        return [message for message in self.pushes if isinstance(message, of)]

    def last(self, of: type[M]) -> M:
        """Return the last push of a type."""
        return self.told(of)[-1]

    def forget(self) -> None:
        """Forget what was pushed so far (not its numbers)."""
        self.pushes.clear()

    # --- requests ---------------------------------------------------------------------------

    def link(
        self,
        verdict: Verdict | None = None,
        *,
        claims: Sequence[Claim] = (),
        **changes: Any,  # noqa: ANN401 - fields of Linked
    ) -> Struct:
        """Report that all links of the last verdict stand."""
        said = verdict or self.last(Verdict)
        fields: dict[str, Any] = {
            "source_epoch": said.source_epoch,
            "destination_epoch": said.destination_epoch,
            "table_digest": said.table_digest,
            **changes,
        }
        return self.ask(Linked(session=self.session, claims=list(claims), **fields))

    def item(self, request: str, **changes: Any) -> OpenItem:  # noqa: ANN401 - fields of OpenItem
        """Return an open of ``request`` over the pair of the last accepted verdict."""
        said = next(v for v in reversed(self.told(Verdict)) if v.accepted)
        fields: dict[str, Any] = {
            "request": request,
            "source_epoch": said.source_epoch,
            "destination_epoch": said.destination_epoch,
            "destination_dp": self.descriptor.coordinates.dp,
            "table_digest": said.table_digest,
            **changes,
        }
        return OpenItem(**fields)

    def open(self, request: str, **changes: Any) -> OpenResult:  # noqa: ANN401 - fields of OpenItem
        """Open one request."""
        return self.open_items([self.item(request, **changes)])[0]

    def open_items(self, items: list[OpenItem]) -> list[OpenResult]:
        """Open several requests in one message."""
        answer = self.ask(Open(session=self.session, items=items))
        return list(answer.items)  # type: ignore[attr-defined]

    def grant(self, request: str, **changes: Any) -> Grant:  # noqa: ANN401 - fields of OpenItem
        """Open one request that must be granted."""
        result = self.open(request, **changes)
        assert result.grant, result
        return read_grant(result.grant)

    def end(
        self, transfer: int, outcome: str = "delivered", found: Finding | None = None
    ) -> EndResult:
        """End one transfer."""
        item = EndItem(transfer=transfer, outcome=outcome, finding=found)
        answer = self.ask(End(session=self.session, items=[item]))
        result: EndResult = answer.items[0]  # type: ignore[attr-defined]
        return result

    def abort(self, transfer: int, reason: str = "") -> AbortResult:
        """Abort one transfer."""
        item = AbortItem(transfer=transfer, reason=reason)
        answer = self.ask(Abort(session=self.session, items=[item]))
        result: AbortResult = answer.items[0]  # type: ignore[attr-defined]
        return result

    def leave(self, reason: str = "") -> Struct:
        """Leave on purpose."""
        return self.ask(Leave(session=self.session, reason=reason))

    def cut_off(self) -> str:
        """Return why the daemon cut it off, or nothing."""
        return self.cut

    def drop(self, reason: str = "host unreachable") -> None:
        """Lose the connection."""
        self.bench.step(PeerDisconnected(self.peer, reason))

    def outcomes(self) -> list[OutcomeItem]:
        """Return every outcome that was pushed."""
        return [item for message in self.told(Outcome) for item in message.items]


@dataclass
class Bench:
    """The core with virtual time, a store, and agents that answer at once."""

    settings: Settings = field(default_factory=Settings)
    durable: Durable = field(default_factory=Durable)
    start: int = 1
    now: int = 1_000_000
    judging: bool = True
    """Answer the effect Judge at once; else keep it in ``asked``."""

    def __post_init__(self) -> None:
        """Start the core."""
        self.peers: dict[bytes, Agent] = {}
        self.log: list[Effect] = []
        self.asked: list[Judge] = []
        self.judged = 0
        self._peer = 0
        self._request = 1 << 40
        self._answers: dict[int, list[Struct]] = {}
        self._next: deque[Event] = deque()
        self.persisted: list[Persist] = []
        self.views: list[View] = []
        self.identity = Identity(
            instance=id16("instance"), start=self.start, clock=id16("boot"), master=bytes(32)
        )
        self.core = self._boot(self.durable)

    def _boot(self, durable: Durable) -> Coordinator:
        return Coordinator(
            self.identity, self.settings, durable, self.now, endpoints=["ipc:///x"], insecure=False
        )

    def restart(self) -> None:
        """Start the daemon again from its store; all connections are new."""
        self.start += 1
        self.identity = Identity(
            instance=self.identity.instance,
            start=self.start,
            clock=self.identity.clock,
            master=self.identity.master,
        )
        self.durable = self.stored()
        self.core = self._boot(self.durable)
        for agent in list(self.peers.values()):
            agent.reconnect()

    def stored(self) -> Durable:
        """Return what the store holds by now."""
        worlds = {record.world: record for record in self.durable.worlds}
        epoch = self.durable.epoch
        for effect in self.persisted:
            epoch = max(epoch, effect.epoch)
            if effect.sealed is not None:
                worlds[effect.sealed.world] = effect.sealed
            if effect.removed:
                worlds.pop(effect.removed, None)
        return Durable(epoch=epoch, worlds=list(worlds.values()))

    def record(self, world: str) -> SealedRecord:
        """Return the stored record of a world."""
        return next(record for record in self.stored().worlds if record.world == world)

    def new_peer(self) -> bytes:
        """Return a routing id that was never used."""
        self._peer += 1
        return b"\0" + self._peer.to_bytes(4, "big")

    # --- stepping ---------------------------------------------------------------------------

    def step(self, event: Event) -> list[Effect]:
        """Step the core, carry out the effects, and whatever follows; return those of ``event``."""
        first = effects = self.core.step(event, self.now)
        while True:
            self.log += effects
            for effect in effects:
                self._carry_out(effect)
            if not self._next:
                return first
            effects = self.core.step(self._next.popleft(), self.now)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Send():
                self._deliver(effect)
            case Judge():
                self.judged += 1
                if self.judging:
                    self._next.append(self._judgement(effect))
                else:
                    self.asked.append(effect)
            case Persist():
                self.persisted.append(effect)
            case CutOff():
                if effect.peer in self.peers:
                    self.peers[effect.peer].cut = effect.reason
            case Show():
                self.views.append(effect.view)
            case Note():
                assert effect.level in {"debug", "info", "warning", "error"}

    def answer(self, asked: Judge) -> None:
        """Give the judgement that the core asked for."""
        self.step(self._judgement(asked))

    def _judgement(self, asked: Judge) -> VerdictReached:
        ours, theirs = asked.source, asked.destination
        return VerdictReached(ours.digest, theirs.digest, judge(ours, theirs))

    def _deliver(self, effect: Send) -> None:
        agent = self.peers.get(effect.peer)
        if isinstance(effect.message, Probe | Pulse):
            if agent is not None and isinstance(effect.message, Probe) and agent.answers_probes:
                self.tell(agent, ProbeAck(session=agent.session))
        elif isinstance(effect.message, PUSHES):
            if agent is not None:
                agent.take(effect.id, effect.message)
        else:
            self._answers.setdefault(effect.id, []).append(effect.message)

    def request(self, agent: Agent, message: Struct) -> tuple[int, list[Struct]]:
        """Send a request; return its id and the answers that came at once."""
        self._request += 1
        number = self._request
        self.peers[agent.peer] = agent
        self.step(MessageArrived(agent.peer, number, message))
        return number, self.late(number)

    def late(self, number: int) -> list[Struct]:
        """Return (once) the answers that came under an id."""
        return self._answers.pop(number, [])

    def tell(self, agent: Agent, message: Struct) -> None:
        """Send what is never answered, after the running step."""
        self._next.append(MessageArrived(agent.peer, 0, message))

    def say(self, agent: Agent, message: Struct) -> list[Effect]:
        """Send what is never answered, now."""
        return self.step(MessageArrived(agent.peer, 0, message))

    def query(self, view: str, subject: str = "") -> View:
        """Return one operator's view."""
        self.step(QueryArrived(b"op", 1, Query(view=view, subject=subject)))
        return self.views[-1]

    # --- time -------------------------------------------------------------------------------

    def tick(self, ms: int = 0) -> None:
        """Let one tick come after ``ms``; more than a heartbeat looks like a stall of ours."""
        self.now += ms
        self.step(ClockTicked())

    def wait(self, ms: int, *, beating: Iterable[Agent] | None = None) -> None:
        """Let time pass as the runtime does: ticks at deadlines and every half heartbeat."""
        beaters = list(self.peers.values()) if beating is None else list(beating)
        until, period = self.now + ms, self.settings.heartbeat // 2
        while self.now < until:
            due = self.core.next_deadline()
            pace = min(until, self.now + period)
            self.now = pace if due is None else max(self.now, min(pace, due))
            if self.now == pace:
                for agent in beaters:
                    if agent.peer in self.peers and agent.session:
                        self.request(agent, Heartbeat(session=agent.session, acked=agent.taken))
            self.step(ClockTicked())

    # --- worlds -----------------------------------------------------------------------------

    def agents(self, job: Job, of_round: str = "r1", life: str = "") -> list[Agent]:
        """Return one process per rank of a job, none of which has said anything."""
        token = id16("round", job.name, of_round)
        return [
            Agent(self, job.describe(rank), token, life or of_round) for rank in range(job.size)
        ]

    def seal(self, job: Job, of_round: str = "r1", life: str = "") -> list[Agent]:
        """Let all ranks of a job join."""
        agents = self.agents(job, of_round, life)
        for agent in agents:
            agent.join()
        return agents

    def pair(self, source: Job, destination: Job) -> tuple[list[Agent], list[Agent]]:
        """Seal two jobs whose pair is accepted and let all ranks link."""
        ours, theirs = self.seal(source), self.seal(destination)
        self.link(*ours, *theirs)
        return ours, theirs

    def link(self, *agents: Agent) -> None:
        """Let agents link under their last verdict."""
        for agent in agents:
            agent.link()


def only(messages: Iterable[Struct], of: type[M]) -> M:
    """Return the one message of a type."""
    (found,) = [message for message in messages if isinstance(message, of)]
    return found


def codes(findings: Iterable[Finding]) -> list[str]:
    """Return the slugs of findings."""
    return [found.slug for found in findings]


def rejected(answer: Struct | None) -> list[Finding]:
    """Return the findings of a Rejected."""
    assert isinstance(answer, Rejected), answer
    return answer.findings


def need_hello(answer: Struct | None) -> bool:
    """Whether the answer is NeedHello."""
    return isinstance(answer, NeedHello)
