"""Caches of compiled kernels in memory and on disk."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("cachetools")

from warpfit_server.engine.cuda.runtime.module_cache import DiskCache, LeasedCache


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


def test_files_survive_and_damaged_ones_are_misses(tmp_path):
    cache = DiskCache(tmp_path, 1 << 20)
    cache.put("key", b"machine code" * 100)
    assert DiskCache(tmp_path, 1 << 20).get("key") == b"machine code" * 100
    (entry,) = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 99]
    for damaged in (entry.read_bytes()[:-1], b"", entry.read_bytes()[:-3] + b"xyz"):
        entry.write_bytes(damaged)
        assert DiskCache(tmp_path, 1 << 20).get("key") is None
        cache.put("key", b"machine code" * 100)
        assert cache.get("key") == b"machine code" * 100


def test_the_bytes_on_disk_are_bounded(tmp_path):
    cache = DiskCache(tmp_path, 50_000)
    for number in range(100):
        cache.put(f"key{number}", bytes([number]) * 1000)
    total = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert total <= 55_000
    assert cache.get("key99") == bytes([99]) * 1000


def test_an_unusable_directory_is_no_error(tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("in the way")
    cache = DiskCache(blocker / "kernels", 1 << 20)
    cache.put("key", b"content")
    assert cache.get("key") is None


def test_several_servers_write_the_same_entries(tmp_path):
    def write(worker: int) -> list[bytes | None]:
        cache = DiskCache(tmp_path, 1 << 20)
        found = []
        for number in range(40):
            cache.put(f"key{number}", bytes([number]) * 500)
            found.append(cache.get(f"key{number}"))
        return found

    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(write, range(8)):
            assert found == [bytes([number]) * 500 for number in range(40)]
