"""Snapped constants and dropped terms, and the intervals that prove what stays defined."""

import asyncio

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import warpfit.testing
from support.engines.operators import programs
from support.random_programs import random_program
from warpfit import InvalidArgumentError, Program, parse
from warpfit.expressions.language import to_latex, to_text
from warpfit.expressions.reference import evaluate_program
from warpfit.formulas.intervals import Boxes, DefinedRegion, intervals
from warpfit.formulas.snapping import SnapSettings, snap
from warpfit.ops import OPERATORS

rng = np.random.default_rng(3)
X = rng.uniform(0.5, 3.0, (200, 3))
EXACT = 2 * X[:, 0] ** 2 / 3 + np.pi * np.sin(X[:, 1])
FORMULAS = ["0.66*x1^2.01 + 3.1*sin(x2) + 1e-9*x3", "x1*x1*0.6668 + sin(x2*1.0001)*3.1417 - 2e-5"]
SHORT = "0.6666666666666666*square(x1) + pi*sin(x2)"


@pytest.fixture
def client():
    with warpfit.testing.client() as connected:
        yield connected


def test_formulas_become_those_that_made_the_data(client):
    data = client.upload(X, EXACT, dtype="float64")
    found = warpfit.simplify(FORMULAS, data, tolerance=1e-6)
    assert set(found.programs) == {parse(SHORT).simplify()}
    np.testing.assert_array_less(found.loss, 1e-25)
    assert "pi * sin(x2)" in str(found) and r"\frac{2}{3}" in found._repr_html_()
    # Functions that change nothing on the data are left out.
    data = client.upload(X, 0.1 * X[:, 0] + X[:, 1], dtype="float64")
    found = client.simplify(data, "asin(sin(0.1*x1)) + abs(x2)")
    assert found.programs == [parse("0.1*x1 + x2").simplify()]


def test_the_shortest_form_that_is_allowed_is_taken(client):
    """Without a rule ``sin(sin(x1))`` is."""
    data = client.upload(X[:, :1], np.sin(np.sin(X[:, 0])), dtype="float64")
    given = "0.9999999999999996*cos(sin(x1) + 4.71238898038459) - 4.6e-14*sin(x1)^2 + 9.9e-14"
    free = client.simplify(data, given, assume_defined=True)
    options = {"allows": lambda program: "sin(sin" not in str(program), "assume_defined": True}
    ruled = client.simplify(data, given, **options)
    assert str(free.programs[0]) == "sin(sin(x1))"
    assert str(ruled.programs[0]).startswith("cos(sin(x1) + 4.71")
    assert len(ruled.programs[0]) == 5 and ruled.loss[0] < 1e-20


def test_nothing_that_is_refused_is_made_of_a_formula(client):
    data = client.upload(X, EXACT, dtype="float64")
    found = client.simplify(data, FORMULAS, allows=lambda _: False)
    assert found.programs == [parse(text) for text in FORMULAS]
    np.testing.assert_array_equal(found.loss, found.initial_loss)
    assert client.simplify(data, FORMULAS, allows=None).loss[0] > 0.0


@pytest.mark.parametrize("tolerance", [0.0, 0.3])
def test_a_law_that_appears_when_a_term_is_dropped_is_not_rounded_away(client, tolerance):
    """The fit of the formula that is given ends in a wrong valley, with a loss of 0.009."""
    rows = np.random.default_rng(1).uniform(0.0, 5.0, (200, 2))
    data = client.upload(rows, 1.5 * np.sin(2.0 * rows[:, 0]) + rows[:, 1], dtype="float64")
    given = "(x2 + sqrt(x1) + sin(14.8 - x1)*0.64 - sin(0.7 - x1)^2*3.1)*0.99 + 0.12"
    found = client.simplify(data, given, tolerance=tolerance)
    assert found.initial_loss[0] > 1e-3
    assert found.loss[0] < 1e-20 or tolerance == 0.0
    assert found.loss[0] <= found.initial_loss[0]


