"""Searches on the CPU: fronts, forms, rules, odd data, and why a search ends."""

import time
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.any_search import tables_of, targets_of
from support.engines import searches
from support.engines.requests import run_steps
from support.refusals import refused
from support.suites.searches import test_near_misses_are_fitted  # noqa: F401
from warpfit import searching
from warpfit.dataset import Dataset
from warpfit.errors import WarpfitError
from warpfit.expressions.reference import evaluate_program
from warpfit.ir import Batch, Population, Program
from warpfit.losses import Loss, huber
from warpfit.ops import CONSTANT, OPERATORS
from warpfit.parse import Parser, Placeholder, parse
from warpfit.request import Precision
from warpfit.searching import FIRST_CALL, FIRST_DEFINITION, Form, SearchReason, Units
from warpfit.server_info import Limits
from warpfit_server.engine.cpu import colony
from warpfit_server.engine.cpu import engine as cpu
from warpfit_server.engine.cpu.codegen import parts
from warpfit_server.engine.cpu.colony import CpuColony
from warpfit_server.engine.interface import Arithmetic, run_to_end
from warpfit_server.engine.search import driver
from warpfit_server.engine.search.colony import ColonySettings, Genomes, Screening
from warpfit_server.engine.search.composition import Composer
from warpfit_server.engine.search.genome import fitted_numbers, new_grammar, new_units
from warpfit_server.limits import check_search


@pytest.fixture
def search(engine):
    return searches.Searches(engine)


def table(rows: int = 60, columns: int = 3, seed: int = 0, noise: float = 0.02, **options):
    rng = np.random.default_rng(seed)
    X = rng.uniform(0.5, 3.0, size=(rows, columns))
    a, b, c = (X[:, k % columns] for k in range(3))
    y = 3 * a * b - 2 * c + 1 + noise * rng.normal(size=rows)
    return Dataset.of(X, y, **({"dtype": "float64"} | options))


def spread(data: Dataset) -> float:
    return float(np.var(data.target))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_seed_gives_the_same_front_with_any_threads_and_beside_other_requests(search, dtype):
    data, single = table(dtype=dtype), cpu.CpuEngine(threads=1)
    alone = searches.front_of(search(data, seed=5))
    assert searches.front_of(searches.Searches(single)(data, seed=5)) == alone
    single.close()
    assert searches.front_of(search(data, seed=6)) != alone
    search.datasets.load(data)
    asked, found = search.request(data, seed=5), {}
    begun = {k: search.begin(replace(asked, seed=seed)) for k, seed in enumerate((5, 7, 5))}
    while begun:
        for k, steps in [*begun.items()]:
            try:
                waits_for = next(steps)
            except StopIteration as end:
                found[k] = searches.front_of(end.value)
                del begun[k]
            else:
                if waits_for is not None:
                    waits_for.result()
    search.datasets.unload(data.content_id)
    assert found[0] == found[2] == alone != found[1]


def children_of(colony):
    genomes = Genomes(*colony.children[:3])
    population = genomes.take(genomes.lengths > 0).population()
    ends = np.cumsum(population.lengths.astype(int))
    return [
        Program(population.codes[start:end], population.values[start:end])
        for start, end in zip([0, *ends], ends, strict=False)
    ]


@contextmanager
def colony_of(engine, rows, dtype="float64", fitted=2):
    parts.load_search(1)
    rng = np.random.default_rng(1)
    X, weights = rng.uniform(0.5, 2, size=(rows, 3)), rng.uniform(0.1, 1, size=rows)
    y, weights = np.sin(X[:, 0]) * X[:, 1] + X[:, 2], weights / weights.sum()
    data = Dataset.of(X, dtype=dtype)
    metre = np.eye(7)[0]
    units = Units(np.tile(metre, (3, 1)), metre, dimensionless_constants=True)
    asked = searching.SearchRequest(
        data.content_id, rules=searching.Rules(max_size=9), max_generations=1,
        form=Form.SCALED if fitted else Form.PLAIN, units=units if fitted == 1 else None,
    )  # fmt: skip
    assert fitted_numbers(asked) == fitted
    kernels = engine._kernels[Arithmetic.of(np.dtype(dtype), Precision.FAST)].addresses
    colony = CpuColony(
        data.matrix, kernels, engine.run_in_steps, np.zeros(1, np.uint8),
        new_grammar(asked, [range(3)]), new_units(asked, 3),
        Screening(data.content_id, y, weights, np.dtype(dtype).itemsize, fitted),
        ColonySettings(4, 25, 3, 15, 1, 4, 1, 4, 0, 1),
        Composer(asked, new_grammar(asked, [range(3)])), {},
    )  # fmt: skip
    run_to_end(colony.populate())
    yield colony, X, y, weights


