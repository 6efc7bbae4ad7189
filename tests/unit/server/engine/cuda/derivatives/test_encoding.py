"""Code for the interpreter of derivatives, run by a reference machine, and its kernels."""

from __future__ import annotations

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
from warpfit.losses import SQUARES as SQUARES_LOSS
from warpfit.ops import OPERATORS, VARIABLE
from warpfit.parse import parse
from warpfit.request import Evaluation, Precision
from warpfit_server.engine.autodiff.backward_pass import (
    BY_PARAMETERS,
    LOSS,
    LOSS_DERIVATIVE,
    SQUARES,
)
from warpfit_server.engine.autodiff.differentiate import row_loss_tokens
from warpfit_server.engine.autodiff.requested_outputs import RequestedOutputs
from warpfit_server.engine.cuda.derivatives import launch_plan
from warpfit_server.engine.cuda.derivatives.encoding import DerivativeCode
from warpfit_server.engine.cuda.derivatives.lowering import DerivativeLowering
from warpfit_server.engine.cuda.derivatives.tier import derivative_switch
from warpfit_server.engine.cuda.interpreter.source import Variant
from warpfit_server.system.compile_cache import default_cache_directory

VARIABLES = 4
COLUMNS = np.random.default_rng(1).uniform(0.2, 2, size=(VARIABLES + 1, 30))
FLOAT, DOUBLE = np.dtype(np.float32), np.dtype(np.float64)


@pytest.fixture(scope="module")
def lowering():
    return DerivativeLowering(default_cache_directory(), threads=1)


def lower(lowering, batch: Batch, row_loss=DIFFERENCE, wishes=SQUARES, **options) -> DerivativeCode:
    tokens = row_loss_tokens(row_loss, VARIABLES, weighted=False)
    wishes |= BY_PARAMETERS | LOSS_DERIVATIVE | (0 if wishes & SQUARES else LOSS)
    options = {"keeps_values": True, "products": True, **options}
    return lowering.lower(batch, tokens, wishes, **options)


def check(lowering, given_programs, vectors) -> None:
    batch = Batch.of(given_programs, vectors)
    code = lower(lowering, batch)
    machine = Machine(batch, code, COLUMNS)
    for index, program in enumerate(given_programs):
        machine.run(index)
        count = int(batch.parameter_counts[index])
        values, want = differentiate(program, COLUMNS[:VARIABLES], vectors[index])
        np.testing.assert_allclose(machine.place(int(machine.record["result"])), values, rtol=1e-9)
        residual = machine.place(int(machine.record["slope"]))
        np.testing.assert_allclose(residual, values - COLUMNS[VARIABLES], rtol=1e-9, atol=1e-9)
        got = machine.gradient(count)
        scale = 1 + np.abs(want).max(initial=0)
        np.testing.assert_allclose(got[: len(want)], want, rtol=1e-9, atol=1e-9 * scale)


def test_smooth_programs(lowering):
    check(lowering, *smooth_programs())


@pytest.mark.parametrize("seed", range(3))
def test_thesis_mix(lowering, seed):
    given_programs, vectors = thesis_mix(seed, 60, variables=VARIABLES, operators=ROBUST)
    check(lowering, given_programs, vectors)


@settings(max_examples=60, deadline=None)
@given(
    programs(30, variables=VARIABLES, parameters=3, operators=ROBUST, constants=st.floats(-2, 2))
)
def test_random_programs(lowering, program):
    check(lowering, [program], [np.array([0.5, -1.25, 0.75])])


def test_a_user_defined_loss_has_a_slope(lowering):
    row_loss = huber(0.5).row
    given_programs, vectors = smooth_programs()
    batch = Batch.of(given_programs, vectors)
    code = lower(lowering, batch, row_loss, wishes=0, products=False)
    machine = Machine(batch, code, COLUMNS)
    for index, program in enumerate(given_programs):
        machine.run(index)
        values, _ = differentiate(program, COLUMNS[:VARIABLES], vectors[index])
        terms, slopes = differentiate(row_loss, np.stack([values, COLUMNS[VARIABLES]]), by=VARIABLE)
        np.testing.assert_allclose(machine.place(int(machine.record["loss"])), terms, rtol=1e-9)
        slope = machine.place(int(machine.record["slope"]))
        np.testing.assert_allclose(slope, slopes[0], rtol=1e-9, atol=1e-12)


def test_vectors_have_separate_sums(lowering):
    given_programs, _ = smooth_programs()
    blocks = np.random.default_rng(2).uniform(0.3, 1.5, size=(len(given_programs), 3, 4))
    batch = Batch.of(given_programs, list(blocks))
    code = lower(lowering, batch)
    machine = Machine(batch, code, COLUMNS)
    for vector in range(3):
        machine.run(0, vector)
        _, want = differentiate(given_programs[0], COLUMNS[:VARIABLES], blocks[0, vector])
        np.testing.assert_allclose(machine.gradient(4)[: len(want)], want, rtol=1e-9)
    sizes = code.sums * 3
    np.testing.assert_array_equal(code.programs["sum"], np.cumsum(sizes) - sizes)


