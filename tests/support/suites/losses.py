"""Tests of losses and statistics of values against NumPy's, for any engine.

A test module imports all of it, and defines the fixtures of `derivatives` and ``loss_errors``
(`LossErrors` of the engine).
"""

from dataclasses import dataclass

import numpy as np
import pytest

from support.coverings import covering_first
from support.engines.gradients import ask, derive
from support.engines.references import moments_of
from support.suites.derivatives import make_dataset, smooth_programs
from warpfit import losses
from warpfit.dataset import Dataset
from warpfit.expressions import reference
from warpfit.ir import Batch
from warpfit.parse import parse
from warpfit.request import Evaluation, Loss, Tier
from warpfit_server.engine.evaluation import correlation
from warpfit_server.engine.interface import run_to_end


@dataclass(frozen=True)
class LossErrors:
    """Relative errors of losses that an engine may have."""

    asked_otherwise: float
    """Between the losses of one program alone, in a batch, beside a gradient, and in a fit."""
    own_single: float
    """Of losses of one's own where they are computed for each row in float32."""


def evaluated(engine, data, batch, loss, **options) -> np.ndarray:
    """Losses [programs] by `Engine.evaluate`, of the interpreters."""
    options = {"tier": Tier.INTERPRETER, **options}
    kind = "loss" if isinstance(loss, Loss) else "custom_loss"
    evaluation = Evaluation(data.content_id, batch, values=False, **{kind: loss}, **options)
    return ask(engine, data, evaluation).losses[:, 0]


ALL_LOSSES = {"sse": Loss.SSE, "mae": Loss.MAE, "nmse": Loss.NMSE} | {
    name: losses.LossFunction(make().row, losses.Closing.SUM)
    for name, make in losses.BY_NAME.items()
}


@pytest.mark.parametrize(
    ("weights", "name", "rows"), covering_first([False, True], list(ALL_LOSSES), [3, 70_001])
)
def test_a_loss_is_the_same_in_all_ways(engine, flavour, loss_errors, name, weights, rows):
    dtype, precision, _ = flavour
    loss = ALL_LOSSES[name]
    data = make_dataset(rows, dtype, weights=weights)
    texts = {"p1 * exp(-p2 * x1) + 2": [0.7, 1.3], "x1 + x2 + 0.5": [], "p1*x3 + p2/x4": [0.3, 0.1]}
    batch = Batch.of([*map(parse, texts)], [*texts.values()])
    asked = {"precision": precision}
    alone = evaluated(engine, data, batch, loss, **asked)
    others = [evaluated(engine, data, batch, loss, gradient=True, **asked)]
    singles = [batch[k : k + 1] for k in range(3)]
    others.append(np.concatenate([evaluated(engine, data, one, loss, **asked) for one in singles]))
    evaluation, row_loss = Evaluation(data.content_id, batch, **asked), losses.as_function(loss).row
    for curvature in (False, True):
        options = {"curvature": curvature, "cancelled": np.zeros(1, np.uint8)}
        others.append(run_to_end(engine.linearise(evaluation, row_loss, **options)).losses[:, 0])
    assert np.isfinite(alone).all()
    for other in others:
        np.testing.assert_allclose(other, alone, rtol=loss_errors.asked_otherwise)


@pytest.mark.parametrize(
    ("size", "dtype", "name"),
    covering_first([1e-9, 2e-5, 0.01, 3.0], ["float32", "float64"], [*ALL_LOSSES, "own"]),
)
def test_small_differences_keep_their_digits(engine, loss_errors, name, dtype, size):
    """Values are exact here, so that all errors are those of the loss."""
    rng = np.random.default_rng(8)
    f = rng.uniform(0.2, 2, size=3_000).astype(dtype)
    if dtype == "float32" and size < 1e-7:
        f *= np.float32(1e-3)
    y = np.abs((f + size * rng.normal(size=3_000)).astype(dtype))
    loss = ALL_LOSSES.get(name) or losses.LossFunction.parse("log1p(d^2) + 0.1*abs(d)", "sum")
    data = Dataset.of(f[:, None], y, rng.uniform(0.5, 2, size=3_000).astype("f4"), dtype=dtype)
    batch = Batch.of([parse("x1")])
    custom = losses.LossFunction(losses.as_function(loss).row, losses.Closing.SUM)
    asked = Evaluation(data.content_id, batch, values=False, custom_loss=custom)
    want = reference.evaluate(asked, data).losses[:, 0]
    is_own = not isinstance(loss, Loss) and dtype == "float32"
    tolerance = max(1e-12, is_own * loss_errors.own_single)
    for gradient in (False, True):
        got = evaluated(engine, data, batch, loss, gradient=gradient)
        np.testing.assert_allclose(got, want, rtol=tolerance)


