"""Several engines behind one server: the same bits, and one that dies costs its own calls only."""

import threading
import time
from collections import Counter

import numpy as np
import pytest

import warpfit
from support.load.processes import in_threads
from support.random_programs import thesis_mix
from support.servers import health
from support.servers.rpcs import answers, table
from support.servers.server import ServerProcess, eventually
from warpfit.errors import UnavailableError

ROWS = 4_000
X, Y = table(ROWS)
FLAGS = ("--threads", "2", "--health-port", "0", "--metrics-port", "0")
IMPATIENT = warpfit.RetryPolicy(total_seconds=0)


@pytest.fixture(scope="module")
def pair():
    with ServerProcess(*FLAGS, "--front-ends", "2", devices="cpu:2") as process:
        yield process


@pytest.fixture
def client(pair):
    with warpfit.connect(pair.address) as connected:
        yield connected


def serving(client):
    return {device.label: device.serving for device in client.info().devices}


def test_an_engine_that_dies_costs_its_own_calls_only(pair, client):
    """The calls of each thread stay with one engine, because its batch prefers that."""
    stop, failed, answered, wrong = threading.Event(), Counter(), Counter(), []
    data, homes = client.upload(X[:400], Y[:400]), {}
    for seed in range(20):
        batch = thesis_mix(seed, 10, variables=4)  # too small to be split
        answer = client.run(data, *batch, loss="mse")
        homes.setdefault(answer.timings.device, (batch, answer.losses.tobytes()))
    assert {*homes} >= {"cpu:0", "cpu:1"}

    def call(home):
        batch, expected = homes[home]
        with warpfit.connect(pair.address, retry=IMPATIENT) as own:
            while not stop.is_set():
                try:
                    answer = own.run(data, *batch, loss="mse")
                except UnavailableError:
                    failed[home] += 1
                else:
                    answered[answer.timings.device] += 1
                    wrong.append(answer.losses.tobytes() != expected)
                time.sleep(0.02)  # for other tests

    def answers_more(home):
        before = answered[home]
        eventually(lambda: answered[home] > before + 8)

    survivor = pair.engine(0).pid
    with in_threads(call, ("cpu:0", "cpu:1")):
        try:
            answers_more("cpu:1")
            pair.kill_engine(1)
            eventually(lambda: serving(client) == {"cpu:0": True, "cpu:1": False})
            health.wait_for(pair.address, "SERVING", "cpu:0")
            answers_more("cpu:0")
            eventually(lambda: serving(client) == {"cpu:0": True, "cpu:1": True})
            answers_more("cpu:1")
        finally:
            stop.set()
    assert not any(wrong)
    assert sum(failed.values()) <= 2, "each thread has one call in flight"
    assert pair.engine(0).pid == survivor


def test_all_answers_are_the_same_bits_for_one_and_two_engines(client, server):
    sizes = {"rows": ROWS, "programs": 240, "fits": 80}
    of_two, devices = answers(client, **sizes)
    for name in devices.keys() - {"values", "jacobian"}:  # these are of too few programs
        assert devices[name] == {"cpu:0", "cpu:1"}, name
    with warpfit.connect(server.address) as other:
        of_one, _ = answers(other, **sizes)
    assert of_one == of_two


def test_values_of_a_split_call_arrive_in_order(client):
    data = client.upload(X, Y)
    batch = thesis_mix(9, 240, variables=4)
    answer = client.run(data, *batch, values=True)
    assert set(answer.timings.device.split(",")) == {"cpu:0", "cpu:1"}
    for index in range(0, 240, 80):  # one program cannot be split
        part = [each[index : index + 1] for each in batch]
        alone = client.run(data, *part, values=True)
        assert "," not in alone.timings.device
        np.testing.assert_array_equal(answer.values[:, index : index + 1], alone.values)


def test_an_error_in_a_part_names_the_program_of_the_whole(client):
    data = client.upload(X, Y)
    programs, parameters = thesis_mix(9, 240, variables=4)
    programs[200] = warpfit.parse("x1 + x9")
    with pytest.raises(warpfit.errors.ProgramError) as caught:
        client.evaluate(data, programs, parameters, loss="mse")
    assert caught.value.expression == 200


def test_a_search_by_time_runs_on_all_engines_and_outlives_one(pair, client):
    """One with a budget in generations, which a seed repeats, runs on one of them."""
    data, reports = client.upload(X[:300], Y[:300]), []
    eventually(lambda: serving(client) == {"cpu:0": True, "cpu:1": True})
    options = {"pairs": False, "population": 96, "islands": 3}
    one = client.search(data, seconds=60.0, generations=2, **options)
    assert one.timings.device in ("cpu:0", "cpu:1")

    def report(progress):
        if not reports:
            pair.kill_engine(1)
        reports.append(progress.tried)

    found = client.search(data, seconds=2.5, progress=report, **options)
    assert (found.reason, found.interruptions) == ("time", 0)
    assert sorted(found.timings.device.split(",")) == ["cpu:0", "cpu:1"]
    assert found.tried >= reports[-1] > reports[0]
    assert found.tried > one.tried
    eventually(lambda: serving(client) == {"cpu:0": True, "cpu:1": True})
