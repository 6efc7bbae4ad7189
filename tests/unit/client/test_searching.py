"""The checks of a search's settings: each mistake is named, with place, reason and remedy."""

from dataclasses import replace

import numpy as np
import pytest

from support.refusals import refused
from warpfit import parse
from warpfit.dataset import Dataset
from warpfit.ir import Batch
from warpfit.ops import OPERATORS
from warpfit.searching import BASE_UNITS, Rules, SearchRequest, Template, Units

X = np.random.default_rng(0).normal(size=(20, 3))
LAYOUT = Dataset.of(X, X[:, 0]).layout
USUAL = SearchRequest(bytes(32), max_generations=1)
EXPONENTS = np.eye(3, BASE_UNITS)
LENGTH, MASS_AND_CURRENT = EXPONENTS[0], np.eye(BASE_UNITS)[1] + np.eye(BASE_UNITS)[3]
ONE = Batch.of([parse("x1")])
MANY = {(outer, inner): 0 for outer in [*OPERATORS][:13] for inner in [*OPERATORS][:5]}
#: f(x1, x2)*p1 + exp(g(x3)); numbers are those of `warpfit.ops`.
ADD, MUL, EXP = (OPERATORS[name].code for name in ("add", "mul", "exp"))
FORM = np.array([1, 1, 128, 2, MUL, 1, 129, EXP, ADD], np.uint8)
NUMBERS = np.array([0.0, 1.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0])
TWICE = {"twice": parse("2*x1")}


def template(arities=(2, 1), codes=FORM, numbers=NUMBERS, **given):
    return {"template": Template(codes, numbers, arities, **given)}


def parts(*texts):
    return {"guesses": Batch.of([parse(text) for text in texts])}


def rules(**given):
    return {"rules": Rules(**given)}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"max_generations": 0, "max_seconds": 0.5},
        {"rows": (3, 4), "variables": (2, 0), "group": 1},
        {"guesses": ONE, "units": Units(EXPONENTS)},
        {"units": Units(EXPONENTS, LENGTH, dimensionless_constants=True)},
        template(),
        template(fitted=2) | parts("x1 + x2", "x1", "2") | {"monotonic": {0: 1, 2: -1}},
        {"definitions": TWICE, "operators": {"twice": 2.0}, **rules(counts={"twice": 1})},
        rules(arguments={"pow": (-1, 1)}, nesting={("exp", "exp"): 0}, counts={"sin": 0}),
        {"max_generations": 2**64 - 1, "seed": 2**64 - 1},
    ],
)
def test_what_is_right_passes(given):
    replace(USUAL, **given).check(LAYOUT)


