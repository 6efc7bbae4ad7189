"""The CPU engine, operator by operator, over the whole table."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from support.engines import hard_cases
from support.engines.accuracy import BOUNDS, Bound, excess, rounded_threshold, ulps
from support.engines.operators import edge_values, node_results, operand_rows
from support.random_programs import random_program
from warpfit.dataset import Dataset
from warpfit.ir import Program
from warpfit.ops import OPERATORS
from warpfit.request import Precision

DTYPES = ("float32", "float64")
#: Of pi/2, beside which the circular functions are tried.
MULTIPLES = 200_000
#: Operators whose zeros have NumPy's sign: of 0 and -0 the lesser and the greater are either.
SIGNED_ZEROS = tuple(name for name in OPERATORS if name not in ("min", "max", "relu"))


def operands_of(arity: int, dtype: str) -> np.ndarray:
    return operand_rows(arity, np.dtype(dtype).type)[:arity]


def dataset(columns: np.ndarray) -> Dataset:
    return Dataset.of(columns.T, dtype=columns.dtype)


def apply(name: str) -> Program:
    return Program.apply(name, *(Program.variable(k) for k in range(OPERATORS[name].arity)))


def assert_bound(bound: Bound, name: str, operands: np.ndarray, got: np.ndarray, exact=None):
    if exact is None:
        exact = hard_cases.exact_values(OPERATORS[name], operands)
    share = excess(bound, list(operands), got, exact)
    worst = int(share.argmax())
    assert share[worst] <= 1, (name, operands[:, worst], got[worst])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATORS)
def test_published_bounds_hold_at_hard_operands(evaluate, name, dtype):
    op, bounds = OPERATORS[name], BOUNDS[name]
    columns = np.hstack([operands_of(op.arity, dtype), hard_cases.hard_operands(op, dtype)])
    if name in hard_cases.SLOW:  # whose truth takes long
        columns = columns[:, ::60]
    if name in ("pdiv", "plog", "pinv"):
        columns = columns[:, ~rounded_threshold(list(columns), dtype)]
    data, exact = dataset(columns), hard_cases.exact_values(op, columns)
    if dtype == "float32":
        fast = evaluate(data, [apply(name)], precision=Precision.FAST).values[0, 0]
        assert_bound(bounds.fast_cpu, name, columns, fast, exact)
    got = evaluate(data, [apply(name)]).values[0, 0]
    assert_bound(bounds.precise_cpu, name, columns, got, exact)
    if name in SIGNED_ZEROS:
        with np.errstate(all="ignore"):
            expected = op.numpy(*columns.astype(np.float64)).astype(dtype)
        zero = (expected == 0) & (got == 0)
        np.testing.assert_array_equal(np.signbit(got[zero]), np.signbit(expected[zero]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["sin", "cos", "tan"])
def test_circular_functions_next_to_multiples_of_half_pi(evaluate, name, dtype):
    """A reduction that loses a few bits shows nowhere else: sin was once 2,036 ulp off."""
    columns = hard_cases.near_multiples_of_half_pi(dtype, MULTIPLES)[np.newaxis]
    got = evaluate(dataset(columns), [apply(name)]).values[0, 0]
    error = ulps(got, hard_cases.exact_values(OPERATORS[name], columns))
    worst = int(error.argmax())
    assert error[worst] <= 1, (columns[:, worst], got[worst])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", [2.0, 3.0, 4.0, -1.0, -2.0, 1.0, 0.0, 0.5, 2.5])
def test_powers_with_constant_exponent(evaluate, exponent, dtype):
    columns = operands_of(1, dtype)
    program = Program.apply("pow", Program.variable(0), Program.constant(exponent))
    got = evaluate(dataset(columns), [program]).values[0, 0]
    operands = np.stack([columns[0], np.full_like(columns[0], exponent)])
    assert_bound(BOUNDS["pow"].precise_cpu, "pow", operands, got)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [n for n, op in OPERATORS.items() if op.arity == 2])
def test_invariant_operands_equal_columns(evaluate, name, dtype):
    columns = operands_of(2, dtype)
    columns[1] = columns.dtype.type(-1.25)
    data = dataset(columns)
    x, y, p = Program.variable(0), Program.variable(1), Program.parameter(0)
    programs = [Program.apply(name, *pair) for pair in ((x, y), (x, p), (y, x), (p, x), (y, y))]
    programs.append(Program.apply(name, p, p))
    parameters = [[-1.25] * program.parameters for program in programs]
    got = evaluate(data, programs, parameters).values[:, 0]
    for one, other in ((0, 1), (2, 3), (4, 5)):
        np.testing.assert_array_equal(got[one], got[other])


@given(seed=st.integers(0, 2**32 - 1), tokens=st.integers(1, 60), dtype=st.sampled_from(DTYPES))
@example(seed=94113, tokens=15, dtype="float64")  # tanh at -0.2068, once 2.3 ulp off
def test_random_programs_node_by_node(evaluate, seed, tokens, dtype):
    """Each node is right for the engine's own operands, within the operator's bound."""
    rng = np.random.default_rng(seed)
    program = random_program(rng, tokens, variables=3, operators=tuple(OPERATORS))
    columns = (rng.normal(size=(3, 300)) * 3).astype(dtype)
    columns[0, : len(edge_values(dtype))] = edge_values(dtype)
    parameters = rng.uniform(-2, 2, size=program.parameters)
    for operator, inputs, got in node_results(evaluate, columns, [program], [parameters]):
        kept = ~rounded_threshold(inputs, dtype)
        if kept.any():
            bound = BOUNDS[operator.name].precise_cpu
            assert_bound(bound, operator.name, np.stack(inputs)[:, kept], got[kept])
