"""Which engine a request goes to, and searches of several; the connections are the test's own."""

from collections import deque
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from support.random_programs import thesis_mix
from warpfit.dataset import Dataset
from warpfit.errors import FailedPreconditionError, ResourceExhaustedError, UnavailableError
from warpfit.ir import Batch
from warpfit.ops import VARIABLE
from warpfit.parse import parse
from warpfit.request import Evaluation, Loss, Timings
from warpfit.searching import Form, Front, SearchProgress, SearchReason, SearchRequest, Template
from warpfit_server.ipc import messages
from warpfit_server.ipc.engine_connection import InFlightRequest, unavailable
from warpfit_server.ipc.quarantine import BatchOutcome, Quarantine, Suspects
from warpfit_server.ipc.router import ParallelSearch, Router, SplitRequest, merged, seeded
from warpfit_server.ipc.segments import BEGUN, SegmentPool
from warpfit_server.tenants import QuotaTable

DATASET = Dataset.of(np.ones((1000, 3), "f4"), np.ones(1000, "f4"))
MILLISECOND = 1_000_000


def evaluation(seed=1, **outputs):
    batch = Batch.of(*thesis_mix(seed, 5, variables=3))
    return Evaluation(DATASET.content_id, batch, loss=Loss.MSE, **{"values": False} | outputs)


class Connection:
    is_open, is_lost = True, False

    def __init__(self, pool):
        self.sent, self.pool = [], pool

    def send(self, request):
        if self.is_lost:
            raise unavailable()
        self.sent.append(request)


class Data:
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


class FrontEnd:
    def __init__(self):
        pool = SegmentPool(1 << 20)
        self.connections = [Connection(pool) for _ in range(3)]
        self.labels = ["cpu:0", "cpu:1", "cpu:2"]
        self.table = QuotaTable.create(2, 3)
        self.suspects = Suspects()
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
    made = FrontEnd()
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
    loads = {0: 1, 1: 2, 2: 0}.__getitem__
    for full, serving, place in (([0, 2], (0, 1, 2), 1), ([], (0, 1), 0)):
        front.router.serving = frozenset(f"cpu:{number}" for number in serving)
        data = Data(loaded=[], full=full)
        front.router.place(data, loads)
        assert data.engines == {place}
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

    def test_a_short_request_is_not_split(self, front):
        assert isinstance(self.split(front, 3 * MILLISECOND), InFlightRequest)

    def test_busy_silent_and_loading_engines_get_no_part(self, front):
        front.table.add_work(1, 5 * MILLISECOND)
        assert "cpu:1" not in self.split(front).device
        front.table.clear_process(0)
        front.router.serving = frozenset(["cpu:0", "cpu:1"])
        assert set(self.split(front).device.split(",")) == {"cpu:0", "cpu:1"}
        front.table.clear_process(0)
        data = Data(loaded=[0])
        data.layout = DATASET.layout.__class__(np.dtype("<f4"), 3, 1 << 30, has_target=True)
        assert self.split(front, data=data).device == "cpu:0"

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
        quarantine.report(BatchOutcome(DATASET.content_id, whole.digest(), 1, BEGUN))
        front.suspects.update(quarantine.suspects)
        assert isinstance(self.split(front), InFlightRequest)


#: Formulas with their numbers of parameters.
FORMULAS = (("p1*x1+p2", 2), ("p1*sin(p2*x1)+p3", 3), ("p1*x1*exp(x2)+p2", 2))


def front_with(losses: dict[int, float]) -> Front:
    """Return a front of formulas of these sizes, all parameters of which are their size."""
    chosen = FORMULAS[: len(losses)]
    programs = [parse(text, ("x1", "x2")) for text, _ in chosen]
    vectors = [np.full(count, float(size)) for (_, count), size in zip(chosen, losses, strict=True)]
    sizes, numbers = np.array([*losses], np.int64), np.array([*losses.values()])
    return Front(Batch.of(programs, vectors), sizes, numbers)


class Part:
    """A request whose replies are known; None stands for one that has not come yet."""

    timings, is_cancelled, is_closed = None, False, False

    def __init__(self, *replies: object) -> None:
        self.waiting, self.number, self.device = deque(replies), 7, f"cpu:{id(self)}"
        self.replies = SimpleNamespace(receive_now=lambda: None)
        self.queue = SimpleNamespace(empty=lambda: not self.waiting or self.waiting[0] is None)

    def next_reply(self):
        while (reply := self.waiting.popleft()) is None:
            pass
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, messages.RequestFinished):
            self.timings = Timings(compute=5)
        return reply

    def cancel(self):
        self.is_cancelled = True

    def close(self):
        self.is_closed = True


def told(losses: dict[int, float], formulas: int, reason=None):
    progress = SearchProgress(front_with(losses), seconds=formulas / 100, formulas=formulas)
    return messages.SearchProgressed(7, replace(progress, reason=reason))


def last_of(search):
    replies = iter(lambda: search.next_reply().progress, None)
    return next(progress for progress in replies if progress.reason is not None)


END = messages.RequestFinished(7)
LOST = UnavailableError("the engine is restarting", "ENGINE_RESTARTING", "Wait")


