"""Formulas as matrices, the rules that they keep to, and their units."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("sklearn")

from support.refusals import refused
from warpfit import Program, parse
from warpfit.expressions import reference
from warpfit.formulas.units import check_units, dimension, dimensions
from warpfit.ops import OPERATORS
from warpfit.sklearn import constraints as limits
from warpfit.sklearn import genomes as gp
from warpfit.sklearn.forms import Form

NAMES = ("add", "sub", "mul", "div", "square", "exp", "sin", "where")
CODES = tuple(OPERATORS[name].code for name in NAMES)
COLUMNS = np.random.default_rng(0).uniform(0.5, 2.0, (3, 12))


def genomes_of(*texts):
    return gp.Genomes.of([parse(text) for text in texts])


def values(genomes):
    return [reference.evaluate_program(p, COLUMNS) for p in genomes.population()]


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("2*x1 + 3", "x1"),
        ("3 - x1/2", "x1"),
        ("-(x1*x2)", "x1*x2"),
        ("2/x1 + 1", "2/x1"),
        ("sin(exp(0.0))*x2", "x2"),
        ("square(x1 + (2 + 3))", "(x1 + 5) ^ 2"),
        ("(x1 + 1)*x2", "(x1 + 1)*x2"),
        ("1 + 2", "3"),
        ("2", "2"),
    ],
)
def test_what_is_simplified(text, short):
    assert gp.simplified(genomes_of(text)).program(0) == parse(short)


def rules_of(given, most=24, operators=("add", "mul", "exp", "sin")):
    limits.check_constraints(given)
    return limits.FormulaRules(
        Form(), operators, given or {}, limits.complexity_measure(None), most, most, COLUMNS.T, {}
    )


def admitted(given, *texts, most=24):
    return [rules_of(given, most).allows(parse(text)) for text in texts]


def test_constraints_bound_depth_counts_and_nesting():
    texts = ("x1 + x2", "sin(exp(x1))", "exp(x1)*exp(x2)", "sin(x1 + sin(x2))", "2")
    assert admitted(None, *texts) == [True] * 5
    assert admitted({"depth": 2}, *texts) == [True, False, False, False, True]
    assert admitted({"count": {"exp": 1}}, *texts) == [True, True, False, True, True]
    assert admitted({"nesting": {"sin": {"sin": 0}}}, *texts) == [True, True, True, False, True]
    assert admitted({"nesting": {"sin": {"exp": 0}}}, *texts) == [True, False, True, True, True]
    assert admitted(None, *texts, most=4) == [True, True, False, False, True]


@pytest.mark.parametrize(
    ("operators", "text", "is_written"),
    [
        (("mul",), "x1^2*x1^4 - x1^2", False),
        (("add", "mul"), "x1^2*x1^4 - x1^2/3", True),
        (("mul",), "x1^-2", False),
        (("div",), "x1^-2*x2", True),
        (("mul",), "x1^1.5", False),
        (("mul", "sqrt"), "x1^1.5", True),
        (("pow",), "x1^1.37", True),
        (("exp",), "exp(2*x1)", False),
        (("exp", "mul"), "exp(x1/2)", True),
        (("exp", "mul"), "exp(1/x1)", False),
        (("sqrt", "mul"), "abs(x1)", False),
        (("sinc",), "sinc(x1)", True),
    ],
)
def test_formulas_are_written_with_operators_that_were_named(operators, text, is_written):
    assert limits.writing(operators)(genomes_of(text)).tolist() == [is_written]


def test_whole_formulas_are_weighed_with_slope_and_intercept():
    rules = rules_of({"count": {"mul": 1}}, most=7)
    allowed = ["2*(x1*x2) + 3", "2", "x1*x2 + sin(x1)", "(x1*x2)/3"]
    refused = ["2*(x1*x2) + 3 + 1", "2*x1*x2*x3", "log(x1)", "2*(x1*x2) + sin(x1)"]
    assert [rules.allows(parse(text)) for text in allowed] == [True] * 4
    assert [rules.allows(parse(text)) for text in refused] == [False] * 4


def test_complexity_counts_tokens_by_weight_and_operators_have_symbols():
    measure = limits.complexity_measure({"exp": 3, "+": 2})
    assert measure(genomes_of("x1 + exp(x2)", "x1*x2")).tolist() == [1 + 2 + 3 + 1, 3]
    assert limits.operator_names(["+", "-", "**", "sin", "add"]) == ("add", "sub", "pow", "sin")


def test_constraints_that_make_no_sense():
    nested = {"nesting": {"sin": {"sin": -1}}}
    for given in ({"width": 3}, {"depth": 0}, {"count": {"nonsense": 1}}, nested):
        refused("", admitted, given, "x1")


def test_parts_are_packed_row_by_row():
    left, right = genomes_of("x1 + x2", "x1"), genomes_of("sin(x1)", "x2 * x3")
    made = gp.packed([left, right, gp.tokens([0, OPERATORS["mul"].code])])
    assert made.sizes.tolist() == [5, 5]
    assert made.program(1) == Program.apply("mul", parse("x1"), parse("x2 * x3"))


# ------------------------------------------------------------------------------------------- units


COLUMN_NAMES = ("m", "v", "w", "t", "angle")
UNITS = {"m": "kg", "v": "m/s", "w": "m*s^-1", "t": "s"}
DIMENSIONS = dimensions(UNITS, COLUMN_NAMES, len(COLUMN_NAMES))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("J", "kg*m^2/s^2"),
        ("N/m", "J*m^-2"),
        ("V*A", "W"),
        ("", None),
        ("m^0.5*m^0.5", "m"),
        ({"kg": 1, "m": 1, "s": -2}, "N"),
        ("rad", "1"),
    ],
)
def test_equal_units_have_one_dimension(one, other):
    assert dimension(one) == pytest.approx(dimension(other), abs=1e-12)


def test_units_of_other_systems_are_those_of_pint():
    pytest.importorskip("pint")
    assert dimension("mile/hour") == pytest.approx(dimension("m/s"))
    assert dimension("kN") == pytest.approx(dimension("N"))


def test_units_by_column_and_by_default_names_and_those_that_do_not_fit():
    assert np.allclose(dimensions(["m", None], (), 2), dimensions({"x1": "m"}, (), 2))
    refused("UNKNOWN_UNIT", dimensions, {"m": "florin*"}, COLUMN_NAMES, len(COLUMN_NAMES))
    for units in ({"q": "kg"}, ["kg"], "kg"):
        refused("BAD_SETTING", dimensions, units, COLUMN_NAMES, len(COLUMN_NAMES))


@pytest.mark.parametrize(
    ("text", "sound"),
    [
        ("v + t", False),
        ("v*t + 3*w", True),  # 3 may be a time
        ("v*t + w", False),
        ("square(v)/w - w", True),
        ("exp(v)", False),
        ("exp(v/w)*m", True),
        ("sin(angle) + angle", True),
        ("m*(1 - square(v/w))", True),
        ("v^angle", False),
        ("v^2.5 + w", True),
        ("min(v, t)", False),
        ("where(v < t, m, m)", False),
        ("fma(v, t, w)", False),
    ],
)
def test_formulas_are_consistent_in_their_units(text, sound):
    program = parse(text, COLUMN_NAMES)
    assert limits.consistency(DIMENSIONS)(gp.Genomes.of([program])).tolist() == [sound]
    if sound:
        check_units(program, DIMENSIONS, None, COLUMN_NAMES)
    else:
        error = refused("UNITS_DIFFER", check_units, program, DIMENSIONS, None, COLUMN_NAMES)
        assert error.position is not None


@pytest.mark.parametrize(
    ("text", "target", "place"),
    [("p1*v*t", "m", None), ("v*t", "s", 2), ("v*(v + p1*t) + exp(t)", "", 19)],
)
def test_a_formula_has_the_unit_of_the_target(text, target, place):
    given = parse(text, COLUMN_NAMES), DIMENSIONS, dimension(target), COLUMN_NAMES
    if place is None:
        check_units(*given)
    else:
        assert refused("UNITS_DIFFER", check_units, *given).position == place
