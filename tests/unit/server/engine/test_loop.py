"""The engine loop over real connections, with an engine that computes next to nothing."""

import errno
import threading
import time
from concurrent.futures import Future
from unittest.mock import Mock

import numpy as np
import pytest

from support.servers.examples import DATA
from support.servers.server import eventually
from warpfit import errors
from warpfit.ir import Batch
from warpfit.parse import parse
from warpfit.request import Evaluation, Loss, Precision, Tier, Timings
from warpfit_server.engine import loop as loop_module
from warpfit_server.engine.evaluation import LoadedDatasets
from warpfit_server.engine.interface import EngineBrokenError
from warpfit_server.engine.loop import Loop
from warpfit_server.engine.runner import RequestRunner
from warpfit_server.engine.scheduler import FrontEndConnection
from warpfit_server.ipc import messages
from warpfit_server.ipc.engine_connection import EngineConnection, InFlightRequest
from warpfit_server.ipc.messages import Channel
from warpfit_server.ipc.segments import SegmentPool
from warpfit_server.machine import EXIT_BROKEN

#: Constants in programs that make the engine below misbehave, or wait.
BAD, BUG, LACKS_MEMORY, BROKEN, SLOW, WAITS, ON_DEVICE = np.arange(601.0, 608.0).tolist()
ERRORS = {
    BAD: errors.ProgramError("bad", "BAD_TOKEN", expression=0),
    BUG: ZeroDivisionError(),
    LACKS_MEMORY: OSError(errno.ENOMEM, "no memory"),
    BROKEN: EngineBrokenError(),
}
STEPS = 400
#: Nanoseconds that the engine below says that it computes: more than a request really waits.
COMPUTE = 55 * 10**12


class Work(threading.Event):
    done, result = threading.Event.is_set, threading.Event.wait


class FakeEngine:
    """An engine that records the sizes of its batches; evaluations wait for ``go``."""

    step_size, steps_share_cores = 1 << 20, False

    def __init__(self, steps_in_flight=1, threads=None):
        self.steps_in_flight = steps_in_flight
        self.step_threads = threads or steps_in_flight
        self.batches, self.mapped, self.steps = [], [], 0
        self.promised, self.device = Future(), []
        self.go = threading.Event()
        self.go.set()

    should_merge = merge_from = others_wait = Mock(return_value=2)

    def map_segment(self, segment):
        self.mapped.append(segment.identifier)

    def evaluate(self, evaluation, outputs):
        batch = evaluation.batch
        self.batches.append(len(batch))
        self.go.wait(10)
        constants = set(batch.values)
        for constant in constants & ERRORS.keys():
            raise ERRORS[constant]
        if WAITS in constants:
            yield self.promised
        if ON_DEVICE in constants:
            self.device.append(Work())
            yield self.device[-1]
        for _ in range(STEPS if SLOW in constants else 0):
            self.steps += 1
            time.sleep(0.002)
            yield None
        found = np.array([batch.program_parameters(n).sum(axis=1) for n in range(len(batch))])
        if outputs.losses is not None:
            outputs.losses[...] = found
        if outputs.values is not None:
            outputs.values[...] = found[..., None]
            outputs.ready(len(batch))
        return Timings(compute=COMPUTE)


class Front:
    def __init__(self, loop):
        ours, theirs = Channel.pair()
        self.link = EngineConnection(SegmentPool(1 << 24))
        self.link.open(theirs)
        self.connection, self.loop = FrontEndConnection(ours), loop
        loop.add(self.connection)

    def start(self, *parameters, tenant="me", **changes):
        return self.link.start(an_evaluation(*parameters, **changes), DATA.layout, tenant)

    def start_alone(self, parameter, constant=1.0):
        return self.start(parameter, constant=constant, values=True)

    def answer(self, *runs):
        """Wait for answers; return the losses, or the error, of each, and close."""
        answers = []
        for run in runs:
            try:
                while not isinstance(run.next_reply(), messages.RequestFinished):
                    pass
                answers.append(run.array("losses")[:, 0].tolist())
            except errors.WarpfitError as error:
                answers.append(error)
            finally:
                run.close()
        return answers[0] if len(answers) == 1 else answers


def an_evaluation(*parameters, constant=1.0, **changes):
    program = parse(f"p1*x1 + {constant}")
    # To be interpreted, so that equal programs may be merged.
    fields = {"loss": Loss.SSE, "values": False, "tier": Tier.INTERPRETER, **changes}
    batch = Batch.of([program] * len(parameters), [[[one]] for one in parameters])
    return Evaluation(DATA.content_id, batch, **fields)


