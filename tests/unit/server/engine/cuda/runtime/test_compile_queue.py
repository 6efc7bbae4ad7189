"""The queue of compilations, and the processes that run them."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

from warpfit.errors import InternalError, ResourceExhaustedError, UnavailableError
from warpfit_server.engine.cuda.runtime import compile_queue
from warpfit_server.engine.cuda.runtime.compile_queue import CompileProcess, CompileQueue

#: A process for which a job is an expression of Python.
MODULE = """
import os, sys, time
from warpfit.errors import ResourceExhaustedError
from warpfit_server.engine.cuda.runtime.compile_queue import serve

def run(job):
    print("this is no answer")
    exec("def fail(error): raise error", globals())
    return eval(job)

serve(run)
"""


@pytest.fixture(scope="module", autouse=True)
def _module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modules")
    Path(folder, "evaluates_jobs.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        yield


@pytest.fixture
def queue(request):
    made = CompileQueue(getattr(request, "param", 4), "evaluates_jobs")
    yield made
    made.close()


@pytest.fixture
def process():
    with CompileProcess("evaluates_jobs") as made:
        yield made


def ask(expression):
    """Return the work that lets the process evaluate an expression."""
    return lambda process: process.run(expression)


def wait_until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_alive(number):
    """Tell whether there is a process, which is no zombie."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # the file is not there, or is one of a process that has ended since
        return False


@pytest.mark.parametrize(("cores", "processes"), [(1, 1), (7, 1), (16, 4), (64, 8)])
def test_a_quarter_of_the_cores_compiles(cores, processes):
    queue = CompileQueue(cores, "none")
    queue.close()
    assert queue.processes == processes


class TestProcess:
    def test_it_has_the_lowest_priority_and_keeps_what_it_has_loaded(self, process):
        assert process.run("os.nice(0)") == 19
        first = process.run("os.getpid()")
        assert process.run("os.getpid()") == first != os.getpid()
        assert len(process.run("bytes(1 << 20)")) == 1 << 20

    def test_errors_of_jobs_are_raised(self, process):
        with pytest.raises(ResourceExhaustedError, match="too large"):
            process.run("fail(ResourceExhaustedError('too large', 'LARGE'))")
        with pytest.raises(InternalError, match="no compiler"):
            process.run("fail(ValueError('no compiler'))")
        assert process.run("7") == 7

    def test_a_job_that_kills_it_fails_alone(self, process):
        with pytest.raises(InternalError) as caught:
            process.run("os._exit(1)")
        assert caught.value.reason == "COMPILER_DIED"
        assert process.run("7") == 7

    def test_one_that_is_aborted_while_it_starts_runs_nothing(self, process, monkeypatch):
        begin = subprocess.Popen

        def start(*arguments, **options):
            child = begin(*arguments, **options)
            process.abort()  # by another thread, which finds no process yet
            return child

        monkeypatch.setattr(subprocess, "Popen", start)
        with pytest.raises(InternalError):
            process.run("time.sleep(60)")

    def test_it_ends_when_the_process_that_started_it_has_gone(self, process):
        number = process.run("os.getpid()")
        os.close(process._child.stdin.fileno())
        wait_until(lambda: not is_alive(number))


class TestQueue:
    def test_a_key_is_compiled_once_at_a_time(self, queue):
        runs, gate = [], threading.Event()

        def work(_) -> int:
            runs.append(1)
            gate.wait(10)
            return 7

        futures = [queue.submit("key", work, urgent=bool(n % 2)) for n in range(10)]
        time.sleep(0.1)
        gate.set()
        assert {future.result(10) for future in futures} == {7}
        assert len(runs) == 1

    def test_jobs_that_callers_wait_for_come_first(self, queue):
        order, gate = [], threading.Event()
        first = queue.submit("first", lambda _: gate.wait(10))
        wait_until(lambda: queue._running)
        futures = [
            queue.submit(name, lambda _, name=name: order.append(name), urgent=name > "m")
            for name in "abxcy"
        ]
        futures.append(queue.submit("c", lambda _: None, urgent=True))
        assert futures[-1] is futures[3]
        gate.set()
        for future in (first, *futures):
            future.result(10)
        assert order == ["x", "y", "c", "a", "b"]

    def test_many_jobs_that_nobody_waits_for_are_refused(self, queue, monkeypatch):
        monkeypatch.setattr(compile_queue, "_MOST_WAITING", 2)
        gate = threading.Event()
        futures = [queue.submit(n, lambda _: gate.wait(10)) for n in range(3)]
        urgent = queue.submit(9, lambda _: gate.wait(10), urgent=True)
        gate.set()
        assert futures[2] is None
        assert urgent.result(10)

    def test_errors_reach_the_future_and_do_not_stop_the_threads(self, queue):
        with pytest.raises(InternalError, match="cannot compile"):
            queue.submit("bad", ask("fail(ValueError('cannot compile'))")).result(20)
        assert queue.submit("good", ask("3")).result(20) == 3

    @pytest.mark.parametrize("queue", [8], indirect=True)
    def test_processes_run_at_the_same_time_and_end_when_they_are_idle(self, queue, monkeypatch):
        monkeypatch.setattr(compile_queue, "_IDLE_SECONDS", 0.5)
        jobs = [queue.submit(n, ask("(time.sleep(0.3), os.getpid())[1]")) for n in range(2)]
        numbers = [job.result(20) for job in jobs]
        assert len(set(numbers)) == 2
        wait_until(lambda: not any(map(is_alive, numbers)))
        assert queue.submit("again", ask("3")).result(20) == 3

    def test_closing_fails_all_jobs_at_once_and_later_ones(self, queue):
        running = queue.submit("running", ask("time.sleep(60)"))
        wait_until(lambda: queue._running)
        queued = queue.submit("queued", lambda _: 2)
        started = time.monotonic()
        queue.close()
        assert time.monotonic() - started < 20
        for job in (running, queued):
            with pytest.raises(UnavailableError):
                job.result(0)
        with pytest.raises(UnavailableError):
            queue.submit("late", lambda _: 3, urgent=True)
        assert queue.submit("late", lambda _: 3) is None
