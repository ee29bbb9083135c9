"""Every message of wire version 1, by kind. The kinds' numbers never change.

Three conversations: an agent with the daemon (Hello … Report), a destination agent with a source
agent (PeerHello … SourceFailed), an operator with the daemon (Query, View). A *request* is
answered under its own message id and repeated with it until answered. A *push* is a numbered
message of the daemon to one session: its message id is its place in the session's push stream
(1, 2, 3 …); the agent handles pushes in that order and acknowledges the highest one in sequence.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

from msgspec import Meta, Struct

from rankgate.proto.descriptor import Descriptor
from rankgate.proto.fields import (
    U32,
    U64,
    Blob,
    Count,
    Digest,
    Id16,
    Milliseconds,
    Name,
    PageIndex,
    Rank,
    Ranks,
    Request,
    Text,
)
from rankgate.proto.findings import Finding
from rankgate.proto.limits import (
    MAX_BATCH,
    MAX_COMPONENTS,
    MAX_ITEMS,
    MAX_PAGES_PER_REQUEST,
)
from rankgate.proto.views import View

Findings = Annotated[list[Finding], Meta(max_length=MAX_COMPONENTS)]

WIRE_MIN = 1
WIRE_MAX = 1


class Kind(IntEnum):
    """The kind byte of a header."""

    REFUSAL = 0
    HELLO = 1
    WELCOME = 2
    REGISTER = 3
    REGISTERED = 4
    HEARTBEAT = 5
    HEARTBEAT_ACK = 6
    NEED_HELLO = 7
    REJECTED = 8
    ACK = 9
    LEAVE = 10
    LEFT = 11
    PROBE = 12
    PROBE_ACK = 13
    PULSE = 14
    WORLD_SEALED = 16
    WORLD_FORMING = 17
    VERDICT = 18
    PAIR_READY = 19
    PAIR_BROKEN = 20
    OUTCOME = 21
    ABORTING = 22
    LINKED = 32
    LINKED_ACK = 33
    OPEN = 34
    OPENED = 35
    END = 36
    ENDED = 37
    ABORT = 38
    ABORT_ACK = 39
    REPORT = 40
    REPORTED = 41
    PEER_HELLO = 64
    PEER_WELCOME = 65
    PRESENT = 66
    PRESENTED = 67
    CHUNK = 68
    CREDIT = 69
    PEER_END = 70
    PEER_ENDED = 71
    DRAIN = 72
    DRAINED = 73
    SOURCE_FAILED = 74
    QUERY = 96
    VIEW = 97


class Refusal(Struct, frozen=True, kw_only=True):
    """Kind 0, the same in every version for ever: why a message could not be read at all."""

    code: str
    text: str
    min: int = WIRE_MIN
    max: int = WIRE_MAX


class _Message(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all messages: an immutable map by field names."""


# --- session -----------------------------------------------------------------------------------


class Hello(_Message, frozen=True, kw_only=True):
    """First message of an agent on a connection; with ``session`` it asks to resume that one."""

    wire_min: U32 = WIRE_MIN
    wire_max: U32 = WIRE_MAX
    world: Name
    rank: U32
    incarnation: Id16
    round: Id16
    session: U64 = 0


class Welcome(_Message, frozen=True, kw_only=True):
    """Answer to Hello: the wire version to speak, who the daemon is, and its tick."""

    wire: U32
    instance: Id16
    start: U64
    clock: Id16
    tick: Milliseconds
    resumed: bool = False


class Register(_Message, frozen=True, kw_only=True):
    """The rank's descriptor; answered Registered or Rejected (with all findings)."""

    incarnation: Id16
    round: Id16
    descriptor: Descriptor


class Registered(_Message, frozen=True, kw_only=True):
    """A session and the daemon's liveness rules, in ms (case C22: the daemon says them)."""

    session: U64
    heartbeat: Milliseconds
    ttl: Milliseconds
    resume: Milliseconds
    probe: Milliseconds
    grant_ttl: Milliseconds
    tick: Milliseconds


class Heartbeat(_Message, frozen=True, kw_only=True):
    """The rank is alive; the first one makes it count. ``acked``: highest push in sequence."""

    session: U64
    acked: U64 = 0


class HeartbeatAck(_Message, frozen=True, kw_only=True):
    """Instance, clock and tick of the daemon, so that a change is seen at once (case C02)."""

    instance: Id16
    clock: Id16
    tick: Milliseconds


