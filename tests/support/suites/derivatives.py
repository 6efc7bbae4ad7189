"""Tests of derivatives and row losses against NumPy's, for any engine.

A test module imports all of it, and defines the fixtures ``engine`` and ``flavour`` (data type,
precision and relative tolerance).
"""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from support.coverings import covering_first
from support.engines.gradients import ask, derive, linearise
from support.engines.operators import edge_values, programs
from support.engines.references import NumpyEngine
from warpfit import losses
from warpfit.dataset import Dataset
from warpfit.errors import CancelledError
from warpfit.expressions.reference import differentiate
from warpfit.ir import Batch, Program
from warpfit.ops import OPERATORS, VARIABLE
from warpfit.parse import parse
from warpfit.request import Evaluation, Loss
from warpfit_server.engine.interface import Linearisation, Selection, run_to_end

LOSSES = {
    "squares": losses.SQUARES,
    "power": parse("(x1 - x2) ^ 2"),
    "absolute": losses.ABSOLUTE,
    "huber": losses.huber(0.5).row,
    "poisson": losses.poisson(log=True).row,
    "own weight": parse("x3 * log1p((x1 - x2) ^ 2) + 0.1 * x3"),
    "no slope": parse("x2 * x2"),
    "constant": parse("3"),
}


def make_dataset(rows: int, dtype: str = "float64", *, weights: bool = False) -> Dataset:
    rng = np.random.default_rng(7)
    columns = rng.uniform(0.2, 2, size=(rows, 4))
    w = rng.uniform(0.1, 2, size=rows) if weights else None
    return Dataset.of(columns, rng.normal(1, 1, size=rows), w, dtype=dtype)


def smooth_programs() -> tuple[list[Program], list[np.ndarray]]:
    """Programs that are well conditioned on the data, of every kind of dependence on parameters."""
    texts = [
        *("p1 * exp(-p2 * x1) + p3", "p1 + p2 * x1 + p3 * x2 + p4 * x3 + p1 * p2 * x4"),
        *("x1 * sqrt(p1 + 2) + x2 / (exp(p1) + p2 ^ 2)", "sin(p1 * x1) * cos(p1 * x1) + p1"),
        *("(p1 * x1) ^ p2 + x2 ^ 2 - x3 ^ p3", "x1 + 2", "p1 * p2", "p2", "2", "x3"),
        *(
            "log(x1 * p1) * (log(x1 * p1) + aq(p2, x2))",
            "where(x1 > p2, p1 * x1, p1 * log(4 - x1))",
        ),
        "tanh(p1 * x1 + p2) + logistic(p3 * x2) + erf(p1 - x3)",
        "p1 * x1 + p1 * x2 + p1 * x1 * x2 + p1 * exp(p1)",
    ]
    found = [parse(text) for text in texts]
    return found, [np.array([0.7, 1.3, -0.4, 0.2])[: program.parameters] for program in found]


def assert_close(got, want, tolerance: float, scale=None) -> None:
    scale = np.abs(want) if scale is None else scale
    with np.errstate(all="ignore"):
        error = np.abs(np.asarray(got, float) - want) / (scale + 1e-30)
    both = (got == want) | (np.isnan(got) & np.isnan(want))
    worst = np.where(both, 0.0, np.where(np.isnan(error), np.inf, error))
    assert worst.max(initial=0) <= tolerance, np.unravel_index(worst.argmax(), worst.shape)


# ------------------------------------------------------------------------- derivatives of values


def operand_rows(arity: int, dtype: str) -> np.ndarray:
    """Ordinary operands [arity, rows], of all signs and many sizes."""
    rng = np.random.default_rng(arity)
    wide = rng.normal(size=(arity, 1500)) * 10.0 ** rng.uniform(-2, 2, size=(arity, 1500))
    near = rng.uniform(-1, 1, size=(arity, 1500))
    return np.concatenate([wide, near], axis=1).astype(dtype).astype(float)


def by_operands(name: str) -> tuple[Program, np.ndarray]:
    """The operator over sums of a variable and a parameter that is 0."""
    arity = OPERATORS[name].arity
    operands = [
        Program.apply("add", Program.variable(k), Program.parameter(k)) for k in range(arity)
    ]
    return Program.apply(name, *operands), np.zeros(arity)


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator(engine, name, flavour):
    dtype, precision, tolerance = flavour
    columns = operand_rows(OPERATORS[name].arity, dtype)
    program, zeros = by_operands(name)
    data = Dataset.of(columns.T, dtype=dtype)
    got = derive(engine, data, [program], [zeros], precision=precision).jacobian
    values, want = differentiate(program, columns, zeros)
    limit = 1e30 if dtype == "float32" else 1e300
    with np.errstate(all="ignore"):
        ordinary = (np.abs(values) < limit) & (np.abs(values) > 1 / limit)
        ordinary &= (np.abs(want) < limit).all(axis=0)
        ordinary &= ((np.abs(want) > 1 / limit) | (want == 0)).all(axis=0)
    ordinary |= values == 0
    assert ordinary.mean() > 0.3
    assert_close(got[:, ordinary], want[:, ordinary], tolerance)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", OPERATORS)
