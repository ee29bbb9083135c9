"""From a model's Hugging Face ``config.json`` to its caches, before any sharding.

Only what the file says is used: what it does not say is an error that names the keys. Sizes follow
the engines' own allocations; where they are from is said at each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from rankgate.agents.adapters.hf_config import Config, ConfigError, shown
from rankgate.agents.adapters.hf_fingerprint import fingerprint
from rankgate.agents.adapters.hf_layers import (
    GDN_TYPES,
    LayerKind,
    layer_kinds,
    layer_rules,
)
from rankgate.agents.adapters.hf_states import StateKind, recipe, state_dtype_of, state_sizes

__all__ = [
    "ConfigError",
    "KvSpec",
    "ModelSpec",
    "StatePartSpec",
    "StateSpec",
    "keep_layers",
    "read_config",
]

INDEX_BLOCK: Final = 128
"""Elements of an indexer's key that share one scale (SGLang's ``quant_block_size``)."""

SCALE_BYTES: Final = 4
"""An indexer's scales are float32."""


class KvSpec(Struct, frozen=True, kw_only=True):
    """One paged cache: ``[tokens, total_heads, head_dim]`` a layer, and V beside K for ``gqa``."""

    name: str
    """``full``, ``swa``, ``mla`` or ``index``; the two sides' groups are matched by it."""
    kind: str
    """``gqa``, ``mla`` or ``index`` (``proto.descriptor.KV_KINDS``)."""
    dtype: str
    """torch's own name."""
    total_heads: int
    """KV heads of the whole model (case A06); 1 for what every tp rank holds alike (case A31)."""
    head_dim: int
    """Elements of one K head; of ``index``, the bytes of one token's key and scales."""
    v_head_dim: int
    """Elements of one V head; 0 for ``mla`` and ``index``."""
    layers: tuple[int, ...]
    """Global layer ids."""
    window: int = 0
    """Tokens of a sliding window; 0 keeps all."""


class StatePartSpec(Struct, frozen=True, kw_only=True):
    """One tensor of a recurrent state: ``[slots, outer, dims, inner]`` a layer."""

    name: str
    """``conv`` or ``ssm``."""
    dtype: str
    dims: int
    """Elements along the axis that tp slices; 0: every rank holds the same."""
    inner: int
    """Elements of one unit of that axis."""
    outer: int = 1
    """Rows before that axis."""
    shard_groups: tuple[int, ...] = ()
    """Blocks of ``dims`` that tp slices each by itself; empty is one block (SGLang's
    ``state_conv_shard_groups``, disaggregation/utils.py:907-1042)."""


class StateSpec(Struct, frozen=True, kw_only=True):
    """A recurrent state: one slot a request in each of its layers."""

    kind: StateKind
    layers: tuple[int, ...]
    """Global layer ids."""
    parts: tuple[StatePartSpec, ...]


class ModelSpec(Struct, frozen=True, kw_only=True):
    """All that a model keeps of a request, over the whole model."""

    name: str
    """For people."""
    model_type: str
    dtype: str
    """The model's own element type."""
    hidden_size: int
    num_layers: int
    """Without draft layers."""
    kv: tuple[KvSpec, ...]
    state: tuple[StateSpec, ...]
    draft_layers: int
    """Layers of the built-in draft (MTP), which no group lists: an engine may run without them
    (cases A13, A20, A21)."""
    fingerprint: dict[str, str]


