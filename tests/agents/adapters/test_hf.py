"""From a model's config.json to its un-sharded caches, in exact numbers, and every refusal."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankgate.agents.adapters.hf import (
    ConfigError,
    KvSpec,
    ModelSpec,
    StatePartSpec,
    StateSpec,
    keep_layers,
    read_config,
)
from rankgate.proto.descriptor import KV_KINDS
from rankgate.proto.limits import MAX_NAME

SHIPPED = Path(__file__).parents[3] / "coordinator" / "cli" / "demo" / "models"

PLAIN: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "dtype": "bfloat16",
}


def shipped(name: str) -> dict[str, Any]:
    """Return a shipped configuration.

    GLM-4.5's weights have heads of 128, which the file must say: hidden_size does not divide.
    """
    config: dict[str, Any] = json.loads((SHIPPED / f"{name}.json").read_text(encoding="utf-8"))
    if name == "glm-4.5-air":
        config.setdefault("head_dim", 128)
    return config


def read(name: str, **keywords: str) -> ModelSpec:
    """Return the caches of a shipped model."""
    return read_config(shipped(name), name, **keywords)


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    """Return the configuration less some keys."""
    return {key: value for key, value in config.items() if key not in keys}


def refusal(config: Any, **keywords: Any) -> str:  # noqa: ANN401  deliberately wrong input too
    """Return the text with which a configuration is refused."""
    with pytest.raises(ConfigError) as caught:
        read_config(config, "m", **keywords)
    return str(caught.value)


def gqa(heads: int, dim: int, layers: tuple[int, ...]) -> KvSpec:
    """Return a full-attention group in bfloat16."""
    return KvSpec(
        name="full",
        kind="gqa",
        dtype="bfloat16",
        total_heads=heads,
        head_dim=dim,
        v_head_dim=dim,
        layers=layers,
    )


class TestShipped:
    """Every model that comes with the demo, in the numbers its engines allocate."""

    @pytest.mark.parametrize(
        ("name", "layers", "heads", "dim"),
        [
            ("llama-3.1-8b", 32, 8, 128),
            ("qwen3-32b", 64, 8, 128),
            ("glm-4.5-air", 46, 8, 128),
        ],
    )
    def test_plain_attention(self, name: str, layers: int, heads: int, dim: int) -> None:
        model = read(name)
        assert model.kv == (gqa(heads, dim, tuple(range(layers))),)
        assert model.state == ()
        assert (model.name, model.num_layers) == (name, layers)
        assert model.draft_layers == (1 if name == "glm-4.5-air" else 0)

    @pytest.mark.parametrize(
        ("name", "full", "window", "heads", "dim"),
        [
            ("gpt-oss-120b", tuple(range(1, 36, 2)), 128, 8, 64),
            ("gemma3-text", (5, 11, 17, 23), 4096, 4, 256),
        ],
    )
    def test_sliding_windows(
        self, name: str, full: tuple[int, ...], window: int, heads: int, dim: int
    ) -> None:
        model = read(name)
        first, second = model.kv
        assert first == gqa(heads, dim, full)
        assert (second.name, second.kind, second.window) == ("swa", "gqa", window)
        assert (second.total_heads, second.head_dim, second.v_head_dim) == (heads, dim, dim)
        assert second.layers == tuple(i for i in range(model.num_layers) if i not in full)

    def test_gpt_oss_halves(self) -> None:
        assert [len(group.layers) for group in read("gpt-oss-120b").kv] == [18, 18]

    def test_latent(self) -> None:
        model = read("deepseek-v3")
        assert model.kv == (
            KvSpec(
                name="mla",
                kind="mla",
                dtype="bfloat16",
                total_heads=1,
                head_dim=576,
                v_head_dim=0,
                layers=tuple(range(61)),
            ),
        )
        assert (model.hidden_size, model.draft_layers) == (7168, 1)

    def test_latent_with_an_indexer(self) -> None:
        latent, index = read("deepseek-v3.2").kv
        assert (latent.name, latent.head_dim, latent.layers) == ("mla", 576, tuple(range(61)))
        assert index == KvSpec(
            name="index",
            kind="index",
            dtype="uint8",
            total_heads=1,
            head_dim=132,
            v_head_dim=0,
            layers=tuple(range(61)),
        )

    @pytest.mark.parametrize(
        ("name", "layers", "kv_heads"), [("qwen3-next-80b-a3b", 48, 2), ("qwen3.5-text", 32, 4)]
    )
    def test_gated_delta_nets(self, name: str, layers: int, kv_heads: int) -> None:
        model = read(name)
        full = tuple(range(3, layers, 4))
        assert model.kv == (gqa(kv_heads, 256, full),)
        conv = StatePartSpec(
            name="conv", dtype="bfloat16", dims=8192, inner=3, shard_groups=(2048, 2048, 4096)
        )
        ssm = StatePartSpec(name="ssm", dtype="float32", dims=32, inner=128 * 128)
        recurrent = tuple(i for i in range(layers) if i not in full)
        assert model.state == (StateSpec(kind="GDN", layers=recurrent, parts=(conv, ssm)),)

    def test_qwen3_next_counts(self) -> None:
        model = read("qwen3-next-80b-a3b")
        assert (len(model.kv[0].layers), len(model.state[0].layers)) == (12, 36)

    def test_jamba(self) -> None:
        model = read("jamba-v0.1")
        assert model.kv == (gqa(8, 128, (4, 12, 20, 28)),)
        (state,) = model.state
        assert (state.kind, len(state.layers)) == ("MAMBA1", 28)
        assert state.parts == (
            StatePartSpec(name="conv", dtype="bfloat16", dims=8192, inner=3),
            StatePartSpec(name="ssm", dtype="float32", dims=8192, inner=16),
        )

    def test_mamba2(self) -> None:
        model = read("mamba2-7b")
        assert model.kv == ()
        conv = StatePartSpec(
            name="conv", dtype="bfloat16", dims=10240, inner=3, shard_groups=(8192, 1024, 1024)
        )
        ssm = StatePartSpec(name="ssm", dtype="float32", dims=128, inner=64 * 128)
        layers = tuple(range(64))
        assert model.state == (StateSpec(kind="MAMBA2", layers=layers, parts=(conv, ssm)),)

    @pytest.mark.parametrize("name", sorted(path.stem for path in SHIPPED.glob("*.json")))
    def test_invariants(self, name: str) -> None:
        """Layers are covered once a kind, groups add up, and texts fit the wire."""
        model = read(name)
        every = set(range(model.num_layers))
        listed = [i for group in model.kv if group.kind != "index" for i in group.layers]
        listed += [i for state in model.state for i in state.layers]
        assert sorted(listed) == sorted(every)
        assert all(group.kind in KV_KINDS for group in model.kv)
        for part in (part for state in model.state for part in state.parts):
            assert sum(part.shard_groups) in {0, part.dims}
            assert part.outer == 1
        for key, value in model.fingerprint.items():
            assert len(key) <= MAX_NAME
            assert 0 < len(value) <= 200


class TestDtypes:
    """Element types of the model, its caches and its states."""

    @pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
    def test_both_keys_and_torch_spelling(self, key: str) -> None:
        model = read_config({**without(PLAIN, "dtype"), key: "torch.float16"}, "m")
        assert (model.dtype, model.kv[0].dtype) == ("float16", "float16")

    def test_contradiction(self) -> None:
        text = refusal({**PLAIN, "torch_dtype": "float16"})
        assert "dtype bfloat16 contradicts torch_dtype float16" in text

    def test_kv_dtype(self) -> None:
        model = read("llama-3.1-8b", kv_dtype="float8_e4m3fn")
        assert (model.dtype, model.kv[0].dtype) == ("bfloat16", "float8_e4m3fn")
        assert read("deepseek-v3", kv_dtype="float8_e4m3fn").kv[0].dtype == "float8_e4m3fn"
        assert read("llama-3.1-8b", kv_dtype="auto") == read("llama-3.1-8b")

    def test_state_dtype(self) -> None:
        def parts(**keywords: str) -> list[str]:
            model = read("qwen3.5-text", **keywords)
            return [part.dtype for part in model.state[0].parts]

        assert parts() == ["bfloat16", "float32"]
        assert parts(state_dtype="auto") == ["bfloat16", "bfloat16"]
        assert parts(state_dtype="float16") == ["bfloat16", "float16"]
        assert parts(kv_dtype="float8_e4m3fn") == ["bfloat16", "float32"]

    def test_the_file_may_name_the_state_dtype(self) -> None:
        config = {**shipped("qwen3.5-text"), "mamba_ssm_dtype": "bfloat16"}
        assert read_config(config, "m").state[0].parts[1].dtype == "bfloat16"
        assert read_config(config, "m", state_dtype="float32").state[0].parts[1].dtype == "float32"

    @pytest.mark.parametrize("value", ["fp8", "fp8_e4m3", "int8", "uint8", "", 8, True, ["auto"]])
    def test_unknown_types_list_the_known_ones(self, value: object) -> None:
        pattern = r"kv_dtype is .*expected torch's own name .*bfloat16"
        assert re.search(pattern, refusal(PLAIN, kv_dtype=value))
        assert "dtype is" in refusal({**PLAIN, "dtype": value})
        assert "state_dtype is" in refusal(shipped("mamba2-7b"), state_dtype=value)

    def test_packed_latents_are_refused(self) -> None:
        text = refusal(shipped("deepseek-v3.2"), kv_dtype="float8_e4m3fn")
        assert "kv_dtype is float8_e4m3fn" in text
        assert "give bfloat16" in text


class TestHeads:
    """KV heads and their size."""

    def test_head_dim_follows_from_the_hidden_size(self) -> None:
        """Without head_dim it is hidden_size over the query heads, and never rounded."""
        assert read_config(PLAIN, "m").kv == (gqa(2, 16, (0, 1)),)
        text = refusal({**PLAIN, "hidden_size": 65})
        assert "hidden_size 65 does not divide by num_attention_heads 4; give head_dim" in text

    def test_glm_needs_its_head_dim(self) -> None:
        text = refusal(without(shipped("glm-4.5-air"), "head_dim"))
        assert "hidden_size 4096 does not divide by num_attention_heads 96" in text

    def test_heads_default_to_query_heads(self) -> None:
        """A model without num_key_value_heads is one without grouped queries."""
        assert read_config(without(PLAIN, "num_key_value_heads"), "m").kv[0].total_heads == 4

    def test_query_heads_are_not_needed_beside_both(self) -> None:
        config = {**without(PLAIN, "num_attention_heads"), "head_dim": 32}
        assert read_config(config, "m").kv == (gqa(2, 32, (0, 1)),)

    def test_values_may_have_their_own_size(self) -> None:
        (group,) = read_config({**PLAIN, "head_dim": 192, "v_head_dim": 128}, "m").kv
        assert (group.head_dim, group.v_head_dim) == (192, 128)

    @pytest.mark.parametrize("heads", [3, 8])
    def test_queries_divide_by_kv_heads(self, heads: int) -> None:
        text = refusal({**PLAIN, "num_key_value_heads": heads})
        assert f"num_attention_heads 4 does not divide by num_key_value_heads {heads}" in text


class TestLayers:
    """Which layers keep what, from each way to say it."""

    def test_nested_text_config(self) -> None:
        """Multimodal configurations keep the language model's part one level down."""
        inner = without(PLAIN, "dtype", "model_type")
        config = {"model_type": "gemma3", "torch_dtype": "float16", "text_config": inner}
        model = read_config(config, "m")
        assert (model.model_type, model.dtype, model.kv[0].total_heads) == ("gemma3", "float16", 2)
        model = read_config({**config, "text_config": PLAIN}, "m")
        assert (model.model_type, model.dtype) == ("llama", "bfloat16")
        assert read_config({**PLAIN, "text_config": None}, "m").num_layers == 2

    def test_an_interval_stands_for_a_list(self) -> None:
        """Qwen3-Next's own file has full_attention_interval and no layer_types."""
        listed = shipped("qwen3-next-80b-a3b")
        stated = {**without(listed, "layer_types"), "full_attention_interval": 4}
        assert read_config(stated, "m") == read_config(listed, "m")

    def test_two_rules_must_agree(self) -> None:
        listed = shipped("qwen3-next-80b-a3b")
        assert read_config({**listed, "full_attention_interval": 4}, "m").num_layers == 48
        text = refusal({**listed, "full_attention_interval": 3})
        assert "layer 2 is recurrent by layer_types and full by full_attention_interval" in text

    def test_an_indexer_without_layer_types(self) -> None:
        """DeepSeek-V3.2's own file says it with index_head_dim alone."""
        listed = shipped("deepseek-v3.2")
        assert read_config(without(listed, "layer_types"), "m") == read_config(listed, "m")

    def test_an_indexer_in_some_layers(self) -> None:
        kinds = ["full_attention"] + ["deepseek_sparse_attention"] * 60
        latent, index = read_config({**shipped("deepseek-v3.2"), "layer_types": kinds}, "m").kv
        assert len(latent.layers) == 61
        assert index.layers == tuple(range(1, 61))

    def test_an_indexer_in_no_layer(self) -> None:
        kinds = ["full_attention"] * 61
        text = refusal({**shipped("deepseek-v3.2"), "layer_types": kinds})
        assert "index_head_dim is given, but no layer" in text

    def test_latents_do_not_slide(self) -> None:
        kinds = ["sliding_attention"] * 61
        config = {**shipped("deepseek-v3"), "layer_types": kinds, "sliding_window": 8}
        text = refusal(config)
        assert "contradict" in text
        assert "sliding_attention" in text

    def test_latents_beside_recurrent_layers(self) -> None:
        linear = {key: 2 for key in shipped("qwen3.5-text") if key.startswith("linear_")}
        kinds = ["linear_attention"] * 60 + ["full_attention"]
        model = read_config({**shipped("deepseek-v3"), **linear, "layer_types": kinds}, "m")
        assert [group.layers for group in model.kv] == [(60,)]
        assert len(model.state[0].layers) == 60

    def test_a_window_pattern(self) -> None:
        """Gemma 3's rule: every sixth layer is full."""
        listed = shipped("gemma3-text")
        stated = {**without(listed, "layer_types"), "sliding_window_pattern": 6}
        assert read_config(stated, "m") == read_config(listed, "m")

    def test_a_window_in_no_layer(self) -> None:
        text = refusal({**PLAIN, "sliding_window": 4096})
        assert "sliding_window is 4096, and nothing says in which layers" in text
        model = read_config({**PLAIN, "sliding_window": 4096, "use_sliding_window": False}, "m")
        assert [group.name for group in model.kv] == ["full"]
        assert "sliding_window" not in model.fingerprint

    def test_a_window_switched_off_and_used(self) -> None:
        kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
        text = refusal({**PLAIN, **kinds, "use_sliding_window": False})
        assert "use_sliding_window is false" in text

    def test_a_window_without_a_size(self) -> None:
        text = refusal({**PLAIN, "layer_types": ["sliding_attention"] * 2})
        assert "lacks sliding_window;" in text

    def test_jambas_offset(self) -> None:
        text = refusal({**shipped("jamba-v0.1"), "attn_layer_offset": 8})
        assert "attn_layer_offset is 8; expected less than attn_layer_period 8" in text
        model = read_config({**shipped("jamba-v0.1"), "attn_layer_offset": 0}, "m")
        assert model.kv[0].layers == (0, 8, 16, 24)

    @pytest.mark.parametrize(
        ("kinds", "words"),
        [
            (["full_attention"], "layer_types has 1 entries; expected num_hidden_layers 2"),
            (["full_attention"] * 3, "has 3 entries"),
            ([], "has 0 entries"),
            (["full_attention", "conv"], "layer_types has conv; known are full_attention"),
            (["full_attention", "chunked_attention"], "layer_types has chunked_attention"),
            ("full_attention", "expected a list of names"),
            (["full_attention", 1], "expected a list of names"),
            ({"0": "full_attention"}, "expected a list of names"),
        ],
    )
    def test_senseless_layer_types(self, kinds: object, words: str) -> None:
        assert words in refusal({**PLAIN, "layer_types": kinds})

    @pytest.mark.parametrize(
        ("key", "value"),
        [("is_encoder_decoder", True), ("num_kv_shared_layers", 4), ("mamba_n_heads", 128)],
    )
    def test_keys_that_change_caches_unknown_to_us(self, key: str, value: object) -> None:
        """What this reader does not know is refused, and not left out."""
        text = refusal({**PLAIN, key: value})
        assert key in text
        assert "register from the running engine" in text
        assert read_config({**PLAIN, key: 0}, "m") == read_config(PLAIN, "m")


