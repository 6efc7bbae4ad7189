"""Losses, gradients, scaling and correlations that are made of the sums of engines."""

import gc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engines.gradients import derive, linearise
from support.engines.references import moments_of
from support.random_programs import thesis_mix
from support.suites.derivatives import make_dataset, smooth_programs
from warpfit.dataset import Dataset
from warpfit.expressions import reference
from warpfit.ir import Batch
from warpfit.losses import SQUARES, Closing, LossFunction, huber
from warpfit.parse import parse
from warpfit.request import Evaluation, Loss
from warpfit_server.engine.cpu import interpreter
from warpfit_server.engine.cpu.engine import CpuEngine
from warpfit_server.engine.evaluation import Finalizer, correlation, reduce_to_sums, scale_linearly
from warpfit_server.engine.interface import Outputs, run_to_end
from warpfit_server.engine.sum_tree import sum_nodes

rng = np.random.default_rng(0)
DATA = Dataset.of(rng.normal(size=(40, 4)), rng.normal(size=40), rng.uniform(0.1, 1, size=40))
PROGRAMS, PARAMETERS = thesis_mix(3, 7, variables=4)
BATCH = Batch.of(PROGRAMS, [np.stack([p, p]) for p in PARAMETERS])


def evaluation(**changes):
    return Evaluation(**{"dataset_id": DATA.content_id, "batch": BATCH, **changes})


def finalized(dataset, sums, finalizer=None, moments=None, **changes):
    """Return the outputs that these sums of all programs become, and the steps it took."""
    outputs = Outputs(None, np.full((7, 2), sums), np.zeros(1, np.uint8), lambda _: None)
    asked = evaluation(values=False, **changes)
    further = () if moments is None else (moments, np.zeros((7, 2, 2)), np.zeros((7, 2)))
    steps = [*(finalizer or Finalizer()).finalize(asked, dataset, outputs, *further)]
    return outputs, further, steps


@pytest.mark.parametrize("loss", Loss)
def test_each_row_range_of_each_data_set_has_its_own_losses(loss):
    finalizer, other = Finalizer(), Dataset.of(np.ones((40, 4)), np.arange(40.0))
    for dataset in (DATA, other):
        for rows in [(0, 40), (5, 20), (0, 40)]:
            w = np.ones(40) if dataset.weights is None else dataset.weights.astype(float)
            w, y = w[slice(*rows)], dataset.target[slice(*rows)].astype(float)
            spread = np.sum(w * np.square(y - np.average(y, weights=w)))
            expected = {
                "sse": 3.0, "mse": 3.0 / w.sum(), "rmse": np.sqrt(3.0 / w.sum()),
                "mae": 3.0 / w.sum(), "r2": 1 - 3.0 / spread, "nmse": 3.0 / spread,
            }[loss]  # fmt: skip
            outputs, _, _ = finalized(dataset, 3.0, finalizer, loss=loss, rows=rows)
            np.testing.assert_allclose(outputs.losses, expected, rtol=1e-6)
    kept = len(finalizer._statistics)
    del dataset, other
    gc.collect()
    assert len(finalizer._statistics) == kept // 2, "forgotten with their data set"


@pytest.mark.parametrize("has_weights", [False, True])
def test_a_pass_over_many_rows_is_made_once_and_in_steps(has_weights):
    y = np.arange(2_000_000.0)
    weights = (y % 3.0) if has_weights else None
    finalizer, dataset = Finalizer(), Dataset.of(np.ones((len(y), 1)), y, weights)
    spread = np.cov(y, aweights=weights, ddof=0) * (len(y) if weights is None else weights.sum())
    outputs, _, pauses = finalized(dataset, 1.0, finalizer, loss=Loss.R2)
    assert len(pauses) > 20
    assert set(pauses) == {None}, "the engine looks at its queue, and waits for nothing"
    again, _, pauses = finalized(dataset, 1.0, finalizer, loss=Loss.R2)
    assert not pauses
    for found in (outputs, again):
        np.testing.assert_allclose(found.losses, 1.0 - 1.0 / spread, rtol=1e-14)


@given(st.integers(0, 2**32 - 1), st.floats(-3, 3), st.floats(0.1, 3))
def test_linear_scaling_is_weighted_least_squares(seed, a, b):
    draw = np.random.default_rng(seed)
    f, noise = draw.normal(size=(2, 30))
    w = draw.uniform(0.1, 2, size=30)
    y = a + b * f + 0.1 * noise
    (slope, intercept), left = scale_linearly(moments_of(f, y, w))
    design = np.sqrt(w)[:, None] * np.column_stack([f, np.ones(30)])
    expected, squares, *_ = np.linalg.lstsq(design, np.sqrt(w) * y, rcond=None)
    np.testing.assert_allclose([slope, intercept], expected, rtol=1e-8)
    np.testing.assert_allclose(left, squares[0], rtol=1e-8)
    centred = np.cov(f, y, aweights=w)
    pearson = centred[0, 1] / np.sqrt(centred[0, 0] * centred[1, 1])
    np.testing.assert_allclose(correlation(moments_of(f, y, w)), pearson, rtol=1e-10)
    constant = moments_of(np.full(30, 3.0), y, w)
    (slope, intercept), left = scale_linearly(constant)
    mean = np.average(y, weights=w)
    np.testing.assert_allclose([slope, intercept, left], [0, mean, w @ np.square(y - mean)])
    assert np.isnan(correlation(constant))