def test_results_that_are_only_used_next_are_not_stored(lowering):
    """x1 * p1 + 2 needs a level for the residual only."""
    program = Program.apply(
        "add",
        Program.apply("mul", Program.variable(0), Program.parameter(0)),
        Program.constant(2.0),
    )
    batch = Batch.of([program], [[3.0]])
    code = lower(lowering, batch, keeps_values=False)
    assert int(code.programs["levels"][0]) == 1
    assert int((code.instructions[:, 0] >> 19 & 1).sum()) == 1


def test_too_many_levels_are_refused(lowering):
    """The backward pass reads each factor of the product again."""
    count = 70_000
    codes = np.tile([1, 2, OPERATORS["mul"].code, OPERATORS["sin"].code], count)
    codes = np.concatenate([codes, np.full(count - 1, OPERATORS["mul"].code)]).astype(np.uint8)
    values = np.zeros(len(codes))
    values[0 : 4 * count : 4] = np.arange(count) % VARIABLES
    values[1 : 4 * count : 4] = np.arange(count)
    batch = Batch.of([Program(codes, values)], [np.ones(count)])
    with pytest.raises(ResourceExhaustedError) as caught:
        lower(lowering, batch)
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


def test_selected_programs_have_their_places_among_the_selected(lowering):
    code = lower(lowering, Batch.of(*smooth_programs()), products=True)
    records, indices = code.programs, np.array([0, 2, 2])
    np.testing.assert_array_equal(code.select(np.arange(len(records))).programs, records)
    chosen = code.select(indices)
    np.testing.assert_array_equal(chosen.programs["first"], records["first"][indices])
    np.testing.assert_array_equal(chosen.programs["sum"], [0, *np.cumsum(chosen.sums)[:-1]])
    counts = records["parameters"][indices]
    np.testing.assert_array_equal(chosen.programs["parameter"], [0, *np.cumsum(counts)[:-1]])


@pytest.mark.parametrize("row_loss", [SQUARES_LOSS, ABSOLUTE, huber().row], ids=str)
@pytest.mark.parametrize("slopes", [False, True])
def test_squared_and_absolute_losses_are_left_to_the_kernel(lowering, row_loss, slopes):
    """The kernel computes them in float64 from the value that the program keeps."""
    batch = Batch.of([parse("x1 + 2 * x2"), parse("x3"), parse("p1")], [[], [], [1.0]])
    losses = np.zeros((3, 1))
    gradients = np.zeros(1) if slopes else None
    wanted = RequestedOutputs(row_loss=row_loss, losses=losses, gradients=gradients)
    program = DIFFERENCE if wanted.is_squares else row_loss
    tokens = row_loss_tokens(program, VARIABLES, weighted=False)
    options = {"keeps_values": bool(wanted.deviation), "products": False}
    code = lowering.lower(batch, tokens, wanted.lowering_flags, **options)
    machine = Machine(batch, code, COLUMNS)
    x, y = COLUMNS[:VARIABLES], COLUMNS[VARIABLES]
    for index, values in enumerate((x[0] + 2 * x[1], x[2], np.ones(30))):
        machine.run(index)
        if wanted.deviation:
            np.testing.assert_allclose(machine.place(int(machine.record["result"])), values)
            continue
        terms = evaluate_program(row_loss, np.stack([values, y]))
        np.testing.assert_allclose(machine.place(int(machine.record["loss"])), terms)
    assert wanted.deviation == {SQUARES_LOSS: "squared", ABSOLUTE: "absolute"}.get(row_loss, "")
    assert (LOSS & wanted.lowering_flags != 0) == (not wanted.deviation)


#: Every architecture with one kernel, and every kernel; one of few rows a thread assembles sooner.
ASSEMBLED = [
    (75, Variant(DOUBLE, Precision.PRECISE, 2), False),
    (80, Variant(FLOAT, Precision.FAST, 2), False),
    (86, Variant(FLOAT, Precision.FAST, 2), True),
    (89, Variant(FLOAT, Precision.FAST, 2), False),
    (90, Variant(FLOAT, Precision.FAST, 8), False),
    (100, Variant(FLOAT, Precision.PRECISE, 2), False),
    (120, Variant(FLOAT, Precision.FAST, 2), True),
]


@pytest.mark.parametrize(("architecture", "variant", "spills"), ASSEMBLED, ids=str)
def test_kernels_assemble_for_every_architecture(architecture, variant, spills):
    cubin = derivative_switch(variant, spills=spills).compile(architecture)
    for kernel in (b"linearise", b"evaluate_scalars", b"combine", b"measure"):
        assert kernel in cubin