def test_the_best_formula_of_each_size_is_kept():
    fronts = front_with({1: 5.0, 3: 2.0, 9: 1.0}), front_with({1: 4.0, 3: 3.0, 7: 1.0})
    both = merged(fronts, is_score=False)
    assert both.sizes.tolist() == [1, 3, 7]
    assert both.losses.tolist() == [4.0, 2.0, 1.0]
    for place, size in enumerate(both.sizes.tolist()):
        assert both.batch.program_parameters(place)[0][0] == size
        assert both.batch.program(place).variables > 0
    scores = merged([front_with({1: 0.2, 3: 0.8}), front_with({1: 0.5, 5: 0.9})], is_score=True)
    assert scores.losses.tolist() == [0.5, 0.8, 0.9]
    unknown = merged([front_with({1: np.nan, 3: 2.0}), front_with({1: np.nan})], is_score=False)
    np.testing.assert_array_equal(unknown.losses, [np.nan, 2.0])
    alone, empty = front_with({1: 5.0}), Front(Batch.of([parse("x1")])[:0], *np.empty((2, 0)))
    assert merged([empty, alone], is_score=False) is alone
    assert len(merged([empty, empty], is_score=False).sizes) == 0


def test_progress_is_that_of_all_and_the_search_ends_when_all_have():
    parts = (
        Part(told({1: 5.0}, 10), None, told({1: 4.0}, 20, SearchReason.TIME), END),
        Part(told({3: 1.0}, 7), told({3: 0.5}, 9, SearchReason.TIME), END),
    )
    search = ParallelSearch(parts, is_score=False)
    one = search.next_reply().progress
    assert (one.formulas, one.reason, one.front.sizes.tolist()) == (19, None, [1, 3])
    last = last_of(search)
    assert (last.formulas, last.reason) == (29, SearchReason.TIME)
    assert last.front.losses.tolist() == [4.0, 0.5]
    assert isinstance(search.next_reply(), messages.RequestFinished)
    assert search.timings.compute == 5
    search.close()
    assert all(part.is_closed for part in parts)


def test_one_that_meets_the_target_ends_all():
    slow = Part(told({1: 5.0}, 10), *[told({1: 5.0}, 10 + n) for n in range(50)])
    quick = Part(told({3: 1e-9}, 7, SearchReason.TARGET_LOSS), END)
    search = ParallelSearch([slow, quick], is_score=False)
    seen = []
    while not isinstance(reply := search.next_reply(), messages.RequestFinished):
        seen.append(reply.progress)
    assert seen[-1].reason is SearchReason.TARGET_LOSS
    assert seen[-1].front.losses.tolist() == [5.0, 1e-9]
    assert slow.is_cancelled
    assert not quick.is_cancelled
    assert len(slow.waiting) > 40


@pytest.mark.parametrize("has_reported", [True, False])
def test_one_that_has_begun_late_is_not_waited_for(has_reported):
    replies = [told({1: 5.0 - n}, 10 + n) for n in range(4)]
    late = Part(*(replies if has_reported else [None, *replies[1:]]))
    late.waiting.extend([None, told({1: 0.1}, 800, SearchReason.TIME), END])
    own = Part(told({3: 1.0}, 700), told({3: 0.5}, 800, SearchReason.TIME), END)
    last = last_of(ParallelSearch([late, own] if has_reported else [own, late], is_score=False))
    assert last.reason is SearchReason.TIME
    assert 0.5 in last.front.losses and 0.1 not in last.front.losses
    assert (late.is_cancelled, own.is_cancelled) == (True, False)


@pytest.mark.parametrize("is_first", [True, False])
def test_the_others_go_on_without_an_engine_that_is_lost(is_first):
    lost = Part(told({1: 2.0}, 10), LOST)
    other = Part(told({3: 1.0}, 7), told({3: 0.5}, 9, SearchReason.TIME), END)
    last = last_of(ParallelSearch([lost, other][:: 1 if is_first else -1], is_score=False))
    assert last.front.losses.tolist() == [2.0, 0.5]
    assert last.formulas == 19


def test_all_lost_and_wrong_requests_are_errors():
    with pytest.raises(UnavailableError):
        ParallelSearch([Part(LOST), Part(LOST)], is_score=False).next_reply()
    half = ParallelSearch([Part(told({1: 2.0}, 1), LOST), Part(LOST)], is_score=False)
    with pytest.raises(UnavailableError):
        while True:
            half.next_reply()
    wrong = FailedPreconditionError("no", "NO", "no")
    with pytest.raises(FailedPreconditionError):
        ParallelSearch([Part(told({1: 2.0}, 1)), Part(wrong)], is_score=False).next_reply()


def test_each_engine_has_a_seed_of_its_own_where_no_seed_has_to_repeat():
    request = SearchRequest(b"0" * 32, max_seconds=1.0, seed=2**64 - 1)
    several = seeded(request, 4)
    assert several[0].seed == request.seed
    assert len({one.seed for one in several}) == 4
    assert all(0 <= one.seed < 2**64 for one in several)
    template = Template(np.array([VARIABLE], np.uint8), np.zeros(1), (1,), 0)
    alone = [{name: 9} for name in ("max_generations", "max_formulas", "idle_generations")]
    for given in (*alone, {"template": template}, {"definitions": {"f": parse("a", ("a",))}}):
        assert len(seeded(replace(request, form=Form.PLAIN, **given), 4)) == 1
