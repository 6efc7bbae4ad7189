"""The interpreter on a device against the NumPy reference."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from support.engines.evaluations import Evaluate
from support.engines.operators import assert_close, expected_of, operand_rows, subprograms
from support.engines.reference_losses import reference_loss
from warpfit.dataset import Dataset
from warpfit.errors import (
    CancelledError,
    DatasetNotFoundError,
    ResourceExhaustedError,
)
from warpfit.expressions.reference import evaluate_program
from warpfit.expressions.workload import random_program, thesis_mix
from warpfit.ir import Program
from warpfit.ops import BY_CODE, OPERATORS
from warpfit.request import Loss, Precision, Tier
from warpfit_server.engine.cuda.interpreter.tier import InterpreterTuning
from warpfit_server.engine.cuda.math import modes

X = [Program.variable(index) for index in range(3)]
P = [Program.parameter(index) for index in range(3)]
DTYPES = [np.float32, np.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATORS)
def test_operator_of_variables(evaluate: Evaluate, name, dtype):
    operator = OPERATORS[name]
    rows = operand_rows(operator.arity, dtype)
    program = Program.apply(operator, *X[: operator.arity])
    got = evaluate(Dataset.of(rows.T, dtype=dtype), [program]).values[0, 0]
    operands = list(rows[: operator.arity])
    assert_close(name, got, expected_of(operator, operands, dtype), operands)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATORS)
def test_operator_of_parameters(evaluate: Evaluate, name, dtype):
    """Row-invariant operators are computed by another kernel, with K vectors at once."""
    operator = OPERATORS[name]
    operands = operand_rows(operator.arity, dtype)[: operator.arity]
    program = Program.apply(operator, *P[: operator.arity])
    got = evaluate(Dataset.of(np.zeros((2, 1)), dtype=dtype), [program], [operands.T]).values
    np.testing.assert_array_equal(got[0, :, 0], got[0, :, 1])
    assert_close(name, got[0, :, 0], expected_of(operator, list(operands), dtype), operands)


@pytest.mark.parametrize("rows", [None, 4, 8, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_programs_node_by_node(evaluate: Evaluate, tuned, dtype, rows):
    """Each node's result is NumPy's operator on the engine's own results for the operands."""
    evaluate = tuned(InterpreterTuning(rows=rows and rows * 4 // np.dtype(dtype).itemsize))
    rng = np.random.default_rng(7)
    data = rng.normal(size=(3, 701)).astype(dtype)
    roots = [
        random_program(rng, int(rng.integers(2, 60)), variables=3, operators=tuple(OPERATORS))
        for _ in range(60)
    ]
    vectors = [rng.uniform(-2, 2, size=root.parameters) for root in roots]
    nodes = [(n, v) for root, v in zip(roots, vectors, strict=True) for n in subprograms(root)]
    given = [(p, v) for (node, operands), v in nodes for p in (node, *operands)]
    programs = [program for program, _ in given]
    parameters = [vector[: program.parameters] for program, vector in given]
    values = evaluate(Dataset.of(data.T, dtype=dtype), programs, parameters).values[:, 0]
    position = 0
    for (node, operands), _ in nodes:
        operator_row = BY_CODE[int(node.codes[-1])]
        inputs = list(values[position + 1 : position + 1 + len(operands)])
        expected = expected_of(operator_row, inputs, dtype)
        assert_close(operator_row.name, values[position], expected, inputs)
        position += 1 + len(operands)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk_bytes", [InterpreterTuning().chunk_bytes, 100_000])
def test_pieces_make_no_difference(evaluate: Evaluate, tuned, monkeypatch, dtype, chunk_bytes):
    """Large work goes to the device piece by piece, also where its sums would take much memory."""
    programs, vectors = thesis_mix(4, 100)
    vectors = [np.stack([vector, 2 * vector]) for vector in vectors]
    rng = np.random.default_rng(4)
    dataset = Dataset.of(
        rng.uniform(0.5, 2, size=(200_000, 10)), rng.normal(size=200_000), dtype=dtype
    )
    options = {"values": False, "loss": Loss.MSE, "tier": Tier.INTERPRETER}
    whole = evaluate(dataset, programs, vectors, **options)
    monkeypatch.setattr(modes, "_TOKEN_ROWS", dict.fromkeys(modes._TOKEN_ROWS, 1_000_000))
    cut = tuned(InterpreterTuning(chunk_bytes=chunk_bytes))(dataset, programs, vectors, **options)
    np.testing.assert_array_equal(cut.losses, whole.losses)


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 1023, 1024, 1025, 1_000_003])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes(evaluate: Evaluate, dtype, rows):
    rng = np.random.default_rng(rows)
    data = rng.normal(size=(2, rows)).astype(dtype)
    target = rng.normal(size=rows).astype(dtype)
    programs = [Program.apply("add", X[0], X[1]), Program.apply("mul", X[0], P[0])]
    dataset = Dataset.of(data.T, target, dtype=dtype)
    result = evaluate(dataset, programs, [[], [2.0]], loss=Loss.SSE)
    expected = np.stack([data[0] + data[1], data[0] * dtype(2.0)])
    np.testing.assert_array_equal(result.values[:, 0], expected)
    wanted = reference_loss(Loss.SSE, expected, target)
    np.testing.assert_allclose(result.losses[:, 0], wanted, rtol=1e-12)
    assert evaluate.announced[-1] == 2


