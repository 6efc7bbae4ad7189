"""Compiled code of the CPU engine, kept on disk so that only the very first start compiles."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import hashlib
import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import llvmlite
import llvmlite.binding as llvm
import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

from warpfit import ops
from warpfit_server.engine import (
    calls,
    cpu_board,
    cpu_build,
    cpu_dots,
    cpu_interpret,
    cpu_kernels,
    cpu_linearise,
    cpu_lower,
    cpu_math,
    cpu_partials,
    cpu_pieces,
    cpu_statistics,
    cpu_vector,
    differentiate,
    intrinsics,
    rules,
    schedule,
    sweep,
)
from warpfit_server.engine.cpu_helpers import BoardCode
from warpfit_server.engine.cpu_kernels import COPY, FLAVOURS, LOSS_KERNELS, Flavour, symbol

_log = logging.getLogger(__name__)
_DIGEST_BYTES: Final = 32
#: Modules that shape the code.
_SOURCES: Final = (
    *(ops, cpu_vector, cpu_math, cpu_kernels, rules, cpu_partials, cpu_dots, cpu_build),
    *(intrinsics, calls, schedule, cpu_pieces, cpu_lower, cpu_interpret, sweep, differentiate),
    *(cpu_statistics, cpu_linearise, cpu_board),
)
_lock = threading.Lock()


@dataclass(frozen=True, eq=False)
class Kernels:
    """Loaded kernels of one flavour; the addresses are valid while the object lives."""

    addresses: NDArray[np.int64]
    """By code of the instruction, int64 [rules.CODES]; 0 where there is none."""
    losses: dict[str, int]
    """By name of the loss kernel."""
    dots: NDArray[np.int64]
    """Kernels of sums of products, in the order of `cpu_dots.DOT_SHAPES`, int64."""
    owner: Any
    """LLVM execution engine that owns the code."""


@dataclass(frozen=True, eq=False)
class Compiled:
    """All compiled code of the engine."""

    combine: Any
    lower: int
    """Address of what runs a piece of lowering; the next ones of lowering with derivatives, of an
    evaluation, and of one with derivatives."""
    differentiate: int
    interpret: int
    linearise: int
    board: BoardCode
    kernels: dict[Flavour, Kernels]
    owners: tuple[Any, ...]
    """What has to live as long as these addresses are used."""


def load(directory: Path) -> Compiled:
    """Load the engine's code from ``directory``, or compile it and try to store it there."""
    start = time.perf_counter()
    place = directory / f"cpu-{_fingerprint()[:32]}"
    if not all(_object_path(place, flavour).exists() for flavour in FLAVOURS):
        _log.info("compiling the CPU engine into %s (first start only, 10 to 40 s)", place)
    with writable(place) as kept, cached_in(kept) as jit:
        combine = _compile_combine(jit)
        runners = _compile_runners(jit)
        board = _compile_board(jit)
    kernels = {flavour: _load_kernels(_object(place, flavour)) for flavour in FLAVOURS}
    _log.info("CPU engine ready after %.2f s", time.perf_counter() - start)
    lower, derive, interpret, linearise = (_address_of(runner) for runner in runners)
    return Compiled(combine, lower, derive, interpret, linearise, board, kernels, runners)


def load_board(directory: Path) -> BoardCode:
    """Load the functions of `cpu_board` alone."""
    with writable(directory / f"cpu-{_fingerprint()[:32]}") as kept, cached_in(kept) as jit:
        return _compile_board(jit)


def load_differentiate(directory: Path) -> Any:
    """Load `differentiate.differentiate_piece` alone, for an engine with kernels of its own."""
    place = directory / f"cpu-{_fingerprint()[:32]}"
    with writable(place) as kept, cached_in(kept) as jit:
        return jit(_PIECE, differentiate.differentiate_piece)


@contextlib.contextmanager
def writable(place: Path) -> Iterator[Path]:
    """Give ``place``, or a temporary copy of it where it cannot be written to."""
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        _log.warning("cannot keep compiled code in %s: %s", place, error)
        with tempfile.TemporaryDirectory() as temporary:
            if place.is_dir():
                shutil.copytree(place, temporary, dirs_exist_ok=True)
            yield Path(temporary)
        return
    yield place


def _object(place: Path, flavour: Flavour) -> bytes:
    path = _object_path(place, flavour)
    stored = _read(path)
    if stored is not None:
        return stored
    code = cpu_build.build(flavour)
    _write(path, code)
    return code


def _object_path(place: Path, flavour: Flavour) -> Path:
    return place / f"{flavour.name}.o"


