"""The interpreter on a device against the NumPy reference."""

from __future__ import annotations

from contextlib import closing
from functools import partial

import numpy as np
import pytest

from support.engines.operators import check_node_by_node
from support.engines.references import Evaluate
from support.random_programs import thesis_mix
from warpfit import errors
from warpfit.dataset import Dataset
from warpfit.ir import Program
from warpfit.request import Loss, Precision
from warpfit_server.engine.cuda.engine import CudaEngine
from warpfit_server.engine.cuda.interpreter import tier
from warpfit_server.engine.cuda.interpreter.launches import Variant
from warpfit_server.engine.interface import Arithmetic

X = [Program.variable(index) for index in range(3)]
P = [Program.parameter(index) for index in range(3)]
DTYPES = [np.float32, np.float64]


@pytest.mark.parametrize("row_bytes", [16, 32, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_programs_node_by_node(evaluate: Evaluate, monkeypatch, dtype, row_bytes):
    arithmetic = Arithmetic.of(np.dtype(dtype), Precision.PRECISE)
    variant = Variant.of(arithmetic, row_bytes)
    monkeypatch.setitem(tier._VARIANTS_OF, arithmetic, (variant, variant))
    check_node_by_node(evaluate, dtype, roots=60, tokens=60)


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


@pytest.mark.parametrize("chunk", [1 << 12, 1 << 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_larger_than_a_chunk(evaluate: Evaluate, monkeypatch, dtype, chunk):
    rng = np.random.default_rng(1)
    data = rng.normal(size=(3, 5000)).astype(dtype)
    dataset = Dataset.of(data.T, data[0], dtype=dtype)
    programs = [Program.apply("mul", x, P[0]) for x in X] * 5
    vectors = [rng.normal(size=(3, 1))] * 15
    call = partial(evaluate, dataset, programs, vectors, loss=Loss.SSE, rows=(17, 4999))
    whole = call()
    monkeypatch.setattr(tier, "_CHUNK_BYTES", chunk)
    cut = call()
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
    with closing(CudaEngine(memory_limit=8 << 20)) as small:
        helper = Evaluate(small)
        with pytest.raises(errors.ResourceExhaustedError) as refused:
            helper(Dataset.of(np.zeros((1000, 3000))), [X[0]])
        assert refused.value.needed > refused.value.available >= 0
        data = np.arange(1000, dtype=np.float32)
        got = helper(Dataset.of(data), [X[0]] * 4).values
        np.testing.assert_array_equal(got, np.tile(data, (4, 1, 1)))
