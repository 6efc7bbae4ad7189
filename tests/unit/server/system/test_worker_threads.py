"""The threads that serve calls."""

import threading
import time
from queue import SimpleQueue

from warpfit_server.system.worker_threads import Workers


def test_threads_are_reused_and_bounded():
    workers, threads, go = Workers(3), set(), threading.Event()
    done = threading.Semaphore(0)

    def task(wait):
        threads.add(threading.current_thread())
        if wait:
            go.wait(10)
        done.release()

    for _ in range(5):
        workers.start("a", task, False)
        assert done.acquire(timeout=10)
        time.sleep(0.01)
    assert len(threads) == 1
    for _ in range(7):
        workers.start("a", task, True)
    assert not workers.has_room("a")
    go.set()
    for _ in range(7):
        assert done.acquire(timeout=10)
    assert len(threads) <= 3


def test_a_thread_survives_a_task_that_fails(caplog):
    workers, done = Workers(1), threading.Event()
    workers.start("a", lambda: 1 / 0)
    workers.start("a", done.set)
    assert done.wait(10)
    assert "serving a call failed" in caplog.text


def test_a_task_is_done_although_the_system_has_no_more_threads(monkeypatch):
    """And nothing is raised on the thread that serves the port, which would end it."""
    workers, done = Workers(2), SimpleQueue()
    workers.start("", done.put, 1)
    assert done.get(timeout=5) == 1

    def start(thread):
        raise RuntimeError("can't start new thread")

    time.sleep(0.01)
    blocked = threading.Event()
    workers.start("", blocked.wait)
    monkeypatch.setattr(threading.Thread, "start", start)
    workers.start("", done.put, 2)
    assert done.empty()
    blocked.set()
    assert done.get(timeout=5) == 2
    monkeypatch.undo()
    for number in range(10):
        workers.start("", done.put, number)
    assert sorted(done.get(timeout=5) for _ in range(10)) == list(range(10))
