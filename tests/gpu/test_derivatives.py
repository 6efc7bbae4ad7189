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
from warpfit.ir import Batch, Program
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
def test_a_fast_loss_is_the_same_however_it_is_asked_for(engine, loss, weights):
    """The two interpreters compute values alike, and round the difference once."""
    data = make_dataset(70_001, "float32", weights=weights)
    batch = Batch.of([parse("p1 * x1 + x2"), parse("x1 * x2 - x3")], [[0.7], []])
    alone, beside = (
        evaluated(engine, data, batch, loss, gradient=gradient, precision=Precision.FAST)
        for gradient in (False, True)
    )
    np.testing.assert_allclose(beside, alone, rtol=1e-14)
    want = evaluated(engine, data, batch, loss)
    np.testing.assert_allclose(alone, want, rtol=1e-5)


@pytest.mark.parametrize("loss", [Loss.SSE, Loss.MAE, Loss.NMSE])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_compiled_loss_is_the_interpreters(engine, loss, weights, dtype):
    """In precise mode, alone and beside its gradient."""
    data = make_dataset(70_001, dtype, weights=weights)
    batch = Batch.of([parse("p1 * x1 + x2"), parse("x1 * x2 - x3")], [[0.7], []])
    alone = evaluated(engine, data, batch, loss)
    for gradient in (False, True):
        got = evaluated(engine, data, batch, loss, gradient=gradient, tier=Tier.COMPILED)
        np.testing.assert_allclose(got, alone, rtol=1e-14)


def test_a_large_batch_is_computed_in_parts(engine, monkeypatch):
    """To the last bit, and an error names the program of the whole batch."""
    data, drawn = make_dataset(5000), thesis_mix(3, 60, variables=4)
    options = {"row_loss": SQUARES, "statistics": True}
    whole = derive(engine, data, *drawn, **options)
    monkeypatch.setattr(tier, "_MOST_WORK", 200)
    parts = derive(engine, data, *drawn, **options)
    for name in ("losses", "gradients", "jacobian", "variable_gradients", "reductions", "moments"):
        np.testing.assert_array_equal(getattr(parts, name), getattr(whole, name))
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
    vectors = [np.linspace(0.1, 1.1, 300), np.array([0.7, 1.3, -0.4])]
    got = linearise(engine, data, [large, small], vectors, SQUARES)
    want = linearise(NumpyEngine(data), data, [large, small], vectors, SQUARES)
    tolerance = 1e-9 if dtype == "float64" else 1e-4
    assert_close(got.gradients, want.gradients, tolerance, np.abs(want.gradients) + 70)
    assert_close(got.curvatures, want.curvatures, tolerance, np.abs(want.curvatures) + 70)
    alone = linearise(engine, data, [small], vectors[1:], SQUARES)
    np.testing.assert_array_equal(got.gradients[300:], alone.gradients)


def test_large_answers_come_in_pieces(engine, monkeypatch):
    data = make_dataset(3000, "float32")
    programs, vectors = thesis_mix(3, 40, variables=4)
    whole = derive(engine, data, programs, vectors, row_loss=SQUARES, statistics=True)
    monkeypatch.setattr(launches, "_CHUNK_BYTES", 100_000)
    pieces = derive(engine, data, programs, vectors, row_loss=SQUARES, statistics=True)
    names = ("values", "losses", "gradients", "jacobian", "variable_gradients")
    for name in (*names, "reductions", "moments"):
        np.testing.assert_array_equal(getattr(pieces, name), getattr(whole, name))


def test_values_are_announced(engine):
    data = make_dataset(500, "float32")
    programs, vectors = smooth_programs()
    batch = Batch.of(programs, vectors)
    announced: list[int] = []
    evaluation = Evaluation(data.content_id, batch, jacobian=True)
    outputs = replace(outputs_for(evaluation, data.layout), ready=announced.append)
    engine.load(data)
    timings = run_to_end(engine.evaluate(evaluation, outputs))
    assert announced[-1] == len(programs)
    assert timings.tier is Tier.INTERPRETER
    assert timings.compute > 0


def test_a_data_set_that_is_replaced_is_not_mixed_up(engine):
    """The code of a batch stays on the device; the data that it runs on may not."""
    programs, vectors = smooth_programs()
    for seed in range(3):
        rng = np.random.default_rng(seed)
        data = Dataset.of(rng.uniform(0.2, 2, (3000, 4)), rng.normal(size=3000), dtype="float64")
        got, want = (
            linearise(one, data, programs, vectors, SQUARES) for one in (engine, NumpyEngine(data))
        )
        np.testing.assert_allclose(got.curvatures, want.curvatures, rtol=1e-9, atol=1e-6)
        engine.unload(data.content_id)


