"""Launch configurations of the interpreter."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")

from warpfit_server.engine.cuda.interpreter import launches
from warpfit_server.engine.cuda.runtime.batch_layout import BatchBounds
from warpfit_server.engine.cuda.runtime.driver_calls import as_record

LIMITS = launches.LaunchLimits(*[0] * 6, level_bytes=2048, max_warps=2, resident_warps=32 * 132)


def configured(limits, bounds, max_jobs, programs, vectors):
    """Return the record of a batch whose launches are configured."""
    record = launches.new_batch((9, programs, 0, vectors), 1, 0, 0, 0)
    launches.configure_launch(record, as_record(limits), 9, *bounds, max_jobs)
    return record.view(np.recarray)[0]


@pytest.mark.parametrize("warps", [1, 2, 3, 8])
@pytest.mark.parametrize("levels", [0, 1, 4, 7, 21])
@pytest.mark.parametrize("usual", [0, 2, 4])
@pytest.mark.parametrize("costly", [False, True])
def test_one_warp_has_room_for_any_program(warps, levels, usual, costly):
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
