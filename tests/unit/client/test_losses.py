"""Row losses and closings: definitions, derivatives, texts."""

import mpmath
import numpy as np
import pytest
from sklearn import metrics

from support.engines.references import reference_loss
from warpfit import Loss, LossFunction, losses
from warpfit.expressions.reference import differentiate, evaluate_program
from warpfit.ops import VARIABLE

rng = np.random.default_rng(1)
F, Y = rng.uniform(0.2, 3.0, size=(2, 50))
W = rng.uniform(0.1, 2.0, size=50)
D = F - Y


def rows(function: LossFunction, f=F, w=W) -> np.ndarray:
    return evaluate_program(function.row, np.stack([f, Y, w]))


METRICS = {
    **{Loss.MSE: metrics.mean_squared_error, Loss.RMSE: metrics.root_mean_squared_error},
    **{Loss.MAE: metrics.mean_absolute_error, Loss.R2: metrics.r2_score},
    Loss.NMSE: lambda *args, **kw: 1 - metrics.r2_score(*args, **kw),
    Loss.SSE: lambda y, f, sample_weight: np.sum(sample_weight * (y - f) ** 2),
}


@pytest.mark.parametrize("loss", METRICS)
@pytest.mark.parametrize("weights", [None, W])
def test_the_six_losses_are_those_of_scikit_learn(loss, weights):
    """As rows and closings, and in the plain form that other tests compare with."""
    w = np.ones(50) if weights is None else weights
    function = losses.BUILT_IN[loss]
    closed = losses.close_losses(
        function.closing, np.sum(w * rows(function)), losses.TargetStatistics(Y, weights)
    )
    wanted = METRICS[loss](Y, F, sample_weight=w)
    np.testing.assert_allclose(closed, wanted, rtol=1e-12)
    np.testing.assert_allclose(reference_loss(loss, F, Y, weights), wanted, rtol=1e-12)


def exact(formula, *columns) -> np.ndarray:
    """A formula in 200 digits, row by row, rounded once."""
    with mpmath.workdps(200):
        rows = zip(*columns, strict=True)
        return np.array([float(formula(*map(mpmath.mpf, row))) for row in rows])


SIZES = np.concatenate([10.0 ** np.arange(-30, 2.5, 0.37), np.linspace(0.3, 1.1, 41)])
DIFFERENCES = np.concatenate([SIZES, -SIZES])
ALL_SIZES = np.concatenate([DIFFERENCES, [700.0, -1e6, 1e150]])


PART, TINY = mpmath.mpf(0.3), mpmath.mpf(1e-100)


def log_of_cosh(d):
    return mpmath.log(mpmath.cosh(d)) if abs(d) < 1e4 else abs(d) - mpmath.log(2)


def test_losses_of_differences_do_not_cancel():
    for function, formula, slope in (
        (losses.log_cosh(), log_of_cosh, mpmath.tanh),
        (
            losses.huber(0.3),
            lambda d: d**2 / 2 if abs(d) <= 0.3 else PART * (abs(d) - PART / 2),
            lambda d: d if abs(d) <= 0.3 else PART * mpmath.sign(d),
        ),
        (
            *(losses.quantile(0.3), lambda d: -PART * d if d <= 0 else mpmath.mpf(0.7) * d),
            lambda d: -PART if d <= 0 else mpmath.mpf(0.7),
        ),
        (
            losses.gaussian(1e-100),
            lambda d: (d / TINY) ** 2 / 2 + mpmath.log(TINY * mpmath.sqrt(2 * mpmath.pi)),
            lambda d: d / TINY**2,
        ),
    ):
        d = DIFFERENCES if function == losses.gaussian(1e-100) else ALL_SIZES
        columns = np.stack([d, np.zeros_like(d), np.ones_like(d)])
        found, slopes = differentiate(function.row, columns, by=VARIABLE)
        np.testing.assert_allclose(found, exact(formula, d), rtol=2e-15)
        np.testing.assert_allclose(slopes[losses.PREDICTION], exact(slope, d), rtol=2e-15)


@pytest.mark.parametrize("log", [False, True])
def test_poisson_is_as_exact_as_its_terms(log):
    f, y = np.meshgrid(10.0 ** np.arange(-8, 2.5, 0.61), [0.0, 1e-3, 1.0, 7.0, 1e6])
    f, y = f.ravel(), y.ravel()
    found = evaluate_program(losses.poisson(log=log).row, np.stack([f, y, y]))

    def formula(f, y):
        return mpmath.exp(f) - y * f if log else f - y * mpmath.log(f)

    terms = np.maximum(np.exp(f), y * f) if log else np.maximum(f, np.abs(y * np.log(f)))
    assert np.all(np.abs(found - exact(formula, f, y)) <= 4e-16 * terms)


