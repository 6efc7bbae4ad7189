"""Derivatives, row losses, statistics and fits of the CUDA engine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from support.engines import nist
from support.engines.fits import fit
from support.engines.gradients import derive, linearise
from support.engines.references import NumpyEngine, outputs_for
from support.random_programs import thesis_mix
from support.suites.derivatives import *  # noqa: F403
from support.suites.derivatives import assert_close, make_dataset, smooth_programs
from support.suites.losses import *  # noqa: F403
from support.suites.losses import LossErrors, evaluated
from warpfit import parse
from warpfit.dataset import Dataset
from warpfit.errors import ProgramError
from warpfit.ir import Batch
from warpfit.losses import ABSOLUTE, SQUARES
from warpfit.ops import OPERATORS
from warpfit.request import Evaluation, Loss, Precision, Tier
from warpfit_server.engine.cuda.derivatives import launches, tier
from warpfit_server.engine.interface import run_to_end

FLAVOURS = [("float64", Precision.PRECISE, 1e-9), ("float32", Precision.PRECISE, 1e-4)]
PROBLEMS = {name: nist.load(name) for name in nist.FORMULAS}


@pytest.fixture(scope="module", params=FLAVOURS, ids=lambda flavour: flavour[0])
def flavour(request):
    return request.param


@pytest.fixture(scope="module")
def loss_errors() -> LossErrors:
    """As server/README.md says: losses of one's own are float32 for each row."""
    return LossErrors(asked_otherwise=1e-14, own_single=1e-6)


@pytest.mark.parametrize("loss", [Loss.SSE, Loss.MAE, Loss.NMSE])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_loss_is_the_same_however_it_is_asked_for(engine, loss, weights, dtype):
    """The interpreters compute fast values alike; in precise mode compiled losses are theirs."""
    data = make_dataset(70_001, dtype, weights=weights)
    batch = Batch.of([parse("p1 * x1 + x2"), parse("x1 * x2 - x3")], [[0.7], []])
    precise = evaluated(engine, data, batch, loss)
    fast = evaluated(engine, data, batch, loss, precision=Precision.FAST)
    np.testing.assert_allclose(fast, precise, rtol=1e-5)
    beside = evaluated(engine, data, batch, loss, gradient=True, precision=Precision.FAST)
    np.testing.assert_allclose(beside, fast, rtol=1e-14)
    for gradient in (False, True):
        got = evaluated(engine, data, batch, loss, gradient=gradient, tier=Tier.COMPILED)
        np.testing.assert_allclose(got, precise, rtol=1e-14)


@pytest.mark.parametrize(
    ("module", "name", "most"), [(tier, "_MOST_WORK", 200), (launches, "_CHUNK_BYTES", 100_000)]
)
def test_large_batches_and_answers_are_computed_in_parts(engine, monkeypatch, module, name, most):
    """To the last bit, and an error names the program of the whole batch."""
    data, drawn = make_dataset(5000), thesis_mix(3, 60, variables=4)
    options = {"row_loss": SQUARES, "statistics": True}
    whole = derive(engine, data, *drawn, **options)
    monkeypatch.setattr(module, name, most)
    parts = derive(engine, data, *drawn, **options)
    names = "values losses gradients jacobian variable_gradients reductions moments"
    for each in names.split():
        np.testing.assert_array_equal(getattr(parts, each), getattr(whole, each))
    batch = Batch.of(*drawn)
    codes = batch.codes.copy()
    codes[batch.starts[41]] = 255
    bad = Evaluation(data.content_id, replace(batch, codes=codes), jacobian=True)
    with pytest.raises(ProgramError) as caught:
        run_to_end(engine.evaluate(bad, outputs_for(bad, data.layout)))
    assert caught.value.expression == 41


