"""Lowering of programs with derivatives for the GPU's interpreter, on several threads."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.emulators.derivative_machine import ROBUST, Machine
from support.engines.derivative_suite import smooth_programs
from support.engines.strategies import programs
from warpfit.dataset import Layout
from warpfit.errors import ProgramError, ResourceExhaustedError
from warpfit.expressions.reference import differentiate
from warpfit.expressions.workload import thesis_mix
from warpfit.ir import Batch, Program
from warpfit.losses import ABSOLUTE, DIFFERENCE, huber
from warpfit.ops import OPERATORS, VARIABLE
from warpfit.request import Evaluation
from warpfit_server.engine.autodiff.backward_pass import (
    BY_PARAMETERS,
    BY_VARIABLES,
    LOSS,
    LOSS_DERIVATIVE,
    SQUARES,
)
from warpfit_server.engine.autodiff.differentiate import no_row_loss, row_loss_tokens
from warpfit_server.engine.cuda.derivatives import launch_plan
from warpfit_server.engine.cuda.derivatives import lowering as lowering_module
from warpfit_server.engine.cuda.derivatives.encoding import DerivativeCode
from warpfit_server.engine.cuda.derivatives.lowering import DerivativeLowering
from warpfit_server.engine.cuda.interpreter.source import Variant
from warpfit_server.engine.cuda.math.modes import Mode
from warpfit_server.engine.interface import Steps, run_to_end
from warpfit_server.system.compile_cache import default_cache_directory

VARIABLES = 10
#: Variables, the target, and weights.
COLUMNS = np.random.default_rng(1).uniform(0.2, 2, size=(VARIABLES + 2, 30))
#: Row loss, whether it has weights, and requested bits of fits, gradients, Jacobians and losses.
WORK = {
    "fit": (DIFFERENCE, False, BY_PARAMETERS | LOSS_DERIVATIVE | SQUARES),
    "gradient": (ABSOLUTE, False, BY_PARAMETERS | LOSS_DERIVATIVE),
    "own loss": (huber(0.5).row, True, BY_PARAMETERS | BY_VARIABLES | LOSS | LOSS_DERIVATIVE),
    "loss": (huber(0.5).row, True, LOSS),
    "jacobian": (None, False, BY_PARAMETERS | BY_VARIABLES),
}


@pytest.fixture(scope="module")
def alone():
    return DerivativeLowering(default_cache_directory(), threads=1)


@pytest.fixture(scope="module")
def shared():
    return DerivativeLowering(default_cache_directory(), threads=4)


def lower(lowering: DerivativeLowering, batch: Batch, work: str, **options) -> DerivativeCode:
    return run_to_end(begin(lowering, batch, work, **options))


def begin(lowering: DerivativeLowering, batch: Batch, work: str, **options) -> Steps:
    row_loss, weighted, requested = WORK[work]
    tokens = row_loss_tokens(row_loss, VARIABLES, weighted=weighted) if row_loss else no_row_loss()
    options = {"keeps_values": work != "loss", "products": False, **options}
    return lowering.lower(batch, VARIABLES, tokens, requested, **options)


def check(lowering: DerivativeLowering, batch: Batch, work: str) -> None:
    """Compare what the code computes with derivatives in forward mode, program by program."""
    row_loss, _, requested = WORK[work]
    code = lower(lowering, batch, work)
    machine = Machine(batch, code, COLUMNS)
    x, target = COLUMNS[:VARIABLES], COLUMNS[VARIABLES]

    def same(name: str, wanted: np.ndarray) -> None:
        got = machine.place(int(machine.record[name]))
        np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-9)

    for index in range(len(batch)):
        machine.run(index)
        program, (vector,) = batch.program(index), batch.program_parameters(index)
        values, by_parameters = differentiate(program, x, vector)
        _, by_variables = differentiate(program, x, vector, by=VARIABLE)
        if work != "loss":
            same("result", values)
        if row_loss:
            terms, slopes = differentiate(row_loss, np.stack([values, target]), by=VARIABLE)
            if requested & LOSS:
                same("loss", terms)
            if requested & LOSS_DERIVATIVE:  # of squares, kernels take the residual
                same("slope", terms if requested & SQUARES else slopes[0])
        wanted = np.zeros((len(vector) + VARIABLES, COLUMNS.shape[1]))
        if requested & BY_PARAMETERS:
            wanted[: len(by_parameters)] = by_parameters
        if requested & BY_VARIABLES:
            wanted[::-1][: len(by_variables)] = by_variables
        got = machine.gradient(len(wanted))
        scale = 1 + np.abs(wanted).max(initial=0)
        np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-9 * scale)


@pytest.mark.parametrize("work", WORK)
def test_code_of_smooth_programs_and_of_the_thesis_mix(alone, work):
    check(alone, Batch.of(*smooth_programs()), work)
    check(alone, Batch.of(*thesis_mix(1, 60, variables=VARIABLES, operators=ROBUST)), work)


@settings(max_examples=60, deadline=None)
@given(
    program=programs(
        40, variables=VARIABLES, parameters=3, operators=ROBUST, constants=st.floats(-2, 2)
    ),
    work=st.sampled_from(list(WORK)),
)
def test_code_of_any_program(alone, program, work):
    vector = np.array([0.5, -1.25, 0.75])[: program.parameters]
    check(alone, Batch.of([program], [vector]), work)


def test_callers_at_the_same_time_get_their_own_code(shared):
    """Four callers share four helpers."""
    batches = [
        Batch.of(*thesis_mix(seed, 30, variables=VARIABLES, operators=ROBUST)) for seed in range(10)
    ]
    with ThreadPoolExecutor(4) as callers:
        list(callers.map(check, [shared] * 10, batches, list(WORK) * 2))


def test_a_large_batch_is_lowered_by_helpers_in_steps(shared, monkeypatch):
    """The engine's thread goes on with other requests meanwhile."""
    monkeypatch.setattr(lowering_module, "_TOKENS_AT_ONCE", 100)
    monkeypatch.setattr(lowering_module, "_TOKENS_A_STEP", 500)
    batch = Batch.of(*thesis_mix(3, 200, variables=VARIABLES, operators=ROBUST))
    steps, seen = begin(shared, batch, "gradient"), []
    while True:
        try:
            found = next(steps)
        except StopIteration:
            break
        seen.append("pause" if found is None else "helpers")
        deadline = time.monotonic() + 20
        while found is not None and not found.done():  # nobody helps them
            assert time.monotonic() < deadline
    assert len(seen) > 4
    assert seen == ["helpers", *["pause", "helpers"] * (len(seen) // 2)]
    check(shared, batch, "gradient")
    steps = begin(shared, batch, "gradient")
    next(steps)
    steps.close()  # waits for the helpers, which write to the arrays
    check(shared, batch[:20], "gradient")


@pytest.mark.parametrize("at_once", [10**6, 10])
def test_the_first_bad_token_of_a_batch_is_named(shared, monkeypatch, at_once):
    monkeypatch.setattr(lowering_module, "_TOKENS_AT_ONCE", at_once)
    batch = Batch.of(*thesis_mix(3, 200))
    codes = batch.codes.copy()
    for program in (61, 130):
        codes[batch.starts[program]] = 255
    with pytest.raises(ProgramError) as caught:
        lower(shared, replace(batch, codes=codes), "gradient")
    assert caught.value.expression == 61


def test_vectors_have_separate_sums(alone):
    given_programs, _ = smooth_programs()
    blocks = np.random.default_rng(2).uniform(0.3, 1.5, size=(len(given_programs), 3, 4))
    vectors = zip(given_programs, blocks, strict=True)
    batch = Batch.of(given_programs, [each[:, : one.parameters] for one, each in vectors])
    code = lower(alone, batch, "fit", products=True)
    machine = Machine(batch, code, COLUMNS)
    for vector in range(3):
        machine.run(0, vector)
        _, want = differentiate(given_programs[0], COLUMNS[:VARIABLES], blocks[0, vector])
        np.testing.assert_allclose(machine.gradient(4)[: len(want)], want, rtol=1e-9)
    sizes = code.sums * 3
    np.testing.assert_array_equal(code.programs["sum"], np.cumsum(sizes) - sizes)


def test_too_many_levels_are_refused(alone):
    """The backward pass reads each factor of the product again."""
    count = 70_000
    codes = np.tile([1, 2, OPERATORS["mul"].code, OPERATORS["sin"].code], count)
    codes = np.concatenate([codes, np.full(count - 1, OPERATORS["mul"].code)]).astype(np.uint8)
    values = np.zeros(len(codes))
    values[0 : 4 * count : 4] = np.arange(count) % VARIABLES
    values[1 : 4 * count : 4] = np.arange(count)
    batch = Batch.of([Program(codes, values)], [np.ones(count)])
    with pytest.raises(ResourceExhaustedError) as caught:
        lower(alone, batch, "fit")
    assert caught.value.reason == "PROGRAM_TOO_LONG"


@pytest.mark.parametrize(("sums", "fits"), [(1_000_000, True), (300_000_000, False)])
def test_more_sums_than_kernels_can_address_are_refused(sums, fits):
    """Thirty thousand parameters have a normal matrix of 3.6 GB."""
    layout = Layout(variables=2, rows=5000, dtype=np.dtype(np.float32), has_target=True)
    device = SimpleNamespace(shared_bytes=lambda blocks: 232_448 // blocks // 16 * 16)
    resident = SimpleNamespace(dataset=SimpleNamespace(layout=layout))
    evaluation = Evaluation(bytes(32), Batch.of([Program.variable(0)], [[]]))
    given = device, resident, evaluation, Variant.of(Mode.FAST, 32), 8 * sums
    if fits:
        assert launch_plan._geometry(*given).spills
        return
    with pytest.raises(ResourceExhaustedError) as caught:
        launch_plan._geometry(*given)
    assert caught.value.reason == "PROGRAM_TOO_LONG"
