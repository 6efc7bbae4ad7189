"""Compiled kernels on a device against the NumPy reference."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from support.engines.evaluations import Evaluate
from support.engines.operators import assert_close, expected_of, operand_rows, subprograms
from support.engines.reference_losses import reference_loss
from warpfit.dataset import Dataset
from warpfit.errors import CancelledError, ResourceExhaustedError
from warpfit.expressions.reference import evaluate_program
from warpfit.expressions.workload import random_program, thesis_mix
from warpfit.ir import Program
from warpfit.ops import BY_CODE, OPERATORS
from warpfit.request import Loss, Precision, Tier
from warpfit_server.engine.cuda.math import modes

X = [Program.variable(index) for index in range(3)]
P = [Program.parameter(index) for index in range(3)]
DTYPES = [np.float32, np.float64]


@pytest.fixture
def compiled(evaluate: Evaluate):
    """Evaluate on the compiled tier, waiting for the compiler where it must."""
    return partial(evaluate, tier=Tier.COMPILED)


@pytest.mark.parametrize("dtype", DTYPES)
def test_operators_of_variables(compiled, dtype):
    for arity in (1, 2, 3):
        operators = [op for op in OPERATORS.values() if op.arity == arity]
        rows = operand_rows(arity, dtype)
        programs = [Program.apply(op, *X[:arity]) for op in operators]
        values = compiled(Dataset.of(rows.T, dtype=dtype), programs).values[:, 0]
        operands = list(rows[:arity])
        for operator, got in zip(operators, values, strict=True):
            assert_close(operator.name, got, expected_of(operator, operands, dtype), operands)


@pytest.mark.parametrize("dtype", DTYPES)
def test_operators_of_parameters(compiled, dtype):
    """Row-invariant operators leave the row loop; K vectors at once."""
    for operator in OPERATORS.values():
        operands = operand_rows(operator.arity, dtype)[: operator.arity, ::7]
        program = Program.apply(operator, *P[: operator.arity])
        data = Dataset.of(np.zeros((2, 1)), dtype=dtype)
        got = compiled(data, [program], [operands.T]).values
        np.testing.assert_array_equal(got[0, :, 0], got[0, :, 1])
        expected = expected_of(operator, list(operands), dtype)
        assert_close(operator.name, got[0, :, 0], expected, operands)


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_programs_node_by_node(compiled, dtype):
    """Each node's result is NumPy's operator on the tier's own results for the operands."""
    rng = np.random.default_rng(7)
    data = rng.normal(size=(3, 701)).astype(dtype)
    roots = [
        random_program(rng, int(rng.integers(2, 40)), variables=3, operators=tuple(OPERATORS))
        for _ in range(25)
    ]
    vectors = [rng.uniform(-2, 2, size=root.parameters) for root in roots]
    nodes = [(n, v) for root, v in zip(roots, vectors, strict=True) for n in subprograms(root)]
    given = [(p, v) for (node, operands), v in nodes for p in (node, *operands)]
    programs = [program for program, _ in given]
    parameters = [vector[: program.parameters] for program, vector in given]
    values = compiled(Dataset.of(data.T, dtype=dtype), programs, parameters).values[:, 0]
    position = 0
    for (node, operands), _ in nodes:
        operator = BY_CODE[int(node.codes[-1])]
        inputs = list(values[position + 1 : position + 1 + len(operands)])
        assert_close(operator.name, values[position], expected_of(operator, inputs, dtype), inputs)
        position += 1 + len(operands)


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 1023, 1024, 1025, 1_000_003])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes(compiled, dtype, rows):
    rng = np.random.default_rng(rows)
    data = rng.normal(size=(2, rows)).astype(dtype)
    target = rng.normal(size=rows).astype(dtype)
    programs = [Program.apply("add", X[0], X[1]), Program.apply("mul", X[0], P[0])]
    dataset = Dataset.of(data.T, target, dtype=dtype)
    result = compiled(dataset, programs, [[], [2.0]], loss=Loss.SSE)
    expected = np.stack([data[0] + data[1], data[0] * dtype(2.0)])
    np.testing.assert_array_equal(result.values[:, 0], expected)
    wanted = reference_loss(Loss.SSE, expected, target)
    np.testing.assert_allclose(result.losses[:, 0], wanted, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"precision": Precision.FAST}, {"rows": (77, 199_000)}])
