"""The bytes that source and destination compute each for themselves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankgate.coordinator.cli.demo.caches import Caches
from rankgate.coordinator.cli.demo.job import Job
from rankgate.coordinator.cli.demo.model import CacheModel
from rankgate.coordinator.cli.demo.pattern import expected_bytes, origin
from rankgate.proto.geometry import heads_of_rank

BASE: dict[str, Any] = {
    "seed": 1,
    "request": "r-1",
    "layer": 3,
    "part": "k",
    "heads": range(4),
    "positions": range(32),
    "head_bytes": 64,
}


def job(dtype: str = "bfloat16", **changes: object) -> Job:
    """Return a small job."""
    model = CacheModel(
        name="m", model_type="llama", layers=(0, 3), kv_heads=4, head_dim=6, dtype=dtype
    )
    plain: dict[str, Any] = {
        "daemon": "",
        "model": model,
        "prefill_tp": 2,
        "decode_tp": 4,
        "page_size": 4,
        "pages": 3,
        "requests": 4,
        "concurrency": 2,
        "seed": 5,
        "profile": "native",
        "fault": "",
        "deadline": 0.0,
    }
    return Job(**(plain | changes))


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 2},
        {"request": "r-2"},
        {"layer": 4},
        {"part": "v"},
        {"heads": range(1, 5)},
        {"positions": range(1, 33)},
    ],
)
def test_every_coordinate_changes_nearly_every_byte(change: dict[str, Any]) -> None:
    """A byte in the place of its neighbour agrees by chance only, about once in 256."""
    same = (expected_bytes(**BASE) == expected_bytes(**(BASE | change))).float().mean()
    assert same < 0.01


def test_bytes_of_one_head_differ_among_each_other() -> None:
    """A shift inside a head is seen: all byte values occur about equally often."""
    counts = torch.bincount(expected_bytes(**BASE).flatten().int(), minlength=256)
    assert counts.min() > 0
    assert counts.max() < 3 * counts.float().mean()


@given(
    first=st.integers(0, 7),
    stop=st.integers(1, 8),
    begin=st.integers(0, 20),
    head_bytes=st.integers(1, 40),
)
def test_a_part_computed_alone_equals_the_part_of_the_whole(
    first: int, stop: int, begin: int, head_bytes: int
) -> None:
    """Whoever computes some heads and tokens gets what another gets who computes all."""
    sizes = BASE | {"head_bytes": head_bytes}
    whole = expected_bytes(**(sizes | {"heads": range(8), "positions": range(24)}))
    heads = range(first, max(first, stop))
    part = expected_bytes(**(sizes | {"heads": heads, "positions": range(begin, 24)}))
    assert torch.equal(part, whole[begin:, first : heads.stop])


def test_the_pattern_is_splitmix_in_plain_integers() -> None:
    """An independent computation, one byte at a time, gives the same bytes on every machine."""
    small = BASE | {"heads": range(2, 4), "positions": range(5, 8), "head_bytes": 12}
    found = expected_bytes(**small)
    start = origin(1, "r-1", 3, "k")
    for position in range(3):
        for head in range(2):
            for byte in range(12):
                z = start + (position + 5) * 0x9E3779B97F4A7C15 + (head + 2) * 0xC2B2AE3D27D4EB4F
                z = (z + byte // 8 * 0x165667B19E3779F9) % 2**64
                z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
                z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
                z ^= z >> 31
                assert int(found[position, head, byte]) == z >> 8 * (byte % 8) & 255


def caches(of: Job, tp_size: int, tp_rank: int) -> Caches:
    """Return the caches of one rank."""
    return Caches(of, heads_of_rank(of.model.kv_heads, tp_size, tp_rank))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn"])
def test_what_a_source_fills_is_what_a_destination_expects(dtype: str) -> None:
    """Heads copied from two sources' pages into four destinations' other pages all verify."""
    small = job(dtype)
    sources = [caches(small, 2, rank) for rank in range(2)]
    here, there = [5, 0, 7], [1, 2, 11]
    for source in sources:
        source.fill("r", here)
    for rank in range(4):
        destination = caches(small, 4, rank)
        source = sources[rank // 2]
        for mine, theirs in zip(
            destination.keys + destination.values, source.keys + source.values, strict=True
        ):
            mine[torch.tensor(there), 0] = theirs[torch.tensor(here), rank % 2]
        assert destination.verify("r", there) == (0, "")
        assert destination.verify("other", there).wrong > 0
        assert destination.nonzero_bytes(there) > 0
        destination.wipe(there)
        assert destination.nonzero_bytes(range(small.pool)) == 0


def corrupt_nothing(_cache: torch.Tensor) -> None:
    """Leave all as it is."""


def corrupt_one_byte(cache: torch.Tensor) -> None:
    """Flip one byte of page 2, head 1, token 3."""
    cache.view(torch.uint8)[2, 1, 3, 7] ^= 0xFF


@pytest.mark.parametrize(
    ("corrupt", "wrong", "first"),
    [
        (corrupt_nothing, 0, ""),
        (corrupt_one_byte, 1, "request r layer 3 v page 1 head 3 token 7 byte 7"),
    ],
)
def test_one_wrong_byte_is_counted_and_placed(
    corrupt: Callable[[torch.Tensor], None], wrong: int, first: str
) -> None:
    """A mismatch is told by layer, part, page, global head, token position and byte."""
    rank = caches(job(), 2, 1)
    rank.fill("r", [4, 2])
    corrupt(rank.values[1])
    assert rank.verify("r", [4, 2]) == (wrong, first)


def test_requests_take_from_one_page_to_all() -> None:
    """The stream has long and short requests; none is empty or larger than allowed."""
    lengths = [job(pages=5).pages_of(index) for index in range(10)]
    assert lengths[0] == 5
    assert set(lengths) == {1, 2, 3, 4, 5}
