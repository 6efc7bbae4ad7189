"""Derivatives, row losses and statistics of the CPU engine."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from support.derivative_suite import *  # noqa: F403
from support.derivative_suite import make_dataset, smooth_programs
from support.derivatives import derive, linearise
from warpfit.losses import ABSOLUTE, SQUARES
from warpfit.ops import OPERATORS
from warpfit.request import Precision
from warpfit_server.engine import cpu_derive
from warpfit_server.engine.cpu import CpuEngine
from warpfit_server.engine.rules import COMPUTES, KIND, NOTHING, rules

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


def test_threads_do_not_change_anything():
    data = make_dataset(60_000, "float32", weights=True)
    answers = []
    for threads in (1, 2, 3):
        engine = CpuEngine(threads)
        answers.append(
            (
                linearise(engine, data, *smooth_programs(), SQUARES),
                derive(engine, data, *smooth_programs(), row_loss=ABSOLUTE, statistics=True),
            )
        )
        engine.close()
    for first, second in answers[1:]:
        for name in ("losses", "gradients", "curvatures"):
            np.testing.assert_array_equal(getattr(answers[0][0], name), getattr(first, name))
        for name in ("gradients", "variable_gradients", "reductions", "moments"):
            np.testing.assert_array_equal(getattr(answers[0][1], name), getattr(second, name))


def test_every_operand_has_a_rule():
    table = rules()
    for row in OPERATORS.values():
        kinds = table[3 * row.code : 3 * row.code + row.arity, KIND]
        assert ((kinds > NOTHING) | np.array([text == "0" for text in row.derivative])).all()
        assert (kinds <= COMPUTES).all()


def test_fewer_spans_give_the_same_sums(engine, monkeypatch):
    data = make_dataset(60_000, weights=True)
    whole = linearise(engine, data, *smooth_programs(), SQUARES)
    monkeypatch.setattr(cpu_derive, "_MOST_SUMS", 1)
    few = linearise(engine, data, *smooth_programs(), SQUARES)
    for name in ("losses", "gradients", "curvatures"):
        np.testing.assert_allclose(getattr(few, name), getattr(whole, name), rtol=1e-12)