class TestRefusals:
    """Missing and senseless input is told with key, value and what was expected."""

    @pytest.mark.parametrize("config", [None, [], "{}", 3, [("model_type", "llama")]])
    def test_no_object(self, config: object) -> None:
        assert "expected a JSON object" in refusal(config)

    @pytest.mark.parametrize("nested", [[], "x", 1, False])
    def test_no_object_inside(self, nested: object) -> None:
        assert "text_config is" in refusal({**PLAIN, "text_config": nested})

    def test_all_missing_keys_in_one_error(self) -> None:
        text = refusal({"model_type": "llama", "num_hidden_layers": 2})
        assert text == (
            "m (model_type llama) lacks hidden_size, dtype (or torch_dtype), num_key_value_heads"
            " (or num_attention_heads), head_dim (or num_attention_heads); expected the config.json"
            " that lies beside the model's weights"
        )
        assert "lacks model_type, num_hidden_layers, hidden_size, dtype" in refusal({})

    @pytest.mark.parametrize(
        ("name", "key"),
        [
            ("deepseek-v3", "qk_rope_head_dim"),
            ("deepseek-v3.2", "kv_lora_rank"),
            ("deepseek-v3.2", "index_head_dim"),
            ("gpt-oss-120b", "sliding_window"),
            ("jamba-v0.1", "attn_layer_period"),
            ("jamba-v0.1", "attn_layer_offset"),
            ("jamba-v0.1", "mamba_expand"),
            ("jamba-v0.1", "mamba_d_conv"),
            ("jamba-v0.1", "mamba_d_state"),
            ("mamba2-7b", "n_groups"),
            ("mamba2-7b", "state_size"),
            ("mamba2-7b", "num_heads"),
            ("mamba2-7b", "head_dim"),
            ("mamba2-7b", "expand"),
            ("mamba2-7b", "conv_kernel"),
            ("qwen3-next-80b-a3b", "layer_types"),
            ("qwen3-next-80b-a3b", "linear_num_key_heads"),
            ("qwen3-next-80b-a3b", "linear_num_value_heads"),
            ("qwen3-next-80b-a3b", "linear_key_head_dim"),
            ("qwen3-next-80b-a3b", "linear_value_head_dim"),
            ("qwen3-next-80b-a3b", "linear_conv_kernel_dim"),
        ],
    )
    @pytest.mark.parametrize("null", [False, True])
    def test_each_missing_key(self, name: str, key: str, *, null: bool) -> None:
        """Null is absent, as transformers writes it."""
        config = {**shipped(name), key: None} if null else without(shipped(name), key)
        assert re.search(rf"lacks (.*, )?{key}\b", refusal(config))

    def test_an_unknown_recurrent_architecture(self) -> None:
        text = refusal({**PLAIN, "layer_types": ["linear_attention", "full_attention"]})
        assert "lacks linear_num_key_heads, linear_num_value_heads" in text
        assert "the recurrent states known here are" in text

    @pytest.mark.parametrize("value", [0, -1, "8", 1.5, 8.0, True, False, [8], {}, 1 << 40])
    @pytest.mark.parametrize(
        ("name", "key"),
        [
            ("llama-3.1-8b", "num_hidden_layers"),
            ("llama-3.1-8b", "hidden_size"),
            ("llama-3.1-8b", "num_attention_heads"),
            ("llama-3.1-8b", "num_key_value_heads"),
            ("llama-3.1-8b", "head_dim"),
            ("gpt-oss-120b", "sliding_window"),
            ("deepseek-v3.2", "kv_lora_rank"),
            ("deepseek-v3.2", "qk_rope_head_dim"),
            ("deepseek-v3.2", "index_head_dim"),
            ("jamba-v0.1", "attn_layer_period"),
            ("jamba-v0.1", "mamba_expand"),
            ("jamba-v0.1", "mamba_d_conv"),
            ("jamba-v0.1", "mamba_d_state"),
            ("mamba2-7b", "n_groups"),
            ("mamba2-7b", "conv_kernel"),
            ("qwen3-next-80b-a3b", "linear_num_key_heads"),
            ("qwen3-next-80b-a3b", "linear_value_head_dim"),
            ("qwen3-next-80b-a3b", "linear_conv_kernel_dim"),
        ],
    )
    def test_senseless_numbers(self, name: str, key: str, value: object) -> None:
        """Also false and 0, which are there and are no absence."""
        text = refusal({**shipped(name), key: value})
        assert f"{key} is " in text
        assert "expected a whole number from " in text

    @pytest.mark.parametrize("value", [-1, True, "1", 1.0])
    def test_senseless_drafts(self, value: object) -> None:
        assert "expected a whole number from 0" in refusal(
            {**PLAIN, "num_nextn_predict_layers": value}
        )
        assert read_config({**PLAIN, "num_nextn_predict_layers": 0}, "m").draft_layers == 0
        assert read_config({**PLAIN, "num_nextn_predict_layers": None}, "m").draft_layers == 0

    @pytest.mark.parametrize(
        ("name", "change", "words"),
        [
            ("deepseek-v3.2", {"index_head_dim": 64}, "index_head_dim is 64; expected a multiple"),
            ("mamba2-7b", {"num_heads": 64}, "is 8192, but num_heads 64 times head_dim 64 is 4096"),
            ("mamba2-7b", {"n_groups": 7}, "num_heads 128 does not divide by n_groups 7"),
            ("mamba2-7b", {"conv_kernel": 1}, "conv_kernel is 1; expected a whole number from 2"),
            (
                "qwen3.5-text",
                {"linear_num_key_heads": 12},
                "linear_num_value_heads 32 does not divide by linear_num_key_heads 12",
            ),
            ("llama-3.1-8b", {"model_type": 3}, "model_type is 3; expected a name"),
            ("llama-3.1-8b", {"rope_theta": "1e6"}, "rope_theta is '1e6'; expected a positive"),
            ("llama-3.1-8b", {"rope_theta": True}, "rope_theta is True"),
            ("llama-3.1-8b", {"rope_scaling": 2}, "rope_scaling is 2; expected an object"),
            ("llama-3.1-8b", {"rope_scaling": {"x": {1, 2}}}, "rope_scaling is"),
            ("llama-3.1-8b", {"use_qk_norm": "yes"}, "use_qk_norm is 'yes'; expected true or"),
            ("llama-3.1-8b", {"quantization_config": []}, "quantization_config is []"),
        ],
    )
    def test_contradictions(self, name: str, change: dict[str, Any], words: str) -> None:
        assert words in refusal({**shipped(name), **change})

    def test_long_values_are_cut(self) -> None:
        assert len(refusal({**PLAIN, "head_dim": "9" * 5000})) < 300

    @given(
        key=st.sampled_from(
            sorted({key for p in SHIPPED.glob("*.json") for key in shipped(p.stem)})
        ),
        value=st.none()
        | st.booleans()
        | st.integers(-2, 5000)
        | st.floats()
        | st.text(max_size=3)
        | st.lists(st.text(max_size=3), max_size=2)
        | st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
        name=st.sampled_from(sorted(path.stem for path in SHIPPED.glob("*.json"))),
    )
    def test_one_damaged_key(self, name: str, key: str, value: object) -> None:
        """Whatever stands under a key, the answer is a model or a ConfigError."""
        try:
            model = read_config({**shipped(name), key: value}, "m")
        except ConfigError:
            return
        assert all(len(text) <= 200 for text in model.fingerprint.values())