def losses_of(programs, X, y, weights, fitted):
    """Return the loss of each program with the best slope and intercept, relative to a constant's.

    It is infinite if a program hardly varies or has no value somewhere.
    """
    losses, weights = [], weights / weights.sum()
    roots = np.sqrt(weights)
    for program in programs:
        with np.errstate(all="ignore"):
            values = np.broadcast_to(evaluate_program(program, X.T), len(X))
        varies = np.ptp(values) > 1e-3 * np.abs(values).max() or not fitted
        if not (np.isfinite(values).all() and varies):
            losses.append(np.inf)
            continue
        left = y - values
        if fitted:
            matrix = np.stack([values, np.ones(len(y))][:fitted], axis=1)
            left = y - matrix @ np.linalg.lstsq(matrix * roots[:, None], y * roots, rcond=None)[0]
        losses.append((weights @ left**2) / (weights @ (y - weights @ y) ** 2))
    return np.array(losses)


@pytest.mark.parametrize("fitted", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_best_of_each_size_is_the_best_of_all_children(engine, fitted, dtype):
    with colony_of(engine, 40, dtype, fitted) as (colony, X, y, weights):
        programs = children_of(colony)
        for _ in range(8):
            run_to_end(colony.advance())
            programs += children_of(colony)
        best = run_to_end(colony.best())
    assert len(programs) == colony.formulas > 300
    expected = {}
    for program, loss in zip(programs, losses_of(programs, X, y, weights, fitted), strict=True):
        expected[len(program)] = min(loss, expected.get(len(program), np.inf))
    expected = {size: loss for size, loss in expected.items() if loss < np.inf}
    sizes = best.genomes.lengths.tolist()
    for size, loss in zip(sizes, best.losses.tolist(), strict=True):
        np.testing.assert_allclose(loss, expected.pop(size), rtol=2e-4, atol=1e-9)
    assert not expected


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_children_that_are_better_on_the_first_rows_are_screened_on_all(engine, dtype):
    first, rows = 287, 1150
    with colony_of(engine, rows, dtype) as (colony, X, y, weights):
        for _ in range(4):
            run_to_end(colony.advance())
    children, programs = colony.children, children_of(colony)
    own = children.some(children.lengths > 0)
    early = losses_of(programs, X[:first], y[:first], weights[:first], 2)
    whole = losses_of(programs, X, y, weights, 2)
    # Relative to the best constant of all rows.
    mean = np.average(y[:first], weights=weights[:first])
    spread = np.average((y - weights @ y) ** 2, weights=weights)
    early *= np.average((y[:first] - mean) ** 2, weights=weights[:first]) / spread
    sound = np.isfinite(early) & np.isfinite(own.early_losses)
    np.testing.assert_allclose(own.early_losses[sound], early[sound], rtol=1e-3, atol=1e-9)
    screened = np.isfinite(own.losses)
    assert 0 < screened.sum() < len(programs)
    np.testing.assert_allclose(own.losses[screened], whole[screened], rtol=1e-3, atol=1e-9)
    assert (screened | (own.ratios > 0.999))[np.isfinite(whole)].all()


@pytest.mark.parametrize("rows, events, first", [(255, 0, 255), (256, 0, 64), (600, 3, 600)])
def test_first_rows_stand_for_all_unless_they_miss_what_the_target_does(rows, events, first):
    rng = np.random.default_rng(0)
    target = rng.normal(size=rows)
    target[rows - events :] += 1e3
    screening = Screening(b"", target, np.full(rows, 1 / rows), 8, 2)
    assert screening.first_rows == first


def test_what_is_fitted_has_constants_and_is_not_fitted_twice(engine):
    known = []
    with colony_of(engine, 300) as (colony, *_):
        for _ in range(6):
            run_to_end(colony.advance())
            found = run_to_end(colony.champions(5))
            assert np.bincount(found.places // 25).max() <= 5
            for codes, values, length in zip(*found.genomes, strict=True):
                is_number = codes[:length] == CONSTANT
                assert is_number.any()
                known.append((codes[:length].tobytes(), values[:length][~is_number].tobytes()))
    assert len(known) == len({*known}) > 30


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_constants_are_fitted_beside_a_slope_alone(engine, dtype):
    """Near misses, which other tests fit, have an intercept, too, or neither."""
    with colony_of(engine, 60, dtype, 1) as (colony, X, _, weights):
        y, start = 2.5 * evaluate_program(parse("x1/(x2 + 2.7)"), X.T), parse("x1/(x2 + 1)")
        colony._screening = Screening(b"", y, weights, np.dtype(dtype).itemsize, 1)
        own = colony._state[0]
        own["mean"], own["spread"] = colony._screening.mean, colony._screening.spread
        found = run_to_end(colony.fitted(Genomes.of(Population.of([start]), colony.width)))
        used = slice(found.lengths[0])
        program = Program(found.codes[0, used], found.values[0, used].astype(float))
        before, after = losses_of([start, program], X, y, weights, 1)
        assert after < 1e-4 * before


@pytest.mark.parametrize("form", list(Form))
def test_every_form_gets_better_by_a_loss_of_ones_own(search, form):
    losses = search(table(noise=0.0), form=form, custom_loss=huber(0.5)).front.losses
    assert losses[-1] < max(0.3 * losses[0], 1e-2)


RULES = [
    *({}, {"max_size": 1}, {"max_size": 2}, {"max_size": 200}, {"max_size": 6}, {"max_depth": 3}),
    {"counts": {"mul": 1, "add": 0}},
    {"complexities": {"mul": 3, "square": 2}, "max_size": 9},
    {"nesting": {("mul", "mul"): 0, ("add", "square"): 0}},
    {"arguments": {"mul": (1, 3), "div": (-1, 1)}},
]
FEW_OPERATORS = [
    *(searches.SIMPLE, searches.SIMPLE, tuple(OPERATORS), ("sin", "exp"), ("lt", "not")),
    *zip(("exp", "where", "fma", "add")),
]


@st.composite
def any_search(draw):
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    rows, columns = draw(st.sampled_from([1, 2, 3, 60, 300])), draw(st.integers(1, 3))
    tables = tables_of(rows, columns, rng)
    X = tables[draw(st.sampled_from(["uniform", "normal", "constant", "far", "huge"]))]()
    targets = targets_of(X, rng)
    y = targets[draw(st.sampled_from(sorted(targets)))]()
    weights = draw(st.sampled_from([None, rng.integers(0, 3, rows) / 2.0]))
    population, islands = draw(st.sampled_from([(1, 1), (1, 0), (3, 1), (3, 2), (96, 3)]))
    units = None
    if draw(st.integers(0, 3)) == 0:
        exponents = rng.integers(-1, 2, (columns, 7)) / 1.0
        units = Units(exponents, exponents[0], draw(st.booleans()))
    return (X, y, weights), draw(st.sampled_from(["float32", "float64"])), {
        "operators": draw(st.sampled_from(FEW_OPERATORS)),
        "rules": draw(st.sampled_from(RULES)),
        "form": draw(st.sampled_from(Form)),
        "loss": draw(st.sampled_from(Loss)),
        "units": units,
        "population": population,
        "islands": islands,
        "screening_rows": draw(st.sampled_from([1, 16, 1024])),
        **draw(st.sampled_from([{}, {"target_loss": 0.0}, {"target_loss": 0.5}])),
        "rows": (1, rows - 1) if rows > 5 and draw(st.booleans()) else None,
        "max_generations": draw(st.integers(1, 6)),
    }  # fmt: skip


@settings(max_examples=40)
@given(drawn=any_search())
def test_the_front_of_any_search_is_true_or_there_is_an_error(engine, drawn):
    given, dtype, options = drawn
    try:
        found = searches.Searches(engine)(Dataset.of(*given, dtype=dtype), **options)
    except WarpfitError as error:
        assert error.reason.isupper() and error.remedy
        return
    losses, target = found.front.losses, options.get("target_loss")
    is_score = options["loss"] is Loss.R2
    is_met = target is not None and len(losses) > 0 and (
        losses.max() >= target if is_score else losses.min() <= target
    )  # fmt: skip
    assert is_met or found.reason is not SearchReason.TARGET_LOSS


def test_rules_and_units_hold_in_pairs(search):
    exponents = np.zeros((3, 7))
    exponents[0, 0] = exponents[1, 2] = exponents[2, 0] = exponents[2, 2] = 1.0
    given = Units(exponents, exponents[2], dimensionless_constants=True)
    rules = {"max_depth": 4, "counts": {"mul": 2, "add": 1}, "nesting": {("mul", "mul"): 0}}
    found = search(table(), rules=rules, units=given, pairs=True, max_generations=4)
    assert found.pairs > 200


@pytest.mark.parametrize("offset", [1e5, 1e9])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_columns_far_from_zero_are_screened_in_float64(search, offset, dtype):
    rng = np.random.default_rng(2)
    X = rng.uniform(0.0, 1.0, size=(80, 2)) * (1.0 if dtype == "float64" else 64.0) + offset
    X = X.astype(dtype).astype(np.float64)
    assert np.ptp(X, axis=0).min() > 0
    y = (X[:, 0] - X[:, 1]) * 2 + 5
    found = search(Dataset.of(X, y, dtype=dtype), operators=("add", "sub", "mul"))
    assert found.front.losses[-1] < 1e-9 * y.var()


def test_a_constant_target_has_a_constant(search):
    constant = Dataset.of(table().variables.T, np.full(60, 2.5), dtype="float64")
    found = search(constant)
    assert (len(found.front.batch), found.front.losses[0], found.formulas) == (1, 0.0, 0)
    assert found.reason is SearchReason.IDLE
    assert search(constant, target_loss=0.0).reason is SearchReason.TARGET_LOSS


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        (lambda y: 1e155 * y, {}, "TARGET_OUT_OF_RANGE"),
        (lambda y: 1e-160 * y, {}, "TARGET_OUT_OF_RANGE"),
        (lambda y: np.where(np.arange(60) == 3, np.nan, y), {}, "TARGET_NOT_FINITE"),
        (lambda y: y, {"rows": (3, 20)}, "NO_ROWS"),  # which have no weight
    ],
)
def test_targets_that_no_search_takes_are_refused(search, change, options, reason):
    data = table()
    weights = np.arange(60) // 30 if options else None
    wrong = Dataset.of(data.variables.T, change(data.target), weights, dtype="float64")
    refused(reason, search, wrong, **options)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [("group", 2, "SEARCH_NOT_SUPPORTED"), ("screening_rows", 1 << 21, "TOO_MANY_ROWS")],
)
def test_requests_that_no_search_takes_are_refused(search, field, value, reason):
    layout = replace(table().layout, rows=2_000_000)
    asked = replace(search.request(table()), screening_rows=1 << 20, pairs=False)
    assert check_search(asked, layout, Limits(), 1 << 40) > 0
    with pytest.raises(WarpfitError, check=lambda e: (e.reason, e.field) == (reason, field)):
        check_search(replace(asked, **{field: value}), layout, Limits(), 1 << 40)


