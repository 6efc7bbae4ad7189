"""Channels (messages of any length, file descriptors) and segments of shared memory."""

import gc
import math
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from support.random_programs import thesis_mix
from support.servers.examples import DATA, an_evaluation
from warpfit.errors import InternalError, ResourceExhaustedError, UnavailableError
from warpfit.ir import Batch
from warpfit.request import Loss, Tier, Timings
from warpfit_server.config import Config
from warpfit_server.ipc import messages
from warpfit_server.ipc.messages import Channel, ChannelClosedError
from warpfit_server.ipc.segments import Segment, SegmentLayout, SegmentPool
from warpfit_server.machine import DescriptorReserve, socket_pair

NO_FILES = pytest.raises(ResourceExhaustedError, check=lambda e: e.reason == "TOO_MANY_FILES")


@pytest.fixture
def ends():
    ours, socket = Channel.pair()
    theirs = Channel(socket)
    yield ours, theirs
    ours.close()
    theirs.close()


def note(size):
    return messages.DatasetLoaded(b"x" * size, UnavailableError("why", "REASON"))


def test_messages_arrive_whole_and_in_order(ends):
    ours, theirs = ends
    sizes = [0, 1, 4_096, 200_000, 3_000_000, 5]
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: [ours.send(note(size)) for size in sizes])
        for size in sizes:
            message, descriptor = theirs.receive()
            assert (len(message.key), message.error.reason, descriptor) == (size, "REASON", None)


def test_the_messages_of_every_call_arrive_as_they_were(ends):
    ours, theirs = ends
    arrays = {"losses": ("<f8", (1, 1), 64)}
    layout = SegmentLayout(1, 3, 1, 8, 32, 1 << 62, 3, 3, 1 << 75, arrays, 128)
    rows = {"rows": (0, 8), "precision": "FAST", "loss": None, "tier": "AUTO"}
    submitted = messages.SubmitEvaluation(7, 1, 1 << 33, layout, bytes(32), **rows, submitted=2**60)
    timings = Timings(1, *np.arange(4), tier=Tier.COMPILED, cache_hits=np.int64(5))
    finished = messages.RequestFinished.of(7, timings, 9)
    failed = messages.RequestFinished(7, UnavailableError("why", "REASON"))
    for message in (submitted, finished):
        ours.send(message)
        assert repr(theirs.receive()[0]) == repr(message)
    assert finished.timings == replace(timings, queue=9)
    ours.send(failed)
    assert theirs.receive()[0].error.reason == "REASON"


def test_descriptors_belong_to_their_messages(ends, tmp_path):
    ours, theirs = ends
    for number in range(6):
        path = tmp_path / str(number)
        path.write_text(str(number))
        ours.send(note(number))
        with path.open() as file:
            ours.send(note(100 + number), file.fileno())
    for number in range(6):
        assert theirs.receive()[1] is None
        message, descriptor = theirs.receive()
        assert len(message.key) == 100 + number
        assert os.pread(descriptor, 10, 0) == str(number).encode()
        os.close(descriptor)


def test_a_message_that_is_too_long_fails_alone(ends):
    ours, theirs = ends
    with pytest.raises(InternalError, check=lambda error: error.reason == "MESSAGE_TOO_LONG"):
        ours.send(note(messages.MOST_BYTES + 1))
    ours.send(note(2))
    assert len(theirs.receive()[0].key) == 2


def test_descriptors_are_left_out_while_no_more_files_can_be_opened(ends):
    ours, theirs = ends
    with Path(os.devnull).open() as null:
        for size, descriptor in enumerate((None, null.fileno(), None)):
            ours.send(note(size), descriptor)
        with few_files(0):
            lost = [theirs.receive() for _ in range(3)]
            for function in (socket_pair, lambda: Segment.create(1, 4096)):
                with NO_FILES:
                    function()
        assert [(len(m.key), found) for m, found in lost] == [(0, None), (1, None), (2, None)]
        ours.send(note(3), null.fileno())
    message, found = theirs.receive()
    assert len(message.key) == 3
    os.close(found)


def test_sending_fails_when_the_other_end_does_not_read_or_is_gone(ends):
    ours, theirs = ends
    ours.give_up_after(0.2)
    with pytest.raises(ChannelClosedError):
        for _ in range(100):
            ours.send(note(1 << 20))
    with pytest.raises(ChannelClosedError):  # a message was cut off: nothing follows it
        while True:
            theirs.receive()
    ours, socket = Channel.pair()
    socket.close()
    for use in (ours.receive, lambda: [ours.send(note(100_000)) for _ in range(10)]):
        with pytest.raises(ChannelClosedError):
            use()


def files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@contextmanager
def few_files(count: int):
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
def test_arrays_of_a_request_lie_one_after_the_other(programs):
    asked = {"loss": Loss.SSE, "gradient": True, "jacobian": True, "variable_gradient": True}
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
        with NO_FILES:
            held = [pool.create(1 << 16) for _ in range(1000)]
            del held


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


@pytest.mark.parametrize("processes", [1, 16])
@pytest.mark.parametrize("limit", [256, 20_000])
def test_what_a_front_end_may_hold_fits_its_descriptors(monkeypatch, processes, limit):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    monkeypatch.setattr("warpfit_server.config.available_memory", lambda: 2 << 30)
    config = Config(front_ends=processes)
    nbytes, segments = config.idle_pool
    assert nbytes * processes <= 128 << 20, "a sixteenth of the memory"
    assert config.connections + 2 * segments + limit / 4 < 0.85 * limit


def test_a_received_segment_keeps_one_descriptor():
    sent, before = Segment.create(1, 1 << 16), files()
    received = Segment.received(1, os.dup(sent.descriptor), 1 << 16)
    assert files() == before + 1
    sent.array("u1", (3,))[...] = 7
    assert received.map[:3] == b"\7\7\7"
    received.close()
    assert files() == before
