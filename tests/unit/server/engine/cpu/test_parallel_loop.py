"""The parallel loop: each chunk runs once, on any thread, whatever other callers do."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("numba")

from warpfit_server.engine.cpu import parallel_loop
from warpfit_server.engine.cpu.chunked_work import ChunkedWork, Cut
from warpfit_server.engine.cpu.codegen import parts
from warpfit_server.engine.cpu.threads import ParallelLoop
from warpfit_server.engine.native.arguments import CANCELLED, FAILED, FINISHED, RANGE
from warpfit_server.system.compile_cache import usable_cache_directory

_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


@pytest.fixture(scope="module")
def code():
    with usable_cache_directory(None) as kept:
        return parts.load_parallel(parts.directory_of(kept))


@pytest.fixture(params=[1, 2, 5])
def loop(request, code):
    loop = ParallelLoop(request.param, code)
    yield loop
    loop.close()
    assert not any(thread.is_alive() for thread in loop._helpers)


def work_of(run_chunk, count, cost=10**9):
    """Work whose chunks are a Python function of their numbers; it returns how a chunk ended."""

    def call(_record, chunk):
        return run_chunk(chunk)

    function = _FUNCTION(call)
    address = ctypes.cast(function, ctypes.c_void_p).value
    ranges = np.array([(n, n + 1) for n in range(count)], dtype=RANGE)
    cut = Cut(ranges, ranges[:1], cost)
    return ChunkedWork(address, (), cut, np.zeros(1, np.uint8)), function


@pytest.mark.parametrize(("first", "stop"), [(0, 1), (0, 2), (0, 3), (7, 19), (0, 50), (0, 200)])
def test_every_chunk_of_a_range_runs_once(loop, first, stop):
    seen = Counter()
    work, _keep = work_of(lambda chunk: (seen.update([chunk]), FINISHED)[1], stop + first)
    loop.run(work, first, stop)
    assert seen == Counter(range(first, stop))


def test_callers_at_the_same_time_have_their_own_chunks(loop):
    """More of them than there are slots; each returns when its own work is done."""

    def caller(number):
        for _ in range(30):
            seen = Counter()
            work, _keep = work_of(lambda chunk, seen=seen: (seen.update([chunk]), FINISHED)[1], 20)
            loop.run(work, 0, 20)
            assert seen == Counter(range(20))
        return number

    with ThreadPoolExecutor(7) as pool:
        assert list(pool.map(caller, range(7))) == list(range(7))


@pytest.mark.parametrize("ended", [CANCELLED, FAILED])
def test_no_more_chunks_run_after_one_was_cancelled_or_failed(loop, ended):
    seen = []

    def chunk(number):
        seen.append(number)
        return ended if number == 3 else FINISHED

    work, _keep = work_of(chunk, 1_000)
    if ended == FAILED:
        with pytest.raises(MemoryError):
            loop.run(work, 0, 1_000)
    else:
        loop.run(work, 0, 1_000)
    assert len(seen) < 30
    loop.run(work, 10, 12)  # the slot can be used again
    assert seen[-2:] in ([10, 11], [11, 10])


def test_helpers_run_chunks_of_a_caller(code):
    loop = ParallelLoop(3, code)
    threads = set()
    together = threading.Barrier(3, timeout=20)

    def chunk(_number):
        threads.add(threading.get_ident())
        together.wait()
        return FINISHED

    work, _keep = work_of(chunk, 3)
    loop.run(work, 0, 3)
    assert len(threads) == 3
    loop.close()


def test_small_work_starts_no_helpers(code):
    loop = ParallelLoop(4, code)
    work, _keep = work_of(lambda chunk: FINISHED, 10, cost=1_000)
    loop.run(work, 0, 10)
    assert not loop._helpers
    loop.close()


def test_idle_helpers_sleep(code):
    loop = ParallelLoop(3, code)
    work, _keep = work_of(lambda chunk: FINISHED, 10)
    loop.run(work, 0, 10)
    deadline = time.monotonic() + 10
    while loop._words[parallel_loop.ASLEEP] < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert loop._words[parallel_loop.ASLEEP] == 2
    loop.close()
