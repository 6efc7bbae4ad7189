"""An estimator's requests to the engine's search; formulas as matrices, their rules and units."""

import math
import time
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import warpfit
from support.refusals import refused
from warpfit import Program, parse
from warpfit.calls.search import SearchResult
from warpfit.errors import UnavailableError
from warpfit.expressions.reference import evaluate_program
from warpfit.formulas.units import check_units, dimension, dimensions
from warpfit.ir import Batch
from warpfit.losses import Loss
from warpfit.ops import OPERATORS
from warpfit.searching import Front, SearchProgress, SearchReason
from warpfit.sklearn import SymbolicRegressor, engine_search
from warpfit.sklearn import constraints as limits
from warpfit.sklearn import genomes as gp
from warpfit.sklearn.engine_search import SearchTask
from warpfit.sklearn.estimator import TrainingData
from warpfit.sklearn.genomes import Genomes
from warpfit.sklearn.templates import Form, Template, TemplateForm
from warpfit_server.limits import MOST_SCREENING_ROWS

ROWS = np.random.default_rng(0).uniform(1.0, 2.0, (20, 2))
TRAINING = TrainingData(ROWS, ROWS[:, 0], np.ones(20))


def result(*texts, reason=SearchReason.GENERATIONS, losses=(1.5, 0.75)):
    programs, starts = zip(*(parse(text).lift_constants() for text in texts), strict=True)
    sizes = np.arange(1, len(texts) + 1)
    front = Front(Batch.of(programs, starts), sizes, np.array(losses[: len(texts)]))
    return SearchResult.of(SearchProgress(front, 1.0, 7, 900, 800, reason=reason))


@pytest.fixture
def task():
    def make(answer=None, loss=Loss.MSE, seen=(), **settings):
        options, asked = SymbolicRegressor(**settings), {}

        def search(data, progress, **keywords):
            asked.update(keywords, rows=data)
            for each in seen:
                progress(each)
            if isinstance(answer, BaseException):
                raise answer
            return answer

        def upload(X, y, weights, **keywords):
            asked.setdefault("weights", []).append(weights)
            return nullcontext("weighted rows")

        def optimize(data, programs, starts, **keywords):
            return SimpleNamespace(parameters=starts, loss=np.full(len(programs), 0.625))

        rows = {"training": TRAINING, "seen": np.arange(20), "sample": np.arange(12)}
        limits = {"floor": 0.5, "stop_loss": 0.25, "amount": 12.0, "ends": math.inf}
        limits |= {"population": options.population, "generations": options.generations}
        made = SearchTask(
            client=SimpleNamespace(search=search, upload=upload, optimize=optimize),
            **{**rows, "compared": "rows", "rng": np.random.default_rng(0), "form": Form()},
            **{"rules": options.rules(Form(), TRAINING, (), ()), "operators": ("add", "sin")},
            start=Genomes.of([parse("x1 + 3.5"), parse("2")]),
            **{**limits, "loss": loss, "fit_iterations": 15, "early_stopping": None},
            **{"report": lambda found: False, "phase": lambda text: None},
        )
        return made, asked

    return make


def test_the_engine_is_asked_for_what_the_estimator_was_told(task):
    constraints = {"depth": 4, "count": {"/": 1}, "nesting": {"sin": {"+": 0}}}
    units = {"units": ["m", "s"], "target_unit": "m/s", "dimensionless_constants": True}
    settings = {"complexity_of_operators": {"*": 3}, "max_size": 9, "generations": 11}
    made, asked = task(result("x1"), constraints=constraints, **units, **settings)
    found = engine_search.search(ExitStack(), made)
    assert (asked["max_depth"], asked["max_size"], asked["generations"]) == (4, 9, 11)
    assert (asked["counts"], asked["nesting"]) == ({"div": 1}, {"sin": {"add": 0}})
    assert (asked["complexities"], asked["screening_rows"]) == ({"mul": 3}, 12)
    assert asked["target_loss"] == 0.75  # the least possible loss is 0.5
    assert (asked["target_unit"]["m"], asked["target_unit"]["s"]) == (1.0, -1.0)
    assert asked["units"][1]["s"] == 1.0
    assert len(asked["guesses"]) == 1 and asked["guesses"].parameters.tolist() == [3.5]
    assert (found.reason, found.generation) == ("generations", 7)
    assert (found.tried, found.distinct) == (900, 800)


@pytest.mark.parametrize(
    ("generations", "seconds", "asked_for"),
    [(10**6, 60.0, None), (10**6, math.inf, 10**6), (200, 60.0, 200)],
)
def test_time_alone_ends_a_search_of_a_million_generations(task, generations, seconds, asked_for):
    made, asked = task(result("x1"), generations=generations)
    engine_search.search(ExitStack(), replace(made, ends=time.monotonic() + seconds))
    assert asked["generations"] == asked_for
    assert (asked["seconds"] is None) == (seconds == math.inf)


