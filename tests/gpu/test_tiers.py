"""The interpreter and compiled kernels on a device, alike, against the NumPy reference."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from support.engines.operators import check_node_by_node
from support.engines.references import Evaluate, reference_loss
from support.random_programs import random_program, thesis_mix
from warpfit.dataset import Dataset
from warpfit.errors import CancelledError
from warpfit.expressions.reference import evaluate_program
from warpfit.ir import Program
from warpfit.request import Loss, Precision, Tier

X = [Program.variable(index) for index in range(3)]
P = [Program.parameter(index) for index in range(3)]
DTYPES = [np.float32, np.float64]
#: Relative errors of losses of values that are known.
ROUNDING = {Tier.INTERPRETER: 1e-12, Tier.COMPILED: 1e-6}


@pytest.fixture(params=ROUNDING, ids=str)
def tier(request):
    return request.param


@pytest.fixture
def run(evaluate: Evaluate, tier):
    """Evaluate on one tier, waiting for the compiler where it must."""
    return partial(evaluate, tier=tier)


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_programs_node_by_node(run, dtype):
    check_node_by_node(run, dtype, roots=25, tokens=40)


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 1023, 1024, 1025, 1_000_003])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes(run, evaluate, tier, dtype, rows):
    rng = np.random.default_rng(rows)
    data = rng.normal(size=(2, rows)).astype(dtype)
    target = rng.normal(size=rows).astype(dtype)
    programs = [Program.apply("add", X[0], X[1]), Program.apply("mul", X[0], P[0])]
    dataset = Dataset.of(data.T, target, dtype=dtype)
    result = run(dataset, programs, [[], [2.0]], loss=Loss.SSE)
    expected = np.stack([data[0] + data[1], data[0] * dtype(2.0)])
    np.testing.assert_array_equal(result.values[:, 0], expected)
    wanted = reference_loss(Loss.SSE, expected, target)
    np.testing.assert_allclose(result.losses[:, 0], wanted, rtol=ROUNDING[tier])
    assert evaluate.announced[-1] == 2


@pytest.mark.parametrize("count", [1, 2, 33, 1000, 5000])
def test_batch_sizes(run, tier, count):
    if tier is Tier.COMPILED and count > 1000:
        pytest.skip("compiling takes long")
    rng = np.random.default_rng(count)
    data = rng.uniform(0.5, 2, size=(10, 257)).astype(np.float32)
    names = ("add", "sub", "mul", "min", "max", "neg")
    programs = [random_program(rng, 1 + i % 40, operators=names) for i in range(count)]
    vectors = [rng.uniform(-1, 1, size=p.parameters) for p in programs]
    result = run(Dataset.of(data.T, data[0]), programs, vectors, loss=Loss.MSE)
    pairs = zip(programs, vectors, strict=True)
    expected = np.stack([evaluate_program(p, data, v) for p, v in pairs])
    np.testing.assert_allclose(result.values[:, 0], expected, rtol=1e-3, atol=1e-3)
    wanted = reference_loss(Loss.MSE, result.values[:, 0], data[0])
    np.testing.assert_allclose(result.losses[:, 0], wanted, rtol=ROUNDING[tier])


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("precision", Precision)
def test_concurrent_evaluations(evaluate: Evaluate, tier, values, precision):
    rng = np.random.default_rng(0)
    X, weights = rng.uniform(0.5, 2.0, size=(5003, 10)), rng.uniform(size=5003)
    dataset = Dataset.of(X, rng.normal(size=5003), weights)
    options = {"precision": precision, "values": values, "tier": tier}

    def repeat(number):
        helper, loss = Evaluate(evaluate.engine), (Loss.MSE, Loss.RMSE, Loss.R2, Loss.MAE)
        helper._loaded, mix = evaluate._loaded, thesis_mix(number, 20 + number)
        given = options | {"loss": loss[number % 4]}
        return {helper(dataset, *mix, **given).losses.tobytes() for _ in range(10)}

    evaluate(dataset, [P[0]], [[1.0]])
    alone = [repeat(number) for number in range(12)]
    with ThreadPoolExecutor(12) as pool:
        assert [*pool.map(repeat, range(12))] == alone
    assert {len(found) for found in alone} == {1}


@pytest.mark.parametrize("exponent", [2.0, 3.0, -1.0, -2.0, 0.0, 1.0, 17.0, 0.5, -2.5])
def test_fast_power_of_negative_bases(run, exponent):
    data = np.array([-3.0, -1.5, -1.0, -0.25, 0.25, 1.0, 3.0], dtype=np.float32)
    operands = (X[0], Program.constant(exponent)), (X[0], P[0]), (X[0], X[1]), (P[1], X[1])
    programs = [Program.apply("pow", *pair) for pair in operands]
    rows = np.stack([data, np.full_like(data, exponent)])
    vectors = [[], [exponent], [], [0.0, -3.0]]
    got = run(Dataset.of(rows.T), programs, vectors, precision=Precision.FAST).values[:, 0]
    with np.errstate(all="ignore"):
        expected = np.power(data.astype(np.float64), exponent)
        other = np.power(np.full(7, -3.0), exponent)
    np.testing.assert_allclose(got, [expected] * 3 + [other], rtol=5e-5)


def test_cancellation(run):
    dataset = Dataset.of(np.zeros((100, 1)))
    with pytest.raises(CancelledError):
        run(dataset, [X[0]], cancelled=True)
    assert run(dataset, [X[0]]).values.shape == (1, 1, 100)
