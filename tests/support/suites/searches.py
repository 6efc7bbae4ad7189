"""Tests of searches on a GPU; a test module defines the fixture ``engine``."""

from dataclasses import replace

import numpy as np
import pytest

from support.engines.plain_search import keeps_rules, keeps_units, trees_of
from support.engines.searches import Searches, front_of
from warpfit.dataset import Dataset
from warpfit.expressions.reference import evaluate_program
from warpfit.ir import Program
from warpfit.searching import Form, Rules, SearchReason, SearchRequest, Units
from warpfit_server.engine.cpu.engine import CpuEngine
from warpfit_server.engine.evaluation import LoadedDatasets
from warpfit_server.engine.interface import run_to_end
from warpfit_server.engine.search import driver
from warpfit_server.engine.search.colony import ColonySettings, Genomes, Screening
from warpfit_server.engine.search.composition import Composer
from warpfit_server.engine.search.genome import fitted_numbers, new_grammar, new_units

SETTINGS = ColonySettings(3, 20, 7, 15, 3, 4, 1, 4, 0, 1)


@pytest.fixture(scope="module")
def host():
    engine = CpuEngine(threads=1)
    yield engine
    engine.close()


def table(rows: int = 70, dtype: str = "float64") -> Dataset:
    rng = np.random.default_rng(0)
    X = rng.uniform(0.5, 3.0, size=(rows, 3))
    y = 3 * X[:, 0] * X[:, 1] - 2 * X[:, 2] + 1 + 0.02 * rng.normal(size=rows)
    return Dataset.of(X, y, dtype=dtype)


def new_colony(engine, data, request, settings=SETTINGS):
    """Return the engine's colony for data that are loaded."""

    def captured(*given, **named):
        yield None
        return given[3]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "search", captured)
        steps = engine.search(
            request, LoadedDatasets(engine, {data.content_id: data}),
            cancelled=np.zeros(1, np.uint8), report=lambda progress: None,
        )  # fmt: skip
        made = run_to_end(steps)
    rows = data.layout.rows
    weights = np.full(rows, 1 / rows)
    screening = Screening(
        data.content_id, data.target.astype(np.float64), weights, data.layout.dtype.itemsize,
        fitted_numbers(request),
    )  # fmt: skip
    grammar, units = new_grammar(request, [range(3)]), new_units(request, 3)
    return run_to_end(made(grammar, units, screening, settings, Composer(request, grammar)))


def bests(engine, data, request, generations=6):
    """Return the best formula of each size of a colony, after what a search does to it."""
    engine.load(data)
    colony = new_colony(engine, data, request)
    run_to_end(colony.populate())
    for generation in range(generations):
        run_to_end(colony.advance())
        if generation == generations // 2:
            run_to_end(colony.restart(1))
            best = run_to_end(colony.best())
            places = np.arange(len(best.genomes)) % SETTINGS.formulas
            run_to_end(colony.insert(best.genomes, places))
    run_to_end(colony.improve(0))
    best, scores = run_to_end(colony.best()), colony.island_scores.copy()
    colony.close()
    engine.unload(data.content_id)
    return best, scores