def test_rows_that_are_not_numbers(search):
    """Columns that have none are not used; with no other ones the constant is the answer."""
    data = table(noise=0.0)
    X = data.variables.T.copy()
    X[7, 2] = np.nan
    found = search(Dataset.of(X, data.target, dtype="float64"))
    assert found.front.losses[-1] < 0.5 * spread(data)
    X[8, :] = np.nan
    constant = {"mse": spread(data), "nmse": 1.0, "r2": 0.0, "rmse": spread(data) ** 0.5}
    for loss, expected in constant.items():
        found = search(Dataset.of(X, data.target, dtype="float64"), loss=Loss(loss))
        assert len(found.front.batch) == 1
        assert found.front.losses[0] == pytest.approx(expected), loss


def test_rows_without_weight_do_not_count(search):
    data = table()
    X, y = data.variables.T.copy(), data.target.copy()
    weights = np.where(np.arange(60) % 3 == 0, 0.0, 1.0 + np.arange(60) % 2)
    X[weights == 0], y[weights == 0] = np.nan, 1e9
    found = search(Dataset.of(X, y, weights, dtype="float64"))
    kept = weights > 0
    same = search(Dataset.of(X[kept], y[kept], weights[kept], dtype="float64"))
    # Its last fit is on all rows, of which it has screened fewer.
    for size, loss in zip(same.front.sizes, same.front.losses, strict=True):
        assert found.front.losses[found.front.sizes <= size].min() <= loss * (1 + 1e-6) + 1e-20


