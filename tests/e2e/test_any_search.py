"""Searches of any data and any settings: what they raise, and what each row of the table keeps to.

Nothing here depends on how formulas are searched.
"""

import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings

from warpfit.errors import WarpfitError
from warpfit.formulas.units import check_units, dimension, dimensions
from warpfit.ir import Program
from warpfit.losses import as_function, as_loss
from warpfit.ops import BY_CODE, CONSTANT, PARAMETER

pytest.importorskip("sklearn", minversion="1.6")

from support.any_search import AnySearch, searches
from warpfit.sklearn import SymbolicRegressor

#: Draws with `--hypothesis-profile=many`, which have longer budgets, too, and else.
_DRAWS = 2000 if settings.default.max_examples >= 1000 else 12
#: Operators of the guesses, and those that a simplification may write for products and sums.
_GUESSED = ("exp", "sin", "mul", "add")
_ARITHMETIC = {"add", "sub", "mul", "div", "neg", "square", "cube", "inv", "pow"}


@settings(max_examples=_DRAWS)
@given(drawn=searches(longest=3.0 if _DRAWS > 12 else 0.2))
def test_a_search_ends_with_a_front_that_keeps_to_the_rules_or_a_known_error(server, drawn):
    model = SymbolicRegressor(address=server.address, **drawn.settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        try:
            model.fit(drawn.X, drawn.y, drawn.weights)
        except WarpfitError as error:
            assert error.reason
            return
    assert model.predict(drawn.X).shape == np.shape(drawn.y)
    fronts = model.front_ if np.ndim(drawn.y) == 2 else [model.front_]
    for front in fronts:
        assert len(front) > 0
        for equation in front:
            keeps_to_the_rules(equation, front, drawn)
    if model.reason_ == "tolerance" and as_function(as_loss(model.loss)).is_squares:
        # Of the best constant, or of the simplest formula: a template may have no constant.
        target = np.reshape(drawn.y, (len(drawn.y), -1))[:, -1]
        with np.errstate(over="ignore"):
            constant = float(np.cov(target, ddof=0, aweights=drawn.weights))
        losses = [equation.excess for equation in fronts[-1]]
        assert min(losses) <= 1e-15 * (max(constant, *losses) or math.inf)


def keeps_to_the_rules(equation, front, drawn: AnySearch) -> None:
    given, program = drawn.settings, equation.program
    macros = "sinc" in given["operators"]
    if given["max_size"] is not None and not macros:
        assert equation.complexity <= given["max_size"]
    if program.variables == 0 or equation.is_linear_regression:
        return
    is_plain = "template" not in given and not macros
    if is_plain:
        assert equation.complexity == len(program)
        known = {*given["operators"], *(_GUESSED if "guesses" in given else ())}
        assert {*names_in(program)} - _ARITHMETIC <= known, equation.equation
    constraints = given.get("constraints", {})
    core = without_scale(program)
    if is_plain and "count" in constraints:
        assert names_in(core).count("sin") <= 1
        assert names_in(core).count("mul") <= 1
    if is_plain and "depth" in constraints:
        assert core.fold(lambda *_: 1, lambda _, parts: 1 + max(parts)) <= 3
    if "units" in given and given["dimensionless_constants"]:
        count = drawn.X.shape[1]
        # A constant is a variable without a unit.
        places = program.codes == CONSTANT
        plain = Program(np.where(places, 1, program.codes), np.where(places, count, program.values))
        own = np.append(dimensions(given["units"], (), count), 0.0)
        check_units(plain, own, dimension("m"))


def names_in(program: Program) -> list[str]:
    return [BY_CODE[code].name for code in program.codes.tolist() if code in BY_CODE]


def without_scale(program: Program) -> Program:
    """Return f of a + b f, or of f/b - a, whose numbers are parameters where rows have groups."""
    numbers = (CONSTANT, PARAMETER)
    while (names := names_in(program)) and names[-1] in ("add", "sub", "mul", "div", "neg"):
        if names[-1] == "neg" or program.codes[-2] in numbers:
            cut = 1 if names[-1] == "neg" else 2
            program = Program(program.codes[:-cut], program.values[:-cut])
        elif program.codes[0] in numbers and is_tree(program.codes[1:-1]):
            program = Program(program.codes[1:-1], program.values[1:-1])
        else:
            break
    return program


def is_tree(codes) -> bool:
    height = 0
    for code in codes.tolist():
        height += 1 - (BY_CODE[code].arity if code in BY_CODE else 0)
        if height < 1:
            return False
    return height == 1