REQUESTS = {
    "scaled": {},
    "plain": {"form": Form.PLAIN, "rules": Rules(max_size=9)},
    "rules": {"rules": Rules(max_size=12, counts={"exp": 1}, nesting={("mul", "mul"): 0})},
    "ternary": {"operators": {"fma": 1.0, "where": 1.0, "sub": 2.0}},
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_colony_is_that_of_the_cpu(engine, host, name):
    """Their constants differ by rounding, and so do losses; what is bred does not."""
    data = table()
    request = SearchRequest(data.content_id, max_generations=1, **REQUESTS[name])
    own, scores = bests(engine, data, request)
    other, others = bests(host, data, request)
    np.testing.assert_array_equal(own.genomes.lengths, other.genomes.lengths)
    inside = np.arange(own.genomes.codes.shape[1]) < own.genomes.lengths[:, None]
    for array, expected in zip(own.genomes[:2], other.genomes[:2], strict=True):
        np.testing.assert_allclose(array[inside], expected[inside], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(own.losses, other.losses, rtol=1e-4)
    np.testing.assert_allclose(scores, others, rtol=1e-4)
    for codes, values, length in zip(*own.genomes, strict=True):
        (tree,) = trees_of(codes[:length].tolist(), values[:length].tolist())
        assert keeps_rules(tree, request)


@pytest.mark.parametrize("dimensionless", [False, True])
def test_formulas_of_a_colony_keep_to_units(engine, dimensionless):
    data = table()
    exponents = np.zeros((3, 7))
    exponents[0, 0] = exponents[1, 2] = exponents[2, 0] = exponents[2, 2] = 1.0
    units = Units(exponents, exponents[2], dimensionless)
    operators = dict.fromkeys(("add", "sub", "mul", "div", "sqrt", "square", "exp", "min"), 1.0)
    request = SearchRequest(data.content_id, max_generations=1, units=units, operators=operators)
    best, _ = bests(engine, data, request)
    assert len(best.genomes) > 5
    for codes, values, length in zip(*best.genomes, strict=True):
        (tree,) = trees_of(codes[:length].tolist(), values[:length].tolist())
        assert keeps_units(tree, request)


def test_a_formula_that_is_better_takes_a_place(engine):
    data = table()
    engine.load(data)
    request = SearchRequest(data.content_id, max_generations=1)
    colony = new_colony(engine, data, request)
    run_to_end(colony.populate())
    best = run_to_end(colony.best())
    worst, good = best.genomes.take(slice(0, 1)), best.genomes.take(slice(-1, None))
    both = Genomes(*(np.concatenate(pair) for pair in zip(worst, good, strict=True)))
    losses = run_to_end(colony.insert(both, np.array([5, 6])))
    np.testing.assert_allclose(losses, best.losses[[0, -1]], rtol=1e-5)
    run_to_end(colony.improve(0))
    assert colony.island_scores.min() <= best.losses.min() * 1.5
    assert colony.fits == 0
    colony.close()
    engine.unload(data.content_id)


def best_after(engine, data, request, fits, seed):
    """Return the best formula of each size after some generations with so many fits an island."""
    engine.load(data)
    settings = replace(SETTINGS, island=40, seed=seed, tries=1)
    colony = new_colony(engine, data, request, settings)
    run_to_end(colony.populate())
    for _ in range(30):
        run_to_end(colony.advance())
        run_to_end(colony.improve(fits))
    best, count = run_to_end(colony.best()), colony.fits
    assert (count > 30) == (fits > 0)
    colony.close()
    engine.unload(data.content_id)
    return best


@pytest.mark.parametrize("rows", [70, 900])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("form", [Form.SCALED, Form.PLAIN])
def test_near_misses_are_fitted(engine, form, dtype, rows):
    """A law with constants is found sooner, and losses are those of the formulas."""
    rng = np.random.default_rng(0)
    X = rng.uniform(0.5, 3.0, size=(rows, 3))
    y = np.exp(-1.37 * X[:, 0]) + 0.3 / (X[:, 1] + 2.72)
    data = Dataset.of(X, y, dtype=dtype)
    operators = dict.fromkeys(("add", "sub", "mul", "div", "exp"), 1.0)
    request = SearchRequest(data.content_id, max_generations=1, form=form, operators=operators)
    fronts = [[best_after(engine, data, request, n, seed) for n in (8, 0)] for seed in range(4)]
    gains = [np.log(fitted.losses.min() / bred.losses.min()) for fitted, bred in fronts]
    assert np.mean(gains) < np.log(0.3)
    with_fits = fronts[0][0]
    for codes, values, length, loss in zip(*with_fits.genomes, with_fits.losses, strict=True):
        program = Program(codes[:length], values[:length].astype(float))
        found = np.broadcast_to(evaluate_program(program, X.T), rows)
        left = y - found
        if form is Form.SCALED:
            columns = np.stack([found, np.ones(rows)], axis=1)
            left = y - columns @ np.linalg.lstsq(columns, y, rcond=None)[0]
        np.testing.assert_allclose(loss, (left @ left) / rows / y.var(), rtol=2e-3, atol=1e-7)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_search_has_the_same_front_again(engine, dtype):
    found = [Searches(engine)(table(dtype=dtype), seed=3, max_generations=16) for _ in range(2)]
    assert front_of(found[0]) == front_of(found[1])
    assert found[0].reason is SearchReason.GENERATIONS
    assert found[0].front.losses[-1] < 0.1 * found[0].front.losses[0]


@pytest.mark.parametrize(
    ("rules", "population"), [({"max_size": 1}, 40), ({"max_size": 200}, 3), ({"max_depth": 3}, 1)]
)
def test_sizes_on_a_device(engine, rules, population):
    options = {"population": population, "islands": 1, "pairs": False, "max_generations": 8}
    assert Searches(engine)(table(), rules=rules, **options).generations == 8