class TestFingerprint:
    """What changes the meaning of a cached byte, and nothing else."""

    def test_a_plain_model(self) -> None:
        assert read("qwen3-32b").fingerprint == {
            "model_type": "qwen3",
            "num_hidden_layers": "64",
            "hidden_size": "5120",
            "num_attention_heads": "64",
            "num_key_value_heads": "8",
            "head_dim": "128",
            "layer_kinds": "64F",
        }

    def test_latents_leave_out_what_files_differ_in(self) -> None:
        """DeepSeek's head_dim is 64 in one dump and 192 in another of the same model."""
        parts = read("deepseek-v3.2").fingerprint
        assert {"head_dim", "num_key_value_heads", "v_head_dim"}.isdisjoint(parts)
        sizes = ("kv_lora_rank", "qk_rope_head_dim", "index_head_dim", "layer_kinds")
        assert [parts[key] for key in sizes] == ["512", "64", "128", "61I"]

    def test_layer_kinds(self) -> None:
        assert read("qwen3-next-80b-a3b").fingerprint["layer_kinds"] == "3R1F" * 12
        assert read("gemma3-text").fingerprint["layer_kinds"] == "5S1F" * 4 + "2S"
        assert read("gpt-oss-120b").fingerprint["sliding_window"] == "128"

    def test_long_values_become_digests(self) -> None:
        kinds = ["full_attention", "linear_attention"] * 100
        config = {**shipped("qwen3.5-text"), "num_hidden_layers": 200, "layer_types": kinds}
        assert re.fullmatch(r"[0-9a-f]{32}", read_config(config, "m").fingerprint["layer_kinds"])

    @pytest.mark.parametrize(
        "change",
        [
            {"_name_or_path": "/data/x"},
            {"transformers_version": "5.0"},
            {"max_position_embeddings": 1},
            {"dtype": "float16"},
            {"architectures": ["Other"]},
            {"rope_scaling": None},
            {"rope_parameters": {"rope_type": "default"}},
            {"quantization_config": {"quant_method": "fp8"}},
        ],
    )
    def test_what_is_not_in_it(self, change: dict[str, Any]) -> None:
        assert read_config({**PLAIN, **change}, "other").fingerprint == (
            read_config(PLAIN, "m").fingerprint
        )

    @pytest.mark.parametrize(
        ("change", "key", "value"),
        [
            ({"rope_theta": 500000.0}, "rope_theta", "500000"),
            ({"rope_theta": 500000}, "rope_theta", "500000"),
            ({"rope_local_base_freq": 10000.0}, "rope_local_base_freq", "10000"),
            ({"partial_rotary_factor": 0.25}, "partial_rotary_factor", "0.25"),
            ({"use_qk_norm": False}, "use_qk_norm", "false"),
            (
                {"rope_scaling": {"type": "yarn", "factor": 4.0}},
                "rope_scaling",
                '{"factor":4,"rope_type":"yarn"}',
            ),
            (
                {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0, 1.5]}},
                "rope_scaling",
                '{"rope_type":"longrope","short_factor":[1,1.5]}',
            ),
            (
                {"quantization_config": {"kv_cache_scheme": {"type": "float", "num_bits": 8}}},
                "quantization_kv",
                '{"kv_cache_scheme":{"num_bits":8,"type":"float"}}',
            ),
        ],
    )
    def test_parts(self, change: dict[str, Any], key: str, value: str) -> None:
        assert read_config({**PLAIN, **change}, "m").fingerprint[key] == value

    def test_both_ways_to_state_the_rotation(self) -> None:
        """Transformers 4 and 5 write one model differently."""
        old = {
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.5,
            "rope_scaling": {"type": "yarn", "factor": 4.0},
        }
        new = {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4,
                "rope_theta": 1000000,
                "partial_rotary_factor": 0.5,
            }
        }
        first = read_config({**PLAIN, **old}, "m").fingerprint
        assert first == read_config({**PLAIN, **new}, "m").fingerprint
        text = refusal({**PLAIN, **new, "rope_theta": 5})
        assert "rope_theta is 5 and, in rope_parameters, 1000000" in text

    def test_rotation_by_layer_kind(self) -> None:
        """Gemma 3 has one for sliding and one for full layers."""
        by_kind = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
        parts = read_config({**PLAIN, "rope_parameters": by_kind}, "m").fingerprint
        assert parts["rope_parameters"] == (
            '{"full_attention":{"rope_theta":1000000},"sliding_attention":{"rope_theta":10000}}'
        )
        assert "rope_theta" not in parts


