"""The kernels of a batch: how it is cut into them, and a store that has each of them compiled once.

A `KernelPlan` is kept for when a batch comes again. A kernel is loaded, on disk, or made by the
compiler. Kernels that are requested together are compiled by several processes, and loaded together
once all are compiled. The driver loads a module only when the device is idle, and delays launches
meanwhile. Modules loaded one by one would each wait for the launches since the last one, and delay
further launches in turn. So launches are held back in `device` until all modules are loaded: one
wait for the device, and then some 0.1 ms a module.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from cachetools import LRUCache
from numba import from_dtype, types
from numpy.typing import NDArray

from warpfit.ir import Batch
from warpfit.ops import OPERATORS
from warpfit.request import Evaluation, Loss
from warpfit_server.compile_cache import CacheCounters, DiskCache
from warpfit_server.engine.autodiff import BY_PARAMETERS, CODE_COUNT, lower_batch
from warpfit_server.engine.cuda.jit import renderer, templates
from warpfit_server.engine.cuda.jit.renderer import Output
from warpfit_server.engine.cuda.runtime import compiler
from warpfit_server.engine.cuda.runtime.compiler import CompileProcess, CompileQueue, serve
from warpfit_server.engine.cuda.runtime.datasets import ResidentDataset
from warpfit_server.engine.cuda.runtime.device import DRIVER, CudaDevice
from warpfit_server.engine.interface import Arithmetic
from warpfit_server.engine.lowering import COPY_CODE, NONE, Lowered, check_tokens
from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.native.intrinsics import call_c
from warpfit_server.shared_batch import BatchSummary, contents

_LOG: Final = logging.getLogger("warpfit.engine")
_ENTRY: Final = "evaluate"
#: Most accumulators of a fused kernel, unless one program alone needs more.
_MAX_SUMS: Final = 24
#: Most programs of a batch that get a kernel each.
_MAX_SINGLE: Final = 4
#: Most tokens of a fused kernel, for each program that it may hold.
_GROUP_TOKENS: Final = 40
#: Captured graphs, and kernel plans, that are kept.
MAX_GRAPHS: Final = 64
#: Estimated work of a call of a library function, in instructions.
_CALL_WORK: Final = 100
#: Most bytes of loaded code, loaded kernels, and bytes of machine code on disk.
MOST_BYTES, MOST_KERNELS, _MOST_DISK_BYTES = 1 << 30, 20_000, 1 << 30

# ------------------------------------------------------------------------------ the plan of a batch


@dataclass(frozen=True, slots=True)
class GridLayout:
    """Layout of the rows and programs of a batch on the device."""

    group_size: int
    """Most programs of a fused kernel."""
    threads: int
    """Threads of a block. Many, because blocks of different kernels on one multiprocessor evict
    each other's instructions from its cache: with 128 threads, fast kernels run at half and precise
    ones at a quarter of the rate."""
    blocks: int
    """Blocks of all kernels for each multiprocessor, divided by the kernels' work."""
    rows: int = 1
    """Rows a thread works on at a time: 1, 2 or 4, at most 2 in float64."""


#: Layouts for fused kernels, the measured best on one H200.
_LAYOUTS: Final = {
    Arithmetic.FAST: GridLayout(group_size=20, threads=512, blocks=3),
    Arithmetic.PRECISE: GridLayout(group_size=10, threads=1024, blocks=6),
    Arithmetic.DOUBLE: GridLayout(group_size=10, threads=512, blocks=12),
}
#: For batches of cheap operators only, such as ``+ - *``, which are bound by reading variables.
_CHEAP_LAYOUT: Final = GridLayout(group_size=20, threads=512, blocks=2, rows=4)
#: For kernels that sum up gradients: with many accumulators, registers suffice for few threads.
_GRADIENT_LAYOUT: Final = GridLayout(group_size=10, threads=512, blocks=4)


#: Whether a token needs no division and no function but abs, by code; bool [256].
_CHEAP: Final = np.ones(256, dtype=np.bool_)
_CHEAP[
    [
        operator.code
        for operator in OPERATORS.values()
        if "/" in operator.kernel or {*re.findall(r"(\w+)\(", operator.kernel)} - {"abs", "select"}
    ]
] = False


