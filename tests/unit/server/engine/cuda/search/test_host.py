"""Searches of a GPU's engine that run on its host; no device is needed for them."""

from __future__ import annotations

import numpy as np
import pytest

from support.engines.searches import Searches, front_of
from warpfit.dataset import Dataset
from warpfit.parse import parse
from warpfit.searching import SearchReason
from warpfit_server.engine.cpu.engine import CpuEngine
from warpfit_server.engine.cuda.search.host import HostSearches
from warpfit_server.engine.evaluation import LoadedDatasets
from warpfit_server.engine.interface import run_to_end


@pytest.fixture(scope="module")
def host():
    searches = HostSearches(1)
    yield searches
    searches.close()


@pytest.fixture(scope="module")
def engine():
    engine = CpuEngine(threads=1)
    yield engine
    engine.close()


def data() -> Dataset:
    X = np.random.default_rng(0).uniform(0.5, 3.0, (80, 3))
    return Dataset.of(X, 2 * np.exp(-np.square(X[:, 0] * X[:, 1])) + 1, dtype="float64")


OPTIONS = {"definitions": {"bump": parse("exp(-x1^2)")}, "monotonic": {2: 1}}


@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_the_search_of_a_cpu(engine, host, name):
    table, given = data(), {name: OPTIONS[name]}
    operators = ("mul", "add", "bump") if name == "definitions" else ("mul", "add", "exp")
    asked = Searches(engine).request(table, operators, **given)
    assert HostSearches.are_needed(asked)
    datasets, reports = LoadedDatasets(engine), []
    datasets.load(table)
    flag = np.zeros(1, np.uint8)
    found = run_to_end(host.search(asked, datasets, cancelled=flag, report=reports.append))
    datasets.unload(table.content_id)
    assert front_of(found) == front_of(Searches(engine)(table, operators, **given))
    assert found.reason is SearchReason.GENERATIONS
    assert reports


def test_it_ends_when_it_is_cancelled(engine, host):
    table = data()
    asked = Searches(engine).request(table, monotonic={0: 1}, max_generations=10**6)
    datasets, flag = LoadedDatasets(engine), np.ones(1, np.uint8)
    datasets.load(table)
    steps = host.search(asked, datasets, cancelled=flag, report=lambda progress: None)
    assert run_to_end(steps).reason is SearchReason.CANCELLED
    datasets.unload(table.content_id)


def test_a_device_searches_for_all_else(engine):
    assert not HostSearches.are_needed(Searches(engine).request(data()))
