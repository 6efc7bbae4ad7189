"""Tests of a `Weigher`, which run on every engine; a module that imports them has ``weigher``."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from warpfit_server.engine.interface import run_to_end
from warpfit_server.engine.search.library import Fit

Floats = NDArray[np.float64]


def plain_errors(target, weights, base, left, right, *, is_product, beside=True):
    """Return the error of each pair of u [left, rows] and v [right, rows], with weights of sum 1.

    It is infinite for what hardly varies beside the others, and if u alone explains the target.
    Pairs are a + c u + b u v, or a + c u + b v if there is no product; c u may be left out.
    Formulas of the base [formulas, rows] are fitted beside each.
    """
    roots, errors = np.sqrt(weights), np.full((len(left), len(right)), np.inf)
    for i, u in enumerate(left.astype(float)):
        basis = [np.ones_like(u), *base, *([u] if beside or not is_product else [])]
        # Columns of length 1, so that `lstsq` leaves out what is a rounding error of the others.
        design = np.array(basis).T * roots[:, None]
        design = design / np.linalg.norm(design, axis=0)
        rest = target * roots
        rest = rest - design @ np.linalg.lstsq(design, rest, rcond=1e-7)[0]
        if rest @ rest <= 1e-12:
            continue
        for j, v in enumerate(right.astype(float)):
            f = (u * v if is_product else v) * roots
            alone = f - design @ np.linalg.lstsq(design, f, rcond=1e-7)[0]
            if alone @ alone > 1e-4 * (f @ f):
                whole = np.column_stack([design, f / np.linalg.norm(f)])
                fitted = np.linalg.lstsq(whole, target * roots, rcond=1e-7)[0]
                errors[i, j] = np.square(target * roots - whole @ fitted).sum()
    return errors


def plain_best(errors: Floats, count: int) -> tuple[Floats, NDArray[np.int64], NDArray[np.int64]]:
    """Return the least finite errors, and the places of their pairs; ties by their order."""
    order = np.argsort(errors.ravel(), kind="stable")[:count]
    order = order[np.isfinite(errors.ravel()[order])]
    return (errors.ravel()[order], *np.divmod(order, errors.shape[1]))


def drawn(seed, left, right, rows, tails=1.0, constants=0.0):
    """Draw values of formulas with root mean square 1, a part of them constant."""
    rng = np.random.default_rng(seed)
    sizes = (left + right, 1)
    values = np.exp(tails * rng.normal(size=(left + right, rows))) * rng.choice([-1, 1], sizes)
    values += rng.normal(size=sizes)
    values[rng.random(left + right) < constants] = 1.0
    values /= np.sqrt(np.mean(values**2, axis=1))[:, None]
    values = values.astype(np.float32)
    return values[:left], values[left:], rng


def standardised(target, weights):
    target = target - weights @ target
    return target / np.sqrt(weights @ target**2)


@settings(
    deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 1000),
    rows=st.sampled_from([7, 33, 100, 160]),
    sizes=st.tuples(st.integers(1, 12), st.integers(1, 60)),
    count=st.sampled_from([1, 5, 40]),
    noise=st.sampled_from([0.0, 1e-3, 1.0]),
    weighted=st.booleans(),
    bases=st.integers(0, 1),
    kind=st.sampled_from(["product", "product beside u", "sum"]),
)
def test_the_best_pairs_are_those_of_least_squares_one_by_one(
    weigher, seed, rows, sizes, count, noise, weighted, bases, kind
):
    left, right, rng = drawn(seed, *sizes, rows, constants=0.1)
    weights = rng.uniform(0.1, 2.0, rows) if weighted else np.ones(rows)
    weights /= weights.sum()
    base = rng.normal(size=(bases, rows))
    law = left[-1].astype(float) * right[-1] if kind != "sum" else left[-1] + 2.0 * right[-1]
    target = standardised(law + noise * rng.normal(size=rows), weights) if law.std() else law - law
    is_product, beside = kind != "sum", kind != "product"
    fit = Fit.of(target, weights, base, is_product, beside)
    errors, one, other = run_to_end(weigher.best(fit, left, [weigher.prepared(right)], count))
    plain = plain_errors(target, weights, base, left, right, is_product=is_product, beside=beside)
    want, _, _ = plain_best(plain, count)
    assert len(errors) == len(want)
    np.testing.assert_allclose(errors, want, rtol=1e-7, atol=1e-12)
    np.testing.assert_allclose(plain[one, other], errors, rtol=1e-7, atol=1e-12)
    assert np.all(np.diff(errors) >= 0)
    assert len({*zip(one.tolist(), other.tolist(), strict=True)}) == len(one)


def test_equal_pairs_are_kept_in_their_order(weigher):
    left, right, rng = drawn(3, 4, 5, 64)
    right = np.tile(right[-1:], (300, 1))
    weights = np.full(64, 1 / 64)
    target = standardised(rng.normal(size=64), weights)
    fit = Fit.of(target, weights, np.empty((0, 64)), is_product=True)
    _, one, other = run_to_end(weigher.best(fit, left, [weigher.prepared(right)], 20))
    assert other.tolist() == [*range(20)]
    assert len(set(one.tolist())) == 1


def test_places_count_through_all_parts_and_tiles(weigher):
    left, right, _ = drawn(5, 3, 1_500, 48, 0.5)
    weights = np.full(48, 1 / 48)
    fit = Fit.of(
        standardised(left[1] * right[1_400].astype(float), weights),
        *(weights, np.empty((0, 48)), True),
    )
    parts = [weigher.prepared(part) for part in (right[:700], right[700:700], right[700:])]
    errors, one, other = run_to_end(weigher.best(fit, left, parts, 3))
    assert (one[0], other[0]) == (1, 1_400)
    assert errors[0] < 1e-12 < errors[1]


@pytest.mark.parametrize("size", [1e-3, 1e-6])
def test_neither_tiny_nor_huge_values_win(weigher, size):
    """A constant with rounding errors is scaled to anything; one value of thousands fits a row."""
    rng, rows = np.random.default_rng(0), 64
    weights = np.full(rows, 1 / rows)
    target = standardised(rng.normal(size=rows), weights)
    nearly = (1.0 + size * target)[None].astype(np.float32)
    fit = Fit.of(target, weights, np.empty((0, rows)), is_product=False)
    ones = np.ones((1, rows), np.float32)
    errors, *_ = run_to_end(weigher.best(fit, ones, [weigher.prepared(nearly)], 5))
    assert len(errors) == 0
    spike = np.full((1, rows), 1e-6, np.float32)
    spike[0, 5] = np.sqrt(rows)
    errors, *_ = run_to_end(weigher.best(fit, ones, [weigher.prepared(spike)], 5))
    np.testing.assert_allclose(errors, 1 - target[5] ** 2 / (rows - 1), rtol=1e-5)