def best_layout(
    arithmetic: Arithmetic, codes: NDArray[np.uint8], *, gradient: bool = False
) -> GridLayout:
    """Choose the layout of fused kernels for programs with these tokens."""
    if gradient:
        return _GRADIENT_LAYOUT
    cheap = arithmetic is not Arithmetic.DOUBLE and bool(_CHEAP[codes].all())
    return _CHEAP_LAYOUT if cheap else _LAYOUTS[arithmetic]


@dataclass(frozen=True, slots=True, eq=False)
class KernelInputs:
    """Numbers that the kernels of a batch read for each parameter vector.

    They are taken from `Batch.parameters`, [K * parameters], followed by the constants. Vector v
    has input i at ``numbers[i] + (K - 1) * firsts[i] + v * steps[i]``.
    """

    starts: NDArray[np.int64]
    """Index of each program's first input, and the total; [programs + 1]."""
    constants: NDArray[np.float64]
    """[inputs], of which those that are constants are read."""
    numbers: NDArray[np.int64]
    firsts: NDArray[np.int64]
    steps: NDArray[np.int64]

    @classmethod
    def of(cls, lowered: Lowered, batch: Batch) -> KernelInputs:
        """Return the inputs that the programs of a batch load."""
        loads, counts = lowered.loads, lowered.headers["loads"]
        sizes = batch.parameter_counts.astype(np.int64)
        program = np.repeat(np.arange(len(batch)), counts)
        is_constant = loads["parameter"] == NONE
        firsts = np.where(is_constant, sizes.sum(), (np.cumsum(sizes) - sizes)[program])
        index = np.where(is_constant, np.arange(len(loads)), loads["parameter"])
        return cls(
            starts=np.concatenate([[0], np.cumsum(counts)]),
            constants=loads["value"].copy(),
            numbers=firsts + index,
            firsts=firsts,
            steps=np.where(is_constant, 0, sizes[program]),
        )

    def fill(self, batch: Batch, inputs: NDArray[Any]) -> None:
        """Fill inputs, [K, inputs], with the numbers of this batch or one of the same tokens."""
        places = self.numbers
        if batch.vectors > 1:
            vectors = np.arange(batch.vectors)[:, np.newaxis]
            places = places + (batch.vectors - 1) * self.firsts + vectors * self.steps
        inputs[:] = np.concatenate([batch.parameters, self.constants])[places]


