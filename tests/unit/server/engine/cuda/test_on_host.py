"""The CUDA engine on this machine's CPU: its host code, and its kernels but the compiled ones."""

import os
import weakref
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest

from support.engines.gradients import ask, derive, outputs_for
from support.engines.operators import check_node_by_node
from support.engines.references import Evaluate, reference_loss
from support.engines.requests import written
from support.random_programs import thesis_mix
from support.servers.server import eventually
from support.suites.derivatives import (  # noqa: F401
    LOSSES,
    make_dataset,
    smooth_programs,
    test_a_selection_of_programs_gives_the_bits_of_the_programs_alone,
    test_cancelled,
    test_long_invariants,
    test_many_parameters,
    test_parameter_vectors,
    test_random_programs,
    test_row_ranges,
)
from support.suites.derivatives import test_linearisation as check_linearisation
from support.suites.losses import (  # noqa: F401
    test_nan_where_no_row_has_weight_is_not_lost,
    test_values_that_are_not_numbers_are_counted,
)
from support.suites.losses import test_reductions_and_moments as check_statistics
from support.suites.merging import (  # noqa: F401
    test_merged_requests_have_the_bits_that_they_have_alone,
)
from warpfit.errors import ProgramError, ResourceExhaustedError
from warpfit.expressions import reference
from warpfit.expressions.reference import evaluate_program
from warpfit.ir import Batch, Program
from warpfit.losses import SQUARES, Closing, LossFunction, huber
from warpfit.parse import parse
from warpfit.request import Evaluation, Loss, Precision, Tier
from warpfit_server.engine.cuda.derivatives import tier
from warpfit_server.engine.cuda.interpreter import tier as interpreter
from warpfit_server.engine.cuda.runtime import device
from warpfit_server.engine.cuda.runtime.device import PageLocks
from warpfit_server.engine.interface import Arithmetic, run_to_end
from warpfit_server.ipc.segments import Segment
from warpfit_server.shared_batch import SharedBatch

ROWS = 5_003


@pytest.fixture(scope="module")
def flavour():
    return "float64", Precision.PRECISE, 1e-9


@pytest.fixture(scope="module")
def batch():
    return thesis_mix(1, 24, variables=4)


@pytest.mark.parametrize(
    ("dtype", "precision"), [("float64", Precision.PRECISE), ("float32", Precision.FAST)]
)
def test_values_and_losses_are_numpys_in_any_pieces(engine, batch, monkeypatch, dtype, precision):
    data = make_dataset(ROWS, dtype, weights=True)
    options = {"loss": Loss.MSE, "precision": precision, "rows": (700, 4_900)}
    whole = Evaluate(engine)(data, *batch, **options)
    with monkeypatch.context() as patch:
        patch.setattr(interpreter, "_CHUNK_BYTES", 1 << 15)
        pieces = Evaluate(engine)(data, *batch, **options)
    np.testing.assert_array_equal(pieces.values, whole.values)
    np.testing.assert_array_equal(pieces.losses, whole.losses)
    alone = Evaluate(engine)(data, *batch, values=False, **options)
    np.testing.assert_array_equal(alone.losses, whole.losses)
    rows, tolerance = slice(700, 4_900), 1e-9 if dtype == "float64" else 1e-2
    for index, (program, vector) in enumerate(zip(*batch, strict=True)):
        values = evaluate_program(program, data.variables[:, rows], vector)
        if np.isfinite(values).all() and np.abs(values).max() < 1e6:
            limits = {"rtol": tolerance, "atol": tolerance}
            np.testing.assert_allclose(whole.values[index, 0], values, **limits)
            loss = reference_loss(Loss.MSE, values, data.target[rows], data.weights[rows])
            np.testing.assert_allclose(whole.losses[index], loss, rtol=10 * tolerance)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_random_programs_node_by_node(engine, dtype):
    check_node_by_node(Evaluate(engine), dtype, roots=60, tokens=50)


@pytest.mark.parametrize("loss", LOSSES)
def test_passes_of_fits_are_numpys(engine, flavour, loss):
    check_linearisation(engine, loss, loss != "poisson", flavour, 130)


@pytest.mark.parametrize("rows", [(0, 1), (0, 17_000), (300, 5_000), (1024, 2048), (2000, 2300)])
def test_statistics_are_numpys(engine, rows):
    check_statistics(engine, rows != (1024, 2048), "float64", rows)


def test_what_cannot_be_evaluated_is_named(engine):
    good, bad = Program.variable(0), Program.variable(7)
    with pytest.raises(ProgramError) as failure:
        Evaluate(engine)(make_dataset(100), [good, bad])
    assert failure.value.expression == 1
    # A small message with 4,000 constants and 10,000 vectors would take more than a gigabyte.
    sums = "".join(f" + {k}.5" for k in range(4_000))
    batch = Batch.of([parse(f"x1 * (p1{sums})")], [np.ones((10_000, 1))])
    data = make_dataset(130)
    asked = Evaluation(data.content_id, batch, loss=Loss.MSE, values=False, gradient=True)
    with pytest.raises(ResourceExhaustedError) as caught:
        ask(engine, data, asked)
    assert caught.value.reason == "TOO_MANY_VECTORS"


