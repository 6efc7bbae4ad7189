"""Plans of launches: chunks of jobs, their order, and what programs need."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from warpfit_server.engine.cuda.derivatives import launches, lowering
from warpfit_server.engine.cuda.derivatives.lowering import PROGRAM
from warpfit_server.engine.cuda.derivatives.tier import DerivativeTier
from warpfit_server.engine.interface import run_to_end


@pytest.fixture(scope="module", autouse=True)
def loaded():
    """No call compiles for other types than those that are loaded at the start."""
    launches.load()
    functions = [lowering.count_sums, lowering.fill_starts, launches.measure_programs]
    functions += [launches.end_of_chunk, launches.order_jobs, launches.plan_jobs]
    yield
    assert all(len(function.signatures) == 1 for function in functions)


def some_records(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    records = np.zeros(count, dtype=PROGRAM)
    for name, most in (("parameters", 5), ("columns", 6), ("invariants", 9), ("levels", 40)):
        records[name] = rng.integers(most, size=count)
    records["count"] = rng.integers(1, 300, size=count)
    sums = np.empty(count, dtype=np.int64)
    lowering.count_sums(records, bool(seed % 2), sums)
    return records, sums


@given(st.integers(0, 1000), st.integers(1, 40), st.integers(1, 4))
def test_starts_are_sums_over_the_programs_before(seed, count, vectors):
    records, sums = some_records(seed, count)
    columns, counts = records["columns"].astype(int), records["parameters"].astype(int)
    pairs = columns * (columns + 1) // 2 if seed % 2 else 0
    np.testing.assert_array_equal(sums, 1 + columns + pairs)
    lowering.fill_starts(records, sums, vectors)
    sizes = {"invariant": records["invariants"].astype(int), "parameter": counts, "sum": sums}
    sizes["triangle"] = counts * (counts + 1) // 2
    for name, size in sizes.items():
        np.testing.assert_array_equal(records[name], vectors * (np.cumsum(size) - size))


@given(st.integers(0, 1000), st.integers(1, 40), st.integers(1, 4), st.integers(1, 3000))
def test_chunks_have_as_many_jobs_as_fit(seed, count, vectors, most):
    records, sums = some_records(seed, count)
    counts, costs, first = records["parameters"].astype(int), (7, 8, 3), (0, 0, 0)
    size = np.repeat(costs[0] + costs[1] * sums + costs[2] * counts, vectors)
    while first[0] < count * vectors:
        end = launches.end_of_chunk(records, sums, vectors, first, costs, most)
        chunk = slice(first[0], end[0])
        assert size[chunk].sum() <= most or end[0] == first[0] + 1
        assert end[0] == count * vectors or size[first[0] : end[0] + 1].sum() > most
        assert end[1] - first[1] == np.repeat(sums, vectors)[chunk].sum()
        assert end[2] - first[2] == np.repeat(counts, vectors)[chunk].sum()
        first = end


def test_jobs_of_most_work_come_first():
    records, sums = some_records(1, 500)
    work = np.empty(500, dtype=np.int64)
    need, invariants, total = launches.measure_programs(records, sums, 1024, work)
    np.testing.assert_array_equal(work, records["count"] + sums // 4)
    assert invariants == records["invariants"].sum()
    assert total == work.sum()
    assert need == (-(-sums // 2) * 16 + 1024 * records["levels"].astype(int)).max()
    order = np.empty(600, dtype=np.uint32)
    launches.order_jobs(work, 2, 100, order)
    assert sorted(order.tolist()) == list(range(100, 700))
    falling = work[order // 2]
    assert (np.diff(falling) <= work.max() / 200).all()


@pytest.mark.parametrize("most_warp", [0, 10**6], ids=["spilling", "not spilling"])
@pytest.mark.parametrize(("count", "most"), [(0.0, 10**12), (0.0, 30_000), (7.3, 10**12)])
def test_jobs_are_cut_by_their_results_and_by_their_work(most_warp, count, most):
    records, sums = some_records(3, 200)
    work = records["count"].astype(int) + sums // 4
    order, chunks = np.empty(400, dtype=np.uint32), np.empty(400, launches._CHUNK)
    given = 1024, (7, 8, 3), (most_warp, 16), most, count / int(work.sum()), 2
    need, invariants, number = launches.plan_jobs(records, sums, 2, *given, order, chunks)
    found = [launches.DerivativeChunk(*row) for row in chunks[:number].tolist()]
    assert (need, invariants) == launches.measure_programs(records, sums, 1024, work.copy())[:2]
    ends = [0, *(chunk.end_job for chunk in found)]
    assert ends == [*(chunk.first_job for chunk in found), 400]
    assert found[-1].end_sum == 2 * sums.sum()
    assert found[-1].end_parameter == 2 * records["parameters"].astype(int).sum()
    for chunk in found:
        own = order[chunk.first_job : chunk.end_job]
        assert sorted(own.tolist()) == list(range(chunk.first_job, chunk.end_job))
    if most == 10**12:
        assert len(found) == 1 + int(count)
    else:
        assert len(found) > (100 if most_warp == 0 else 1)


# --------------------------------------------------------------------------------- parts of batches


def test_kernels_for_programs_that_spill_are_loaded_by_another_thread(monkeypatch):
    """The engine's thread goes on with other requests until they are there."""
    compiled, outcomes, loaded = threading.Event(), [MemoryError(), "kernels"], []

    def load(tier, variant, *, spills):
        assert compiled.is_set()
        loaded.append((variant, spills))
        if isinstance(outcome := outcomes.pop(0), Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(DerivativeTier, "_load", load)
    device = SimpleNamespace()
    tier = DerivativeTier(device, 1, lambda: compiled.wait(20))
    plan = SimpleNamespace(variant="any", spills=True)
    first, second = tier._prepare(plan), tier._prepare(plan)
    waits_for = next(first)
    assert next(second) is waits_for
    assert not waits_for.done()
    compiled.set()
    with pytest.raises(MemoryError):  # for which memory was short
        run_to_end(first)
    assert run_to_end(tier._prepare(plan)) == "kernels"
    assert run_to_end(tier._prepare(plan)) == "kernels"
    assert loaded == [("any", True)] * 2
