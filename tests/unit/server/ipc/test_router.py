"""Which engine a request goes to; the connections are the test's own."""

from concurrent.futures import Future

import numpy as np
import pytest

from support.random_programs import thesis_mix
from warpfit.dataset import Dataset
from warpfit.errors import ResourceExhaustedError, UnavailableError
from warpfit.ir import Batch
from warpfit.request import Evaluation, Loss
from warpfit_server.ipc.engine_connection import InFlightRequest, unavailable
from warpfit_server.ipc.quarantine import InterruptedBatch, KnownSuspects, Quarantine
from warpfit_server.ipc.router import Router, SplitRequest
from warpfit_server.ipc.segments import BEGUN, SegmentPool
from warpfit_server.tenancy.quotas import QuotaTable

DATASET = Dataset.of(np.ones((1000, 3), "f4"), np.ones(1000, "f4"))
MILLISECOND = 1_000_000


def evaluation(seed=1, **outputs):
    batch = Batch.of(*thesis_mix(seed, 5, variables=3))
    return Evaluation(DATASET.content_id, batch, loss=Loss.MSE, **{"values": False} | outputs)


class Connection:
    """Takes requests, or says that there is no engine."""

    def __init__(self, pool):
        self.is_open = True
        self.is_lost = False
        self.sent = []
        self.pool = pool

    def send(self, request):
        if self.is_lost:
            raise unavailable()
        self.sent.append(request)


class Data:
    """A data set that some engines have, and some have no room for."""

    layout = DATASET.layout

    def __init__(self, loaded=(0, 1, 2), full=()):
        self.engines, self.full = set(loaded), full

    def load(self, engine):
        future = Future()
        if engine in self.full:
            future.set_exception(ResourceExhaustedError("no room"))
        else:
            self.engines.add(engine)
            future.set_result(None)
        return future


class Front:
    def __init__(self, engines=3):
        pool = SegmentPool(1 << 20)
        self.connections = [Connection(pool) for _ in range(engines)]
        self.labels = [f"cpu:{number}" for number in range(engines)]
        self.table = QuotaTable.create(2, engines)
        self.suspects = KnownSuspects()
        self.router = Router(self.connections, self.labels, self.table, self.suspects)
        self.router.serving = frozenset(self.labels)

    def start(self, seed=1, data=None, nanoseconds=MILLISECOND):
        request = InFlightRequest.of_evaluation(evaluation(seed), DATASET.layout)
        assert self.router.start(request, data or Data(), nanoseconds) is request
        (number,) = [n for n, c in enumerate(self.connections) if request in c.sent]
        assert request.device == self.labels[number]
        return number, request


@pytest.fixture
def front():
    made = Front()
    yield made
    made.table.close()


def test_many_requests_are_spread_evenly(front):
    numbers = [front.start(seed)[0] for seed in range(30)]
    assert sorted(numbers.count(number) for number in range(3)) == [10, 10, 10]
    assert front.table.work() == [10 * MILLISECOND] * 3


def test_a_lone_batch_always_goes_to_the_same_engine_and_batches_to_different_ones(front):
    def alone(seed):
        number, request = front.start(seed)
        request.on_end()
        return number

    assert len({alone(7) for _ in range(5)}) == 1
    assert {alone(seed) for seed in range(40)} == {0, 1, 2}
    assert front.table.work() == [0, 0, 0]


def test_work_of_other_front_ends_counts(front):
    other = QuotaTable(front.table.descriptor, 2, 1, 3)
    preferred, request = front.start()
    request.on_end()
    other.add_work(preferred, 10 * MILLISECOND)
    assert front.start()[0] != preferred
    front.table.clear_process(1)  # the other front end has died
    assert front.table.work()[preferred] == 0


def test_an_engine_without_the_data_set_waits_until_the_others_are_busy(front):
    data = Data(loaded=[2])
    loading = DATASET.layout.nbytes / 8
    numbers = [front.start(seed, data, int(loading / 4))[0] for seed in range(9)]
    assert numbers[:4] == [2, 2, 2, 2]
    assert set(numbers) == {0, 1, 2}
    assert data.engines == {0, 1, 2}


def test_a_device_without_room_is_left_out(front):
    numbers = {front.start(seed, Data(loaded=[2], full=[0, 1]))[0] for seed in range(9)}
    assert numbers == {2}
    with pytest.raises(ResourceExhaustedError):
        front.start(1, Data(loaded=[], full=[0, 1, 2]))
    assert front.table.work()[:2] == [0, 0]