WRONG = [
    ("BUDGET_MISSING", "max_seconds", {"max_generations": 0}),
    ("BUDGET_MISSING", "max_seconds", {"max_generations": 0, "target_loss": 0.1}),
    ("BAD_SETTING", "max_seconds", {"max_seconds": -1.0}),
    ("BAD_SETTING", "max_generations", {"max_generations": 2**64}),
    ("BAD_SETTING", "max_formulas", {"max_formulas": -1}),
    ("BAD_SETTING", "idle_generations", {"idle_generations": -1}),
    ("BAD_SETTING", "target_loss", {"target_loss": np.nan}),
    ("BAD_SETTING", "screening_rows", {"screening_rows": 0}),
    ("BAD_SETTING", "islands", {"islands": 2**20}),
    ("BAD_SETTING", "population", {"population": 3, "islands": 4}),
    ("BAD_SETTING", "fit_iterations", {"fit_iterations": -1}),
    ("BAD_SETTING", "seed", {"seed": 2**64}),
    ("ROWS_OUT_OF_RANGE", "rows", {"rows": (5, 5)}),
    ("ROWS_OUT_OF_RANGE", "rows", {"rows": (0, 21)}),
    ("BAD_SETTING", "operators", {"operators": {}}),
    ("UNKNOWN_OPERATOR", "operators", {"operators": {"plus": 1.0}}),
    ("BAD_SETTING", "the weight of add", {"operators": {"add": 0.0}}),
    ("BAD_SETTING", "the weight of add", {"operators": {"add": np.nan}}),
    ("NO_VARIABLES", "variables", {"variables": ()}),
    ("VARIABLE_OUT_OF_RANGE", "variables", {"variables": (0, 3)}),
    ("VARIABLE_OUT_OF_RANGE", "variables", {"variables": (-1,)}),
    ("BAD_SETTING", "variables", {"variables": (1, 1)}),
    ("CONFLICTING_SETTINGS", "variables", {"variables": (1, 2), "group": 1}),
    ("BAD_GROUP", "group", {"group": 3}),
    ("BAD_SETTING", "max_size", rules(max_size=0)),
    ("BAD_SETTING", "max_size", rules(max_size=1_001)),
    ("BAD_SETTING", "max_depth", rules(max_depth=-1)),
    ("BAD_SETTING", "complexities of exp", rules(complexities={"exp": 0})),
    ("BAD_SETTING", "counts of exp", rules(counts={"exp": -1})),
    ("UNKNOWN_OPERATOR", "nesting", rules(nesting={("exp", "plus"): 1})),
    ("BAD_SETTING", "rules of nesting", rules(nesting=MANY)),
    ("BAD_SETTING", "nesting of sin in exp", rules(nesting={("exp", "sin"): -1})),
    ("UNKNOWN_OPERATOR", "arguments", rules(arguments={"plus": (1, 1)})),
    ("BAD_SETTING", "arguments of pow", rules(arguments={"pow": (1, 0)})),
    ("BAD_UNITS", "units", {"units": Units(EXPONENTS[:2])}),
    ("BAD_UNITS", "units", {"units": Units(EXPONENTS * np.nan)}),
    ("BAD_UNITS", "units", {"units": Units(EXPONENTS, LENGTH[:3])}),
    ("UNSATISFIABLE", "units", {"units": Units(EXPONENTS, MASS_AND_CURRENT, True)}),
    ("UNSATISFIABLE", "units", {"units": Units(EXPONENTS, LENGTH, True), "variables": (1, 2)}),
    (
        *("UNSATISFIABLE", "units"),
        {"units": Units(EXPONENTS, 3 * EXPONENTS[0], True), "operators": {"add": 1.0, "exp": 1.0}},
    ),
    ("BAD_TEMPLATE", "template", template(())),
    ("BAD_TEMPLATE", "template", template((1,) * 9)),
    ("BAD_TEMPLATE", "template", template((2, 2))),
    ("BAD_TEMPLATE", "template", template(codes=FORM[:-1], numbers=NUMBERS[:-1])),
    ("BAD_TEMPLATE", "template", template(numbers=NUMBERS[:-1])),
    ("BAD_TEMPLATE", "template", template((2, 1, 1))),
    ("BAD_TEMPLATE", "template", template(numbers=NUMBERS + 0.5)),
    ("BAD_TEMPLATE", "template", template(numbers=NUMBERS + 2.0)),
    ("BAD_TEMPLATE", "template", template(codes=FORM[:0], numbers=NUMBERS[:0])),
    ("BAD_TEMPLATE", "template", template(fitted=3)),
    ("BAD_SETTING", "guesses", template() | {"guesses": ONE}),
    ("BAD_SETTING", "guesses", template() | parts("x1", "x2", "1")),
    ("BAD_SETTING", "guesses", {"definitions": TWICE} | parts("x4")),
    ("BAD_SETTING", "the definition of add", {"definitions": {"add": parse("x1")}}),
    ("BAD_SETTING", "the definition of f", {"definitions": {"f": parse("x2")}}),
    ("BAD_SETTING", "the definition of f", {"definitions": {"f": parse("p1*x1")}}),
    ("BAD_SETTING", "the definition of f", {"definitions": {"f": parse("x1 + x2 + x3 + x4")}}),
    ("BAD_SETTING", "monotonic", {"monotonic": {3: 1}}),
    ("BAD_SETTING", "monotonic", {"monotonic": {0: 2}}),
    ("CONFLICTING_SETTINGS", "guesses", {"guesses": ONE, "variables": (1,)}),
    ("VARIABLE_OUT_OF_RANGE", "programs", {"guesses": Batch.of([parse("x4")])}),
    ("BAD_SETTING", "vectors of guesses", {"guesses": Batch.of([parse("p1")], [[[1], [2]]])}),
]


@pytest.mark.parametrize(("reason", "field", "given"), WRONG)
def test_a_mistake_is_named(reason, field, given):
    assert refused(reason, lambda: replace(USUAL, **given).check(LAYOUT)).field == field


def test_data_without_a_target_are_refused_and_the_operator_that_was_meant_is_named():
    refused("TARGET_MISSING", lambda: USUAL.check(Dataset.of(X).layout))
    refused("Did you mean square", lambda: replace(USUAL, operators={"squared": 1.0}).check(LAYOUT))
