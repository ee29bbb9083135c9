"""What a rank registers about itself: identity, parallel layout, model, caches, transport.

Base addresses are never part of it: plans are byte offsets, and addresses stay in the agents.
Uniform layers are one group with a list of layer ids, so a 61-layer model takes about 1 KB.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from rankgate.proto.fields import (
    U64,
    Digest,
    Layers,
    Milliseconds,
    Name,
    Rank,
    Size,
    Text,
)
from rankgate.proto.limits import MAX_COMPONENTS, MAX_ITEMS

ROLES = ("encoder", "prefill", "decode", "unified")
"""What an engine does; ``unified`` prefills and decodes itself."""

PROFILES = ("native", "sglang", "vllm")
"""Whose habits decide which ranks talk (see coordinator/core/contacts.py)."""

KV_KINDS = ("gqa", "mla", "index")
"""``gqa``: K and V per head; ``mla``: one latent, replicated over tp; ``index``: DSA keys."""


class Coordinates(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a rank stands in its world's parallel layout; each below its size."""

    pp: Rank = 0
    dp: Rank = 0
    cp: Rank = 0
    tp: Rank = 0
    dcp: Rank = 0


class Layout(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parallel sizes of a world; ``pp * dp * cp * tp`` is the world size.

    ``tp`` is the *attention* tensor parallel size; ``dcp`` (decode context parallel) lies inside
    tp and does not multiply.
    """

    pp: Size = 1
    dp: Size = 1
    cp: Size = 1
    tp: Size = 1
    dcp: Size = 1

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def slots(self) -> int:
        """Ranks of one data-parallel group."""
        return self.pp * self.cp * self.tp


class Software(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which program the rank runs; shown to operators."""

    engine: Name = ""
    version: Name = ""
    agent: Name = ""


class Model(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which model the caches belong to."""

    name: Text = ""
    revision: Text = ""


class KvGroup(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Uniform layers of one paged KV cache on one rank.

    Invariant (checked, RG111, RG112): ``local_heads`` follows from ``total_heads`` and the tp
    coordinate, and ``k_item_len == page_size * local_heads * head_dim * element size`` bytes.
    """

    name: Name
    """Tag by which the two sides' groups are matched, such as ``full``."""
    kind: Name = "gqa"
    dtype: Name
    layout: Name = "HND"
    """Axis order of a page as the kernels have it: ``HND`` or ``NHD``."""
    page_size: Annotated[int, Meta(ge=1, le=1 << 20)]
    """Tokens in a page."""
    pages: Annotated[int, Meta(ge=1, le=1 << 31)]
    """Pages in this rank's pool; not a compatibility field (case A15)."""
    total_heads: Annotated[int, Meta(ge=1, le=1 << 16)]
    """KV heads of the model before sharding (case A06)."""
    local_heads: Annotated[int, Meta(ge=1, le=1 << 16)]
    """KV heads on this rank."""
    head_dim: Annotated[int, Meta(ge=1, le=1 << 20)]
    """Elements of one K head."""
    v_head_dim: Annotated[int, Meta(ge=0, le=1 << 20)]
    """Elements of one V head; 0 for ``mla``, whose latent is the K part alone."""
    layers: Layers
    """Global layer ids in buffer order."""
    k_item_len: U64
    """Bytes of one page of one layer's K."""
    v_item_len: U64 = 0
    """Bytes of one page of one layer's V."""


class StateComponent(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A recurrent or window state of some layers on one rank (declared; not moved yet)."""

    kind: Name
    """Such as ``MAMBA`` or ``SWA``; components are matched by it, never by position (A34)."""
    dtype: Name
    layers: Layers
    item_lens: Annotated[list[U64], Meta(max_length=MAX_ITEMS)]
    """Bytes per slot or page, one per layer."""


class Transport(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How peers reach this rank's memory."""

    kind: Name
    """Such as ``zmq``."""
    address: Text
    """Endpoint that this rank's agent bound; never computed from ranks (case B21)."""
    host: Text = ""
    """Host name, for people."""
    metadata_digest: Digest
    """BLAKE2b-128 of the transport metadata that peers will be given while linking."""
    max_op: Milliseconds = 1000
    """Longest time in ms one started operation can still write."""


class Descriptor(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that one rank says about itself."""

    world: Name
    role: Name
    group: Name = ""
    """Transfer group; only equal labels pair (case F07)."""
    rank: Annotated[int, Meta(ge=0, le=1 << 20)]
    world_size: Annotated[int, Meta(ge=1, le=1 << 20)]
    coordinates: Coordinates
    layout: Layout
    software: Software = Software()
    model: Model = Model()
    kv: Annotated[list[KvGroup], Meta(max_length=MAX_COMPONENTS)] = []
    state: Annotated[list[StateComponent], Meta(max_length=MAX_COMPONENTS)] = []
    transport: Transport
    capabilities: Annotated[list[Name], Meta(max_length=MAX_COMPONENTS)] = []
    profile: Name = "native"
