"""What the driver is told of an evaluation in one launch, with functions in the driver's place."""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("numba")

from support.driver import INTERPRET, LOWER, ORDER, SLOTS, SUM, Driver
from support.interpreted import host_kernels
from warpfit.dataset import Dataset
from warpfit.errors import ProgramError, ResourceExhaustedError
from warpfit.ir import Batch, Program
from warpfit.request import Evaluation, Loss, Precision
from warpfit.workload import thesis_mix
from warpfit_server.channel import Channel, ChannelClosedError, Finished
from warpfit_server.engine.base import Outputs, Reply
from warpfit_server.engine.cuda import bytecode
from warpfit_server.engine.cuda.batch_memory import Extent, Parts
from warpfit_server.engine.cuda.launch import Work, jobs_at_once, share_out
from warpfit_server.engine.cuda.one_launch import losses_in_one_launch
from warpfit_server.engine.cuda.resident import ResidentDataset
from warpfit_server.engine.cuda.source import Variant

VARIANT = Variant(np.dtype(np.float32), Precision.FAST, 16)
WORK = Work(
    variables=1 << 41, target=1 << 42, weights=0, stride=400_000, first_row=3, end_row=100_000,
    tiles=196, absolute=1, level_bytes=2048, warps=2, rounds=2, resident_warps=32 * 132,
    at_once=10**12, lowering_blocks=8 * 132,
)  # fmt: skip


class Context:
    """A stream context without a device."""

    handle, first = 7, 8

    def __init__(self, driver):
        self.functions = driver.addresses
        self.memory, self.kept, self.status = {}, {}, None

    def pinned(self, name, size):
        return self.memory.setdefault(name, np.full(size, 0xA5, dtype=np.uint8))[:size]

    def buffer(self, name, size):
        return {"batch": 1 << 30, "slots": 1 << 31, "partials": 1 << 32}[name]

    def event(self, name):
        return SimpleNamespace(ptr={"started": 11, "computed": 12}[name])

    def keep(self, make):
        return self.kept.setdefault(make, make())

    def settled(self, status):
        self.status = status


def launch(batch, driver, variables=10, loss=Loss.SSE, reply=None, work=WORK, waited=0):
    context, kernels = Context(driver), host_kernels(VARIANT)
    dataset = Dataset.of(np.ones((4, variables)), np.array([0.0, 1.0, 2.0, 5.0]))
    losses = np.empty((len(batch), batch.vectors))
    outputs = Outputs(None, losses, np.zeros(1, np.uint8), lambda _: None, reply=reply)
    evaluation = Evaluation(dataset.content_id, batch, loss=loss, values=False)
    timings = losses_in_one_launch(
        *(context, kernels, work, evaluation, ResidentDataset(dataset, None), outputs),
        *(time.perf_counter_ns() - waited, waited),
    )
    return context, losses, timings


def test_the_driver_gets_the_batch():
    programs, parameters = thesis_mix(3, 40)
    batch, driver = Batch.of(programs, parameters), Driver()
    context, losses, timings = launch(batch, driver)
    kernels = [call[1] for call in driver.calls if call[0] == "launch"]
    assert kernels == [LOWER, ORDER, SLOTS, INTERPRET, SUM]
    names = [call[0] for call in driver.calls]
    assert names == [*("upload", "record", *["launch"] * 5, "record", "synchronize", "elapsed")]
    assert context.status == 0
    assert timings.compute == 250_000
    assert 0 <= timings.copy_in < 60e9
    assert losses[:, 0].tolist() == [float(job) for job in range(40)]
    for name in ("codes", "values", "lengths", "parameter_counts"):
        np.testing.assert_array_equal(getattr(driver.batch, name), getattr(batch, name))
    parts = Parts.of(batch)
    assert len(driver.uploaded) == parts.uploaded
    parameters = driver.uploaded[parts.parameters :][: batch.parameters.nbytes]
    assert parameters.tobytes() == batch.parameters.tobytes()


def test_all_kernels_find_what_the_others_write():
    batch, driver = Batch.of(*thesis_mix(3, 40)), Driver()
    launch(batch, driver)
    (lower,), (order,) = driver.told[LOWER], driver.told[ORDER]
    (slots,), (interpreter,) = driver.told[SLOTS], driver.told[INTERPRET]
    parts = Parts.of(batch)
    for name, readers in (
        ("codes", (lower, slots)),
        ("values", (lower, slots)),
        ("starts", (lower,)),
        ("parameter_starts", (lower,)),
        ("parameters", (slots,)),
        ("programs", (lower, order, slots, interpreter)),
        ("order", (order, interpreter)),
        ("instructions", (lower, interpreter)),
        ("scratch", (lower,)),
    ):
        for told in readers:
            assert told[name] - (1 << 30) == getattr(parts, name), name
    assert lower["slots"] == slots["slots"] == parts.slots + (1 << 30)
    assert slots["results"] == interpreter["slots"] == 1 << 31
    assert lower["variables"] == 10
    assert lower["count"] == order["count"] == order["group"] == slots["count"] == 40


