"""Drawn starts, perturbations of searches that would end, and rows that are left out."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.engines.fits import fit, prepared
from warpfit import Reason
from warpfit.dataset import Dataset
from warpfit.losses import LossFunction, huber
from warpfit.request import Missing
from warpfit_server.engine.fit.starts import _SHIFT, Scales, VariableSizes, with_restarts

METHODS = ("lm", "bfgs")
x = np.linspace(0.5, 5.0, 60)
WAVE = 3.0 * np.sin(6.3 * x + 1.0) + 2.0
TEXT, START = "p1*sin(p2*x1 + p3) + p4", [1.0, 1.0, 1.0, 1.0]
DATA = Dataset.of(x[:, None], WAVE, dtype="float64")


def drawn(data, text, start, **options):
    request, _ = prepared(data, [text], [start], **options)
    return with_restarts(request, scales_of(request, data)).problem.batch.program_parameters(0)


def scales_of(request, data):
    return Scales.of(request.problem.batch, data, slice(0, data.layout.rows))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("p1*x1/(p2 + x1)", [6, 3]), ("p1*exp(-((x1 - p2)/p3)^2)", [6, 3, 3])),
        *(("p1*sin(p2*x1 + p3)", [6, -3, 0]), ("sqrt(p1*x1)", [9]), ("1 + p1*x1", [3])),
        *(("p1*(p2*x1 + p3*x1^2)", [0, 3, 0]), ("fma(p1, x1, p2)", [3, 6]), ("p1*x1^p2", [3, 0])),
    ],
)
def test_scales_make_sizes_agree(text, expected):
    data = Dataset.of(np.full((4, 1), 1e3), np.full(4, 1e6), dtype="float64")
    request, _ = prepared(data, [text], [np.ones(len(expected))])
    np.testing.assert_allclose(np.log10(scales_of(request, data).natural), expected, atol=1e-9)


def test_places_tell_frequencies_exponents_and_shifts():
    request, _ = prepared(DATA, ["sin(p1*x1 + p2)*x1^p3 + exp(x1 - p4)"], [np.ones(4)])
    assert scales_of(request, DATA).kinds.tolist() == [1, 2, 3, _SHIFT]


def test_many_variables_are_measured_in_steps_that_change_no_bit():
    X = np.random.default_rng(2).normal(size=(60, 100))
    data = Dataset.of(X, WAVE, dtype="float64")
    texts = [f"p1*x{k}" for k in range(1, 101)]
    request, _ = prepared(data, texts, [[1.0]] * 100)
    sizes = VariableSizes(request.problem.batch, data, slice(0, 60))
    assert len(list(sizes.steps())) > 3
    for number in (0, 50, 99):
        alone, _ = prepared(data, texts[number : number + 1], [[1.0]])
        expected = Scales(request.problem.batch, sizes).natural[number]
        assert scales_of(alone, data).natural == expected


def test_draws_keep_inside_bounds_and_given_starts_come_first():
    given, text = [[5.0, 7.0], [6.0, 8.0]], "p1*exp(p2*x1)"
    bounds = {"lower": [[0.5, -np.inf]], "upper": [[9.0, 0.25]], "fixed": [[False, False]]}
    vectors = drawn(DATA, text, given, **bounds, restarts=50, seed=3)
    assert vectors.shape == (52, 2)
    assert vectors[:2].tolist() == given
    assert ((vectors[2:, 0] >= 0.5) & (vectors[2:, 0] <= 9.0) & (vectors[2:, 1] <= 0.25)).all()
    assert len(np.unique(vectors[2:, 0])) == 50
    assert (drawn(DATA, text, given, fixed=[[True, False]], restarts=9)[2:, 0] == 5.0).all()


@pytest.mark.parametrize("method", METHODS)
def test_drawn_starts_find_what_the_given_one_does_not(method):
    options = {"method": method, "max_iterations": 200}
    alone = fit(DATA, [TEXT], [START], **options)
    found = fit(DATA, [TEXT], [START], **options, restarts=24)
    assert found.loss[0] < 1e-9 < 1.0 < min(alone.loss[0], found.initial_loss[0])
    assert found.start[0] > 0
    if method == "lm":  # searches beside an exact one end
        every = fit(DATA, [TEXT], [START], **options, restarts=24, all_starts=True)
        assert found.evaluations[0] == every.evaluations[found.start[0], 0]


@pytest.mark.parametrize("method", METHODS)
def test_a_seed_gives_the_same_bits_in_every_batch(method):
    options = {"method": method, "restarts": 6, "max_iterations": 20}
    alone = fit(DATA, [TEXT], [START], **options, seed=5)
    other = "p1*exp(p2*x1)*p3*x1^p4 + p5"
    both = fit(DATA, [other, TEXT], [[1.0] * 5, START], **options, seed=5)
    assert alone.parameters[0].tobytes() == both.parameters[1].tobytes()
    every = fit(DATA, [TEXT], [START], **options, seed=5, all_starts=True)
    assert every.loss.shape == (7, 1)
    assert every.loss.min() == alone.loss[0]
    again = fit(DATA, [TEXT], [START], **options, seed=6, all_starts=True)
    assert every.parameters[0][0].tobytes() == again.parameters[0][0].tobytes()
    assert (every.initial_loss[1:] != again.initial_loss[1:]).all()


@pytest.mark.parametrize("turns", [-1, 20])
def test_a_box_of_phases_may_be_any_turn(turns):
    text, found = "p1*sin(p2*x1 + p3)", []
    for shift in (0.0, 2.0 * np.pi * turns):
        low, high = [0.0, 0.1, shift], [10.0, 10.0, shift + 2.0 * np.pi]
        bounds = {"lower": [low], "upper": [high], "restarts": 16}
        vectors = drawn(DATA, text, [1.0, 1.0, 1.0 + shift], **bounds)
        found.append(vectors - [0.0, 0.0, shift])
    np.testing.assert_allclose(*found, atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(st.floats(-1e6, 1e6), st.floats(-3.0, 3.0), st.integers(0, 99))
@example(0.0, np.log10(2.0 * np.pi), 0)
def test_draws_cover_a_box_wherever_it_is(low, decades, seed):
    high = low + 10.0**decades
    bounds = {"lower": [[low] * 4], "upper": [[high] * 4], "restarts": 64, "seed": seed}
    vectors = drawn(DATA, "sin(p1*x1 + p2)*x1^p3 + exp(x1 - p4)", [low] * 4, **bounds)[1:]
    assert ((vectors >= low) & (vectors <= high)).all()
    if high - low <= 2.0 * np.pi:
        counts = np.histogram(vectors[:, 1], bins=8, range=(low, high))[0]
        assert counts.min() >= 7  # a Latin hypercube has 8 of 64 in each eighth


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("start", [0.0, 1e-20, 1e-140, -1e-160, 5e-324])
def test_a_tiny_start_is_left_as_0_is(method, start):
    data = Dataset.of(np.array([[1.0], [2.0]]), np.array([4.0, 8.0]), dtype="float64")
    found = fit(data, ["p1^2*x1"], [[start]], method=method)
    np.testing.assert_allclose(found.parameters[0], [2.0], rtol=1e-6)
    assert found.success[0]


@pytest.mark.parametrize("loss", [None, huber(10.0)])
@pytest.mark.parametrize(
    ("text", "start", "target"),
    [
        ("cos(p1*x1)", [0.0], np.cos(0.3 * x)),
        ("p1*sin(p2*x1)", [0.0, 0.0], 0.5 * np.sin(0.4 * x)),
        ("p1*p2*x1", [0.0, 0.0], -2.0 * x),
        ("exp(p1*x1) + exp(p2*x1)", [-0.5, -0.5], np.exp(-x) + np.exp(0.2 * x)),
        ("exp(-p1*x1)", [1e6], np.exp(-0.5 * x)),
        ("tanh(p1*x1)", [-1e9], np.tanh(0.3 * x)),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_saddles_and_plateaus_are_left(method, text, start, target, loss):
    if loss and method == "lm":
        pytest.skip("not a loss of squares")
    data = Dataset.of(x[:, None], target, dtype="float64")
    options = {"loss": loss} if loss else {}
    found = fit(data, [text], [start], method=method, max_iterations=200, **options)
    assert found.loss[0] < 1e-6


@pytest.mark.parametrize("method", METHODS)
def test_a_minimum_is_not_perturbed_and_idle_parameters_stay(method):
    line = fit(DATA, ["p1*x1 + p2"], [[1.0, 0.0]], method=method)
    idle = fit(DATA, ["p1*x1 + p2 + 0*p3"], [[1.0, 0.0, 7.0]], method=method)
    again = fit(DATA, ["p1*x1 + p2"], [line.parameters[0]], method=method)
    assert line.success[0] and idle.success[0] and again.success[0]
    assert idle.parameters[0][2] == 7.0
    assert idle.loss[0] == pytest.approx(line.loss[0], rel=1e-9)
    assert line.evaluations[0] < idle.evaluations[0] <= line.evaluations[0] + 6
    assert again.evaluations[0] <= 3


@pytest.mark.parametrize("method", METHODS)
def test_an_infinite_derivative_at_the_start_is_stepped_over(method):
    rising, flat = (Dataset.of(x[:, None], slope * x, dtype="float64") for slope in (1.5, 0.0))
    found = fit(rising, ["sqrt(p1)*x1"], [[0.0]], method=method, max_iterations=100)
    kept = fit(flat, ["sqrt(p1)*x1"], [[0.0]], method=method, max_iterations=2)
    np.testing.assert_allclose(found.parameters[0], [2.25], rtol=1e-4)
    assert kept.loss[0] == 0.0
    assert kept.parameters[0].tolist() == [0.0]
    assert kept.reason[0] is Reason.NOT_FINITE


@pytest.mark.parametrize("method", METHODS)
def test_rows_without_a_value_count_as_the_mean(method):
    y = np.where(x > 1.0, 2.0 * np.sqrt(np.maximum(x - 1.0, 0.0)), 0.5)
    data = Dataset.of(x[:, None], y, dtype="float64")
    text, start = "p1*sqrt(x1 - 1)", [1.0]
    refused = fit(data, [text], [start], method=method)
    assert refused.reason[0] is Reason.NOT_FINITE
    found = fit(data, [text], [start], method=method, missing=Missing.DROP, max_iterations=100)
    np.testing.assert_allclose(found.parameters[0], [2.0], rtol=1e-6)
    penalty = np.square(y[x < 1.0] - y.mean()).sum()
    np.testing.assert_allclose(found.loss[0], penalty, rtol=1e-9)
    absolute = LossFunction.parse("abs(d)", "sum")
    other = fit(data, [text], [start], loss=absolute, missing=Missing.DROP, max_iterations=100)
    assert other.loss[0] == pytest.approx(np.abs(y[x < 1.0] - y.mean()).sum(), rel=1e-6)
