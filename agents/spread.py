"""A seeded spread, so that many ranks do not repeat themselves in one instant."""

from __future__ import annotations

from typing import Final

# Knuth's MMIX generator; the seed comes in as an argument, so that pure code rolls no dice.
_FACTOR: Final = 6364136223846793005
_STEP: Final = 1442695040888963407
_MASK: Final = (1 << 64) - 1


class Spread:
    """Gives factors in [0.75, 1.25).

    Invariant: equal seeds give equal factors in equal order.
    """

    def __init__(self, seed: int) -> None:
        """Begin from any integer."""
        self._state = seed & _MASK

    def __call__(self) -> float:
        """Return the next factor."""
        self._state = (self._state * _FACTOR + _STEP) & _MASK
        return 0.75 + (self._state >> 32) / (1 << 33)
