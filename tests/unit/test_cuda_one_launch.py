"""What the driver is told of an evaluation in one launch, with functions in the driver's place."""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("numba")

from support.bytecode import Machine
from support.driver import INTERPRET, SLOTS, SUM, Driver
from warpfit.dataset import Dataset
from warpfit.errors import ProgramError, ResourceExhaustedError
from warpfit.ir import Batch, Program
from warpfit.request import Evaluation, Loss, Precision
from warpfit.workload import thesis_mix
from warpfit_server.channel import Channel, ChannelClosedError, Finished
from warpfit_server.engine.base import Outputs, Reply
from warpfit_server.engine.cuda import bytecode
from warpfit_server.engine.cuda.launch import Kernels, Work, jobs_at_once
from warpfit_server.engine.cuda.one_launch import losses_in_one_launch
from warpfit_server.engine.cuda.resident import ResidentDataset
from warpfit_server.engine.cuda.source import Variant
from warpfit_server.engine.cuda.staging import Extent, Parts, Staged

COLUMNS = np.random.default_rng(0).uniform(0.5, 2.0, size=(10, 7))
VARIANT = Variant(np.dtype(np.float32), Precision.FAST, 16)
WORK = Work(
    variables=1 << 41, target=1 << 42, weights=0, stride=400_000, first_row=3, end_row=100_000,
    tiles=196, absolute=1, level_bytes=2048, warps=2, rounds=2, resident_warps=32 * 132,
    at_once=10**12,
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
    functions = (SimpleNamespace(ptr=number) for number in (INTERPRET, SLOTS, SUM))
    context = Context(driver)
    kernels = Kernels(VARIANT, *functions, np.zeros(256, dtype=np.bool_))
    dataset = Dataset.of(np.ones((4, variables)), np.array([0.0, 1.0, 2.0, 5.0]))
    losses = np.empty((len(batch), batch.vectors))
    outputs = Outputs(None, losses, np.zeros(1, np.uint8), lambda _: None, reply=reply)
    evaluation = Evaluation(dataset.content_id, batch, loss=loss, values=False)
    timings = losses_in_one_launch(
        *(context, kernels, work, evaluation, ResidentDataset(dataset, None), outputs),
        *(time.perf_counter_ns() - waited, waited),
    )
    return context, losses, timings


def test_the_driver_gets_a_batch_that_computes_the_same():
    programs, parameters = thesis_mix(3, 40)
    batch, driver = Batch.of(programs, parameters), Driver()
    context, losses, timings = launch(batch, driver)
    assert [call[0] for call in driver.calls] == [
        *("upload", "record", "launch", "launch", "launch", "record", "synchronize", "elapsed")
    ]
    assert context.status == 0
    assert timings.compute == 250_000
    assert 0 <= timings.copy_in < 60e9
    assert losses[:, 0].tolist() == [float(job) for job in range(40)]
    (told,), (slots,) = driver.told[INTERPRET], driver.told[SLOTS]
    parts = Parts.of(batch)
    staged = Staged(driver.uploaded, parts, Extent(0, int(slots["count"]), 0, False))
    assert told["programs"] - (1 << 30) == parts.programs
    assert slots["slots"] - (1 << 30) == parts.slots
    first, count, *_ = staged.programs[-1].tolist()
    staged = Staged(driver.uploaded, parts, Extent(first + count, len(staged.slots), 0, False))
    alone = Machine(batch, staged, COLUMNS)
    from warpfit.reference import evaluate_program

    with np.errstate(all="ignore"):
        for index in range(len(batch)):
            expected = evaluate_program(
                batch.program(index), COLUMNS, batch.program_parameters(index)[0]
            )
            np.testing.assert_array_equal(alone.run(index), expected)


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
    assert told["slot_count"] == slots["count"] > 0
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
    order = driver.uploaded[Parts.of(batch).order :].view(np.uint32)[:40]
    assert [sorted(order[first : first + 14]) for first in (0, 14, 28)] == [
        [*range(14)], [*range(14, 28)], [*range(28, 40)],
    ]  # fmt: skip
    assert launches(driver)[SUM][1] == 40


@pytest.mark.parametrize(
    ("tokens", "jobs", "expected"),
    [(10, 300, 300), (100, 300, 150), (10**6, 300, 5), (10**6, 20, 1), (100, 1, 1)],
)
def test_jobs_of_a_launch(tokens, jobs, expected):
    work = WORK._replace(first_row=0, end_row=1000, at_once=50_000)
    assert jobs_at_once(work, tokens, jobs) == expected


def launches(driver):
    return {call[1]: call[1:] for call in driver.calls if call[0] == "launch"}


def test_without_row_invariant_work_nothing_is_launched_for_it():
    driver = Driver()
    launch(Batch.of([Program.variable(1)]), driver)
    assert set(launches(driver)) == {INTERPRET, SUM}


def test_the_status_of_the_driver_is_passed_on():
    driver = Driver()
    driver.fail = "upload"
    context, *_ = launch(Batch.of([Program.variable(1)]), driver)
    assert context.status == 700
    assert [call[0] for call in driver.calls] == ["upload"]


def test_what_cannot_be_encoded_is_refused_before_the_driver_hears_of_it():
    driver, far = Driver(), Program.variable(bytecode.INDEX_LIMIT)
    with pytest.raises(ResourceExhaustedError, match="index"):
        launch(Batch.of([far]), driver, variables=bytecode.INDEX_LIMIT + 1)
    assert driver.calls == []


def test_a_variable_that_is_not_there_is_refused_before_the_driver_hears_of_it():
    driver = Driver()
    with pytest.raises(ProgramError) as caught:
        launch(Batch.of([Program.variable(0), Program.variable(2)]), driver, variables=2)
    assert (caught.value.reason, caught.value.expression) == ("VARIABLE_OUT_OF_RANGE", 1)
    assert driver.calls == []


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