class NeedHello(_Message, frozen=True, kw_only=True):
    """The sender has no valid session: say Hello (resume) or register anew."""

    instance: Id16


class Rejected(_Message, frozen=True, kw_only=True):
    """The request is refused, with every reason."""

    findings: Findings

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed later: all findings say so."""
        return bool(self.findings) and all(item.retryable for item in self.findings)


class Ack(_Message, frozen=True, kw_only=True):
    """The highest push in sequence that this session has handled; never answered."""

    session: U64
    acked: U64


class Leave(_Message, frozen=True, kw_only=True):
    """The rank goes on purpose; answered Left."""

    session: U64
    reason: Text = ""


class Left(_Message, frozen=True, kw_only=True):
    """The session is over."""


class Probe(_Message, frozen=True, kw_only=True):
    """Asks a member of an older round whether it still lives; answer ProbeAck at once."""


class ProbeAck(_Message, frozen=True, kw_only=True):
    """The rank lives."""

    session: U64


class Pulse(_Message, frozen=True, kw_only=True):
    """Says nothing: the daemon sends it to learn whether the peer's connection still stands."""


# --- pushes ------------------------------------------------------------------------------------


class WorldSealed(_Message, frozen=True, kw_only=True):
    """All ranks of one round are live and agree; the epoch and the world's receive_count.

    ``receive_count`` is computed once, by the daemon: the ranks of one DP group at the receiving
    stage (``tp * cp``), what the sender of a whole payload to this world counts to (case B01).
    """

    world: Name
    epoch: U64
    size: Count
    receive_count: Count
    digest: Digest


class WorldForming(_Message, frozen=True, kw_only=True):
    """The world is not sealed: how many of its ranks are there, who is missing, what clashes.

    ``overdue`` says the grace time is over. Sent to its members, and to ranks of sealed worlds
    that would pair with it.
    """

    world: Name
    have: Count
    size: Count
    missing: Ranks = []
    overdue: bool = False
    findings: Findings = []


class Slice(_Message, frozen=True, kw_only=True):
    """Bytes that one contact moves in every page of a request, for a run of layers.

    For ``i < layers`` and ``j < count``, in page ``p`` of source buffer ``source_layer + i`` and
    page ``q`` of destination buffer ``destination_layer + i`` of group ``group``, part ``part``:
    ``length`` bytes go from ``source_offset + j * source_stride`` to
    ``destination_offset + j * destination_stride``, offsets from the page's first byte.
    """

    group: Name
    part: Name
    """``k`` or ``v``; the latent of ``mla`` is ``k``."""
    source_layer: U32
    """Index into the source group's ``layers`` (not a layer id)."""
    destination_layer: U32
    layers: U32
    source_offset: U64
    destination_offset: U64
    length: U64
    count: U32 = 1
    source_stride: U64 = 0
    destination_stride: U64 = 0

    @property
    def page_bytes(self) -> int:
        """Bytes that one page of the request moves by this slice, over all its layers."""
        return self.layers * self.count * self.length


class Contact(_Message, frozen=True, kw_only=True):
    """A rank of the other world that must talk with this one for a request in scope.

    ``slot`` is the peer's place in its DP group: ``(pp * cp_size + cp) * tp_size + tp``.
    ``notice`` contacts move no bytes but are counted.
    """

    slot: Rank
    kind: Name
    """``data`` or ``notice``."""
    slices: Annotated[list[Slice], Meta(max_length=MAX_ITEMS)] = []


class Peer(_Message, frozen=True, kw_only=True):
    """A rank of the other world, as it registered."""

    rank: Rank
    dp: Rank
    slot: Rank
    incarnation: Id16
    address: Text
    host: Text
    metadata_digest: Digest


class Verdict(_Message, frozen=True, kw_only=True):
    """The daemon's judgement of a pair of sealed worlds, and this rank's part of the plan.

    ``receive_count`` is set for a source rank: how many distinct destination ranks must end
    before it may release. ``send_count`` for a destination rank: how many distinct source ranks
    it must hear data from. A rejected verdict has findings and nothing else.
    """

    source: Name
    source_epoch: U64
    destination: Name
    destination_epoch: U64
    accepted: bool
    findings: Findings = []
    profile: Name = "native"
    table_digest: Annotated[bytes, Meta(max_length=16)] = b""
    dp: Rank = 0
    slot: Rank = 0
    receive_count: Count = 0
    send_count: Count = 0
    contacts: Annotated[list[Contact], Meta(max_length=MAX_ITEMS)] = []
    peers: Annotated[list[Peer], Meta(max_length=MAX_ITEMS)] = []
    grant_key: Annotated[bytes, Meta(max_length=32)] = b""
    """For source ranks: checks grants of this pair of epochs."""


