"""Searches on real servers: bad input, many at once, clients that go, data and engines that go."""

import os
import signal
import threading
import time

import grpc
import numpy as np
import pytest

from support.servers.rpcs import OWN_CONNECTION, SERVICE, Caller, detail_of, explained
from support.servers.server import eventually
from warpfit.dataset import Dataset
from warpfit.searching import SearchReason
from warpfit.v1 import evaluator_pb2 as pb
from warpfit_server.tenancy.quotas import Amounts

RNG = np.random.default_rng(5)
X = RNG.normal(size=(300, 3))
Y = 2.0 * X[:, 0] * X[:, 1] + 1.0
DATA = Dataset.of(X, Y, dtype="float64")
#: Settings that keep a search small, and one that lasts until something else ends it.
SMALL = {"population": 64, "islands": 1}
QUICK = {**SMALL, "pairs": False}
LONG = {"max_seconds": 600.0, "no_pairs": True, **SMALL}
SEARCH = SERVICE + "Search"


@pytest.fixture
def caller(server):
    with grpc.insecure_channel(server.address, OWN_CONNECTION) as channel:
        made = Caller(channel)
        made.call("UploadVariables", DATA)
        yield made


def request(dataset=DATA, **given):
    return pb.SearchRequest(content_id=dataset.content_id, **given)


def search(caller, dataset=DATA, **given):
    """Return the messages of an answer."""
    data = caller.send("Search", request(dataset, **given), timeout=120)
    return [pb.SearchResponse.FromString(message) for message in data]


def begun(caller, **given):
    """Begin a search, and wait for its first progress; return gRPC's call."""
    method = caller.channel.unary_stream(SEARCH)
    call = method(request(**(LONG | given)).SerializeToString(), metadata=caller.metadata)
    next(call)
    return call


def test_a_data_set_and_a_budget_are_enough(caller):
    *progress, last = search(caller, max_seconds=0.7)
    assert all(one.end == pb.END_NONE and not one.HasField("timings") for one in progress)
    assert (last.end, last.HasField("timings")) == (pb.END_TIME, True)
    assert last.seconds >= 0.7
    assert last.formulas > 0
    losses = np.frombuffer(last.front.losses)
    assert len(losses) > 0
    assert (np.diff(losses) < 0).all()


# --------------------------------------------------------------------------------------- bad input

ONCE = {"max_generations": 1}
UNITS = np.eye(3, 7)
BAD_LOSS = pb.LossFunction(codes=b"\1\1", values=bytes(16))
WRONG = {
    "BUDGET_MISSING": {},
    "UNKNOWN_OPERATOR": {"operators": {"plus": 1.0}, **ONCE},
    "ROWS_OUT_OF_RANGE": {"rows": pb.RowRange(start=5, stop=5), **ONCE},
    "STACK_LEFTOVERS": {"loss_function": BAD_LOSS, **ONCE},
    "BAD_UNITS": {"units": pb.SearchUnits(variables=bytes(8)), **ONCE},
    "UNSATISFIABLE": {
        "units": pb.SearchUnits(
            variables=UNITS.tobytes(), target=np.eye(7)[6].tobytes(), dimensionless_constants=True
        ),
        "max_seconds": 600.0,
    },
}


@pytest.mark.parametrize("reason", WRONG)
def test_what_is_wrong_is_refused_with_its_reason(caller, reason):
    with pytest.raises(grpc.RpcError) as caught:
        search(caller, **WRONG[reason])
    assert explained(caught.value)[:2] == ("INVALID_ARGUMENT", reason)


def test_a_population_over_the_memory_is_told_how_much_there_is(caller):
    with pytest.raises(grpc.RpcError) as caught:
        search(caller, population=2**50, **ONCE)
    detail = detail_of(caught.value)
    assert (caught.value.code().name, detail.reason) == ("RESOURCE_EXHAUSTED", "SEARCH_TOO_LARGE")
    assert detail.needed > detail.available > 2**20
    assert str(detail.available) in detail.message


# -------------------------------------------------------------------------------------- the client


def test_the_deadline_of_a_call_ends_a_search_in_time(client):
    data = client.upload(X, Y, dtype="float64")
    client.search(data, generations=1, **QUICK)  # the code is loaded
    found = client.search(data, seconds=600, timeout=2.5, **QUICK)
    assert found.reason == SearchReason.TIME
    assert found.losses.min() < Y.var()


def test_an_interrupt_ends_a_search_and_leaves_a_client_that_works(client, server):
    data = client.upload(X, Y, dtype="float64")
    seen = threading.Event()

    def interrupt():
        seen.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        client.search(data, seconds=600, progress=lambda found: seen.set(), **QUICK)
    thread.join()
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
    lasting = begun(caller)
    method = caller.channel.unary_stream(SEARCH)
    call = method(request(other, **LONG).SerializeToString())
    next(call)
    caller.send("ReleaseVariables", pb.ReleaseVariablesRequest(content_id=other.content_id))
    next(call)  # others may still need it
    everywhere = pb.ReleaseVariablesRequest(content_id=other.content_id, everywhere=True)
    caller.send("ReleaseVariables", everywhere)
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert explained(caught.value)[:2] == ("NOT_FOUND", "DATASET_NOT_FOUND")
    next(lasting)
    lasting.cancel()


def interrupted(client, data, interrupt):
    """Search until the search has gone on after an interruption; return all progress."""
    seen = []

    def progress(found):
        seen.append(found)
        if len(seen) == 1:
            interrupt()
        return found.interruptions

    found = client.search(data, seconds=600, progress=progress, **QUICK)
    return [*seen, found]


# ----------------------------------------------------------------------------------------- engines


def test_a_search_outlives_its_engine_and_says_so(server, client, caplog):
    data = client.upload(X, Y, dtype="float64")
    first, *_, found = interrupted(client, data, server.kill_engine)
    assert found.interruptions == 1
    assert "goes on from its front" in caplog.text
    assert found.tried > first.tried
    assert found.losses[-1] <= first.losses[-1]