def test_every_progress_has_the_losses_of_all_rows(search, monkeypatch):
    monkeypatch.setattr(driver, "_REPORT_SECONDS", 0.0)
    monkeypatch.setattr(driver, "_REPORT_SHARE", np.inf)
    data = table(400, noise=0.5)
    asked = search.request(data, screening_rows=16)
    search.datasets.load(data)
    reported = []
    run_to_end(search.begin(asked, report=reported.append))
    search.datasets.unload(data.content_id)
    assert len(reported) == 13  # the first formulas, twelve generations
    for found in reported:
        searches.check_front(found, asked, data)


def template(text, arities, **given):
    rows = {name: Placeholder(name, arity, FIRST_CALL + place) for place, (name, arity) in
            enumerate(zip("fg", arities, strict=False))}  # fmt: skip
    codes, values = Parser((), rows).tokens(text)
    return searching.Template(np.array(codes, np.uint8), np.array(values), arities, **given)


@pytest.mark.parametrize(
    ("form", "law"),
    [
        (template("f(x1, x2) * exp(-p1*g(x3))", (2, 1), fitted=1),
         lambda a, b, c: 1.7 * a * b * np.exp(-0.4 * c**2)),
        (template("f(x3, g(x1 + 1))", (2, 1), fitted=2), lambda a, b, c: 3 * c / (2 + a) ** 2 + 1),
    ],
)  # fmt: skip
def test_functions_of_a_template_are_found(search, form, law):
    X = table(80).variables.T
    data = Dataset.of(X, law(*X.T), dtype="float64")
    limits = {"max_size": 15, "counts": {"square": 1}}
    given = {"template": form, "max_generations": 60, "population": 1000, "target_loss": 1e-12}
    found = search(data, (*searches.SIMPLE, "sqrt"), limits, **given)
    assert found.reason is SearchReason.TARGET_LOSS
    count = len(form.arities) + form.parameters
    front, square = found.front, OPERATORS["square"].code
    assert len(front.parts) == count * len(front.batch)
    for row in range(len(front.batch)):
        parts = [front.parts.program(row * count + place) for place in range(count)]
        functions, numbers = parts[: len(form.arities)], parts[len(form.arities) :]
        assert front.sizes[row] == sum(map(len, functions)) <= 15
        for part, arity in zip(functions, form.arities, strict=True):
            assert part.variables <= arity
            assert np.count_nonzero(part.codes == square) <= 1  # rules hold for each of them
        assert all(len(number) == 1 and number.codes[0] == CONSTANT for number in numbers)
    # Another search goes on from the parts.
    again = search(data, searches.SIMPLE, limits, template=form, guesses=front.parts, population=20)
    assert again.front.losses[-1] <= front.losses[-1] * (1 + 1e-9) + 1e-20


