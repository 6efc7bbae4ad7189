"""Lanes on which compiled code answers a repeated batch by its kernels."""

from __future__ import annotations

import threading

import numpy as np
import pytest

pytest.importorskip("numba")
pytest.importorskip("cuda.bindings")

from support.interpreted import EngineOnLanes, HostEngine, wait_until
from support.replayed import FIRST_STREAM, NANOSECONDS, STREAM, Driver, Store
from warpfit.dataset import Dataset
from warpfit.ir import Batch
from warpfit.parse import parse
from warpfit.request import Evaluation, Loss, Tier
from warpfit.workload import thesis_mix
from warpfit_server.engine.cuda.compiled import CompiledTier
from warpfit_server.engine.cuda.shapes import lift

DATA = Dataset.of(np.ones((1000, 10)), np.arange(1000.0), dtype="float32")
#: Evaluations until compiled code answers: one that brings the segment, and two of a kind.
FIRST = 3


class Bench:
    """An engine on a device of functions, and lanes to it."""

    def __init__(self, lanes=1):
        self.driver = Driver()
        self.store = Store(self.driver)
        tier = CompiledTier(self.driver.device, self.store)
        self.engine = HostEngine(self.driver.device, tier)
        self.done = self.store.request([])
        self.lanes = EngineOnLanes(self.engine, DATA, lanes)

    def __enter__(self):
        self.lanes.__enter__()
        return self

    def __exit__(self, *error):
        self.lanes.__exit__(*error)

    def start(self, batch, loss=Loss.SSE, **options):
        evaluation = Evaluation(
            DATA.content_id, batch, loss=loss, values=False, tier=Tier.COMPILED, **options
        )
        return self.lanes.start(evaluation)

    def losses(self, batch, **options):
        run = self.start(batch, **options)
        try:
            run.next_event()
        finally:
            run.close()
        assert run.timings.tier is Tier.COMPILED
        assert run.timings.compute == NANOSECONDS
        return run.losses


@pytest.fixture
def bench():
    with Bench() as found:
        yield found


@pytest.fixture
def served(bench):
    """Compiled code serves the lane."""
    for scale in range(FIRST):
        bench.losses(mix(scale=scale))
    return bench


def mix(seed=1, count=30, vectors=1, scale=1.0):
    programs, parameters = thesis_mix(seed, count)
    return Batch.of(programs, [np.stack([p * scale] * vectors) for p in parameters])


def sums_of(batch):
    """What the kernels of the device of functions compute."""
    lifted = lift(batch)
    slots = np.empty((batch.vectors, lifted.slot_starts[-1]), np.float32)
    lifted.fill(batch, slots)
    pairs = zip(lifted.slot_starts, lifted.slot_starts[1:], strict=False)
    wide = slots.astype(np.float64)
    return np.stack([i + wide[:, a:b].sum(axis=1) for i, (a, b) in enumerate(pairs)])


@pytest.mark.parametrize("vectors", [1, 3])
def test_new_parameters_are_answered_without_python(bench, vectors):
    for number in range(20):
        batch = mix(vectors=vectors, scale=0.1 * number)
        np.testing.assert_array_equal(bench.losses(batch), sums_of(batch))
    assert bench.engine.evaluated == FIRST
    assert len(bench.driver.graphs) == 1


def test_hits_are_told(served):
    run = served.start(mix())
    run.next_event()
    run.close()
    assert (run.timings.cache_hits, run.timings.tier) == (30, Tier.COMPILED)
    assert served.engine.evaluated == FIRST


@pytest.mark.parametrize("loss", Loss)
def test_every_loss(bench, loss):
    found = [bench.losses(mix(), loss=loss).tobytes() for _ in range(FIRST + 2)]
    assert bench.engine.evaluated == FIRST
    assert len(set(found)) == 1


def pair(first="x1 + p1", second="x1 * 2.0", parameters=((1.0,), ())):
    return Batch.of([parse(first), parse(second)], [np.array(p) for p in parameters])


