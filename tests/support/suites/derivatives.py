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


def by_operands(name: str) -> tuple[Program, np.ndarray]:
    """The operator over sums of a variable and a parameter that is 0."""
    arity = OPERATORS[name].arity
    operands = ", ".join(f"x{k} + p{k}" for k in range(1, arity + 1))
    return parse(f"{name}({operands})"), np.zeros(arity)


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator(engine, name, flavour):
    """At ordinary operands, of all signs and many sizes."""
    dtype, precision, tolerance = flavour
    program, zeros = by_operands(name)
    rng, shape = np.random.default_rng(len(zeros)), (len(zeros), 1500)
    wide = rng.normal(size=shape) * 10.0 ** rng.uniform(-2, 2, size=shape)
    near = rng.uniform(-1, 1, size=shape)
    columns = np.concatenate([wide, near], axis=1).astype(dtype).astype(float)
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
    program, zeros = by_operands(name)
    rng = np.random.default_rng(1)
    plain = rng.uniform(0.3, 0.9, size=(len(zeros), 200)).astype(dtype)
    edgy, rows = plain.copy(), rng.choice(200, size=60, replace=False)
    edgy[:, rows] = rng.choice(edge_values(dtype), size=(len(zeros), 60)).astype(dtype)
    clean, mixed = (
        np.delete(
            derive(engine, Dataset.of(X.T, dtype=dtype), [program], [zeros]).jacobian, rows, 1
        )
        for X in (plain, edgy)
    )
    np.testing.assert_array_equal(mixed, clean)


@pytest.mark.parametrize("name", OPERATORS)
def test_edge_values_are_special_where_the_reference_is(engine, name):
    arity = OPERATORS[name].arity
    edges = edge_values() if arity < 3 else edge_values()[::3]
    columns = np.stack([axis.ravel() for axis in np.meshgrid(*[edges] * arity)])
    program, zeros = by_operands(name)
    got = derive(engine, Dataset.of(columns.T, dtype="float64"), [program], [zeros]).jacobian
    _, want = differentiate(program, columns, zeros)
    for is_special in (np.isnan, np.isinf, np.logical_not):
        np.testing.assert_array_equal(is_special(got), is_special(want))


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
    written = [parse(re.sub(r"p(\d)", r"(x\1 + p\1)", text)) for text in CONVENTIONS]
    zeros = [np.zeros(program.parameters) for program in written]
    jacobian = derive(engine, data, written, zeros).jacobian
    got = np.split(jacobian, np.cumsum([*map(len, zeros)])[:-1])
    for program, zero, slopes in zip(written, zeros, got, strict=True):
        _, want = differentiate(program, columns, zero)
        np.testing.assert_allclose(slopes, want, rtol=1e-5)
    for operator, spelled in ((0, 1), (2, 3), (4, 5)):
        np.testing.assert_allclose(got[operator], got[spelled], rtol=1e-5)
        assert not got[operator][:, columns[0] == 0].any()


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


@pytest.mark.parametrize(
    ("loss", "weights", "rows"), covering_first(list(LOSSES), [False, True], [1, 5000])
)
def test_linearisation(engine, loss, weights, flavour, rows):
    dtype, precision, tolerance = flavour
    data = make_dataset(rows, dtype, weights=weights)
    batch = *smooth_programs(), LOSSES[loss]
    got = linearise(engine, data, *batch, precision=precision)
    want = linearise(NumpyEngine(data), data, *batch)
    for name, least in (("losses", 1e-3), ("gradients", 0.1), ("curvatures", 0.1)):
        size = np.abs(getattr(want, name)) + least * rows
        assert_close(getattr(got, name), getattr(want, name), tolerance, size)
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
    vectors = [np.full(program.parameters, 1.5) for program in programs]
    got = linearise(engine, data, programs, vectors, parse("0.5"))
    np.testing.assert_array_equal(got.losses, 20.0)
    np.testing.assert_array_equal(got.gradients, 0.0)


