"""A call that is cancelled, or whose deadline passes, at any stage: nothing is executed for it
afterwards, and everything that it held comes back.
"""

import time

import grpc
import numpy as np
import psutil
import pytest

import warpfit
from support.servers.rpcs import LONG, OWN_CONNECTION, SERVICE, Caller, request, start
from support.servers.server import runs
from warpfit import codec
from warpfit.calls.arguments import build_fit
from warpfit.dataset import Dataset
from warpfit_server.config import Config
from warpfit_server.processes.engine_start import prepare
from warpfit_server.server import Server
from warpfit_server.tenancy.quotas import Amounts

WIDE = np.random.default_rng(2).normal(size=(200_000, 2)).astype(np.float32)


@pytest.fixture(scope="module")
def server():
    config = Config(port=0, devices="cpu", threads=1, front_ends=1)
    with prepare(config) as prepared, Server(prepared) as running:
        yield running


@pytest.fixture(scope="module")
def engine(server):
    children = psutil.Process().children()
    (process,) = [c for c in children if runs(c, "warpfit_server.engine.process")]
    return process


@pytest.fixture
def caller(server):
    with grpc.insecure_channel(f"127.0.0.1:{server.port}", OWN_CONNECTION) as channel:
        yield Caller(channel)


@pytest.fixture(scope="module")
def data(server):
    with warpfit.connect(f"127.0.0.1:{server.port}") as client:
        uploaded = client.upload(WIDE, WIDE[:, 0])
        client.optimize(uploaded, ["p1*x1"], [[1.0]])  # imports and compiles what fits need
        yield uploaded


@pytest.fixture
def leaves_nothing(server, engine, data):
    """Check that everything comes back and that the engine computes nothing more."""

    def check():
        deadline = time.monotonic() + 10
        while server.quotas.in_flight() != Amounts() or any(server.quotas.work()):
            assert time.monotonic() < deadline, server.quotas.in_flight()
            time.sleep(0.02)
        while _load(engine) > 0.5:
            assert time.monotonic() < deadline, "cancelled work is executed"
        assert server.quotas.in_flight() == Amounts()

    return check


def _load(engine) -> float:
    """Share of a tenth of a second that the engine computes."""
    before = sum(engine.cpu_times()[:2])
    time.sleep(0.1)
    return (sum(engine.cpu_times()[:2]) - before) / 0.1


def _fit(data):
    program = warpfit.Program.apply("mul", LONG, warpfit.Program.parameter(0))
    fit = build_fit(data, [program] * 50, [[0.5]] * 50, {"loss": "mae", "max_iterations": 1000})
    return codec.fit_to_message(fit).SerializeToString()


END = {"cancelled": grpc.StatusCode.CANCELLED, "deadline": grpc.StatusCode.DEADLINE_EXCEEDED}


def _end(calls, way, least=1.0):
    """End calls by a way of ending, and see that they, or a share of them, have ended by it."""
    if way == "cancelled":
        for call in calls:
            call.cancel()
    codes = []
    for call in calls:
        try:
            list(call)
        except grpc.RpcError as error:
            codes.append(error.code())
    assert codes == [END[way]] * len(codes)
    assert len(codes) >= least * len(calls)


@pytest.mark.parametrize("way", END)
@pytest.mark.parametrize(
    ("method", "make"),
    [("Evaluate", lambda data: request(data, [LONG] * 300, loss="mse")), ("Optimize", _fit)],
)
def test_while_the_engine_computes(caller, data, leaves_nothing, way, method, make):
    timeout = 0.5 if way == "deadline" else 60
    call = start(caller.channel, make(data), method, timeout=timeout)
    time.sleep(0.3)
    _end([call], way)
    leaves_nothing()


@pytest.mark.parametrize("way", END)
def test_while_it_waits_for_the_engine(caller, server, data, leaves_nothing, way):
    message = request(data, [LONG] * 10, loss="mse")  # the first of them may end in time
    timeout = 1.0 if way == "deadline" else 60
    calls = [start(caller.channel, message, timeout=timeout) for _ in range(20)]
    deadline = time.monotonic() + 10
    while way == "cancelled" and server.quotas.in_flight().engine_ns == 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    _end(calls, way, least=0.4)
    leaves_nothing()


@pytest.mark.parametrize("way", END)
def test_while_it_is_decoded(caller, data, leaves_nothing, way):
    """Many small tokens take long to decode: deadlines pass then, or on the way."""
    program = warpfit.parse("+".join(["x1"] * 2000))
    message = request(data, [program] * 300, loss="mse")
    for milliseconds in (1, 10, 40):
        timeout = milliseconds / 1000 if way == "deadline" else 60
        call = start(caller.channel, message, timeout=timeout)
        if way == "cancelled":
            time.sleep(milliseconds / 1000)
        _end([call], way)
        leaves_nothing()  # or the next one finds the queue full


@pytest.mark.parametrize("way", END)
def test_while_the_answer_is_sent(caller, data, leaves_nothing, way):
    message = request(data, [f"x1*{k}" for k in range(50)])  # 40 MB, more than gRPC buffers
    call = start(caller.channel, message, timeout=1.0 if way == "deadline" else 60)
    assert len(next(call)) > 0
    time.sleep(0.3)  # it is computed by now, and waits for the client to read on
    if way == "cancelled":
        call.cancel()
    else:
        time.sleep(0.8)
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert caught.value.code() is END[way]
    leaves_nothing()


@pytest.mark.parametrize("way", END)
def test_while_data_are_uploaded(caller, server, leaves_nothing, way):
    messages = [
        message if isinstance(message, bytes) else message.SerializeToString()
        for message in codec.upload_messages(Dataset.of(WIDE + 1), 100_000)
    ]
    held = server.datasets._held.total()

    def half():
        yield from messages[: len(messages) // 2]
        time.sleep(0.4)

    method = caller.channel.stream_unary(SERVICE + "UploadVariables")
    call = method.future(half(), timeout=0.3 if way == "deadline" else 60)
    time.sleep(0.1)
    if way == "cancelled":
        assert call.cancel()
    else:
        assert call.exception().code() is END[way]
    leaves_nothing()
    assert server.datasets._held.total() == held