@pytest.mark.parametrize("count", [1, 2, 33, 300, 5000])
def test_batch_sizes(evaluate: Evaluate, count):
    rng = np.random.default_rng(count)
    data = rng.uniform(0.5, 2, size=(10, 257)).astype(np.float32)
    names = ("add", "sub", "mul", "min", "max", "neg")
    programs = [random_program(rng, 1 + i % 40, operators=names) for i in range(count)]
    vectors = [rng.uniform(-1, 1, size=p.parameters) for p in programs]
    dataset = Dataset.of(data.T, data[0], dtype=np.float32)
    result = evaluate(dataset, programs, vectors, loss=Loss.MSE)
    expected = np.stack(
        [evaluate_program(p, data, v) for p, v in zip(programs, vectors, strict=True)]
    )
    np.testing.assert_allclose(result.values[:, 0], expected, rtol=1e-3, atol=1e-3)
    wanted = reference_loss(Loss.MSE, result.values[:, 0], data[0])
    np.testing.assert_allclose(result.losses[:, 0], wanted, rtol=1e-12)


@pytest.mark.parametrize("depth", [40, 3000])
@pytest.mark.parametrize("side", ["left", "right", "where"])
def test_deep_programs(evaluate: Evaluate, depth, side):
    program = X[0]
    for _ in range(depth):
        if side == "where":
            program = Program.apply("where", X[1], X[0], program)
        else:
            operands = (program, X[1]) if side == "left" else (X[1], program)
            program = Program.apply("add", *operands)
    data = np.ones((2, 40), dtype=np.float32)
    got = evaluate(Dataset.of(data.T), [program]).values
    assert np.all(got == (1 if side == "where" else depth + 1))