def read_config(
    config: Mapping[str, Any],
    name: str,
    *,
    kv_dtype: str | None = None,
    state_dtype: str | None = None,
) -> ModelSpec:
    """Return the un-sharded caches of a model.

    Args:
        config: The parsed file; multimodal models nest the language model in ``text_config``.
        name: The model's name, for people.
        kv_dtype: torch's name of the paged caches' element type; None and ``auto`` take the
            model's.
        state_dtype: The same for a state's ``ssm`` part; None takes the file's
            ``mamba_ssm_dtype``, or else float32 as SGLang does (SGLANG_MAMBA_SSM_DTYPE), and
            ``auto`` the model's. The ``conv`` part always has the model's.

    Raises:
        ConfigError: keys are missing, senseless, contradicting, or of a model not known here.
    """
    keys = Config(config, name)
    rules = layer_rules(keys)
    _need(keys, rules[0].kinds)
    keys.settle()
    kinds = layer_kinds(keys, rules)
    dtype = keys.dtype()
    cache = dtype if kv_dtype in (None, "auto") else keys.cache_dtype("kv_dtype", kv_dtype)
    drafts = "num_nextn_predict_layers"
    return ModelSpec(
        name=name,
        model_type=keys.model_type,
        dtype=dtype,
        hidden_size=keys.whole("hidden_size"),
        num_layers=len(kinds),
        kv=_latent(keys, kinds, cache) if keys.has("kv_lora_rank") else _heads(keys, kinds, cache),
        state=_state(keys, kinds, dtype, state_dtype_of(keys, dtype, state_dtype)),
        draft_layers=keys.whole(drafts, least=0) if keys.has(drafts) else 0,
        fingerprint=fingerprint(keys, kinds),
    )


def keep_layers(spec: ModelSpec, count: int) -> ModelSpec:
    """Return the model's first ``count`` layers; groups and states left without any disappear.

    The fingerprint stays: it is the same model, of which less is moved.

    Raises:
        ConfigError: the model has fewer layers, or ``count`` is no whole number from 1.
    """
    if type(count) is not int or not 1 <= count <= spec.num_layers:
        raise ConfigError(
            f"{spec.name}: count is {shown(count)}; expected a whole number from 1 to the model's"
            f" {spec.num_layers} layers"
        )
    groups = [
        replace(group, layers=tuple(i for i in group.layers if i < count)) for group in spec.kv
    ]
    states = [
        replace(state, layers=tuple(i for i in state.layers if i < count)) for state in spec.state
    ]
    return replace(
        spec,
        num_layers=count,
        kv=tuple(group for group in groups if group.layers),
        state=tuple(state for state in states if state.layers),
    )


def _need(keys: Config, kinds: frozenset[LayerKind]) -> None:
    """Note every key that is missing for these kinds of layers."""
    keys.need_model_type()
    keys.need("num_hidden_layers")
    keys.need("hidden_size")
    keys.need_dtype()
    if keys.has("kv_lora_rank", "index_head_dim") or LayerKind.INDEXED in kinds:
        keys.need("kv_lora_rank")
        keys.need("qk_rope_head_dim")
        if LayerKind.INDEXED in kinds:
            keys.need("index_head_dim")
    elif kinds - {LayerKind.RECURRENT}:
        keys.need("num_key_value_heads", "num_attention_heads")
        keys.need("head_dim", "num_attention_heads")
    if LayerKind.SLIDING in kinds:
        keys.need("sliding_window")
    if LayerKind.RECURRENT in kinds:
        kind, wanted = recipe(keys)
        for key in wanted:
            keys.need(key)
        if kind == "GDN" and not keys.model_type.startswith(GDN_TYPES):
            keys.hints.append(
                "the recurrent states known here are gated delta nets (the linear_ keys), jamba's"
                " and mamba2's"
            )


def _of(kinds: tuple[LayerKind, ...], *wanted: LayerKind) -> tuple[int, ...]:
    return tuple(i for i, kind in enumerate(kinds) if kind in wanted)


def _heads(keys: Config, kinds: tuple[LayerKind, ...], dtype: str) -> tuple[KvSpec, ...]:
    """Return the caches with K and V heads: ``full``, and ``swa`` where the window slides."""
    full, sliding = _of(kinds, LayerKind.FULL), _of(kinds, LayerKind.SLIDING)
    if not full and not sliding:
        return ()
    heads, dim = _kv_heads(keys), _head_dim(keys)
    value_dim = keys.whole("v_head_dim") if keys.has("v_head_dim") else dim
    group = KvSpec(
        name="full",
        kind="gqa",
        dtype=dtype,
        total_heads=heads,
        head_dim=dim,
        v_head_dim=value_dim,
        layers=full,
    )
    groups = [group] if full else []
    if sliding:
        window = keys.whole("sliding_window")
        groups.append(replace(group, name="swa", layers=sliding, window=window))
    return tuple(groups)


