"""The kernels' arguments: their fields lie where the CUDA sources say."""

from __future__ import annotations

import ctypes
import re
from importlib import resources

import numpy as np
import pytest

from support.emulators.cuda_on_host import compile_for_host
from warpfit_server.engine.cuda.derivatives import launches as derivatives
from warpfit_server.engine.cuda.derivatives.lowering import PROGRAM
from warpfit_server.engine.cuda.interpreter import launches
from warpfit_server.engine.cuda.runtime.driver_calls import argument_type

STRUCTS = [
    ("interpreter/batch.cu", "Batch", launches.BATCH),
    ("interpreter/batch.cu", "Part", launches.PART),
    ("interpreter/interpreter.cu", "Tiles", launches.TILES),
    ("interpreter/interpreter.cu", "Jobs", launches.JOBS),
    ("derivatives/derivatives.cu", "Arguments", derivatives.DERIVATIVE_ARGUMENTS),
    ("derivatives/derivatives.cu", "Program", PROGRAM),
    ("derivatives/statistics.cu", "StatisticsArguments", derivatives.STATISTICS_ARGUMENTS),
]


def struct(path: str, name: str) -> str:
    source = resources.files("warpfit_server.engine.cuda").joinpath(path).read_text()
    found = re.search(rf"^struct {name} {{.*?^}};", source, re.DOTALL | re.MULTILINE)
    assert found
    return found[0]


@pytest.mark.parametrize(("path", "name", "dtype"), STRUCTS, ids=lambda given: str(given)[:30])
def test_fields_lie_where_the_source_says(path, name, dtype):
    names = ("Program", "Entry", "Load", "Statistics", "Node", "Part")
    others = "".join(f"struct {other};" for other in names)
    places = ", ".join(f"__builtin_offsetof({name}, {field})" for field in dtype.names)
    library = compile_for_host(
        f"typedef float real; {others} {struct(path, name)}\n"
        f'extern "C" long places[] = {{{places}, (long)sizeof({name})}};'
    )
    found = (ctypes.c_long * (len(dtype.names) + 1)).in_dll(library, "places")
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