STATISTICS = ("weight", "rows", "squares", "largest", "mean", "variation")


@pytest.mark.parametrize("block", [7, 50, 1 << 17])
@pytest.mark.parametrize("weightless", [0, 20])
def test_statistics_of_a_target_are_made_of_blocks_of_rows(monkeypatch, block, weightless):
    """Rows of weight 0 may hold anything, and change no bit."""
    monkeypatch.setattr(losses, "_BLOCK_ROWS", block)
    y, w = np.full((2, 50 + weightless), np.nan)
    used = rng.permutation(50 + weightless)[:50]
    used.sort()
    w[:], y[used], w[used] = 0.0, Y, W
    whole, alone = losses.TargetStatistics(y, w), losses.TargetStatistics(Y, W)
    assert list(whole.steps(*STATISTICS)) or block >= len(y), "it pauses between blocks"
    found = {name: getattr(whole, name) for name in STATISTICS}
    assert found == {name: getattr(alone, name) for name in STATISTICS}
    assert not list(whole.steps(*STATISTICS)), "they are kept"
    mean = np.average(Y, weights=W)
    expected = (
        W.sum(), 50, np.sum(W * Y**2), Y.max(), mean, np.sum(W * (Y - mean) ** 2),
    )  # fmt: skip
    np.testing.assert_allclose([found[name] for name in STATISTICS], expected, rtol=1e-14)


def test_statistics_of_a_target_that_is_not_finite():
    y = np.array([1.0, np.nan, 2.0, np.inf])
    found = losses.TargetStatistics(y)
    assert (found.mean, found.rows, found.weight) == (1.5, 4, 4.0)
    assert found.squares == np.inf and np.isnan(found.largest)
    assert np.isnan(found.variation)
    nothing = losses.TargetStatistics(y, np.zeros(4))
    assert [getattr(nothing, name) for name in STATISTICS] == [0.0] * 6


@pytest.mark.parametrize("loss", [*Loss, *losses.BY_NAME])
def test_closed_gradients_are_central_differences(loss):
    function = losses.BUILT_IN[loss] if isinstance(loss, Loss) else losses.BY_NAME[loss]()
    statistics = losses.TargetStatistics(Y, W)
    factor = 1.0 if function.mentions_weight else W

    def closed(shift):
        return losses.close_losses(
            function.closing, np.sum(factor * rows(function, F + shift)), statistics
        )

    _, slopes = differentiate(function.row, np.stack([F, Y, W]), by=VARIABLE)
    gradient = losses.close_gradients(
        function.closing, np.sum(factor * slopes[losses.PREDICTION]), closed(0.0), statistics
    )
    expected = (closed(1e-6) - closed(-1e-6)) / 2e-6
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-9)
    if function.closing is losses.Closing.ROOT:
        zeros = np.zeros(2), np.zeros(2)  # of a perfect fit
        assert not losses.close_gradients(function.closing, *zeros, statistics).any()


@pytest.mark.parametrize("given", [*Loss, *losses.BY_NAME, "abs(d)^1.5", losses.huber(2.0)])
def test_as_loss_accepts_losses_names_and_texts(given):
    found = losses.as_loss(given)
    assert isinstance(found, Loss | LossFunction) and losses.as_loss(found) == found
    assert (given in list(Loss)) == isinstance(found, Loss)
    for text in ("d^2", "square(d)", "d*d", "(f - y)^2", "(prediction - target)^2"):
        assert LossFunction.parse(text).is_squares
    assert LossFunction.parse("weight*d") == LossFunction.parse("w*d")


def test_poisson_has_its_limits_where_no_event_is_counted():
    for log, f, y, value, slope in (
        *((False, 0.0, 0.0, 0.0, 1.0), (False, -1.0, 0.0, np.nan, 1.0)),
        *((False, 0.0, 3.0, np.inf, -np.inf), (True, -np.inf, 0.0, 0.0, 0.0)),
        (True, -np.inf, 1.0, np.inf, -1.0),
    ):
        inputs = np.array([[f], [y], [1.0]])
        found, slopes = differentiate(losses.poisson(log=log).row, inputs, by=VARIABLE)
        np.testing.assert_array_equal(found, [value])
        np.testing.assert_array_equal(slopes[0], [slope])