def test_bushy_program_needs_many_levels(evaluate: Evaluate):
    program = X[0]
    for _ in range(12):
        program = Program.apply("add", program, program)
    data = np.arange(1, 41, dtype=np.float32)
    got = evaluate(Dataset.of(data), [program]).values[0, 0]
    np.testing.assert_array_equal(got, data * 2**12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_invariant_subtree_too_deep_to_hoist(evaluate: Evaluate, dtype):
    program = P[0]
    for _ in range(50):
        program = Program.apply("sub", P[1], program)
    got = evaluate(Dataset.of(np.zeros((5, 1)), dtype=dtype), [program], [[3.0, 7.0]]).values
    np.testing.assert_array_equal(got, np.full((1, 1, 5), 3.0))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", list(Loss))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("span", [None, (0, 1), (3, 2000), (31, 64), (517, 4999)])
def test_losses(evaluate: Evaluate, dtype, kind, weighted, span):
    rng = np.random.default_rng(3)
    data = rng.normal(size=(3, 5000)).astype(dtype)
    target = rng.normal(size=5000).astype(dtype)
    weights = rng.uniform(0, 2, size=5000).astype(dtype) if weighted else None
    programs = [Program.apply("add", X[0], P[0]), Program.apply("mul", X[1], X[2]), X[2]]
    vectors = [rng.normal(size=(4, 1)).astype(dtype), np.zeros((4, 0)), np.zeros((4, 0))]
    dataset = Dataset.of(data.T, target, weights, dtype=dtype)
    options = {"loss": kind, "rows": span, "tier": Tier.INTERPRETER}
    result = evaluate(dataset, programs, vectors, **options)
    start, stop = span or (0, 5000)
    part = weights[start:stop] if weighted else None
    with np.errstate(all="ignore"):
        expected = reference_loss(kind, result.values, target[start:stop], part)
    np.testing.assert_allclose(result.losses, expected, rtol=1e-10)
    alone = evaluate(dataset, programs, vectors, values=False, **options)
    np.testing.assert_array_equal(alone.losses, result.losses)
    wide = np.stack([evaluate_program(programs[0], data[:, start:stop], v) for v in vectors[0]])
    np.testing.assert_array_equal(result.values[0], wide.astype(dtype))


def test_loss_is_nan_where_a_value_is(evaluate: Evaluate):
    data = np.array([1.0, -1.0, 2.0], dtype=np.float32)
    dataset = Dataset.of(data, data, np.array([1.0, 0.0, 1.0]))
    result = evaluate(dataset, [Program.apply("log", X[0]), X[0]], loss=Loss.MSE)
    assert np.isnan(result.losses[0, 0])
    assert result.losses[1, 0] == 0.0


@pytest.mark.parametrize("precision", list(Precision))
def test_repeat_is_bit_identical(evaluate: Evaluate, precision):
    rng = np.random.default_rng(0)
    dataset = Dataset.of(rng.normal(size=(30_011, 10)), rng.normal(size=30_011))
    programs, vectors = thesis_mix(5)
    runs = [
        evaluate(dataset, programs, vectors, loss=Loss.MSE, precision=precision) for _ in range(3)
    ]
    for run in runs[1:]:
        assert run.losses.tobytes() == runs[0].losses.tobytes()
        assert run.values.tobytes() == runs[0].values.tobytes()


def test_concurrent_evaluations(evaluate: Evaluate):
    rng = np.random.default_rng(0)
    dataset = Dataset.of(rng.normal(size=(5003, 10)), rng.normal(size=5003))
    mixes = [thesis_mix(seed, 50) for seed in range(8)]
    alone = [evaluate(dataset, *mix, loss=Loss.MSE).losses for mix in mixes]

    def run(mix):
        helper = Evaluate(evaluate.engine)
        helper._loaded = evaluate._loaded
        return [helper(dataset, *mix, loss=Loss.MSE).losses for _ in range(10)]

    with ThreadPoolExecutor(8) as pool:
        for expected, repeats in zip(alone, pool.map(run, mixes), strict=True):
            for losses in repeats:
                assert losses.tobytes() == expected.tobytes()


@pytest.mark.parametrize("precision", Precision)
def test_losses_computed_together_have_the_bits_of_those_computed_alone(evaluate, precision):
    rng = np.random.default_rng(5)
    data = rng.uniform(0.5, 2.0, size=(5000, 10))
    dataset = Dataset.of(data, data[:, 0], rng.uniform(size=5000), dtype=np.float32)
    mixes = [thesis_mix(seed, 30 + seed) for seed in range(16)]
    kinds = [Loss.MSE, Loss.RMSE, Loss.R2, Loss.MAE]
    options = {"values": False, "precision": precision, "tier": Tier.INTERPRETER}

    def run(number: int) -> list[bytes]:
        programs, parameters = mixes[number]
        kind = kinds[number % 4]
        return [
            evaluate(dataset, programs, parameters, loss=kind, **options).losses.tobytes()
            for _ in range(20)
        ]

    alone = [run(number)[0] for number in range(16)]
    with ThreadPoolExecutor(16) as pool:
        for expected, repeats in zip(alone, pool.map(run, range(16)), strict=True):
            assert set(repeats) == {expected}


@pytest.mark.parametrize("chunk", [1 << 12, 1 << 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_larger_than_a_chunk(evaluate: Evaluate, tuned, dtype, chunk):
    rng = np.random.default_rng(1)
    data = rng.normal(size=(3, 5000)).astype(dtype)
    dataset = Dataset.of(data.T, data[0], dtype=dtype)
    programs = [Program.apply("mul", x, P[0]) for x in X] * 5
    vectors = [rng.normal(size=(3, 1))] * 15
    whole = evaluate(dataset, programs, vectors, loss=Loss.SSE, rows=(17, 4999))
    pieces = tuned(InterpreterTuning(chunk_bytes=chunk))
    cut = pieces(dataset, programs, vectors, loss=Loss.SSE, rows=(17, 4999))
    np.testing.assert_array_equal(cut.values, whole.values)
    np.testing.assert_array_equal(cut.losses, whole.losses)
    assert pieces.announced == sorted(pieces.announced)
    assert pieces.announced[-1] == 15


@pytest.mark.parametrize("exponent", [2.0, 3.0, -1.0, -2.0, 0.0, 1.0, 17.0, 0.5, -2.5])
def test_fast_power_of_negative_bases(evaluate: Evaluate, exponent):
    data = np.array([-3.0, -1.5, -1.0, -0.25, 0.25, 1.0, 3.0], dtype=np.float32)
    programs = [
        Program.apply("pow", X[0], Program.constant(exponent)),
        Program.apply("pow", X[0], P[0]),
        Program.apply("pow", X[0], X[1]),
        Program.apply("pow", P[1], X[1]),
    ]
    rows = np.stack([data, np.full_like(data, exponent)])
    vectors = [[], [exponent], [], [0.0, -3.0]]
    got = evaluate(Dataset.of(rows.T), programs, vectors, precision=Precision.FAST).values[:, 0]
    with np.errstate(all="ignore"):
        expected = np.power(data.astype(np.float64), exponent)
        other = np.power(np.full(7, -3.0), exponent)
    np.testing.assert_allclose(got, [expected] * 3 + [other], rtol=5e-5)


def test_fast_mode_leaves_float64_precise(evaluate: Evaluate):
    rng = np.random.default_rng(2)
    dataset = Dataset.of(rng.normal(size=(100, 10)), dtype=np.float64)
    programs, vectors = thesis_mix(3, 20)
    fast = evaluate(dataset, programs, vectors, precision=Precision.FAST).values
    precise = evaluate(dataset, programs, vectors).values
    assert fast.tobytes() == precise.tobytes()


def test_cancellation(evaluate: Evaluate):
    dataset = Dataset.of(np.zeros((100, 1)))
    with pytest.raises(CancelledError):
        evaluate(dataset, [X[0]], cancelled=True)
    assert evaluate(dataset, [X[0]]).values.shape == (1, 1, 100)


def test_unknown_dataset(evaluate: Evaluate):
    dataset = Dataset.of(np.zeros((10, 1)))
    evaluate(dataset, [X[0]])
    evaluate.engine.unload(dataset.content_id)
    with pytest.raises(DatasetNotFoundError):
        evaluate(dataset, [X[0]])


def test_out_of_memory_is_reported_and_survived(engine):
    from warpfit_server.engine.cuda.engine import CudaEngine

    small = CudaEngine(memory_limit=8 << 20)
    helper = Evaluate(small)
    try:
        with pytest.raises(ResourceExhaustedError) as refused:
            helper(Dataset.of(np.zeros((1000, 3000))), [X[0]])
        assert refused.value.needed > refused.value.available >= 0
        data = np.arange(1000, dtype=np.float32)
        got = helper(Dataset.of(data), [X[0]] * 4).values
        np.testing.assert_array_equal(got, np.tile(data, (4, 1, 1)))
    finally:
        small.close()


@pytest.fixture
def tuned(engine):
    """Make an `Evaluate` whose interpreter is laid out differently."""
    from warpfit_server.engine.cuda.engine import CudaEngine

    engines: list[CudaEngine] = []

    def make(tuning: InterpreterTuning) -> Evaluate:
        engines.append(CudaEngine(tuning=tuning))
        return Evaluate(engines[-1])

    yield make
    for made in engines:
        made.close()
