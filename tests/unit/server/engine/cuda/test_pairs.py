"""Pairs of a GPU's weigher, run on this machine's CPU, and searches of its engine on the host."""

from contextlib import closing

import numpy as np
import pytest

from support.emulators.host_device import install
from support.engines.searches import Searches, front_of
from support.suites.pairs import *  # noqa: F403
from support.suites.pairs import drawn, standardised
from warpfit.dataset import Dataset
from warpfit.parse import parse
from warpfit.searching import SearchReason
from warpfit_server.engine.cpu.engine import CpuEngine
from warpfit_server.engine.cpu.pairs import CpuWeigher
from warpfit_server.engine.cuda import colony
from warpfit_server.engine.cuda.colony import CudaWeigher
from warpfit_server.engine.cuda.engine import HostSearches
from warpfit_server.engine.cuda.runtime.device import CudaDevice
from warpfit_server.engine.evaluation import LoadedDatasets
from warpfit_server.engine.interface import run_to_end
from warpfit_server.engine.search.library import Fit


@pytest.fixture(scope="module", params=[True, False], ids=["float64", "float32"])
def weigher(request):
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        sizes = {"_LEFT_TILE": 64, "_RIGHT_TILE": 96, "_CAPACITY": 96, "_BLOCKS": 3}
        for name, size in sizes.items():
            patch.setattr(colony, name, size)
        if not request.param:
            patch.setattr(colony, "_HAVE_DOUBLES", frozenset())
        with closing(CudaWeigher(CudaDevice())) as weigher:
            yield weigher


@pytest.mark.parametrize("is_product", [True, False])
@pytest.mark.parametrize("copies", [1, 200])
def test_more_pairs_than_there_is_room_for_change_nothing(weigher, is_product, copies):
    """Many pairs are equal if there are copies of a formula."""
    left, right, rng = drawn(6, 40, 230, 64, 0.5)
    right[:copies] = right[0]
    weights = np.full(64, 1 / 64)
    law = left[30] * right[0].astype(float) + 0.1 * rng.normal(size=64)
    fit = Fit.of(standardised(law, weights), weights, np.empty((0, 64)), is_product)
    errors, one, other = run_to_end(weigher.best(fit, left, [weigher.prepared(right)], 90))
    with closing(CpuWeigher(1)) as cpu:
        want = run_to_end(cpu.best(fit, left, [right], 90))
    np.testing.assert_allclose(errors, want[0], rtol=1e-9)
    if copies == 1:
        np.testing.assert_array_equal(one, want[1])
        np.testing.assert_array_equal(other, want[2])


def test_memory_is_what_was_said(weigher):
    left, right, rng = drawn(7, 64, 300, 96)
    weights = np.full(96, 1 / 96)
    fit = Fit.of(standardised(rng.normal(size=96), weights), weights, np.empty((0, 96)), True)
    held = weigher.prepared(right)
    run_to_end(weigher.best(fit, left, [held], 50))
    own = sum(memory.mem.size for memory in weigher._memory.values())
    assert own <= weigher.bytes_needed(96, 50) + 512 * len(weigher._memory)


@pytest.fixture(scope="module")
def host():
    with closing(HostSearches(1)) as searches:
        yield searches


@pytest.fixture(scope="module")
def engine():
    with closing(CpuEngine(threads=1)) as engine:
        yield engine


def data() -> Dataset:
    X = np.random.default_rng(0).uniform(0.5, 3.0, (80, 3))
    return Dataset.of(X, 2 * np.exp(-np.square(X[:, 0] * X[:, 1])) + 1, dtype="float64")


@pytest.mark.parametrize(
    ("operators", "given"),
    [
        (("mul", "add", "bump"), {"definitions": {"bump": parse("exp(-x1^2)")}}),
        (("mul", "add", "exp"), {"monotonic": {2: 1}}),
    ],
)
def test_it_is_the_search_of_a_cpu(engine, host, operators, given):
    table = data()
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
    assert not HostSearches.are_needed(Searches(engine).request(table)), "a device searches then"


def test_it_ends_when_it_is_cancelled(engine, host):
    table = data()
    asked = Searches(engine).request(table, monotonic={0: 1}, max_generations=10**6)
    datasets, flag = LoadedDatasets(engine), np.ones(1, np.uint8)
    datasets.load(table)
    steps = host.search(asked, datasets, cancelled=flag, report=lambda progress: None)
    assert run_to_end(steps).reason is SearchReason.CANCELLED
    datasets.unload(table.content_id)
