"""Derivatives, row losses and statistics of the CPU engine."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from support.engines.gradients import outputs_for
from support.random_programs import thesis_mix
from support.suites.derivatives import *  # noqa: F403
from support.suites.derivatives import make_dataset, smooth_programs
from support.suites.losses import *  # noqa: F403
from support.suites.losses import LossErrors
from support.suites.merging import *  # noqa: F403
from warpfit.ir import Batch
from warpfit.losses import ABSOLUTE, SQUARES, LossFunction
from warpfit.ops import OPERATORS
from warpfit.parse import parse
from warpfit.request import Evaluation, Loss, Precision
from warpfit_server.engine.autodiff import COMPUTES, KIND, NOTHING, rules
from warpfit_server.engine.cpu import engine as engine_module
from warpfit_server.engine.cpu.derivatives import differentiation_work
from warpfit_server.engine.cpu.engine import CpuEngine
from warpfit_server.engine.cpu.interpreter import cut_instances, weights_of
from warpfit_server.engine.evaluation import reduce_to_sums
from warpfit_server.engine.interface import Selection, run_to_end

FLAVOURS = [("float64", Precision.PRECISE, 1e-9), *(("float32", mode, 1e-4) for mode in Precision)]


@pytest.fixture(scope="module", params=FLAVOURS, ids=lambda flavour: f"{flavour[0]}-{flavour[1]}")
def flavour(request):
    return request.param


@pytest.fixture(scope="module")
def loss_errors() -> LossErrors:
    return LossErrors(asked_otherwise=0.0, own_single=0.0)


def test_every_operand_has_a_rule():
    table = rules()
    for row in OPERATORS.values():
        kinds = table[3 * row.code : 3 * row.code + row.arity, KIND]
        assert ((kinds > NOTHING) | np.array([text == "0" for text in row.derivative])).all()
        assert (kinds <= COMPUTES).all()


def test_plans_of_fits_are_kept_and_told_apart():
    batch, flag = Batch.of(*smooth_programs()), np.zeros(1, np.uint8)
    datasets = [make_dataset(5_000, dtype, weights=True) for dtype in ("float32", "float64")]
    kept, fresh = CpuEngine(threads=1), CpuEngine(threads=1)
    selection = Selection(batch, np.arange(len(batch)))
    for engine, data in product((kept, fresh), datasets):
        engine.load(data)
    ways = (1.0, 0.9), datasets, (SQUARES, ABSOLUTE), (None, (7, 4_000)), (True, False)
    for scale, data, loss, rows, curvature in product(*ways):
        scaled = replace(batch, parameters=scale * batch.parameters)
        problem = Evaluation(data.content_id, scaled, rows=rows)
        options = {"curvature": curvature, "cancelled": flag}
        found = run_to_end(kept.linearise(problem, loss, selection=selection, **options))
        expected = run_to_end(fresh.linearise(problem, loss, **options))
        for name in ("losses", "gradients", "curvatures"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    assert len(kept._derived) == 16
    kept.close()
    fresh.close()


def test_the_batch_of_a_fit_is_lowered_once(engine, monkeypatch):
    batch, data = Batch.of(*smooth_programs()), make_dataset(1_000, "float32")
    engine.load(data)
    lowered = []

    def count(*given, **more):
        lowered.append(1)
        return differentiation_work(*given, **more)

    monkeypatch.setattr("warpfit_server.engine.cpu.derivatives.differentiation_work", count)
    flag = np.zeros(1, np.uint8)
    for indices in (np.arange(len(batch)), np.array([1, 3]), np.array([3])):
        problem = Evaluation(data.content_id, batch[indices])
        options = {"cancelled": flag, "selection": Selection(batch, indices)}
        run_to_end(engine.linearise(problem, SQUARES, curvature=True, **options))
    assert len(lowered) == 1


DEAR = {"custom_loss": LossFunction.parse("abs(d)" + "+abs(d*f)" * 60)}
SCALED = {"linear_scaling": True, "loss": Loss.MSE}


@pytest.mark.parametrize(("asked", "least"), [(DEAR, 30), (SCALED, 4), ({"reductions": True}, 1.5)])
def test_all_that_a_row_needs_counts_in_the_cuts_of_a_pass(engine, monkeypatch, asked, least):
    data, batch = make_dataset(20_000, "float32"), Batch.of([parse("x1*p1")] * 40, [[1.0]] * 40)
    engine.load(data)
    costs, run = [], engine.run_in_steps

    def noted(work, *given):
        costs.append(work.cut.cost)
        return run(work, *given)

    monkeypatch.setattr(engine, "run_in_steps", noted)

    def cost(**asked):
        costs.clear()
        problem = Evaluation(data.content_id, batch, values=False, **asked)
        of_sums, summed = reduce_to_sums(problem, outputs_for(problem, data.layout))
        run_to_end(engine.evaluate(of_sums, summed))
        return max(costs)

    assert cost(**asked) > least * cost(loss=Loss.MSE)


def test_dear_programs_are_cut_into_smaller_chunks():
    layout, chunks = make_dataset(20_000, "float32").layout, []
    for name in ("neg", "sin", "lgamma"):
        batch = Batch.of([parse(f"{name}(x1)*x2")] * 1_000)
        given = np.zeros(1_000, np.int64), 1, (0, 20_000), layout, 1
        cut = cut_instances(batch.lengths.astype(np.int64), weights_of(batch), *given)
        chunks.append(len(cut.ranges))
    assert chunks[1] > 4 * chunks[0]
    assert chunks[2] > 1.5 * chunks[1]


@pytest.mark.parametrize("gradient", [False, True])
def test_a_large_batch_is_lowered_in_steps(engine, monkeypatch, gradient):
    """So that other requests have their turns meanwhile."""
    monkeypatch.setattr(engine, "_step_seconds", 1e-9)
    monkeypatch.setattr(engine_module, "_LONG_STEP", 1 << 40)
    data = make_dataset(10)
    engine.load(data)
    batch = Batch.of(*thesis_mix(5, 300, variables=4))
    problem = Evaluation(data.content_id, batch, loss=Loss.MSE, gradient=gradient)
    outputs = outputs_for(problem, data.layout)
    engine.others_wait(True)
    steps = sum(1 for _ in engine.evaluate(problem, outputs))
    assert steps >= len(batch.codes) // 1_000
    expected = outputs.losses.copy()
    engine.others_wait(False)
    assert sum(1 for _ in engine.evaluate(problem, outputs)) < steps / 2
    monkeypatch.undo()
    run_to_end(engine.evaluate(problem, outputs))
    np.testing.assert_array_equal(outputs.losses, expected)
