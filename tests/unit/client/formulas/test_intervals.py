"""Interval arithmetic: what it proves holds at every point that is tried."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.random_programs import random_program
from warpfit.expressions.reference import evaluate_program
from warpfit.formulas.intervals import Boxes, DefinedRegion, intervals
from warpfit.ir import Program
from warpfit.ops import OPERATORS
from warpfit.parse import parse

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


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("1/(x1^2 - 2*x1 + 2)", -100.0, 100.0),
        ("sqrt(x1^2 - 2*x1 + 1.001)", -5.0, 5.0),
        ("log(2 + sin(x1)*cos(x1))", -20.0, 20.0),
        ("x1/(1 + x1^2)", -1e3, 1e3),
        ("where(x1 > 1, log(x1), x1)", -1.0, 0.99),
        ("tan(x1)", -1.57, 1.57),
        ("x1^0.5 + x1^-1.5", 1e-3, 10.0),
        ("gamma(x1)/lgamma(x1 + 3)", 0.1, 20.0),
    ],
)
def test_cutting_proves_what_one_interval_does_not(text, low, high):
    region = DefinedRegion(
        parse("1"), np.array([low]), np.array([high]), np.linspace(low, high, 9)[None]
    )
    assert region.keeps(parse(text))


POLES = ["1/(x1 - 1)", "log(x1 - 0.246)", "sqrt(x1 - 0.21)", "tan(x1)", "gamma(x1 - 1)"]
POLES += ["1/sin(3*x1)", "x1^-2 + 1/(x1-2.9)", "inv(floor(x1))", "log(x1*x1 - 1)", "exp(300*x1)"]
POLES += ["zdiv(1, x1 - 1)", "logabs(x1 - 1.234567)", "(x1 - 0.5)^0.3", "x1/(x1 - x1)", "asin(x1)"]


@pytest.mark.parametrize("text", [*POLES, "1/lt(x1, 1)"])
def test_a_pole_or_an_end_in_the_box_is_seen_between_the_rows(text):
    rows = np.array([[0.2, 3.0]])
    region = DefinedRegion(parse("x1 + log(x1)"), np.array([0.2]), np.array([3.0]), rows)
    assert not region.keeps(parse(text))


def test_a_pole_that_was_there_may_stay_where_it_is():
    low, high = np.array([-1.0, -1.0]), np.array([1.0, 1.0])
    rows = np.random.default_rng(0).uniform(-1, 1, (2, 50))
    region = DefinedRegion(parse("x1/(x1 - x2) + 0.1*x2"), low, high, rows)
    assert region.keeps(parse("x1/(x1 - x2)"))
    assert region.keeps(parse("x1"))
    assert not region.keeps(parse("x1/(x1 - 0.9*x2)"))
    assert not region.keeps(parse("1/x1"))
    assert not region.keeps(parse("log(x1 - x2)"))


def test_values_that_a_row_has_shown_must_stay():
    """Where nothing is proved of the first formula, the rows on which it was seen still count."""
    low, high = np.array([0.0]), np.array([0.0])
    region = DefinedRegion(parse("pdiv(x1, x1)"), low, high, np.zeros((1, 3)))
    assert not region.keeps(parse("x1/x1"))
