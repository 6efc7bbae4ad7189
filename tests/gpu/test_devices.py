"""Several engines on GPUs behind one server: two on one GPU, and one on each where there are more.

The bits of every answer are those of one engine.
"""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest

import warpfit
from support.random_programs import thesis_mix
from support.servers.rpcs import answers, table
from support.servers.server import ServerProcess, eventually
from warpfit.errors import UnavailableError
from warpfit_server.machine import resolve_devices

#: Large enough that the calls take several milliseconds on an H200 and so are split.
SIZES = {"rows": 200_000, "programs": 1_500, "fits": 2_000}
SPLIT = ("losses", "gradients", "lm")
IMPATIENT = warpfit.RetryPolicy(total_seconds=0)


def several() -> str:
    """Numbers of all GPUs, as ``--devices`` names them."""
    return resolve_devices("all")


@pytest.fixture(scope="module")
def expected(engine):
    """The answers of one engine."""
    with ServerProcess(devices="0") as server, warpfit.connect(server.address) as client:
        assert [device.label for device in client.info().devices] == ["cuda:0"]
        return answers(client, **SIZES)[0]


def compare(server, expected):
    """Compare all bits; return which devices the calls went to."""
    with warpfit.connect(server.address) as client:
        found, devices = answers(client, **SIZES)
    assert found == expected
    print({name: sorted(used) for name, used in devices.items()})
    return devices


@pytest.fixture(scope="module")
def pair(engine):
    with ServerProcess("--front-ends", "2", devices="0,0") as server:
        yield server


def test_two_engines_on_one_gpu_give_the_bits_of_one(pair, expected):
    devices = compare(pair, expected)
    for name in SPLIT:
        assert devices[name] == {"cuda:0", "cuda:0#1"}, name


def test_an_engine_that_dies_costs_its_own_calls_only(pair):
    """Each caller has one call in flight, so that at most as many fail as went to that engine."""
    stop, lock = threading.Event(), threading.Lock()
    failed, answered, wrong = Counter(), Counter(), Counter()
    batches = [thesis_mix(seed, 300, variables=4) for seed in range(8)]
    with warpfit.connect(pair.address) as client:
        data = client.upload(*table(20_000))
        options = {"loss": "mse", "tier": "interpreter"}
        right = [client.evaluate(data, *batch, **options).tobytes() for batch in batches]

        def call(number):
            with warpfit.connect(pair.address, retry=IMPATIENT) as own:
                while not stop.is_set():
                    try:
                        answer = own.run(data, *batches[number], **options)
                    except UnavailableError:
                        with lock:
                            failed[number] += 1
                        time.sleep(0.01)
                    else:
                        with lock:
                            answered[answer.timings.device] += 1
                            wrong[answer.losses.tobytes() != right[number]] += 1

        threads = [threading.Thread(target=call, args=(n,)) for n in range(len(batches))]
        survivor = pair.engine(0).pid
        for thread in threads:
            thread.start()
        eventually(lambda: min(answered["cuda:0"], answered["cuda:0#1"]) > 20)
        pair.kill_engine(1)
        before = answered["cuda:0"]
        eventually(lambda: answered["cuda:0"] > before + 100)
        eventually(lambda: all(device.serving for device in client.info().devices), 120)
        before = answered["cuda:0#1"]
        eventually(lambda: answered["cuda:0#1"] > before + 20)
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong[True]
    assert max(failed.values(), default=0) <= 1
    assert pair.engine(0).pid == survivor


def test_all_devices_serve_and_give_the_bits_of_one(engine, expected):
    numbers = several().split(",")
    if len(numbers) < 2:
        pytest.skip("one GPU")
    for count in range(2, len(numbers) + 1):
        names = "all" if count == len(numbers) else ",".join(numbers[:count])
        with ServerProcess(devices=names) as server:
            labels = {f"cuda:{number}" for number in numbers[:count]}
            with warpfit.connect(server.address) as client:
                assert {d.label for d in client.info().devices if d.serving} == labels
            devices = compare(server, expected)
            assert devices["losses"] <= labels
            assert len(devices["losses"]) > 1