class TestKeepLayers:
    """A model's first layers, to scale a demo down."""

    def test_all_kinds_are_cut(self) -> None:
        model = read("qwen3-next-80b-a3b")
        small = keep_layers(model, 8)
        assert small.num_layers == 8
        assert [group.layers for group in small.kv] == [(3, 7)]
        assert [state.layers for state in small.state] == [(0, 1, 2, 4, 5, 6)]
        assert small.fingerprint == model.fingerprint
        assert small.kv[0].total_heads == model.kv[0].total_heads

    def test_empty_groups_disappear(self) -> None:
        assert keep_layers(read("qwen3-next-80b-a3b"), 3).kv == ()
        assert [group.name for group in keep_layers(read("gpt-oss-120b"), 1).kv] == ["swa"]
        small = keep_layers(read("deepseek-v3.2"), 2)
        assert [(group.name, group.layers) for group in small.kv] == [
            ("mla", (0, 1)),
            ("index", (0, 1)),
        ]

    def test_all_layers_are_the_model(self) -> None:
        assert keep_layers(read("jamba-v0.1"), 32) == read("jamba-v0.1")

    @pytest.mark.parametrize("count", [0, -1, 33, True, 1.0, "2", None])
    def test_senseless_counts(self, count: Any) -> None:  # noqa: ANN401  deliberately wrong
        with pytest.raises(ConfigError, match=r"count is .* from 1 to the model's 32 layers"):
            keep_layers(read("jamba-v0.1"), count)