def _fingerprint() -> str:
    """Hash everything that shapes the code: sources, compilers, CPU."""
    digest = hashlib.sha256()
    for module in _SOURCES:
        digest.update(Path(str(module.__file__)).read_bytes())
    for part in (
        llvmlite.__version__,
        numba.__version__,
        llvm.get_process_triple(),
        llvm.get_host_cpu_name(),
        llvm.get_host_cpu_features().flatten(),
    ):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def _read(path: Path) -> bytes | None:
    """Read a stored object; None if it is absent or damaged."""
    try:
        stored = path.read_bytes()
    except OSError:
        return None
    digest, code = stored[:_DIGEST_BYTES], stored[_DIGEST_BYTES:]
    if hashlib.sha256(code).digest() != digest:
        _log.warning("compiled code in %s is damaged: compiling again", path)
        return None
    return code


def _write(path: Path, code: bytes) -> None:
    """Store an object so that concurrent readers see all of it or nothing."""
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(code).digest() + code)
        Path(file.name).replace(path)
    except OSError as error:
        _log.debug("cannot write %s: %s", path, error)


def _load_kernels(code: bytes) -> Kernels:
    _make_library_visible()
    machine = cpu_build.target_machine()
    owner = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    owner.add_object_file(llvm.ObjectFileRef.from_data(code))
    owner.finalize_object()
    names: dict[int, str] = {row.code: name for name, row in ops.OPERATORS.items()}
    names |= {kernel.code: kernel.name for kernel in rules.partial_kernels()}
    names |= {schedule.COPY_CODE: COPY, rules.PRODUCT_CODE: cpu_partials.PRODUCT}
    addresses = np.zeros(rules.CODES, dtype=np.int64)
    for index, name in names.items():
        addresses[index] = owner.get_function_address(symbol(name))
    losses = {name: owner.get_function_address(symbol(name)) for name in LOSS_KERNELS}
    dots = [owner.get_function_address(symbol(shape.name)) for shape in cpu_dots.DOT_SHAPES]
    return Kernels(addresses, losses, np.array(dots, dtype=np.int64), owner)


def _make_library_visible() -> None:
    """Tell LLVM's linker where the C library's functions are."""
    name = ctypes.util.find_library("m")
    library = ctypes.CDLL(name)
    for function in sorted(ops.KERNEL_FUNCTIONS - {"abs"}):
        pointer = ctypes.cast(getattr(library, function), ctypes.c_void_p).value
        llvm.add_symbol(function, pointer)


_WORD: Final = types.int64
_WORDS: Final = types.Array(types.int64, 1, "C")
_NUMBERS: Final = types.Array(types.float64, 1, "C")
_MATRIX: Final = types.Array(types.float64, 2, "C")
_GIVEN_BYTES, _GIVEN_NUMBERS = (
    types.Array(kind, 1, "C", readonly=True) for kind in (types.uint8, types.float64)
)
_PIECE: Final = types.int64(_WORD, _WORD)
_Jit = Callable[[Any, Any], Any]


def _compile_combine(jit: _Jit) -> Any:
    """Compile what Python calls after pieces have run."""
    differentiated = numba.typeof(differentiate.empty(1, 1, 1))
    combine = types.void(
        *(_WORDS, _WORDS, differentiated, _GIVEN_NUMBERS, _WORDS, _WORDS, _NUMBERS),
        *(_NUMBERS, _NUMBERS, _MATRIX, _NUMBERS),
    )
    return jit(combine, cpu_linearise.combine)


def _compile_runners(jit: _Jit) -> tuple[Any, ...]:
    """Compile what runs pieces, in the order of `Compiled`."""
    return (
        jit(_PIECE, cpu_lower.lower_piece),
        jit(_PIECE, differentiate.differentiate_piece),
        jit(_PIECE, cpu_interpret.interpret_piece),
        jit(_PIECE, cpu_linearise.linearise_piece),
    )


def _compile_board(jit: _Jit) -> BoardCode:
    one = types.void(_WORDS)
    return BoardCode(
        lead=jit(types.int64(_WORDS, _WORD, _WORD), cpu_board.lead),
        withdraw=jit(types.void(_WORDS, _WORD), cpu_board.withdraw),
        compute=jit(one, cpu_board.compute),
        close=jit(one, cpu_board.close),
        run_alone=jit(types.int64(_WORDS, _WORD), cpu_board.run_alone),
    )


def _address_of(runner: Any) -> int:
    """Find where the function begins that C code may call."""
    (compiled,) = runner.overloads.values()
    name = compiled.fndesc.llvm_cfunc_wrapper_name
    return int(compiled.library.get_pointer_to_function(name))


@contextlib.contextmanager
def cached_in(directory: Path) -> Iterator[_Jit]:
    """Give a compiler whose results Numba keeps below ``directory``."""

    def jit(signature: Any, function: Any) -> Any:
        return numba.njit(signature, cache=True, nogil=True, error_model="numpy")(function)

    with _lock:
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = str(directory)
        try:
            yield jit
        finally:
            numba.config.CACHE_DIR = before
