"""The interpreter on a device against the NumPy reference."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from support.engines.operators import check_node_by_node
from support.engines.references import Evaluate
from support.random_programs import thesis_mix
from warpfit import errors
from warpfit.dataset import Dataset
from warpfit.ir import Program
from warpfit.request import Loss, Precision, Tier
from warpfit_server.engine.cuda.interpreter import tier
from warpfit_server.engine.cuda.interpreter.launches import Variant
from warpfit_server.engine.cuda.runtime import device
from warpfit_server.engine.interface import Arithmetic

X = [Program.variable(index) for index in range(3)]
P = [Program.parameter(index) for index in range(3)]
DTYPES = [np.float32, np.float64]


@pytest.mark.parametrize("row_bytes", [None, 16, 32, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_programs_node_by_node(evaluate: Evaluate, monkeypatch, dtype, row_bytes):
    arithmetic = Arithmetic.of(np.dtype(dtype), Precision.PRECISE)
    if row_bytes:
        variant = Variant.of(arithmetic, row_bytes)
        monkeypatch.setitem(tier._VARIANTS_OF, arithmetic, (variant, variant))
    check_node_by_node(evaluate, dtype, roots=60, tokens=60)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk_bytes", [tier._CHUNK_BYTES, 100_000])
def test_pieces_make_no_difference(evaluate: Evaluate, monkeypatch, dtype, chunk_bytes):
    """Large work goes to the device piece by piece, also where its sums would take much memory."""
    programs, vectors = thesis_mix(4, 100)
    vectors = [np.stack([vector, 2 * vector]) for vector in vectors]
    rng = np.random.default_rng(4)
    dataset = Dataset.of(
        rng.uniform(0.5, 2, size=(200_000, 10)), rng.normal(size=200_000), dtype=dtype
    )
    options = {"values": False, "loss": Loss.MSE, "tier": Tier.INTERPRETER}
    whole = evaluate(dataset, programs, vectors, **options)
    few = device.LaunchWork(1_000_000, 500_000, 1_000_000)
    for arithmetic in Arithmetic:
        monkeypatch.setitem(device.LAUNCH_WORK, arithmetic, few)
    monkeypatch.setattr(tier, "_CHUNK_BYTES", chunk_bytes)
    cut = evaluate(dataset, programs, vectors, **options)
    np.testing.assert_array_equal(cut.losses, whole.losses)


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


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_invariant_subtree_too_deep_to_hoist(evaluate: Evaluate, dtype):
    program = P[0]
    for _ in range(50):
        program = Program.apply("sub", P[1], program)
    got = evaluate(Dataset.of(np.zeros((5, 1)), dtype=dtype), [program], [[3.0, 7.0]]).values
    np.testing.assert_array_equal(got, np.full((1, 1, 5), 3.0))


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
def test_results_larger_than_a_chunk(evaluate: Evaluate, monkeypatch, dtype, chunk):
    rng = np.random.default_rng(1)
    data = rng.normal(size=(3, 5000)).astype(dtype)
    dataset = Dataset.of(data.T, data[0], dtype=dtype)
    programs = [Program.apply("mul", x, P[0]) for x in X] * 5
    vectors = [rng.normal(size=(3, 1))] * 15
    whole = evaluate(dataset, programs, vectors, loss=Loss.SSE, rows=(17, 4999))
    monkeypatch.setattr(tier, "_CHUNK_BYTES", chunk)
    cut = evaluate(dataset, programs, vectors, loss=Loss.SSE, rows=(17, 4999))
    np.testing.assert_array_equal(cut.values, whole.values)
    np.testing.assert_array_equal(cut.losses, whole.losses)
    assert evaluate.announced == sorted(evaluate.announced)
    assert evaluate.announced[-1] == 15


def test_fast_mode_leaves_float64_precise(evaluate: Evaluate):
    rng = np.random.default_rng(2)
    dataset = Dataset.of(rng.normal(size=(100, 10)), dtype=np.float64)
    programs, vectors = thesis_mix(3, 20)
    fast = evaluate(dataset, programs, vectors, precision=Precision.FAST).values
    precise = evaluate(dataset, programs, vectors).values
    assert fast.tobytes() == precise.tobytes()


def test_out_of_memory_is_reported_and_survived(engine):
    from warpfit_server.engine.cuda.engine import CudaEngine

    small = CudaEngine(memory_limit=8 << 20)
    helper = Evaluate(small)
    try:
        with pytest.raises(errors.ResourceExhaustedError) as refused:
            helper(Dataset.of(np.zeros((1000, 3000))), [X[0]])
        assert refused.value.needed > refused.value.available >= 0
        data = np.arange(1000, dtype=np.float32)
        got = helper(Dataset.of(data), [X[0]] * 4).values
        np.testing.assert_array_equal(got, np.tile(data, (4, 1, 1)))
    finally:
        small.close()
