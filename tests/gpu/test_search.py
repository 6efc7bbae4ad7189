"""Searches on a device: a seed gives one search, rules hold in every row, and laws are found."""

from __future__ import annotations

import numpy as np
import pytest

from support.engines.searches import Searches
from support.suites.searches import *  # noqa: F403
from warpfit.dataset import Dataset
from warpfit.searching import Front, Rules, SearchReason, SearchRequest
from warpfit_server.engine.cuda.engine import CudaEngine
from warpfit_server.engine.evaluation import LoadedDatasets
from warpfit_server.engine.interface import run_to_end


def searched(engine: CudaEngine, *, rows: int = 700, **options: object) -> Front:
    rng = np.random.default_rng(5)
    X = rng.uniform(0.3, 3, (rows, 6))
    y = X[:, 0] * np.exp(-X[:, 1]) + 0.5 * X[:, 2] ** 2 + 0.01 * rng.normal(size=rows)
    data = Dataset.of(X, y, dtype=np.float64)
    engine.load(data)
    try:
        request = SearchRequest(data.content_id, **options)  # type: ignore[arg-type]
        datasets = LoadedDatasets(engine, {data.content_id: data})
        cancelled = np.zeros(1, np.uint8)
        found = run_to_end(
            engine.search(request, datasets, cancelled=cancelled, report=lambda progress: None)
        )
        assert found.formulas > 0
        return found.front
    finally:
        engine.unload(data.content_id)


@pytest.mark.parametrize("population", [96, 5000, 1 << 17])
def test_a_seed_gives_the_same_search(engine: CudaEngine, population: int):
    options = {"max_generations": 24, "population": population, "islands": 3, "pairs": False}
    first, second = (searched(engine, seed=3, **options) for _ in range(2))
    np.testing.assert_array_equal(first.batch.codes, second.batch.codes)
    np.testing.assert_array_equal(first.losses, second.losses)


def test_rules_hold_in_every_row(engine: CudaEngine):
    rules = Rules(max_size=9, max_depth=4, counts={"exp": 0}, nesting={("sin", "sin"): 0})
    front = searched(engine, rules=rules, max_generations=20, population=4096)
    assert (front.sizes <= 9).all()
    for index in range(len(front.sizes)):
        assert "exp" not in str(front.batch.program(index))


def test_a_law_is_found(engine: CudaEngine):
    front = searched(engine, max_generations=150, seed=1)
    assert front.losses.min() < 1.2e-4  # the noise has 1e-4


def test_a_large_search_meets_a_target_loss(engine: CudaEngine):
    """On all rows, of which it screens some."""
    rng = np.random.default_rng(2)
    X = rng.uniform(0.3, 3.0, size=(5_000, 4))
    data = Dataset.of(X, X[:, 0] * X[:, 1] - np.square(X[:, 2]), dtype="float32")
    found = Searches(engine)(
        data, population=1 << 16, islands=0, max_generations=500, target_loss=1e-6
    )
    assert found.reason is SearchReason.TARGET_LOSS
    assert found.generations < 500
