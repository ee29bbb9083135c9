"""From a model's ``config.json`` to the KV cache it needs: layers, heads, head size, dtype."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

SHIPPED: Final = Path(__file__).parent / "models"
"""The configurations that come with the demo, by name."""

CACHELESS: Final = ("linear_attention", "mamba", "conv")
"""Entries of ``layer_types`` that keep a recurrent state and no paged cache."""


class ModelError(ValueError):
    """A model the demo cannot take; the text says which keys are at fault and what to do."""


class CacheModel(Struct, frozen=True, kw_only=True):
    """The part of a model that its paged KV cache follows from."""

    name: str
    model_type: str
    layers: tuple[int, ...]
    """Global ids of the layers that keep K and V."""
    kv_heads: int
    """Before sharding."""
    head_dim: int
    dtype: str


def shipped_models() -> list[str]:
    """Return the names of the shipped models."""
    return sorted(path.stem for path in SHIPPED.glob("*.json"))


def load_model(name_or_path: str) -> CacheModel:
    """Return the cache model of a shipped name, a ``config.json`` or a folder that holds one.

    Raises:
        ModelError: there is no such model, or its cache is none that the demo moves.
    """
    path, name = _locate(name_or_path)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds a {type(config).__name__}; expected a JSON object")
    return cache_model(config, name)


def _locate(name_or_path: str) -> tuple[Path, str]:
    shipped = SHIPPED / f"{name_or_path}.json"
    if "/" not in name_or_path and shipped.is_file():
        return shipped, name_or_path
    path = Path(name_or_path)
    if path.is_dir():
        path /= "config.json"
    if path.is_file():
        return path, path.parent.name if path.name == "config.json" else path.stem
    raise ModelError(
        f"model {name_or_path!r} is neither shipped nor a path to a config.json;"
        f" shipped are {', '.join(shipped_models())}"
    )


def cache_model(config: Mapping[str, Any], name: str) -> CacheModel:
    """Return the cache model of a Hugging Face configuration.

    Raises:
        ModelError: keys are missing or senseless, or the cache is a latent (MLA).
    """
    text = config.get("text_config", config)  # multimodal models nest the language model
    if not isinstance(text, Mapping):
        raise ModelError(f"{name}: text_config is {text!r}; expected an object")
    model_type = str(text.get("model_type", config.get("model_type", "unknown")))
    if text.get("kv_lora_rank"):
        raise ModelError(
            f"{name} (model_type {model_type}) caches MLA latents (kv_lora_rank"
            f" {text['kv_lora_rank']}), which are not in this demo yet; choose a model with K and"
            " V heads, such as llama-3.1-8b"
        )
    layers = _attention_layers(text, name, model_type)
    missing = _missing_keys(text)
    if missing:
        raise ModelError(
            f"{name} (model_type {model_type}) lacks {', '.join(missing)}; expected the"
            " config.json that lies beside the model's weights"
        )
    query_heads = _number(text, "num_attention_heads", name)
    kv_heads = _number(text, "num_key_value_heads", name) or query_heads
    head_dim = _number(text, "head_dim", name)
    if not head_dim:
        hidden = _number(text, "hidden_size", name)
        head_dim, rest = divmod(hidden, query_heads)
        if rest:
            raise ModelError(
                f"{name}: hidden_size {hidden} does not divide by num_attention_heads"
                f" {query_heads}; give head_dim in the config.json"
            )
    dtype = str(text.get("dtype") or text.get("torch_dtype") or "bfloat16")
    return CacheModel(
        name=name,
        model_type=model_type,
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype.removeprefix("torch."),
    )


def _missing_keys(text: Mapping[str, Any]) -> list[str]:
    """Return the keys without which heads cannot be told; null counts as absent."""
    have = {key for key, value in text.items() if value is not None}
    missing = []
    if not have & {"num_key_value_heads", "num_attention_heads"}:
        missing.append("num_key_value_heads (or num_attention_heads)")
    if "head_dim" not in have:
        missing += [
            f"{key} (or head_dim)"
            for key in ("hidden_size", "num_attention_heads")
            if key not in have
        ]
    return missing


def _attention_layers(text: Mapping[str, Any], name: str, model_type: str) -> tuple[int, ...]:
    kinds = text.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
            raise ModelError(f"{name}: layer_types is {kinds!r}; expected a list of names")
        ids = [i for i, kind in enumerate(kinds) if not kind.startswith(CACHELESS)]
    elif model_type == "mamba2":
        ids = []
    else:
        if text.get("num_hidden_layers") is None:
            raise ModelError(
                f"{name} (model_type {model_type}) lacks num_hidden_layers; expected the"
                " config.json that lies beside the model's weights"
            )
        every = range(_number(text, "num_hidden_layers", name))
        period = _number(text, "attn_layer_period", name)  # jamba's rule
        offset = _number(text, "attn_layer_offset", name)
        ids = [i for i in every if i % period == offset] if period else list(every)
    if not ids:
        raise ModelError(
            f"{name} (model_type {model_type}) has no attention layer, so no KV cache to move;"
            " choose a model with K and V heads, such as llama-3.1-8b"
        )
    return tuple(ids)


def _number(text: Mapping[str, Any], key: str, name: str) -> int:
    """Return an integer of the configuration; 0 for an absent one."""
    value = text.get(key)
    if value is None:
        return 0
    least = 0 if key == "attn_layer_offset" else 1
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ModelError(f"{name}: {key} is {value!r}; expected a whole number from {least}")
    return value