class PairReady(_Message, frozen=True, kw_only=True):
    """Every rank of both worlds has linked; transfers may be opened."""

    source: Name
    source_epoch: U64
    destination: Name
    destination_epoch: U64


class PairBroken(_Message, frozen=True, kw_only=True):
    """The pair may open no more transfers: why, and whether a side's seal is gone.

    A destination rank with an incomplete transfer from a lost source ends it failed
    (source_lost) as soon as nothing of it can still arrive.
    """

    source: Name
    source_epoch: U64
    destination: Name
    destination_epoch: U64
    findings: Findings
    source_lost: bool = False
    destination_lost: bool = False
    lost_ranks: Ranks = []


class OutcomeItem(_Message, frozen=True, kw_only=True, gc=False):
    """One transfer's one outcome, the same for everyone.

    ``outcome``: delivered, failed, expired or aborted. ``missing``: destination ranks that had
    not ended.
    """

    transfer: U64
    request: Request
    attempt: U32 = 0
    source_epoch: U64
    destination_epoch: U64
    outcome: Name
    finding: Finding | None = None
    missing: Ranks = []


class Outcome(_Message, frozen=True, kw_only=True):
    """Outcomes named in one step; to all ranks in scope of both sides."""

    items: Annotated[list[OutcomeItem], Meta(max_length=MAX_BATCH)]


class AbortingItem(_Message, frozen=True, kw_only=True):
    """One transfer that is being aborted."""

    transfer: U64
    finding: Finding


class Aborting(_Message, frozen=True, kw_only=True):
    """Destination ranks drain the named transfers and end them; sources start nothing more."""

    items: Annotated[list[AbortingItem], Meta(max_length=MAX_BATCH)]


# --- requests ----------------------------------------------------------------------------------


class Claim(_Message, frozen=True, kw_only=True, gc=False):
    """A count that an engine still computes itself.

    ``count``: ``world_receive_count`` (of the destination world), ``receive_count`` (of this
    source rank) or ``send_count`` (of this destination rank).
    """

    count: Name
    value: U32


class Linked(_Message, frozen=True, kw_only=True):
    """This rank holds links to all its contacts of the pair; another claim is refused here."""

    session: U64
    source_epoch: U64
    destination_epoch: U64
    table_digest: Digest
    claims: Annotated[list[Claim], Meta(max_length=MAX_COMPONENTS)] = []
    findings: Findings = []
    """Not empty: linking failed, and this is why."""


class LinkedAck(_Message, frozen=True, kw_only=True):
    """The report of linking is taken."""


class OpenItem(_Message, frozen=True, kw_only=True, gc=False):
    """One request to open over a pair; idempotent by (epochs, request, attempt)."""

    request: Request
    attempt: U32 = 0
    source_epoch: U64
    destination_epoch: U64
    source_dp: Rank = 0
    destination_dp: Rank = 0
    payload: Name = "cache"
    table_digest: Digest
    ttl: Milliseconds = 0
    """0 takes the daemon's default."""
    claims: Annotated[list[Claim], Meta(max_length=MAX_COMPONENTS)] = []


class Open(_Message, frozen=True, kw_only=True):
    """Requests to open; each is answered with a grant or a denial, at once."""

    session: U64
    items: Annotated[list[OpenItem], Meta(max_length=MAX_BATCH)]


class OpenResult(_Message, frozen=True, kw_only=True, gc=False):
    """A grant (its sealed bytes), a denial (``finding``), or the outcome it already has."""

    grant: Annotated[bytes, Meta(max_length=1024)] = b""
    finding: Finding | None = None
    ended: OutcomeItem | None = None


class Opened(_Message, frozen=True, kw_only=True):
    """Results in the order of the items."""

    tick: Milliseconds
    items: Annotated[list[OpenResult], Meta(max_length=MAX_BATCH)]


class EndItem(_Message, frozen=True, kw_only=True, gc=False):
    """This destination rank is done with one transfer: ``delivered`` or ``failed``."""

    transfer: U64
    outcome: Name
    finding: Finding | None = None


class End(_Message, frozen=True, kw_only=True):
    """Ends of a destination rank; each is answered ok or with the outcome it came too late for."""

    session: U64
    items: Annotated[list[EndItem], Meta(max_length=MAX_BATCH)]