@pytest.mark.parametrize("programs", [1, 40, 1056, 1057, 50_000])
def test_small_batches_are_lowered_by_many_blocks(programs):
    driver = Driver()
    launch(Batch.of([Program.variable(0)] * programs), driver)
    (told,) = driver.told[LOWER]
    share = int(told["share"])
    assert share == min(32, -(-programs // 1056))
    assert launches(driver)[LOWER][1] == -(-programs // share)
    assert launches(driver)[LOWER][7] == 8 * told["room"]


def test_the_kernels_are_told_the_work():
    programs, parameters = thesis_mix(3, 40)
    batch, driver = Batch.of(programs, [np.stack([p, p, p]) for p in parameters]), Driver()
    context, losses, _ = launch(batch, driver)
    sums = context.memory["sums"].ctypes.data
    assert losses.shape == (40, 3)
    (told,), (slots,) = driver.told[INTERPRET], driver.told[SLOTS]
    assert (told["jobs"], told["first_job"], told["vectors"]) == (120, 0, 3)
    assert (told["tiles"], told["first_row"], told["end_row"]) == (196, 3, 100_000)
    assert (told["variables"], told["target"], told["weights"]) == (1 << 41, 1 << 42, 0)
    assert (told["absolute"], told["stride"], told["values"]) == (1, 400_000, 0)
    assert (slots["vectors"], slots["results"], told["slots"]) == (3, 1 << 31, 1 << 31)
    assert told["slot_count"] == slots["slot_count"] > 0
    assert driver.told[SUM] == [1 << 32, sums, 196]
    _, _, groups, *_ = launches(driver)[INTERPRET]
    assert groups * told["jobs_per_block"] >= 120 > (groups - 1) * told["jobs_per_block"]
    assert launches(driver)[INTERPRET][1] == 196
    assert launches(driver)[SUM][1] == 120


def test_large_work_goes_to_the_device_in_pieces():
    programs, parameters = thesis_mix(3, 40)
    batch, driver = Batch.of(programs, parameters), Driver()
    rows = WORK.end_row - WORK.first_row
    work = WORK._replace(at_once=len(batch.codes) * rows // 3)
    _, losses, _ = launch(batch, driver, work=work)
    assert losses[:, 0].tolist() == [float(job) for job in range(40)]
    names = ("first_job", "jobs", "partials", "tiles")
    told = [[told[name] for name in names] for told, _ in driver.pieces]
    partials = [(1 << 32) + 8 * 196 * first for first in (0, 14, 28)]
    assert told == [
        [0, 14, partials[0], 196],
        [14, 14, partials[1], 196],
        [28, 12, partials[2], 196],
    ]
    assert {tiles for _, tiles in driver.pieces} == {196}
    assert driver.told[ORDER][0]["group"] == 14
    assert launches(driver)[ORDER][1] == 3
    assert launches(driver)[SUM][1] == 40


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


def launches(driver):
    return {call[1]: call[1:] for call in driver.calls if call[0] == "launch"}


def test_the_status_of_the_driver_is_passed_on():
    driver = Driver()
    driver.fail = "upload"
    context, *_ = launch(Batch.of([Program.variable(1)]), driver)
    assert context.status == 700
    assert [call[0] for call in driver.calls] == ["upload"]


def test_what_cannot_be_encoded_is_refused():
    far = Program.variable(bytecode.INDEX_LIMIT)
    with pytest.raises(ResourceExhaustedError, match="index"):
        launch(Batch.of([far]), Driver(), variables=bytecode.INDEX_LIMIT + 1)


def test_what_is_too_long_is_refused_before_the_driver_hears_of_it():
    driver = Driver()
    long = replace(Batch.of([Program.variable(0)]), lengths=np.array([1 << 19], np.uint32))
    with pytest.raises(ResourceExhaustedError, match="longer"):
        launch(long, driver)
    assert driver.calls == []


def test_a_variable_that_is_not_there_is_refused_and_nobody_told():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        reply = Reply(theirs.fileno(), queue=0)
        bad = Batch.of([Program.variable(0), Program.variable(2)])
        with pytest.raises(ProgramError) as caught:
            launch(bad, Driver(), variables=2, reply=reply)
        assert not reply.is_sent
        ours.setblocking(False)
        with pytest.raises(BlockingIOError):
            ours.recv(100)
    assert (caught.value.reason, caught.value.expression) == ("VARIABLE_OUT_OF_RANGE", 1)


@pytest.mark.parametrize("loss", Loss)
def test_sums_become_losses_as_numpy_would_make_them(loss):
    driver = Driver()
    batch = Batch.of([Program.variable(0)] * 50)
    _, losses, _ = launch(batch, driver, loss=loss)
    dataset = Dataset.of(np.ones((4, 10)), np.array([0.0, 1.0, 2.0, 5.0]))
    expected = ResidentDataset(dataset, None).losses(loss, np.arange(50.0), 0, 4)
    assert losses[:, 0].tobytes() == expected.tobytes()


def test_who_waits_is_told_once_the_losses_are_there():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        reply = Reply(theirs.fileno(), queue=123)
        batch, waited = Batch.of([Program.variable(0)]), 10**12
        _, _, timings = launch(batch, Driver(), reply=reply, waited=waited)
    channel = Channel(ours)
    message, _ = channel.receive()
    assert reply.is_sent
    assert message == Finished(replace(timings, queue=123 + waited))
    assert (timings.queue, timings.compute) == (waited, 250_000)
    assert 0 < timings.copy_in < waited
    with pytest.raises(ChannelClosedError):
        channel.receive()
    channel.close()


def test_a_failure_tells_nobody():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    driver = Driver()
    driver.fail = "synchronize"
    with ours, theirs:
        reply = Reply(theirs.fileno(), queue=0)
        context, *_ = launch(Batch.of([Program.variable(0)]), driver, reply=reply)
        assert context.status == 700
        assert not reply.is_sent
        ours.setblocking(False)
        with pytest.raises(BlockingIOError):
            ours.recv(100)


def test_somebody_who_has_gone_does_no_harm():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.close()
    with theirs:
        reply = Reply(theirs.fileno(), queue=0)
        launch(Batch.of([Program.variable(0)]), Driver(), reply=reply)
    assert not reply.is_sent, "the caller finds out what is wrong"
