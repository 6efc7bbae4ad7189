"""The queue of compilations, the processes that run them, and the compiler."""

import builtins
import os
import threading
import time
from contextlib import closing
from functools import partial
from operator import methodcaller
from pathlib import Path
from unittest.mock import Mock

import pytest

from support.servers.server import eventually
from warpfit.errors import InternalError, ResourceExhaustedError, UnavailableError
from warpfit_server.engine.cuda.runtime import compiler
from warpfit_server.engine.cuda.runtime.device import CudaDevice
from warpfit_server.engine.loop import create_engine

#: A process for which a job is an expression of Python.
MODULE = """
import os, sys, time
from warpfit.errors import ResourceExhaustedError
from warpfit_server.engine.cuda.runtime.compiler import serve

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
    with closing(compiler.CompileQueue(getattr(request, "param", 4), "evaluates_jobs")) as made:
        yield made


@pytest.fixture
def process():
    with compiler.CompileProcess("evaluates_jobs") as made:
        yield made


def is_alive(number):
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # the file is not there, or is one of a process that has ended since
        return False


class TestProcess:
    def test_it_has_the_lowest_priority_and_keeps_what_it_has_loaded(self, process):
        assert process.run("os.nice(0)") == 19
        first = process.run("os.getpid()")
        assert process.run("os.getpid()") == first != os.getpid()
        assert len(process.run("bytes(1 << 20)")) == 1 << 20

    @pytest.mark.parametrize(
        ("job", "error", "reason", "words"),
        [
            ("fail(ResourceExhaustedError('too large', 'LARGE'))", ResourceExhaustedError, "LARGE",
             "too large"),
            ("fail(ValueError('no compiler'))", InternalError, None, "no compiler"),
            ("os._exit(1)", InternalError, "COMPILER_DIED", "has died"),
        ],
    )  # fmt: skip
    def test_a_job_that_fails_or_kills_it_fails_alone(self, process, job, error, reason, words):
        with pytest.raises(error, match=words) as caught:
            process.run(job)
        assert reason in (None, caught.value.reason)
        assert process.run("7") == 7


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
        eventually(lambda: queue._running)
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
        monkeypatch.setattr(compiler, "_MOST_WAITING", 2)
        gate = threading.Event()
        futures = [queue.submit(n, lambda _: gate.wait(10)) for n in range(3)]
        urgent = queue.submit(9, lambda _: gate.wait(10), urgent=True)
        gate.set()
        assert futures[2] is None
        assert urgent.result(10)

    @pytest.mark.parametrize("queue", [8], indirect=True)
    def test_processes_run_at_the_same_time_and_end_when_they_are_idle(self, queue, monkeypatch):
        monkeypatch.setattr(compiler, "_IDLE_SECONDS", 0.5)
        slow = methodcaller("run", "(time.sleep(0.3), os.getpid())[1]")
        jobs = [queue.submit(n, slow) for n in range(2)]
        numbers = [job.result(20) for job in jobs]
        assert len(set(numbers)) == 2
        eventually(lambda: not any(map(is_alive, numbers)))
        assert queue.submit("again", methodcaller("run", "3")).result(20) == 3

    def test_closing_fails_all_jobs_at_once_and_later_ones(self, queue):
        running = queue.submit("running", methodcaller("run", "time.sleep(60)"))
        eventually(lambda: queue._running)
        queued, started = queue.submit("queued", lambda _: 2), time.monotonic()
        queue.close()
        assert time.monotonic() - started < 20
        late = partial(queue.submit, "late", lambda _: 3)
        waits = [partial(future.result, 0) for future in (running, queued)]
        for wait in (*waits, partial(late, urgent=True)):
            with pytest.raises(UnavailableError):
                wait()
        assert late() is None


@pytest.mark.parametrize("compile_source", [compiler.to_ptx, compiler.to_cubin])
def test_a_program_that_does_not_compile_is_destroyed_and_told(monkeypatch, compile_source):
    destroy = Mock(side_effect=compiler.nvrtc.nvrtcDestroyProgram)
    monkeypatch.setattr(compiler.nvrtc, "nvrtcDestroyProgram", destroy)
    with pytest.raises(InternalError, match="nonsense"):
        compile_source("nonsense", 90)
    destroy.assert_called_once()


def test_the_jump_table_leads_where_the_tree_does():
    lines = [
        *("mov.b32 %r1, %r9; // dispatch", "setp.gt.s32 %p1, %r1, 1;", "@%p1 bra $high;"),
        *("setp.eq.s32 %p2, %r1, 0;", "mov.f32 %f1, %f2;", "@%p2 bra $zero;", "bra.uni $one;"),
        *("$high:", "add.f32 %f1, %f1, %f3;", "bra.uni $end;"),
        *("$zero:", "neg.f32 %f1, %f1;", "bra.uni $end;"),
        *("$one:", "abs.f32 %f1, %f1;", "$end:", "ret;"),
    ]
    ptx = "".join(f"\n{line}" if line[0] == "$" else f"\n\t{line}" for line in lines) + "\n"
    text = compiler.with_jump_table(ptx, 3)
    assert "brx.idx.uni %r1, $cases;" in text
    blocks = dict(part.split(":", 1) for part in text.split("$case_")[4:7])
    moved = {label: "mov.f32" in body.split("$")[0] for label, body in blocks.items()}
    assert moved == {"0": True, "1": True, "2": False}
    for label, operation in enumerate(("neg.f32", "abs.f32", "add.f32")):
        entry = text.split(f"$case_{label}:\n")[1].split("bra.uni ")[1].split(";")[0]
        assert text.split(f"{entry}:\n")[1].split()[0] == operation


@pytest.mark.parametrize(
    ("error", "remedy"),
    [(ImportError("No 'cupy'"), "pip install"), (PermissionError(13, "/.cupy"), "--cache-dir")],
    ids=["missing", "no cache"],
)
def test_cuda_without_cupy_is_an_error_that_names_the_remedy(monkeypatch, error, remedy):
    original = builtins.__import__

    def failing(name, *arguments, **named):
        if name == "cupy":
            raise error
        return original(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", failing)
    with pytest.raises(UnavailableError, match=remedy) as caught:
        CudaDevice()
    assert caught.value.reason == "NO_CUPY"
    with pytest.raises(UnavailableError):
        create_engine("cuda")


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (200, "has 100 bytes left where 200 are needed"),
        (50, "has 100 bytes left, but not 50 in one piece"),
        (None, "CUDA lacks memory: the device has 100 bytes left"),
    ],
)
def test_an_error_says_which_memory_is_short(monkeypatch, size, words):
    monkeypatch.setattr(CudaDevice, "available", lambda device: 100)
    error = CudaDevice.__new__(CudaDevice).no_room(size)
    assert words in error.message
    assert (error.needed, error.available) == (size, 100)
