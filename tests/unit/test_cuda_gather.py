"""Group commit: who works with whom."""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from warpfit.errors import ResourceExhaustedError
from warpfit_server.engine.cuda.gather import Gather


class Recorder:
    """Work that takes as long as the test wants; keeps the groups."""

    def __init__(self) -> None:
        self.groups: list[list[int]] = []
        self.go = threading.Event()
        self.started = threading.Semaphore(0)

    def __call__(self, group):
        self.groups.append(sorted(group))
        self.started.release()
        assert self.go.wait(10)


def waiting(gather):
    return len(gather._waiting)


def test_a_lone_caller_works_at_once():
    done = []
    Gather(done.append, 4).run("a", 1)
    assert done == [[1]]


def test_callers_that_wait_are_done_together():
    recorder = Recorder()
    gather = Gather(recorder, 8)
    with ThreadPoolExecutor(8) as threads:
        first = [threads.submit(gather.run, "a", number) for number in range(2)]
        for _ in first:
            recorder.started.acquire()
        rest = [threads.submit(gather.run, "a", number) for number in range(2, 7)]
        deadline = time.monotonic() + 10
        while waiting(gather) < 5 and time.monotonic() < deadline:
            time.sleep(0.001)
        recorder.go.set()
        for future in [*first, *rest]:
            future.result(10)
    assert sorted(recorder.groups[:2]) == [[0], [1]]
    assert sum(map(len, recorder.groups)) == 7
    assert len(recorder.groups) <= 4


def test_groups_hold_one_key_and_are_bounded():
    recorder = Recorder()
    recorder.go.set()
    gather = Gather(recorder, 3)
    with ThreadPoolExecutor(24) as threads:
        futures = [threads.submit(gather.run, n % 2, 2 * (n // 2) + n % 2) for n in range(400)]
        for future in futures:
            future.result(20)
    assert sorted(itertools.chain.from_iterable(recorder.groups)) == list(range(400))
    for group in recorder.groups:
        assert len(group) <= 3
        assert len({number % 2 for number in group}) == 1


def test_an_error_reaches_all_of_its_group_and_nobody_else():
    def fail(group):
        if 13 in group:
            raise ValueError("no")

    gather = Gather(fail, 4)
    with pytest.raises(ValueError, match="no"):
        gather.run("a", 13)
    gather.run("a", 14)


def test_a_group_that_does_not_fit_is_done_one_by_one():
    done = []
    entered = threading.Semaphore(0)
    go = threading.Event()

    def narrow(group):
        entered.release()
        assert go.wait(10)
        if len(group) > 1 or group == [5]:
            raise ResourceExhaustedError("too much", "DEVICE_MEMORY")
        done.extend(group)

    gather = Gather(narrow, 8)
    with ThreadPoolExecutor(8) as threads:
        first = [threads.submit(gather.run, "a", number) for number in range(2)]
        for _ in first:
            entered.acquire()
        rest = [threads.submit(gather.run, "a", number) for number in range(2, 6)]
        deadline = time.monotonic() + 10
        while waiting(gather) < 4 and time.monotonic() < deadline:
            time.sleep(0.001)
        go.set()
        for future in [*first, *rest[:3]]:
            future.result(10)
        with pytest.raises(ResourceExhaustedError):
            rest[3].result(10)
    assert sorted(done) == [0, 1, 2, 3, 4]
