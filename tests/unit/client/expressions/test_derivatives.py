"""Derivatives in NumPy: the table's derivative column against differences."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.engines.operators import programs, vectors
from warpfit.expressions.reference import differentiate, evaluate_program
from warpfit.ir import Program
from warpfit.ops import OPERATORS, VARIABLE, Operator


def points(row: Operator) -> np.ndarray:
    """Operands at a distance from every kink and pole, where the operator is defined."""
    drawn = np.random.default_rng(row.code).uniform(-3, 3, size=(row.arity, 4000))
    kinks = drawn - 0.5 if row.name == "round" else drawn
    clear = (np.abs(kinks - np.round(kinks)) > 0.2).all(axis=0)
    if row.arity > 1:
        clear &= (np.abs(drawn[0] - drawn[1]) > 0.1) & (np.abs(drawn[1]) > 0.1)
    if row.name == "mod":
        quotient = drawn[0] / drawn[1]
        clear &= np.abs(quotient - np.round(quotient)) > 0.03 * (1 + abs(quotient)) / abs(drawn[1])
    if row.name == "tan":
        clear &= np.abs(np.cos(drawn[0])) > 0.3
    with np.errstate(all="ignore"):
        clear &= np.isfinite(row.numpy(*drawn)) & (np.abs(row.numpy(*drawn)) < 1e3)
    chosen = drawn[:, clear]
    assert chosen.shape[1] > 50
    return chosen


def applied(name: str) -> Program:
    return Program.apply(name, *(Program.variable(k) for k in range(OPERATORS[name].arity)))


def difference(function, at: np.ndarray, index: int, step: float) -> np.ndarray:
    """Central difference of order eight by ``at[index]``."""
    total = 0.0
    for distance, weight in ((1, 672), (2, -168), (3, 32), (4, -3)):
        for sign in (1, -1):
            shifted = at.copy()
            shifted[index] += sign * distance * step
            total = total + sign * weight * function(shifted)
    return total / (840 * step)


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_against_differences(name):
    row = OPERATORS[name]
    at = points(row)
    program = applied(name)
    _, slopes = differentiate(program, at, by=VARIABLE)
    for index in range(row.arity):
        want = difference(partial(evaluate_program, program), at, index, 0.004)
        defined = np.isfinite(want) & np.isfinite(slopes[index])
        assert defined.mean() > 0.4
        np.testing.assert_allclose(slopes[index][defined], want[defined], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", OPERATORS)
def test_finite_values_have_derivatives_that_are_numbers(name):
    """But for powers of negative numbers by their exponent."""
    arity = OPERATORS[name].arity
    indices = np.indices([6] * arity).reshape(arity, -1)
    columns = np.array([0.0, -0.0, 1.0, -1.0, 0.5, -2.0])[indices]
    values, slopes = differentiate(applied(name), columns, by=VARIABLE)
    if name == "pow":
        slopes[1, columns[0] < 0] = 0.0
    assert not np.isnan(slopes[:, np.isfinite(values)]).any()


SMOOTH = ("add", "sub", "mul", "neg", "sin", "cos", "atan", "tanh", "square", "aq", "logistic")


@given(programs(20, variables=2, parameters=2, operators=SMOOTH, constants=st.floats(-2, 2)))
def test_random_programs_against_differences(program):
    x = np.array([[0.3, -1.2, 0.7], [1.1, 0.4, -0.6]])
    p = np.array([0.8, -0.5])
    _, slopes = differentiate(program, x, p)
    for index in range(2):
        want = difference(partial(evaluate_program, program, x), p, index, 1e-3)
        scale = 1 + np.abs(want)
        np.testing.assert_allclose(slopes[index] / scale, want / scale, rtol=1e-8, atol=1e-8)


@given(programs(30), vectors(2))
def test_values_are_those_of_the_reference(program, parameters):
    x = np.array([[0.5, -2.0], [1.5, 0.0], [-1.0, 3.0]])
    values, slopes = differentiate(program, x, parameters)
    np.testing.assert_array_equal(values, evaluate_program(program, x, parameters))
    assert slopes.shape == (2, 2)
