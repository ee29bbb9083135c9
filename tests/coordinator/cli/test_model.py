"""From config.json to KV geometry."""

import json
from pathlib import Path

import pytest

from rankgate.coordinator.cli.demo.model import (
    ModelError,
    cache_model,
    load_model,
    shipped_models,
)

PLAIN = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    ("name", "layers", "heads", "dim"),
    [
        ("llama-3.1-8b", 32, 8, 128),
        ("qwen3-32b", 64, 8, 128),
        ("gpt-oss-120b", 36, 8, 64),
        ("gemma3-text", 26, 4, 256),
        ("qwen3-next-80b-a3b", 12, 2, 256),
        ("jamba-v0.1", 4, 8, 128),
    ],
)
def test_shipped_models(name: str, layers: int, heads: int, dim: int) -> None:
    """The shipped models give the caches that their engines allocate."""
    model = load_model(name)
    assert (len(model.layers), model.kv_heads, model.head_dim) == (layers, heads, dim)
    assert model.dtype == "bfloat16"


def test_layer_ids_stay_global() -> None:
    """A hybrid model's attention layers keep their ids in the whole model."""
    assert load_model("qwen3-next-80b-a3b").layers[:3] == (3, 7, 11)
    assert load_model("jamba-v0.1").layers == (4, 12, 20, 28)


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v3.2"])
def test_latents_are_not_in_this_demo_yet(name: str) -> None:
    """MLA models are refused in words, with one to take instead."""
    with pytest.raises(ModelError, match=r"not in this demo yet; choose .* llama"):
        load_model(name)


def test_a_model_without_attention_is_refused() -> None:
    """A pure state model has no KV cache to move."""
    with pytest.raises(ModelError, match="no attention layer"):
        load_model("mamba2-7b")


def test_unknown_names_list_the_shipped_ones() -> None:
    """A typo is answered with what there is."""
    with pytest.raises(ModelError, match=", ".join(shipped_models())):
        load_model("llama-9")


def test_all_missing_keys_are_listed() -> None:
    """One error names every key that is missing."""
    with pytest.raises(ModelError, match=r"lacks num_key_value_heads .*, hidden_size .*"):
        cache_model({"model_type": "llama", "num_hidden_layers": 2}, "m")
    with pytest.raises(ModelError, match="lacks num_hidden_layers"):
        cache_model({"model_type": "llama"}, "m")


def test_head_dim_follows_from_the_hidden_size() -> None:
    """Without head_dim it is hidden_size over the query heads, and never rounded."""
    assert cache_model(PLAIN, "m").head_dim == 16
    with pytest.raises(ModelError, match="hidden_size 65 does not divide"):
        cache_model({**PLAIN, "hidden_size": 65}, "m")


def test_heads_default_to_query_heads() -> None:
    """A model without num_key_value_heads is one without grouped queries."""
    config = {key: value for key, value in PLAIN.items() if key != "num_key_value_heads"}
    assert cache_model(config, "m").kv_heads == 4


@pytest.mark.parametrize("value", [0, -1, "8", 1.5, True])
def test_senseless_values_name_the_key(value: object) -> None:
    """A value that is no positive whole number is shown with its key."""
    with pytest.raises(ModelError, match="num_key_value_heads is"):
        cache_model({**PLAIN, "num_key_value_heads": value}, "m")


def test_nested_text_config_is_used() -> None:
    """Multimodal configurations keep the language model's part one level down."""
    assert cache_model({"model_type": "gemma3", "text_config": PLAIN}, "m").kv_heads == 2


def test_a_path_and_a_folder_are_taken(tmp_path: Path) -> None:
    """A config.json is found by its path and by its folder."""
    (tmp_path / "config.json").write_text(json.dumps({**PLAIN, "torch_dtype": "float16"}))
    assert load_model(str(tmp_path)).dtype == "float16"
    assert load_model(str(tmp_path / "config.json")).name == tmp_path.name


@pytest.mark.parametrize(("text", "words"), [("{", "cannot be read"), ("[]", "expected a JSON")])
def test_broken_files_are_told(tmp_path: Path, text: str, words: str) -> None:
    """A file that is no JSON object is an error with its path."""
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ModelError, match=words):
        load_model(str(path))
