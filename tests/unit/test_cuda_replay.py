"""Repeated batches of the compiled tier, with functions in the driver's place."""

from __future__ import annotations

import socket
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("numba")
pytest.importorskip("cuda.bindings")

from support.replayed import COMPUTED, NANOSECONDS, STARTED, STREAM, Driver, DriverError, Store
from warpfit.dataset import Dataset
from warpfit.errors import CancelledError
from warpfit.ir import Batch, Program
from warpfit.request import Evaluation, Loss, Precision, Tier
from warpfit.workload import thesis_mix
from warpfit_server.channel import Channel, ChannelClosedError, Finished
from warpfit_server.engine.base import Outputs, Reply, run_to_end
from warpfit_server.engine.cuda import compiled
from warpfit_server.engine.cuda.compiled import CompiledTier
from warpfit_server.engine.cuda.plan import fingerprint
from warpfit_server.engine.cuda.resident import ResidentDataset
from warpfit_server.engine.cuda.shapes import lift

ROWS = 1000
X, P = Program.variable(0), Program.parameter
COLUMN = 4096


class Resident(ResidentDataset):
    """Whose addresses tell column and row."""

    @property
    def stride(self):
        return ROWS

    def address(self, column, row):
        return (column + 1) * COLUMN + row


class Bench:
    """A tier on a device of functions."""

    def __init__(self, dtype=np.float32):
        self.driver = Driver()
        self.store = Store(self.driver)
        self.tier = CompiledTier(self.driver.device, self.store)
        rng = np.random.default_rng(0)
        self.dataset = Dataset.of(rng.normal(size=(ROWS, 10)), rng.normal(size=ROWS), dtype=dtype)
        self.resident = Resident(self.dataset, None)

    def __call__(self, batch, cancelled=0, reply=None, **options):
        options = {"loss": Loss.SSE, "values": False, **options}
        evaluation = Evaluation(self.dataset.content_id, batch, **options)
        losses = np.full((len(batch), batch.vectors), -1.0)
        gradients = np.full(len(batch.parameters), -1.0) if evaluation.gradient else None
        flag = np.full(1, cancelled, np.uint8)
        outputs = Outputs(None, losses, flag, lambda _: None, gradients=gradients, reply=reply)
        timings = run_to_end(self.tier.evaluate(self.resident, evaluation, outputs))
        return (losses, timings) if gradients is None else (losses, gradients)


@pytest.fixture
def bench():
    return Bench()


def mix(seed=1, count=30, vectors=1, scale=1.0):
    programs, parameters = thesis_mix(seed, count)
    return Batch.of(programs, [np.stack([p * scale] * vectors) for p in parameters])


def sums_of(batch, dtype=np.float32):
    """What the kernels of the device of functions compute."""
    lifted = lift(batch)
    slots = np.empty((batch.vectors, lifted.slot_starts[-1]), dtype)
    lifted.fill(batch, slots)
    pairs = zip(lifted.slot_starts, lifted.slot_starts[1:], strict=False)
    wide = slots.astype(np.float64)
    return np.stack([i + wide[:, a:b].sum(axis=1) for i, (a, b) in enumerate(pairs)])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("vectors", [1, 3])
def test_a_repeated_batch_is_captured_once_and_gets_its_own_parameters(dtype, vectors):
    bench = Bench(dtype)
    for scale in (1.0, 0.5, -3.0):
        batch = mix(vectors=vectors, scale=scale)
        losses, timings = bench(batch)
        np.testing.assert_array_equal(losses, sums_of(batch, dtype))
        assert timings.tier is Tier.COMPILED
    assert len(bench.driver.graphs) == 1
    assert timings.cache_hits == len(batch)
    assert timings.compute == NANOSECONDS


def test_the_driver_is_called_step_by_step(bench):
    bench(mix())
    bench.driver.calls.clear()
    bench(mix())
    calls = bench.driver.calls
    assert calls[:4] == [
        ("record", STARTED, STREAM), ("launch_graph", 0, STREAM), ("record", COMPUTED, STREAM),
        ("synchronize", STREAM),
    ]  # fmt: skip
    assert [(call[0], *call[2:]) for call in calls[4:]] == [("elapsed", STARTED, COMPUTED)]


def test_each_launch_is_told_its_rows(bench):
    batch = mix()
    for rows in ((0, ROWS), (33, 700), (64, 65)):
        bench(batch, rows=rows)
        (number,) = (call[1] for call in bench.driver.calls if call[0] == "launch_graph")
        bench.driver.calls.clear()
        request, aligned = bench.driver.graphs[number].request, rows[0] // 32 * 32
        assert request["variables"] == COLUMN + aligned
        assert request["target"] == 11 * COLUMN + aligned
        assert (request["head"], request["stop"]) == (rows[0] - aligned, rows[1] - aligned)
        assert (request["weights"], request["stride"]) == (0, 4 * ROWS)


def test_large_work_goes_to_the_device_in_pieces(bench, monkeypatch):
    batch, rows = mix(), (33, 700)
    whole, _ = bench(batch, rows=rows)
    monkeypatch.setattr(compiled, "_LEAST_ROWS", 1)
    monkeypatch.setattr(compiled, "token_rows_at_once", lambda *_: len(batch.codes) * 200)
    losses, timings = bench(batch, rows=rows)
    requests = bench.driver.graphs[-1].requests[-3:]
    assert [(one["head"], one["stop"]) for one in requests] == [(1, 256), (0, 256), (0, 156)]
    firsts = [COLUMN + 32 + 4 * first for first in (0, 256, 512)]
    assert [one["variables"] for one in requests] == firsts
    assert [one["target"] for one in requests] == [10 * COLUMN + first for first in firsts]
    assert [one["weights"] for one in requests] == [0, 0, 0]
    np.testing.assert_array_equal(losses, 3 * whole)  # each launch adds the same
    assert timings.compute == 3 * NANOSECONDS
    np.testing.assert_array_equal(bench(batch, rows=rows)[0], losses)


