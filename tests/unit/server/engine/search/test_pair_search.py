"""The search for pairs and sums finds laws, with the library, the views and what keeps to rules."""

import tracemalloc
from contextlib import closing

import numpy as np
import pytest

from support.suites.pairs import *  # noqa: F403
from support.suites.pairs import drawn, standardised
from warpfit import parse
from warpfit.dataset import Layout
from warpfit.expressions import reference
from warpfit.ir import Population
from warpfit.ops import OPERATORS
from warpfit.searching import Form, SearchRequest
from warpfit_server import limits
from warpfit_server.engine.cpu import pairs
from warpfit_server.engine.cpu.pairs import CpuWeigher
from warpfit_server.engine.interface import run_to_end
from warpfit_server.engine.search.colony import factor_exponents
from warpfit_server.engine.search.library import Fit, formulas_of, library, relevant
from warpfit_server.engine.search.pairs import PairSearch
from warpfit_server.limits import pair_search_bytes, search_bytes

NAMES = ("add", "sub", "mul", "div", "square", "sqrt", "exp", "log", "sin", "asin", "tanh")
X = np.random.default_rng(0).uniform(1.0, 3.0, (60, 3)).T
WEIGHTS = np.full(60, 1 / 60)
NONE = formulas_of([])


@pytest.fixture(scope="module")
def weigher():
    weigher = CpuWeigher(2)
    yield weigher
    weigher.close()


def computed(formulas, X=X):
    with np.errstate(all="ignore"):
        values = [reference.evaluate_program(program, X) for program in formulas]
    return np.array(values).reshape(len(formulas), X.shape[1])


def search_of(weigher, target, **options):
    def values(formulas):
        yield None
        return computed(formulas)

    given = {
        "operators": dict.fromkeys(NAMES, 1.0), "columns": range(3), "X": X, "target": target,
        "weights": None, "values": values, "weigher": weigher, "width": 25, "size": 900,
        "admissible": lambda formulas: np.ones(len(formulas), bool),
    }  # fmt: skip
    search = PairSearch(**(given | options))
    run_to_end(search.prepare())
    return search


def unexplained(formulas, target, weights=WEIGHTS, scaled=True):
    """Least part of the target's variance that a + b f leaves, or f; 9 without formulas."""
    values, mean = computed(formulas), weights @ target
    if scaled:
        centred = values - (values @ weights)[:, None]
        slopes = centred * weights @ (target - mean) / (centred**2 @ weights)
        values = mean + slopes[:, None] * centred
    errors = ((values - target) ** 2 @ weights) / (weights @ (target - mean) ** 2)
    return float(np.nanmin([9.0, *errors]))


LAWS = "1/(x1 + 2*square(x2))", "asin(x1/(5*x2))", "x3*(x1 - x2)*(sin(x1) + 2.5)"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("text", "most", "options"),
    [
        *((text, 1e-12, {}) for text in LAWS),
        # A plain formula has its slope and intercept in it.
        *((text, 1e-12, {"form": Form.PLAIN}) for text in ("2.5*x1*sin(x2) + 3", LAWS[0], "x1/x2")),
        # The library has no 1/f of this f, but f.
        ("sin(x2) + 2.5/(square(x3) + square(x1))", 1e-12, {}),
        # Factors inside of functions are found up to a fit.
        ("square(x3)*(exp(0.37*x1*x2/x3) + 2)", 1e-6, {"size": 1_800}),
    ],
)
def test_pairs_find_products_and_sums_inside_of_outer_functions(weigher, text, most, options):
    target = reference.evaluate_program(parse(text), X)
    search, scaled = search_of(weigher, target, **options), "form" not in options
    found = (run_to_end(search.step(NONE)) for _ in range(30))
    assert any(unexplained(each, target, scaled=scaled) < most for each in found)


def test_rules_and_operators_are_kept_to(weigher):
    sine = OPERATORS["sin"].code

    def admissible(formulas):
        owners = np.repeat(np.arange(len(formulas)), formulas.lengths)
        return np.bincount(owners[formulas.codes == sine], minlength=len(formulas)) <= 1

    operators = {name: float(name != "tanh") for name in NAMES}
    target = reference.evaluate_program(parse("sin(x1)*sin(x2) + tanh(x3)"), X)
    search = search_of(weigher, target, operators=operators, admissible=admissible, width=9)
    for _ in range(10):
        found = run_to_end(search.step(NONE))
        assert admissible(found).all()
        assert found.lengths.max(initial=0) <= 9
        assert OPERATORS["tanh"].code not in found.codes