def test_edge_values_stay_in_their_rows(engine, name, dtype):
    """Where operands are infinite, NaN, 0 or subnormal, other rows are what they are without."""
    arity = OPERATORS[name].arity
    rng = np.random.default_rng(1)
    plain = rng.uniform(0.3, 0.9, size=(arity, 200)).astype(dtype)
    edgy = plain.copy()
    rows = rng.choice(200, size=60, replace=False)
    edgy[:, rows] = rng.choice(edge_values(dtype), size=(arity, 60)).astype(dtype)
    program, zeros = by_operands(name)
    clean = derive(engine, Dataset.of(plain.T, dtype=dtype), [program], [zeros]).jacobian
    mixed = derive(engine, Dataset.of(edgy.T, dtype=dtype), [program], [zeros]).jacobian
    others = np.setdiff1d(np.arange(200), rows)
    np.testing.assert_array_equal(mixed[:, others], clean[:, others])


@pytest.mark.parametrize("name", OPERATORS)
def test_edge_values_are_special_where_the_reference_is(engine, name):
    arity = OPERATORS[name].arity
    edges = edge_values() if arity < 3 else edge_values()[::3]
    columns = np.stack([axis.ravel() for axis in np.meshgrid(*[edges] * arity)])
    program, zeros = by_operands(name)
    got = derive(engine, Dataset.of(columns.T, dtype="float64"), [program], [zeros]).jacobian
    _, want = differentiate(program, columns, zeros)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(got == 0, want == 0)
    np.testing.assert_array_equal(np.isinf(got), np.isinf(want))


#: Functions of |a| as operators and spelled out, and powers: derivatives at 0 are conventions.
CONVENTIONS = (
    *("logabs(p1)", "log(abs(p1))", "sqrtabs(p1)", "sqrt(abs(p1))", "powabs(p1, p2)"),
    *("abs(p1) ^ p2", "p1 ^ p2", "fma(p1, p2, p3)"),
)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_conventions_at_zero_are_the_references(engine, dtype):
    """Programs of parameters alone and of rows, at all combinations of 0 and other numbers."""
    points = np.array(list(np.ndindex(*[6] * 3))).T
    columns = np.array([0.0, -0.0, 1.0, -1.0, 2.0, 0.5])[points]
    data = Dataset.of(columns.T, dtype=dtype)
    texts = [re.sub(r"p(\d)", r"(x\1 + p\1)", text) for text in CONVENTIONS]
    written = [parse(text) for text in texts]
    counts = [program.parameters for program in written]
    zeros = [np.zeros(count) for count in counts]
    jacobian = derive(engine, data, written, zeros).jacobian
    got = np.split(jacobian, np.cumsum(counts)[:-1])
    for program, zero, slopes in zip(written, zeros, got, strict=True):
        _, want = differentiate(program, columns, zero)
        np.testing.assert_allclose(slopes, want, rtol=1e-5)
    for operator, spelled in ((0, 1), (2, 3), (4, 5)):
        np.testing.assert_allclose(got[operator], got[spelled], rtol=1e-5)
        at_zero = columns[0] == 0
        assert not got[operator][:, at_zero].any()


NICE = ("add", "sub", "mul", "neg", "sin", "cos", "atan", "square", "aq", "logistic", "max", "fma")


@given(program=programs(30, variables=3, parameters=3, operators=NICE, constants=st.floats(-2, 2)))
def test_random_programs(engine, flavour, program):
    dtype, precision, tolerance = flavour
    rng = np.random.default_rng(2)
    columns = rng.uniform(-1, 1, size=(3, 40)).astype(dtype).astype(float)
    vector = np.array([0.75, -0.5, 1.25])[: program.parameters]
    values, want = differentiate(program, columns, vector)
    _, by_variables = differentiate(program, columns, vector, by=VARIABLE)
    assume(np.abs(values).max() < 1e3 and np.abs(want).max(initial=0) < 1e3)
    data = Dataset.of(columns.T, np.zeros(40), dtype=dtype)
    loss = parse("x1 - x2")
    got = derive(engine, data, [program], [vector], row_loss=loss, precision=precision)
    scale = 10 + np.abs(want).max(initial=0)
    assert_close(got.jacobian, want, tolerance, scale)
    assert_close(got.gradients, want.sum(axis=1), tolerance, 40 * scale)
    sums = by_variables.sum(axis=1)
    assert_close(got.variable_gradients[0, 0], sums, tolerance, 40 * (10 + np.abs(sums)))


