"""Python that Numba compiles, translated to CUDA C++, computes what it computes on the host."""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from support.emulators.cuda_on_host import compile_for_host
from warpfit_server.engine.cuda.runtime.translation import (
    UntranslatableError,
    name_of,
    translate,
)
from warpfit_server.engine.native.intrinsics import inlined

Floats = NDArray[np.float64]
_MARGIN = 0.25
_KINDS = 3


class Given(NamedTuple):
    scale: float
    left_out: Any
    some: Floats


@inlined
def _both_ends(values: Floats, shift: float) -> Any:
    least, most = math.inf, -math.inf
    for i in range(len(values)):
        least, most = min(least, values[i] + shift), max(most, values[i] + shift)
    return least, most


@inlined
def _swap_first_two(values: Floats) -> None:
    values[0], values[1] = values[1], values[0]


@inlined
def example(table: Floats, own: Given, new: Floats) -> float:
    """Every statement and expression that the translator knows."""
    n = table.shape[1]
    total, count, found = 0.0, 0, False
    for turn in (True, False):
        for i in range(0, n, 2):
            if table[0, i] < 0.0 < own.scale and not turn:
                continue
            if i > 4 or own.left_out:
                break
            count += i % _KINDS + (i // 2 << 1 | 1) & 7
            total += abs(table[1, i]) ** 2 - math.sqrt(table[1, i] ** 2) ** 3 / (i + 1)
    row = table[1]
    middle = row[1 : n - 1]
    least, most = _both_ends(middle, -_MARGIN)
    _swap_first_two(new)
    while count > 3:
        count -= 3
        found = found or count in (4, 7)
    own.some[0] = new[0] = float(np.float32(total))
    if not (math.isfinite(least) and found):
        return math.floor(total) + count
    return total + least * most + 10.0 ** (most / (1.0 + abs(most))) + math.copysign(2.0, least)


@pytest.fixture(scope="module")
def translated():
    source = translate([example], never={"Given": ["left_out"]})
    return compile_for_host(
        source + 'extern "C" double call(double* table, int n, double* some, double* more) {\n'
        f"  return {name_of(example)}(Table<double>{{table, n}}, Given{{0.5, Never(), "
        "Line<double>{some, 1}}, Line<double>{more, 2});\n}"
    )


@settings(max_examples=50, deadline=None)
@given(numbers=st.lists(st.floats(-1e3, 1e3), min_size=6, max_size=20))
def test_it_computes_the_same(translated, numbers):
    table = np.array(numbers[: len(numbers) // 2 * 2]).reshape(2, -1)
    found, arrays = [], []
    for call in (example, None):
        own, some, more = table.copy(), np.zeros(1), np.array([3.0, 4.0])
        if call:
            found.append(call(own, Given(0.5, False, some), more))
        else:
            translated.call.restype = ctypes.c_double
            places = [ctypes.c_void_p(array.ctypes.data) for array in (own, some, more)]
            found.append(translated.call(places[0], own.shape[1], *places[1:]))
        arrays.append((own, some, more))
    assert found[0] == pytest.approx(found[1], rel=1e-15)
    for one, other in zip(*arrays, strict=True):
        np.testing.assert_array_equal(one, other)


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
