"""The closed list of refusals. A code never changes its meaning and is never used again.

Families: RG1xx one world against itself, RG2xx wire and software, RG3xx model, RG4xx KV groups,
RG5xx state components, RG6xx topology and contacts, RG7xx aux and embedding, RG8xx transport and
addresses, RG9xx requests and transfers.
"""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import NamedTuple


class Severity(StrEnum):
    """How much a finding weighs: an error refuses, a warning is shown, a note explains."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class CodeEntry(NamedTuple):
    """What is documented of one code; the slug is the member's name in lower case."""

    id: str
    severity: Severity
    retryable: bool
    title: str
    hint: str


def _error(code: str, title: str, hint: str, *, retryable: bool = False) -> CodeEntry:
    return CodeEntry(code, Severity.ERROR, retryable, title, hint)


def _warning(code: str, title: str, hint: str) -> CodeEntry:
    return CodeEntry(code, Severity.WARNING, False, title, hint)


class Code(Enum):
    """Every refusal by slug; ``Code.KV_DTYPE_MISMATCH.id == "RG412"``."""

    # RG1xx: one world against itself
    WORLD_NAME_INVALID = _error(
        "RG101",
        "The world has no usable name",
        "Give torchrun --rdzv-id, or set RANKGATE_WORLD to a name of letters, digits, . _ and -;"
        " torchrun's default run id 'none' is refused because every job without an id shares it.",
    )
    WORLD_SIZE_INVALID = _error(
        "RG102",
        "The world size does not fit the rank or the parallel layout",
        "world_size must be pp_size x dp_size x cp_size x tp_size, and every rank below it.",
    )
    COORDINATE_INVALID = _error(
        "RG103",
        "A coordinate lies outside its parallel size",
        "Each of pp, dp, cp, tp must be at least 0 and below its size; dcp must divide tp.",
    )
    RANK_MISSING = _error(
        "RG104",
        "Ranks of the world did not register in time",
        "Look at the named ranks' logs: they did not start, cannot reach the daemon, or carry"
        " another round token.",
        retryable=True,
    )
    DUPLICATE_RANK = _error(
        "RG105",
        "Two live processes claim one rank of one round",
        "Stop the later one, or give it a world name or round token of its own.",
    )
    DUPLICATE_COORDINATE = _error(
        "RG106",
        "Two ranks declare the same coordinates",
        "Check how the engine fills pp, dp, cp, tp: plain data parallelism must use its own DP"
        " rank (SGLang issue 29725).",
    )
    RANKS_DISAGREE = _error(
        "RG107",
        "Ranks of one world declare different things",
        "All ranks of a world must be started with the same configuration; restart the named"
        " ranks with that of the others.",
    )
    WORLD_IN_USE = _error(
        "RG108",
        "Another live round holds this world name",
        "Stop the older job or start this one under another name; it is tried again by itself"
        " once the older one is gone.",
        retryable=True,
    )
    HEADS_INVALID = _error(
        "RG110",
        "KV heads cannot be split over this tensor-parallel size",
        "total_heads must divide by tp_size, or tp_size by total_heads.",
    )
    HEADS_INCONSISTENT = _error(
        "RG111",
        "The local head count is not what the total and tp size give",
        "Declare the un-sharded head count of the model as total_heads; replicated heads make"
        " local x tp larger than the total (SGLang PR 19086).",
    )
    ITEM_LEN_INCONSISTENT = _error(
        "RG112",
        "A declared byte length differs from what its sizes give",
        "item_len is bytes per page: page_size x local_heads x head_dim x element size.",
    )
    LAYER_IDS_INVALID = _error(
        "RG113",
        "Layer ids are missing, repeated, or not one per buffer",
        "List each layer of the group exactly once, in the order of its buffers.",
    )
    LENGTHS_DIFFER = _error(
        "RG114",
        "Parallel lists of one component have different lengths",
        "Give one entry per layer in each list.",
    )
    DUPLICATE_COMPONENT = _error(
        "RG115",
        "Two components of one rank carry the same tag",
        "Name each KV group and each state component once.",
    )
    DTYPE_UNKNOWN = _error(
        "RG116",
        "A dtype name is not known",
        "Use torch's own names, such as bfloat16 or float8_e4m3fn.",
    )
    ROLE_INVALID = _error(
        "RG117",
        "The role is not one of encoder, prefill, decode, unified",
        "Set the role to one of the four.",
    )
    VALUE_INVALID = _error(
        "RG118",
        "A declared value is not one of those that are known",
        "Use one of the values that the message lists.",
    )
    RANK_ORDER_UNUSUAL = _warning(
        "RG150",
        "Ranks are numbered in neither SGLang's nor vLLM's order",
        "Nothing to do if it is meant: coordinates decide, numbering is the engine's habit.",
    )
    # RG2xx: wire and software
    WIRE_VERSION = _error(
        "RG201",
        "The peer speaks no wire version in common",
        "Upgrade the older side; a version speaks with the one before it.",
    )
    HEADER_INVALID = _error(
        "RG202",
        "The message has no rankgate header",
        "Something that is not a rankgate peer is connected to this port.",
    )
    BODY_INVALID = _error(
        "RG203",
        "The message body cannot be read",
        "The sender's encoder is at fault: one MessagePack map, no Ext, no NaN, no repeated key,"
        " nothing after it.",
    )
    FIELD_INVALID = _error(
        "RG204",
        "A field has the wrong type or is out of range",
        "Correct the named field.",
    )
    KIND_UNKNOWN = _error(
        "RG205",
        "The message kind is unknown or not expected here",
        "The sender is newer than this side, or confuses the direction of a message.",
    )
    TOO_LARGE = _error(
        "RG206",
        "The message is larger than allowed",
        "Split batches; a descriptor lists uniform layers as one group.",
    )
    NO_SESSION = _error(
        "RG207",
        "The sender has no session",
        "Say Hello and register first.",
        retryable=True,
    )
    # RG4xx: KV groups
    KV_GROUP_MISSING = _error(
        "RG410",
        "A KV group exists on one side only",
        "Run both sides with the same model and the same cache groups.",
    )
    KV_KIND_MISMATCH = _error(
        "RG411",
        "One side caches per-head K and V, the other a latent",
        "Run both sides with the same model and attention implementation.",
    )
    KV_DTYPE_MISMATCH = _error(
        "RG412",
        "The KV cache dtypes differ",
        "Start both sides with the same --kv-cache-dtype; no transfer converts (SGLang PR 19398).",
    )
    PAGE_SIZE_MISMATCH = _error(
        "RG413",
        "The KV page sizes differ",
        "Set --page-size (or --block-size) explicitly on both sides: attention back ends may pick"
        " their own (SGLang issue 14439).",
    )
    KV_HEADS_MISMATCH = _error(
        "RG414",
        "The un-sharded KV head counts differ",
        "Run both sides with the same model.",
    )
    HEAD_DIM_MISMATCH = _error(
        "RG415",
        "The head dimensions differ",
        "Run both sides with the same model and attention implementation.",
    )
    KV_ITEM_LEN_MISMATCH = _error(
        "RG416",
        "Bytes per page and head differ",
        "Compare K and V, page size, head dimension and dtype of both sides.",
    )
    KV_LAYOUT_MISMATCH = _error(
        "RG417",
        "The page layouts differ",
        "Choose attention back ends with the same layout (HND or NHD) on both sides.",
    )
    LAYER_COVERAGE_GAP = _error(
        "RG418",
        "The destination needs layers that no source holds",
        "Check the pipeline split and draft layers of the source side.",
    )
    LAYER_IDS_MISSING = _error(
        "RG419",
        "The source holds layers that the destination has no place for",
        "Run both sides with the same model, or leave the extra layers out of the group.",
    )
    LAYER_OVERLAP = _error(
        "RG420",
        "Two pipeline stages of the source hold the same layer",
        "Check the pipeline split: each layer of a group belongs to one stage.",
    )
    # RG5xx: state components
    STATE_COMPONENT_MISSING = _error(
        "RG510",
        "A state component exists on one side only",
        "Run both sides with the same model and state settings.",
    )
    STATE_KIND_MISMATCH = _error(
        "RG511",
        "A state component has another kind on the other side",
        "Match the recurrent or window state types of both sides.",
    )
    STATE_DTYPE_MISMATCH = _error(
        "RG512",
        "The state dtypes differ",
        "Set the same state dtype on both sides; speculative options may force one"
        " (SGLang issue 36371).",
    )
    STATE_LAYERS_MISMATCH = _error(
        "RG513",
        "A state component covers other layers on the other side",
        "Run both sides with the same model.",
    )
    # RG6xx: topology and contacts
    RECEIVE_COUNT_MISMATCH = _error(
        "RG601",
        "A rank claims another count than the one that was computed",
        "Take the broadcast number; the rank's own tp size, dp size or world size is wrong.",
    )
    SIZES_DO_NOT_DIVIDE = _error(
        "RG610",
        "Tensor-parallel sizes do not divide and the profile cannot plan that",
        "Choose sizes of which one divides the other, or the native profile.",
    )
    REPLICATED_SOURCE_UNSUPPORTED = _error(
        "RG611",
        "The source replicates KV heads over more ranks than the destination has",
        "Lower the source's tp size to its KV head count, or declare the capability p_tp_gt_d_tp.",
    )
    PROFILE_MISMATCH = _error(
        "RG612",
        "The two sides plan contacts by different profiles",
        "Start both sides with the same engine, or both with the native profile.",
    )
    PARALLELISM_UNSUPPORTED = _error(
        "RG613",
        "A parallel size of this layout is not planned yet",
        "Use layouts with the named size 1.",
    )
    # RG8xx: transport and addresses
    TRANSPORT_MISMATCH = _error(
        "RG810",
        "The sides move tensors by different transports",
        "Choose the same transport on both sides.",
    )
    IDENTITY_MISMATCH = _error(
        "RG811",
        "Another process answered at this address",
        "The address belongs to another rank or an older process; register again.",
        retryable=True,
    )
    METADATA_MISMATCH = _error(
        "RG812",
        "The registered memory of a peer is not what the daemon validated",
        "The peer changed its buffers after it registered; restart it.",
    )
    LINK_FAILED = _error(
        "RG813",
        "A peer could not be reached",
        "Check the address, firewalls and whether the peer still runs.",
        retryable=True,
    )
    # RG9xx: requests and transfers
    REQUEST_INVALID = _error(
        "RG901",
        "The request id is empty or a constant",
        "Give each request an id of its own.",
    )
    PAIR_NOT_READY = _error(
        "RG902",
        "The pair is not ready",
        "Wait for the pair; `rankgate pairs` says what it waits for.",
        retryable=True,
    )
    CONFLICTING_OPEN = _error(
        "RG903",
        "The request is already open with other content",
        "Use a new attempt number or request id.",
    )
    STALE_EPOCH = _error(
        "RG904",
        "The message belongs to an epoch that is no longer current",
        "Open again: the agent takes the current epochs once the pair is ready. After a restart of"
        " the daemon that takes a moment.",
        retryable=True,
    )
    DP_RANK_UNKNOWN = _error(
        "RG905",
        "The data-parallel rank does not exist",
        "Say the source's and destination's DP rank; it is never derived from a request id.",
    )
    NOT_IN_SCOPE = _error(
        "RG906",
        "The sender is not a destination of this transfer",
        "Only the destination DP group opens and ends a transfer.",
    )
    TRANSFER_UNKNOWN = _error(
        "RG907",
        "The transfer is not known",
        "It ended long ago, or was granted by another daemon.",
    )
    GRANT_INVALID = _error(
        "RG908",
        "The grant's seal does not fit",
        "The grant was altered, or belongs to another pair or daemon.",
    )
    GRANT_EXPIRED = _error(
        "RG909",
        "The grant is too old",
        "Open again for a renewed grant.",
        retryable=True,
    )
    PAGES_INVALID = _error(
        "RG910",
        "A page index or page count does not fit",
        "Pages must lie inside the pool, once each, and as many on both sides.",
    )
    RANGE_BUSY = _error(
        "RG911",
        "The pages still belong to another transfer",
        "Wait until that transfer's sources have drained, or use other pages.",
        retryable=True,
    )
    NOT_STAGED = _error(
        "RG912",
        "The source never staged the request",
        "The source engine did not produce it before the deadline.",
    )
    STAGING_FULL = _error(
        "RG913",
        "No room to stage or park more requests",
        "Wait for releases, or raise the bound.",
        retryable=True,
    )
    BUSY = _error(
        "RG914",
        "The daemon's transfer table is full",
        "Try again; raise grants.max_transfers if it lasts.",
        retryable=True,
    )
    CONFLICTING_STAGE = _error(
        "RG915",
        "The request is already staged with other pages",
        "Release it first, or use a new request id.",
    )
    SOURCE_LOST = _error(
        "RG920",
        "A source rank was lost before its data was complete",
        "The request must be prefilled again.",
    )
    DESTINATION_LOST = _error(
        "RG921",
        "A destination rank was lost",
        "The request must be sent to another decode world.",
    )
    ABORTED = _error(
        "RG922",
        "The transfer was aborted",
        "Nothing to do.",
    )
    EXPIRED = _error(
        "RG923",
        "The transfer's time ran out",
        "`rankgate transfers` names the ranks that had not ended.",
    )
    TRANSPORT_FAILED = _error(
        "RG924",
        "The transport could not move the bytes",
        "See the message for the transport's own error.",
    )
    WORLD_BROKEN = _error(
        "RG925",
        "A rank of the world is gone, so its seal is broken",
        "The world must be restarted; it pairs again under a new epoch.",
        retryable=True,
    )

    @property
    def id(self) -> str:
        """The stable code, such as ``RG412``."""
        return self.value.id

    @property
    def slug(self) -> str:
        """The stable slug, such as ``kv_dtype_mismatch``."""
        return self.name.lower()

    @property
    def severity(self) -> Severity:
        """Error or warning."""
        return self.value.severity

    @property
    def retryable(self) -> bool:
        """Whether the same message may succeed later without a change of configuration."""
        return self.value.retryable

    @property
    def title(self) -> str:
        """One line: what is wrong."""
        return self.value.title

    @property
    def hint(self) -> str:
        """What to do next."""
        return self.value.hint


BY_ID: dict[str, Code] = {code.id: code for code in Code}
"""Look-up by stable code."""