@pytest.mark.parametrize("rows", [31, 5000])
def test_fast_derivatives(engine, rows):
    """Approximate functions, and products of float32: a tenth of a percent."""
    data = make_dataset(rows, "float32", weights=True)
    batch = *smooth_programs(), SQUARES
    got = linearise(engine, data, *batch, precision=Precision.FAST)
    want = linearise(NumpyEngine(data), data, *batch)
    assert_close(got.losses, want.losses, 1e-3, np.abs(want.losses) + 1e-3 * rows)
    assert_close(got.gradients, want.gradients, 1e-3, np.abs(want.gradients) + 0.1 * rows)
    assert_close(got.curvatures, want.curvatures, 1e-3, np.abs(want.curvatures) + 0.1 * rows)


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 255, 257, 1023, 1025, 6143, 6145, 100_003])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sizes(engine, rows, dtype):
    data = make_dataset(rows, dtype, weights=True)
    batch = *smooth_programs(), SQUARES
    got, want = linearise(engine, data, *batch), linearise(NumpyEngine(data), data, *batch)
    tolerance = 1e-9 if dtype == "float64" else 1e-4
    for name in ("losses", "gradients", "curvatures"):
        size = np.abs(getattr(want, name)) + 0.1 * rows
        assert_close(getattr(got, name), getattr(want, name), tolerance, size)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_programs_too_large_for_shared_memory(engine, dtype):
    """Three hundred columns are alive at once; others of the batch are as they are without."""
    large = parse(" + ".join(f"p{k} * sin({k / 100} * x1 + p{k})" for k in range(1, 301)))
    small = parse("p1 * exp(-p2 * x1) + p3")
    data = make_dataset(700, dtype, weights=True)
    batch = [large, small], [np.linspace(0.1, 1.1, 300), np.array([0.7, 1.3, -0.4])]
    got, want = (linearise(each, data, *batch, SQUARES) for each in (engine, NumpyEngine(data)))
    tolerance = 1e-9 if dtype == "float64" else 1e-4
    assert_close(got.gradients, want.gradients, tolerance, np.abs(want.gradients) + 70)
    assert_close(got.curvatures, want.curvatures, tolerance, np.abs(want.curvatures) + 70)
    alone = linearise(engine, data, [small], batch[1][1:], SQUARES)
    np.testing.assert_array_equal(got.gradients[300:], alone.gradients)


def test_a_data_set_that_is_replaced_is_not_mixed_up(engine):
    """The code of a batch stays on the device; the data that it runs on may not."""
    for seed in range(3):
        rng = np.random.default_rng(seed)
        data = Dataset.of(rng.uniform(0.2, 2, (3000, 4)), rng.normal(size=3000), dtype="float64")
        got, want = (
            linearise(one, data, *smooth_programs(), SQUARES) for one in (engine, NumpyEngine(data))
        )
        np.testing.assert_allclose(got.curvatures, want.curvatures, rtol=1e-9, atol=1e-6)
        engine.unload(data.content_id)


def compiled_gradients(engine, data, programs, vectors, *, tier=Tier.COMPILED, **options):
    """Losses [programs, K] and flat gradients of one tier."""
    asked = {"values": False, "gradient": True, "tier": tier, **options}
    evaluation = Evaluation(data.content_id, Batch.of(programs, vectors), **asked)
    outputs = outputs_for(evaluation, data.layout)
    engine.load(data)
    timings = run_to_end(engine.evaluate(evaluation, outputs))
    assert timings.tier is tier
    assert timings.compute > 0
    return outputs.losses, outputs.gradients


@pytest.mark.parametrize("name", OPERATORS)
def test_compiled_gradients_of_every_operator(engine, name, flavour):
    dtype, _, tolerance = flavour
    arity = OPERATORS[name].arity
    rng = np.random.default_rng(arity)
    X = rng.uniform(0.2, 0.8, size=(700, arity)).astype(dtype)
    data = Dataset.of(X, rng.normal(size=700), dtype=dtype)
    operands = ", ".join(f"x{k} * p{k}" for k in range(1, arity + 1))
    batch = [parse(f"{name}({operands})")], [np.linspace(0.9, 1.1, arity)]
    for loss, row_loss in ((Loss.SSE, SQUARES), (Loss.MAE, ABSOLUTE)):
        _, got = compiled_gradients(engine, data, *batch, loss=loss)
        want = linearise(NumpyEngine(data), data, *batch, row_loss).gradients
        assert_close(got, want, 10 * tolerance, np.abs(want) + 7)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("rows", [1, 33, 5000, 100_003])
