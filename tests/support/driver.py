"""Functions of a CUDA driver that carry the interpreter's launches out on the host."""

from __future__ import annotations

import ctypes

import numpy as np

from warpfit_server.engine.cuda.launch import ARGUMENTS, SLOT_ARGUMENTS
from warpfit_server.engine.cuda.submission import HELD

I64, U32 = ctypes.c_int64, ctypes.c_uint32
INTERPRET, SLOTS, SUM = 101, 102, 103


def addresses_of(functions):
    """Addresses of the functions of the first places; nothing is in the others."""
    addresses = np.zeros(HELD + 1, dtype=np.int64)
    for place, function in enumerate(functions):
        addresses[place] = ctypes.cast(function, ctypes.c_void_p).value
    return addresses


class Driver:
    """Functions that carry steps out on the host: memory of the "device" is given by name."""

    def __init__(self):
        self.calls = []
        self.told = {}
        self.pieces = []
        self.fail = None
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

    def _launch(self, function, gx, gy, gz, bx, by, bz, shared, stream, places, extra):
        dtypes = {INTERPRET: [ARGUMENTS], SLOTS: [SLOT_ARGUMENTS], SUM: [np.uint64] * 3}[function]
        pointers = ctypes.cast(places, ctypes.POINTER(ctypes.c_void_p))
        self.told[function] = [
            np.frombuffer(ctypes.string_at(pointers[i], np.dtype(kind).itemsize), kind)[0]
            for i, kind in enumerate(dtypes)
        ]

        if function == INTERPRET:
            self.pieces.append((self.told[function][0], gx))
        if function == SUM:
            jobs = gx
            _, sums, _ = self.told[SUM]
            found = (ctypes.c_double * jobs).from_address(int(sums))
            found[:] = [float(job) for job in range(jobs)]

    def _elapsed(self, place, start, end):
        ctypes.cast(place, ctypes.POINTER(ctypes.c_float))[0] = 0.25
