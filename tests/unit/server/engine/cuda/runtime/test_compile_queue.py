"""The queue of compilations."""

from __future__ import annotations

import threading
import time
from concurrent.futures import wait

import pytest

from warpfit.errors import UnavailableError
from warpfit_server.engine.cuda.runtime.compile_queue import CompileQueue


@pytest.fixture
def queue(request):
    made = CompileQueue(getattr(request, "param", 1))
    yield made
    made.close()


four_threads = pytest.mark.parametrize("queue", [4], indirect=True)


@four_threads
def test_a_key_is_compiled_once_at_a_time(queue):
    runs, gate = [], threading.Event()

    def work() -> int:
        runs.append(1)
        gate.wait(10)
        return 7

    futures = [queue.submit("key", work) for _ in range(10)]
    time.sleep(0.1)
    gate.set()
    assert {future.result(10) for future in futures if future is not None} == {7}
    assert len(runs) == 1


@four_threads
def test_background_jobs_take_half_of_the_threads(queue):
    gate, running = threading.Event(), []

    def submit(name: str, *, urgent: bool = False) -> None:
        queue.submit(name, lambda: (running.append(name), gate.wait(10)), urgent=urgent)

    def wait_for(jobs: int) -> None:
        deadline = time.monotonic() + 10
        while len(running) < jobs and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)  # for more than may run

    for number in range(6):
        submit(f"background {number}")
    wait_for(2)
    assert sorted(running) == ["background 0", "background 1"]
    for number in range(5):
        submit(f"waited for {number}", urgent=True)
    submit("background 2", urgent=True)
    wait_for(6)
    assert sorted(running[2:]) == [f"waited for {number}" for number in range(4)]
    gate.set()
    wait_for(11)
    assert len(set(running)) == len(running) == 11


def test_errors_reach_the_future_and_do_not_stop_the_threads(queue):
    def fail() -> None:
        raise ValueError("cannot compile")

    with pytest.raises(ValueError, match="cannot compile"):
        queue.submit("bad", fail).result(10)
    assert queue.submit("good", lambda: 3).result(10) == 3


def test_closing_fails_waiting_and_later_jobs(queue):
    started, gate = threading.Event(), threading.Event()
    running = queue.submit("running", lambda: (started.set(), gate.wait(10))[1])
    assert started.wait(10)
    queue.submit("running, too", lambda: gate.wait(10), urgent=True)
    queued = queue.submit("queued", lambda: 2)
    assert queue.submit("queued", lambda: 2, urgent=True) is queued
    closer = threading.Thread(target=queue.close)
    closer.start()
    assert wait([queued], 10).done
    with pytest.raises(UnavailableError):
        queued.result(0)
    gate.set()
    closer.join(10)
    assert running.result(10)
    with pytest.raises(UnavailableError):
        queue.submit("late", lambda: 3, urgent=True)
    assert queue.submit("late", lambda: 3) is None