@pytest.mark.parametrize(
    ("mean", "noise", "rows", "weights"),
    covering_first([0.0, 1e8, -3e12], [1e-9, 1e-4, 1.0], [5, 70_001], [False, True]),
)
def test_moments_keep_their_digits(engine, mean, noise, rows, weights):
    """Of values far from zero, and of programs whose best line is next to the target."""
    rng = np.random.default_rng(9)
    x = mean + np.sort(rng.normal(size=rows))
    y = 3 * (x - mean) + noise * rng.normal(size=rows) + 2 * mean
    w = rng.uniform(0.1, 2, size=rows) if weights else None
    data = Dataset.of(x[:, None], y, w, dtype="float64")
    outputs = derive(engine, data, [parse("x1")], statistics=True)
    want = moments_of(x, y, np.ones(rows) if w is None else w)
    got = outputs.moments[0, 0]
    np.testing.assert_allclose(got[:6], want[:6], rtol=1e-12, atol=1e-13 * rows)
    np.testing.assert_allclose(got[6], want[6], rtol=max(1e-12, 1e-14 / noise))
    np.testing.assert_allclose(correlation(got), want[5] / np.sqrt(want[3] * want[4]), rtol=1e-12)


def test_nan_where_no_row_has_weight_is_not_lost(engine):
    rows = 5_000
    x, w = np.ones(rows), np.ones(rows)
    x[100], w[:2_000] = np.nan, 0.0
    data = Dataset.of(x[:, None], np.arange(rows), w, dtype="float64")
    outputs = derive(engine, data, [parse("x1")], statistics=True)
    assert np.isnan(outputs.moments[0, 0, [1, 3, 5, 6]]).all()


@pytest.mark.parametrize(
    ("weights", "dtype", "rows"),
    covering_first(
        [False, True],
        ["float32", "float64"],
        [(0, 1), (0, 40_000), (300, 5_000), (1024, 2048), (2_000, 2_300)],
    ),
)
def test_reductions_and_moments(engine, weights, dtype, rows):
    data = make_dataset(max(rows[1], 6_000) if rows[0] else rows[1], dtype, weights=weights)
    outputs = derive(engine, data, *smooth_programs(), statistics=True, rows=rows)
    f = outputs.values[:, 0].astype(float)
    y = data.target[slice(*rows)].astype(float)
    w = np.ones(len(y)) if data.weights is None else data.weights[slice(*rows)].astype(float)
    with np.errstate(all="ignore"):
        numbers = [f.sum(1), f.mean(1), f.min(1), f.max(1), (~np.isfinite(f)).sum(1)]
        moments = [moments_of(one, y, w) for one in f]
    np.testing.assert_allclose(outputs.reductions[:, 0], np.stack(numbers, 1), rtol=1e-10)
    size = len(y) * 1e-10
    np.testing.assert_allclose(outputs.moments[:, 0], moments, rtol=1e-9, atol=size)


def test_values_that_are_not_numbers_are_counted(engine):
    x = np.arange(3000.0)
    x[5], x[2500] = np.inf, np.nan
    data = Dataset.of(x[:, None], np.ones(3000), dtype="float64")
    one, other = (
        derive(engine, data, [parse("x1")], statistics=True, rows=rows).reductions[0, 0].tolist()
        for rows in ((0, 2000), (2000, 3000))
    )
    assert one[2:] == [0.0, np.inf, 1.0]
    np.testing.assert_array_equal(other, [np.nan] * 4 + [1.0])
