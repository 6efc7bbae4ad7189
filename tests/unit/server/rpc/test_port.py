"""The threads that serve the calls of a port."""

from __future__ import annotations

import threading
import time

import pytest

from warpfit_server.rpc import port
from warpfit_server.rpc.port import CallThreads


def count(name):
    return sum(thread.name.startswith(name) for thread in threading.enumerate())


def test_there_are_no_more_threads_than_calls_at_a_time(monkeypatch):
    """However often callers come, and in whatever moment; idle threads end after a while."""
    monkeypatch.setattr(port, "_IDLE_SECONDS", 0.5)
    threads, callers, seen = CallThreads(100, "served"), 3, []

    def call():
        for number in range(1_000):
            assert threads.submit(pow, number, exp=2).result(10) == number**2
        seen.append(count("served"))

    running = [threading.Thread(target=call) for _ in range(callers)]
    for each in running:
        each.start()
    for each in running:
        each.join()
    # The thread of a call may not be idle yet when the caller sends the next one.
    assert max(seen) <= 2 * callers
    end = time.monotonic() + 20
    while count("served") and time.monotonic() < end:
        time.sleep(0.05)
    assert not count("served")
    assert threads.submit(abs, -1).result(10) == 1


def test_calls_wait_where_all_threads_are_busy_or_the_system_has_no_more(monkeypatch, caplog):
    threads, go = CallThreads(2, "busy"), threading.Event()
    waiting = [threads.submit(go.wait, 10) for _ in range(2)]
    later = [threads.submit(abs, number) for number in range(3)]
    assert count("busy") == 2
    assert not any(future.done() for future in later)
    go.set()
    assert [future.result(10) for future in later] == [0, 1, 2]
    assert all(future.result(10) for future in waiting)
    with pytest.raises(ZeroDivisionError):
        threads.submit(divmod, 1, 0).result(10)

    few, go = CallThreads(2, "few"), threading.Event()
    first = few.submit(go.wait, 10)

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    second = few.submit(abs, -2)
    go.set()
    assert first.result(10)
    assert second.result(10) == 2
    assert "no new thread for calls" in caplog.text