@pytest.mark.parametrize("gradient", [False, True])
def test_a_loss_of_ones_own_is_the_references(engine, batch, gradient):
    data, loss = make_dataset(130, weights=True), LossFunction(huber(0.5).row, Closing.SUM)
    options = {"values": False, "gradient": gradient, "custom_loss": loss}
    asked = Evaluation(data.content_id, Batch.of(*batch), **options)
    wanted = reference.evaluate(asked, data)
    np.testing.assert_allclose(ask(engine, data, asked).losses, wanted.losses, rtol=1e-9)


@pytest.mark.parametrize("gradient", [False, True])
def test_others_have_their_turns_while_long_work_runs(engine, batch, monkeypatch, gradient):
    data, losses = make_dataset(ROWS, weights=True), {"values": False, "loss": Loss.MSE}
    asked = Evaluation(data.content_id, Batch.of(*batch), gradient=gradient, **losses)
    engine.load(data)

    def outputs_and_turns():
        outputs = outputs_for(asked, data.layout)
        turns = sum(waits_for is None for waits_for in engine.evaluate(asked, outputs))
        return outputs, turns

    whole, turns = outputs_and_turns()
    assert turns == 0
    few = device.LaunchWork(1_000, 500, 1_000)
    monkeypatch.setitem(device.LAUNCH_WORK, Arithmetic.DOUBLE, few)
    pieces, turns = outputs_and_turns()
    assert turns > 5
    np.testing.assert_array_equal(pieces.losses, whole.losses)
    np.testing.assert_array_equal(pieces.gradients, whole.gradients)


def test_a_large_batch_with_derivatives_runs_in_parts(engine, batch, monkeypatch):
    data, options = make_dataset(ROWS), {"row_loss": SQUARES, "statistics": True}
    whole = derive(engine, data, *batch, **options)
    monkeypatch.setattr(tier, "_MOST_WORK", 200)
    parts = derive(engine, data, *batch, **options)
    for name in ("losses", "gradients", "jacobian", "variable_gradients", "reductions", "moments"):
        np.testing.assert_array_equal(getattr(parts, name), getattr(whole, name))
    evaluation, announced = Evaluation(data.content_id, Batch.of(*batch), jacobian=True), []
    outputs = replace(outputs_for(evaluation, data.layout), ready=announced.append)
    run_to_end(engine.evaluate(evaluation, outputs))
    assert announced == sorted(announced)
    assert announced[0] < announced[-1] == len(evaluation.batch)


def test_parts_of_a_request_give_its_losses(engine, batch):
    """A part's programs do not begin with the first token of the segment that they lie in."""
    data = make_dataset(130)
    asked = Evaluation(data.content_id, Batch.of(*batch), values=False, loss=Loss.MSE)
    whole = written(asked, data.layout)
    found, *parts = (
        ask(engine, data, replace(asked, batch=one.segment_layout.batch(whole.segment))).losses
        for one in (whole, *whole.split([0, 5, 6, len(asked.batch)]))
    )
    np.testing.assert_array_equal(np.concatenate(parts), found)


def test_gradients_of_a_batch_that_comes_again_are_lowered_twice(engine, batch, monkeypatch):
    """The first time it may never come again; from the second on its code is kept."""
    data, sent = make_dataset(130), []
    engine.load(data)
    lowering = engine._derivatives.result()._lowering
    lower = Mock(side_effect=lowering.lower)
    monkeypatch.setattr(lowering, "lower", lower)
    for programs in (batch[0][:10], batch[0][10:]):
        own = Batch.of(programs, [np.ones(program.parameters) for program in programs])
        asked = Evaluation(data.content_id, own, values=False, loss=Loss.MSE, gradient=True)
        request = written(asked, data.layout)
        sent.append(request.segment_layout.batch_part(request.segment))
    for parts in (sent[:1], sent, sent, sent, sent[1:]):
        own = replace(asked, batch=SharedBatch(parts, 1), tier=Tier.INTERPRETER)
        run_to_end(engine.evaluate(own, outputs_for(own, data.layout)))
    assert [len(call.args[0]) for call in lower.mock_calls] == [10, 10, 14, 14]


@pytest.mark.parametrize("fails", [False, True])
def test_segments_are_page_locked_as_long_as_they_are_mapped(engine, monkeypatch, caplog, fails):
    device = engine._device
    runtime = device.cupy.cuda.runtime
    locked, segment = [], Segment.create(1, 1 << 20)

    def register(address, size, _):
        if fails:
            raise runtime.CUDARuntimeError(2)
        locked.append((address, size))

    monkeypatch.setattr(device, "_stays_pageable", False)
    monkeypatch.setattr(runtime, "hostRegister", register)
    unregister = Mock(side_effect=lambda address: locked.remove((address, 1 << 20)))
    monkeypatch.setattr(runtime, "hostUnregister", unregister)
    locks = PageLocks(device)
    for _ in range(2):
        mapped = Segment.received(1, os.dup(segment.descriptor), segment.size)
        address, memory = mapped.address, weakref.ref(mapped.map)
        locks.lock(mapped, mapped.array("u1", (mapped.size,)))
        eventually(lambda: locks._work.empty())
        eventually(lambda: locked == [(address, 1 << 20)] * (not fails))  # noqa: B023
        del mapped
        eventually(lambda: memory() is None)  # noqa: B023
        assert locked == []
    locks.close()
    told = [record for record in caplog.records if "pageable" in record.message]
    assert [r.levelname for r in told if r.levelname != "DEBUG"] == ["WARNING"] * fails
