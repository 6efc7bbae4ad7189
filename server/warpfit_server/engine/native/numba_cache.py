"""Numba's functions: compiled once, and kept on disk in files with checksums.

LLVM optimises a function once, together with all that it calls. Numba optimises each callee with
its own callees, makes machine code of it, and copies it into each caller, which is optimised again:
a function below ten others is compiled ten times. But most functions here are called from compiled
code only. So such a callee remains instructions, and the function that is called from outside is
compiled with all of them at once. The results are the same, and it takes a third to a half of the
time. The passes of Numba and LLVM are the usual ones. Numba's libraries are no public interface. So
this is for the versions that it was tested with, and with others functions are compiled as usual.

Numba finds types and writes LLVM's instructions in Python, which takes three quarters of the time
of compiling and gives the same on all machines. So a file with the sources holds what Numba has
written, before LLVM has seen for which processor. Where a cache has no machine code of a function,
LLVM makes it of these instructions. They count for exactly the sources that they were written from,
for `KNOWN_VERSIONS` of Numba, and for processors of one architecture. With others, functions are
compiled as usual. `warpfit_server.write_instructions` writes the file.

Numba's own cache reads its pickles without a check: a file that is cut off ends the process, a full
disk does too, and what anybody may have written is executed. Here the same pickles are in files of
`warpfit_server.compile_cache`, and what cannot be read is compiled again.

Numba and LLVM compile on one core, whatever the number of threads, and keep some 200 MiB of memory
afterwards. So several processes compile parts of the code into one directory, once for all engines
that share it, and an engine loads it from there. `begin` starts them: they compile the groups of
parts in the order in which they are needed, and `wait` waits for one group. A part that a process
fails to compile is compiled when it is loaded, and so is all code where there is no directory to
write to.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import hashlib
import logging
import lzma
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import llvmlite
import llvmlite.binding as llvm
import numba
from numba import config, types
from numba.core import caching, codegen, compiler
from numba.core.compiler_lock import global_compiler_lock
from numba.np import linalg

from warpfit.child_processes import python_child
from warpfit_server import compile_cache
from warpfit_server.compile_cache import default_cache_directory, numba_directory
from warpfit_server.machine import available_cores

_LOG: Final = logging.getLogger("warpfit.engine")
#: Versions whose libraries are known.
KNOWN_VERSIONS: Final = ((0, 68),)
INSTRUCTIONS: Final = Path(__file__).with_name("instructions.xz")
#: The types of a function that runs a chunk; see `argument_block`.
_CHUNK: Final = types.int64(types.int64, types.int64)
#: Niceness of threads that compute, which `engine_start` passes on from the setting. Threads that
#: take and answer calls need a core for a moment only and go before them; at the same priority
#: Linux may let those wait for 3 ms.
NICE: Final = int(os.environ.get("WARPFIT_ENGINE_NICE", "10"))
#: Niceness of compilers once the group is done for which a start waits.
_BACKGROUND_NICE: Final = 10
#: Of so many cores, one may load code while the engine serves.
_CORES_A_THREAD: Final = 4
#: Loads code that nobody waits for yet, in the order in which it is first needed.
BACKGROUND: Final = ThreadPoolExecutor(max(1, available_cores() // _CORES_A_THREAD), "compile")
#: Loads code that a caller waits for, who would otherwise wait for the code above, too.
WANTED: Final = ThreadPoolExecutor(2, "compile-wanted")


def _no_blas() -> None:
    raise ImportError("no compiled function calls BLAS")


# Numba imports SciPy, if there is one, only to look for BLAS: a fifth of the time of a start.
linalg.ensure_blas = _no_blas


# -------------------------------------------------------------------------------- libraries of code


class _WithParts(codegen.JITCodeLibrary):  # type: ignore[misc]
    """Code of a function, and the libraries of all that it calls, callees first."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.parts: dict[Any, None] = {}

    def add_linking_library(self, library: Any) -> None:
        """Remember a library that is linked with this one, and what that calls."""
        if isinstance(library, _Callee):
            self.parts.update(library.parts)
        self.parts[library] = None


class _Callee(_WithParts):
    """Instructions of a function that is called by others alone."""

    def finalize(self) -> None:
        """Leave the instructions as they are."""
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """Return no address, because there is no machine code."""
        return 0

    @property
    def codegen(self) -> Any:
        """Return what tells machine code where Python's objects are; there is no machine code."""
        return _NoMachineCode()

    def own_module(self) -> Any:
        """Return the instructions of this function alone, to be linked."""
        return super()._get_module_for_linking()

    def _get_module_for_linking(self) -> Any:
        """Return those of all that it calls, too, for libraries that know nothing of parts."""
        whole = self.own_module().clone()
        for part in reversed(self.parts):
            whole.link_in(_module(part), preserve=True)
        return whole


