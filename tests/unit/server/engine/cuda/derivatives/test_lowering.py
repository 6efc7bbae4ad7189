"""Lowering of programs with derivatives for the GPU's interpreter, on several threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.emulators.derivative_machine import ROBUST, Machine
from support.engines.strategies import programs
from warpfit.expressions.derivatives import differentiate
from warpfit.expressions.workload import thesis_mix
from warpfit.ir import Batch
from warpfit.losses import ABSOLUTE, DIFFERENCE, huber
from warpfit.ops import VARIABLE
from warpfit_server.engine.autodiff.backward_pass import (
    BY_PARAMETERS,
    BY_VARIABLES,
    LOSS,
    LOSS_DERIVATIVE,
    SQUARES,
)
from warpfit_server.engine.autodiff.differentiate import no_row_loss, row_loss_tokens
from warpfit_server.engine.cuda.derivatives.encoding import DerivativeCode
from warpfit_server.engine.cuda.derivatives.lowering import DerivativeLowering
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


def lower(lowering: DerivativeLowering, batch: Batch, work: str) -> DerivativeCode:
    row_loss, weighted, requested = WORK[work]
    tokens = row_loss_tokens(row_loss, VARIABLES, weighted=weighted) if row_loss else no_row_loss()
    return lowering.lower(batch, tokens, requested, keeps_values=work != "loss", products=False)


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
@pytest.mark.parametrize("seed", range(2))
def test_code_of_the_thesis_mix(alone, seed, work):
    check(alone, Batch.of(*thesis_mix(seed, 60, variables=VARIABLES, operators=ROBUST)), work)


@settings(max_examples=60, deadline=None)
@given(
    program=programs(
        40, variables=VARIABLES, parameters=3, operators=ROBUST, constants=st.floats(-2, 2)
    ),
    work=st.sampled_from(list(WORK)),
)
def test_code_of_any_program(alone, program, work):
    check(alone, Batch.of([program], [np.array([0.5, -1.25, 0.75])]), work)


def parts_of(code: DerivativeCode, program: int) -> dict[str, list]:
    """Return the parts of the code that belong to one program, without their positions."""
    record = code.programs[program]

    def part(array: np.ndarray, first: str, count: str) -> list:
        start = int(record[first])
        return array[start : start + int(record[count])].tolist()

    constants = code.constants.view(np.uint64)  # the bits, whatever the number
    return {
        "prologue": part(code.instructions, "prologue", "prologue_count"),
        "rows": part(code.instructions, "first", "count"),
        "columns": part(code.columns, "column", "columns"),
        "entries": part(code.entries, "entry", "entries"),
        "loads": part(code.loads, "load", "loads"),
        "constants": part(constants, "load", "loads"),
        "record": [int(record[name]) for name in ("scalars", "levels", "loss", "slope", "result")],
    }


def test_code_does_not_depend_on_the_number_of_threads(alone, shared):
    """Four callers share four helpers."""
    works = list(WORK) * 2
    batches = [Batch.of(*thesis_mix(seed, 100)) for seed in range(len(works))]
    with ThreadPoolExecutor(4) as callers:
        found = list(callers.map(lower, [shared] * len(works), batches, works))
    for batch, work, code in zip(batches, works, found, strict=True):
        expected = lower(alone, batch, work)
        for program in range(0, len(batch), 7):
            assert parts_of(code, program) == parts_of(expected, program)
        for name in ("scalar", "parameter", "parameters", "sum", "triangle"):
            np.testing.assert_array_equal(code.programs[name], expected.programs[name])
        check_no_gaps(code)


def check_no_gaps(code: DerivativeCode) -> None:
    """Check that the programs' ranges of each array neither overlap nor leave gaps."""
    records = code.programs
    counts = records["prologue_count"] + records["count"]
    np.testing.assert_array_equal(records["prologue"] + records["prologue_count"], records["first"])
    for firsts, sizes, total in (
        (records["prologue"], counts, len(code.instructions) - 1),
        (records["column"], records["columns"], len(code.columns)),
        (records["entry"], records["entries"], len(code.entries)),
        (records["load"], records["loads"], len(code.loads)),
    ):
        order = np.lexsort((sizes, firsts))
        ends = np.cumsum(sizes[order], dtype=np.int64)
        np.testing.assert_array_equal(firsts[order], ends - sizes[order])
        assert int(ends[-1]) == total
    assert not code.instructions[-1].any()
