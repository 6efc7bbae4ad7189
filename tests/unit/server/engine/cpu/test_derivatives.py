"""Derivatives, row losses and statistics of the CPU engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from support.engines.derivative_suite import *  # noqa: F403
from support.engines.derivative_suite import LossErrors, make_dataset, smooth_programs
from warpfit.ir import Batch
from warpfit.losses import ABSOLUTE, SQUARES
from warpfit.ops import OPERATORS
from warpfit.request import Evaluation, Precision
from warpfit_server.engine.autodiff.rules import COMPUTES, KIND, NOTHING, rules
from warpfit_server.engine.cpu.chunked_work import differentiation_work
from warpfit_server.engine.cpu.engine import CpuEngine
from warpfit_server.engine.interface import run_to_end

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
                        fresh._plans.clear()
                        found, expected = (
                            run_to_end(
                                engine.linearise(problem, loss, curvature=curvature, cancelled=flag)
                            )
                            for engine in (kept, fresh)
                        )
                        for name in ("losses", "gradients", "curvatures"):
                            ours, theirs = getattr(found, name), getattr(expected, name)
                            np.testing.assert_array_equal(ours, theirs, err_msg=name)
    assert len(kept._plans) == 16
    kept.close()
    fresh.close()


def test_a_kept_plan_is_used_again(engine, monkeypatch):
    batch, data = Batch.of(*smooth_programs()), make_dataset(1_000, "float32")
    engine.load(data)
    lowered = []

    def count(*given, **more):
        lowered.append(1)
        return differentiation_work(*given, **more)

    monkeypatch.setattr("warpfit_server.engine.cpu.derivatives.differentiation_work", count)
    for scale in (1.0, 0.5, 0.2):
        scaled = replace(batch, parameters=scale * batch.parameters)
        problem = Evaluation(data.content_id, scaled)
        run_to_end(
            engine.linearise(problem, SQUARES, curvature=True, cancelled=np.zeros(1, np.uint8))
        )
    assert len(lowered) == 1