def test_an_error_between_two_pieces_is_raised(bench, monkeypatch):
    monkeypatch.setattr(compiled, "_LEAST_ROWS", 1)
    monkeypatch.setattr(compiled, "token_rows_at_once", lambda *_: 1)
    bench.driver.fail = "elapsed"
    with pytest.raises(DriverError):
        bench(mix())
    bench.driver.fail = ""
    (first,) = bench.driver.graphs[-1].requests
    np.testing.assert_array_equal(bench(mix())[0], 32 * sums_of(mix()))
    assert bench.driver.graphs[-1].requests[1] == first


@pytest.mark.parametrize("loss", Loss)
def test_sums_become_losses_as_numpy_would_make_them(bench, loss):
    batch = mix()
    losses, _ = bench(batch, loss=loss, rows=(10, 500))
    expected = bench.resident.losses(loss, sums_of(batch), 10, 500)
    assert losses.tobytes() == expected.tobytes()


def test_gradients_come_in_the_order_of_the_parameters(bench):
    programs = [Program.apply("add", P(1), X), X, Program.apply("mul", P(1), P(0))]
    vectors = [np.array([[9.0, 1.0], [9.0, 2.0]]), np.zeros((2, 0)), np.array([[3.0, 4.0]] * 2)]
    losses, gradients = bench(Batch.of(programs, vectors), gradient=True)
    # Sums 0 to 4: loss and p1, loss, loss, p1 and p0 in order of appearance.
    assert losses.tolist() == [[1.0, 2.0], [2.0, 2.0], [10.0, 10.0]]
    assert gradients.tolist() == [
        0.0,
        2 * 2.0,
        0.0,
        2 * 3.0,
        2 * 12.0,
        2 * 11.0,
        2 * 12.0,
        2 * 11.0,
    ]


def test_batches_of_one_fingerprint_are_told_apart(bench, monkeypatch):
    monkeypatch.setattr(compiled, "fingerprint", lambda batch: 7)
    for batch in (mix(1), mix(2), mix(1, 29), mix(1)):
        losses, _ = bench(batch)
        np.testing.assert_array_equal(losses, sums_of(batch))


def test_constants_tell_batches_apart_only_where_they_are_in_the_code(bench):
    def batch(exponent, constant):
        power = Program.apply("pow", X, Program.constant(exponent))
        return Batch.of([Program.apply("add", power, Program.constant(constant))] * 5)

    for exponent, constant in ((2.0, 1.5), (2.0, 2.5), (3.0, 1.5)):
        losses, _ = bench(batch(exponent, constant))
        np.testing.assert_array_equal(losses[:, 0], np.arange(5) + constant)
    assert len(bench.driver.graphs) == 2


def test_an_error_of_the_device_is_raised_and_the_graph_kept(bench):
    bench(mix())
    bench.driver.fail = "launch_graph"
    with pytest.raises(DriverError):
        bench(mix())
    bench.driver.fail = ""
    losses, _ = bench(mix())
    np.testing.assert_array_equal(losses, sums_of(mix()))
    assert len(bench.driver.graphs) == 1


def test_what_is_cancelled_is_not_launched(bench):
    with pytest.raises(CancelledError):
        bench(mix(), cancelled=1)
    assert bench.driver.calls == []


def test_a_number_too_large_for_float32_becomes_infinite(bench):
    program = Program.apply("add", X, P(0))
    losses, _ = bench(Batch.of([program], [[[1e300], [-1e300], [2.0]]]))
    assert losses.tolist() == [[np.inf, -np.inf, 2.0]]


def test_what_is_loaded_is_not_prepared_again(bench):
    tier, resident = bench.tier, bench.resident
    evaluation = Evaluation(bench.dataset.content_id, mix(), loss=Loss.SSE, values=False)
    mark = fingerprint(evaluation.batch)
    assert tier.loaded(resident, evaluation, mark) is None
    tier.request_compile(resident, evaluation)
    prepared = tier.loaded(resident, evaluation, mark)
    assert prepared is tier.prepare(resident, evaluation)
    bench(mix())
    bench.store.cache.clear()  # the captured graph holds its kernels
    assert tier.loaded(resident, replace(evaluation, batch=mix(scale=2.0)), mark) is prepared
    for other in (
        replace(evaluation, batch=mix(2)),
        replace(evaluation, precision=Precision.FAST),
        replace(evaluation, loss=Loss.MAE),
    ):
        assert tier.loaded(resident, other, mark) is None


def test_who_waits_is_told_once_the_losses_are_there(bench):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    bench(mix())
    with theirs:
        reply = Reply(theirs.fileno(), queue=123)
        _, timings = bench(mix(), reply=reply)
    channel = Channel(ours)
    message, _ = channel.receive()
    assert reply.is_sent
    assert message == Finished(replace(timings, queue=123))
    assert (timings.queue, timings.tier, timings.cache_hits) == (0, Tier.COMPILED, 30)
    with pytest.raises(ChannelClosedError):
        channel.receive()
    channel.close()


def test_a_failure_tells_nobody(bench):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    bench.driver.fail = "synchronize"
    with ours, theirs:
        reply = Reply(theirs.fileno(), queue=0)
        with pytest.raises(DriverError):
            bench(mix(), reply=reply)
        assert not reply.is_sent
        ours.setblocking(False)
        with pytest.raises(BlockingIOError):
            ours.recv(100)
