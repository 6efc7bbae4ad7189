"""Lowering of programs with derivatives for the GPU's interpreter, on several threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.emulators.derivative_machine import ROBUST, Machine
from support.engines.derivative_suite import smooth_programs
from support.engines.strategies import programs
from warpfit.dataset import Layout
from warpfit.errors import ResourceExhaustedError
from warpfit.expressions.derivatives import differentiate
from warpfit.expressions.reference import evaluate_program
from warpfit.expressions.workload import thesis_mix
from warpfit.ir import Batch, Program
from warpfit.losses import ABSOLUTE, DIFFERENCE, huber
from warpfit.losses import SQUARES as SQUARED
from warpfit.ops import OPERATORS, VARIABLE
from warpfit.parse import parse
from warpfit.request import Evaluation
from warpfit_server.engine.autodiff.backward_pass import (
    BY_PARAMETERS,
    BY_VARIABLES,
    LOSS,
    LOSS_DERIVATIVE,
    SQUARES,
)
from warpfit_server.engine.autodiff.differentiate import no_row_loss, row_loss_tokens
from warpfit_server.engine.autodiff.requested_outputs import RequestedOutputs
from warpfit_server.engine.cuda.derivatives import launch_plan
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


def lower(lowering: DerivativeLowering, batch: Batch, work: str, **options) -> DerivativeCode:
    row_loss, weighted, requested = WORK[work]
    tokens = row_loss_tokens(row_loss, VARIABLES, weighted=weighted) if row_loss else no_row_loss()
    options = {"keeps_values": work != "loss", "products": False, **options}
    return lowering.lower(batch, tokens, requested, **options)


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


def test_vectors_have_separate_sums(alone):
    given_programs, _ = smooth_programs()
    blocks = np.random.default_rng(2).uniform(0.3, 1.5, size=(len(given_programs), 3, 4))
    batch = Batch.of(given_programs, list(blocks))
    code = lower(alone, batch, "fit", products=True)
    machine = Machine(batch, code, COLUMNS)
    for vector in range(3):
        machine.run(0, vector)
        _, want = differentiate(given_programs[0], COLUMNS[:VARIABLES], blocks[0, vector])
        np.testing.assert_allclose(machine.gradient(4)[: len(want)], want, rtol=1e-9)
    sizes = code.sums * 3
    np.testing.assert_array_equal(code.programs["sum"], np.cumsum(sizes) - sizes)


def test_results_that_are_only_used_next_are_not_stored(alone):
    """x1 * p1 + 2 needs a level for the residual only."""
    program = Program.apply(
        "add",
        Program.apply("mul", Program.variable(0), Program.parameter(0)),
        Program.constant(2.0),
    )
    batch = Batch.of([program], [[3.0]])
    code = lower(alone, batch, "fit", keeps_values=False)
    assert int(code.programs["levels"][0]) == 1
    assert int((code.instructions[:, 0] >> 19 & 1).sum()) == 1


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
    records = np.zeros(1, dtype=[("levels", np.uint32)])
    code = SimpleNamespace(records=SimpleNamespace(programs=records, sums=np.array([sums])))
    evaluation = Evaluation(bytes(32), Batch.of([Program.variable(0)], [[]]))
    if fits:
        assert launch_plan._geometry(device, resident, evaluation, code).spills
        return
    with pytest.raises(ResourceExhaustedError) as caught:
        launch_plan._geometry(device, resident, evaluation, code)
    assert caught.value.reason == "PROGRAM_TOO_LONG"


def test_selected_programs_have_their_places_among_the_selected(alone):
    code = lower(alone, Batch.of(*smooth_programs()), "fit", products=True)
    records, indices = code.programs, np.array([0, 2, 2])
    np.testing.assert_array_equal(code.select(np.arange(len(records))).programs, records)
    chosen = code.select(indices)
    np.testing.assert_array_equal(chosen.programs["first"], records["first"][indices])
    np.testing.assert_array_equal(chosen.programs["sum"], [0, *np.cumsum(chosen.sums)[:-1]])
    counts = records["parameters"][indices]
    np.testing.assert_array_equal(chosen.programs["parameter"], [0, *np.cumsum(counts)[:-1]])


@pytest.mark.parametrize("row_loss", [SQUARED, ABSOLUTE, huber().row], ids=str)
@pytest.mark.parametrize("slopes", [False, True])
def test_squared_and_absolute_losses_are_left_to_the_kernel(alone, row_loss, slopes):
    """The kernel computes them in float64 from the value that the program keeps."""
    batch = Batch.of([parse("x1 + 2 * x2"), parse("x3"), parse("p1")], [[], [], [1.0]])
    losses = np.zeros((3, 1))
    gradients = np.zeros(1) if slopes else None
    wanted = RequestedOutputs(row_loss=row_loss, losses=losses, gradients=gradients)
    program = DIFFERENCE if wanted.is_squares else row_loss
    tokens = row_loss_tokens(program, VARIABLES, weighted=False)
    options = {"keeps_values": bool(wanted.deviation), "products": False}
    code = alone.lower(batch, tokens, wanted.lowering_flags, **options)
    machine = Machine(batch, code, COLUMNS)
    x, y = COLUMNS[:VARIABLES], COLUMNS[VARIABLES]
    for index, values in enumerate((x[0] + 2 * x[1], x[2], np.ones(COLUMNS.shape[1]))):
        machine.run(index)
        if wanted.deviation:
            np.testing.assert_allclose(machine.place(int(machine.record["result"])), values)
            continue
        terms = evaluate_program(row_loss, np.stack([values, y]))
        np.testing.assert_allclose(machine.place(int(machine.record["loss"])), terms)
    assert wanted.deviation == {SQUARED: "squared", ABSOLUTE: "absolute"}.get(row_loss, "")
    assert (LOSS & wanted.lowering_flags != 0) == (not wanted.deviation)
