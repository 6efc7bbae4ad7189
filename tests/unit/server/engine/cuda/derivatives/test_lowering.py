"""Lowering of programs with derivatives for the GPU's interpreter, on several threads."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from support.random_programs import thesis_mix
from support.servers.server import eventually
from warpfit.errors import ProgramError, ResourceExhaustedError
from warpfit.ir import Batch, Program
from warpfit.losses import ABSOLUTE, DIFFERENCE, huber
from warpfit.ops import OPERATORS
from warpfit_server.engine import autodiff
from warpfit_server.engine.cuda.derivatives import launches, lowering
from warpfit_server.engine.cuda.derivatives.tier import DerivativeTier
from warpfit_server.engine.interface import Steps, run_to_end

VARIABLES = 10
_FIT = autodiff.BY_PARAMETERS | autodiff.LOSS_DERIVATIVE
_ALL = autodiff.BY_PARAMETERS | autodiff.BY_VARIABLES
#: Row loss, whether it has weights, and requested bits of fits, gradients, Jacobians and losses.
WORK = {
    "fit": (DIFFERENCE, False, _FIT | autodiff.SQUARES),
    "gradient": (ABSOLUTE, False, _FIT),
    "own loss": (huber(0.5).row, True, _ALL | autodiff.LOSS | autodiff.LOSS_DERIVATIVE),
    "loss": (huber(0.5).row, True, autodiff.LOSS),
    "jacobian": (None, False, _ALL),
}


@pytest.fixture(scope="module")
def alone():
    return lowering.DerivativeLowering(threads=1)


@pytest.fixture(scope="module")
def shared():
    return lowering.DerivativeLowering(threads=4)


def lower(lowering, batch, work):
    code, made = run_to_end(begin(lowering, batch, work))
    assert made == "meanwhile"
    return code


def begin(lowering: lowering.DerivativeLowering, batch: Batch, work: str) -> Steps:
    row_loss, weighted, requested = WORK[work]
    tokens = (
        autodiff.row_loss_tokens(row_loss, VARIABLES, weighted=weighted)
        if row_loss
        else autodiff.no_row_loss()
    )
    options = {"keeps_values": work != "loss", "products": False, "meanwhile": lambda: "meanwhile"}
    return lowering.lower(batch, VARIABLES, tokens, requested, **options)


def code_of(code: lowering.DerivativeCode, index: int) -> list[np.ndarray]:
    record = code.programs[index]

    names = ("invariants", "levels", "result", "loss", "slope")
    found = [np.array([record[name] for name in names])]
    for name, words, first, count in (
        ("instructions", 4, "first", "count"),
        ("instructions", 4, "prologue", "prologue_count"),
        *((name, 2, "load", "loads") for name in ("loads", "constants")),
        *(("columns", 1, "column", "columns"), ("entries", 3, "entry", "entries")),
    ):
        rows = code.arrays[name].view(np.uint32).reshape(-1, words)
        found.append(rows[int(record[first]) :][: int(record[count])])
    return found


def assert_same(found: lowering.DerivativeCode, expected: lowering.DerivativeCode) -> None:
    for index in range(len(expected.programs)):
        for one, other in zip(code_of(found, index), code_of(expected, index), strict=True):
            np.testing.assert_array_equal(one, other)


def test_callers_at_the_same_time_get_their_own_code(alone, shared):
    """Four callers share four helpers; what the code computes, the kernels on the CPU tell."""
    batches = [Batch.of(*thesis_mix(seed, 30, variables=VARIABLES)) for seed in range(10)]
    with ThreadPoolExecutor(4) as callers:
        codes = list(callers.map(lower, [shared] * 10, batches, list(WORK) * 2))
    for code, batch, work in zip(codes, batches, list(WORK) * 2, strict=True):
        assert_same(code, lower(alone, batch, work))


def test_a_large_batch_is_lowered_by_helpers_in_steps(alone, shared, monkeypatch):
    """The engine's thread goes on with other requests meanwhile."""
    monkeypatch.setattr(lowering, "_TOKENS_AT_ONCE", 100)
    monkeypatch.setattr(lowering, "_TOKENS_A_STEP", 500)
    batch = Batch.of(*thesis_mix(3, 200, variables=VARIABLES))
    expected, steps, seen = lower(alone, batch, "gradient"), begin(shared, batch, "gradient"), []
    with pytest.raises(StopIteration) as end:
        while True:
            found = next(steps)
            seen.append("pause" if found is None else "helpers")
            if found is not None:
                eventually(found.done, 100)  # nobody helps them
    assert_same(end.value.value[0], expected)
    assert len(seen) > 4
    assert seen == ["helpers", *["pause", "helpers"] * (len(seen) // 2)]
    steps = begin(shared, batch, "gradient")
    next(steps)
    steps.close()  # waits for the helpers, which write to the arrays
    assert_same(lower(shared, batch, "gradient"), expected)


@pytest.mark.parametrize("at_once", [10**6, 10])
def test_the_first_bad_token_of_a_batch_is_named(shared, monkeypatch, at_once):
    monkeypatch.setattr(lowering, "_TOKENS_AT_ONCE", at_once)
    batch = Batch.of(*thesis_mix(3, 200))
    codes = batch.codes.copy()
    for program in (61, 130):
        codes[batch.starts[program]] = 255
    with pytest.raises(ProgramError) as caught:
        lower(shared, replace(batch, codes=codes), "gradient")
    assert caught.value.expression == 61


def test_what_kernels_cannot_address_is_refused(alone):
    """The backward pass reads each factor of the product again: too many levels."""
    count = 70_000
    codes = np.tile([1, 2, OPERATORS["mul"].code, OPERATORS["sin"].code], count)
    codes = np.concatenate([codes, np.full(count - 1, OPERATORS["mul"].code)]).astype(np.uint8)
    values = np.zeros(len(codes))
    values[0 : 4 * count : 4] = np.arange(count) % VARIABLES
    values[1 : 4 * count : 4] = np.arange(count)
    batch = Batch.of([Program(codes, values)], [np.ones(count)])
    launches.check_memory(8 * 1_000_000, 0)
    for refused in (
        lambda: lower(alone, batch, "fit"),
        # Thirty thousand parameters have a normal matrix of 3.6 GB.
        lambda: launches.check_memory(8 * 300_000_000, 0),
    ):
        with pytest.raises(ResourceExhaustedError) as caught:
            refused()
        assert caught.value.reason == "PROGRAM_TOO_LONG"


@pytest.fixture(scope="module", autouse=True)
def loaded():
    """No call compiles for other types than those that are loaded at the start."""
    launches.load()
    functions = [getattr(lowering, name) for name in ("count_sums", "fill_starts")]
    names = "measure_programs end_of_chunk order_jobs plan_jobs"
    functions += [getattr(launches, name) for name in names.split()]
    yield
    assert all(len(function.signatures) == 1 for function in functions)


@pytest.mark.parametrize("most_warp", [0, 10**6], ids=["spilling", "not spilling"])
@pytest.mark.parametrize(("count", "most"), [(0.0, 10**12), (0.0, 30_000), (7.3, 10**12)])
def test_jobs_are_cut_by_their_results_and_by_their_work(most_warp, count, most):
    rng, records = np.random.default_rng(3), np.zeros(200, dtype=lowering.PROGRAM)
    for name, below in {"parameters": 5, "columns": 6, "invariants": 9, "levels": 40}.items():
        records[name] = rng.integers(below, size=200)
    records["count"], sums = rng.integers(1, 300, size=200), np.empty(200, dtype=np.int64)
    lowering.count_sums(records, True, sums)
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