class EndResult(_Message, frozen=True, kw_only=True, gc=False):
    """``late`` is the outcome the transfer already has; ``finding`` why the end is refused."""

    transfer: U64
    late: Name = ""
    finding: Finding | None = None


class Ended(_Message, frozen=True, kw_only=True):
    """Results in the order of the items."""

    tick: Milliseconds
    items: Annotated[list[EndResult], Meta(max_length=MAX_BATCH)]


class AbortItem(_Message, frozen=True, kw_only=True):
    """One transfer to abort, by any rank in scope."""

    transfer: U64
    reason: Text = ""


class Abort(_Message, frozen=True, kw_only=True):
    """Aborts; answered with what each transfer is by then."""

    session: U64
    items: Annotated[list[AbortItem], Meta(max_length=MAX_BATCH)]


class AbortResult(_Message, frozen=True, kw_only=True):
    """``state`` is the transfer's state after this abort; ``finding`` why it is refused."""

    transfer: U64
    state: Name = ""
    finding: Finding | None = None


class AbortAck(_Message, frozen=True, kw_only=True):
    """Results in the order of the items."""

    items: Annotated[list[AbortResult], Meta(max_length=MAX_BATCH)]


class ReportItem(_Message, frozen=True, kw_only=True):
    """A refusal that an agent gave or got without the daemon, for operators."""

    transfer: U64 = 0
    request: Request = ""
    finding: Finding


class Report(_Message, frozen=True, kw_only=True):
    """Local refusals, and how much this rank has staged and landing (requests, bytes)."""

    session: U64
    items: Annotated[list[ReportItem], Meta(max_length=MAX_BATCH)] = []
    staged: U32 = 0
    staged_bytes: U64 = 0
    landing: U32 = 0


class Reported(_Message, frozen=True, kw_only=True):
    """The report is taken."""


# --- between agents ----------------------------------------------------------------------------


class Region(_Message, frozen=True, kw_only=True):
    """One registered buffer: part ``part`` of the ``layer``-th layer of group ``group``."""

    group: Name
    part: Name
    layer: U32
    """Index into the group's ``layers``."""
    length: U64
    """Bytes of the buffer: pages x item_len."""


class Metadata(_Message, frozen=True, kw_only=True):
    """Transport metadata of one rank; its digest stands in the descriptor."""

    kind: Name
    regions: Annotated[list[Region], Meta(max_length=1 << 16)]
    blob: Blob = b""
    """Opaque bytes of a transfer engine (NIXL, Mooncake)."""


class PeerHello(_Message, frozen=True, kw_only=True):
    """A destination rank dials a source rank and says who it takes it for.

    Answered PeerWelcome, or Rejected: identity_mismatch (another process answers here, C07),
    stale_epoch (an older verdict), metadata_mismatch. A source that has no verdict of this pair
    yet keeps it for up to ``probe`` and answers then.
    """

    wire_min: U32 = WIRE_MIN
    wire_max: U32 = WIRE_MAX
    world: Name
    epoch: U64
    rank: Rank
    incarnation: Id16
    source_world: Name
    source_epoch: U64
    source_rank: Rank
    source_incarnation: Id16
    table_digest: Digest
    metadata: Blob
    """Encoded Metadata of the destination rank."""


class PeerWelcome(_Message, frozen=True, kw_only=True):
    """The source's own metadata; the link stands."""

    wire: U32
    metadata: Blob


class PagesOf(_Message, frozen=True, kw_only=True):
    """The pages of one request in one KV group, in token order."""

    group: Name
    pages: Annotated[list[PageIndex], Meta(max_length=MAX_PAGES_PER_REQUEST)]


class Present(_Message, frozen=True, kw_only=True):
    """A destination rank shows its grant and says how many pages it has ready.

    Page numbers stay with the destination: the source needs their count only, and names chunks
    by position in the request's page list.
    """

    grant: Annotated[bytes, Meta(max_length=1024)]
    counts: dict[Name, U32]
    """Group name -> number of pages."""
    credit: U32
    """Chunks that the source may send before it hears of more credit on this link."""


class Presented(_Message, frozen=True, kw_only=True):
    """``accepted`` (data comes), ``parked`` (not staged yet), ``ended`` or ``refused``."""

    transfer: U64
    status: Name
    finding: Finding | None = None