def test_defined_functions_are_operators(search):
    X = table(80).variables.T
    data = Dataset.of(X, 2 * np.exp(-((X[:, 0] * X[:, 1]) ** 2)) + 1, dtype="float64")
    given = {"population": 500, "max_generations": 9, "target_loss": 1e-12}
    limits, bump = {"max_size": 4, "counts": {"bump": 1}}, {"bump": parse("exp(-x1^2)")}
    found = search(data, ("mul", "bump"), limits, definitions=bump, **given)
    assert found.reason is SearchReason.TARGET_LOSS
    assert found.front.sizes[-1] == 4
    parts = found.front.parts
    last = parts.codes[-int(parts.lengths[-1]) :]
    assert np.count_nonzero(last == FIRST_DEFINITION) == 1


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_no_formula_rises_or_falls_where_it_must_not(search, dtype):
    X = table(100).variables.T
    y = np.sin(3 * X[:, 0]) - X[:, 1] ** 2 + 0.5 * X[:, 0]
    data = Dataset.of(X, y, dtype=dtype)
    found = search(data, monotonic={0: 1, 1: -1}, population=500, max_generations=12)
    assert len(found.front.batch) > 2
    for program, parameters in searches.programs_of(found.front.batch):
        for column, sign in ((0, 1.0), (1, -1.0)):
            moved = data.variables.astype(np.float64)
            before = evaluate_program(program, moved, parameters)
            moved[column] += 1e-6 * np.ptp(moved[column])
            change = sign * (evaluate_program(program, moved, parameters) - before)
            assert (change >= -1e-11 * np.abs(before)).all()


@pytest.mark.parametrize("form", list(Form))
def test_guesses_do_not_get_worse(search, form):
    data = table()
    texts = ["p1 * x1 * x2 + p2 * x3 + p3", "exp(p1 * x1)", "x1 + x1 + p1"]
    numbers = [np.array([3.0, -2.0, 1.0]), np.array([0.5]), np.array([2.0])]
    guesses = Batch.of([parse(text) for text in texts], numbers)
    found = search(data, guesses=guesses, form=form)
    sizes, losses = found.front.sizes, found.front.losses
    for program, parameters in searches.programs_of(guesses):
        values = evaluate_program(program, data.variables, parameters)
        own = np.square(values - data.target).mean()
        assert losses[sizes <= len(program)].min() <= own * (1 + 1e-9)
    assert losses[-1] < 1e-3 * spread(data)


