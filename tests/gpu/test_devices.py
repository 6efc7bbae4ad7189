"""Several engines on GPUs behind one server: two on one GPU, and one on each where there are more.

The bits of every answer are those of one engine.
"""

from __future__ import annotations

import pytest

import warpfit
from support.servers.rpcs import answers, table
from support.servers.server import ServerProcess, eventually
from warpfit_server.machine import resolve_devices

#: Large enough that the calls take several milliseconds on an H200 and so are split.
SIZES = {"rows": 200_000, "programs": 1_500, "fits": 2_000}
SPLIT = ("losses", "gradients", "lm")


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


def test_an_engine_that_dies_leaves_the_other_on_its_gpu_alone(pair, expected):
    survivor = pair.engine(0).pid
    pair.kill_engine(1)
    with warpfit.connect(pair.address) as client:
        data = client.upload(*table(20_000))
        answers = [client.run(data, ["x1 + x2"], loss="mse") for _ in range(20)]
        assert {each.losses.tobytes() for each in answers} == {answers[0].losses.tobytes()}
        assert pair.engine(0).pid == survivor
        eventually(lambda: all(device.serving for device in client.info().devices), 120)
    compare(pair, expected)


def test_all_devices_serve_and_give_the_bits_of_one(engine, expected):
    numbers = resolve_devices("all").split(",")
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
