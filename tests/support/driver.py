"""Functions of a CUDA driver that carry the interpreter's launches out on the host."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass

import numpy as np

from warpfit.ir import Batch
from warpfit_server.engine.cuda.launch import ARGUMENTS, SLOT_ARGUMENTS
from warpfit_server.engine.cuda.lowering import LOWER_ARGUMENTS, NONE, ORDER_ARGUMENTS
from warpfit_server.engine.cuda.submission import HELD
from warpfit_server.engine.sound import is_sound

I64, U32 = ctypes.c_int64, ctypes.c_uint32
INTERPRET, SLOTS, SUM, LOWER, ORDER = 101, 102, 103, 104, 105
#: What each kernel is told.
_ARGUMENTS = {
    INTERPRET: [ARGUMENTS],
    SLOTS: [SLOT_ARGUMENTS],
    SUM: [np.uint64] * 3,
    LOWER: [LOWER_ARGUMENTS],
    ORDER: [ORDER_ARGUMENTS],
}


def addresses_of(functions):
    """Addresses of the functions of the first places; nothing is in the others."""
    addresses = np.zeros(HELD + 1, dtype=np.int64)
    for place, function in enumerate(functions):
        addresses[place] = ctypes.cast(function, ctypes.c_void_p).value
    return addresses


@dataclass(frozen=True)
class Upload:
    """Bytes that were copied to an address of the device."""

    content: np.ndarray
    address: int

    def batch(self, told) -> Batch:
        """What ``told`` says is to be lowered, without parameters."""
        starts = self._part(told["starts"], np.uint32, told["count"] + 1)
        counts = self._part(told["parameter_starts"], np.uint32, told["count"] + 1)
        return Batch(
            self._part(told["codes"], np.uint8, starts[-1]),
            self._part(told["values"], np.float64, starts[-1]),
            np.diff(starts),
            parameter_counts=np.diff(counts),
            parameters=np.empty(0),
            vectors=int(told["vectors"]),
        )

    def _part(self, address, dtype, count):
        start = int(address) - self.address
        return self.content[start : start + int(count) * np.dtype(dtype).itemsize].view(dtype)


class Driver:
    """Functions that carry steps out on the host: memory of the "device" is given by name."""

    def __init__(self):
        self.calls = []
        self.told = {}
        self.pieces = []
        self.fail = None
        self._own = threading.local()  # several evaluations may be under way
        kinds = {
            "upload": (I64,) * 4, "download": (I64,) * 4, "launch": (I64, *[U32] * 7, *[I64] * 3),
            "record": (I64,) * 2, "synchronize": (I64,), "elapsed": (I64,) * 3,
        }  # fmt: skip
        self.keep = [self._noting(name, types) for name, types in kinds.items()]
        system = ctypes.CDLL(None)
        self.keep += [system.clock_gettime, system.send]
        self.addresses = addresses_of(self.keep)

    def _noting(self, name, types):
        def function(*arguments):
            self.calls.append((name, *arguments))
            getattr(self, f"_{name}", lambda *_: None)(*arguments)
            return 700 if self.fail == name else 0

        return ctypes.CFUNCTYPE(ctypes.c_int32, *types)(function)

    def _upload(self, address, source, size, stream):
        self.uploaded = np.frombuffer(ctypes.string_at(source, size), np.uint8)
        self._own.upload = Upload(self.uploaded, address)

    @property
    def batch(self) -> Batch:
        """What was lowered last, without parameters."""
        return self._batch

    def _say_what_is_unsound(self, order):
        """As the device does, for each group."""
        lower = self._own.lower
        self._batch = batch = self._own.upload.batch(lower)
        count, group = int(order["count"]), int(order["group"])
        groups = range(0, count, group)
        said = (ctypes.c_uint32 * len(groups)).from_address(int(order["unsound"]))
        for number, first in enumerate(groups):
            members = range(first, min(first + group, count))
            bad = (one for one in members if not _is_program(batch, one, lower["variables"]))
            said[number] = next(bad, NONE)

    def _launch(self, function, gx, gy, gz, bx, by, bz, shared, stream, places, extra):
        pointers = ctypes.cast(places, ctypes.POINTER(ctypes.c_void_p))
        self.told[function] = told = [
            np.frombuffer(ctypes.string_at(pointers[i], np.dtype(kind).itemsize), kind)[0]
            for i, kind in enumerate(_ARGUMENTS[function])
        ]

        if function == LOWER:
            (self._own.lower,) = told
        if function == ORDER:
            self._say_what_is_unsound(*told)
        if function == INTERPRET:
            self.pieces.append((self.told[function][0], gx))
        if function == SUM:
            jobs = gx
            _, sums, _ = self.told[SUM]
            found = (ctypes.c_double * jobs).from_address(int(sums))
            found[:] = [float(job) for job in range(jobs)]

    def _elapsed(self, place, start, end):
        ctypes.cast(place, ctypes.POINTER(ctypes.c_float))[0] = 0.25


def _is_program(batch, index, variables):
    start, stop = batch.starts[index : index + 2]
    one = Batch(
        *(batch.codes[start:stop], batch.values[start:stop], batch.lengths[index : index + 1]),
        parameter_counts=batch.parameter_counts[index : index + 1],
        parameters=np.empty(0),
    )
    return is_sound(one, int(variables))
