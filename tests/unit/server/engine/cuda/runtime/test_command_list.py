"""Command lists, with a fake driver."""

import ctypes
import struct
from types import SimpleNamespace

import numpy as np
import pytest

from warpfit_server.engine.cuda.runtime.command_list import (
    LAUNCH,
    LAUNCHES_HELD,
    RECORD,
    UPLOAD,
    ArgumentStruct,
    CommandList,
    address_of,
)

STRUCT = ArgumentStruct(
    """
struct Other {
  int last;
};
struct Given {
  const unsigned char* codes;  // [tokens]
  int count;
  unsigned long long stride;
  unsigned flags;              // a comment; with a semicolon
};
""",
    "Given",
)
STREAM = 5
KERNEL = SimpleNamespace(ptr=77)


@pytest.fixture
def driver():
    """Return fake driver functions that record their calls."""
    notes = SimpleNamespace(calls=[], arguments=[], keep=[])
    i64, u32 = ctypes.c_int64, ctypes.c_uint32
    notes.addresses = np.zeros(LAUNCHES_HELD + 1, dtype=np.int64)

    def note(place, name, *kinds):
        def function(*arguments):
            notes.calls.append((name, *arguments))
            if name == "launch":
                pointers = (i64 * 2).from_address(arguments[-2])
                notes.arguments.append([ctypes.string_at(p, 8) for p in pointers])
            return 0

        made = ctypes.CFUNCTYPE(ctypes.c_int32, *kinds)(function)
        notes.keep.append(made)
        notes.addresses[place] = ctypes.cast(made, ctypes.c_void_p).value

    note(UPLOAD, "upload", i64, i64, i64, i64)
    note(LAUNCH, "launch", i64, *[u32] * 7, i64, i64, i64)
    note(RECORD, "record", i64, i64)
    return notes


def execute(driver, source):
    commands = CommandList(driver.addresses, STREAM)
    commands.record(SimpleNamespace(ptr=11))
    commands.upload(2**40, source)
    commands.launch(KERNEL, (1, 2, 3), (32, 1, 1), b"arranged", 2**41, shared=4096)
    commands.launch(KERNEL, (1, 1, 1), (64, 1, 1), -1, b"likewise")
    commands.record(SimpleNamespace(ptr=12))
    return commands.execute()


def test_commands_are_executed_in_order(driver):
    source = np.zeros(24, dtype=np.uint8)
    assert execute(driver, source) == 0
    expected = [
        ("record", 11, STREAM),
        ("upload", 2**40, address_of(source), 24, STREAM),
        ("launch", 77, 1, 2, 3, 32, 1, 1, 4096, STREAM),
        ("launch", 77, 1, 1, 1, 64, 1, 1, 0, STREAM),
        ("record", 12, STREAM),
    ]
    assert [call[:10] for call in driver.calls] == expected
    first, second = driver.arguments
    assert first == [b"arranged", struct.pack("q", 2**41)]
    assert second == [struct.pack("q", -1), b"likewise"]


def test_a_struct_is_packed_as_it_is_declared():
    packed = STRUCT.pack(codes=2**40, count=-3, stride=2**63, flags=2**32 - 1)
    assert packed == struct.pack("<Qi4xQI4x", 2**40, -3, 2**63, 2**32 - 1)