@pytest.fixture
def run_loop():
    engines, fronts = [], []

    def start(steps_in_flight=1, front_ends=1, threads=None):
        engine = FakeEngine(steps_in_flight, threads)
        datasets = LoadedDatasets(engine, {DATA.content_id: DATA})
        loop = Loop(engine, RequestRunner(engine, datasets, 1 << 16))
        loop.start()
        found = [Front(loop) for _ in range(front_ends)]
        engines.append(engine)
        fronts.extend(found)
        return (engine, *found)

    yield start
    for engine in engines:
        engine.go.set()
    for front in fronts:
        front.link.shut()


def test_an_engine_is_told_once_of_each_segment(run_loop):
    engine, front = run_loop()
    runs = [front.start(1.0) for _ in range(2)]
    front.answer(*runs)
    front.answer(front.start(2.0))
    assert sorted(engine.mapped) == sorted({run.segment.identifier for run in runs})


def test_each_request_gets_its_own_losses(run_loop):
    _, one, two = run_loop(2, front_ends=2)
    runs = [(f, n, f.start(*range(n + 1))) for n in range(30) for f in (one, two)]
    for front, n, run in runs:
        assert front.answer(run) == list(range(n + 1))


@pytest.fixture
def held(run_loop):
    """A loop whose only thread is busy until ``engine.go`` is set, with its front ends."""

    def start(**options):
        engine, *fronts = run_loop(**options)
        engine.go.clear()
        busy = fronts[0].start_alone(1.0)
        eventually(lambda: engine.batches)
        return engine, busy, *fronts

    return start


class TestMerging:
    def test_waiting_requests_are_merged_and_their_losses_scattered(self, held):
        engine, busy, one, two = held(front_ends=2)
        runs = [
            (front, n, front.start(*range(n, 2 * n), tenant=tenant))
            for n in range(1, 6)
            for front, tenant, n in ((one, "a", n), (two, "b", n + 5))
        ]
        others = one.start(7.0, precision=Precision.FAST)
        engine.go.set()
        for front, n, run in runs:
            assert front.answer(run) == list(range(n, 2 * n))
            assert run.timings.compute == n * 10**12, "its share of the step"
            assert run.timings.queue >= COMPUTE - n * 10**12
        assert one.answer(others) == [7.0]
        one.answer(busy)
        assert sorted(engine.batches) == [1, 1, 55]

    @pytest.mark.parametrize(
        ("constant", "reason"),
        [(BAD, "BAD_TOKEN"), (BUG, "ENGINE_FAILURE"), (LACKS_MEMORY, "MEMORY")],
    )
    def test_a_request_that_fails_fails_alone(self, held, constant, reason):
        engine, busy, front = held()
        runs = [front.start(n, constant=constant if n == 2 else 1.0) for n in range(4)]
        engine.go.set()
        *_, error, last = front.answer(busy, *runs)
        assert (error.reason, last) == (reason, [3.0])
        assert engine.batches[:2] == [1, 4]

    def test_merged_requests_wait_apart_for_code_that_is_being_loaded(self, held):
        engine, busy, front = held()
        runs = [front.start(n, constant=WAITS if n == 1 else 1.0) for n in range(3)]
        engine.go.set()
        assert front.answer(busy, runs[0], runs[2]) == [[1.0], [0.0], [2.0]]
        assert runs[1].queue.empty()
        engine.promised.set_result(None)
        assert front.answer(runs[1]) == [1.0]

    def test_cancelled_requests_are_left_out(self, held):
        engine, busy, front = held()
        runs = [front.start(n, n) for n in range(4)]
        for run in runs[1:3]:
            run.cancel()
        engine.go.set()
        _, first, *cancelled, last = front.answer(busy, *runs)
        assert (first, last) == ([0.0, 0.0], [3.0, 3.0])
        assert all(isinstance(answer, errors.CancelledError) for answer in cancelled)
        assert engine.batches == [1, 4]