def test_the_branch_not_taken_is_not_seen(engine):
    data = Dataset.of(np.array([[-1.0], [0.0], [2.0]]), np.zeros(3), dtype="float64")
    program = parse("where(x1 > 0, log(x1) * p1, p1 * x1) + where(x1 != 0, p2 / x1, 1)")
    got = derive(engine, data, [program], [[2.0, 3.0]], row_loss=parse("x1"))
    np.testing.assert_allclose(got.jacobian, [[-1, 0, np.log(2)], [-1, 0, 0.5]])
    np.testing.assert_allclose(got.gradients, got.jacobian.sum(axis=1))


# ----------------------------------------------------------------- losses, gradients, curvatures


@pytest.mark.parametrize(
    ("loss", "weights", "rows"), covering_first(list(LOSSES), [False, True], [1, 5000])
)
def test_linearisation(engine, loss, weights, flavour, rows):
    dtype, precision, tolerance = flavour
    data = make_dataset(rows, dtype, weights=weights)
    given_programs, vectors = smooth_programs()
    batch = given_programs, vectors, LOSSES[loss]
    got = linearise(engine, data, *batch, precision=precision)
    want = linearise(NumpyEngine(data), data, *batch)
    assert_close(got.losses, want.losses, tolerance, np.abs(want.losses) + 1e-3 * rows)
    size = np.abs(want.gradients) + 0.1 * rows
    assert_close(got.gradients, want.gradients, tolerance, size)
    size = np.abs(want.curvatures) + 0.1 * rows
    assert_close(got.curvatures, want.curvatures, tolerance, size)
    alone = linearise(engine, data, *batch, precision=precision, curvature=False)
    assert alone.curvatures is None
    np.testing.assert_array_equal(alone.gradients, got.gradients)


@pytest.mark.parametrize("first", ["x1", "sin(x1)", "x1 + p1", "p1 * sin(x1)", "x1 + sin(p1 * x2)"])
@pytest.mark.parametrize(
    "second", ["p1 + 0.5", "p1 * x1 + 0.5", "0.5 * sin(p1)", "p1 / (x1 - 0.5)"]
)
def test_a_loss_that_is_a_part_of_the_program(engine, first, second):
    """It stands before the result, where marks of another program may have been left."""
    data = make_dataset(40)
    programs = [parse(first), parse(second)]
    vectors = [np.full(1 if "p1" in text else 0, 1.5) for text in (first, second)]
    got = linearise(engine, data, programs, vectors, parse("0.5"))
    np.testing.assert_array_equal(got.losses, 20.0)
    np.testing.assert_array_equal(got.gradients, 0.0)


@pytest.mark.parametrize("bounds", [(0, 1), (3, 2900), (1023, 1025), (2999, 3000)])
def test_row_ranges(engine, bounds):
    data = make_dataset(3000, weights=True)
    part = slice(*bounds)
    matrix = data.matrix[:, part]
    smaller = Dataset.of(matrix[:4].T, matrix[4], matrix[5], dtype="float64")
    batch = *smooth_programs(), losses.SQUARES
    got = linearise(engine, data, *batch, rows=bounds)
    want = linearise(engine, smaller, *batch)
    for name in ("losses", "gradients", "curvatures"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=1e-12)
    outputs = derive(engine, data, *smooth_programs(), rows=bounds)
    full = derive(engine, data, *smooth_programs())
    np.testing.assert_array_equal(outputs.jacobian, full.jacobian[:, part])


def test_parameter_vectors(engine):
    data = make_dataset(2000, weights=True)
    nothing = Program.apply("mul", Program.constant(0.0), Program.parameter(3))
    given_programs = [Program.apply("add", program, nothing) for program in smooth_programs()[0]]
    blocks = np.random.default_rng(4).uniform(0.3, 1.5, size=(len(given_programs), 3, 4))
    got = linearise(engine, data, given_programs, list(blocks), losses.SQUARES)
    outputs = derive(engine, data, given_programs, list(blocks), row_loss=losses.SQUARES)
    gradients = got.gradients.reshape(-1, 3, 4)
    curvatures = got.curvatures.reshape(-1, 3, 10)
    jacobian = outputs.jacobian.reshape(-1, 3, 4, 2000)
    for k in range(3):
        one = linearise(engine, data, given_programs, list(blocks[:, k]), losses.SQUARES)
        np.testing.assert_array_equal(got.losses[:, k], one.losses[:, 0])
        np.testing.assert_array_equal(gradients[:, k].ravel(), one.gradients)
        np.testing.assert_array_equal(curvatures[:, k].ravel(), one.curvatures)
        alone = derive(engine, data, given_programs, list(blocks[:, k]))
        np.testing.assert_array_equal(jacobian[:, k].reshape(-1, 2000), alone.jacobian)
    np.testing.assert_array_equal(outputs.gradients, got.gradients)
    np.testing.assert_array_equal(outputs.losses, got.losses)


