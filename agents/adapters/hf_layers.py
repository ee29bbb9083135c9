"""Which kind of cache each layer of a model keeps, from the several ways configs say it."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Final, NamedTuple

from rankgate.agents.adapters.hf_config import MAX_LAYERS, Config


class LayerKind(StrEnum):
    """What one layer keeps of a request."""

    FULL = "full"
    SLIDING = "sliding"
    INDEXED = "indexed"
    """A latent, and the keys of a sparse-attention indexer (DeepSeek-V3.2)."""
    RECURRENT = "recurrent"


NAMES: Final = {
    "full_attention": LayerKind.FULL,
    "attention": LayerKind.FULL,
    "sliding_attention": LayerKind.SLIDING,
    "indexed_attention": LayerKind.INDEXED,
    "deepseek_sparse_attention": LayerKind.INDEXED,
    "linear_attention": LayerKind.RECURRENT,
    "mamba": LayerKind.RECURRENT,
}
"""Entries of ``layer_types`` as transformers writes them, older spellings included."""

GDN_KEYS: Final = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
GDN_TYPES: Final = ("qwen3_next", "qwen3_5")
"""How the model types with gated delta nets begin."""

FOREIGN: Final = {
    "attention_chunk_size": "chunks instead of a window (Llama 4)",
    "attn_type_list": "a kind per layer (MiniMax-01)",
    "block_configs": "other heads in each layer (Nemotron-NAS)",
    "compress_ratios": "compressed caches (DeepSeek-V4)",
    "cross_attention_layers": "caches over an image's tokens",
    "global_head_dim": "another head size in full layers (Gemma 4)",
    "hybrid_layer_pattern": "a kind per layer (MiMo-V2)",
    "hybrid_override_pattern": "a kind per layer (Nemotron-H)",
    "is_encoder_decoder": "caches over an encoder's tokens",
    "layers_block_type": "a kind per layer (Zamba, Nemotron-H)",
    "linear_attn_config": "three convolutions a layer (Kimi Linear)",
    "mamba_n_heads": "another Mamba-2 than the model type mamba2 (Bamba, Granite, Falcon-H1)",
    "mamba_num_heads": "another Mamba-2 than the model type mamba2 (Nemotron-H)",
    "multi_query": "one KV head, or several, by further keys (Falcon, GPTBigCode)",
    "num_global_key_value_heads": "other heads in full layers (Gemma 4)",
    "num_kv_heads": "KV heads under another name (Falcon)",
    "num_kv_shared_layers": "layers that read another layer's cache (Gemma 3n)",
    "swa_head_dim": "another head size in sliding layers (MiMo-V2)",
    "swa_num_key_value_heads": "other heads in sliding layers (MiMo-V2)",
}
"""Keys that change what is cached in ways this reader does not know, and what they mean."""


class LayerRule(NamedTuple):
    """One statement of a configuration about its layers; ``at`` is asked after ``settle``."""

    source: str
    kinds: frozenset[LayerKind]
    at: Callable[[int], LayerKind]


def layer_rules(config: Config) -> list[LayerRule]:
    """Return all that the configuration says of its layers, at least one rule.

    Missing keys are noted in ``config``.

    Raises:
        ConfigError: keys this reader does not know, senseless values, or sliding windows of which
            nothing says in which layers they are.
    """
    _refuse_foreign(config)
    stated = [_listed(config), _periodic(config), _interval(config)]
    rules = [rule for rule in stated if rule]
    return rules or [_windowed(config) or _uniform(config)]


def layer_kinds(config: Config, rules: list[LayerRule]) -> tuple[LayerKind, ...]:
    """Return the kind of every layer, by global id.

    Raises:
        ConfigError: two rules of the configuration contradict each other.
    """
    first, *others = rules
    count = config.whole("num_hidden_layers", most=MAX_LAYERS)
    kinds = tuple(first.at(i) for i in range(count))
    for other in others:
        for i, kind in enumerate(kinds):
            if other.at(i) is not kind:
                raise config.error(
                    f"layer {i} is {kind} by {first.source} and {other.at(i)} by {other.source};"
                    " keep the one the weights follow"
                )
    return kinds


def _refuse_foreign(config: Config) -> None:
    found = [f"{key} ({text})" for key, text in FOREIGN.items() if config.value(key)]
    if found:
        raise config.error(
            f"keys that change what is cached in a way not known here: {', '.join(found)};"
            " register from the running engine instead"
        )


def _listed(config: Config) -> LayerRule | None:
    names = config.value("layer_types")
    if names is None:
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise config.expected("layer_types", names, "a list of names")
    unknown = sorted(set(names) - NAMES.keys())
    if unknown:
        raise config.error(f"layer_types has {', '.join(unknown)}; known are {', '.join(NAMES)}")
    if config.has("num_hidden_layers"):
        count = config.whole("num_hidden_layers", most=MAX_LAYERS)
        if len(names) != count:
            raise config.error(
                f"layer_types has {len(names)} entries; expected num_hidden_layers {count}"
            )
    kinds = [NAMES[name] for name in names]
    if LayerKind.SLIDING in kinds and config.flag("use_sliding_window") is False:
        raise config.error(
            "layer_types has sliding_attention, but use_sliding_window is false;"
            " keep the one the engine follows"
        )
    return LayerRule("layer_types", frozenset(kinds), kinds.__getitem__)


def _periodic(config: Config) -> LayerRule | None:
    """Jamba's rule: layer i attends when ``i % attn_layer_period == attn_layer_offset``."""
    jamba = config.model_type == "jamba" and not config.has("layer_types")
    if not jamba and not config.has("attn_layer_period"):
        return None
    config.need("attn_layer_period")
    config.need("attn_layer_offset")
    both = frozenset({LayerKind.FULL, LayerKind.RECURRENT})
    if not (config.has("attn_layer_period") and config.has("attn_layer_offset")):
        return LayerRule("attn_layer_period", both, lambda _: LayerKind.FULL)
    period = config.whole("attn_layer_period")
    offset = config.whole("attn_layer_offset", least=0)
    if offset >= period:
        raise config.expected("attn_layer_offset", offset, f"less than attn_layer_period {period}")
    return LayerRule(
        "attn_layer_period",
        both,
        lambda i: LayerKind.FULL if i % period == offset else LayerKind.RECURRENT,
    )


