"""Command lists, with a fake driver."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from warpfit_server.engine.cuda.runtime.command_list import (
    COMMAND_WIDTH,
    LAUNCH,
    LAUNCHES_HELD,
    RECORD,
    UPLOAD,
    append_command,
    execute,
)

COMMANDS = (
    (RECORD, 11, 5),
    (UPLOAD, 2**40, 2**41, 24, 5),
    (LAUNCH, 77, 1, 2, 3, 32, 1, 1, 4096, 5, 2**42),
    (RECORD, 12, 5),
)


@pytest.fixture
def driver():
    """Return fake driver functions that record their calls; `fail` names one that fails."""
    notes = SimpleNamespace(calls=[], fail="", keep=[])
    i64, u32 = ctypes.c_int64, ctypes.c_uint32
    notes.addresses = np.zeros(LAUNCHES_HELD + 1, dtype=np.int64)

    def note(place, name, *kinds):
        def function(*arguments):
            notes.calls.append((name, *arguments))
            return 700 if notes.fail == name else 0

        made = ctypes.CFUNCTYPE(ctypes.c_int32, *kinds)(function)
        notes.keep.append(made)
        notes.addresses[place] = ctypes.cast(made, ctypes.c_void_p).value

    note(UPLOAD, "upload", i64, i64, i64, i64)
    note(LAUNCH, "launch", i64, *[u32] * 7, i64, i64, i64)
    note(RECORD, "record", i64, i64)
    return notes


def run(driver):
    commands, count = np.zeros((len(COMMANDS), COMMAND_WIDTH), dtype=np.int64), 0
    for command in COMMANDS:
        count = append_command(commands, count, command)
    return execute(driver.addresses, commands[:count])


def test_commands_are_executed_in_order(driver):
    assert run(driver) == 0
    assert [call[0] for call in driver.calls] == ["record", "upload", "launch", "record"]
    for call, command in zip(driver.calls, COMMANDS, strict=True):
        assert call[1 : len(command)] == command[1:][: len(call) - 1]


@pytest.mark.parametrize("step", ["upload", "launch"])
def test_the_first_failure_ends_the_list(driver, step):
    driver.fail = step
    assert run(driver) == 700
    assert driver.calls[-1][0] == step
