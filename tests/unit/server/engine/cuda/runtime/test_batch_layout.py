"""Bounds of what a batch needs on the device."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")

from support.emulators.device_lowering import lower_on_host
from warpfit.expressions.workload import random_program, thesis_mix
from warpfit.ir import Batch, Program
from warpfit.ops import OPERATORS
from warpfit_server.engine.cuda.interpreter.source import Variant, costly_operators
from warpfit_server.engine.cuda.runtime import batch_layout
from warpfit_server.engine.interface import Arithmetic
from warpfit_server.shared_batch import BatchSummary

FAST = Variant(Arithmetic.FAST, 16)


def bounds_of(batch):
    """Return the bounds of a batch."""
    return batch_layout.BatchBounds.of(BatchSummary.of(batch), costly_operators(FAST))


@pytest.mark.parametrize(
    ("names", "costly"), [(("add", "mul"), False), (("add", "sin"), True), (("where",), True)]
)
def test_bounds_follow_from_lengths_and_operators(names, costly):
    rng = np.random.default_rng(1)
    sizes = [3, 3, 3, 40, 90]
    batch = Batch.of([random_program(rng, size, operators=names) for size in sizes])
    bounds = bounds_of(batch)
    lengths = batch.lengths.astype(int)
    weighted = int(sum(lengths**2) // sum(lengths))
    assert bounds.costly is costly
    assert bounds.levels == batch_layout.max_levels(int(max(lengths)), "where" in names)
    assert (
        bounds.typical_levels
        == batch_layout.max_levels(weighted, "where" in names)
        <= bounds.levels
    )


def test_usual_levels_are_enough_for_most_programs():
    batch = Batch.of(*thesis_mix(1, 500))
    bounds = bounds_of(batch)
    needs = lower_on_host(batch).needs()
    assert needs.max() <= bounds.levels
    assert (needs <= bounds.typical_levels).mean() > 0.95


def test_programs_with_the_most_slots_fit():
    ternary = next(row for row in OPERATORS.values() if row.arity == 3)
    program = Program.variable(0)
    for number in range(20):
        leaves = [Program.constant(float(number)), Program.constant(1.0)]
        program = Program.apply(ternary, program, *leaves)
    lowered = lower_on_host(Batch.of([program] * 7))
    assert lowered.slot_counts().tolist() == [40] * 7
    ends = lowered.programs[:, 2] + lowered.slot_counts()
    assert (ends[:-1] <= lowered.programs[1:, 2]).all()
    assert ends[-1] <= batch_layout.max_slots(len(lowered.batch.codes), 7)