@pytest.mark.parametrize("names", [("add",), ("mul",), ("exp", "sin"), ("sub", "div")])
def test_a_search_works_with_any_operators(weigher, names):
    target = X[0] * X[1] if "mul" in names else X[0] + X[1]
    search = search_of(weigher, target, operators=dict.fromkeys(names, 1.0), size=200)
    found = [run_to_end(search.step(search.library[:20])) for _ in range(8)]
    codes = {OPERATORS[name].code for name in names}
    assert {code for part in found for code in part.codes.tolist() if code >= 16} <= codes
    if names in (("add",), ("mul",)):
        assert min(unexplained(part, target) for part in found) < 1e-12
    assert run_to_end(search.sums(NONE)) == []


@pytest.mark.parametrize(
    "target", [np.ones(60), np.where(np.arange(60) == 3, 1e9, 0.0), 1e-200 * X[0], 1e150 * X[0]]
)
def test_odd_targets_give_formulas_or_none(weigher, target):
    search = search_of(weigher, target, size=200)
    for _ in range(6):
        assert isinstance(run_to_end(search.step(search.library[:5])), Population)
    run_to_end(search.sums(NONE))


def test_the_same_search_is_made_again_and_every_pair_is_counted(weigher):
    target = reference.evaluate_program(parse("x1*sin(x2)*(x3 + x1)"), X)
    one, other = (search_of(weigher, target) for _ in range(2))
    for _ in range(6):
        found = [run_to_end(own.step(own.library[40:60])).texts() for own in (one, other)]
        assert found[0] == found[1]
    assert one.pairs == other.pairs > 6 * 256 * len(one.known) // 2


def test_weights_are_those_of_the_rows(weigher):
    """Rows with wrong targets and hardly a weight change nothing."""
    target = X[0] ** 2 * np.sin(X[1])
    weights = np.ones(60)
    weights[::7] = 1e-14
    wrong = np.where(weights < 1, 5.0, target)
    found = run_to_end(search_of(weigher, wrong, weights=weights).step(NONE))
    assert unexplained(found, target, weights / weights.sum()) < 1e-9


def test_a_search_takes_no_more_memory_than_is_admitted(weigher, monkeypatch):
    rows, size = 60, 2_000
    monkeypatch.setattr(limits, "WEIGHER_BYTES", 4 << 20)
    rng = np.random.default_rng(3)
    X = rng.uniform(1.0, 3.0, (3, rows))

    def values(formulas):
        yield None
        return rng.normal(3.0, 1.0, (len(formulas), rows))  # all differ, so that none is left out

    tracemalloc.start()
    try:
        target = np.exp(X[0]) + rng.normal(size=rows)
        search = search_of(weigher, target, X=X, values=values, size=size)
        for _ in range(8):
            run_to_end(search.step(search.library[:20]))
        run_to_end(search.sums(NONE))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert pair_search_bytes(rows, size) // 8 < most < pair_search_bytes(rows, size)
    layout = Layout(rows=512, variables=3, has_target=True, dtype=np.float64)
    asked = (SearchRequest(bytes(32), pairs=pairs, max_generations=1) for pairs in (True, False))
    with_pairs, without = (search_bytes(each, layout) for each in asked)
    assert with_pairs - without == pair_search_bytes(512), "which is admitted with a search"


