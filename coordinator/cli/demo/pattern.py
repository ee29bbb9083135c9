"""What every byte of a request's cache must be, computed from its coordinates alone.

Source and destination compute it each for themselves, so that agreement proves that every byte
went to its place: the value depends on the request, layer, part, *global* head, token position
and byte, and on nothing that only one side knows (pages, local heads, ranks).
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

_WORD: Final = 8
_MASK: Final = (1 << 64) - 1
# Odd constants with well mixed bits, one an axis, so that no two axes can stand for each other.
_POSITION: Final = 0x9E3779B97F4A7C15
_HEAD: Final = 0xC2B2AE3D27D4EB4F
_PLACE: Final = 0x165667B19E3779F9
# The finalizer of SplitMix64.
_FIRST: Final = 0xBF58476D1CE4E5B9
_SECOND: Final = 0x94D049BB133111EB


def expected_bytes(
    *,
    seed: int,
    request: str,
    layer: int,
    part: str,
    heads: range,
    positions: range,
    head_bytes: int,
) -> torch.Tensor:
    """Return the bytes of some heads at some token positions, as uint8.

    Args:
        seed: of the whole run.
        request: the request's id.
        layer: global layer id.
        part: ``k`` or ``v``.
        heads: global head indices.
        positions: token positions in the request.
        head_bytes: bytes of one head of one token.

    Returns:
        A tensor of shape ``[len(positions), len(heads), head_bytes]``.
    """
    import torch

    words = -(-head_bytes // _WORD)
    start = _signed(origin(seed, request, layer, part))
    value = (
        (torch.arange(positions.start, positions.stop) * _signed(_POSITION))[:, None, None]
        + (torch.arange(heads.start, heads.stop) * _signed(_HEAD))[None, :, None]
        + (torch.arange(words) * _signed(_PLACE))[None, None, :]
    )
    value += start
    _mix(value, 30, _FIRST)
    _mix(value, 27, _SECOND)
    value ^= _shifted(value, 31)
    return value.view(torch.uint8)[..., :head_bytes]


def origin(seed: int, request: str, layer: int, part: str) -> int:
    """Return the 64 bits from which one layer's part of one request starts."""
    name = f"{seed}/{request}/{layer}/{part}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")


def _mix(value: torch.Tensor, shift: int, factor: int) -> None:
    value ^= _shifted(value, shift)
    value *= _signed(factor)


def _shifted(value: torch.Tensor, shift: int) -> torch.Tensor:
    """Return a logical right shift: torch's own repeats the sign."""
    return (value >> shift) & ((1 << (64 - shift)) - 1)


def _signed(word: int) -> int:
    """Return 64 unsigned bits as torch's signed integer; products wrap alike."""
    word &= _MASK
    return word - (1 << 64) if word >> 63 else word
