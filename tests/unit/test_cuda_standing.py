"""Lanes that compiled code serves: who answers, when Python comes in, who gives memory back."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("numba")

from support.driver import Driver
from support.interpreted import STREAMS, EngineOnLanes, HostEngine, host_device, wait_until
from warpfit.dataset import Dataset
from warpfit.errors import CancelledError, ProgramError
from warpfit.ir import Batch, Program
from warpfit.request import Evaluation, Loss, Precision, Tier
from warpfit.workload import thesis_mix
from warpfit_server.engine.cuda import streams
from warpfit_server.engine.cuda.batch_memory import Parts
from warpfit_server.engine.roster import AT_WORK
from warpfit_server.fairness import FairGate
from warpfit_server.frame import Frame

DATA = Dataset.of(np.ones((100_000, 10)), np.arange(100_000.0), dtype="float32")
#: Evaluations until compiled code answers: one that brings the segment, and two of a kind.
FIRST = 3


class Blocking(Driver):
    """Whose device can be made to wait."""

    def __init__(self):
        super().__init__()
        self.may_end = threading.Event()
        self.may_end.set()
        self.began = threading.Event()

    def _synchronize(self, stream):
        self.began.set()
        assert self.may_end.wait(10)


def fresh(seed, programs=40, **changes):
    batch = Batch.of(*thesis_mix(seed, programs))
    plain = Evaluation(
        *(DATA.content_id, batch),
        loss=Loss.SSE,
        values=False,
        precision=Precision.FAST,
        tier=Tier.INTERPRETER,
    )
    return replace(plain, **changes)


@pytest.fixture
def driver():
    return Blocking()


@pytest.fixture
def lanes(driver):
    with EngineOnLanes(HostEngine(host_device(driver)), DATA) as found:
        yield found


@pytest.fixture
def served(lanes):
    """A lane that compiled code serves."""
    for seed in range(FIRST):
        lanes.losses(fresh(seed))
    assert lanes.engine.evaluated == FIRST
    return lanes


def check_answer(driver, evaluation, losses):
    """The driver sums job numbers up; what it was given must be the batch."""
    batch = evaluation.batch
    np.testing.assert_array_equal(losses.reshape(-1), np.arange(float(len(batch) * batch.vectors)))
    parts = Parts.of(batch)
    assert len(driver.uploaded) == parts.uploaded
    for name in ("codes", "values", "lengths", "parameter_counts"):
        np.testing.assert_array_equal(getattr(driver.batch, name), getattr(batch, name))
    numbers = driver.uploaded[parts.parameters :].view(np.uint8)[: batch.parameters.nbytes]
    assert numbers.tobytes() == batch.parameters.tobytes()


def test_compiled_code_answers_what_python_has_answered_before(driver, served):
    for seed in range(10, 30):
        evaluation = fresh(seed, programs=60 - seed)
        check_answer(driver, evaluation, served.losses(evaluation))
    assert served.engine.evaluated == FIRST


def test_several_parameter_vectors(driver, lanes):
    programs, parameters = thesis_mix(1, 40)
    batch = Batch.of(programs, [np.stack([p, 2 * p, 3 * p]) for p in parameters])
    for _ in range(6):
        evaluation = fresh(0, batch=batch)
        check_answer(driver, evaluation, lanes.losses(evaluation))
    assert lanes.engine.evaluated == FIRST


def test_times_are_told_and_observed(served):
    for seed in range(10, 15):
        run = served.start(fresh(seed))
        run.next_event()
        run.close()
        assert run.timings.compute == 250_000
        assert 0 < run.timings.queue < 60e9
        assert 0 < run.timings.copy_in < 60e9
    before = len(served.engine.observed)
    served.losses(fresh(1, loss=Loss.MAE))  # another kind, so that Python comes in
    tier, mode, token_rows, seconds = served.engine.observed[before]
    lengths = [len(fresh(seed).batch.codes) for seed in range(10, 15)]
    assert (tier, mode) == (Tier.INTERPRETER, "fast")
    assert token_rows == sum(lengths) * 100_000 // 5
    assert 0 < seconds < 10


@pytest.mark.parametrize(
    "change",
    [
        {"loss": Loss.R2},
        {"rows": (5, 700)},
        {"precision": Precision.PRECISE},
        {"tier": Tier.AUTO},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_kind_is_left_to_python(driver, served, change):
    served.losses(fresh(7, **change))
    assert served.engine.evaluated == FIRST + 1
    evaluation = fresh(8)
    check_answer(driver, evaluation, served.losses(evaluation))
    assert served.engine.evaluated == FIRST + 2


def test_another_tenant_is_left_to_python(served):
    served.losses(fresh(7), tenant="another")
    assert served.engine.evaluated == FIRST + 1


@pytest.mark.parametrize("programs", [100, 21])
def test_python_answers_what_needs_more_room_or_another_kernel(driver, served, programs):
    evaluation = fresh(9, programs=programs)
    check_answer(driver, evaluation, served.losses(evaluation))
    assert served.engine.evaluated == FIRST + 1


def test_python_says_what_is_wrong_with_a_batch(served):
    bad = Batch.of([Program.variable(0), Program.variable(10)])
    with pytest.raises(ProgramError) as caught:
        served.losses(fresh(0, batch=bad))
    assert (caught.value.reason, caught.value.expression) == ("VARIABLE_OUT_OF_RANGE", 1)
    assert served.engine.evaluated == FIRST + 1


def test_what_is_cancelled_is_not_launched(driver, served, monkeypatch):
    write = Frame.write

    def write_and_cancel(frame, segment, batch):
        write(frame, segment, batch)
        frame.flag(segment)[0] = 1

    monkeypatch.setattr(Frame, "write", write_and_cancel)
    driver.calls.clear()
    with pytest.raises(CancelledError):
        served.losses(fresh(10))
    assert driver.calls == []


def test_an_error_of_the_device_is_pythons(driver, served, monkeypatch):
    import warpfit_server.engine.process as module

    ended = []
    monkeypatch.setattr(module.os, "_exit", ended.append)
    driver.fail = "launch"
    run = served.start(fresh(10))
    served.threads[0].join(10)
    assert served.engine.evaluated == FIRST + 1
    assert ended[:1] == [module.EXIT_BROKEN]
    served.lanes.shut()
    run._running = False


def test_batches_that_come_again_are_pythons_if_a_tier_may_be_chosen(lanes):
    for seed in range(5):
        lanes.losses(fresh(seed, tier=Tier.AUTO))
    assert lanes.engine.evaluated == FIRST
    lanes.losses(fresh(4, tier=Tier.AUTO))
    assert lanes.engine.evaluated == FIRST + 1
    lanes.losses(fresh(4, tier=Tier.AUTO, precision=Precision.PRECISE))
    assert lanes.engine.evaluated == FIRST + 2


def test_what_comes_in_vain_is_tried_less_and_less(lanes, monkeypatch):
    tried = []
    join = lanes.engine._standings.join
    monkeypatch.setattr(
        lanes.engine._standings,
        "join",
        lambda *known, **named: tried.append(lanes.engine.evaluated) or join(*known, **named),
    )
    for _ in range(200):
        lanes.losses(fresh(0, tier=Tier.AUTO))
    assert lanes.engine.evaluated == 199  # one was new to compiled code
    assert len(tried) < 10
    assert np.all(np.diff(tried)[2:] >= 4)


def test_memory_comes_back_while_nothing_is_at_work(served):
    served.losses(fresh(10))
    assert served.engine.idle_contexts == 0
    served.engine.unload(DATA.content_id)
    wait_until(lambda: served.engine.idle_contexts == 1)
    served.engine.load(DATA)
    served.losses(fresh(11))
    assert served.engine.evaluated == FIRST + 1


def test_memory_of_other_data_sets_stays(served):
    served.losses(fresh(10))
    served.engine.unload(b"another")
    assert served.engine.idle_contexts == 0


def test_memory_comes_back_once_the_work_has_ended(driver, served):
    driver.began.clear()
    driver.may_end.clear()
    run = served.start(fresh(10))
    assert driver.began.wait(10)
    assert served.process._roster.board[1:, AT_WORK].any()
    served.engine._device.on_shortage()
    assert served.engine.idle_contexts == 0
    driver.may_end.set()
    run.next_event()
    run.close()
    wait_until(lambda: served.engine.idle_contexts == 1)
    served.losses(fresh(11))
    assert served.engine.evaluated == FIRST + 1


def test_a_stuck_evaluation_can_be_seen(driver, served):
    driver.began.clear()
    driver.may_end.clear()
    run = served.start(fresh(10))
    assert driver.began.wait(10)
    run.cancel()
    ((_, flag),) = served.process._roster.flags()
    assert flag[0] == 1
    driver.may_end.set()
    run.close()


def test_what_waits_for_its_turn_ends_when_it_is_cancelled(driver):
    with EngineOnLanes(HostEngine(host_device(driver)), DATA, lanes=3) as lanes:
        lanes.process._gate = gate = FairGate(1)
        driver.may_end.clear()
        first = lanes.start(fresh(1))
        assert driver.began.wait(10)
        second = lanes.start(fresh(2))
        wait_until(lambda: gate._waiting)
        second.cancel()
        with pytest.raises(CancelledError):
            second.next_event()
        second.close()
        assert not gate._waiting
        driver.may_end.set()
        first.next_event()
        first.close()
        assert lanes.engine.evaluated == 1


def test_the_first_evaluation_of_a_tenant_goes_before_further_ones(driver):
    with EngineOnLanes(HostEngine(host_device(driver)), DATA, lanes=4) as lanes:
        for seed in range(FIRST + 1):
            driver.calls.clear()
            driver.may_end.clear()
            runs = [lanes.start(fresh(2 * seed)), lanes.start(fresh(2 * seed + 1))]
            wait_until(lambda: len(_streams(driver)) == 2)
            driver.may_end.set()
            for run in runs:
                run.next_event()
                run.close()
        assert lanes.engine.evaluated == 2 * FIRST
    assert sorted(_streams(driver)) == [STREAMS[streams.FIRST], STREAMS[streams.USUAL]]


def test_what_takes_several_launches_does_not_go_first(driver):
    data = Dataset.of(np.ones((30_000_000, 1)), np.ones(30_000_000), dtype="float32")
    batch = Batch.of(*thesis_mix(1, 40, variables=1))
    with EngineOnLanes(HostEngine(host_device(driver)), data) as lanes:
        for _ in range(FIRST):
            lanes.losses(fresh(0, batch=batch, dataset_id=data.content_id))
        driver.calls.clear()
        lanes.losses(fresh(0, batch=batch, dataset_id=data.content_id))
        assert lanes.engine.evaluated == FIRST
    assert _streams(driver) == [STREAMS[streams.USUAL]]


def _streams(driver):
    """Streams that were waited for."""
    return [stream for name, stream, *_ in driver.calls if name == "synchronize"]


def test_a_tenant_is_charged_while_compiled_code_works_for_it(served):
    gate, accounts = served.process._gate, served.process._accounts
    before = gate.charged("")
    for seed in range(10, 13):
        served.losses(fresh(seed))
    accounts.charge(0.2)
    charged = gate.charged("")
    assert before < charged < before + 10
    accounts.charge(0.2)
    assert gate.charged("") == charged
    served.losses(fresh(13))
    served.losses(fresh(1, loss=Loss.MAE))  # another kind, so that Python comes in
    assert not accounts._open
    by_python = gate.charged("")
    accounts.charge(0.2)
    assert gate.charged("") > by_python, "what was done last is not forgotten"


def test_a_lane_that_is_closed_gives_everything_back(driver):
    with EngineOnLanes(HostEngine(host_device(driver)), DATA) as lanes:
        for seed in range(4):
            lanes.losses(fresh(seed))
        engine, roster = lanes.engine, lanes.process._roster
        assert engine._standings._members
    assert not engine._standings._members
    assert engine.idle_contexts == 1
    assert len(roster._free) == len(roster.board) - 1


def test_many_lanes_at_a_time(driver):
    with EngineOnLanes(HostEngine(host_device(driver)), DATA, lanes=4) as lanes:
        found = {}

        def work(number):
            for seed in range(30):
                evaluation = fresh(100 * number + seed, programs=10 + number)
                found[number, seed] = lanes.losses(evaluation).reshape(-1).tolist()

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    for (number, _), losses in found.items():
        assert losses == [float(job) for job in range(10 + number)]
    assert len(found) == 120
    assert lanes.engine.evaluated < 60
