"""Several engines behind one server: the same bits, and one that dies costs its own calls only."""

from __future__ import annotations

import threading
from collections import Counter

import numpy as np
import pytest

import warpfit
from support.servers.server import ServerProcess, eventually
from warpfit.errors import UnavailableError
from warpfit.expressions.workload import thesis_mix

ROWS = 4_000
RANDOM = np.random.default_rng(5)
X = RANDOM.uniform(0.5, 2.0, (ROWS, 4)).astype(np.float32)
Y = np.sin(X[:, 0]) + 0.1 * X[:, 1]
FLAGS = ("--threads", "2", "--health-port", "0", "--metrics-port", "0")
IMPATIENT = warpfit.RetryPolicy(total_seconds=0)


@pytest.fixture(scope="module")
def server():
    with ServerProcess(*FLAGS, "--front-ends", "2", devices="cpu:2") as process:
        yield process


def serving(client):
    return {device.label: device.serving for device in client.info().devices}


def batches(count):
    """Batches that are too small to be split."""
    return [thesis_mix(seed, 10, variables=4) for seed in range(count)]


def test_calls_at_the_same_time_go_to_both_engines(server):
    used, lock = set(), threading.Lock()

    def call(programs, parameters):
        with warpfit.connect(server.address) as client:
            data = client.upload(X[:400], Y[:400])
            for _ in range(4):
                answer = client.run(data, programs, parameters, loss="mse")
                with lock:
                    used.add(answer.timings.device)

    threads = [threading.Thread(target=call, args=batch) for batch in batches(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert used >= {"cpu:0", "cpu:1"}


def test_an_engine_that_dies_costs_its_own_calls_only(server):
    """The calls of each thread stay with one engine, because its batch prefers that."""
    stop = threading.Event()
    failed = {"cpu:0": 0, "cpu:1": 0}
    answered = Counter()
    wrong = []
    with warpfit.connect(server.address) as client:
        data = client.upload(X[:400], Y[:400])
        homes = {}
        for batch in batches(20):
            homes.setdefault(client.run(data, *batch, loss="mse").timings.device, batch)
        assert set(homes) >= set(failed)
        expected = {home: client.evaluate(data, *homes[home], loss="mse") for home in failed}

        def call(home):
            with warpfit.connect(server.address, retry=IMPATIENT) as own:
                while not stop.is_set():
                    try:
                        answer = own.run(data, *homes[home], loss="mse")
                    except UnavailableError:
                        failed[home] += 1
                    else:
                        answered[answer.timings.device] += 1
                        wrong.append(answer.losses.tobytes() != expected[home].tobytes())

        threads = [threading.Thread(target=call, args=(home,)) for home in failed]
        survivor = server.engine(0).pid
        for thread in threads:
            thread.start()
        eventually(lambda: min(answered[home] for home in failed) > 10)
        server.kill_engine(1)
        eventually(lambda: serving(client) == {"cpu:0": True, "cpu:1": False})
        before = answered["cpu:0"]
        eventually(lambda: answered["cpu:0"] > before + 20)
        eventually(lambda: serving(client) == {"cpu:0": True, "cpu:1": True})
        before = answered["cpu:1"]
        eventually(lambda: answered["cpu:1"] > before + 10)
        stop.set()
        for thread in threads:
            thread.join()
        assert not any(wrong)
        assert sum(failed.values()) <= 2, "each thread has one call in flight"
        assert server.engine(0).pid == survivor


def everything(client):
    """Bytes of the answers to calls that several engines share, and the devices of each."""
    data = client.upload(X, Y)
    programs, parameters = thesis_mix(9, 240, variables=4)
    calls = {
        "losses": {"loss": "mse"},
        "values": {"values": True},
        "gradients": {"loss": "mae", "gradient": True},
        "jacobian": {"jacobian": True},
        "variables": {"loss": "mse", "variable_gradient": True, "values": True},
        "statistics": {"loss": "mse", "linear_scaling": True, "reductions": True},
        "fast": {"loss": "rmse", "precision": "fast"},
    }
    found, devices = {}, {}
    for name, options in calls.items():
        answer = client.run(data, programs, parameters, **options)
        found[name] = arrays_of(answer)
        devices[name] = answer.timings.device
    texts = ["p1*x1 + p2", "p1*exp(p2*x2) + p3", "sin(p1*x1) * p2", "p1*x1^2 + p2*x3 + p3"] * 20
    counts = [2, 3, 2, 3] * 20
    starts = [RANDOM_STARTS[:, :count] for count in counts]
    for method in ("lm", "bfgs"):
        fit = client.optimize(
            data,
            texts,
            starts,
            method=method,
            max_iterations=8,
            covariance=True,
            standard_errors=True,
        )
        found[method] = arrays_of(fit)
        devices[method] = fit.timings.device
    return found, devices


def arrays_of(answer):
    """The bytes of every array of an answer, by name."""
    fields = {name: getattr(answer, name) for name in type(answer).__slots__}
    flat = {
        name: field if isinstance(field, np.ndarray) else np.concatenate([*map(np.ravel, field)])
        for name, field in fields.items()
        if isinstance(field, np.ndarray | list | tuple) and len(field)
    }
    return {name: array.tobytes() for name, array in flat.items()}


RANDOM_STARTS = RANDOM.uniform(0.5, 1.5, (2, 3))


def test_all_answers_are_the_same_bits_for_one_two_and_three_engines(server):
    answers = {}
    with warpfit.connect(server.address) as client:
        answers[2], devices = everything(client)
        for name, used in devices.items():
            assert set(used.split(",")) == {"cpu:0", "cpu:1"}, name
    for engines in (1, 3):
        with (
            ServerProcess(*FLAGS, "--front-ends", "1", devices=f"cpu:{engines}") as other,
            warpfit.connect(other.address) as client,
        ):
            answers[engines], _ = everything(client)
    for name in answers[2]:
        assert answers[2][name]
        assert answers[1][name] == answers[2][name] == answers[3][name], name


def test_an_error_in_a_part_names_the_program_of_the_whole(server):
    with warpfit.connect(server.address) as client:
        data = client.upload(X, Y)
        programs, parameters = thesis_mix(9, 240, variables=4)
        programs[200] = warpfit.parse("x1 + x9")
        with pytest.raises(warpfit.errors.ProgramError) as caught:
            client.evaluate(data, programs, parameters, loss="mse")
        assert caught.value.expression == 200
        assert len(client.evaluate(data, programs[:200], parameters[:200], loss="mse")) == 200


def test_the_loss_of_an_engine_fails_a_split_call_and_the_next_one_works(server):
    with warpfit.connect(server.address, retry=IMPATIENT) as client:
        rows = np.tile(X, (250, 1))
        data = client.upload(rows, rows[:, 0])
        batch = thesis_mix(3, 300, variables=4)
        timer = threading.Timer(0.3, server.kill_engine, args=(1,))
        timer.start()
        with pytest.raises(UnavailableError):
            client.run(data, *batch, loss="mse")
        timer.join()
        client.release(data)
        small = client.upload(X, Y)
        assert client.run(small, *batch, loss="mse").timings.device == "cpu:0"
        eventually(lambda: serving(client) == {"cpu:0": True, "cpu:1": True})
        assert client.run(small, *batch, loss="mse").timings.device.count("cpu") == 2