@pytest.mark.parametrize("scale", [1e150, 1e-153, 1e-156, 1e-161])
def test_a_quotient_that_has_lost_its_digits_is_no_number(scale):
    """Squares below 1e-308 have fewer and fewer digits; quotients of their sums would tell none."""
    f, noise = np.random.default_rng(4).normal(size=(2, 40))
    y = 2.0 * f + noise

    def quotients(unit):
        dataset = Dataset.of((f * unit)[:, None], y * unit, dtype="float64")
        moments = np.tile(moments_of(f * unit, y * unit, np.ones(40)), (7, 2, 1))
        squares = float(np.sum(np.square(noise * unit)))
        wished = {"loss": Loss.NMSE, "linear_scaling": True, "correlation": True}
        given = dataset, squares, None, moments
        outputs, (_, scaling, correlations), _ = finalized(*given, **wished)
        alone, _, _ = finalized(dataset, squares, loss=Loss.R2)
        return [scaling[0, 0, 0], correlations[0, 0], outputs.losses[0, 0], alone.losses[0, 0]]

    for one, other in zip(quotients(1.0), quotients(scale), strict=True):
        assert other == pytest.approx(one, rel=1e-9) or (np.isnan(other) and scale < 1e-154)


@pytest.mark.parametrize("closing", list(Closing))
@pytest.mark.parametrize("row", ["square(d)", "abs(d)", "w*square(d)"])
def test_sums_become_the_losses_and_gradients_of_the_reference(closing, row):
    loss = LossFunction.parse(row).row
    wished = {"values": False, "gradient": True, "variable_gradient": True}
    asked = evaluation(custom_loss=LossFunction(loss, closing), **wished)
    summed = evaluation(custom_loss=LossFunction(loss, Closing.SUM), **wished)
    expected, sums = reference.evaluate(asked, DATA), reference.evaluate(summed, DATA)
    outputs = Outputs(
        *(None, sums.losses.copy(), np.zeros(1, np.uint8), lambda _: None),
        gradients=sums.gradients.copy(),
        variable_gradients=sums.variable_gradients.copy(),
    )
    assert reduce_to_sums(asked, outputs) == (asked, outputs)
    run_to_end(Finalizer().finalize(asked, DATA, outputs))
    for name in ("losses", "gradients", "variable_gradients"):
        np.testing.assert_allclose(getattr(outputs, name), getattr(expected, name), rtol=1e-12)


ROWS = 41_000
TREE_DATA = {dtype: make_dataset(ROWS, dtype, weights=True) for dtype in ("float32", "float64")}
BLOCK = {"float32": 2048, "float64": 1024}
#: Programs whose parameters' derivatives are columns, and so sums over rows themselves.
LINEAR = [parse("p1*x1 + p2*x2*x3"), parse("exp(x1)*p1 - x4")], [[0.3, 0.7], [1.1]]


def tree_sum(blocks: dict[int, np.ndarray]) -> np.ndarray:
    while set(blocks) != {0}:
        parents: dict[int, np.ndarray] = {}
        for number in sorted(blocks):
            known = parents.get(number // 2)
            parents[number // 2] = blocks[number] if known is None else known + blocks[number]
        blocks = parents
    return blocks[0]


def sums(engine, data, programs, parameters, rows, *, of_first=False) -> list[np.ndarray]:
    """Sums over rows of every kind, for each of two losses; those of the first program alone."""
    count, found = len(parameters[0]), []
    for loss in (SQUARES, huber(0.5).row):
        options = {"row_loss": loss, "statistics": True, "rows": rows}
        derived = derive(engine, data, programs, parameters, **options)
        passed = linearise(engine, data, programs, parameters, loss, rows=rows)
        np.testing.assert_array_equal(derived.losses, passed.losses)
        np.testing.assert_array_equal(derived.gradients, passed.gradients)
        values = derived.reductions[..., 0]
        sums = [passed.losses, passed.gradients, passed.curvatures, values]
        if of_first:
            sums = [passed.losses[0], passed.gradients[:count], values[0]]
            sums += [passed.curvatures[: count * (count + 1) // 2]]
            sums += [derived.variable_gradients[0], derived.reductions[0], derived.moments[0]]
        found += [np.ravel(each) for each in sums]
    return np.concatenate(found)


@settings(max_examples=8, deadline=None)
@given(st.sampled_from([*BLOCK]), st.integers(0, ROWS - 1), st.just(ROWS) | st.integers(1, ROWS))
def test_the_whole_is_the_tree_of_its_blocks(engine, dtype, start, length):
    stop, block, data = min(ROWS, start + length), BLOCK[dtype], TREE_DATA[dtype]
    given, parts = (engine, data, *LINEAR), {}
    for number in range(start // block, -(-stop // block)):
        bounds = max(start, number * block), min(stop, (number + 1) * block)
        parts[number] = sums(*given, bounds)
    whole = sums(*given, (start, stop))
    np.testing.assert_array_equal(whole, tree_sum(parts))
    np.testing.assert_array_equal(whole, sum_nodes(np.stack(list(parts.values())), min(parts)))


@pytest.mark.parametrize("rows", [None, (700, 39_000)])
def test_neither_threads_nor_cuts_nor_other_programs_change_a_bit(engine, rows, monkeypatch):
    programs, parameters = smooth_programs()

    def answer(engine, count=100):
        given = programs[:count], parameters[:count], rows
        return sums(engine, TREE_DATA["float32"], *given, of_first=True)

    expected = answer(engine)
    np.testing.assert_array_equal(answer(engine, 1), expected)
    usual = interpreter.MOST_BLOCKS, interpreter.MOST_SUMS
    for threads, blocks, most in ((1, *usual), (3, *usual), (2, 3, 2**25), (2, 64, 1)):
        monkeypatch.setattr(interpreter, "MOST_BLOCKS", blocks)
        monkeypatch.setattr(interpreter, "MOST_SUMS", most)
        other = CpuEngine(threads)
        np.testing.assert_array_equal(answer(other), expected)
        other.close()
