"""All CUDA sources compile and assemble, and their structs are those of the host."""

from __future__ import annotations

import ctypes
import re
from importlib import resources

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.nvrtc")
pytest.importorskip("cuda.bindings.nvjitlink")

from support.emulators.cuda_on_host import compile_for_host
from warpfit_server.engine.cuda.derivatives import fits
from warpfit_server.engine.cuda.derivatives import launches as derivatives
from warpfit_server.engine.cuda.derivatives.lowering import PROGRAM
from warpfit_server.engine.cuda.derivatives.source import derivative_source
from warpfit_server.engine.cuda.interpreter import launches
from warpfit_server.engine.cuda.interpreter.source import (
    Variant,
    interpreter_source,
    lowering_source,
)
from warpfit_server.engine.cuda.jit.graph import graph_source
from warpfit_server.engine.cuda.runtime.driver_calls import argument_type
from warpfit_server.engine.cuda.search import colony, pairs
from warpfit_server.engine.cuda.search.pairs import pairs_source
from warpfit_server.engine.interface import Arithmetic

FAST = Variant(Arithmetic.FAST, 4)
PRECISE = Variant(Arithmetic.PRECISE, 4)
DOUBLE = Variant(Arithmetic.DOUBLE, 2)
#: Those of derivatives take fewer rows.
FAST_DERIVATIVES = Variant(Arithmetic.FAST, 2)
PRECISE_DERIVATIVES = Variant(Arithmetic.PRECISE, 2)
DOUBLE_DERIVATIVES = Variant(Arithmetic.DOUBLE, 1)
#: The interpreter's variant or that of derivatives, and whether these spill, by architecture; few
#: rows a thread assemble sooner.
INTERPRETED = {75: DOUBLE, 86: PRECISE, 89: FAST, 100: FAST}
#: That of a search's colony, and the width of its genomes.
COLONIES = {75: (DOUBLE, 128), 86: (FAST, 64), 90: (FAST, 256), 120: (DOUBLE, 256)}
DIFFERENTIATED = {
    **{80: (PRECISE_DERIVATIVES, True), 90: (FAST_DERIVATIVES, True)},
    **{120: (DOUBLE_DERIVATIVES, False)},
}


#: Each kind of kernel once.
USUAL = (75, 90)
ALL = [
    pytest.param(one, marks=() if one in USUAL else pytest.mark.thorough)
    for one in sorted({*INTERPRETED, *DIFFERENTIATED})
]


@pytest.mark.parametrize("architecture", ALL)
def test_kernels_assemble(architecture):
    others = [
        (lowering_source(), ("lower_programs", "order_programs")),
        (graph_source(), ("sum_partials", "copy_inputs")),
        (pairs_source(architecture in (80, 90, 100)), pairs.KERNELS),
    ]
    sources = [] if architecture == USUAL[0] else others
    if architecture in INTERPRETED:
        kernels = ("interpret", "evaluate_slots", "sum_partials")
        sources.append((interpreter_source(INTERPRETED[architecture]), kernels))
    if architecture in DIFFERENTIATED:
        variant, spills = DIFFERENTIATED[architecture]
        kernels = ("linearise", "evaluate_invariants", "combine", "measure")
        kernels += () if spills else ("fit",)
        sources.append((derivative_source(variant, spills=spills), kernels))
    for source, kernels in sources:
        assert_assembles(source, architecture, kernels)


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(one, marks=() if one == 86 else pytest.mark.thorough) for one in COLONIES],
)
def test_kernels_of_a_colony_assemble(architecture):
    source = colony.colony_source(*COLONIES[architecture])
    assert_assembles(source, architecture, colony.KERNELS)


def assert_assembles(source, architecture, kernels):
    cubin = source.compile(architecture)
    assert cubin.startswith(b"\x7fELF")
    assert all(kernel.encode() in cubin for kernel in kernels)


# ------------------------------------------------------------------------------------------ structs


STRUCTS = [
    ("interpreter/batch.cu", "Batch", launches.BATCH),
    ("interpreter/batch.cu", "Part", launches.PART),
    ("interpreter/interpreter.cu", "Tiles", launches.TILES),
    ("interpreter/interpreter.cu", "Jobs", launches.JOBS),
    ("derivatives/derivatives.cu", "Arguments", derivatives.DERIVATIVE_ARGUMENTS),
    ("derivatives/derivatives.cu", "Program", PROGRAM),
    ("derivatives/fit.cu", "FitArguments", fits.FIT_ARGUMENTS),
    ("search/colony.cu", "Colony", colony.COLONY),
    ("derivatives/statistics.cu", "StatisticsArguments", derivatives.STATISTICS_ARGUMENTS),
    ("search/pairs.cu", "Pairs", pairs.PAIRS),
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