@given(programs(12), st.integers(0, 2**32))
def test_no_rewriting_moves_an_infinity(program, seed):
    """Data of any size: the exact rules are taken where they leave infinities where they are."""
    own = np.random.default_rng(seed)
    sample = 10.0 ** own.uniform(-300, 300, (max(1, program.variables), 20))
    sample *= np.sign(own.normal(size=sample.shape))
    program = program.bind(np.ones(program.parameters))
    low, high = sample.min(axis=1), sample.max(axis=1)
    settings = SnapSettings(0.01, 1e-14, False, sample, low, high, 0.0)
    wanted = np.isfinite(evaluate_program(program, sample))
    rewritten, constants = next(snap([program], settings))
    found = np.isfinite(evaluate_program(rewritten[0], sample, constants[0]))
    np.testing.assert_array_equal(found, wanted)


TERMS = ["log(0.9123 + x1)", "1/(1.3171 + x1)", "sqrt(0.2371 + x1)", "tan(0.4913*x1)"]
TERMS += ["asin(0.3217*x1)", "gamma(1.0371 + x1)", "(0.1371 + x1)^-1.37", "acos(0.3217*x1)"]
TERMS += ["log1p(x1 - 0.1737)", "log2(x1*x1 + 0.0137)", "inv(x1*x1 - 2.1371*x1 + 1.3)"]
TERMS += ["x1/(1 + x1 + 0.0371*x1^2)", "atan2(0.0371, x1 + 0.137)", "powabs(x1 + 0.0317, -0.5)"]


@pytest.mark.parametrize(
    ("seed", "term"),
    [
        pytest.param(i % 2, t, marks=[pytest.mark.thorough] * (i % 3 > 0))
        for i, t in enumerate(TERMS)
    ],
)
def test_no_kind_of_term_gets_a_pole_in_the_range(client, term, seed):
    own = np.random.default_rng(seed)
    rows = np.sort(own.uniform(0.2, 3.0, (40, 1)), axis=0)
    noisy = 1.5 * rows[:, 0] + 0.1 * own.normal(size=40)
    data = client.upload(rows, noisy, dtype="float64")
    text = f"1.4987*x1 + 0.003*{term}"
    (found,) = client.simplify(data, text, tolerance=0.1).programs
    x = np.linspace(rows[0], rows[-1], 30_001).T
    difference = evaluate_program(found, x) - evaluate_program(parse(text), x)
    assert np.abs(difference).max() < 0.5


LOSSES = ["huber", "log_cosh", "mae", "quantile", "rmse", "mse", "abs(d)^1.5", "r2"]


