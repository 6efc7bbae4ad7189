"""All CUDA sources compile; structs are the host's; what cannot be translated is named."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from importlib import resources
from unittest.mock import Mock

import numpy as np
import pytest
from numpy.typing import NDArray

from support.emulators.cuda_on_host import compile_for_host
from warpfit_server.engine.cuda import colony
from warpfit_server.engine.cuda.colony import pairs_source
from warpfit_server.engine.cuda.derivatives import launches as derivatives
from warpfit_server.engine.cuda.derivatives import tier
from warpfit_server.engine.cuda.derivatives.lowering import PROGRAM, derivative_source
from warpfit_server.engine.cuda.interpreter import launches
from warpfit_server.engine.cuda.jit import kernel_store
from warpfit_server.engine.cuda.jit.tier import graph_source
from warpfit_server.engine.cuda.runtime.device import DRIVER, argument_type
from warpfit_server.engine.cuda.runtime.translation import UntranslatableError, name_of, translate
from warpfit_server.engine.interface import Arithmetic
from warpfit_server.engine.native.intrinsics import inlined

F, P, D = Arithmetic.FAST, Arithmetic.PRECISE, Arithmetic.DOUBLE
#: The interpreter's variant by architecture; few rows a thread assemble sooner.
INTERPRETED = {75: (D, 2), 86: (P, 4), 89: (F, 4), 100: (F, 4)}
#: That of derivatives, which takes fewer rows, and whether programs spill.
DIFFERENTIATED = {80: (P, 2, True), 90: (F, 2, True), 120: (D, 1, False)}
#: That of a search's colony, and the width of its genomes.
COLONIES = {75: (D, 2, 128), 86: (F, 4, 64), 90: (F, 4, 256), 120: (D, 2, 256)}
#: Each kind of kernel once.
USUAL = (75, 90)
ALL = [
    pytest.param(one, marks=() if one in USUAL else pytest.mark.thorough)
    for one in sorted({*INTERPRETED, *DIFFERENTIATED})
]


@pytest.mark.parametrize("architecture", ALL)
def test_kernels_assemble(architecture):
    others = [
        (launches.lowering_source(), ("lower_programs", "order_programs")),
        (graph_source(), ("sum_partials", "copy_inputs")),
        (pairs_source(architecture in (80, 90, 100)), colony.PAIR_KERNELS),
    ]
    sources = [] if architecture == USUAL[0] else others
    if architecture in INTERPRETED:
        kernels = ("interpret", "evaluate_slots", "sum_partials")
        variant = launches.Variant(*INTERPRETED[architecture])
        sources.append((launches.interpreter_source(variant), kernels))
    if architecture in DIFFERENTIATED:
        *variant, spills = DIFFERENTIATED[architecture]
        kernels = ("linearise", "evaluate_invariants", "combine", "measure")
        kernels += () if spills else ("fit",)
        sources.append((derivative_source(launches.Variant(*variant), spills=spills), kernels))
    for source, kernels in sources:
        assert_assembles(source, architecture, kernels)


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(one, marks=() if one == 86 else pytest.mark.thorough) for one in COLONIES],
)
def test_kernels_of_a_colony_assemble(architecture):
    *variant, width = COLONIES[architecture]
    source = colony.colony_source(launches.Variant(*variant), width)
    assert_assembles(source, architecture, colony.KERNELS)


def assert_assembles(source, architecture, kernels):
    cubin = source.compile(architecture)
    assert cubin.startswith(b"\x7fELF")
    assert all(kernel.encode() in cubin for kernel in kernels)


STRUCTS = [
    ("interpreter/batch.cu", "Batch", launches.BATCH),
    ("interpreter/batch.cu", "Part", launches.PART),
    ("interpreter/interpreter.cu", "Tiles", launches.TILES),
    ("interpreter/interpreter.cu", "Jobs", launches.JOBS),
    ("derivatives/derivatives.cu", "Arguments", derivatives.DERIVATIVE_ARGUMENTS),
    ("derivatives/derivatives.cu", "Program", PROGRAM),
    ("derivatives/fit.cu", "FitArguments", tier.FIT_ARGUMENTS),
    ("colony.cu", "Colony", colony.COLONY),
    ("derivatives/statistics.cu", "StatisticsArguments", derivatives.STATISTICS_ARGUMENTS),
    ("pairs.cu", "Pairs", colony.PAIRS),
]


def struct(path: str, name: str) -> str:
    source = resources.files("warpfit_server.engine.cuda").joinpath(path).read_text()
    found = re.search(rf"^struct {name} {{.*?^}};", source, re.DOTALL | re.MULTILINE)
    assert found
    return found[0]


@pytest.fixture(scope="module")
def structs():
    """Places of the fields of all structs, by name, as the compiler of this machine lays them out.

    Each is in a namespace of its own: two sources have a `Part`.
    """
    others = ("Program", "Entry", "Load", "Statistics", "Node", "Part")
    source = "typedef float real;"
    for number, (path, name, dtype) in enumerate(STRUCTS):
        places = ", ".join(f"__builtin_offsetof({name}, {field})" for field in dtype.names)
        declared = "".join(f"struct {other};" for other in others)
        source += (
            f"\nnamespace n{number} {{ {declared} {struct(path, name)}\n"
            f'extern "C" long places_{name}[] = {{{places}, (long)sizeof({name})}}; }}'
        )
    return compile_for_host(source)


@pytest.mark.parametrize(("path", "name", "dtype"), STRUCTS, ids=lambda given: str(given)[:30])
def test_fields_lie_where_the_source_says(structs, path, name, dtype):
    found = (ctypes.c_long * (len(dtype.names) + 1)).in_dll(structs, f"places_{name}")
    expected = [dtype.fields[field][1] for field in dtype.names]
    assert list(found) == [*expected, dtype.itemsize]
    made = argument_type(dtype)
    assert [getattr(made, field).offset for field in dtype.names] == expected
    assert ctypes.sizeof(made) == dtype.itemsize
    with pytest.raises(AttributeError):
        made().no_such_field = 1


def test_statistics_have_as_many_numbers_as_their_memory():
    text = struct("derivatives/statistics.cu", "Statistics")
    assert len(re.findall(r"\w+(?=[,;])", text)) == derivatives.NODE_STATISTICS
    assert np.dtype(np.float64).itemsize * derivatives.NODE_STATISTICS == 112


Floats = NDArray[np.float64]


@inlined
def example(table: Floats, scale: float) -> float:
    """Words of the language that no kernel has at present; tests of genomes compare the others."""
    total, count, found = 0.0, 0, False
    for i in range(0, table.shape[1], 2):
        if table[0, i] < 0.0 < scale and not found:
            continue
        count += i % 3 + (i // 2 << 1 | 1) & 7
        found = found or count in (4, 7)
        total += table[1, i] / (i + 1) + count / 3
    return total + count


def test_it_computes_the_same():
    library = compile_for_host(
        f'{translate([example])}\nextern "C" double call(double* table, int n, double scale) '
        f"{{ return {name_of(example)}(Table<double>{{table, n}}, scale); }}"
    )
    library.call.restype = ctypes.c_double
    for table in np.random.default_rng(0).normal(size=(20, 2, 15)):
        for scale in (1.0, -1.0):
            given = ctypes.c_void_p(table.ctypes.data), 15, ctypes.c_double(scale)
            assert library.call(*given) == pytest.approx(example(table, scale), rel=1e-15)


def _sum_of_generator(values: Floats) -> float:
    return sum(value for value in values)


def _keyword(values: Floats) -> float:
    return max(values[0], values[1], key=abs)


def _late(values: Floats) -> float:
    if values[0] > 0.0:
        found = values[0]
    return found


@pytest.mark.parametrize("function", [_sum_of_generator, _keyword, _late])
def test_what_it_does_not_know_is_named(function):
    with pytest.raises(UntranslatableError, match=rf"{function.__name__}, line \d"):
        translate([function])


#: Prints the functions whose code is kept on disk and that no part of the CUDA engine has loaded.
SCRIPT = """
import sys
from warpfit_server.engine.cuda import engine, parts
from warpfit_server.engine.native.numba_cache import _SealedCache

for group in parts.GROUPS:
    parts.load_host_code(group)
modules = [m for name, m in sorted(sys.modules.items()) if name.startswith("warpfit_server.")]
functions = {id(f): f for module in modules for f in vars(module).values()}.values()
for function in functions:
    if isinstance(getattr(function, "_cache", None), _SealedCache) and not function.signatures:
        print(function.__module__.rpartition(".")[2], function.__name__)
"""
#: Compiled code alone calls the first, and the CPU engine the second.
OTHERS = {"launches max_slots", "lowering lower_chunk"}


def test_parts_load_all_functions_that_the_engine_calls():
    """The engine would compile any other function itself, for up to 20 s with Python's lock."""
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    # Compiling a function compiles those that it calls; loading its code does not load theirs.
    assert set(done.stdout.splitlines()) <= OTHERS


def test_modules_are_loaded_by_the_function_that_a_part_compiles():
    kernel_store.load()
    assert kernel_store.load_modules(Mock(functions=np.zeros(1, DRIVER)), []) == []
    assert len(kernel_store._load.signatures) == 1
