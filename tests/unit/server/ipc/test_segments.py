"""Segments and their pool, also where a process may open few files."""

import gc
import math
import os
import resource
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from support.random_programs import thesis_mix
from support.servers.examples import DATA, an_evaluation
from warpfit.errors import ResourceExhaustedError
from warpfit.ir import Batch
from warpfit.losses import huber
from warpfit.request import Loss
from warpfit_server.config import Config
from warpfit_server.ipc.segments import Segment, SegmentLayout, SegmentPool
from warpfit_server.system.machine import DescriptorReserve


def files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@contextmanager
def few_files(count: int):
    """Let this process open so many more files."""
    gc.collect()  # what earlier tests have left would close files meanwhile
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(each.name) for each in Path("/proc/self/fd").iterdir())
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(highest)]  # fills what is free below
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 1 + count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in taken:
            os.close(each)


@pytest.mark.parametrize("programs", [1, 7, 30])
@pytest.mark.parametrize(
    "asked",
    [
        {"loss": Loss.MSE, "gradient": True},
        {"custom_loss": huber(0.5), "values": False},
        {"loss": Loss.SSE, "gradient": True, "jacobian": True, "variable_gradient": True},
    ],
)
def test_arrays_of_a_request_lie_one_after_the_other(programs, asked):
    evaluation = an_evaluation(batch=Batch.of(*thesis_mix(4, programs, variables=4)), **asked)
    found = SegmentLayout.of(evaluation, DATA.layout)
    places = sorted(
        (offset, offset + math.prod(shape) * np.dtype(dtype).itemsize)
        for dtype, shape, offset in found.arrays.values()
    )
    assert all(end <= start for (_, end), (start, _) in pairwise(places))
    assert places[-1][1] <= found.nbytes
    assert not any(start % 8 for start, _ in places)


def test_idle_segments_of_many_sizes_keep_few_descriptors():
    gc.collect()  # what earlier tests have left would close files between the two counts
    pool, before, closed = SegmentPool(1 << 40, 8), files(), []
    pool.on_close.append(lambda segment: closed.append(segment.size))
    for exponent in range(16, 30):
        segments = [pool.acquire(1 << exponent, "me") for _ in range(4)]
        for segment in segments:
            pool.release(segment)
    assert files() - before <= 2 * 8
    assert closed == sorted(closed), "those that were not used for longest go first"
    assert pool.acquire(1 << 29).size == 1 << 29
    assert pool.trim()
    assert not pool.trim()
    del segments, segment
    assert files() == before


def test_idle_bytes_are_limited_and_what_is_used_stays():
    pool = SegmentPool(1 << 20, 100)
    small = pool.acquire(1 << 16, "me")
    pool.release(small)
    for _ in range(100):
        large = pool.acquire(1 << 19, "me")
        pool.release(large)
        assert pool.acquire(1 << 16, "me") is small
        pool.release(small)
    pool.release(pool.acquire(1 << 21))
    assert pool.acquire(1 << 19, "me") is large, "what is too large evicts nothing"


def test_a_pool_makes_room_among_its_idle_segments_if_no_files_are_left():
    pool = SegmentPool(1 << 40, 100)
    idle = [pool.acquire(1 << 16) for _ in range(10)]
    for segment in idle:
        pool.release(segment)
    del idle, segment
    with few_files(1):
        assert pool.acquire(1 << 20).size == 1 << 20
        with pytest.raises(ResourceExhaustedError) as caught:
            held = [pool.create(1 << 16) for _ in range(1000)]
            del held
    assert caught.value.reason == "TOO_MANY_FILES"


def test_a_received_segment_keeps_one_descriptor():
    sent, before = Segment.create(1, 1 << 16), files()
    received = Segment.received(1, os.dup(sent.descriptor), 1 << 16)
    assert files() == before + 1
    sent.array("u1", (3,))[...] = 7
    assert received.map[:3] == b"\7\7\7"
    received.close()
    assert files() == before


def test_a_reserve_lends_its_descriptors_when_there_are_no_others():
    reserve = DescriptorReserve(4)
    with few_files(0):
        with pytest.raises(OSError):
            os.pipe()
        for _ in range(2):
            with reserve.lent():
                for end in os.pipe():
                    os.close(end)
    before = files()
    reserve.close()
    assert files() == before - 4


@pytest.mark.parametrize("processes", [1, 4, 16])
@pytest.mark.parametrize("limit", [256, 1024, 20_000])
def test_what_a_front_end_may_hold_fits_its_descriptors(monkeypatch, processes, limit):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    monkeypatch.setattr("warpfit_server.config.available_memory", lambda: 2 << 30)
    config = Config(front_ends=processes)
    nbytes, segments = config.idle_pool
    assert nbytes * processes <= 128 << 20, "a sixteenth of the memory"
    assert config.connections + 2 * segments + limit / 4 < 0.85 * limit