def test_a_new_data_set_goes_where_there_is_room_and_little_else(front):
    """An engine that hangs is not waited for."""
    full, loads = Data(loaded=[], full=[0, 2]), {0: 1, 1: 2, 2: 0}.__getitem__
    front.router.place(full, loads)
    assert full.engines == {1}
    front.router.serving = frozenset(["cpu:0", "cpu:1"])
    data = Data(loaded=[])
    front.router.place(data, loads)
    assert data.engines == {0}
    with pytest.raises(ResourceExhaustedError):
        front.router.place(Data(loaded=[], full=[0, 1, 2]), loads)


def test_lost_and_silent_engines_are_avoided_and_none_is_an_error(front):
    front.connections[0].is_lost = True
    front.connections[1].is_open = False
    assert {front.start(seed)[0] for seed in range(6)} == {2}
    assert front.table.work() == [0, 0, 6 * MILLISECOND]
    front.connections[1].is_open = True
    front.router.serving = frozenset(["cpu:1"])
    assert {front.start(seed)[0] for seed in range(6)} == {1}
    for connection in front.connections:
        connection.is_open = False
    with pytest.raises(UnavailableError):
        front.start()
    assert front.table.work()[2] == 6 * MILLISECOND


class TestSplitting:
    def split(self, front, nanoseconds=10 * MILLISECOND, data=None, **outputs):
        whole = InFlightRequest.of_evaluation(evaluation(**outputs), DATASET.layout)
        return front.router.start(whole, data or Data(), nanoseconds)

    def test_a_long_request_is_split_over_idle_engines(self, front):
        request = self.split(front)
        assert isinstance(request, SplitRequest)
        assert set(request.device.split(",")) == {"cpu:0", "cpu:1", "cpu:2"}
        parts = [connection.sent[0] for connection in front.connections]
        assert sum(part.segment_layout.programs for part in parts) == 5
        assert len({part.segment.identifier for part in parts}) == 1
        assert sum(front.table.work()) == pytest.approx(10 * MILLISECOND, abs=3)

    @pytest.mark.parametrize("nanoseconds", [MILLISECOND, 3 * MILLISECOND])
    def test_a_short_request_is_not_split(self, front, nanoseconds):
        assert isinstance(self.split(front, nanoseconds), InFlightRequest)

    def test_busy_silent_and_loading_engines_get_no_part(self, front):
        front.table.add_work(1, 5 * MILLISECOND)
        assert "cpu:1" not in self.split(front).device
        front.table.clear_process(0)
        front.router.serving = frozenset(["cpu:0", "cpu:1"])
        assert set(self.split(front).device.split(",")) == {"cpu:0", "cpu:1"}
        front.table.clear_process(0)
        data = Data(loaded=[0])
        data.layout = DATASET.layout.__class__(np.dtype("<f4"), 3, 1 << 30, has_target=True)
        assert (
            front.router.start(
                InFlightRequest.of_evaluation(evaluation(), DATASET.layout), data, 10 * MILLISECOND
            ).device
            == "cpu:0"
        )

    def test_engines_that_load_the_data_set_soon_get_parts(self, front):
        data = Data(loaded=[0])
        data.layout = DATASET.layout.__class__(np.dtype("<f4"), 3, 1 << 22, has_target=True)
        load = data.layout.nbytes / 8
        assert "," not in self.split(front, int(1.5 * load), data).device
        front.table.clear_process(0)
        assert len(self.split(front, int(4 * load), data).device.split(",")) == 3
        assert data.engines == {0, 1, 2}

    def test_the_part_of_an_engine_that_is_lost_goes_to_another(self, front):
        front.connections[2].is_lost = True
        assert set(self.split(front).device.split(",")) == {"cpu:0", "cpu:1"}
        assert sum(len(connection.sent) for connection in front.connections) == 3

    def test_a_suspect_is_not_split(self, front):
        whole = InFlightRequest.of_evaluation(evaluation(), DATASET.layout)
        quarantine = Quarantine()
        quarantine.engine_died(1, loading=None)
        quarantine.report(InterruptedBatch(1, DATASET.content_id, whole.digest(), BEGUN))
        front.suspects.update(quarantine.current)
        assert isinstance(self.split(front), InFlightRequest)
