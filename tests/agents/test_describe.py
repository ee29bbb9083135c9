"""What is registered comes from the tensors themselves."""

from __future__ import annotations

import pytest
import torch

from rankgate.agents.describe import KvCache, RankDescription, describe_kv
from rankgate.agents.errors import SettingError
from rankgate.proto.descriptor import Coordinates, Layout, Transport
from tests.coordinator.core.harness import id16


def caches(*shape: int, dtype: torch.dtype = torch.bfloat16, layers: int = 2) -> list[torch.Tensor]:
    """Return zeroed tensors."""
    return [torch.zeros(*shape, dtype=dtype) for _ in range(layers)]


def described(layout: str = "HND", dtype: torch.dtype = torch.bfloat16) -> KvCache:
    """Return a cache of 5 pages, 2 heads, 4 tokens; K has 8 elements a head, V 6."""
    axes = (2, 4) if layout == "HND" else (4, 2)
    keys, values = caches(5, *axes, 8, dtype=dtype), caches(5, *axes, 6, dtype=dtype)
    return describe_kv("full", keys, values, layers=[3, 4], total_heads=8, layout=layout)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize(
    ("dtype", "name", "size"),
    [
        (torch.bfloat16, "bfloat16", 2),
        (torch.float8_e4m3fn, "float8_e4m3fn", 1),
        (torch.float32, "float32", 4),
    ],
)
def test_geometry_follows_from_shape_and_dtype(
    layout: str, dtype: torch.dtype, name: str, size: int
) -> None:
    """Pages, heads, tokens, head dimensions and bytes a page, for both layouts."""
    group = described(layout, dtype).group
    assert (group.pages, group.local_heads, group.page_size) == (5, 2, 4)
    assert (group.head_dim, group.v_head_dim, group.total_heads) == (8, 6, 8)
    assert (group.dtype, group.layout, group.kind) == (name, layout, "gqa")
    assert (group.k_item_len, group.v_item_len) == (4 * 2 * 8 * size, 4 * 2 * 6 * size)
    assert group.layers == [3, 4]


def test_regions_are_the_real_buffers() -> None:
    """Length of each region is the tensor's own size in bytes."""
    cache = described()
    tensors = [*cache.keys, *cache.values]
    assert [region.length for region in cache.regions()] == [one.nbytes for one in tensors]
    assert [(region.part, region.layer) for region in cache.regions()] == [
        ("k", 0),
        ("k", 1),
        ("v", 0),
        ("v", 1),
    ]


def test_memory_is_the_cache_itself() -> None:
    """Writing through the view writes into the tensor; nothing is copied."""
    cache = described()
    view = cache.memory()["k"][1]
    assert view.shape == (5, cache.group.k_item_len)
    view[3, :2] = (0x80, 0x3F)  # 1.0 as bfloat16
    assert cache.keys[1][3, 0, 0, 0] == 1.0
    assert int(cache.keys[1].count_nonzero()) == 1


def test_pages_may_lie_apart_in_a_larger_buffer() -> None:
    """K and V interleaved by page, as some engines keep them: each page is one run."""
    pool = torch.zeros(5, 2, 2, 4, 8, dtype=torch.bfloat16)
    cache = describe_kv("full", [pool[:, 0]], [pool[:, 1]], layers=[0], total_heads=2)
    cache.memory()["v"][0][2] = 1
    assert int((pool[2, 1].view(torch.uint8) == 1).sum()) == cache.group.v_item_len
    assert int(pool.view(torch.uint8).count_nonzero()) == cache.group.v_item_len


def test_a_latent_has_no_v_part() -> None:
    """Without V tensors the group is mla."""
    group = describe_kv("full", caches(5, 1, 4, 576), layers=[0, 1], total_heads=1).group
    assert (group.kind, group.v_head_dim, group.v_item_len) == ("mla", 0, 0)


@pytest.mark.parametrize(
    ("keys", "values", "layers", "words"),
    [
        (caches(5, 2, 4, 8), caches(5, 2, 4, 8), [0], "one tensor a layer"),
        (caches(5, 2, 4, 8), caches(5, 2, 4, 8, layers=1), [0, 1], "one tensor a layer"),
        (caches(5, 2, 4, 8), caches(5, 2, 5, 8), [0, 1], "do not fit"),
        (caches(5, 2, 4, 8), caches(5, 2, 4, 8, dtype=torch.float32), [0, 1], "do not fit"),
        (caches(5, 2, 8), [], [0, 1], "expected HND"),
        ([torch.zeros(5, 2, 4, 8), torch.zeros(6, 2, 4, 8)], [], [0, 1], "tensor 0 is"),
        ([torch.zeros(5, 4, 2, 8).transpose(1, 2)], [], [0], "one run of memory"),
        ([torch.zeros(5, 2, 4, 8, dtype=torch.complex64)], [], [0], "dtype complex64"),
        ([torch.zeros(5, 2, 4, 8, device="meta")], [], [0], "on meta"),
        ([torch.zeros(1, 2, 4, 8).expand(5, 2, 4, 8)], [], [0], "one run of memory"),
    ],
)
def test_tensors_that_cannot_be_moved_are_refused_with_what_is_wrong(
    keys: list[torch.Tensor], values: list[torch.Tensor], layers: list[int], words: str
) -> None:
    """Before anything is registered, and naming the tensor."""
    with pytest.raises(SettingError, match=words):
        describe_kv("full", keys, values, layers=layers, total_heads=2)


def test_an_unknown_layout_is_refused() -> None:
    """The two that exist are named."""
    with pytest.raises(SettingError, match="HND"):
        describe_kv("full", caches(5, 2, 4, 8), layers=[0, 1], total_heads=2, layout="DHN")


def test_a_description_becomes_a_descriptor() -> None:
    """Everything an engine says is registered; addresses are the agent's."""
    cache = described()
    description = RankDescription(
        role="decode",
        layout=Layout(tp=4),
        coordinates=Coordinates(tp=1),
        kv=[cache],
        group="g",
        capabilities=["c"],
    )
    transport = Transport(kind="zmq", address="ipc:///x", metadata_digest=id16("m"))
    descriptor = description.descriptor(world="d", rank=1, world_size=4, transport=transport)
    assert (descriptor.world, descriptor.rank, descriptor.role) == ("d", 1, "decode")
    assert descriptor.kv == [cache.group]
    assert (descriptor.group, descriptor.capabilities) == ("g", ["c"])
    assert description.metadata().regions == cache.regions()