@settings(max_examples=1, deadline=None)
@given(
    st.sampled_from(LOSSES), st.sampled_from([0.0, 0.01]), st.floats(-3, 0), st.integers(0, 9999)
)
@example("huber", 0.01, -2.0, 2001)
@example("rmse", 0.0, -2.0, 2001)
@example("mae", 0.01, -3.0, 1)
def test_the_tolerance_holds_in_float32(loss, tolerance, noise, seed):
    """What is no more than rounding errors of the best constant's loss may be anything."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(0.2, 3.0, (150, 3))
    y = 1.7 * x[:, 0] * x[:, 1] + np.cos(x[:, 2]) + 10.0**noise * rng.normal(size=150)
    with warpfit.testing.client() as client:
        data, text = client.upload(x, y), "1.69871*x1*x2 + cos(1.0012*x3)"
        found = client.simplify(data, [text], loss=loss, tolerance=tolerance)
    after, before = found.loss[0], found.initial_loss[0]
    if loss == "r2":
        after, before = 1.0 - after, 1.0 - before
    assert after <= (1.0 + tolerance) * before * (1.0 + 1e-9)


def test_formulas_without_a_loss_come_back_by_the_exact_rules_alone(client):
    data = client.upload(X, EXACT)
    given = ["log(x1 - 9.87654)*2*x2", "1.23456*x1/(x2 - x2)"]
    found = client.simplify(data, given)
    assert found.programs == [parse(t).simplify() for t in given]
    np.testing.assert_array_equal(found.loss, [np.nan, np.inf])
    np.testing.assert_array_equal(found.initial_loss, found.loss)


def test_the_async_client_simplifies_too():
    async def run():
        async with warpfit.testing.async_client() as client:
            data = await client.upload(X, EXACT, dtype="float64")
            found = await client.simplify(data, FORMULAS[1], tolerance=1e-6)
            with pytest.raises(InvalidArgumentError, match="no blocking client"):
                warpfit.simplify("x1", data)
            return found

    assert asyncio.run(run()).programs == [parse(SHORT).simplify()]


FOUR = {"operators": ("add", "mul", "sin", "div"), "constants": st.floats(-5, 5)}
DRAWN = st.lists(programs(15, parameters=0, **FOUR), min_size=1, max_size=3)


@given(DRAWN, st.sampled_from([0.0, 0.01, 0.5]), st.integers(0, 99))
def test_no_formula_becomes_worse_than_allowed_or_longer(drawn, tolerance, seed):
    """Fits that find nothing, and report losses that are wrong: what is returned was measured."""
    random = np.random.default_rng(seed)
    low, high = X.min(axis=0), X.max(axis=0)
    inside = random.uniform(low, high, (1000, 3)).T

    def loss(program, vector):
        values = evaluate_program(program, X.T, vector)
        with np.errstate(all="ignore"):
            return float(np.mean((values - EXACT) ** 2))

    search = snap(drawn, SnapSettings(tolerance, 0.0, False, X.T, low, high, 0.0))
    try:
        trials = next(search)
        while True:
            losses = np.array([loss(*trial) for trial in zip(*trials, strict=True)])
            has_fit = np.array([program.parameters > 0 for program in trials[0]])
            wrong = has_fit & (random.random(len(losses)) < 0.2)
            trials = search.send((np.where(wrong, losses * random.random(), losses), trials[1]))
    except StopIteration as stop:
        results = stop.value
    for program, result in zip(drawn, results, strict=True):
        assert len(result.program) <= len(program)
        given_loss, found_loss = loss(program, ()), loss(result.program, ())
        assert found_loss == result.loss or np.isnan(found_loss)
        assert not found_loss > (1 + tolerance) * given_loss
        if DefinedRegion(parse("1"), low, high, X.T).keeps(program):
            assert np.isfinite(evaluate_program(result.program, inside)).all()


@pytest.mark.parametrize("kind", ["constants", "numbers", False])
def test_pi_is_for_constants_that_no_short_number_is_near_enough_to(client, kind):
    law = (np.pi if kind == "constants" else 3.14159265) * np.sin(X[:, 1]) + 2 * X[:, 0] / 3
    noisy = 3.12 * X[:, 1] + 0.05 * np.random.default_rng(1).normal(size=200)
    text = {"constants": "pi", "numbers": "3.1416", False: "3.1415"}[kind]
    data = client.upload(X, law, dtype="float64")
    short = client.simplify(data, "3.1415926*sin(x2) + 0.66667*x1", snap=kind).programs[0]
    assert text in to_text(short, digits=5) or not kind
    data = client.upload(X, noisy, dtype="float64")
    short = client.simplify(data, "3.1234*x2", tolerance=0.02, snap=kind).programs[0]
    assert "pi" not in str(short) and (len(str(short)) < 10) == bool(kind)


def test_texts_to_read_have_few_digits_and_fractions():
    given = parse("0.6666666666666666*x1^4.712388980384690 - 1.23456789*x2 + 12345*x3 - 1e-7*x1")
    shown = "2/3 * x1 ^ (3*pi/2) - 1.235 * x2 + 12345 * x3 - 1e-07 * x1"
    assert to_text(given, digits=4) == shown and "1.235" in to_latex(given, digits=4)
    negative = Program.apply("add", parse("x1"), parse("(-1/3)*x2").simplify())
    assert to_text(negative, digits=4) == "x1 - x2 / 3"


ENDS = st.one_of(
    st.floats(-5.0, 5.0),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.001, -0.001, 0.0011, 2.0, 1e-300, 1e300, -1e300]),
    st.floats(allow_nan=False, allow_infinity=False),
)


def points(low, high, count=200, seed=0):
    """Points of a box [variables, count]: corners, zeros and whole numbers among them."""
    rng = np.random.default_rng(seed)
    low, high = np.asarray(low, float)[:, None], np.asarray(high, float)[:, None]
    inside = low * (1.0 - (part := rng.random((len(low), count)))) + high * part
    special = rng.choice([-np.inf, np.inf, 0.0, 1.0, -1.0, 0.001, 2.0, 3.0, -2.0], inside.shape)
    chosen = np.where(rng.random(inside.shape) < 0.4, special, inside)
    return np.clip(chosen, low, high)


def check(program, low, high, seed=0):
    found = intervals(program, Boxes(np.array(low)[:, None], np.array(high)[:, None]))
    values = evaluate_program(program, points(low, high, seed=seed))
    if found.defined[0]:
        assert np.isfinite(values).all(), str(program)
        assert (found.low[0] <= values).all(), str(program)
        assert (values <= found.high[0]).all(), str(program)
    return bool(found.defined[0])


@pytest.mark.parametrize("name", sorted(OPERATORS))
@settings(max_examples=12)
@given(data=st.data())
def test_an_operator_stays_in_its_interval(name, data):
    arity = OPERATORS[name].arity
    ends = [sorted([data.draw(ENDS), data.draw(ENDS)]) for _ in range(arity)]
    program = Program.apply(name, *map(Program.variable, range(arity)))
    check(program, [low for low, _ in ends], [high for _, high in ends])


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_every_operator_is_proved_somewhere(name):
    """The rules are no empty promise: on [0.3, 0.9], or [3.0, 3.9], all operators are defined."""
    arity = OPERATORS[name].arity
    program = Program.apply(name, *map(Program.variable, range(arity)))
    low = 3.0 if "gamma" in name else 0.3
    assert check(program, [low] * arity, [low + 0.6] * arity)


@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(1, 25),
    ends=st.tuples(st.floats(-3, 3), st.floats(0, 4), st.floats(-3, 3), st.floats(0, 4)),
)
def test_a_program_stays_in_its_interval(seed, size, ends):
    rng = np.random.default_rng(seed)
    program = random_program(rng, size, variables=2, operators=tuple(OPERATORS))
    program = program.bind(rng.normal(size=program.parameters))
    a, wide, b, high = ends
    check(program, [a, b], [a + wide, b + high], seed)


def test_cutting_proves_what_one_interval_does_not():
    for text, low, high in (
        *(("1/(x1^2 - 2*x1 + 2)", -100.0, 100.0), ("log(2 + sin(x1)*cos(x1))", -20.0, 20.0)),
        *(("x1/(1 + x1^2)", -1e3, 1e3), ("where(x1 > 1, log(x1), x1)", -1.0, 0.99)),
        *(("tan(x1)", -1.57, 1.57), ("x1^0.5 + x1^-1.5", 1e-3, 10.0)),
        ("gamma(x1)/lgamma(x1 + 3)", 0.1, 20.0),
    ):
        box = np.array([low]), np.array([high]), np.linspace(low, high, 9)[None]
        assert DefinedRegion(parse("1"), *box).keeps(parse(text))


POLES = ["1/(x1 - 1)", "log(x1 - 0.246)", "sqrt(x1 - 0.21)", "tan(x1)", "gamma(x1 - 1)"]
POLES += ["1/sin(3*x1)", "x1^-2 + 1/(x1-2.9)", "inv(floor(x1))", "log(x1*x1 - 1)", "exp(300*x1)"]
POLES += ["zdiv(1, x1 - 1)", "logabs(x1 - 1.234567)", "(x1 - 0.5)^0.3", "x1/(x1 - x1)", "asin(x1)"]


@pytest.mark.parametrize("text", [*POLES, "1/lt(x1, 1)"])
def test_a_pole_or_an_end_in_the_box_is_seen_between_the_rows(text):
    rows = np.array([[0.2, 3.0]])
    region = DefinedRegion(parse("x1 + log(x1)"), np.array([0.2]), np.array([3.0]), rows)
    assert not region.keeps(parse(text))


def test_poles_and_values_that_were_there_stay_where_they_are():
    low, high = np.array([-1.0, -1.0]), np.array([1.0, 1.0])
    rows = np.random.default_rng(0).uniform(-1, 1, (2, 50))
    region = DefinedRegion(parse("x1/(x1 - x2) + 0.1*x2"), low, high, rows)
    kept = {"x1/(x1 - x2)": True, "x1": True, "x1/(x1 - 0.9*x2)": False, "log(x1 - x2)": False}
    assert {text: region.keeps(parse(text)) for text in kept} == kept
    # Where nothing is proved of the first formula, the rows on which it was seen still count.
    low, high = np.array([0.0]), np.array([0.0])
    region = DefinedRegion(parse("pdiv(x1, x1)"), low, high, np.zeros((1, 3)))
    assert not region.keeps(parse("x1/x1"))