def test_a_front_is_written_without_numbers_that_change_nothing(task):
    made, _ = task(result("sin(x1)*1 + 0", "sin(x2)*1 + 3"))
    front = engine_search.search(ExitStack(), made).front()
    assert [*map(str, front.programs)] == ["sin(x1)", "sin(x2) + 3"]
    assert front.losses.tolist() == [1.0, 0.25]
    made, _ = task(result("sin(x1*2)*4 + 3"))
    found = engine_search.search(ExitStack(), made)
    assert [*map(str, found.front().programs)] == ["sin(x1 * 2) * 4 + 3"]
    formulas = found.formulas()
    written = [str(formulas.program(row)) for row in range(len(formulas))]
    assert written == ["sin(x1 * 2)", "x1 * 2", "x1"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [(KeyboardInterrupt(), "interrupt"), (UnavailableError("nobody is there"), "server")],
)
def test_what_was_reported_is_kept(task, error, reason):
    made, _ = task(error, seen=[result("sin(x1)", "x2", reason=None)])
    found = engine_search.search(ExitStack(), made)
    assert (found.reason, len(found.front().programs)) == (reason, 2)
    assert len(found.promising().programs) == 2
    made, _ = task(error)
    with pytest.raises(type(error)):
        engine_search.search(ExitStack(), made)


def test_directions_own_functions_and_as_many_rows_as_a_server_scores_are_asked_for(task):
    constraints = {"monotonic": {"x1": "increasing"}, "count": {"sinc": 1}}
    made, asked = task(result("x1"), constraints=constraints)
    sample = np.broadcast_to(0, 1 + MOST_SCREENING_ROWS)
    engine_search.search(ExitStack(), replace(made, sample=sample))
    assert asked["screening_rows"] == MOST_SCREENING_ROWS
    assert asked["monotonic"] == {0: "increasing"}
    assert asked["counts"] == {"sinc": 1} and [*asked["definitions"]] == ["sinc"]


OUTLINES = [
    *(("f(x1)*exp(-g(x2))", 1), ("p1 + p2*f(x1)*g(x2)", 2), ("f(x1)*f(x2)", 0), ("sin(f(x1))", 0)),
    *(("1/(f(x1) + p1) + p2", 2), ("g(x2, f(x1))", 2), ("f(x1) - f(x2)", 1)),
    *(("exp(f(x1))*p1", 1), ("f(x1) + 3*x2", 0)),
]


@pytest.mark.parametrize(("text", "fitted"), OUTLINES)
def test_slope_and_intercept_around_a_template_become_numbers_in_it(text, fitted):
    rows = np.random.default_rng(1).uniform(0.5, 2.0, (60, 2))
    form = TemplateForm(Template.of(text, (), 2), rows)
    contract = form.contract(np.arange(256, dtype=np.uint8))
    contract.check(2, {})
    assert contract.fitted == fitted
    rng, functions = np.random.default_rng(2), {1: "exp(x1)", 2: "x1*sin(x2)"}
    cores = [Genomes.of([parse(functions[arity])]) for arity in contract.arities]
    numbers = rng.uniform(0.5, 1.5, form.engine_parts - len(cores))
    parts = [*cores, *(Genomes.of([warpfit.Program.constant(own)]) for own in numbers)]
    around = np.array([-1.7, 0.3])[:fitted]
    whole = form.program(form.found(parts, around), 0)
    plain = form.program(form.found(parts, np.array([1.0, 0.0])[:fitted]), 0)
    slope, intercept = (*around, *[1.0, 0.0][fitted:])
    with np.errstate(all="ignore"):
        wanted = intercept + slope * evaluate_program(plain, rows.T)
        np.testing.assert_allclose(evaluate_program(whole, rows.T), wanted, rtol=1e-9, atol=1e-12)
    # The engine goes on from the same formula, up to slope and intercept.
    (again,) = form.guesses(form.found(parts, around))
    assert [part.program(0) for part in again[: len(cores)]] == [c.program(0) for c in cores]
    np.testing.assert_allclose([part.values[0] for part in again[len(cores) :]], numbers)


def test_rows_are_weighted_around_the_best_formula_for_another_loss(task):
    made, asked = task(result("x1 + 3"), loss=Loss.MAE, seen=[result("x2")], generations=29)
    made = replace(made, floor=0.0, stop_loss=0.01)
    found = engine_search.search(ExitStack(), made)
    assert (asked["rows"], asked["loss"], asked["target_loss"]) == ("weighted rows", Loss.MSE, None)
    middle, *others = asked["weights"]
    errors = np.abs(ROWS[:12, 0] - np.median(ROWS[:12, 0]))
    weighted = middle * np.maximum(errors, 0.1 * np.median(errors)) ** 2
    np.testing.assert_allclose(weighted, middle[0] * errors[0] ** 2, rtol=1e-6)
    assert len(others) == 3 and not np.allclose(others[0], middle)
    assert (found.generation, found.tried) == (28, 3600)
    by_text = dict(zip(map(str, found.promising().programs), found.promising().losses, strict=True))
    assert by_text["x1 + 3"] == 0.625  # by the fit
    assert by_text["x2"] == pytest.approx(np.abs(ROWS[:12, 1] - ROWS[:12, 0]).mean())