def _kv_heads(keys: Config) -> int:
    """Return the KV heads; a file that gives none has one for each query head."""
    if not keys.has("num_key_value_heads"):
        return keys.whole("num_attention_heads")
    heads = keys.whole("num_key_value_heads")
    if keys.has("num_attention_heads") and keys.whole("num_attention_heads") % heads:
        raise keys.error(
            f"num_attention_heads {keys.whole('num_attention_heads')} does not divide by"
            f" num_key_value_heads {heads}; expected the same number of query heads for each"
        )
    return heads


def _head_dim(keys: Config) -> int:
    if keys.has("head_dim"):
        return keys.whole("head_dim")
    hidden, heads = keys.whole("hidden_size"), keys.whole("num_attention_heads")
    dim, rest = divmod(hidden, heads)
    if rest:
        raise keys.error(
            f"hidden_size {hidden} does not divide by num_attention_heads {heads};"
            " give head_dim in the config.json"
        )
    return dim


def _latent(keys: Config, kinds: tuple[LayerKind, ...], dtype: str) -> tuple[KvSpec, ...]:
    """Return an MLA model's caches: ``mla``, and ``index`` where layers have an indexer.

    A token's latent is ``kv_lora_rank`` elements and the rotated key's ``qk_rope_head_dim``
    (SGLang's MLATokenToKVPool). An indexer's key is fp8 with one float32 scale for each 128
    elements, in bytes; a page holds all its keys and then all its scales, so only whole pages mean
    something (SGLang's ``index_k_with_scale_buffer``, case A27).
    """
    if LayerKind.SLIDING in kinds:
        raise keys.error(
            "kv_lora_rank (MLA) and sliding_attention in layer_types contradict each other here;"
            " register from the running engine instead"
        )
    indexed = _of(kinds, LayerKind.INDEXED)
    if keys.has("index_head_dim") and not indexed:
        raise keys.error(
            "index_head_dim is given, but no layer of layer_types is indexed_attention"
        )
    latent = KvSpec(
        name="mla",
        kind="mla",
        dtype=dtype,
        total_heads=1,
        head_dim=keys.whole("kv_lora_rank") + keys.whole("qk_rope_head_dim"),
        v_head_dim=0,
        layers=_of(kinds, LayerKind.FULL, LayerKind.INDEXED),
    )
    groups = (latent,) if latent.layers else ()
    return (*groups, _index(keys, latent, indexed)) if indexed else groups


def _index(keys: Config, latent: KvSpec, layers: tuple[int, ...]) -> KvSpec:
    if latent.dtype.startswith("float8"):
        raise keys.error(
            f"kv_dtype is {latent.dtype}, and beside an indexer (index_head_dim) the engines pack"
            " such latents with scales, each attention backend its own way; give bfloat16 or"
            " register from the running engine"
        )
    size = keys.whole("index_head_dim")
    if size % INDEX_BLOCK:
        raise keys.expected("index_head_dim", size, f"a multiple of {INDEX_BLOCK}")
    return replace(
        latent,
        name="index",
        kind="index",
        dtype="uint8",
        head_dim=size + size // INDEX_BLOCK * SCALE_BYTES,
        layers=layers,
    )


def _state(
    keys: Config, kinds: tuple[LayerKind, ...], dtype: str, ssm_dtype: str
) -> tuple[StateSpec, ...]:
    layers = _of(kinds, LayerKind.RECURRENT)
    if not layers:
        return ()
    kind, _ = recipe(keys)
    conv, ssm = state_sizes(keys, kind)
    parts = (
        # SGLang and vLLM's DS layout keep [dims, kernel - 1]; vLLM's own SD layout turns the two,
        # and its NIXL connector refuses SD (VLLM_SSM_CONV_STATE_LAYOUT).
        StatePartSpec(
            name="conv",
            dtype=dtype,
            dims=conv.dims,
            inner=conv.kernel - 1,
            shard_groups=conv.shard_groups,
        ),
        StatePartSpec(name="ssm", dtype=ssm_dtype, dims=ssm.dims, inner=ssm.inner),
    )
    return (StateSpec(kind=kind, layers=layers, parts=parts),)
