"""Caches of compiled code: leases, caps, damage on disk, several servers, one compilation a key."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

pytest.importorskip("cachetools")

from warpfit.errors import UnavailableError
from warpfit_server.engine.cuda.runtime.module_cache import DiskCache, LeasedCache
from warpfit_server.engine.cuda.runtime.nvjitlink import Workers


def test_least_recently_used_goes_first_but_never_what_is_in_use():
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


def test_number_of_entries_is_capped():
    cache: LeasedCache[int] = LeasedCache(max_bytes=1 << 30, max_count=5)
    for number in range(50):
        cache.add(number, number, 1)
        cache.release(number)
    assert len(cache) == 5
    assert cache.lease(49) == 49
    assert cache.lease(0) is None


def test_disk_entries_survive_and_damage_is_a_miss(tmp_path):
    cache = DiskCache(tmp_path, 1 << 20)
    cache.put("key", b"machine code" * 100)
    assert DiskCache(tmp_path, 1 << 20).get("key") == b"machine code" * 100
    (entry,) = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 99]
    for damaged in (entry.read_bytes()[:-1], b"", entry.read_bytes()[:-3] + b"xyz"):
        entry.write_bytes(damaged)
        assert DiskCache(tmp_path, 1 << 20).get("key") is None
        cache.put("key", b"machine code" * 100)
        assert cache.get("key") == b"machine code" * 100


def test_disk_is_capped(tmp_path):
    cache = DiskCache(tmp_path, 50_000)
    for number in range(100):
        cache.put(f"key{number}", bytes([number]) * 1000)
    total = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert total <= 55_000
    assert cache.get("key99") == bytes([99]) * 1000


def test_a_directory_that_cannot_be_written_is_no_error(tmp_path):
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


def test_a_key_is_compiled_once_at_a_time():
    workers, runs, gate = Workers(4), [], threading.Event()

    def work() -> int:
        runs.append(1)
        gate.wait(10)
        return 7

    try:
        futures = [workers.submit("key", work) for _ in range(10)]
        time.sleep(0.1)
        gate.set()
        assert {future.result(10) for future in futures if future is not None} == {7}
        assert len(runs) == 1
    finally:
        workers.close()


def test_what_nobody_waits_for_takes_half_of_the_threads():
    workers, gate, lock = Workers(4), threading.Event(), threading.Lock()
    running: list[str] = []

    def work(name: str) -> None:
        with lock:
            running.append(name)
        gate.wait(10)

    def submit(name: str, priority: int) -> None:
        workers.submit(name, lambda: work(name), priority)

    try:
        for number in range(6):
            submit(f"background {number}", 1)
        time.sleep(0.1)
        assert running == ["background 0", "background 1"]
        for number in range(3):
            submit(f"waited for {number}", 0)
        time.sleep(0.1)
        assert running[2:] == ["waited for 0", "waited for 1"]
        gate.set()
        deadline = time.monotonic() + 10
        while workers.counters.done < 9 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert workers.counters.done == 9
        assert running[4] == "waited for 2"
    finally:
        gate.set()
        workers.close()


def test_failures_reach_who_waits_and_do_not_stop_the_threads():
    workers = Workers(1)

    def fail() -> None:
        raise ValueError("cannot compile")

    try:
        future = workers.submit("bad", fail)
        assert future is not None
        with pytest.raises(ValueError, match="cannot compile"):
            future.result(10)
        good = workers.submit("good", lambda: 3)
        assert good is not None
        assert good.result(10) == 3
    finally:
        workers.close()


def test_only_what_a_job_computes_is_counted_not_what_it_waits_for():
    """The planner's price of compiling must not depend on how busy the machine was."""
    workers = Workers(1)
    try:
        workers.submit("waits", lambda: time.sleep(0.3)).result(timeout=10)
        workers.submit("computes", lambda: sum(range(3_000_000))).result(timeout=10)
        workers.submit("last", lambda: None).result(timeout=10)  # the others' times are in
        assert 0.005 < workers.counters.seconds < 0.25
    finally:
        workers.close()


def test_closing_fails_who_waits_for_a_queued_job_and_who_comes_later():
    workers, started, gate = Workers(1), threading.Event(), threading.Event()

    def hold() -> int:
        started.set()
        gate.wait(10)
        return 1

    running = workers.submit("running", hold)
    assert started.wait(10)
    queued = workers.submit("queued", lambda: 2)
    assert workers.submit("queued", lambda: 2, priority=0) is queued
    closer = threading.Thread(target=workers.close)
    closer.start()
    assert queued is not None
    assert wait([queued], 10).done
    with pytest.raises(UnavailableError):
        queued.result(0)
    gate.set()
    closer.join(10)
    assert running is not None
    assert running.result(10) == 1
    with pytest.raises(UnavailableError):
        workers.submit("late", lambda: 3, priority=0)
    assert workers.submit("late", lambda: 3) is None
