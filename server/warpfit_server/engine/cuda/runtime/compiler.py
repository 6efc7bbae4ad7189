"""CUDA C++ and PTX to machine code, by NVRTC and nvJitLink: no GPU, and processes of their own.

A `CudaSource` with a switch over many cases takes three steps: NVRTC makes PTX of it,
`with_jump_table` lets the switch jump at once, and nvJitLink assembles the result. Any other takes
one.

A `CompileQueue` has kernels compiled by a few processes of the lowest priority. The simple form, in
each of a few threads:

    while True:
        job = next job that a caller waits for, or else one that nobody waits for yet
        send it to the process of this thread, and wait for the answer

Writing and assembling code takes seconds of a core, and some of it is Python. In processes of their
own it takes idle cores only and never Python's lock, so that neither the engine's loop nor the
processes that answer calls wait for it, whoever asked for it. A process begins with the first job,
keeps what it has loaded for the next ones, and ends when there is none for a while, or with the
engine.
"""

from __future__ import annotations

import hashlib
import operator
import os
import pickle
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from cuda.bindings import nvjitlink, nvrtc

from warpfit.child_processes import python_child
from warpfit.errors import InternalError, UnavailableError, WarpfitError
from warpfit_server import compile_cache
from warpfit_server.engine.cuda.runtime.device import CudaDevice

