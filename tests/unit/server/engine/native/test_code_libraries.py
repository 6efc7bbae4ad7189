"""A function is compiled once with all that it calls, and behaves as Numba's own functions do."""

from __future__ import annotations

import pytest

pytest.importorskip("numba")

import numba
import numpy as np
from numba import types
from numba.extending import register_jitable

from warpfit_server.engine.native import code_libraries
from warpfit_server.engine.native.intrinsics import inlined, uncounted
from warpfit_server.engine.native.numba_cache import load, njit


@pytest.fixture(autouse=True)
def _place(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))


def makers():
    """Decorators of functions that compiled code calls."""
    return [inlined, uncounted, register_jitable, numba.njit]


def chain(decorate, root):
    """Return a function that calls others, some of them in two ways and with two types."""

    @decorate
    def power(number, exponent):
        return number if exponent == 1 else number * power_of(number, exponent - 1)

    @decorate
    def power_of(number, exponent):
        result = number
        for _ in range(exponent - 1):
            result *= number
        return result

    @decorate
    def norm(vector):
        total = 0.0
        for i in range(len(vector)):
            total += power(vector[i], 2)
        return total

    @root
    def combine(vector, exponent):
        if exponent < 1:
            raise ValueError("no such power")
        return norm(vector) + power(exponent, 3) + power_of(vector[0], exponent)

    return combine, norm


def signature():
    return types.float64(types.float64[::1], types.int64)


@pytest.mark.parametrize("known", [code_libraries.KNOWN_VERSIONS, ()])
@pytest.mark.parametrize("decorate", makers())
def test_callees_are_compiled_with_the_function_that_calls_them(decorate, known, monkeypatch):
    """With a version of Numba that is not known they are compiled as usual."""
    monkeypatch.setattr(code_libraries, "KNOWN_VERSIONS", known)
    vector = np.array([1.5, -2.0])
    for _ in range(2):  # compiled, and from the disk
        combine, _ = chain(decorate, njit(error_model="numpy"))
        load(combine, signature())
        assert combine(vector, 2) == 6.25 + 8 + 2.25
        with pytest.raises(ValueError, match="no such power"):
            combine(vector, 0)


@pytest.mark.skipif(not code_libraries.compiler_options(), reason="a version that is not known")
def test_a_callee_has_no_machine_code_of_its_own():
    combine, norm = chain(numba.njit, njit(error_model="numpy"))
    load(combine, signature())
    (callee,), (whole,) = norm.overloads.values(), combine.overloads.values()
    assert callee.library.get_pointer_to_function(callee.fndesc.llvm_func_name) == 0
    assert whole.library.get_pointer_to_function(whole.fndesc.llvm_func_name) != 0


@pytest.mark.parametrize("decorate", makers())
def test_other_functions_may_call_a_callee_too(decorate):
    combine, norm = chain(decorate, njit(error_model="numpy"))
    load(combine, signature())

    @numba.njit
    def plain(vector):
        return norm(vector) + 1.0

    assert plain(np.array([3.0, 1.0])) == 11.0
    other, _ = chain(decorate, njit(error_model="numpy"))
    load(other, signature())
    assert other(np.array([3.0]), 1) == 9.0 + 1.0 + 3.0


def test_one_function_that_python_calls_may_call_another():
    combine, _ = chain(inlined, njit(error_model="numpy"))

    @njit(error_model="numpy")
    def twice(vector, exponent):
        return 2.0 * combine(vector, exponent)

    load(twice, signature())
    load(combine, signature())
    vector = np.array([1.5, -2.0])
    assert twice(vector, 2) == 2.0 * combine(vector, 2) == 33.0
    with pytest.raises(ValueError, match="no such power"):
        twice(vector, 0)