def test_a_loss_whose_least_value_is_elsewhere_is_left_to_the_engine(task):
    loss = warpfit.losses.poisson(log=True)
    made, asked = task(result("x1"), loss=loss)
    engine_search.search(ExitStack(), made)
    assert (asked["rows"], asked["loss"]) == ("rows", loss)


NAMES = ("add", "sub", "mul", "div", "square", "exp", "sin", "where")
CODES = tuple(OPERATORS[name].code for name in NAMES)
COLUMNS = np.random.default_rng(0).uniform(0.5, 2.0, (3, 12))


def genomes_of(*texts):
    return gp.Genomes.of([parse(text) for text in texts])


def test_what_is_simplified():
    for text, short in (
        *(("2*x1 + 3", "x1"), ("-(x1*x2)", "x1*x2"), ("sin(exp(0.0))*x2", "x2")),
        *(("square(x1 + (2 + 3))", "(x1 + 5) ^ 2"), ("(x1 + 1)*x2", "(x1 + 1)*x2"), ("1 + 2", "3")),
        *(("3 - x1/2", "x1"), ("2/x1 + 1", "2/x1"), ("2", "2")),
    ):
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
    nested = {"nesting": {"sin": {"sin": -1}}}
    for given in ({"width": 3}, {"depth": 0}, {"count": {"nonsense": 1}}, nested):
        refused("", admitted, given, "x1")


def test_formulas_are_written_with_operators_that_were_named():
    for operators, text, is_written in (
        *((("mul",), "x1^2*x1^4 - x1^2", False), (("mul",), "x1^-2", False)),
        *((("mul",), "x1^1.5", False), (("mul", "sqrt"), "x1^1.5", True)),
        *((("exp",), "exp(2*x1)", False), (("exp", "mul"), "exp(x1/2)", True)),
        *((("exp", "mul"), "exp(1/x1)", False), (("sqrt", "mul"), "abs(x1)", False)),
        (("sinc",), "sinc(x1)", True),
        *((("add", "mul"), "x1^2*x1^4 - x1^2/3", True), (("div",), "x1^-2*x2", True)),
        (("pow",), "x1^1.37", True),
    ):
        assert limits.writing(operators)(genomes_of(text)).tolist() == [is_written]


def test_complexity_is_weighed_with_slope_and_intercept():
    rules = rules_of({"count": {"mul": 1}}, most=7)
    allowed = ["2*(x1*x2) + 3", "2", "x1*x2 + sin(x1)", "(x1*x2)/3"]
    refused = ["2*(x1*x2) + 3 + 1", "2*x1*x2*x3", "log(x1)", "2*(x1*x2) + sin(x1)"]
    assert [rules.allows(parse(text)) for text in allowed] == [True] * 4
    assert [rules.allows(parse(text)) for text in refused] == [False] * 4
    measure = limits.complexity_measure({"exp": 3, "+": 2})
    assert measure(genomes_of("x1 + exp(x2)", "x1*x2")).tolist() == [1 + 2 + 3 + 1, 3]
    assert limits.operator_names(["+", "-", "**", "sin", "add"]) == ("add", "sub", "pow", "sin")


def test_parts_are_packed_row_by_row():
    left, right = genomes_of("x1 + x2", "x1"), genomes_of("sin(x1)", "x2 * x3")
    made = gp.packed([left, right, gp.tokens([0, OPERATORS["mul"].code])])
    assert made.sizes.tolist() == [5, 5]
    assert made.program(1) == Program.apply("mul", parse("x1"), parse("x2 * x3"))


COLUMN_NAMES = ("m", "v", "w", "t", "angle")
UNITS = {"m": "kg", "v": "m/s", "w": "m*s^-1", "t": "s"}
DIMENSIONS = dimensions(UNITS, COLUMN_NAMES, len(COLUMN_NAMES))


def test_equal_units_have_one_dimension():
    for one, other in (
        *(("J", "kg*m^2/s^2"), ("", None), ("m^0.5*m^0.5", "m"), ({"kg": 1, "m": 1, "s": -2}, "N")),
        *(("rad", "1"), ("N/m", "J*m^-2"), ("V*A", "W")),
    ):
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


def test_formulas_are_consistent_in_their_units():
    for text, sound in (
        ("v*t + 3*w", True),  # 3 may be a time
        *(("v*t + w", False), ("square(v)/w - w", True), ("exp(v)", False)),
        *(("sin(angle) + angle", True), ("v^angle", False), ("v^2.5 + w", True)),
        *(("min(v, t)", False), ("fma(v, t, w)", False)),
        *(("v + t", False), ("exp(v/w)*m", True), ("m*(1 - square(v/w))", True)),
        ("where(v < t, m, m)", False),
    ):
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
