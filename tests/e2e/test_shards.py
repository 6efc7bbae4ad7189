"""Data sets whose rows are divided among engines: the same bits, and clear losses of engines."""

import threading
import time

import grpc
import numpy as np
import pytest

import warpfit
from support.servers.answers import answers, table
from support.servers.rpcs import SERVICE
from support.servers.server import ServerProcess, eventually
from warpfit.errors import (
    CancelledError,
    DeadlineExceededError,
    InvalidArgumentError,
    UnavailableError,
)
from warpfit.expressions.workload import thesis_mix
from warpfit.v1 import evaluator_pb2 as pb

#: Several nodes of the tree of sums in each shard, and a ragged end.
ROWS = 41_003
X, Y = table(ROWS)
WEIGHTS = np.random.default_rng(2).uniform(0.0, 2.0, ROWS)
BATCH = thesis_mix(3, 40, variables=4)
FLAGS = ("--threads", "3", "--front-ends", "2")


@pytest.fixture(scope="module")
def server():
    with ServerProcess(*FLAGS, devices="cpu:3") as process:
        yield process


@pytest.fixture
def client(server):
    with warpfit.connect(server.address) as made:
        yield made


def shards_of(server, data):
    with grpc.insecure_channel(server.address) as channel:
        ask = channel.unary_unary(
            f"{SERVICE}GetVariables",
            pb.GetVariablesRequest.SerializeToString,
            pb.DatasetInfo.FromString,
        )
        return ask(pb.GetVariablesRequest(content_id=data.content_id)).shards


@pytest.mark.parametrize(("dtype", "weights"), [("float32", WEIGHTS), ("float64", None)])
def test_all_answers_have_the_bits_of_a_whole_data_set(client, dtype, weights):
    options = {"rows": ROWS, "programs": 40, "fits": 8, "dtype": dtype, "weights": weights}
    expected, _ = answers(client, **options, shards=1)
    for shards in (2, 3):
        found, devices = answers(client, **options, shards=shards)
        assert found == expected
        assert {name: len(labels) for name, labels in devices.items()} == dict.fromkeys(
            found, shards
        )


def test_a_server_says_what_is_sharded_and_what_it_refuses(client, server):
    with pytest.raises(InvalidArgumentError) as caught:
        client.upload(X, Y, shards=4)
    assert (caught.value.reason, caught.value.field) == ("TOO_MANY_SHARDS", "shards")
    with client.upload(X, Y, shards=3) as data:
        assert shards_of(server, data) == 3
        assert (client.info().datasets, client.info().sharded_datasets) == (1, 1)
        few = client.upload(X[:100], Y[:100], shards=3)  # of one node
        assert shards_of(server, few) == 0
        assert client.run(data, *BATCH, loss="mse", rows=(0, 99)).timings.device.count("cpu") == 1
        client.release(few, everywhere=True)
    assert client.info().sharded_datasets == 0


def test_an_error_names_its_program_and_the_next_call_works(client):
    with client.upload(X, Y, shards=2) as data:
        with pytest.raises(warpfit.errors.ProgramError) as caught:
            client.evaluate(data, ["x1", "x1 + x9"], loss="mse")
        assert caught.value.expression == 1
        assert len(client.evaluate(data, ["x1", "x2"], loss="mse")) == 2


def test_a_call_that_ends_early_stops_all_engines(client):
    rows = np.tile(X, (40, 1))
    with client.upload(rows, rows[:, 0], shards=3, dtype="float64") as data:
        batch = thesis_mix(5, 400, variables=4)
        started = time.monotonic()
        with pytest.raises((DeadlineExceededError, CancelledError)):
            client.run(data, *batch, loss="mse", timeout=0.3)
        # The best p1 is infinite and the best p2 is 0: searches for them take thousands of passes.
        fit = client.optimize(
            data, ["p1*exp(p2*x1) + p3"] * 200, [[1.0, 0.3, 0.0]] * 200, partial=True, timeout=4.0,
            gradient_tolerance=0, step_tolerance=0, loss_tolerance=0, max_iterations=10**6,
        )  # fmt: skip
        assert set(fit.reason) == {"deadline"}
        assert np.isfinite(fit.loss).all()
        assert client.evaluate(data, ["x1"], loss="mse")[0] == 0.0
        assert time.monotonic() - started < 30


def test_an_engine_that_is_killed_under_load_costs_no_answer_and_no_call(server):
    stop, wrong, answered = threading.Event(), [], [0] * 2
    with warpfit.connect(server.address) as client:
        data = client.upload(X, Y, shards=3)
        expected = client.evaluate(data, *BATCH, loss="mse").tobytes()
        small = thesis_mix(7, 3, variables=4)
        fitted = client.optimize(data, *small, max_iterations=5).loss.tobytes()

        def call(number):
            with warpfit.connect(server.address) as own:
                while not stop.is_set():
                    losses = own.evaluate(data, *BATCH, loss="mse").tobytes()
                    fit = own.optimize(data, *small, max_iterations=5).loss.tobytes()
                    wrong.append(losses != expected or fit != fitted)
                    answered[number] += 1

        threads = [threading.Thread(target=call, args=(n,)) for n in range(len(answered))]
        for thread in threads:
            thread.start()
        for engine in (0, 2):
            before = list(answered)
            eventually(lambda before=before: all(np.subtract(answered, before) > 2))
            server.kill_engine(engine)
        before = list(answered)
        eventually(lambda: all(np.subtract(answered, before) > 2), 60)
        stop.set()
        for thread in threads:
            thread.join()
        assert not any(wrong)
        client.release(data, everywhere=True)


def test_a_call_fails_as_unavailable_while_an_engine_of_its_rows_is_away(server):
    impatient = warpfit.RetryPolicy(total_seconds=0)
    with (
        warpfit.connect(server.address, retry=impatient) as client,
        client.upload(X, Y, shards=3) as data,
    ):
        server.kill_engine(1)
        with pytest.raises(UnavailableError):
            while True:
                client.evaluate(data, *BATCH, loss="mse")
        eventually(lambda: is_answered(client, data))


def is_answered(client, data):
    try:
        client.evaluate(data, *BATCH, loss="mse")
    except UnavailableError:
        return False
    return True
