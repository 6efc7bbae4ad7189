"""A front end's connection; the test sends the engine's replies."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from support.random_programs import thesis_mix
from warpfit.dataset import Dataset
from warpfit.errors import CancelledError, UnavailableError
from warpfit.ir import Batch
from warpfit.request import Evaluation, Loss
from warpfit_server.ipc import messages
from warpfit_server.ipc.engine_connection import EngineConnection
from warpfit_server.ipc.messages import Channel, ChannelClosedError
from warpfit_server.ipc.segments import SegmentPool
from warpfit_server.machine import socket_pair

DATASET = Dataset.of(np.ones((8, 3), "f4"), np.ones(8, "f4"))
EVALUATION = Evaluation(
    DATASET.content_id, Batch.of(*thesis_mix(1, 3, variables=3)), loss=Loss.MSE, values=False
)
SECONDS = 20.0


class Front:
    def __init__(self, *, polls):
        self.lost = threading.Event()
        self.connection = EngineConnection(SegmentPool(1 << 24))
        self.connection.may_poll = lambda: polls
        self.connection.on_loss = self.lost.set
        self.calls = ThreadPoolExecutor(32)

    def open(self, process=1):
        """Return the engine's end of a new connection to an engine process."""
        ours, theirs = socket_pair()
        self.connection.open(ours, process)
        return Channel(theirs)

    def start(self):
        return self.connection.start(EVALUATION, DATASET.layout)

    def wait_for(self, request):
        def call():
            try:
                return request.next_reply().request
            finally:
                request.close()

        return self.calls.submit(call)

    def answer_one(self, engine):
        run = self.start()
        waiting = self.wait_for(run)
        engine.send(messages.RequestFinished(run.number))
        assert waiting.result(SECONDS) == run.number


@pytest.fixture(params=[False, True], ids=["sleeps", "polls"])
def front(request):
    """A connection whose calls poll before they sleep, or sleep at once."""
    made = Front(polls=request.param)
    yield made
    made.connection.shut()
    made.calls.shutdown()


def test_many_callers_on_many_threads(front):
    engine = front.open()

    def serve():
        random = np.random.default_rng(2)
        try:
            while True:
                asked = [engine.receive(), *engine.receive_waiting()]
                found = [m for m, _ in asked if isinstance(m, messages.SubmitEvaluation)]
                for index in random.permutation(len(found)):
                    engine.send(messages.ValuesReady(found[index].request, 1))
                    engine.send(messages.RequestFinished(found[index].request))
        except ChannelClosedError:
            pass

    def call(seed):
        for turn in range(100):
            run = front.start()
            if (seed + turn) % 7 == 0:
                threading.Timer(0.0001, run.cancel).start()
            try:
                events = [run.next_reply(), run.next_reply()]
                assert [event.request for event in events] == [run.number] * 2
            except CancelledError:
                pass
            run.close()
        return True

    server = threading.Thread(target=serve)
    server.start()
    assert all(front.calls.map(call, range(16), timeout=120))
    front.connection.shut()
    server.join(SECONDS)
    assert not server.is_alive()


@pytest.mark.parametrize("cancelled", [0, 1])
def test_a_cancelled_call_ends_whether_or_not_it_leads(front, cancelled):
    engine = front.open()
    runs, waiting = [], []
    for _ in range(2):  # the first one leads
        runs.append(front.start())
        seen = front.calls.submit(runs[-1].next_reply)
        waiting.append(seen)
        time.sleep(0.05)
    runs[cancelled].cancel()
    with pytest.raises(CancelledError):
        waiting[cancelled].result(SECONDS)
    engine.send(messages.RequestFinished(runs[1 - cancelled].number))
    assert waiting[1 - cancelled].result(SECONDS).request == runs[1 - cancelled].number
    engine.send(messages.RequestFinished(runs[cancelled].number))
    for run in runs:
        run.close()


def test_the_last_replies_of_a_lost_engine_arrive_and_other_calls_fail(front):
    engine = front.open()
    runs = [front.start() for _ in range(6)]
    waiting = [front.wait_for(run) for run in runs]
    engine.send_all([messages.RequestFinished(run.number) for run in runs[:3]])
    engine.close()
    assert [call.result(SECONDS) for call in waiting[:3]] == [run.number for run in runs[:3]]
    assert front.lost.wait(SECONDS)
    for failing in (*(call.result for call in waiting[3:]), lambda _: front.start()):
        with pytest.raises(UnavailableError):
            failing(SECONDS)


def test_new_calls_go_to_a_new_engine_and_old_ones_fail(front):
    old = front.open()
    before = [front.wait_for(front.start()) for _ in range(4)]
    new = front.open(2)
    front.answer_one(new)
    for call in before:
        with pytest.raises(UnavailableError):
            call.result(SECONDS)
    assert not front.lost.is_set()
    front.answer_one(new)
    old.close()
    new.close()


@pytest.mark.parametrize("process", [1, 2])
def test_a_connection_that_is_not_needed_costs_no_call(front, process):
    engine = front.open(2)
    request = front.start()
    (message, _) = engine.receive()
    further = front.open(process)
    with pytest.raises(ChannelClosedError):
        further.receive()
    call = front.wait_for(request)
    engine.send(messages.RequestFinished(message.request))
    assert call.result(SECONDS) == message.request
    front.answer_one(engine)
    engine.close()
