"""Searches on real servers: bad input, many at once, clients that go, data and engines that go."""

import os
import signal
import threading
import time

import grpc
import numpy as np
import pytest

import warpfit
from support.servers.rpcs import OWN_CONNECTION, SERVICE, Caller, bearer, detail_of, explained
from support.servers.server import ServerProcess, eventually, tenants_file, token_file
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
    *progress, last = search(caller, max_seconds=1.5)
    assert all(one.end == pb.END_NONE and not one.HasField("timings") for one in progress)
    assert (last.end, last.HasField("timings")) == (pb.END_TIME, True)
    assert last.seconds >= 1.5
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
    "BAD_SETTING": {"operators": {"add": -1.0}, **ONCE},
    "VARIABLE_OUT_OF_RANGE": {"variables": [0, 7], **ONCE},
    "ROWS_OUT_OF_RANGE": {"rows": pb.RowRange(start=5, stop=5), **ONCE},
    "BAD_ENUM": {"form": 9, **ONCE},
    "STACK_LEFTOVERS": {"loss_function": BAD_LOSS, **ONCE},
    "BAD_UNITS": {"units": pb.SearchUnits(variables=bytes(8)), **ONCE},
    "BAD_TEMPLATE": {"template": pb.SearchTemplate(codes=b"\1", values=bytes(8)), **ONCE},
    "EMPTY_BATCH": {"guesses": pb.Programs(), **ONCE},
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


def test_data_without_a_target_are_refused(caller):
    other = Dataset.of(X)
    caller.call("UploadVariables", other)
    with pytest.raises(grpc.RpcError) as caught:
        search(caller, other, **ONCE)
    assert explained(caught.value)[:2] == ("INVALID_ARGUMENT", "TARGET_MISSING")


def small_search(client, X, y, **options):
    data = client.upload(X, y, dtype="float64")
    return data, client.search(data, **({"generations": 3, **QUICK} | options))


def test_a_constant_target_has_a_constant(client):
    _, found = small_search(client, X, np.full(len(X), 3.5))
    np.testing.assert_allclose(client.evaluate(client.upload(X[:5]), [found.best])[:, 0], 3.5)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_fewer_rows_than_parameters_have_finite_formulas(client, rows):
    _, found = small_search(client, X[:rows], Y[:rows])
    assert np.isfinite(found.losses).all()


def test_rows_with_nan_leave_formulas_of_the_other_variables(client):
    holes = X.copy()
    holes[::7, 2] = np.nan
    data, found = small_search(client, holes, Y, generations=20)
    losses = client.evaluate(data, found.batch, loss="mse")
    assert np.isfinite(found.losses).all()
    np.testing.assert_allclose(losses, found.losses, rtol=1e-6, atol=1e-12)
    assert found.losses[-1] < Y.var()


def test_a_target_with_nan_is_answered(client):
    holes = Y.copy()
    holes[3] = np.nan
    try:
        _, found = small_search(client, X, holes)
    except warpfit.InvalidArgumentError as error:
        assert error.remedy
    else:
        assert not np.isfinite(found.losses).any()


# -------------------------------------------------------------------------------------- the client


def test_the_deadline_of_a_call_ends_a_search_in_time(client):
    data = client.upload(X, Y, dtype="float64")
    client.search(data, generations=1, **QUICK)  # the code is loaded
    found = client.search(data, seconds=600, timeout=5.0, **QUICK)
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


def test_a_client_goes_on_when_its_data_set_was_removed(client):
    data = client.upload(X - 1, Y, dtype="float64")
    *_, found = interrupted(client, data, lambda: client.release(data, everywhere=True))
    assert (found.interruptions, found.reason) == (1, SearchReason.CANCELLED)


