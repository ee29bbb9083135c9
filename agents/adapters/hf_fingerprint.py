"""What of a configuration changes the meaning of a cached byte, as named short texts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import groupby
from typing import Final

from rankgate.agents.adapters.hf_config import Config
from rankgate.agents.adapters.hf_layers import LayerKind

MAX_VALUE: Final = 200
"""Characters of a value; a longer one is given by its digest."""

SIZES: Final = ("num_hidden_layers", "hidden_size", "num_attention_heads")
HEAD_SIZES: Final = ("num_key_value_heads", "head_dim", "v_head_dim")
LATENT_SIZES: Final = ("kv_lora_rank", "qk_rope_head_dim", "index_head_dim")
FLAGS: Final = ("use_qk_norm", "qk_norm", "qk_layernorm")
"""Whether K is normalized before it is cached."""


def fingerprint(config: Config, kinds: Sequence[LayerKind]) -> dict[str, str]:
    """Return the parts that are present, by name.

    Two files of one model give the same parts: numbers lose their ``.0``, ``rope_parameters`` of
    transformers 5 becomes ``rope_theta`` and ``rope_scaling``, and ``layer_kinds`` are run lengths
    of the kinds (``3R1F`` is three recurrent layers and a full one) however the file states them.
    A latent's file may give any ``head_dim`` and KV heads, so they are left out there.

    Raises:
        ConfigError: a value of the wrong type.
    """
    latent = config.has("kv_lora_rank")
    parts = {} if config.model_type == "unknown" else {"model_type": config.model_type}
    sliding = ("sliding_window",) if LayerKind.SLIDING in kinds else ()
    for key in SIZES + sliding + (LATENT_SIZES if latent else HEAD_SIZES):
        if config.has(key):
            parts[key] = str(config.whole(key))
    for key in FLAGS:
        flag = config.flag(key)
        if flag is not None:
            parts[key] = json.dumps(flag)
    parts |= _rope(config)
    parts["layer_kinds"] = "".join(
        f"{len(list(run))}{kind[0].upper()}" for kind, run in groupby(kinds)
    )
    quantized = config.mapping("quantization_config", config.outer("quantization_config"))
    scheme = {
        key: value
        for key, value in quantized.items()
        if str(key).startswith("kv_cache") and value is not None
    }
    if scheme:
        parts["quantization_kv"] = _canonical(config, "quantization_config", scheme)
    return {key: _short(value) for key, value in parts.items()}


def _rope(config: Config) -> dict[str, str]:
    """Return the rotation of K, in one form for the older and the newer way to state it."""
    parts = {}
    parameters = config.mapping("rope_parameters", config.value("rope_parameters"))
    if any(isinstance(value, Mapping) for value in parameters.values()):
        parts["rope_parameters"] = _canonical(config, "rope_parameters", parameters)
        parameters = {}  # by layer kind (Gemma 3), where no single value could stand for it
    scaling = {
        **config.mapping("rope_scaling", config.value("rope_scaling")),
        **parameters,
    }
    for key in ("rope_theta", "partial_rotary_factor", "rope_local_base_freq"):
        given = [
            value for value in (config.value(key), scaling.pop(key, None)) if value is not None
        ]
        numbers = [config.number(key, value) for value in given]
        if len(set(numbers)) > 1:
            raise config.error(
                f"{key} is {numbers[0]} and, in rope_parameters, {numbers[1]};"
                " keep the one the weights follow"
            )
        if numbers:
            parts[key] = _canonical(config, key, numbers[0])
    old = scaling.pop("type", None)
    if old is not None:
        scaling.setdefault("rope_type", old)
    scaling = {key: value for key, value in scaling.items() if value is not None}
    if scaling and scaling != {"rope_type": "default"}:
        parts["rope_scaling"] = _canonical(config, "rope_scaling", scaling)
    return parts


def _canonical(config: Config, key: str, value: object) -> str:
    """Return JSON that is equal for equal values."""
    try:
        return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise config.expected(key, value, f"plain JSON ({error})") from error


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _short(value: str) -> str:
    if len(value) <= MAX_VALUE:
        return value
    return blake2b(value.encode(), digest_size=16).hexdigest()
