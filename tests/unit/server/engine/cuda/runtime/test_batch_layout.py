"""Packing of a batch for the device, and bounds of what it needs there."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")

from support.emulators.device_lowering import lower_on_host
from warpfit.expressions.workload import random_program, thesis_mix
from warpfit.ir import Batch, Program
from warpfit.ops import OPERATORS
from warpfit_server.engine.cuda.interpreter.source import Variant, operator_flags
from warpfit_server.engine.cuda.math.modes import Mode
from warpfit_server.engine.cuda.runtime import batch_layout
from warpfit_server.joined_batch import BATCH_ARRAYS, JoinedBatch

FAST = Variant(Mode.FAST, 16)


def packed(batch):
    """Pack a batch; return its bounds, and what is uploaded."""
    memory = np.zeros(batch_layout.BatchLayout.of(batch).uploaded, np.uint8)
    return batch_layout.pack(batch_layout.places_of(batch), operator_flags(FAST), memory), memory


@pytest.mark.parametrize(
    ("names", "costly"), [(("add", "mul"), False), (("add", "sin"), True), (("where",), True)]
)
def test_bounds_follow_from_lengths_and_operators(names, costly):
    rng = np.random.default_rng(1)
    sizes = [3, 3, 3, 40, 90]
    batch = Batch.of([random_program(rng, size, operators=names) for size in sizes])
    bounds, _ = packed(batch)
    lengths = batch.lengths.astype(int)
    weighted = int(sum(lengths**2) // sum(lengths))
    assert bounds.costly is costly
    assert bounds.levels == batch_layout.max_levels(int(max(lengths)), "where" in names)
    assert (
        bounds.typical_levels
        == batch_layout.max_levels(weighted, "where" in names)
        <= bounds.levels
    )


@pytest.mark.parametrize("vectors", [1, 3])
def test_batches_in_several_places_are_packed_as_if_they_were_one(vectors):
    programs, parameters = thesis_mix(3, 60)
    parameters = [np.outer(np.arange(1.0, vectors + 1), one) for one in parameters]
    whole = Batch.of(programs, parameters).copy()
    parts = [whole[first:last].copy() for first, last in ((0, 7), (7, 8), (8, 60))]
    joined = JoinedBatch([batch_layout.places_of(part)[0] for part in parts], vectors, parts)
    assert (len(joined), joined.token_count) == (60, len(whole.codes))
    found, expected = packed(joined), packed(whole)
    assert found[0] == expected[0]
    np.testing.assert_array_equal(found[1], expected[1])
    for name in BATCH_ARRAYS:
        np.testing.assert_array_equal(getattr(joined, name), getattr(whole, name), strict=True)


def test_usual_levels_are_enough_for_most_programs():
    batch = Batch.of(*thesis_mix(1, 500))
    bounds, _ = packed(batch)
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