# ------------------------------------------------------------------------------- many, and tenants


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A server of three tenants, of at most four searches, of which the third one may have none."""
    folder = tmp_path_factory.mktemp("tenants")
    tokens, by_tenant = token_file(folder, "alice", "bob", "carol")
    limits = tenants_file(folder, "tenants.bob.searches = 1\ntenants.carol.searches = 0\n")
    flags = ("--token-file", tokens, "--tenants-file", limits, "--max-searches", "4")
    with ServerProcess("--threads", "2", "--front-ends", "2", *flags) as process:
        yield process, by_tenant


@pytest.fixture
def as_tenant(shared):
    process, tokens = shared
    channels = []

    def connected(name):
        channels.append(grpc.insecure_channel(process.address, OWN_CONNECTION))
        made = Caller(channels[-1], bearer(tokens[name]))
        made.call("UploadVariables", DATA)
        return made

    yield connected
    for channel in channels:
        channel.close()
    eventually(lambda: process.in_flight() == Amounts())


def test_a_tenant_has_its_share_of_the_searches_and_leaves_the_others_theirs(as_tenant):
    alice, bob = as_tenant("alice"), as_tenant("bob")
    calls = [begun(alice), begun(alice), begun(bob)]
    for tenant, limit in ((alice, 2), (bob, 1)):
        with pytest.raises(grpc.RpcError) as caught:
            search(tenant, **ONCE)
        detail = detail_of(caught.value)
        assert (detail.reason, detail.available) == ("TOO_MANY_SEARCHES", limit)
        assert detail.retry_after_ms > 0
    for _ in range(20):  # calls have turns beside searches
        alice.call("GetVariables", DATA)
        assert bob.call("Evaluate", DATA)
    for call in (calls[0], calls[2]):
        call.cancel()
    eventually(lambda: not _is_refused(alice), 60.0)
    calls[1].cancel()


def _is_refused(caller):
    try:
        search(caller, **ONCE, no_pairs=True, **SMALL)
    except grpc.RpcError as error:
        assert detail_of(error).reason == "TOO_MANY_SEARCHES"
        return True
    return False


def test_data_of_another_tenant_are_not_searched(as_tenant):
    alice, bob = as_tenant("alice"), as_tenant("bob")
    own = Dataset.of(X * 3, Y, dtype="float64")
    alice.call("UploadVariables", own)
    with pytest.raises(grpc.RpcError) as caught:
        search(bob, own, **ONCE)
    assert explained(caught.value)[:2] == ("NOT_FOUND", "DATASET_NOT_FOUND")


def test_of_a_hundred_searches_at_once_some_run_and_the_others_are_told_when_to_come(as_tenant):
    callers = [as_tenant("alice") for _ in range(4)]
    method = [caller.channel.unary_stream(SEARCH) for caller in callers]
    message = request(**LONG).SerializeToString()
    calls = [method[n % 4](message, metadata=callers[0].metadata) for n in range(100)]
    outcomes, running = [], []
    for call in calls:
        try:
            next(call)
            running.append(call)
        except grpc.RpcError as error:
            detail = detail_of(error)
            outcomes.append(detail.reason)
            assert detail.retry_after_ms > 0
    assert len(running) == 2
    assert set(outcomes) <= {"TOO_MANY_SEARCHES", "TOO_MANY_REQUESTS", "QUEUE_FULL"}
    assert callers[0].call("Evaluate", DATA)
    for call in running:
        next(call)
        call.cancel()


def test_searches_can_be_switched_off(as_tenant):
    with pytest.raises(grpc.RpcError) as caught:
        search(as_tenant("carol"), **ONCE)
    detail = detail_of(caught.value)
    assert (detail.reason, detail.available) == ("TOO_MANY_SEARCHES", 0)


# ----------------------------------------------------------------------------------------- engines


def test_a_search_outlives_its_engine_and_says_so(family, caplog):
    with warpfit.connect(family.address) as client:
        data = client.upload(X, Y, dtype="float64")
        first, *_, found = interrupted(client, data, family.kill_engine)
    assert found.interruptions == 1
    assert "goes on from its front" in caplog.text
    assert found.tried > first.tried
    assert found.losses[-1] <= first.losses[-1]


def test_a_worker_is_told_that_the_engine_is_gone(family):
    with grpc.insecure_channel(family.address, OWN_CONNECTION) as channel:
        caller = Caller(channel)
        with warpfit.connect(family.address) as client:
            client.upload(X, Y, dtype="float64")
        call = begun(caller)
        family.kill_engine()
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
    assert explained(caught.value)[:2] == ("UNAVAILABLE", "ENGINE_RESTARTING")


@pytest.mark.thorough
def test_a_search_goes_on_at_another_server_when_its_own_stops():
    flags = ("--threads", "1", "--front-ends", "1", "--grace", "0.5")
    with (
        ServerProcess(*flags) as first,
        ServerProcess(*flags) as second,
        warpfit.connect([first.address, second.address]) as client,
    ):
        data = client.upload(X, Y, dtype="float64")

        def stop():
            busy = first if first.in_flight().searches else second
            busy.process.terminate()

        *_, found = interrupted(client, data, stop)
    assert found.interruptions == 1
