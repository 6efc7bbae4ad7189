"""Searches of any data and any settings: what they raise, and what each row of the table keeps to.

Nothing here depends on how formulas are searched.
"""

import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import warpfit
from warpfit.calls.search import build_search
from warpfit.errors import WarpfitError
from warpfit.formulas.units import check_units, dimension, dimensions
from warpfit.ir import Program
from warpfit.losses import as_function, as_loss
from warpfit.ops import BY_CODE, CONSTANT, PARAMETER

pytest.importorskip("sklearn", minversion="1.6")

from support.any_search import AnySearch, searches, tables_of, targets_of
from support.engines.searches import check_front
from warpfit.searching import DEFAULT_OPERATORS, Front, SearchProgress, SearchReason
from warpfit.sklearn import SymbolicRegressor

#: 12 of the usual suite, 2,000 with `--hypothesis-profile=many`, which have longer budgets, too.
_MANY = settings.default.max_examples >= 1000
_DRAWS = 2000 if _MANY else 12
#: Operators of the guesses, and those that a simplification may write for products and sums.
_GUESSED = ("exp", "sin", "mul", "add")
_ARITHMETIC = {"add", "sub", "mul", "div", "neg", "square", "cube", "inv", "pow"}


@settings(max_examples=_DRAWS)
@given(drawn=searches(longest=3.0 if _MANY else 0.2))
def test_a_search_ends_with_a_front_that_keeps_to_the_rules_or_an_error_of_its_own(
    server, drawn: AnySearch
):
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
        assert min(equation.excess for equation in fronts[-1]) <= 1e-15 * scale_of(drawn, fronts)


def scale_of(drawn: AnySearch, fronts) -> float:
    """Loss of the best constant, or of the simplest formula: a template may have no constant."""
    target = np.reshape(drawn.y, (len(drawn.y), -1))[:, -1]
    with np.errstate(over="ignore"):
        constant = float(np.cov(target, ddof=0, aweights=drawn.weights))
    return max(constant, *(equation.excess for equation in fronts[-1])) or math.inf


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
        names = {BY_CODE[code].name for code in program.codes.tolist() if code in BY_CODE}
        assert names - _ARITHMETIC <= known, equation.equation
    constraints = given.get("constraints", {})
    if is_plain and "count" in constraints:
        core = without_scale(program)
        assert names_in(core).count("sin") <= 1
        assert names_in(core).count("mul") <= 1
    if is_plain and "depth" in constraints:
        core = without_scale(program)
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


# ------------------------------------------------------------------------------- `client.search`


_OPERATORS = (
    *((), ("add", "mul"), ("exp", "log"), ("square",), ("max", "min"), ("div",), ("where", "lt")),
    *(("add", "sub", "mul", "div", "exp", "sin"), DEFAULT_OPERATORS, ("fma", "pow", "abs")),
)


@st.composite
def rules(draw, operators):
    """Draw rules for some of the operators, often contradicting ones."""
    names = st.sampled_from(operators or DEFAULT_OPERATORS)
    return {
        "max_size": draw(st.sampled_from([1, 2, 3, 7, 12, 25, 60])),
        "max_depth": draw(st.none() | st.integers(1, 5)),
        "complexities": draw(st.dictionaries(names, st.integers(1, 9), max_size=2)),
        "counts": draw(st.dictionaries(names, st.integers(0, 2), max_size=2)),
        "nesting": {
            outer: {inner: draw(st.integers(0, 1))}
            for outer, inner in draw(st.lists(st.tuples(names, names), max_size=2))
        },
    }


@st.composite
def calls(draw):
    """Draw columns, a target, weights or None, a type, and keywords."""
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    rows, columns = draw(st.sampled_from([1, 2, 5, 30, 200])), draw(st.integers(1, 4))
    kinds = ("uniform", "normal", "integers", "constant", "equal", "far", "line")
    X = tables_of(rows, columns, rng)[draw(st.sampled_from(kinds))]()
    if draw(st.integers(0, 4)) == 0:
        X[rng.integers(rows), rng.integers(columns)] = np.nan
    y = draw(st.sampled_from([*targets_of(np.nan_to_num(X), rng).values()]))()
    weights = draw(st.sampled_from([None, None, rng.integers(0, 3, rows) / 2.0]))
    operators = draw(st.sampled_from(_OPERATORS))
    options = {
        **draw(rules(operators)),
        "operators": operators or None,
        "loss": draw(st.sampled_from(["mse", "mse", "mae", "rmse", "nmse", "r2"])),
        "form": draw(st.sampled_from(["scaled", "plain"])),
        "generations": draw(st.integers(1, 6)),
        "population": draw(st.sampled_from([1, 3, 40])),
        "islands": 1,
        "pairs": False,
        "fit_iterations": draw(st.sampled_from([0, 1, 8])),
        "screening_rows": draw(st.sampled_from([1, 10, 1000])),
        "target_loss": draw(st.sampled_from([None, 0.0, -1.0, 0.5, 1e-3])),
        "idle_generations": draw(st.sampled_from([None, 1])),
        "seed": draw(st.integers(0, 2**64 - 1)),
    }
    if draw(st.integers(0, 3)) == 0:
        units = ["m", "s", "m/s", "1"][:columns]
        options |= {"units": units, "target_unit": draw(st.sampled_from(["m", "m/s", "kg", "1"]))}
        options["dimensionless_constants"] = draw(st.booleans())
    if rows > 5 and draw(st.booleans()):
        options["rows"] = slice(draw(st.integers(0, 3)), rows - 1)
    return X, y, weights, draw(st.sampled_from(["float32", "float64"])), options


@pytest.mark.thorough
@settings(max_examples=2000 if _MANY else 60)
@given(drawn=calls())
def test_a_front_keeps_to_its_rules_and_tells_true_losses_or_there_is_an_error(server, drawn):
    X, y, weights, dtype, options = drawn
    with warpfit.connect(server.address) as client:
        try:
            data = client.upload(X, y, weights=weights, dtype=dtype)
            found = client.search(data, **options)
        except WarpfitError as error:
            assert error.reason.isupper()
            assert error.remedy
            return
    asked = build_search(data, options)
    front = Front(found.batch, found.sizes, found.losses)
    check_front(SearchProgress(front), asked, data.dataset)
    best = max(found.losses, default=-math.inf) if asked.loss_function.is_score else None
    is_met = options["target_loss"] is not None and len(found) > 0 and (
        min(found.losses) <= options["target_loss"] if best is None
        else best >= options["target_loss"]
    )  # fmt: skip
    assert is_met or found.reason is not SearchReason.TARGET_LOSS