class Chunk(_Message, frozen=True, kw_only=True):
    """Bytes of one slice for a run of the request's pages; one data frame follows.

    ``slice`` indexes the contact's slices; ``first`` and ``pages`` name positions in the
    request's page list of that group; ``layer`` and ``layers`` a run within the slice's layers.
    The frame holds, in order, for each layer, for each page, the slice's ``count * length``
    bytes.
    ``total`` is the number of chunks this source will send for the transfer; a share that is
    empty is one chunk without frames (contacts are structural).
    """

    transfer: U64
    sequence: U32
    total: U32
    slice: U32 = 0
    layer: U32 = 0
    layers: U32 = 0
    first: U32 = 0
    pages: U32 = 0


class Credit(_Message, frozen=True, kw_only=True):
    """The destination has taken ``chunks`` more chunks of this link in all since it began."""

    chunks: U64


class PeerEnd(_Message, frozen=True, kw_only=True):
    """This destination rank is done with a transfer; to data and notice contacts alike.

    It carries the grant, since a notice contact has never seen it.
    """

    grant: Annotated[bytes, Meta(max_length=1024)]
    outcome: Name


class PeerEnded(_Message, frozen=True, kw_only=True):
    """The end is counted (a repeat counts once)."""

    transfer: U64
    finding: Finding | None = None


class Drain(_Message, frozen=True, kw_only=True):
    """Send nothing more for a transfer, and say when nothing is under way."""

    grant: Annotated[bytes, Meta(max_length=1024)]


class Drained(_Message, frozen=True, kw_only=True):
    """Nothing of the transfer is under way from this source, nor will be."""

    transfer: U64


class SourceFailed(_Message, frozen=True, kw_only=True):
    """The source cannot send its share (case B11); never answered."""

    transfer: U64
    finding: Finding


# --- operator ----------------------------------------------------------------------------------


class Query(_Message, frozen=True, kw_only=True):
    """An operator's question: ``status``, ``ranks``, ``pairs``, ``transfers`` or ``story``."""

    view: Name
    subject: Text = ""
    """For ``story``: ``world:NAME`` or ``pair:SOURCE:DESTINATION``."""
    offset: U32 = 0
    """For long lists: where to begin; ``View.next`` of the answer before."""


MESSAGES: dict[Kind, type[Struct]] = {
    Kind.REFUSAL: Refusal,
    Kind.HELLO: Hello,
    Kind.WELCOME: Welcome,
    Kind.REGISTER: Register,
    Kind.REGISTERED: Registered,
    Kind.HEARTBEAT: Heartbeat,
    Kind.HEARTBEAT_ACK: HeartbeatAck,
    Kind.NEED_HELLO: NeedHello,
    Kind.REJECTED: Rejected,
    Kind.ACK: Ack,
    Kind.LEAVE: Leave,
    Kind.LEFT: Left,
    Kind.PROBE: Probe,
    Kind.PROBE_ACK: ProbeAck,
    Kind.PULSE: Pulse,
    Kind.WORLD_SEALED: WorldSealed,
    Kind.WORLD_FORMING: WorldForming,
    Kind.VERDICT: Verdict,
    Kind.PAIR_READY: PairReady,
    Kind.PAIR_BROKEN: PairBroken,
    Kind.OUTCOME: Outcome,
    Kind.ABORTING: Aborting,
    Kind.LINKED: Linked,
    Kind.LINKED_ACK: LinkedAck,
    Kind.OPEN: Open,
    Kind.OPENED: Opened,
    Kind.END: End,
    Kind.ENDED: Ended,
    Kind.ABORT: Abort,
    Kind.ABORT_ACK: AbortAck,
    Kind.REPORT: Report,
    Kind.REPORTED: Reported,
    Kind.PEER_HELLO: PeerHello,
    Kind.PEER_WELCOME: PeerWelcome,
    Kind.PRESENT: Present,
    Kind.PRESENTED: Presented,
    Kind.CHUNK: Chunk,
    Kind.CREDIT: Credit,
    Kind.PEER_END: PeerEnd,
    Kind.PEER_ENDED: PeerEnded,
    Kind.DRAIN: Drain,
    Kind.DRAINED: Drained,
    Kind.SOURCE_FAILED: SourceFailed,
    Kind.QUERY: Query,
    Kind.VIEW: View,
}
"""The struct of each kind."""

KIND_OF: dict[type[Struct], Kind] = {struct: kind for kind, struct in MESSAGES.items()}
"""The kind of each struct."""