@pytest.mark.parametrize("loss", ["squares", "huber"])
def test_a_selection_of_programs_gives_the_bits_of_the_programs_alone(engine, loss):
    """Programs drop out of a fit, whose batch is lowered once."""
    data = make_dataset(700)
    batch = Batch.of(*smooth_programs())
    engine.load(data)

    def run(chosen: Batch, selection: Selection | None = None) -> Linearisation:
        evaluation = Evaluation(data.content_id, chosen)
        flag = np.zeros(1, dtype=np.uint8)
        steps = engine.linearise(
            evaluation, LOSSES[loss], curvature=True, cancelled=flag, selection=selection
        )
        return run_to_end(steps)

    for indices in (np.arange(len(batch)), np.arange(0, len(batch), 2), np.array([1, 1])):
        for scale in (1.0, 0.75):
            chosen = batch[indices]
            chosen = replace(chosen, parameters=scale * chosen.parameters)
            got, want = run(chosen, Selection(batch, indices)), run(chosen)
            for name in ("losses", "gradients", "curvatures"):
                np.testing.assert_array_equal(getattr(got, name), getattr(want, name))


def test_sums_are_accurate_at_a_million_rows(engine):
    rows = 1_000_000
    x = np.random.default_rng(5).uniform(0.5, 1.5, size=rows).astype(np.float32)
    data = Dataset.of(x[:, None], np.full(rows, 1000.0), dtype="float32")
    got = linearise(engine, data, [parse("p1 * x1 + p2")], [[2.0, 3.0]], losses.SQUARES)
    exact = x.astype(np.longdouble)
    products = [np.sum(exact * exact), np.sum(exact), rows]
    np.testing.assert_allclose(got.curvatures, np.array(products, dtype=float), rtol=1e-13)


def test_many_parameters(engine):
    """More columns than a tile has, and more parameters than rows."""
    program = parse(" + ".join(f"p{k} * sin({k} * x1)" for k in range(1, 12)))
    vector = np.linspace(0.1, 1.1, 11)
    for rows in (3, 700):
        data = make_dataset(rows)
        got = linearise(engine, data, [program], [vector], losses.SQUARES)
        want = linearise(NumpyEngine(data), data, [program], [vector], losses.SQUARES)
        np.testing.assert_allclose(got.gradients, want.gradients, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(got.curvatures, want.curvatures, rtol=1e-9, atol=1e-9)


def test_cancelled(engine):
    data = make_dataset(1000)
    with pytest.raises(CancelledError):
        derive(engine, data, *smooth_programs(), row_loss=losses.SQUARES, cancelled=True)


@pytest.mark.parametrize("leaning", ["left", "right"])
def test_long_invariants(engine, leaning):
    """Thousands of operators on parameters alone, which are differentiated apart."""
    pair = [Program.parameter(0), Program.parameter(1)]
    program = Program.apply("sin", pair[0])
    for k in range(4000):
        term = Program.apply("sin", Program.apply("mul", pair[k % 2], Program.constant(k)))
        operands = [program, term]
        program = Program.apply("sub", *operands[:: 1 if leaning == "left" else -1])
    program = Program.apply("mul", program, Program.variable(0))
    data = make_dataset(10)
    got = linearise(engine, data, [program], [[0.5, 1.5]], losses.SQUARES)
    want = linearise(NumpyEngine(data), data, [program], [[0.5, 1.5]], losses.SQUARES)
    np.testing.assert_allclose(got.gradients, want.gradients, rtol=1e-9)


@pytest.mark.parametrize("wish", ["gradient", "jacobian", "variable_gradient"])
def test_derivatives_asked_for_alone(engine, wish):
    data = make_dataset(1200)
    given_programs, vectors = smooth_programs()
    batch = Batch.of(given_programs, vectors)
    everything = derive(engine, data, given_programs, vectors, row_loss=losses.SQUARES)
    asked = Evaluation(data.content_id, batch, loss=Loss.SSE, values=False, **{wish: True})
    alone, field = ask(engine, data, asked), wish if wish == "jacobian" else wish + "s"
    np.testing.assert_array_equal(getattr(alone, field), getattr(everything, field))
    np.testing.assert_array_equal(alone.losses, everything.losses)
