"""How the interpreter's work is shared out among launches, blocks and warps."""

from __future__ import annotations

import pytest

pytest.importorskip("numba")

from warpfit_server.engine.cuda.interpreter.launch_arguments import Work, jobs_at_once, share_out
from warpfit_server.engine.cuda.runtime.batch_layout import Extent

WORK = Work(
    variables=1 << 41, target=1 << 42, weights=0, stride=400_000, first_row=3, end_row=100_000,
    tiles=196, absolute=1, level_bytes=2048, warps=2, rounds=2, resident_warps=32 * 132,
    at_once=10**12, lowering_blocks=8 * 132,
)  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "jobs", "expected"),
    [(10, 300, 300), (100, 300, 150), (10**6, 300, 5), (10**6, 20, 1), (100, 1, 1)],
)
def test_jobs_of_a_launch(tokens, jobs, expected):
    work = WORK._replace(first_row=0, end_row=1000, at_once=50_000)
    assert jobs_at_once(work, tokens, jobs, 1) == expected


@pytest.mark.parametrize(
    ("vectors", "expected"), [(1, 150), (4, 152), (100, 200), (149, 298), (150, 150), (300, 150)]
)
def test_a_launch_has_whole_programs_or_less_than_one(vectors, expected):
    work = WORK._replace(first_row=0, end_row=1000, at_once=50_000)
    assert jobs_at_once(work, 100, 300, vectors) == expected


@pytest.mark.parametrize("warps", [1, 2, 3, 8])
@pytest.mark.parametrize("levels", [0, 1, 4, 7, 21])
@pytest.mark.parametrize("usual", [0, 2, 4])
@pytest.mark.parametrize("costly", [False, True])
def test_a_warp_alone_has_room_for_any_program(warps, levels, usual, costly):
    extent = Extent(slots=5, levels=levels, usual=min(usual, levels), costly=costly)
    work = WORK._replace(warps=warps)
    shares = share_out(work, extent, 300, 300, 1)
    most = levels + shares.scratch
    assert shares.scratch == 2 * costly
    assert 1 <= shares.warps <= warps
    assert shares.warps * shares.levels >= most
    assert shares.levels >= extent.usual + shares.scratch
    assert shares.warps * shares.levels * work.level_bytes <= 48 * 1024 - 16
    assert (shares.chunk, shares.group) == (300, 300)


def test_parts_of_a_program_are_not_sorted():
    extent = Extent(slots=5, levels=6, usual=2, costly=False)
    shares = share_out(WORK, extent, 7, 3, 10)
    assert (shares.chunk, shares.group, shares.levels) == (7, 1, 6)
    shares = share_out(WORK, extent, 25, 3, 10)
    assert (shares.chunk, shares.group, shares.levels) == (20, 2, 3)