class Whole(_WithParts):
    """Machine code of a function with all that it calls."""

    instructions = ""
    """All instructions as text, before LLVM optimises them for a processor."""

    def finalize(self) -> None:
        """Link all parts, and compile them."""
        for part in reversed(self.parts):  # LLVM takes a callee only if there is a caller
            self._final_module.link_in(_module(part), preserve=True)
        self.instructions = str(self._final_module)
        super().finalize()


class _NoMachineCode:
    """Stands for Numba's code generator."""

    def set_env(self, name: str, environment: Any) -> None:
        """Do nothing: it is for functions that Python calls."""


def _module(part: Any) -> Any:
    return part.own_module() if isinstance(part, _Callee) else part._get_module_for_linking()


def machine_code(generator: Any, name: str, instructions: str) -> Any:
    """Compile the instructions of a `Whole`; return what Numba's cache keeps of a library.

    The passes of LLVM, and so the machine code, are those of `Whole.finalize`.
    """
    library = Whole(generator, name)
    library._final_module = llvm.parse_assembly(instructions)
    library._optimize_final_module()
    library._final_module.verify()
    library._finalized = True
    shared = library._get_module_for_linking().as_bitcode()
    return name, "object", (generator._tm.emit_object(library._final_module), shared)


class WholeCompiler(compiler.Compiler):  # type: ignore[misc]
    """Compiles a function that is called from Python, or at an address, with all that it calls."""

    def compile_extra(self, func: Any) -> Any:
        """Compile a function; what is compiled meanwhile are its callees."""
        generator = self.state.targetctx.codegen()
        create = generator.create_library
        generator.create_library = partial(_Callee, generator)
        try:
            return super().compile_extra(func)
        finally:
            generator.create_library = create

    def define_pipelines(self) -> Any:
        """Return the usual passes, which fill a library of this function."""
        state = self.state
        state.library = Whole(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
        return super().define_pipelines()


def compiler_options() -> dict[str, Any]:
    """Return the options of ``numba.njit`` for functions that are called from outside."""
    is_known = numba.version_info.short in KNOWN_VERSIONS
    return {"pipeline_class": WholeCompiler} if is_known else {}


# ------------------------------------------------------------------------------------- instructions


class Function(NamedTuple):
    """A function as the file has it."""

    signature: str
    """Types of the arguments."""
    library: str
    """Name of the library that Numba makes of it."""
    instructions: str
    """LLVM's, of the function with all that it calls."""
    rest: tuple[Any, ...]
    """The other fields of a function in Numba's cache."""


def from_instructions(function: Any, signature: Any, target: Any) -> Any:
    """Return a function in the form in which Numba's cache keeps it; None if it has to be compiled.

    LLVM makes machine code of the instructions, for the processor of this machine. Where Numba is
    told another one, as by the program that writes the instructions, functions are compiled.

    Args:
        function: the Python function.
        signature: types of its arguments.
        target: Numba's context of the processor.
    """
    content = None if config.CPU_NAME else _read_instructions().get(name_of(function))
    if content is None:
        return None
    found = Function(*pickle.loads(content))
    if found.signature != str(signature):
        return None
    code = machine_code(target.codegen(), found.library, found.instructions)
    return code, *found.rest


@functools.cache
def _read_instructions() -> dict[str, bytes]:
    """Return the functions by name; none if the file was written from other sources.

    Each is pickled by itself, because reading it imports its module: those of CUDA need packages
    that not every machine has.
    """
    try:
        of_sources, functions = lzma.decompress(INSTRUCTIONS.read_bytes()).split(b"\n", 1)
    except (OSError, ValueError, lzma.LZMAError):
        return {}
    if of_sources.decode() != stamp():
        return {}
    found: dict[str, bytes] = pickle.loads(functions)
    return found


def stamp() -> str:
    """Return what the instructions depend on: sources, Numba's version, and the architecture."""
    version = ".".join(str(number) for number in numba.version_info.short)
    return " ".join([compile_cache.source_fingerprint(), version, llvm.get_process_triple()])


def name_of(function: Any) -> str:
    """Return the name of a Python function in the file."""
    return f"{function.__module__}.{function.__qualname__}"


# ---------------------------------------------------------------------------------------- the cache


def njit(**options: Any) -> Any:
    """Return a decorator for functions that are compiled at calls, and whose code is kept on disk.

    Its options are those of ``numba.njit``, but for ``cache``.
    """

    def decorate(function: Any) -> Any:
        compiled = numba.njit(**compiler_options(), **options)(function)
        if numba.config.DISABLE_JIT:
            return compiled
        compiled._cache = _SealedCache(function)
        return compiled

    return decorate


class _Locator(caching.UserProvidedCacheLocator):  # type: ignore[misc]
    """Tells Numba the directory of a function's code, which need not exist.

    It depends on the function's module, and not on where and when that was installed.
    """

    def __init__(self, function: Any, source: str) -> None:
        super().__init__(function, source)
        self._cache_path = str(default_directory() / function.__module__)

    def get_source_stamp(self) -> str:
        """Return nothing: each version of the sources has a directory of its own."""
        return ""

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> _Locator:
        """Serve any function."""
        return cls(py_func, py_file)

    def ensure_cache_path(self) -> None:
        """Do nothing: the directory is made when a file is written."""


class _SealedFiles(caching.IndexDataCacheFile):  # type: ignore[misc]
    """Numba's index and data files, with checksums."""

    def _load_index(self) -> dict[Any, str]:
        content = compile_cache.find(Path(self._index_path))
        if content is None:
            return {}
        version, rest = pickle.loads(content)
        if version != self._version:  # the rest might not be readable
            return {}
        stamp, overloads = pickle.loads(rest)
        return overloads if stamp == self._source_stamp else {}

    def _save_index(self, overloads: dict[Any, str]) -> None:
        rest = self._dump((self._source_stamp, overloads))
        compile_cache.write(Path(self._index_path), pickle.dumps((self._version, rest)))

    def _load_data(self, name: str) -> Any:
        content = compile_cache.find(Path(self._data_path(name)))
        if content is None:
            raise FileNotFoundError(name)  # which Numba takes for a miss
        return pickle.loads(content)

    def _save_data(self, name: str, data: Any) -> None:
        compile_cache.write(Path(self._data_path(name)), self._dump(data))


class _Implementation(caching.CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_Locator,)


class _SealedCache(caching.FunctionCache):  # type: ignore[misc]
    _impl_class = _Implementation

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        locator = self._impl.locator
        self._cache_file = _SealedFiles(
            locator.get_cache_path(), self._impl.filename_base, locator.get_source_stamp()
        )

    def load_overload(self, signature: Any, target: Any) -> Any:
        """Load a function's machine code; if it is not kept yet, make it of the instructions."""
        found = super().load_overload(signature, target)
        if found is None:
            made = from_instructions(self._py_func, signature, target)
            if made is not None:
                self._cache_file.save(self._index_key(signature, target.codegen()), made)
                found = self._impl.rebuild(target, made)
        return found


def load(function: Any, signature: Any) -> None:
    """Load the code of a function of `njit`, or compile it and try to store it.

    Calls convert their arguments to the types of the signature from then on, and never compile.
    """
    with global_compiler_lock:
        function.disable_compile(False)
        # Numba looks for the types of a call's arguments: code that is stored with a whole
        # signature would be found by this function alone, and compiled again by a call.
        function.compile(signature.args)
        function.disable_compile()
    found = function.overloads[signature.args].signature.return_type
    assert found == signature.return_type, f"{function} returns {found}"


def load_chunk_function(function: Any) -> None:
    """Load the code of a function that runs a chunk, see `argument_block`, as `load` does."""
    load(function, _CHUNK)


@functools.cache
def address_of(function: Any) -> int:
    """Return the address at which C code may call a compiled function."""
    (compiled,) = function.overloads.values()
    name = compiled.fndesc.llvm_cfunc_wrapper_name
    return int(compiled.library.get_pointer_to_function(name))


@functools.cache
def host_tag() -> str:
    """Return a hash of the compilers and of this very processor, for which they compile."""
    host = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    compilers = sys.implementation.cache_tag, llvmlite.__version__, numba.__version__
    text = "\0".join([*host, *compilers, llvm.get_process_triple()])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def default_directory() -> Path:
    """Return where code is kept that was compiled of exactly these sources."""
    named = os.environ.get("NUMBA_CACHE_DIR")
    return Path(named) if named else _own_directory()


@functools.cache
def _own_directory() -> Path:
    """Return the directory for processes without `compile_cache.engine_environment`."""
    return numba_directory(default_cache_directory())


# ------------------------------------------------------------------------------------ the processes


def begin(
    place: Path, module: str, groups: Mapping[str, Mapping[tuple[str, ...], float]], processes: int
) -> None:
    """Start processes that compile what nobody has compiled yet, and return at once.

    Each one has the lock of every group until it has compiled its share of that group. So one
    engine at a time has a group compiled, and `wait` is over when the last process has done its
    share, which notes that the group is done, even if the engine has ended itself.

    Args:
        place: a directory, which need not exist.
        module: is run by ``python -m`` and calls `run_parts`.
        groups: seconds that parts take to compile, by group in the order of need. Parts of one key
            are compiled by one process.
        processes: how many processes there are at most.
    """
    missing = [group for group in groups if not os.access(place / f"{group}.complete", os.F_OK)]
    with contextlib.ExitStack() as stack:
        locks: dict[str, int] = {}
        for group in missing:
            try:
                locks[group] = stack.enter_context(_locked(place, group, fcntl.LOCK_NB))
            except BlockingIOError:
                continue  # others compile it
            except OSError as error:  # as on a disk that is full or read-only
                _LOG.warning("cannot compile by several processes: %s", error)
                return
        if locks:
            _LOG.info("compiling %s into %s (first start only)", ", ".join(locks), place)
        for share in _share_out([groups[group] for group in locks], processes):
            words = [
                f"{lock}:{group}:{','.join(names)}"
                for (group, lock), names in zip(locks.items(), share, strict=True)
            ]
            child = python_child("-m", module, str(place), *words)
            streams: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
            # Not in the working directory, where Numba would look for a file of settings.
            started = subprocess.Popen(**child, **streams, pass_fds=list(locks.values()), cwd="/")
            threading.Thread(target=_watch, args=(started, words), daemon=True).start()


def wait(place: Path, group: str) -> None:
    """Wait until no process compiles a group any more."""
    if not os.access(place / f"{group}.complete", os.F_OK):
        _note_done(place, group)


def run_parts(parts: Mapping[str, Callable[[], object]], arguments: Sequence[str]) -> None:
    """Compile parts in this process, which `begin` has started with these arguments.

    These are the directory, and for each group its lock, its name and the names of parts.
    """
    gc.disable()  # almost nothing is garbage, and looking for it takes a seventh of the time
    place = Path(arguments[0])
    for index, word in enumerate(arguments[1:]):
        lock, group, names = word.split(":", 2)
        if index == 1:
            os.nice(_BACKGROUND_NICE)  # from here on evaluations have priority
        for name in names.split(",") if names else ():
            parts[name]()
        os.close(int(lock))
        _note_done(place, group, fcntl.LOCK_NB)  # unless another process is at it: that will


def _note_done(place: Path, group: str, flag: int = 0) -> None:
    """Note that a group is compiled, once no process has its lock."""
    with contextlib.suppress(OSError), _locked(place, group, flag):
        compile_cache.write_plain(place / f"{group}.complete", b"")


def _share_out(
    groups: Sequence[Mapping[tuple[str, ...], float]], processes: int
) -> list[list[list[str]]]:
    """Return for each process its parts of each group.

    The longest part of a group comes first, and goes to the process with least to do.
    """
    count = min(processes, sum(map(len, groups)))
    found = [[list[str]() for _ in groups] for _ in range(count)]
    busy = [0.0] * count
    for group, seconds in enumerate(groups):
        for names in sorted(seconds, key=lambda names: -seconds[names]):
            least = busy.index(min(busy))
            found[least][group] += names
            busy[least] += seconds[names]
    return found


def _watch(child: subprocess.Popen[bytes], words: Sequence[str]) -> None:
    if child.wait():
        _LOG.warning("a process that compiled %s ended with %s", words, child.returncode)


@contextlib.contextmanager
def _locked(place: Path, group: str, flag: int = 0) -> Iterator[int]:
    """Lock a group and yield the descriptor of the lock.

    Raises:
        BlockingIOError: if it is locked and the flag is ``LOCK_NB``.
        OSError: if the file cannot be made.
    """
    compile_cache.make_private_directory(place)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    with os.fdopen(os.open(place / f"{group}.lock", flags, 0o600), "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | flag)
        except BlockingIOError:
            raise
        except OSError as error:  # some network file systems; then two may compile the same
            _LOG.debug("cannot lock %s: %s", group, error)
        yield file.fileno()
