"""All pairs of a library, the library itself, and the layers of a population."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("sklearn")

from warpfit import parse
from warpfit.expressions import reference
from warpfit.ops import OPERATORS
from warpfit.sklearn.genomes import Genomes
from warpfit.sklearn.pairs import (
    PairSearch,
    arguments,
    factor_exponents,
    library,
    structure_length,
    terms_of,
    views,
)
from warpfit.sklearn.search import pareto_layers

NAMES = ("add", "sub", "mul", "div", "square", "sqrt", "exp", "log", "sin", "asin", "tanh")
X = np.random.default_rng(0).uniform(1.0, 3.0, (60, 3))
WEIGHTS = np.full(60, 1 / 60)


def evaluate(genomes):
    return np.array([reference.evaluate_program(p, X.T) for p in genomes.population()])


def search_of(target, most_views=None):
    seeds = library(NAMES, 3, 25, 900)
    seen = list(views(NAMES, X, target, WEIGHTS, 25))[:most_views]
    return PairSearch(NAMES, evaluate, seen, 25, seeds, arguments(NAMES, 3, 25, 60), 15)


def best_errors(text, steps, most_views=None):
    """Least part of the target's variance that a + b f of a pair leaves, step by step."""
    target = reference.evaluate_program(parse(text), X.T)
    search = search_of(target, most_views)
    seeds = search.library
    for _ in range(steps):
        with np.errstate(all="ignore"):
            found = search.step(seeds[:0])
            table = evaluate(found if len(found) else seeds[:1])
            slopes = np.cov(table, target)[-1, :-1] / np.var(table, axis=1, ddof=1)
            errors = target - target.mean() - slopes[:, None] * (table - table.mean(1)[:, None])
            yield float(np.nanmin(np.mean(errors**2, axis=1)) / np.var(target))


@pytest.mark.parametrize(
    "text",
    [
        "square(x1)*sin(x2) + 3",
        "1/(x1 + 2*square(x2))",
        "sqrt(square(x1) + x2*x3)",
        "asin(x1/(5*x2))",
        "x3*(x1 - x2)*(sin(x1) + 2.5)",
    ],
)
def test_pairs_find_products_and_sums_inside_of_outer_functions(text):
    assert any(error < 1e-12 for error in best_errors(text, 25))


def test_sums_take_terms_one_after_the_other_and_stop_where_noise_begins():
    law = parse("2*x1 - 3*x2 + square(x3)/2")
    noise = np.random.default_rng(1).normal(0.0, 0.1, 60)
    found = search_of(reference.evaluate_program(law, X.T) + noise, 1).sums(Genomes.of([]))
    assert [s.terms for s in found if s.kind == "variables"] == [1, 2, 3]
    assert [s.terms for s in found if s.kind == "terms"][:4] == [1, 2, 3, 4]
    best = min(found, key=lambda s: s.score)
    assert best.terms == 3
    values = np.vstack([evaluate(best.genomes), np.ones(60)])
    left = np.linalg.lstsq(values.T, reference.evaluate_program(law, X.T))[1]
    assert left[0] < 60 * 0.06**2
    # Parts of other formulas are terms, too.
    known = parse("sin(x1 + exp(3.7*x2))*2 + x3")
    target = reference.evaluate_program(known, X.T)
    two = search_of(target, 1).sums(Genomes.of([parse("sqrt(2 - sin(x1 + exp(3.7*x2)))")]))
    assert min(s.score for s in two) < -500


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("3*x1 - x2/2 + 7", (1, 1)),
        ("2*(x1*x2 + 1)", (3,)),
        ("exp(x1) + 4*sqrt(x2 + 1)", (2, 4)),
        ("1/x1 - neg(x2)", (3, 1)),
        ("0.5*x1*square(x2) - x1*(3*x2)/4", (4, 3)),  # factors within a product are of the term
        ("sin(2*x1)*3 + 2/x1", (4, 3)),
        ("sqrt(2) + 1", ()),
    ],
)
def test_a_sum_is_as_long_as_its_terms(text, sizes):
    assert terms_of(parse(text)) == sizes
    assert structure_length(sizes, 15) == pytest.approx(
        sum(sizes) * math.log(15) - math.log(math.factorial(len(sizes)))
    )


def test_factors_inside_of_functions_are_found_up_to_a_fit():
    found = best_errors("square(x3)*(exp(0.37*x1*x2/x3) + 2)", 4, most_views=1)
    assert any(error < 1e-6 for error in found)


@pytest.mark.parametrize("text", ["x1*sin(x2)*(x3 + x1)"])
def test_beams_find_what_takes_three_of_the_library(text):
    assert any(error < 1e-12 for error in best_errors(text, 25))


def test_views_leave_out_functions_that_the_target_or_the_operators_do_not_allow():
    names = {view.outer for view in views(NAMES, X, X[:, 0] - 2.0, WEIGHTS, 25)}
    assert ("exp",) not in names
    assert {(), ("inv",)} <= names
    assert {view.outer for view in views(("add",), X, X[:, 0], WEIGHTS, 25)} == {()}


def test_libraries_are_short_and_different_and_have_products_sums_and_functions():
    found = library(NAMES, 3, 25, 700)
    texts = {str(program) for program in found.population()}
    assert 500 < len(texts) == len(found) <= 700
    assert {"x1", "x1 - x2", "x1 / x2", "x3 ^ 2", "x1 * x2 / x3"} <= texts
    assert {"1 - x1 * x2", "exp(x1 / x2)", "(1 + x3) ^ 2"} <= texts
    assert np.all(np.diff(found.sizes) >= 0)
    assert len(library(("exp",), 2, 2, 50)) == 4
    assert OPERATORS["exp"].code in library(("exp",), 2, 2, 50).codes


def test_factors_are_the_variables_that_a_target_is_a_product_of_powers_in():
    noise = 1.0 + 0.001 * np.random.default_rng(2).normal(size=(60,))
    target = X[:, 0] ** 2 / np.sqrt(X[:, 1]) * (1.0 + np.sin(X[:, 2])) * noise
    assert factor_exponents(X, target, WEIGHTS) == {0: 2.0, 1: -0.5}
    assert factor_exponents(X, X @ [1.0, 2.0, 3.0], WEIGHTS) == {}


@settings(deadline=None)
@given(
    pairs=st.lists(
        st.tuples(st.integers(1, 6), st.sampled_from([0.0, 0.5, 1.0, 2.0, 7.5])), max_size=30
    )
)
def test_layers_are_those_of_repeated_peeling(pairs):
    wanted = [-1] * len(pairs)
    layer, left = 0, set(range(len(pairs)))

    def dominates(one, other):
        """As good in both and better in one; of equals the first."""
        (size, loss), (other_size, other_loss) = pairs[one], pairs[other]
        if (size, loss) == (other_size, other_loss):
            return one < other
        return size <= other_size and loss <= other_loss

    while left:
        free = {one for one in left if not any(dominates(other, one) for other in left - {one})}
        for one in free:
            wanted[one] = layer
        layer, left = layer + 1, left - free
    sizes, losses = (np.array(column) for column in zip(*pairs, strict=True)) if pairs else ([], [])
    assert pareto_layers(np.asarray(sizes, int), np.asarray(losses, float)).tolist() == wanted