def test_compiled_gradients(engine, flavour, weights, rows):
    dtype, precision, tolerance = flavour
    data = make_dataset(rows, dtype, weights=weights)
    options = {"loss": Loss.SSE, "precision": precision}
    losses, gradients = compiled_gradients(engine, data, *smooth_programs(), **options)
    want = linearise(NumpyEngine(data), data, *smooth_programs(), SQUARES)
    assert_close(losses, want.losses, tolerance, np.abs(want.losses) + 1e-3 * rows)
    size = np.abs(want.gradients) + 0.1 * rows
    assert_close(gradients, want.gradients, 10 * tolerance, size)


def test_compiled_gradients_of_vectors_and_row_ranges(engine):
    data = make_dataset(4000, weights=True)
    programs, _ = smooth_programs()
    rng = np.random.default_rng(4)
    blocks = [rng.uniform(0.3, 1.5, size=(3, program.parameters)) for program in programs]
    options = {"loss": Loss.MSE, "rows": (37, 3501)}
    got = compiled_gradients(engine, data, programs, blocks, **options)
    want = compiled_gradients(engine, data, programs, blocks, tier=Tier.INTERPRETER, **options)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-7)


@pytest.mark.parametrize("precision", list(Precision))
def test_compiled_gradients_of_the_mix(engine, precision):
    data = make_dataset(10_000, "float32")
    batch, options = thesis_mix(5, 60, variables=4), {"loss": Loss.SSE, "precision": precision}
    (_, got), (_, again), (_, want) = (
        compiled_gradients(engine, data, *batch, tier=each, **options)
        for each in (Tier.COMPILED, Tier.COMPILED, Tier.INTERPRETER)
    )
    np.testing.assert_array_equal(got, again)
    finite = np.isfinite(want) & np.isfinite(got) & (np.abs(want) < 1e15)
    assert finite.sum() > 20
    close = np.isclose(got, want, rtol=2e-2, atol=1.0)
    assert close[finite].mean() > 0.97


def test_repeated_gradients_are_compiled_in_the_background(engine):
    data = make_dataset(5_000_000, "float32")  # compiling pays soon, even by one process
    options = {"values": False, "gradient": True, "loss": Loss.MSE, "precision": Precision.FAST}
    batch = Batch.of(*thesis_mix(6, 200, variables=4))
    evaluation, seen, left = Evaluation(data.content_id, batch, **options), set(), 10_000
    engine.load(data)
    while left and Tier.COMPILED not in seen:
        outputs = outputs_for(evaluation, data.layout)
        seen.add(run_to_end(engine.evaluate(evaluation, outputs)).tier)
        left -= 1
    assert seen == {Tier.INTERPRETER, Tier.COMPILED}


@pytest.mark.parametrize("start", [1, 2])
@pytest.mark.parametrize("name", PROBLEMS)
def test_nist_problems(engine, name, start):
    engine.load(PROBLEMS[name].dataset)
    parameters, squares, _, errors = nist.outcome(engine, PROBLEMS[name], start)
    assert parameters.min() >= 6, parameters
    assert squares >= (2 if name in nist.ROUNDED_AWAY else 6)
    assert errors.min() >= (2 if name in nist.ROUNDED_AWAY else 6), errors


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("loss", [Loss.MSE, Loss.MAE])
def test_fits_never_end_worse_and_repeat(engine, loss, precision):
    data = make_dataset(5000, "float32")
    engine.load(data)
    batch = thesis_mix(11, 120, variables=4)
    first, second = (fit(data, *batch, loss=loss, engine=engine) for _ in range(2))
    finite = np.isfinite(first.initial_loss)
    assert finite.sum() > 30
    assert (first.loss[finite] <= first.initial_loss[finite]).all()
    assert (first.loss[finite] < first.initial_loss[finite]).mean() > 0.5
    np.testing.assert_array_equal(first.loss, second.loss)
    for one, other in zip(first.parameters, second.parameters, strict=True):
        np.testing.assert_array_equal(one, other)
