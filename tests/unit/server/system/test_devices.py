"""Devices that ``--devices`` names."""

import ctypes
import subprocess
from types import SimpleNamespace

import pytest

from warpfit.errors import InvalidArgumentError, UnavailableError
from warpfit_server.config import Config
from warpfit_server.system import machine
from warpfit_server.system.machine import (
    check_device_memory,
    check_devices,
    engine_devices,
    resolve_devices,
)


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("cpu", ["cpu:0"]),
        ("CPU:3", ["cpu:0", "cpu:1", "cpu:2"]),
        ("0", ["cuda:0"]),
        ("3, 1", ["cuda:3", "cuda:1"]),
        ("0,0,1,0", ["cuda:0", "cuda:0#1", "cuda:1", "cuda:0#2"]),
    ],
)
def test_every_engine_has_a_label_of_its_own(text, labels):
    found = engine_devices(check_devices(text))
    assert [device.label for device in found] == labels


@pytest.mark.parametrize("text", ["", "gpu", "cpu:0", "cpu:65", "-1", "0,", "0;1", "cpu,0", "1000"])
def test_what_names_no_devices_is_refused(text):
    with pytest.raises(ValueError, match="names no devices"):
        check_devices(text)


def test_only_the_memory_of_gpus_is_limited():
    check_device_memory("0,1", 1 << 30)
    check_device_memory("cpu:2", None)
    with pytest.raises(InvalidArgumentError, match="--device-memory") as refused:
        check_device_memory("cpu", 1 << 30)
    assert refused.value.field == "device_memory"


def driver_of(*sizes):
    """Return CUDA's driver with GPUs of these bytes."""

    def tell(place, value):
        place._obj.value = value
        return 0

    return SimpleNamespace(
        cuInit=lambda flags: 0,
        cuDeviceGetCount=lambda count: tell(count, len(sizes)),
        cuDeviceGet=tell,
        cuDeviceTotalMem_v2=lambda size, device: tell(size, sizes[device.value]),
    )


def test_a_limit_above_the_memory_of_a_gpu_is_refused_with_the_amount(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver_of(80 << 30, 24 << 30))
    text = " ".join(map(str, machine._ask_driver()))
    run = SimpleNamespace(returncode=0, stdout=text, stderr="")
    monkeypatch.setattr(machine, "find_spec", lambda name: True)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: run)
    check_device_memory("0,1", 24 << 30)
    check_device_memory("0,7", 80 << 30)  # the engine says that there is no GPU 7
    for devices, memory, wanted in (
        ("0,1", 25 << 30, r"25\.0 GiB, and cuda:1 has 24\.0 GiB"),
        ("0", 81 << 30, r"81\.0 GiB, and cuda:0 has 80\.0 GiB"),
    ):
        with pytest.raises(InvalidArgumentError, match=wanted) as refused:
            check_device_memory(devices, memory)
        assert (refused.value.reason, refused.value.field) == ("OVER_MEMORY", "device_memory")


def test_engines_on_the_same_gpu_divide_its_memory():
    assert [device.share for device in engine_devices("0,1,0")] == [0.5, 1.0, 0.5]


@pytest.mark.parametrize(
    ("visible", "seen"), [(None, ["2", "0"]), ("7, 5,GPU-ab", ["GPU-ab", "7"]), ("4", ["", "4"])]
)
def test_an_engine_sees_its_own_gpu_only(visible, seen):
    given = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    found = [device.environment(given) for device in engine_devices("2,0")]
    assert found == [{"CUDA_VISIBLE_DEVICES": name} for name in seen]
    assert engine_devices("cpu")[0].environment(given) == {}


def test_threads_are_divided():
    config = Config(devices="cpu:3", threads=8)
    assert [config.engine_threads(number) for number in range(3)] == [3, 3, 2]
    assert Config(devices="cpu:3", threads=1).engine_threads(2) == 1
    assert Config(devices="cpu").engine_threads(0) is None


@pytest.mark.parametrize(
    ("returned", "meaning"),
    [((0, "9 9\n", ""), "0,1"), ((0, "\n", ""), "cpu"), ((1, "", "no driver\n"), "cpu")],
)
def test_auto_takes_all_gpus_and_else_the_cpu(monkeypatch, returned, meaning):
    status, output, errors = returned
    run = SimpleNamespace(returncode=status, stdout=output, stderr=errors)
    monkeypatch.setattr(machine, "find_spec", lambda name: True)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: run)
    assert resolve_devices("auto") == meaning
    if meaning == "cpu":
        with pytest.raises(UnavailableError, match=errors.strip() or "reports none"):
            resolve_devices("all")
    else:
        assert resolve_devices("all") == meaning


def test_without_cupy_nothing_is_asked(monkeypatch):
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    assert resolve_devices("auto") == "cpu"
    assert resolve_devices("1,2") == "1,2"
    with pytest.raises(UnavailableError, match="CuPy is not installed"):
        resolve_devices("all")