@pytest.mark.parametrize(
    "other",
    [
        pair(second="x1 * 3.0"),
        pair(first="x2 + p1"),
        pair(second="x1 / 2.0"),
        pair(first="x1 + 1.0", second="x1 * p1", parameters=((), (2.0,))),
        pair(second="x1 * 2.0 + 1.0"),
    ],
    ids=["constant", "variable", "operator", "place of the parameter", "length"],
)
def test_another_batch_is_left_to_python(bench, other):
    for _ in range(FIRST + 2):
        bench.losses(pair())
    assert bench.engine.evaluated == FIRST
    np.testing.assert_array_equal(bench.losses(other), sums_of(other))
    assert bench.engine.evaluated == FIRST + 1
    np.testing.assert_array_equal(bench.losses(pair()), sums_of(pair()))


def test_another_number_of_vectors_is_left_to_python(served):
    batch = mix(vectors=2)
    np.testing.assert_array_equal(served.losses(batch), sums_of(batch))
    assert served.engine.evaluated == FIRST + 1


def test_other_rows_are_left_to_python(served):
    served.losses(mix(), rows=(3, 700))
    assert served.engine.evaluated == FIRST + 1
    (number,) = {call[1] for call in served.driver.calls[-5:] if call[0] == "launch_graph"}
    assert served.driver.graphs[number].request["stop"] == 700


def test_a_graph_that_is_lent_comes_back(served):
    served.losses(mix())
    assert not any(served.engine._compiled._replays.values())
    served.engine.unload(DATA.content_id)
    wait_until(lambda: served.engine.idle_contexts == 1)
    assert sum(map(len, served.engine._compiled._replays.values())) == 1
    served.engine.load(DATA)
    served.losses(mix())
    assert served.engine.evaluated == FIRST + 1


def test_kernels_that_find_no_room_push_out_what_only_waits(served):
    released = []
    served.engine._device.on_shortage = lambda: released.append(served.engine._standings.revoke())
    served.store.request = lambda keys, priority=1: served.done  # as if the cache were full
    with pytest.raises(Exception, match="do not fit"):
        served.losses(mix(seed=2))
    assert released


def test_a_failing_device_is_pythons_business(served, monkeypatch):
    import warpfit_server.engine.process as module

    ended = []
    monkeypatch.setattr(module.os, "_exit", ended.append)
    served.driver.fail = "launch_graph"
    run = served.start(mix())
    served.lanes.threads[0].join(10)
    assert served.engine.evaluated == FIRST + 1
    assert ended[:1] == [module.EXIT_BROKEN]
    served.lanes.lanes.shut()
    run._running = False


def test_the_first_evaluation_of_a_tenant_goes_before_further_ones():
    with Bench(lanes=4) as bench:
        driver = bench.driver
        for _ in range(FIRST + 1):
            driver.calls.clear()
            driver.may_end.clear()
            runs = [bench.start(mix(scale=0.5)), bench.start(mix(scale=2.0))]
            wait_until(lambda: len(driver.streams()) == 2)
            driver.may_end.set()
            for run in runs:
                run.next_event()
                run.close()
        assert bench.engine.evaluated == 2 * FIRST
    assert sorted(driver.streams()) == [STREAM, FIRST_STREAM]


def test_what_takes_several_launches_does_not_go_first(bench):
    data = Dataset.of(np.ones((30_000_000, 1)), np.ones(30_000_000), dtype="float32")
    batch = Batch.of(*thesis_mix(1, 40, variables=1))
    with EngineOnLanes(bench.engine, data) as lanes:
        evaluation = Evaluation(
            data.content_id, batch, loss=Loss.SSE, values=False, tier=Tier.COMPILED
        )
        for _ in range(FIRST):
            lanes.losses(evaluation)
        before = bench.engine.evaluated
        bench.driver.calls.clear()
        lanes.losses(evaluation)
        assert bench.engine.evaluated == before
    assert len(bench.driver.streams()) > 1
    assert set(bench.driver.streams()) == {STREAM}


def test_several_lanes_have_graphs_of_their_own():
    with Bench(lanes=3) as bench:
        found = {}

        def work(number):
            for turn in range(20):
                batch = mix(scale=number + 0.01 * turn)
                found[number, turn] = np.array_equal(bench.losses(batch), sums_of(batch))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(found) == 60
        assert all(found.values())
    assert bench.engine.evaluated < 30
    held = [replay for replays in bench.engine._compiled._replays.values() for replay in replays]
    assert bench.store.leased == sum(len(replay.keys) for replay in held)