def test_sums_take_terms_one_after_the_other_and_stop_where_noise_begins(weigher):
    law = reference.evaluate_program(parse("2*x1 - 3*x2 + square(x3)/2"), X)
    noise = np.random.default_rng(1).normal(0.0, 0.1, 60)
    found = run_to_end(search_of(weigher, law + noise).sums(NONE))
    assert [s.terms for s in found if s.kind == "variables"] == [1, 2, 3]
    assert [s.terms for s in found if s.kind == "terms"][:4] == [1, 2, 3, 4]
    best = min(found, key=lambda s: s.score)
    assert best.terms == 3
    values = np.vstack([computed(best.formula), np.ones(60)])
    assert np.linalg.lstsq(values.T, law)[1][0] < 60 * 0.06**2
    # Parts of other formulas are terms, too, and the formulas are paired.
    target = reference.evaluate_program(parse("sin(x1 + exp(3.7*x2))*2 + x3"), X)
    other = Population.of([parse("sqrt(2 - sin(x1 + exp(3.7*x2)))"), parse("x1")])
    search = search_of(weigher, target)
    assert min(s.score for s in run_to_end(search.sums(other))) < -500
    paired = run_to_end(search.step(Population.of([parse("sin(x1 + exp(3.7*x2))")])))
    assert unexplained(paired, target) < 1e-12


def test_libraries_are_short_and_have_products_sums_and_functions():
    found = run_to_end(library(NAMES, range(3), 700))
    texts = {*found.texts()}
    assert 500 < len(texts) <= len(found) <= 700
    assert {"x1", "x1 - x2", "x1 / x2", "x3 ^ 2", "x1 * x2 / x3"} <= texts
    assert {"1 - x1 * x2", "exp(x1 / x2)", "(1 + x3) ^ 2"} <= texts
    assert np.all(np.diff(found.lengths.astype(int)) >= 0)
    few = run_to_end(library(("exp",), [4, 7], 50))
    assert {"x5", "x8", "exp(x5)"} <= {*few.texts()}


def test_relevant_variables_are_those_of_the_target_or_of_its_square():
    rng = np.random.default_rng(4)
    columns = rng.normal(size=(20, 400))
    target = 3 * columns[4] + columns[9] ** 2 + columns[12] * columns[17]
    assert {4, 9} <= {*run_to_end(relevant(columns, target, 4)).tolist()}
    # Only one of the three correlations sees these.
    evenly = np.abs(columns[9]).argsort().argsort() + 0.0
    assert run_to_end(relevant(columns, evenly, 1)).tolist() == [9]
    assert run_to_end(relevant(columns, columns[12] * columns[17], 2)).tolist() == [12, 17]
    assert run_to_end(relevant(columns[:3], target, 4)).tolist() == [0, 1, 2]


def test_factors_are_the_variables_that_a_target_is_a_product_of_powers_in():
    noise = 1.0 + 0.001 * np.random.default_rng(2).normal(size=60)
    target = X[0] ** 2 / np.sqrt(X[1]) * (1.0 + np.sin(X[2])) * noise
    assert factor_exponents(X, target, WEIGHTS) == {0: 2.0, 1: -0.5}
    assert factor_exponents(X, [1.0, 2.0, 3.0] @ X, WEIGHTS) == {}


def test_the_first_of_equal_pairs_are_kept_whatever_tiles_they_are_in(weigher):
    left, right, rng = drawn(3, 1, 1, 64)
    weights = np.full(64, 1 / 64)
    fit = Fit.of(standardised(rng.normal(size=64), weights), weights, np.empty((0, 64)), True)
    given = np.tile(left, (4, 1)), [np.tile(right, (1_300, 1))]
    _, one, other = run_to_end(weigher.best(fit, *given, 1_200))
    assert (one == 0).all()
    assert other.tolist() == [*range(1_200)]


@pytest.mark.parametrize("noise", [0.0, 0.03, 1.0])
@pytest.mark.parametrize("is_product", [True, False])
def test_results_depend_neither_on_threads_nor_on_tiles(weigher, monkeypatch, noise, is_product):
    left, right, rng = drawn(1, 256, 2_000, 160, 0.5)
    weights = np.full(160, 1 / 160)
    law = left[3] * right[1_800].astype(float) + noise * rng.normal(size=160)
    fit = Fit.of(standardised(law, weights), weights, np.empty((0, 160)), is_product)
    usual = run_to_end(weigher.best(fit, left, [right], 100))
    monkeypatch.setattr(pairs, "_RIGHT_TILE", 300)
    with closing(CpuWeigher(1)) as single:
        other = run_to_end(single.best(fit, left, [right], 100))
    for one, two in zip(usual, other, strict=True):
        np.testing.assert_array_equal(one, two)
