"""Searches on real servers: bad input, many at once, clients that go, data and engines that go."""

import os
import signal
import threading
import time

import grpc
import numpy as np
import pytest

import warpfit
from support.servers.rpcs import explained, search_request
from support.servers.server import eventually
from warpfit.dataset import Dataset
from warpfit.searching import SearchReason
from warpfit.v1 import evaluator_pb2 as pb
from warpfit_server.tenants import Amounts

RNG = np.random.default_rng(5)
X = RNG.normal(size=(300, 3))
Y = 2.0 * X[:, 0] * X[:, 1] + 1.0
DATA = Dataset.of(X, Y, dtype="float64")
#: Settings of the client that keep a search small.
QUICK = {"population": 64, "islands": 1, "pairs": False}


@pytest.fixture(autouse=True)
def uploaded(caller):
    caller.call("UploadVariables", DATA)


@pytest.fixture
def data(client):
    return client.upload(X, Y, dtype="float64")


def asked(**given):
    return search_request(DATA.content_id, **given)


def begun(caller, dataset=DATA):
    """Begin a search that lasts until something else ends it."""
    return caller.begin("Search", search_request(dataset.content_id, max_seconds=600.0))


def test_a_data_set_and_a_budget_are_enough(caller):
    request = pb.SearchRequest(content_id=DATA.content_id, max_seconds=0.7)
    *progress, last = map(pb.SearchResponse.FromString, caller.send("Search", request, 120))
    assert all(one.end == pb.END_NONE and not one.HasField("timings") for one in progress)
    assert (last.end, last.HasField("timings")) == (pb.END_TIME, True)
    assert last.seconds >= 0.7
    assert last.formulas > 0
    losses = np.frombuffer(last.front.losses)
    assert len(losses) > 0
    assert (np.diff(losses) < 0).all()


ONCE = {"max_generations": 1}
BAD_LOSS = pb.LossFunction(codes=b"\1\1", values=bytes(16))
UNITS = pb.SearchUnits(variables=np.eye(3, 7).tobytes(), target=np.eye(7)[6].tobytes())
UNITS.dimensionless_constants = True


@pytest.mark.parametrize(
    ("reason", "given"),
    [
        ("UNKNOWN_OPERATOR", {"operators": {"plus": 1.0}, **ONCE}),
        ("STACK_LEFTOVERS", {"loss_function": BAD_LOSS, **ONCE}),
        ("UNSATISFIABLE", {"units": UNITS, **ONCE}),
    ],
)
def test_what_is_wrong_is_refused_with_its_reason(caller, reason, given):
    assert caller.refused("Search", asked(**given))[:2] == ("INVALID_ARGUMENT", reason)


def test_a_population_over_the_memory_is_told_how_much_there_is(caller):
    status, detail = caller.refusal("Search", asked(population=2**50, **ONCE))
    assert (status, detail.reason) == ("RESOURCE_EXHAUSTED", "SEARCH_TOO_LARGE")
    assert detail.needed > detail.available > 2**20
    assert str(detail.available) in detail.message


def test_the_deadline_of_a_call_ends_a_search_in_time(client, data):
    client.search(data, generations=1, **QUICK)  # the code is loaded
    found = client.search(data, seconds=600, timeout=2.5, **QUICK)
    assert found.reason == SearchReason.TIME
    assert found.losses.min() < Y.var()


def test_an_interrupt_ends_a_search_and_leaves_a_client_that_works(client, server, data):
    interrupt = threading.Timer(0.0, os.kill, (os.getpid(), signal.SIGINT))

    def progress(found):
        if not interrupt.is_alive():
            interrupt.start()

    with pytest.raises(KeyboardInterrupt):
        client.search(data, seconds=600, progress=progress, **QUICK)
    assert len(client.search(data, generations=1, **QUICK)) > 0
    eventually(lambda: server.in_flight() == Amounts())


def test_nothing_is_left_of_a_client_that_goes_away(caller, server):
    calls = [begun(caller) for _ in range(2)]
    assert server.in_flight().searches == 2
    for call in calls:
        call.cancel()
    eventually(lambda: server.in_flight() == Amounts())
    engine = server.engine()

    def is_idle():
        before = sum(engine.cpu_times()[:2])
        time.sleep(0.2)
        return sum(engine.cpu_times()[:2]) - before < 0.1

    eventually(is_idle)


def test_a_data_set_that_is_removed_ends_its_search_and_no_other(caller):
    other = Dataset.of(X + 1, Y, dtype="float64")
    caller.call("UploadVariables", other)
    lasting, call = begun(caller), begun(caller, other)
    caller.call("ReleaseVariables", other)
    next(call)  # others may still need it
    everywhere = pb.ReleaseVariablesRequest(content_id=other.content_id, everywhere=True)
    caller.send("ReleaseVariables", everywhere)
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert explained(caught.value)[:2] == ("NOT_FOUND", "DATASET_NOT_FOUND")
    next(lasting)
    lasting.cancel()


def test_a_search_outlives_its_engine_and_says_so(server, data, caplog):
    """Its client waits for the next engine as long as it takes to start, also on a busy machine."""
    seen, patient = [], warpfit.RetryPolicy(total_seconds=120)

    def progress(found):
        if not seen:
            server.kill_engine()
        seen.append(found)
        return found.interruptions  # it has gone on

    with warpfit.connect(server.address, retry=patient) as client:
        found = client.search(data, seconds=600, progress=progress, **QUICK)
    assert found.interruptions == 1
    assert "goes on from its front" in caplog.text
    assert found.tried > seen[0].tried
    assert found.losses[-1] <= seen[0].losses[-1]
