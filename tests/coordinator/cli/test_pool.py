"""Free pages of a rank."""

import pytest

from rankgate.coordinator.cli.demo.pool import PagePool


def test_pages_are_handed_out_once() -> None:
    """Two takers never hold the same page, and too large a wish waits."""
    pool = PagePool(10, seed=1)
    first, second = pool.take(4), pool.take(4)
    assert first is not None
    assert second is not None
    assert not set(first) & set(second)
    assert pool.take(3) is None
    pool.give(first)
    assert pool.take(3) is not None


def test_order_differs_between_seeds() -> None:
    """Page numbers of two ranks do not agree by accident."""
    assert PagePool(32, seed=1).free != PagePool(32, seed=2).free
    assert sorted(PagePool(32, seed=1).free) == list(range(32))


def test_a_page_is_not_given_back_twice() -> None:
    """Giving a free page back is an error that names it."""
    pool = PagePool(4, seed=0)
    taken = pool.take(2)
    assert taken is not None
    pool.give(taken)
    with pytest.raises(ValueError, match="given back twice"):
        pool.give(taken)