@pytest.mark.parametrize("bounds", [(0, 1), (3, 2900), (1023, 1025), (2999, 3000)])
def test_row_ranges(engine, bounds):
    data, part, batch = make_dataset(3000, weights=True), slice(*bounds), smooth_programs()
    matrix = data.matrix[:, part]
    smaller = Dataset.of(matrix[:4].T, matrix[4], matrix[5], dtype="float64")
    got = linearise(engine, data, *batch, losses.SQUARES, rows=bounds)
    want = linearise(engine, smaller, *batch, losses.SQUARES)
    for name in ("losses", "gradients", "curvatures"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=1e-12)
    outputs, full = (derive(engine, data, *batch, rows=rows) for rows in (bounds, None))
    np.testing.assert_array_equal(outputs.jacobian, full.jacobian[:, part])


def test_parameter_vectors(engine):
    data = make_dataset(2000, weights=True)
    nothing = Program.apply("mul", Program.constant(0.0), Program.parameter(3))
    given_programs = [Program.apply("add", program, nothing) for program in smooth_programs()[0]]
    blocks = np.random.default_rng(4).uniform(0.3, 1.5, size=(len(given_programs), 3, 4))
    got = linearise(engine, data, given_programs, list(blocks), losses.SQUARES)
    outputs = derive(engine, data, given_programs, list(blocks), row_loss=losses.SQUARES)
    for k in range(3):
        batch = given_programs, list(blocks[:, k])
        one = linearise(engine, data, *batch, losses.SQUARES)
        alone = derive(engine, data, *batch)
        for whole, own in (
            *((got.losses, one.losses), (got.gradients, one.gradients)),
            *((got.curvatures, one.curvatures), (outputs.jacobian, alone.jacobian)),
        ):
            parts = whole.reshape(len(blocks), 3, -1)
            np.testing.assert_array_equal(parts[:, k].ravel(), own.ravel())
    np.testing.assert_array_equal(outputs.gradients, got.gradients)
    np.testing.assert_array_equal(outputs.losses, got.losses)


@pytest.mark.parametrize("loss", ["squares", "huber"])
def test_a_selection_of_programs_gives_the_bits_of_the_programs_alone(engine, loss):
    """Programs drop out of a fit, whose batch is lowered once."""
    data = make_dataset(700)
    batch = Batch.of(*smooth_programs())
    engine.load(data)

    def run(chosen: Batch, selection: Selection | None = None) -> Linearisation:
        options = {"curvature": True, "cancelled": np.zeros(1, np.uint8), "selection": selection}
        evaluation = Evaluation(data.content_id, chosen)
        return run_to_end(engine.linearise(evaluation, LOSSES[loss], **options))

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
    products = np.array([np.sum(exact * exact), np.sum(exact), rows], dtype=float)
    np.testing.assert_allclose(got.curvatures, products, rtol=1e-13)


def test_many_parameters(engine):
    """More columns than a tile has, and more parameters than rows."""
    program = parse(" + ".join(f"p{k} * sin({k} * x1)" for k in range(1, 12)))
    batch = [program], [np.linspace(0.1, 1.1, 11)], losses.SQUARES
    for rows in (3, 700):
        data = make_dataset(rows)
        got, want = (linearise(each, data, *batch) for each in (engine, NumpyEngine(data)))
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
    batch = [Program.apply("mul", program, Program.variable(0))], [[0.5, 1.5]], losses.SQUARES
    data = make_dataset(10)
    got, want = (linearise(each, data, *batch) for each in (engine, NumpyEngine(data)))
    np.testing.assert_allclose(got.gradients, want.gradients, rtol=1e-9)


@pytest.mark.parametrize("wish", ["gradient", "jacobian", "variable_gradient"])
def test_derivatives_asked_for_alone(engine, wish):
    data, batch = make_dataset(1200), smooth_programs()
    everything = derive(engine, data, *batch, row_loss=losses.SQUARES)
    wished = {"loss": Loss.SSE, "values": False, wish: True}
    asked = Evaluation(data.content_id, Batch.of(*batch), **wished)
    alone, field = ask(engine, data, asked), wish if wish == "jacobian" else wish + "s"
    np.testing.assert_array_equal(getattr(alone, field), getattr(everything, field))
    np.testing.assert_array_equal(alone.losses, everything.losses)
