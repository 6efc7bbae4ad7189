"""The parameters that a program is linear in."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.engines.operators import programs
from warpfit import parse
from warpfit.expressions import reference
from warpfit.ir import Batch
from warpfit_server.engine.fit import compiled
from warpfit_server.engine.fit.separable import COLUMNS, mark_linear, operator_table


@pytest.fixture(scope="module", autouse=True)
def loaded():
    compiled.load()


def linear(*drawn):
    """Return the marks of each program's parameters."""
    batch = Batch.of(drawn, [np.zeros(program.parameters) for program in drawn])
    starts = batch.parameter_starts
    marks, nodes = np.ones(int(starts[-1])), np.empty((int(batch.lengths.max()), COLUMNS), np.int64)
    mark_linear(batch.codes, batch.values, batch.starts, starts, operator_table(), nodes, marks)
    return [marks[a:b].tolist() for a, b in itertools.pairwise(starts.tolist())]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("p1*exp(-p2*x1) + p3", [1, 0, 1]),
        ("(1 - exp(-p2*x1))*p1", [1, 0]),
        ("p1*exp(p2/(x1 + p3))", [1, 0, 0]),
        ("(p1 + p2*x1)/(1 + p3*x1)", [1, 1, 0]),
        ("p1*p2*x1", [1, 0]),
        ("p1*(p2*x1 + p3)", [0, 1, 1]),
        ("p1*x1 + square(p1)", [0]),
        ("-p1 - (x1 - p2)/x2", [1, 1]),
        ("where(x1 > p1, p2*x1, p3)", [0, 1, 1]),
        ("fma(p1, x1, p2) + fma(p3, p4, p5)", [1, 1, 1, 0, 1]),
        ("floor(p1) + abs(p2) + min(p3, x1)", [0, 0, 0]),
        ("x1", []),
    ],
)
def test_formulas(text, expected):
    assert linear(parse(text)) == [expected]


def test_each_program_of_a_batch_has_its_own_marks():
    texts = ["p1*x1", "exp(p1) + p2", "sin(p1)*p2 + p3", "x1 + x2"]
    assert linear(*map(parse, texts)) == [[1], [0, 1], [0, 1, 1], []]


@given(programs(parameters=3), st.integers(0, 2**32 - 1))
def test_a_program_is_affine_in_the_marked_parameters(program, seed):
    """Half way between two vectors of the marked parameters is half way between the values."""
    (marks,) = linear(program)
    rng = np.random.default_rng(seed)
    x = rng.uniform(0.5, 2.0, size=(3, 20))
    first, second = rng.uniform(0.5, 2.0, size=(2, program.parameters))
    second = np.where(np.array(marks) == 1.0, second, first)
    with np.errstate(all="ignore"):
        a, b, half = (
            reference.evaluate_program(program, x, p) for p in (first, second, (first + second) / 2)
        )
        size = np.maximum(np.abs(a), np.abs(b))
        usable = np.isfinite(a) & np.isfinite(b) & np.isfinite(half) & (size < 1e100)
        largest = np.max(np.abs(program.values[np.isfinite(program.values)]), initial=1.0)
    if usable.any() and largest < 1e6:
        np.testing.assert_allclose(
            half[usable], ((a + b) / 2)[usable], rtol=1e-6, atol=1e-6 * max(1.0, size[usable].max())
        )