class TestCancellation:
    def test_between_two_steps(self, run_loop):
        engine, front = run_loop()
        run = front.start_alone(1.0, SLOW)
        eventually(lambda: engine.steps > 3)
        assert [*front.loop.flags()], "steps that do not end are noticed by it"
        run.cancel()
        assert isinstance(front.answer(run), errors.CancelledError)
        assert engine.steps < STEPS
        eventually(lambda: not [*front.loop.flags()])
        assert front.answer(front.start(2.0)) == [2.0]

    def test_while_it_waits_for_code_that_is_being_compiled(self, run_loop):
        engine, front = run_loop()
        run = front.start_alone(1.0, WAITS)
        eventually(lambda: engine.batches)
        run.cancel()
        assert isinstance(front.answer(run), errors.CancelledError)
        later = front.start_alone(1.0, WAITS)
        eventually(lambda: engine.batches == [1, 1])
        later.segment.map[later.segment_layout.flag_offset] = 2  # written at the deadline of a fit
        time.sleep(2 * loop_module._LOOK_SECONDS)
        engine.promised.set_result(None)
        assert front.answer(later) == [1.0], "a fit goes on after its deadline"


class TestSharing:
    def test_small_requests_are_answered_between_the_steps_of_a_long_one(self, run_loop):
        engine, front = run_loop()
        long = front.start_alone(1.0, SLOW)
        eventually(lambda: engine.steps)
        for n in range(10):
            assert front.answer(front.start(n, tenant=("me", "another")[n % 2])) == [n]
        assert engine.steps < STEPS
        assert front.answer(long) == [1.0]
        assert engine.steps == STEPS

    def test_small_requests_are_answered_while_merged_ones_pause(self, held):
        engine, busy, front = held()
        merged = [front.start(n, constant=SLOW, tenant="greedy") for n in (1.0, 2.0, 3.0)]
        engine.go.set()
        front.answer(busy)
        eventually(lambda: engine.steps)
        assert 3 in engine.batches
        assert front.answer(front.start(4.0, tenant="modest")) == [4.0]
        assert engine.steps < STEPS
        merged[0].cancel()
        assert front.answer(*merged[1:]) == [[2.0], [3.0]]
        assert engine.steps == STEPS
        assert front.answer(front.start(5.0, tenant="greedy")) == [5.0]

    def test_others_run_while_one_waits_for_the_device_and_are_answered_first(self, run_loop):
        engine, front = run_loop(2, threads=1)
        first = front.start_alone(1.0, ON_DEVICE)
        eventually(lambda: engine.device)
        for n in range(3):
            assert front.answer(front.start(n)) == [n]
        assert first.queue.empty()
        engine.device[0].set()
        assert front.answer(first) == [1.0]

    def test_no_more_steps_wait_for_the_device_than_the_engine_gains_from(self, run_loop):
        engine, front = run_loop(2, threads=1)
        runs = [front.start_alone(n, ON_DEVICE) for n in range(3)]
        eventually(lambda: len(engine.device) == 2)
        time.sleep(0.05)
        assert len(engine.batches) == 2
        engine.device[1].set()  # the second one ends first
        assert front.answer(runs[1]) == [1.0]
        eventually(lambda: len(engine.device) == 3)
        for work in engine.device:
            work.set()
        assert front.answer(runs[0], runs[2]) == [[0.0], [2.0]]


class TestFailures:
    def test_a_front_end_that_dies_costs_its_own_requests(self, run_loop):
        engine, dying, living = run_loop(front_ends=2)
        lost = [dying.start_alone(1.0, SLOW), dying.start_alone(2.0)]
        eventually(lambda: engine.steps > 3)
        dying.link.shut()
        assert all(isinstance(answer, errors.UnavailableError) for answer in dying.answer(*lost))
        assert living.answer(living.start(3.0)) == [3.0]
        eventually(lambda: not dying.connection.requests)
        assert engine.steps < STEPS

    def test_a_segment_that_is_too_small_fails_its_request_only(self, run_loop):
        _, front = run_loop()
        run = InFlightRequest.of_evaluation(an_evaluation(1.0), DATA.layout)
        run.write(front.link.pool.acquire(run.segment_layout.nbytes))
        run.segment_layout = run.segment_layout._replace(nbytes=run.segment.size + 1)
        front.link.send(run)
        assert isinstance(front.answer(run), errors.InternalError)
        assert front.answer(front.start(2.0)) == [2.0]

    @pytest.mark.parametrize("count", [1, 3])
    def test_a_broken_engine_ends_the_process(self, held, monkeypatch, count):
        ended = []

        def end(status):
            ended.append(status)
            threading.Event().wait()  # the real one does not return, either

        monkeypatch.setattr(loop_module.os, "_exit", end)
        engine, busy, front = held()
        runs = [front.start(n, constant=BROKEN) for n in range(count)]
        engine.go.set()
        assert front.answer(busy) == [1.0]
        eventually(lambda: ended)
        assert ended == [EXIT_BROKEN]
        assert all(run.queue.empty() for run in runs)
