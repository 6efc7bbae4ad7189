"""Bounds of what a batch needs on the device, and launch configurations of the interpreter."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

pytest.importorskip("numba")

from support.emulators.device_lowering import lower_on_host
from support.random_programs import random_program, thesis_mix
from warpfit.errors import ResourceExhaustedError
from warpfit.ir import Batch, Program
from warpfit.ops import OPERATORS
from warpfit_server.engine.cuda.interpreter import launches
from warpfit_server.engine.cuda.interpreter.launches import BatchBounds
from warpfit_server.engine.cuda.interpreter.source import Variant, costly_operators
from warpfit_server.engine.cuda.runtime.driver_calls import as_record
from warpfit_server.engine.interface import Arithmetic
from warpfit_server.shared_batch import BatchSummary

FAST = Variant(Arithmetic.FAST, 16)
LIMITS = launches.LaunchLimits(*[0] * 6, level_bytes=2048, max_warps=2, resident_warps=32 * 132)


def configured(limits, bounds, max_jobs, programs, vectors):
    """Return the record of a batch whose launches are configured."""
    record = launches.new_batch((9, programs, 0, vectors), 1, 0, 0, 0)
    launches.configure_launch(record, as_record(limits), 9, *bounds, max_jobs)
    return record.view(np.recarray)[0]


@pytest.mark.parametrize("costly", [False, True])
def test_one_warp_has_room_for_any_program(costly):
    for warps, levels, usual in product([1, 2, 3, 8], [0, 1, 4, 7, 21], [0, 2, 4]):
        bounds = BatchBounds(levels, typical_levels=min(usual, levels), costly=costly)
        limits = LIMITS._replace(max_warps=warps)
        config = configured(limits, bounds, 300, 300, 1)
        most = levels + config.scratch_levels
        assert config.scratch_levels == 2 * costly
        assert 1 <= config.warps <= warps
        assert config.warps * config.levels >= most
        assert config.levels >= bounds.typical_levels + config.scratch_levels
        assert config.warps * config.levels * limits.level_bytes <= 48 * 1024 - 16
        assert config.group == 300


def test_launches_of_part_of_a_program_are_not_sorted():
    bounds = BatchBounds(levels=6, typical_levels=2, costly=False)
    config = configured(LIMITS, bounds, 7, 3, 10)
    assert (config.group, config.levels) == (1, 6)
    config = configured(LIMITS, bounds, 25, 3, 10)
    assert (config.group, config.levels) == (2, 3)


def bounds_of(batch):
    """Return the bounds of a batch."""
    return BatchBounds.of(BatchSummary.of(batch), costly_operators(FAST))


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
    assert bounds.levels == launches.max_levels(int(max(lengths)), "where" in names)
    assert bounds.typical_levels == launches.max_levels(weighted, "where" in names) <= bounds.levels


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
    assert ends[-1] <= launches.max_slots(len(lowered.batch.codes), 7)


def test_programs_that_are_too_long_are_refused():
    BatchBounds.of(BatchSummary(0, launches.MAX_PROGRAM_TOKENS, 30, 0), 0)
    with pytest.raises(ResourceExhaustedError) as refused:
        BatchBounds.of(BatchSummary(0, launches.MAX_PROGRAM_TOKENS + 1, 30, 0), 0)
    assert (refused.value.reason, refused.value.available) == ("PROGRAM_TOO_LONG", 1 << 18)
