"""Requests that an estimator sends to the engine's search, and formulas that it reads back."""

import math
import time
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import warpfit
from warpfit.calls.search import SearchResult
from warpfit.errors import UnavailableError
from warpfit.expressions.reference import evaluate_program
from warpfit.ir import Batch
from warpfit.losses import Loss
from warpfit.searching import Front, SearchProgress, SearchReason

pytest.importorskip("sklearn", minversion="1.6")

from warpfit.sklearn import SymbolicRegressor, engine_search
from warpfit.sklearn.estimator import TrainingData
from warpfit.sklearn.forms import Form
from warpfit.sklearn.genomes import Genomes
from warpfit.sklearn.search_task import SearchTask
from warpfit.sklearn.templates import Template, TemplateForm

ROWS = np.random.default_rng(0).uniform(1.0, 2.0, (20, 2))
TRAINING = TrainingData(ROWS, ROWS[:, 0], np.ones(20))


def result(*texts, reason=SearchReason.GENERATIONS, losses=(1.5, 0.75)):
    programs, starts = zip(*(warpfit.parse(text).lift_constants() for text in texts), strict=True)
    sizes = np.arange(1, len(texts) + 1)
    front = Front(Batch.of(programs, starts), sizes, np.array(losses[: len(texts)]))
    return SearchResult.of(SearchProgress(front, 1.0, 7, 900, 800, reason=reason))


@pytest.fixture
def task():
    """Make tasks whose client answers a search with a result, or raises an error."""

    def make(answer=None, loss=Loss.MSE, seen=(), **settings):
        options = SymbolicRegressor(**settings)
        asked = {}

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

        made = SearchTask(
            client=SimpleNamespace(search=search, upload=upload, optimize=optimize),
            training=TRAINING,
            seen=np.arange(20),
            sample=np.arange(12),
            compared="rows",
            rng=np.random.default_rng(0),
            form=Form(),
            rules=options.rules(Form(), TRAINING, (), ()),
            operators=("add", "sin"),
            start=Genomes.of([warpfit.parse("x1 + 3.5"), warpfit.parse("2")]),
            loss=loss,
            floor=0.5,
            stop_loss=0.25,
            amount=12.0,
            population=options.population,
            generations=options.generations,
            fit_iterations=15,
            early_stopping=None,
            ends=math.inf,
            report=lambda found: False,
            phase=lambda text: None,
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


def test_of_a_large_sample_the_engine_draws_as_many_rows_as_a_server_scores(task):
    limits = pytest.importorskip("warpfit_server.limits")
    made, asked = task(result("x1"))
    sample = np.broadcast_to(0, 1 + limits.MOST_SCREENING_ROWS)
    engine_search.search(ExitStack(), replace(made, sample=sample))
    assert asked["screening_rows"] == limits.MOST_SCREENING_ROWS


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


def test_directions_and_functions_of_ones_own_are_asked_for(task):
    constraints = {"monotonic": {"x1": "increasing"}, "count": {"sinc": 1}}
    made, asked = task(result("x1"), constraints=constraints)
    engine_search.search(ExitStack(), made)
    assert asked["monotonic"] == {0: "increasing"}
    assert asked["counts"] == {"sinc": 1} and [*asked["definitions"]] == ["sinc"]


OUTLINES = [
    ("f(x1)*exp(-g(x2))", 1),
    ("p1 + p2*f(x1)*g(x2)", 2),
    ("f(x1) - f(x2)", 1),
    ("f(x1)*f(x2)", 0),
    ("exp(f(x1))*p1", 1),
    ("sin(f(x1))", 0),
    ("f(x1) + 3*x2", 0),
    ("1/(f(x1) + p1) + p2", 2),
    ("g(x2, f(x1))", 2),
]


@pytest.mark.parametrize(("text", "fitted"), OUTLINES)
def test_slope_and_intercept_around_a_template_become_numbers_in_it(text, fitted):
    rows = np.random.default_rng(1).uniform(0.5, 2.0, (60, 2))
    form = TemplateForm(Template.of(text, (), 2), rows)
    contract = form.contract(np.arange(256, dtype=np.uint8))
    contract.check(2, {})
    assert contract.fitted == fitted
    rng = np.random.default_rng(2)
    functions = {1: "exp(x1)", 2: "x1*sin(x2)"}
    cores = [Genomes.of([warpfit.parse(functions[arity])]) for arity in contract.arities]
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
    np.testing.assert_allclose(
        middle * np.maximum(errors, 0.1 * np.median(errors)) ** 2,
        middle[0] * errors[0] ** 2,
        rtol=1e-6,
    )
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