def test_reasons(search):
    data = table()
    found = search(data, max_formulas=1_000, max_generations=0)
    assert found.reason is SearchReason.FORMULAS
    assert 1_000 <= found.formulas < 1_000 + 3 * 96
    for loss, target, sign in ((Loss.MSE, 0.5 * spread(data), 1), (Loss.R2, 0.5, -1)):
        found = search(data, loss=loss, target_loss=target, max_generations=1_000)
        assert found.reason is SearchReason.TARGET_LOSS
        assert sign * found.front.losses[-1] <= sign * target
        assert found.generations < 1_000
    began = time.monotonic()
    found = search(data, max_seconds=0.3, max_generations=0)
    assert found.reason is SearchReason.TIME
    assert 0.3 <= found.seconds <= time.monotonic() - began
    assert 0 < found.distinct <= 1.1 * found.formulas


@pytest.mark.parametrize("idle", [1, 9])
def test_a_search_is_idle_when_fits_find_nothing_better(search, idle):
    data = table(noise=0.0)
    found = search(data, rules={"max_size": 1}, idle_generations=idle, max_generations=1_000)
    assert found.reason is SearchReason.IDLE
    assert idle <= found.generations < 60
    # The best variable has been found meanwhile.
    correlations = [np.corrcoef(column, data.target)[0, 1] ** 2 for column in data.variables]
    assert found.front.losses[-1] == pytest.approx(spread(data) * (1 - max(correlations)))


def test_a_cancelled_search_returns_its_front(search):
    data, flag, turns = table(), np.zeros(1, np.uint8), []
    search.datasets.load(data)

    def look(pause):
        turns.append(pause)
        flag[0] = len(turns) > 100

    steps = search.begin(search.request(data, max_generations=10_000), cancelled=flag)
    found = run_steps(steps, look)
    assert len(turns) < 110
    assert found.reason is SearchReason.CANCELLED
    assert len(found.front.batch) >= 1
    assert [*search.datasets._whole] == [data.content_id]
    search.datasets.unload(data.content_id)


@pytest.mark.parametrize("has_units", [False, True])
def test_many_columns(search, has_units):
    """The law's columns are among those that are chosen, whose number is bounded."""
    X = np.random.default_rng(4).normal(size=(50, 2_000))
    metre = np.eye(7)[0]
    units = Units(np.tile(metre, (2_000, 1)), metre, dimensionless_constants=True)
    data = Dataset.of(X, X[:, 1_990] * 3 + (not has_units), dtype="float64")
    found = search(data, units=units if has_units else None)
    assert found.front.losses[-1] < 1e-9
    best = searches.inner_trees(found, 1 if has_units else 2)[-1]
    assert best.value == 1_990 or best.operands


@pytest.mark.parametrize("columns", [3, 1030])
def test_a_search_does_not_depend_on_how_its_passes_are_cut(search, monkeypatch, columns):
    data, looks, fronts = table(columns=columns), [[], []], []
    request = search.request(data, max_generations=4, fit_iterations=2)
    for seen in looks:
        search.datasets.load(data)
        fronts.append(searches.front_of(run_steps(search.begin(request), seen.append)))
        search.datasets.unload(data.content_id)
        # Passes over formulas, rows and columns take many steps.
        monkeypatch.setattr(colony, "_AT_ONCE", 32)
        monkeypatch.setattr(colony, "_ROWS_IN_CHUNK", 64)
        monkeypatch.setattr(driver, "_ROWS_AT_ONCE", 64)
    assert fronts[0] == fronts[1]
    assert len(looks[1]) > len(looks[0]) + 10


def test_pairs_are_searched_on_a_part_of_many_rows(search, monkeypatch):
    seen, made = [], driver.PairSearch
    monkeypatch.setattr(
        driver, "PairSearch", lambda **given: seen.append(given) or made(size=200, **given)
    )
    options = {"screening_rows": 1100, "pairs": True, "max_generations": 4, "fit_iterations": 15}
    assert search(table(rows=1100), **options).pairs > 0
    (given,) = seen
    assert (given["X"].shape, given["target"].shape) == ((3, 512), (512,))
