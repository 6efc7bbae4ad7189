"""A batch in one piece of memory: what lies where, and in which order jobs run."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")

from support.bytecode import lower
from warpfit.ir import Batch, Program
from warpfit.ops import OPERATORS
from warpfit.workload import random_program
from warpfit_server.engine.cuda.staging import stage


def batches(vectors):
    rng = np.random.default_rng(1)
    for programs in (5, 1, 9):
        drawn = [
            random_program(rng, int(rng.integers(1, 60)), variables=3, operators=tuple(OPERATORS))
            for _ in range(programs)
        ]
        yield Batch.of(drawn, [rng.normal(size=(vectors, p.parameters)) for p in drawn])


def jobs(staged, batch):
    return staged.order[: len(batch) * batch.vectors].astype(int)


def test_tokens_and_parameters_are_copied():
    for batch in batches(3):
        staged = lower(batch)
        for name, dtype, expected in (
            ("values", np.float64, batch.values),
            ("parameters", np.float64, batch.parameters),
            ("codes", np.uint8, batch.codes),
        ):
            start = getattr(staged.parts, name)
            found = staged.memory[start : start + expected.nbytes].view(dtype)
            np.testing.assert_array_equal(found, expected)
        assert len(staged.used) == staged.parts.slots + staged.slots.nbytes


@pytest.mark.parametrize("vectors", [1, 3])
def test_the_longest_jobs_run_first(vectors):
    for batch in batches(vectors):
        staged = lower(batch)
        order = jobs(staged, batch)
        assert sorted(order) == list(range(len(batch) * vectors))
        lengths = staged.programs[order // vectors, 1].astype(int)
        assert np.all(np.diff(lengths) <= 0)
        ties = np.flatnonzero(np.diff(lengths) == 0)
        assert np.all(order[ties] < order[ties + 1])


def test_jobs_stay_in_the_launch_that_takes_them():
    (batch, *_) = batches(2)
    order = jobs(lower(batch, 4), batch)
    for first in range(0, len(order), 4):
        chunk = sorted(order[first : first + 4].tolist())
        assert chunk == list(range(first, first + len(chunk)))


def test_costly_operators_are_told():
    (batch, *_) = batches(1)
    costly = np.zeros(256, dtype=np.bool_)
    for code, expected in ((255, False), (int(batch.codes[-1]), True)):
        costly[code] = True
        staged = stage(batch, 3, costly, 8, lambda size: np.empty(size, dtype=np.uint8))
        assert staged.extent.costly is expected


def test_programs_with_the_most_slots_fit():
    ternary = next(row for row in OPERATORS.values() if row.arity == 3)
    program = Program.variable(0)
    for number in range(20):
        leaves = [Program.constant(float(number)), Program.constant(1.0)]
        program = Program.apply(ternary, program, *leaves)
    assert len(lower(Batch.of([program] * 7)).slots) == 7 * 40
