"""Sizes of the recurrent states: gated delta nets, Mamba-1 and Mamba-2, before any sharding."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from rankgate.agents.adapters.hf_config import Config
from rankgate.agents.adapters.hf_layers import GDN_KEYS

MAMBA1_KEYS: Final = ("mamba_expand", "mamba_d_conv", "mamba_d_state")
MAMBA2_KEYS: Final = ("expand", "n_groups", "state_size", "conv_kernel", "num_heads", "head_dim")

StateKind = Literal["GDN", "MAMBA1", "MAMBA2"]


class Conv(NamedTuple):
    """The last inputs of a short convolution: ``[dims, kernel - 1]``."""

    dims: int
    kernel: int
    shard_groups: tuple[int, ...] = ()


class Ssm(NamedTuple):
    """The state itself: ``[dims, inner]``."""

    dims: int
    inner: int


Sizes = tuple[Conv, Ssm]


def state_dtype_of(keys: Config, dtype: str, state_dtype: str | None) -> str:
    """Return the element type of a state's ``ssm`` part (see ``read_config``)."""
    if state_dtype is not None:
        return dtype if state_dtype == "auto" else keys.cache_dtype("state_dtype", state_dtype)
    own = keys.value("mamba_ssm_dtype")
    return "float32" if own is None else keys.cache_dtype("mamba_ssm_dtype", own)


def recipe(keys: Config) -> tuple[StateKind, tuple[str, ...]]:
    """Return the kind of the model's recurrent layers and the keys that its sizes need."""
    if keys.model_type == "mamba2":
        return "MAMBA2", MAMBA2_KEYS
    if keys.model_type == "jamba":
        return "MAMBA1", MAMBA1_KEYS
    return "GDN", GDN_KEYS


def state_sizes(keys: Config, kind: StateKind) -> Sizes:
    """Return the sizes of one recurrent layer, over all tp ranks.

    Raises:
        ConfigError: sizes that are senseless or contradict each other.
    """
    if kind == "GDN":
        return _gated_delta_net(keys)
    return _mamba1(keys) if kind == "MAMBA1" else _mamba2(keys)


def _gated_delta_net(keys: Config) -> Sizes:
    """A convolution over [q, k, v], and ``[value heads, value dim, key dim]``.

    Both engines today (vLLM's ``gated_delta_net_state_shape``, SGLang's ``Mamba2StateShape``);
    older vLLM turned the last two axes, which no size can tell.
    """
    key_heads, value_heads = (
        keys.whole("linear_num_key_heads"),
        keys.whole("linear_num_value_heads"),
    )
    key_dim, value_dim = keys.whole("linear_key_head_dim"), keys.whole("linear_value_head_dim")
    if value_heads % key_heads:
        raise keys.error(
            f"linear_num_value_heads {value_heads} does not divide by linear_num_key_heads"
            f" {key_heads}; expected the same number of value heads for each"
        )
    key, value = key_heads * key_dim, value_heads * value_dim
    kernel = keys.whole("linear_conv_kernel_dim", least=2)
    return Conv(2 * key + value, kernel, (key, key, value)), Ssm(value_heads, key_dim * value_dim)


def _mamba1(keys: Config) -> Sizes:
    """A convolution over the inner channels, and ``[inner channels, state]``.

    vLLM's ``mamba1_state_shape``: ``(d_inner / tp, kernel - 1)`` and ``(d_inner / tp, d_state)``.
    SGLang's shapes (configs/mamba_utils.py) are Mamba-2's and its relatives'; it slices a state
    along the same axis (disaggregation/utils.py:907-1042).
    """
    inner = keys.whole("mamba_expand") * keys.whole("hidden_size")
    kernel = keys.whole("mamba_d_conv", least=2)
    return Conv(inner, kernel), Ssm(inner, keys.whole("mamba_d_state"))


def _mamba2(keys: Config) -> Sizes:
    """A convolution over [x, B, C], and ``[heads, head_dim, state]`` (both engines).

    Where n_groups does not divide by tp the engines replicate groups, so that a rank has more
    than its share of these dims (``extra_groups_for_head_shards``); that is up to who shards.
    """
    heads, dim, groups = keys.whole("num_heads"), keys.whole("head_dim"), keys.whole("n_groups")
    expand, hidden = keys.whole("expand"), keys.whole("hidden_size")
    inner, state = expand * hidden, keys.whole("state_size")
    if inner != heads * dim:
        raise keys.error(
            f"expand {expand} times hidden_size {hidden} is {inner}, but num_heads {heads} times"
            f" head_dim {dim} is {heads * dim}; expected the same"
        )
    if heads % groups:
        raise keys.error(
            f"num_heads {heads} does not divide by n_groups {groups}; expected the same number of"
            " heads in each"
        )
    shared = groups * state
    kernel = keys.whole("conv_kernel", least=2)
    return Conv(inner + 2 * shared, kernel, (inner, shared, shared)), Ssm(heads, dim * state)
