"""The parallel loop: each chunk runs once, on any thread, whatever other callers do."""

import ctypes
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from support.servers.server import eventually
from warpfit_server.engine.native import intrinsics
from warpfit_server.engine.native.intrinsics import CANCELLED, FAILED, FINISHED, NEVER, ParallelLoop

_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


@pytest.fixture(params=[1, 2, 5])
def loop(request):
    loop = ParallelLoop(request.param)
    yield loop
    loop.close()
    assert not any(thread.is_alive() for thread in loop._helpers)


def run(loop, run_chunk, first, stop, helpers=100, ends=(NEVER, NEVER)):
    """Run chunks that are a Python function of their numbers, which returns how they ended."""
    function = _FUNCTION(lambda _block, chunk: run_chunk(chunk))
    address = ctypes.cast(function, ctypes.c_void_p).value
    block = np.zeros(2, dtype=np.int64)
    return loop.begin(address, block, first, stop, helpers, ends).result()


def counting(seen):
    return lambda chunk: (seen.update([chunk]), FINISHED)[1]


@pytest.mark.parametrize(("first", "stop"), [(0, 1), (0, 2), (0, 3), (7, 19), (0, 50), (0, 200)])
def test_every_chunk_of_a_range_runs_once(loop, first, stop):
    seen = Counter()
    assert run(loop, counting(seen), first, stop) == stop
    assert seen == Counter(range(first, stop))


@pytest.mark.parametrize("waits_from", [0, 10, 49])
@pytest.mark.parametrize("is_over", [False, True])
def test_a_task_whose_time_is_over_ends_if_others_wait(loop, waits_from, is_over):
    seen, told = Counter(), [0]
    ends = (0 if is_over else NEVER - 1, NEVER)

    def chunk(number):
        seen.update([number])
        if number == waits_from:
            loop.others_wait(True)
            told[:] = [max(seen)]
        return FINISHED

    loop.others_wait(waits_from == 0)
    stop = run(loop, chunk, 0, 50, ends=ends)
    assert seen == Counter(range(stop))
    # Each of five threads may have taken a chunk that has not been seen yet.
    assert waits_from < stop <= (told[0] + 6 if is_over else 50)
    assert is_over or stop == 50
    loop.others_wait(False)
    seen.clear()
    assert run(loop, counting(seen), 0, 50, ends=ends) == 50
    assert seen == Counter(range(50))


def test_a_task_ends_late_although_nobody_waits(loop):
    began, seen = time.monotonic_ns(), Counter()

    def chunk(number):
        seen.update([number])
        while time.monotonic_ns() <= began + 2_000_000 and number == 20:
            pass
        return FINISHED

    stop = run(loop, chunk, 0, 100_000, ends=(began + 1_000_000, began + 2_000_000))
    assert seen == Counter(range(stop))
    assert 0 < stop < 100_000
    assert run(loop, lambda number: FINISHED, stop, 100_000, ends=(NEVER, NEVER)) == 100_000


def test_callers_at_the_same_time_have_their_own_chunks(loop):
    def caller(number):
        for _ in range(30):
            seen = Counter()
            run(loop, counting(seen), 0, 20)
            assert seen == Counter(range(20))
        return number

    with ThreadPoolExecutor(7) as pool:
        assert list(pool.map(caller, range(7))) == list(range(7))


@pytest.mark.parametrize("ended", [CANCELLED, FAILED])
def test_no_more_chunks_run_after_one_was_cancelled_or_failed(loop, ended):
    seen = []

    def chunk(number):
        seen.append(number)
        time.sleep(0.001 * (number > 3))  # gives the thread of chunk 3 Python's lock
        return ended if number == 3 else FINISHED

    if ended == FAILED:
        with pytest.raises(MemoryError):
            run(loop, chunk, 0, 1_000)
    else:
        run(loop, chunk, 0, 1_000)
    assert len(seen) < 30
    run(loop, chunk, 10, 12)  # the slot can be used again
    assert seen[-2:] in ([10, 11], [11, 10])


@pytest.mark.parametrize(("ended", "chunks"), [(FINISHED, [6]), (CANCELLED, [1, 2])])
def test_helpers_run_chunks_while_the_caller_does_other_things(ended, chunks):
    loop, go, seen = ParallelLoop(3), threading.Event(), Counter()

    def chunk(number):
        go.wait(20)
        seen.update([number])
        return ended

    function = _FUNCTION(lambda _block, number: chunk(number))
    address = ctypes.cast(function, ctypes.c_void_p).value
    task = loop.begin(address, np.zeros(2, dtype=np.int64), 0, 6, helpers=100)
    assert not task.done()
    go.set()
    eventually(task.done)
    assert seen == Counter(range(len(seen)))
    assert len(seen) in chunks  # each of two helpers may have taken one
    task.result()
    loop.close()


@pytest.mark.parametrize("expects", [False, True])
def test_idle_helpers_sleep(expects):
    """Also those that were woken for a task that has not begun."""
    loop = ParallelLoop(3)
    run(loop, lambda chunk: FINISHED, 0, 10)
    if expects:
        loop.expect(100)
        time.sleep(0.1)  # by then they have woken up
    eventually(lambda: loop._words[intrinsics.ASLEEP] == 2)
    loop.close()