@dataclass(frozen=True, slots=True)
class KernelKey:
    """Identifies a kernel; ``text`` is a hash of everything that its machine code depends on."""

    arithmetic: Arithmetic = field(compare=False)
    output: Output = field(compare=False)
    programs: Lowered = field(compare=False)
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class KernelPlan:
    """The kernels of a batch, and where each puts its sums."""

    content: tuple[bytes, ...]
    """Tokens of the batch that was planned, from `contents`."""
    inputs: KernelInputs
    derivatives: NDArray[np.int64]
    """Program and parameter of each derivative that is summed; [derivatives, 2]."""
    arithmetic: Arithmetic
    output: Output
    layout: GridLayout
    keys: tuple[KernelKey, ...]
    firsts: tuple[int, ...]
    """Index of each kernel's first program."""
    sum_starts: NDArray[np.int64]
    """Index of each program's first sum, that of its loss, and the total; [programs + 1]."""
    shares: NDArray[np.float64]
    """Share of each kernel in the work of a row; [kernels]."""
    name: bytes
    """Hash of the keys."""

    def is_for(self, batch: Batch) -> bool:
        """Return whether a batch has the same tokens; its parameters may differ."""
        return self.content == contents(batch)

    def blocks(self, vectors: int, most: int, total: int) -> tuple[int, ...]:
        """Return the blocks of each kernel, at most ``most``, by its share of the work.

        ``total`` are those of all kernels and vectors that the device should have.
        """
        shared = np.rint(max(1, total // vectors) * self.shares)
        return tuple(np.minimum(np.maximum(shared, 1), most).astype(int).tolist())


def make_plan(
    kernels: KernelStore, resident: ResidentDataset, evaluation: Evaluation
) -> KernelPlan:
    """Cut an evaluation into kernels of several programs, or of one each.

    The few programs of a small batch get a kernel each, which other batches share. For many
    programs, single kernels never pay: capturing their graph (2 ms for 300) costs more than
    interpreting, and fused kernels are 2 to 5 times faster once a batch repeats.

    Raises:
        ProgramError: for the first bad token.
    """
    layout, batch = resident.dataset.layout, evaluation.batch
    check_tokens(batch, layout.variables)
    arithmetic = Arithmetic.of(layout.dtype, evaluation.precision)
    grid = best_layout(arithmetic, batch.codes, gradient=evaluation.gradient)
    output = Output(
        values=evaluation.values,
        loss={None: "", Loss.MAE: "absolute"}.get(evaluation.loss, "squares"),
        weighted=evaluation.loss is not None and layout.has_weights,
        gradient=evaluation.gradient,
        threads=grid.threads,
        rows=min(grid.rows, 16 // arithmetic.dtype.itemsize),
    )
    grid = grid if len(batch) > _MAX_SINGLE else replace(grid, group_size=1)
    lowered = lower_batch(batch, BY_PARAMETERS * output.gradient)
    headers = lowered.headers
    owners = np.repeat(np.arange(len(batch)), headers["entries"])
    derivatives = np.unique(np.stack([owners, lowered.entries["leaf"]], axis=1), axis=0)
    sums = np.bincount(derivatives[:, 0], minlength=len(batch)) + bool(output.loss)
    # Consecutive programs make a group, bounded in number, tokens and sums.
    size, firsts, group_tokens, group_sums = grid.group_size, [0], 0, 0
    for index, (tokens, count) in enumerate(
        zip(batch.lengths.tolist(), sums.tolist(), strict=True)
    ):
        full = index - firsts[-1] >= size or group_sums + count > max(_MAX_SUMS, size)
        if index > firsts[-1] and (full or group_tokens + tokens > _GROUP_TOKENS * size):
            firsts.append(index)
            group_tokens = group_sums = 0
        group_tokens += tokens
        group_sums += count
    groups = [lowered.part(first, stop) for first, stop in pairwise((*firsts, len(batch)))]
    keys = tuple(kernels.key(arithmetic, output, group) for group in groups)
    lengths = kernels.instruction_lengths(arithmetic, output)
    before = np.concatenate([[0.0], np.cumsum(lengths[lowered.instructions["code"]])])
    work = np.add.reduceat(before[headers["end"]] - before[headers["prologue_end"]], firsts)
    name = hashlib.blake2b("\0".join(key.text for key in keys).encode(), digest_size=16)
    return KernelPlan(
        content=contents(batch),
        inputs=KernelInputs.of(lowered, batch),
        derivatives=derivatives,
        arithmetic=arithmetic,
        output=output,
        layout=grid,
        keys=keys,
        firsts=tuple(firsts),
        sum_starts=np.concatenate([[0], np.cumsum(sums)]),
        shares=work / work.sum(),
        name=name.digest(),
    )


def plan_key(resident: ResidentDataset, evaluation: Evaluation) -> Hashable:
    """Return what a plan depends on; batches of the same `BatchSummary.identity` may differ."""
    layout, identity = resident.dataset.layout, BatchSummary.of(evaluation.batch).identity
    wanted = (evaluation.precision, evaluation.values, evaluation.loss, evaluation.gradient)
    columns = (layout.dtype.str, layout.variables, layout.has_weights)
    return (identity, *columns, *wanted)


# ------------------------------------------------------------------------------------ the store


class Kernel(NamedTuple):
    """A loaded kernel; its code stays on the device as long as this object exists."""

    function: Any
    module: Any
    size: int
    """Bytes, so many at least that `MOST_KERNELS` fill the cache."""


#: Architecture, arithmetic and outputs of a kernel, and its programs.
KernelJob = tuple[int, Arithmetic, Output, Lowered]


def compile_kernel(job: KernelJob) -> bytes:
    """Return the machine code of a kernel; the first one of an arithmetic takes half a second more.

    Raises:
        InternalError: with the linker's log, if linking fails.
    """
    architecture, arithmetic, output, programs = job
    library = templates.build(arithmetic, architecture, derivatives=output.gradient)
    text = renderer.module(library, output, {_ENTRY: programs})
    return compiler.link(text, architecture, library.functions)


class _KernelCache(LRUCache[KernelKey, Kernel]):
    """Kernels by key; those that are dropped stay loaded until nobody uses them any more."""

    def __init__(self) -> None:
        super().__init__(MOST_BYTES, lambda kernel: kernel.size)
        self.counters = CacheCounters()

    def popitem(self) -> tuple[KernelKey, Kernel]:
        """Evict the least recently used kernel."""
        self.counters.evictions += 1
        return super().popitem()


class KernelStore:
    """Has kernels compiled, and keeps them loaded and on disk.

    Args:
        device: that the kernels are for.
        cores: of which a quarter may compile.
    """

    def __init__(self, device: CudaDevice, cores: int) -> None:
        self._device = device
        self._cache = _KernelCache()
        self.disk = DiskCache(device.cache_directory / "kernels", _MOST_DISK_BYTES)
        self.compile_queue = CompileQueue(cores, compile_kernel.__module__)
        self._loader = ThreadPoolExecutor(1, "load")
        self._lock = threading.Lock()

    def key(self, arithmetic: Arithmetic, output: Output, programs: Lowered) -> KernelKey:
        """Return the key of the kernel that evaluates a group of programs, without its numbers."""
        parts = renderer.GENERATION, output, compiler.linker_version()
        content = [repr(parts).encode(), *(array.tobytes() for array in programs)]
        content.append(self._library(arithmetic, output).key)
        text = hashlib.blake2b(b"\0".join(content), digest_size=20).hexdigest()
        return KernelKey(arithmetic, output, programs, text)

    def instruction_lengths(self, arithmetic: Arithmetic, output: Output) -> NDArray[np.float64]:
        """Estimate the work of an instruction by its code, in those of the device; [CODE_COUNT]."""
        lengths = np.zeros(CODE_COUNT)
        lengths[COPY_CODE] = 1.0
        for code, template in self._library(arithmetic, output).templates.items():
            lengths[code] = _CALL_WORK if template.function else len(template.instructions)
        return lengths

    def are_loaded(self, keys: Sequence[KernelKey]) -> bool:
        """Return whether all kernels are loaded; neither a hit nor a use."""
        with self._lock:
            return all(key in self._cache for key in keys)

    def find(self, keys: Sequence[KernelKey]) -> list[Kernel] | None:
        """Return kernels if all are loaded, else None."""
        with self._lock:
            found = [self._cache.get(key) for key in keys]
            missing = found.count(None)
            self._cache.counters.misses += missing
            self._cache.counters.hits += len(keys) - missing
            return None if missing else found  # type: ignore[return-value]

    def count_hits(self, kernels: int) -> None:
        """Count kernels as found that a graph has kept loaded."""
        with self._lock:
            self._cache.counters.hits += kernels

    def request(
        self, keys: Sequence[KernelKey], *, urgent: bool = False
    ) -> Future[dict[KernelKey, Kernel]]:
        """Have the missing kernels compiled and loaded.

        Returns:
            A future of all kernels, or of the first error. Kernels that a full queue refused, which
            happens only if they are not urgent, are left out.
        """
        done: Future[dict[KernelKey, Kernel]] = Future()
        with self._lock:
            kernels = {key: self._cache[key] for key in keys if key in self._cache}
        submit = self.compile_queue.submit
        jobs = {
            key: job
            for key in dict.fromkeys(keys)
            if key not in kernels
            and (job := submit(key, partial(self._cubin, key), urgent=urgent)) is not None
        }
        if jobs:
            load = partial(self._loader.submit, self._load, kernels, jobs, done)
            _when_all_done(list(jobs.values()), load)
        else:
            done.set_result(kernels)
        return done

    def counters(self) -> Mapping[str, float]:
        """Return the figures of the caches in memory and on disk; see `interface.COUNTERS`."""
        cache = self._cache
        figures = {"module_cache_bytes": cache.currsize, "module_cache_entries": len(cache)}
        for name, counters in (("module", cache.counters), ("disk", self.disk.counters)):
            figures |= {f"{name}_cache_{key}": value for key, value in asdict(counters).items()}
        return figures

    def close(self) -> None:
        """Stop the threads and unload what is not in use."""
        self.compile_queue.close()
        self._loader.shutdown()
        with self._lock:
            self._cache.clear()

    def _library(self, arithmetic: Arithmetic, output: Output) -> templates.DeviceLibrary:
        """Return the device library; the first call takes some tenths of a second."""
        return templates.build(arithmetic, self._device.architecture, derivatives=output.gradient)

    def _cubin(self, key: KernelKey, process: CompileProcess) -> bytes:
        """Return machine code, from disk if it is there; runs in a thread of the queue."""
        cubin = self.disk.get(key.text)
        if cubin is None:
            job = self._device.architecture, key.arithmetic, key.output, key.programs
            cubin = process.run(job)
            self.disk.put(key.text, cubin)
        return cubin

    def _load(
        self,
        kernels: dict[KernelKey, Kernel],
        jobs: Mapping[KernelKey, Future[bytes]],
        done: Future[dict[KernelKey, Kernel]],
    ) -> None:
        """Load kernels that have been compiled beside others; runs in the loader's thread."""
        try:
            with self._lock:  # another request may have loaded some of them
                kernels |= {key: self._cache[key] for key in jobs if key in self._cache}
            cubins = {key: job.result() for key, job in jobs.items() if key not in kernels}
            modules = load_modules(self._device, list(cubins.values()))
            for (key, cubin), module in zip(cubins.items(), modules, strict=True):
                size = max(len(cubin), MOST_BYTES // MOST_KERNELS)
                kernels[key] = Kernel(module.get_function(_ENTRY), module, size)
            with self._lock:
                self._cache.update({key: kernels[key] for key in cubins})
        except Exception as error:
            _LOG.warning("kernels were not loaded: %s", error)  # a caller may not wait for them
            done.set_exception(error)
        else:
            done.set_result(kernels)


def _when_all_done(jobs: Sequence[Future[Any]], then: Callable[[], object]) -> None:
    """Call a function when the last of one or more jobs is done, in the thread that ends it."""
    left, lock = len(jobs), threading.Lock()

    def count(_: object) -> None:
        nonlocal left
        with lock:
            left -= 1
            is_last = left == 0
        if is_last:
            then()

    for job in jobs:
        job.add_done_callback(count)


def load_modules(device: CudaDevice, cubins: Sequence[bytes]) -> list[Any]:
    """Load machine code; only one thread of a device at a time may call this.

    Returns:
        CuPy modules in the order of ``cubins``, unloaded when they are dropped.

    Raises:
        CUDADriverError: if one cannot be loaded, for example for want of device memory; the
            others are unloaded then.
    """
    device.use()
    images = np.array([np.frombuffer(cubin, np.uint8).ctypes.data for cubin in cubins], np.int64)
    handles = np.zeros(len(cubins), dtype=np.uint64)
    status = _load(device.functions, images, handles)
    cuda = device.cupy.cuda
    modules = [cuda.function.Module() for _ in cubins]
    for module, handle in zip(modules, handles.tolist(), strict=True):
        module.ptr = handle
    if status:
        raise cuda.driver.CUDADriverError(status)
    return modules


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def _load(
    functions: NDArray[np.void], images: NDArray[np.int64], handles: NDArray[np.uint64]
) -> int:
    """Fill in handles, which stay 0 from the first failure on; return the driver's status.

    Compiled, because Python code would wait for Python's lock while all launches are held back.
    """
    status = 0
    functions[0].launches_held = 1
    for number in range(len(images)):
        handle = np.int64(handles.ctypes.data) + 8 * number
        status = call_c(functions[0].load_module, (handle, images[number]))
        if status != 0:
            break
    functions[0].launches_held = 0
    return int(status)


def load() -> None:
    """Load the compiled function above, or compile it."""
    functions = types.Array(from_dtype(DRIVER), 1, "C")
    numba_cache.load(_load, types.int64(functions, types.int64[::1], types.uint64[::1]))


if __name__ == "__main__":  # the process that compiles kernels, which `CompileQueue` runs
    serve(compile_kernel)