def test_pieces_add_up(compiled, monkeypatch, dtype, options):
    """Large work goes to the device piece by piece."""
    programs, vectors = thesis_mix(4, 100)
    rng = np.random.default_rng(4)
    X, y = rng.uniform(0.5, 2, size=(200_000, 10)), rng.normal(size=200_000)
    dataset = Dataset.of(X, y, rng.uniform(size=200_000), dtype=dtype)
    one = compiled(dataset, programs, vectors, values=False, loss=Loss.MSE, **options)
    monkeypatch.setattr(modes, "_TOKEN_ROWS", dict.fromkeys(modes._TOKEN_ROWS, 1_000_000))
    several = [
        compiled(dataset, programs, vectors, values=False, loss=Loss.MSE, **options).losses
        for _ in range(2)
    ]
    for losses in several:
        np.testing.assert_array_equal(losses, one.losses)
    monkeypatch.undo()
    again = compiled(dataset, programs, vectors, values=False, loss=Loss.MSE, **options)
    np.testing.assert_array_equal(again.losses, one.losses)


@pytest.mark.parametrize("count", [1, 2, 33, 1000])
def test_batch_sizes(compiled, count):
    rng = np.random.default_rng(count)
    data = rng.uniform(0.5, 2, size=(10, 257)).astype(np.float32)
    names = ("add", "sub", "mul", "min", "max", "neg")
    programs = [random_program(rng, 1 + i % 40, operators=names) for i in range(count)]
    vectors = [rng.uniform(-1, 1, size=p.parameters) for p in programs]
    result = compiled(Dataset.of(data.T, data[0]), programs, vectors, loss=Loss.MSE)
    expected = np.stack(
        [evaluate_program(p, data, v) for p, v in zip(programs, vectors, strict=True)]
    )
    np.testing.assert_allclose(result.values[:, 0], expected, rtol=1e-3, atol=1e-3)
    wanted = reference_loss(Loss.MSE, result.values[:, 0], data[0])
    np.testing.assert_allclose(result.losses[:, 0], wanted, rtol=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", list(Loss))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("span", [None, (0, 1), (31, 64), (517, 4999)])
def test_losses(compiled, dtype, kind, weighted, span):
    rng = np.random.default_rng(3)
    data = rng.normal(size=(3, 5000)).astype(dtype)
    target = rng.normal(size=5000).astype(dtype)
    weights = rng.uniform(0, 2, size=5000).astype(dtype) if weighted else None
    programs = [Program.apply("add", X[0], P[0]), Program.apply("mul", X[1], X[2]), X[2]]
    vectors = [rng.normal(size=(4, 1)).astype(dtype), np.zeros((4, 0)), np.zeros((4, 0))]
    dataset = Dataset.of(data.T, target, weights, dtype=dtype)
    result = compiled(dataset, programs, vectors, loss=kind, rows=span)
    start, stop = span or (0, 5000)
    part = weights[start:stop] if weighted else None
    with np.errstate(all="ignore"):
        expected = reference_loss(kind, result.values, target[start:stop], part)
    tolerance = 1e-10 if dtype is np.float64 else 2e-6
    np.testing.assert_allclose(result.losses, expected, rtol=tolerance, atol=tolerance)
    alone = compiled(dataset, programs, vectors, loss=kind, rows=span, values=False)
    np.testing.assert_allclose(alone.losses, expected, rtol=tolerance, atol=tolerance)
    wide = np.stack([evaluate_program(programs[0], data[:, start:stop], v) for v in vectors[0]])
    np.testing.assert_array_equal(result.values[0], wide.astype(dtype))


def test_loss_is_nan_where_a_value_is(compiled):
    data = np.array([1.0, -1.0, 2.0], dtype=np.float32)
    dataset = Dataset.of(data, data, np.array([1.0, 0.0, 1.0]))
    result = compiled(dataset, [Program.apply("log", X[0]), X[0]], loss=Loss.MSE)
    assert np.isnan(result.losses[0, 0])
    assert result.losses[1, 0] == 0.0


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("precision", list(Precision))
def test_a_repeated_batch_with_new_parameters(compiled, precision, values):
    """The graph is used again; equal parameters give equal bits, others what they should."""
    rng = np.random.default_rng(0)
    dataset = Dataset.of(rng.uniform(0.5, 2, (30_011, 10)), rng.normal(size=30_011))
    programs, vectors = thesis_mix(5, 60)
    call = partial(compiled, dataset, programs, precision=precision, loss=Loss.MSE, values=values)
    first, again = call(vectors), call(vectors)
    if values:
        assert first.values.tobytes() == again.values.tobytes()
    assert first.losses.tobytes() == again.losses.tobytes()
    assert again.timings.cache_hits == 60
    moved = call([vector + 0.25 for vector in vectors])
    fresh = call([[*(vector + 0.25)] for vector in vectors])
    assert moved.losses.tobytes() == fresh.losses.tobytes()
    assert moved.losses.tobytes() != first.losses.tobytes()


@pytest.mark.parametrize("values", [True, False])
def test_concurrent_evaluations(evaluate: Evaluate, values):
    rng = np.random.default_rng(0)
    dataset = Dataset.of(rng.normal(size=(5003, 10)), rng.normal(size=5003))
    mixes = [thesis_mix(seed, 20) for seed in range(8)]
    options = {"loss": Loss.MSE, "values": values, "tier": Tier.COMPILED}
    alone = [evaluate(dataset, *mix, **options).losses for mix in mixes]

    def run(mix):
        helper = Evaluate(evaluate.engine)
        helper._loaded = evaluate._loaded
        return [helper(dataset, *mix, **options).losses for _ in range(10)]

    with ThreadPoolExecutor(8) as pool:
        for expected, repeats in zip(alone, pool.map(run, mixes), strict=True):
            for losses in repeats:
                assert losses.tobytes() == expected.tobytes()


@pytest.mark.parametrize("exponent", [2.0, 3.0, -1.0, -2.0, 0.0, 1.0, 17.0, 0.5, -2.5])
def test_fast_power_of_negative_bases(compiled, exponent):
    data = np.array([-3.0, -1.5, -1.0, -0.25, 0.25, 1.0, 3.0], dtype=np.float32)
    programs = [
        Program.apply("pow", X[0], Program.constant(exponent)),
        Program.apply("pow", X[0], P[0]),
        Program.apply("pow", X[0], X[1]),
    ]
    rows = np.stack([data, np.full_like(data, exponent)])
    call = partial(compiled, Dataset.of(rows.T), programs, [[], [exponent], []])
    got = call(precision=Precision.FAST).values[:, 0]
    with np.errstate(all="ignore"):
        expected = np.power(data.astype(np.float64), exponent)
    np.testing.assert_allclose(got, [expected] * 3, rtol=5e-5)


def test_what_cannot_be_compiled_is_refused_with_a_remedy(compiled):
    program = X[0]
    for _ in range(1500):
        program = Program.apply("add", program, X[0])
    with pytest.raises(ResourceExhaustedError, match="interpreter"):
        compiled(Dataset.of(np.ones((3, 1))), [program])


def test_cancelled(compiled):
    with pytest.raises(CancelledError):
        compiled(Dataset.of(np.ones((3, 1))), [X[0]], cancelled=True)