def _interval(config: Config) -> LayerRule | None:
    """Qwen3-Next's rule: every ``full_attention_interval``-th layer attends, the last of each."""
    gated = config.has(*GDN_KEYS) or config.model_type.startswith(GDN_TYPES)
    both = frozenset({LayerKind.FULL, LayerKind.RECURRENT})
    if config.has("full_attention_interval"):
        interval = config.whole("full_attention_interval")
        return LayerRule(
            "full_attention_interval",
            both,
            lambda i: LayerKind.RECURRENT if (i + 1) % interval else LayerKind.FULL,
        )
    if gated and not config.has("layer_types"):
        config.need("layer_types", "full_attention_interval")
        return LayerRule("full_attention_interval", both, lambda _: LayerKind.FULL)
    return None


def _windowed(config: Config) -> LayerRule | None:
    """Gemma 3's rule: every ``sliding_window_pattern``-th layer is full, the others slide."""
    if config.flag("use_sliding_window") is False:
        return None
    if config.has("sliding_window_pattern"):
        pattern = config.whole("sliding_window_pattern")
        return LayerRule(
            "sliding_window_pattern",
            frozenset({LayerKind.FULL, LayerKind.SLIDING}),
            lambda i: LayerKind.SLIDING if (i + 1) % pattern else LayerKind.FULL,
        )
    if config.has("sliding_window"):
        raise config.error(
            f"sliding_window is {config.whole('sliding_window')}, and nothing says in which layers;"
            " give layer_types with one name a layer (full_attention where the engine keeps all"
            " tokens), or use_sliding_window false"
        )
    return None


def _uniform(config: Config) -> LayerRule:
    kind = LayerKind.FULL
    if config.model_type == "mamba2":
        kind = LayerKind.RECURRENT
    elif config.has("index_head_dim"):
        kind = LayerKind.INDEXED
    return LayerRule("num_hidden_layers", frozenset({kind}), lambda _: kind)
