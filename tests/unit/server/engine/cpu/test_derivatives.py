"""Derivatives, row losses and statistics of the CPU engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

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
from warpfit_server.engine.cpu.derivatives import differentiation_work
from warpfit_server.engine.cpu.engine import CpuEngine
from warpfit_server.engine.interface import Selection, run_to_end

FLAVOURS = [
    ("float64", Precision.PRECISE, 1e-9),
    ("float32", Precision.PRECISE, 1e-4),
    ("float32", Precision.FAST, 1e-4),
]


@pytest.fixture(scope="module")
def engine() -> Iterator[CpuEngine]:
    made = CpuEngine(threads=2)
    yield made
    made.close()


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
    programs, parameters = smooth_programs()
    batch = Batch.of(programs, parameters)
    data = make_dataset(5_000, "float32", weights=True)
    other = make_dataset(5_000, "float64", weights=True)
    kept, fresh = CpuEngine(threads=1), CpuEngine(threads=1)
    flag = np.zeros(1, dtype=np.uint8)
    selection = Selection(batch, np.arange(len(batch)))
    for engine in (kept, fresh):
        engine.load(data)
        engine.load(other)
    for scale in (1.0, 0.9):
        for dataset in (data, other):
            for loss in (SQUARES, ABSOLUTE):
                for rows in (None, (7, 4_000)):
                    for curvature in (True, False):
                        scaled = replace(batch, parameters=scale * batch.parameters)
                        problem = Evaluation(dataset.content_id, scaled, rows=rows)
                        options = {"curvature": curvature, "cancelled": flag}
                        steps = kept.linearise(problem, loss, selection=selection, **options)
                        found = run_to_end(steps)
                        expected = run_to_end(fresh.linearise(problem, loss, **options))
                        for name in ("losses", "gradients", "curvatures"):
                            ours, theirs = getattr(found, name), getattr(expected, name)
                            np.testing.assert_array_equal(ours, theirs, err_msg=name)
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


def test_products_of_columns_count_where_a_pass_is_cut_into_steps(engine, monkeypatch):
    monkeypatch.setattr(engine, "_step_seconds", 0.0)
    engine.others_wait(True)
    batch = Batch.of(
        [parse("+".join(f"sin(p{i + 1}*x1)" for i in range(100)))] * 50, [np.ones(100)] * 50
    )
    data, flag = make_dataset(2_000, "float32"), np.zeros(1, np.uint8)
    engine.load(data)
    problem = Evaluation(data.content_id, batch)
    options = {"cancelled": flag}
    few, many = (
        sum(1 for _ in engine.linearise(problem, SQUARES, curvature=curvature, **options))
        for curvature in (False, True)
    )
    engine.others_wait(False)
    assert many > 5 * few


@pytest.mark.parametrize(
    ("asked", "least"),
    [
        ({"custom_loss": LossFunction.parse("abs(d)" + "+abs(d*f)" * 60)}, 30),
        ({"linear_scaling": True, "loss": Loss.MSE}, 5),
        ({"reductions": True}, 2),
        ({"jacobian": True}, 2),
    ],
)
def test_all_that_a_row_needs_counts_where_a_pass_is_cut_into_steps(
    engine, monkeypatch, asked, least
):
    monkeypatch.setattr(engine, "_step_seconds", 0.0)
    engine.others_wait(True)
    data, batch = make_dataset(200_000, "float32"), Batch.of([parse("x1*p1")] * 40, [[1.0]] * 40)
    engine.load(data)

    def steps(**asked):
        problem = Evaluation(data.content_id, batch, values=False, **asked)
        return sum(1 for _ in engine.evaluate(problem, outputs_for(problem, data.layout)))

    assert steps(**asked) > least * steps(loss=Loss.MSE)
    engine.others_wait(False)


@pytest.mark.parametrize("gradient", [False, True])
def test_a_large_batch_is_lowered_in_steps(engine, monkeypatch, gradient):
    """So that other requests have their turns meanwhile."""
    monkeypatch.setattr(engine, "_step_seconds", 0.0)
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
    if engine.threads > 1:
        assert sum(1 for _ in engine.evaluate(problem, outputs)) < steps / 2
    monkeypatch.undo()
    run_to_end(engine.evaluate(problem, outputs))
    np.testing.assert_array_equal(outputs.losses, expected)