_DISPATCH: Final = re.compile(r"mov\.b32 (%r\d+), %r\d+; // dispatch")
_COMPARE: Final = re.compile(r"setp\.(\w+)\.[su]32\s+(%p\d+), (%r\d+), (-?\d+);")
_BRANCH: Final = re.compile(r"(?:@(!?)(%p\d+) )?bra(?:\.uni)?\s+([$\w]+);")
_LABEL: Final = re.compile(r"([$\w]+):")
_COMPARISONS: Final[dict[str, Callable[[int, int], bool]]] = {
    name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
#: Longest path through the tree that is followed; real ones are far shorter.
_MOST_STEPS: Final = 200
#: Cores of which one compiles, and most processes, each of which takes some 250 MiB.
_CORES_A_PROCESS: Final = 4
_MOST_PROCESSES: Final = 8
#: Nice value of the processes, the lowest priority.
_NICE: Final = 19
#: Most waiting jobs; further ones that nobody waits for are refused.
_MOST_WAITING: Final = 4096
#: Seconds without a job after which a process ends.
_IDLE_SECONDS: Final = 60.0


class CudaSource(NamedTuple):
    """CUDA C++ with its compiler options."""

    source: str
    options: tuple[str, ...]
    """Options of NVRTC, without the architecture."""
    cases: int = 0
    """If not 0, the switch over labels 0 to ``cases - 1`` gets a jump table."""

    def key(self, architecture: int) -> list[str]:
        """Return everything that the machine code for a compute capability depends on."""
        versions = nvrtc_version(), linker_version(), str(architecture)
        return [*versions, *self.options, self.source]

    def compile(self, architecture: int) -> bytes:
        """Compile for a compute capability, 90 for 9.0; needs no GPU."""
        if not self.cases:
            return to_cubin(self.source, architecture, self.options)
        ptx = to_ptx(self.source, architecture, self.options)
        return link(with_jump_table(ptx, self.cases), architecture)

    def cached(self, architecture: int, directory: Path) -> bytes:
        """Return the machine code from a cache directory, or compile and store it."""
        name = hashlib.sha256("\0".join(self.key(architecture)).encode()).hexdigest()
        place = directory / "cubin" / f"{name}.cubin"
        return compile_cache.find_or_make(place, lambda: self.compile(architecture))

    def load(self, device: CudaDevice) -> Any:
        """Load the machine code for a device from its cache, or compile it; return a module."""
        device.use()
        module = device.cupy.cuda.function.Module()
        module.load(self.cached(device.architecture, device.cache_directory))
        return module


# ------------------------------------------------------------------------------------------- NVRTC


def nvrtc_version() -> str:
    """Return the version of NVRTC, such as ``"13.0"``."""
    status, major, minor = nvrtc.nvrtcVersion()
    _check(status)
    return f"{major}.{minor}"


def to_ptx(source: str, architecture: int, options: Sequence[str] = ()) -> str:
    """Compile CUDA C++ to PTX text for compute capability ``architecture`` (90 for 9.0).

    Raises:
        InternalError: with the compiler's log, if the source does not compile.
    """
    reading = nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX
    text = _built(source, f"compute_{architecture}", options, *reading)
    return text.rstrip(b"\0").decode()


def to_cubin(source: str, architecture: int, options: Sequence[str] = ()) -> bytes:
    """Compile CUDA C++ to machine code; otherwise as `to_ptx`."""
    reading = nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN
    return _built(source, f"sm_{architecture}", options, *reading)


def _built(
    source: str, target: str, options: Sequence[str], size_of: object, read: object
) -> bytes:
    """Compile for a target, and return the output of which functions give the size and bytes."""
    status, program = nvrtc.nvrtcCreateProgram(source.encode(), b"warpfit.cu", 0, [], [])
    _check(status)
    try:
        encoded = [option.encode() for option in (f"--gpu-architecture={target}", *options)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        _check(status, program)
        return _output(program, size_of, read)
    finally:
        _check(nvrtc.nvrtcDestroyProgram(program)[0])


def _output(program: nvrtc.nvrtcProgram, size_of: object, read: object) -> bytes:
    status, size = size_of(program)  # type: ignore[operator]
    _check(status)
    buffer = bytes(size)
    (status,) = read(program, buffer)  # type: ignore[operator]
    _check(status)
    return buffer


def _check(status: nvrtc.nvrtcResult, program: nvrtc.nvrtcProgram | None = None) -> None:
    if status == nvrtc.nvrtcResult.NVRTC_SUCCESS:
        return
    log = b""
    if program is not None:
        log = _output(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
    raise InternalError(
        f"NVRTC failed with {status.name}: {log.rstrip(bytes(1)).decode(errors='replace')}",
        "NVRTC_FAILED",
        "Check that the CUDA packages belong to one CUDA release",
    )


# --------------------------------------------------------------------------------------- nvJitLink


def linker_version() -> str:
    """Return the version of nvJitLink, such as ``"13.0"``."""
    major, minor = nvjitlink.version()
    return f"{major}.{minor}"


def link(ptx: str, architecture: int, functions: bytes = b"") -> bytes:
    """Assemble PTX and link it with the relocatable machine code of library functions.

    It works without Python's lock.

    Raises:
        InternalError: with the linker's log, if linking fails.
    """
    options = [f"-arch=sm_{architecture}", "-O3"]
    handle = nvjitlink.create(len(options), options)
    try:
        source = ptx.encode() + b"\0"
        nvjitlink.add_data(handle, nvjitlink.InputType.PTX, source, len(source), "warpfit")
        if functions:
            nvjitlink.add_data(
                handle, nvjitlink.InputType.CUBIN, functions, len(functions), "functions"
            )
        nvjitlink.complete(handle)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, cubin)
    except nvjitlink.nvJitLinkError as error:
        log = bytearray(nvjitlink.get_error_log_size(handle))
        if log:
            nvjitlink.get_error_log(handle, log)
        text = log.rstrip(b"\0").decode(errors="replace")
        raise InternalError(f"the generated code does not link: {text}", "LINK_FAILED") from error
    finally:
        nvjitlink.destroy(handle)
    return bytes(cubin)


# -------------------------------------------------------------------------------------- jump table


def with_jump_table(ptx: str, cases: int) -> str:
    """Replace the tree of comparisons over labels 0 to ``cases - 1`` by an indexed branch.

    NVVM compiles a switch to a binary tree of comparisons, eight deep for the interpreter's cases,
    which costs more than most operators. This pass follows each case's path through the tree and
    inserts a ``brx.idx`` that jumps to its end at once. Instructions on the path (copies that the
    compiler put on an edge) are repeated before the jump, which keeps the meaning.

    Raises:
        InternalError: if the text does not have the expected form.
    """
    lines = ptx.splitlines()
    marks = [
        (number, match[1]) for number, line in enumerate(lines) if (match := _DISPATCH.search(line))
    ]
    if len(marks) != 1:
        raise InternalError(f"expected one dispatch in the PTX, found {len(marks)}", "BAD_PTX")
    mark, register = marks[0]
    root = next(n for n in range(mark + 1, len(lines)) if f", {register}, " in lines[n])
    walk = _Walk(lines, register)
    blocks = [walk.block(label, root) for label in range(cases)]
    targets = ", ".join(f"$case_{label}" for label in range(cases))
    table = [
        f"$cases: .branchtargets {targets};",
        f"\tbrx.idx.uni {register}, $cases;",
        *(line for block in blocks for line in block),
    ]
    for number in sorted(walk.entries, reverse=True):
        lines.insert(number, f"$entry_{number}:")
    shift = sum(number <= root for number in walk.entries)
    return "\n".join([*lines[: root + shift], *table, *lines[root + shift :]]) + "\n"


class _Walk:
    """Follows the path of a label through the tree."""

    def __init__(self, lines: list[str], register: str) -> None:
        self._lines = lines
        self._register = register
        self._labels = {
            match.group(1): number
            for number, line in enumerate(lines)
            if (match := _LABEL.fullmatch(line.strip()))
        }
        self.entries: set[int] = set()
        """Numbers of the lines that blocks jump to, which need a label before them."""

    def block(self, label: int, root: int) -> list[str]:
        """Return the instructions of a case, which end in a jump to where the tree leads it."""
        known: dict[str, bool] = {}
        block = [f"$case_{label}:"]
        at = root
        for _ in range(_MOST_STEPS):
            text = self._lines[at].strip()
            compare, branch = _COMPARE.fullmatch(text), _BRANCH.fullmatch(text)
            if compare and compare.group(3) == self._register:
                test = _COMPARISONS[compare.group(1)]
                known[compare.group(2)] = test(label, int(compare.group(4)))
                at += 1
            elif branch and (branch.group(2) is None or branch.group(2) in known):
                taken = branch.group(2) is None or known[branch.group(2)] != bool(branch.group(1))
                at = self._labels[branch.group(3)] if taken else at + 1
            elif not text or text.startswith("//") or _LABEL.fullmatch(text):
                at += 1
            else:
                # It is on the path if its basic block ends in a decision of the tree.
                is_on_path = False
                for line in self._lines[at:]:
                    text = line.strip()
                    compare, branch = _COMPARE.fullmatch(text), _BRANCH.fullmatch(text)
                    is_on_path = bool(compare and compare.group(3) == self._register)
                    is_on_path = is_on_path or bool(branch and branch.group(2) in known)
                    if is_on_path or branch or _LABEL.fullmatch(text):
                        break
                if not is_on_path:
                    self.entries.add(at)
                    return [*block, f"\tbra.uni $entry_{at};"]
                block.append(self._lines[at])
                at += 1
        raise InternalError(f"the dispatch tree has no end for label {label}", "BAD_PTX")


# ------------------------------------------------------------------------------------------- queue


@dataclass(slots=True, eq=False)
class _Job:
    key: Hashable
    work: Callable[[CompileProcess], Any]
    future: Future[Any] = field(default_factory=Future)


class CompileQueue:
    """Jobs that are run once for each key, those first that callers wait for.

    Args:
        cores: of the engine, of which a quarter compiles, but at least one.
        module: is run by ``python -m`` as the process of each thread, and calls `serve`.
    """

    def __init__(self, cores: int, module: str) -> None:
        self.processes = max(1, min(_MOST_PROCESSES, cores // _CORES_A_PROCESS))
        """Most jobs that run at a time."""
        self._module = module
        self._urgent: deque[_Job] = deque()
        self._others: deque[_Job] = deque()
        self._pending: dict[Hashable, _Job] = {}
        """Waiting and running jobs."""
        self._running: set[CompileProcess] = set()
        self._is_closed = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, name=f"compile-{number}", daemon=True)
            for number in range(self.processes)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self, key: Hashable, work: Callable[[CompileProcess], Any], *, urgent: bool = False
    ) -> Future[Any] | None:
        """Queue a job unless one of the same key is waiting or running.

        Args:
            key: of the job.
            work: gets the process of the thread that runs it; it may do without.
            urgent: whether a caller waits.

        Returns:
            The future of the job, which may have been submitted by an earlier call; None if it is
            refused. An urgent job is never refused, and makes a waiting one urgent.

        Raises:
            UnavailableError: for an urgent job after `close`.
        """
        with self._changed:
            if self._is_closed:
                if urgent:
                    raise _closed()
                return None
            job = self._pending.get(key)
            if job is None:
                if not urgent and len(self._pending) >= _MOST_WAITING:
                    return None
                job = self._pending[key] = _Job(key, work)
                (self._urgent if urgent else self._others).append(job)
                self._changed.notify()
            elif urgent and job in self._others:
                self._others.remove(job)
                self._urgent.append(job)
            return job.future

    def close(self) -> None:
        """Fail all jobs and end the processes."""
        with self._changed:
            self._is_closed = True
            jobs = list(self._pending.values())
            self._urgent.clear()
            self._others.clear()
            self._changed.notify_all()
            for process in self._running:
                process.abort()
        for thread in self._threads:
            thread.join()
        for job in jobs:
            if not job.future.done():
                job.future.set_exception(_closed())

    def _run(self) -> None:
        def is_needed() -> bool:
            return bool(self._is_closed or self._urgent or self._others)

        with CompileProcess(self._module) as process:
            while True:
                with self._changed:
                    if not self._changed.wait_for(is_needed, _IDLE_SECONDS):
                        process.stop()
                        self._changed.wait_for(is_needed)
                    if self._is_closed:
                        return
                    self._running.add(process)
                    job = (self._urgent or self._others).popleft()
                error: Exception | None = None
                result = None
                try:
                    result = job.work(process)
                except Exception as failed:
                    error = failed
                with self._changed:
                    del self._pending[job.key]
                    self._running.discard(process)
                    if self._is_closed:  # `close` fails the job
                        return
                if error is not None:
                    job.future.set_exception(error)
                else:
                    job.future.set_result(result)


class CompileProcess:
    """A process that answers one job after the other, started by the first one it gets.

    Args:
        module: is run by ``python -m`` and calls `serve`.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._child: subprocess.Popen[bytes] | None = None
        self._is_aborted = False

    def run(self, job: object) -> Any:
        """Return the answer to a job, which can be pickled.

        Raises:
            WarpfitError: if the process raises it.
            InternalError: for another error of the process, or if it has died of the job.
            OSError: if no process can be started.
        """
        if self._child is None:
            child = python_child("-m", self._module)
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self._child = subprocess.Popen(**child, **pipes, cwd="/")
            if self._is_aborted:  # while it was being started
                self._child.kill()
        to, answers = self._child.stdin, self._child.stdout
        assert to is not None
        assert answers is not None
        try:
            pickle.dump(job, to, pickle.HIGHEST_PROTOCOL)
            to.flush()
            answer = pickle.load(answers)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            self.stop()
            raise InternalError(
                "a process that compiled kernels has died",
                "COMPILER_DIED",
                "Ask for the interpreter",
            ) from error
        if isinstance(answer, WarpfitError):
            raise answer
        return answer

    def abort(self) -> None:
        """Let the job that runs fail, and all further ones; any thread may call this."""
        self._is_aborted = True
        child = self._child
        if child is not None:
            child.kill()

    def stop(self) -> None:
        """End the process; the next job starts another one."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            with suppress(OSError), child:  # which closes the pipes and waits
                pass

    def __enter__(self) -> Self:
        """Return the process itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the process."""
        self.stop()


def serve(run: Callable[[Any], Any]) -> None:
    """Answer the jobs of a `CompileProcess` until the process that started this one has gone."""
    os.nice(_NICE)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    with suppress(EOFError, BrokenPipeError):
        while True:
            job, answer = pickle.load(sys.stdin.buffer), None
            try:
                answer = run(job)
            except WarpfitError as error:
                answer = error
            except Exception as error:
                answer = InternalError(f"compiling failed: {error!r}", "COMPILATION_FAILED")
            pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()


def _closed() -> UnavailableError:
    return UnavailableError("the compiler has been closed", "COMPILER_CLOSED", "Start the engine")
