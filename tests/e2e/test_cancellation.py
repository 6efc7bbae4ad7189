"""A call that is cancelled, or whose deadline passes, at any stage: nothing is executed for it
afterwards, and everything that it held comes back.
"""

import time
from functools import partial

import grpc
import numpy as np
import pytest

import warpfit
from support.servers.rpcs import LONG, SERVICE, long_request, request, start
from support.servers.server import eventually
from warpfit import codec
from warpfit.calls.arguments import build_fit
from warpfit.dataset import Dataset
from warpfit_server.tenants import Amounts

WIDE = np.random.default_rng(2).normal(size=(200_000, 2)).astype(np.float32)


@pytest.fixture(scope="module")
def data(server):
    with warpfit.connect(server.address) as client:
        uploaded = client.upload(WIDE, WIDE[:, 0])
        client.optimize(uploaded, ["p1*x1"], [[1.0]])  # imports and compiles what fits need
        yield uploaded


@pytest.fixture
def leaves_nothing(server, data):
    """Check that everything comes back and that the engine computes nothing more."""
    engine = server.engine()

    def is_idle():
        before = sum(engine.cpu_times()[:2])
        time.sleep(0.1)
        return sum(engine.cpu_times()[:2]) - before < 0.05

    def check():
        eventually(lambda: server.in_flight() == Amounts(), 10)
        eventually(is_idle, 10)

    return check


def fits(data):
    program = warpfit.Program.apply("mul", LONG, warpfit.Program.parameter(0))
    fit = build_fit(data, [program] * 50, [[0.5]] * 50, {"loss": "mae", "max_iterations": 1000})
    return codec.fit_to_message(fit).SerializeToString()


CANCELLED, PASSED = grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED


def codes(calls):
    """Read calls to their ends; return the statuses of those that failed."""
    found = []
    for call in calls:
        try:
            list(call)
        except grpc.RpcError as error:
            found.append(error.code())
    return found


@pytest.mark.parametrize(
    ("method", "make"), [("Evaluate", partial(long_request, programs=300)), ("Optimize", fits)]
)
def test_while_the_engine_computes(caller, data, leaves_nothing, method, make):
    call = start(caller.channel, make(data), method)
    time.sleep(0.2)
    call.cancel()
    assert codes([call]) == [CANCELLED]
    leaves_nothing()
    assert codes([start(caller.channel, make(data), method, timeout=0.5)]) == [PASSED]
    leaves_nothing()


def test_while_it_waits_for_the_engine(caller, data, leaves_nothing):
    message = long_request(data, 10)  # the first of them may end in time
    found = codes([start(caller.channel, message, timeout=0.7) for _ in range(16)])
    assert set(found) <= {PASSED, grpc.StatusCode.RESOURCE_EXHAUSTED}  # the queue may be full
    assert found.count(PASSED) > 4
    leaves_nothing()


def test_while_the_answer_is_sent(caller, data, leaves_nothing):
    message = request(data, [f"x1*{k}" for k in range(50)])  # 40 MB, more than gRPC buffers
    call = start(caller.channel, message)
    assert len(next(call)) > 0
    time.sleep(0.3)  # it waits for the client to read on
    call.cancel()
    assert codes([call]) == [CANCELLED]
    leaves_nothing()


def test_while_data_are_uploaded(caller, server, leaves_nothing):
    messages = list(codec.upload_messages(Dataset.of(WIDE + 1), 100_000))
    held = server.shared_memory()

    def half():
        yield from messages[: len(messages) // 2]
        time.sleep(0.4)

    method = caller.channel.stream_unary(SERVICE + "UploadVariables")
    assert method.future(half(), timeout=0.3).exception().code() is PASSED
    leaves_nothing()
    assert server.shared_memory() < held + WIDE.nbytes
