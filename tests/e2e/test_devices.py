"""Several engines behind one server: the same bits, and one that dies costs its own calls only."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import warpfit
from support.servers.server import ServerProcess, eventually
from warpfit.errors import UnavailableError
from warpfit.expressions.workload import thesis_mix

ROWS = 4_000
PROGRAMS = 60
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
    return [thesis_mix(seed, PROGRAMS, variables=4) for seed in range(count)]


def test_calls_at_the_same_time_go_to_both_engines(server):
    used, lock = set(), threading.Lock()

    def call(programs, parameters):
        with warpfit.connect(server.address) as client:
            data = client.upload(X, Y)
            for _ in range(4):
                answer = client.run(data, programs, parameters, loss="mse")
                with lock:
                    used.add(answer.timings.device)

    threads = [threading.Thread(target=call, args=batch) for batch in batches(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert used == {"cpu:0", "cpu:1"}


def test_an_engine_that_dies_costs_its_own_calls_only(server):
    """The calls of each thread stay with one engine, because its batch prefers that."""
    stop = threading.Event()
    failed = {"cpu:0": 0, "cpu:1": 0}
    answered = dict.fromkeys(failed, 0)
    wrong = []
    with warpfit.connect(server.address) as client:
        data = client.upload(X, Y)
        homes = {}
        for batch in batches(20):
            homes.setdefault(client.run(data, *batch, loss="mse").timings.device, batch)
        assert set(homes) == {"cpu:0", "cpu:1"}
        expected = {home: client.evaluate(data, *homes[home], loss="mse") for home in homes}

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
        eventually(lambda: min(answered.values()) > 10)
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
