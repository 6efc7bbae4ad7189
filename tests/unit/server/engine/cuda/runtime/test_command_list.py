"""Command lists, with a fake driver."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from warpfit_server.engine.cuda.runtime.command_list import LAUNCHES_HELD, CommandList

STREAM = 0x5EA


@pytest.fixture
def driver():
    """Return fake driver functions that record their calls; `fail` names one that fails."""
    notes = SimpleNamespace(calls=[], fail="", copied=[])
    i64, u32 = ctypes.c_int64, ctypes.c_uint32

    def noting(name, *kinds):
        def function(*arguments):
            notes.calls.append((name, *arguments))
            if name == "elapsed":
                ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_float))[0] = 0.25
            if name == "launch":
                places = ctypes.cast(arguments[9], ctypes.POINTER(ctypes.c_uint64))
                notes.copied.append(ctypes.cast(places[0], ctypes.POINTER(ctypes.c_int64))[0])
            return 700 if notes.fail == name else 0

        return ctypes.CFUNCTYPE(ctypes.c_int32, *kinds)(function)

    functions = [
        noting("upload", i64, i64, i64, i64),
        noting("download", i64, i64, i64, i64),
        noting("launch", i64, *[u32] * 7, i64, i64, i64),
        noting("record", i64, i64),
        noting("synchronize", i64),
        noting("elapsed", i64, i64, i64),
        noting("now", i64, i64),
    ]
    notes.keep = functions
    notes.addresses = np.zeros(LAUNCHES_HELD + 1, dtype=np.int64)
    for place, function in enumerate(functions):
        notes.addresses[place] = ctypes.cast(function, ctypes.c_void_p).value
    return notes


def run(driver):
    source, target = np.arange(3.0), np.zeros(2)
    start, end = SimpleNamespace(ptr=11), SimpleNamespace(ptr=12)
    commands = CommandList(driver.addresses, STREAM)
    commands.record(start)
    commands.upload(2**40, source)
    argument = np.array([42], dtype=np.int64)
    commands.launch(SimpleNamespace(ptr=77), (1, 2, 3), (32, 1, 1), [argument], 4096)
    commands.download(target, 2**41)
    commands.record(end)
    outcome = commands.run(start, end)
    return outcome, source, target


def test_commands_are_executed_in_order(driver):
    outcome, source, target = run(driver)
    assert outcome == (0, 250_000)
    names = [call[0] for call in driver.calls]
    assert names == ["record", "upload", "launch", "download", "record", "synchronize", "elapsed"]
    assert driver.calls[0] == ("record", 11, STREAM)
    assert driver.calls[1] == ("upload", 2**40, source.ctypes.data, 24, STREAM)
    assert driver.calls[2][:10] == ("launch", 77, 1, 2, 3, 32, 1, 1, 4096, STREAM)
    assert driver.copied == [42]
    assert driver.calls[3] == ("download", target.ctypes.data, 2**41, 16, STREAM)
    assert driver.calls[5] == ("synchronize", STREAM)


@pytest.mark.parametrize("step", ["upload", "launch", "synchronize"])
def test_the_first_failure_ends_the_list(driver, step):
    driver.fail = step
    (status, _), *_ = run(driver)
    assert status == 700
    assert driver.calls[-1][0] == step