# ------------------------------------------------------------------------- compiled gradients


def compiled_gradients(engine, data, programs, vectors, *, tier=Tier.COMPILED, **options):
    """Losses [programs, K] and flat gradients of one tier."""
    batch = Batch.of(programs, vectors)
    evaluation = Evaluation(
        data.content_id, batch, values=False, gradient=True, tier=tier, **options
    )
    evaluation.check(data.layout)
    outputs = outputs_for(evaluation, data.layout)
    engine.load(data)
    assert run_to_end(engine.evaluate(evaluation, outputs)).tier is tier
    return outputs.losses, outputs.gradients


@pytest.mark.parametrize("name", OPERATORS)
def test_compiled_gradients_of_every_operator(engine, name, flavour):
    dtype, _, tolerance = flavour
    arity = OPERATORS[name].arity
    rng = np.random.default_rng(arity)
    X = rng.uniform(0.2, 0.8, size=(700, arity)).astype(dtype)
    y = rng.normal(size=700)
    operands = [
        Program.apply("mul", Program.variable(k), Program.parameter(k)) for k in range(arity)
    ]
    program, vector = Program.apply(name, *operands), np.linspace(0.9, 1.1, arity)
    data = Dataset.of(X, y, dtype=dtype)
    for loss in (Loss.SSE, Loss.MAE):
        got = compiled_gradients(engine, data, [program], [vector], loss=loss)
        row_loss = SQUARES if loss is Loss.SSE else ABSOLUTE
        want = linearise(NumpyEngine(data), data, [program], [vector], row_loss)
        scale = np.abs(want.gradients) + 7
        assert_close(got[1], want.gradients, 10 * tolerance, scale)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("rows", [1, 33, 5000, 100_003])
def test_compiled_gradients(engine, flavour, weights, rows):
    dtype, precision, tolerance = flavour
    data = make_dataset(rows, dtype, weights=weights)
    programs, vectors = smooth_programs()
    got = compiled_gradients(engine, data, programs, vectors, loss=Loss.SSE, precision=precision)
    want = linearise(NumpyEngine(data), data, programs, vectors, SQUARES)
    size = np.abs(want.losses) + 1e-3 * rows
    assert_close(got[0], want.losses, tolerance, size)
    size = np.abs(want.gradients) + 0.1 * rows
    assert_close(got[1], want.gradients, 10 * tolerance, size)


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
    programs, vectors = thesis_mix(5, 60, variables=4)
    options = {"loss": Loss.SSE, "precision": precision}
    got = compiled_gradients(engine, data, programs, vectors, **options)
    again = compiled_gradients(engine, data, programs, vectors, **options)
    want = compiled_gradients(engine, data, programs, vectors, tier=Tier.INTERPRETER, **options)
    np.testing.assert_array_equal(got[1], again[1])
    finite = np.isfinite(want[1]) & np.isfinite(got[1]) & (np.abs(want[1]) < 1e15)
    assert finite.sum() > 20
    close = np.isclose(got[1], want[1], rtol=2e-2, atol=1.0)
    assert close[finite].mean() > 0.97


def test_repeated_gradients_are_compiled_in_the_background(engine):
    data = make_dataset(500_000, "float32")
    programs, vectors = thesis_mix(6, 200, variables=4)
    batch = Batch.of(programs, vectors)
    evaluation = Evaluation(
        data.content_id, batch, values=False, gradient=True, loss=Loss.MSE,
        precision=Precision.FAST,
    )  # fmt: skip
    engine.load(data)
    seen = set()
    for _ in range(2000):
        outputs = outputs_for(evaluation, data.layout)
        seen.add(run_to_end(engine.evaluate(evaluation, outputs)).tier)
        if Tier.COMPILED in seen:
            break
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
    programs, vectors = thesis_mix(11, 120, variables=4)
    texts = [str(program) for program in programs]
    first, second = (fit(data, texts, vectors, loss=loss, engine=engine) for _ in range(2))
    finite = np.isfinite(first.initial_loss)
    assert finite.sum() > 30
    assert (first.loss[finite] <= first.initial_loss[finite]).all()
    assert (first.loss[finite] < first.initial_loss[finite]).mean() > 0.5
    np.testing.assert_array_equal(first.loss, second.loss)
    for one, other in zip(first.parameters, second.parameters, strict=True):
        np.testing.assert_array_equal(one, other)
