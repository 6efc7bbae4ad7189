"""The cache of loaded modules."""

from __future__ import annotations

import pytest

pytest.importorskip("cachetools")

from warpfit_server.engine.cuda.runtime.module_cache import LeasedCache


def test_the_least_recently_used_value_is_evicted_unless_in_use():
    cache: LeasedCache[str] = LeasedCache(max_bytes=30, max_count=100)
    for name in "abc":
        cache.add(name, name, 10)
        cache.release(name)
    assert cache.lease("a") == "a"  # the oldest, now in use
    cache.add("d", "d", 10)
    assert "a" in cache
    assert "b" not in cache
    cache.release("a")
    cache.release("d")
    cache.add("e", "e", 10)
    assert cache.bytes <= 30


def test_the_number_of_values_is_bounded():
    cache: LeasedCache[int] = LeasedCache(max_bytes=1 << 30, max_count=5)
    for number in range(50):
        cache.add(number, number, 1)
        cache.release(number)
    assert len(cache) == 5
    assert cache.lease(49) == 49
    assert cache.lease(0) is None
