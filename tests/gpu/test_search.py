"""Searches on a device: a seed gives one search, rules hold in every row, and laws are found."""

import numpy as np
import pytest

from support.engines.searches import Searches, front_of
from support.suites.searches import *  # noqa: F403
from warpfit.dataset import Dataset
from warpfit.searching import DEFAULT_OPERATORS, SearchReason


@pytest.fixture
def searched(engine):
    """Return a function that searches for a law with noise, and checks the front."""
    rng = np.random.default_rng(5)
    X = rng.uniform(0.3, 3, (700, 6))
    y = X[:, 0] * np.exp(-X[:, 1]) + 0.5 * X[:, 2] ** 2 + 0.01 * rng.normal(size=700)
    data = Dataset.of(X, y, dtype="float64")
    usual = {"population": 0, "islands": 0, "pairs": True, "fit_iterations": 15}
    return lambda **given: Searches(engine)(data, DEFAULT_OPERATORS, **(usual | given))


@pytest.mark.parametrize("population", [96, 5000, 1 << 17])
def test_a_seed_gives_the_same_search(searched, population):
    options = {"max_generations": 24, "population": population, "islands": 3, "pairs": False}
    first, second = (front_of(searched(seed=3, **options)) for _ in range(2))
    assert first == second


def test_rules_hold_in_every_row(searched):
    counts = {"exp": 0}
    rules = {"max_size": 9, "max_depth": 4, "counts": counts, "nesting": {("sin", "sin"): 0}}
    searched(rules=rules, max_generations=20, population=4096)


def test_a_law_is_found(searched):
    found = searched(max_generations=150, seed=1)
    assert found.front.losses.min() < 1.2e-4  # the noise has 1e-4


def test_a_large_search_meets_a_target_loss(engine):
    """On all rows, of which it screens some."""
    X = np.random.default_rng(2).uniform(0.3, 3.0, size=(5_000, 4))
    data = Dataset.of(X, X[:, 0] * X[:, 1] - np.square(X[:, 2]), dtype="float32")
    options = {"population": 1 << 16, "islands": 0, "max_generations": 500}
    found = Searches(engine)(data, target_loss=1e-6, **options)
    assert found.reason is SearchReason.TARGET_LOSS
    assert found.generations < 500
