"""Segments: anonymous shared memory between the server's processes, and what lies in them.

A segment is a memory file without a name (``memfd_create``): the kernel frees it when the last
process that maps it ends, however it ends, so nothing is left over after a crash, and it does not
depend on the size of ``/dev/shm``. Its file descriptor crosses over the socket of a `Channel`. A
front end lays all arrays of a request out in a segment that it shares with the engine.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from warpfit.dataset import Layout
from warpfit.errors import ResourceExhaustedError
from warpfit.ir import Batch, Program
from warpfit.losses import Closing, LossFunction
from warpfit.request import Evaluation, FitRequest
from warpfit_server.machine import shortage, too_many_files
from warpfit_server.shared_batch import BATCH_ARRAYS, BatchPart, BatchSummary, SharedBatch

_SMALLEST: Final = 64 << 10


class Segment:
    """A piece of shared memory; arrays made by `array` keep the mapping alive."""

    descriptor = -1
    """File descriptor, owned by this object; -1 once closed."""

    def __init__(self, identifier: int, descriptor: int, size: int) -> None:
        self.identifier = identifier
        """Number that names the segment in messages."""
        self.size = size
        """Bytes."""
        self.owner = ""
        """Tenant whose bytes it may hold."""
        self.map = mmap.mmap(descriptor, size)
        """The mapping, whose single bytes are read in a fraction of the time of an array's."""
        self.descriptor = descriptor  # last: if mapping fails, the caller still owns it

    @classmethod
    def create(cls, identifier: int, size: int) -> Segment:
        """Allocate zeroed shared memory.

        Raises:
            ResourceExhaustedError: if the machine has none left, or this process no descriptor.
        """
        descriptor = -1
        try:
            descriptor = os.memfd_create("warpfit", os.MFD_CLOEXEC)
            os.truncate(descriptor, size)
            return cls(identifier, descriptor, size)
        except (OSError, ValueError) as error:
            if descriptor >= 0:
                os.close(descriptor)
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise too_many_files() from error
            raise ResourceExhaustedError(
                f"no shared memory for {size} bytes: {error}",
                "MEMORY",
                "Send smaller batches, or give the server more memory",
                needed=size,
            ) from error

    @classmethod
    def received(cls, identifier: int, descriptor: int | None, size: int) -> Segment:
        """Map a segment that another process has sent.

        ``descriptor`` is None if this process had no room for what came with the message.

        Raises:
            ResourceExhaustedError: if this process can open no more files, or has no memory left.
        """
        if descriptor is None:
            raise too_many_files()
        try:
            segment = cls(identifier, descriptor, size)
        except OSError as error:
            os.close(descriptor)
            raise shortage(error) or error from error
        segment.close_descriptor()  # nobody sends it on
        return segment

    def array(self, dtype: DTypeLike, shape: tuple[int, ...], offset: int = 0) -> NDArray[Any]:
        """View of the segment as an array, C order."""
        # np.frombuffer holds an export of the buffer, so the mapping cannot be closed under the
        # array; np.ndarray(buffer=...) would not.
        count = shape[0] if len(shape) == 1 else math.prod(shape)
        if not count:
            return np.empty(shape, dtype)
        found = np.frombuffer(self.map, dtype, count, offset)
        return found if len(shape) == 1 else found.reshape(shape)

    @cached_property
    def address(self) -> int:
        """Address of the mapping in this process, for compiled code."""
        return int(self.array(np.uint8, (self.size,)).ctypes.data)

    def write(self, data: memoryview, offset: int) -> None:
        """Copy bytes into the segment without the page faults that a fresh mapping costs."""
        while data:
            written = os.pwrite(self.descriptor, data, offset)
            data, offset = data[written:], offset + written

    def view(self) -> memoryview:
        """View of the segment as bytes."""
        return memoryview(self.map)

    def close(self) -> None:
        """Close descriptor and mapping; with arrays over it, the mapping goes with the last."""
        self.close_descriptor()
        with contextlib.suppress(BufferError):
            self.map.close()

    def close_descriptor(self) -> None:
        """Close the descriptor alone; Python's mapping keeps one of its own."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        """Close the descriptor of a segment that nobody closed."""
        self.close_descriptor()


class SegmentPool:
    """Allocates segments and keeps idle ones for reuse.

    What is in a segment is undefined until it is written; at worst it is what the same tenant wrote
    earlier, never another one's data.

    At most ``idle_bytes`` in ``idle_segments`` are kept, each of which takes two descriptors here
    and one in each engine. Those that have not been used for longest go first.
    """

    def __init__(self, idle_bytes: int, idle_segments: int = 64) -> None:
        self._most_idle_bytes = idle_bytes
        self._most_idle = idle_segments
        self._lock = threading.Lock()
        self._idle: dict[Segment, None] = {}
        """In the order in which they were released."""
        self._idle_bytes = 0
        self._next = 0
        self.on_close: list[Callable[[Segment], None]] = []
        """Called with each segment that will not be used again, for processes that map it."""

    def acquire(self, size: int, owner: str = "") -> Segment:
        """Return a segment of at least ``size`` bytes for a tenant, to give back with `release`."""
        capacity = max(_SMALLEST, 1 << (size - 1).bit_length())
        segment: Segment | None = None
        with self._lock:
            for idle in reversed(self._idle):  # the last one is likely to be in a cache
                if idle.size == capacity:
                    if idle.owner == owner:
                        segment = idle
                        break
                    segment = segment or idle
            if segment is not None:
                self._take(segment)
        if segment is None:
            segment = self.create(capacity)
        elif segment.owner != owner:
            segment.array("u1", (segment.size,))[...] = 0
        segment.owner = owner
        return segment

    def create(self, size: int) -> Segment:
        """Return a fresh, zeroed segment of exactly ``size`` bytes that will not be reused.

        Idle segments make room for it if this process can open no more files, or has no memory.

        Raises:
            ResourceExhaustedError: if there is no room all the same.
        """
        with self._lock:
            self._next += 1
            identifier = self._next
        try:
            return Segment.create(identifier, size)
        except ResourceExhaustedError:
            if not self.trim():
                raise
            return Segment.create(identifier, size)

    def trim(self) -> bool:
        """Close all idle segments; return whether there were any."""
        return self._close_down_to(0, 0)

    def release(self, segment: Segment, *, is_clean: bool = True) -> None:
        """Take a segment back; close others if too much is idle.

        It ``is_clean`` if no other process writes to it any more; if not, it is closed.
        """
        if not is_clean or segment.size > self._most_idle_bytes:
            self._close(segment)
            return
        with self._lock:
            self._idle[segment] = None
            self._idle_bytes += segment.size
            is_full = len(self._idle) > self._most_idle or self._idle_bytes > self._most_idle_bytes
        if is_full:
            self._close_down_to(self._most_idle, self._most_idle_bytes)

    def _close_down_to(self, count: int, nbytes: int) -> bool:
        with self._lock:
            closed = []
            while len(self._idle) > count or self._idle_bytes > nbytes:
                closed.append(next(iter(self._idle)))
                self._take(closed[-1])
        for segment in closed:
            self._close(segment)
        return bool(closed)

    def _take(self, segment: Segment) -> None:
        """Count a segment no longer as idle; under the lock."""
        del self._idle[segment]
        self._idle_bytes -= segment.size

    def _close(self, segment: Segment) -> None:
        segment.close()
        for forget in self.on_close:
            forget(segment)


# -------------------------------------------------------------------------- the arrays of a request

_ALIGNMENT: Final = 64
#: Types by name: NumPy takes long to look names up.
_DTYPES: Final = {name: np.dtype(name) for name in ("<f8", "<f4", "<u4", "u1")}
#: Size of an array whose copy takes longer than waiting for Python's lock.
_LONG_BYTES: Final = 1 << 20
#: States of a request in the engine, which a front end reads when the engine has died; the higher,
#: the more suspect. It waits; it goes on beside others after it has run alone for a suspect's whole
#: turn; it has begun; it runs and nothing else does.
QUEUED, PROVEN, BEGUN, ALONE = 0, 1, 2, 3
#: Most parts of a request; each has two bytes of flags.
MOST_PARTS: Final = 32
#: Arrays of a fit's result with one number for each program and parameter vector, and their types.
FIT_RESULT_ARRAYS: Final[Mapping[str, str]] = {
    **{"losses": "<f8", "initial_losses": "<f8", "iterations": "<u4"},
    **{"evaluations": "<u4", "reasons": "u1", "starts": "<u4"},
}
#: Arrays of a fit's settings, and their types.
FIT_SETTING_ARRAYS: Final[Mapping[str, str]] = MappingProxyType(
    {"lower": "<f8", "upper": "<f8", "fixed": "u1"}
)
#: Names of a batch's arrays in segments, where results have the plain names, and the bytes of an
#: element.
_BATCH_ITEMS: Final = [(f"batch_{name}", dtype.itemsize) for name, dtype in BATCH_ARRAYS.items()]
_INPUTS: Final = frozenset(
    ("flags", *dict(_BATCH_ITEMS), "loss_values", "loss_codes", *FIT_SETTING_ARRAYS)
)
#: Arrays of which a part of the programs has one element more, the end.
_STARTS: Final = frozenset(("batch_starts", "batch_parameter_starts"))
#: What the first dimension of an array counts, if it is not programs; "whole" arrays are not split.
_UNITS: Final = {
    **dict.fromkeys(("flags", "loss_values", "loss_codes"), "whole"),
    **dict.fromkeys(("batch_values", "batch_codes"), "tokens"),
    **dict.fromkeys(("batch_parameters", "gradients", "jacobian", "parameters"), "parameters"),
    **dict.fromkeys((*FIT_SETTING_ARRAYS, "standard_errors"), "parameters"),
    **dict.fromkeys(("covariances", "curvatures"), "squares"),
}
#: Name, type and shape of an array.
_Array = tuple[str, str, tuple[int, ...]]


class SegmentLayout(NamedTuple):
    """Types, shapes and offsets of all arrays of one request.

    The front end makes it and sends it along. It has plain values only, which `marshal` writes.
    """

    programs: int
    tokens: int
    vectors: int
    """Parameter vectors of each program."""
    rows: int
    program_bytes: int
    """Size of the values of one program, for all of its parameter vectors."""
    identity: int
    """This and the next three are the fields of the batch's `BatchSummary`."""
    longest: int
    typical: int
    operators: int
    arrays: dict[str, tuple[str, tuple[int, ...], int]]
    """Type, shape and offset by name."""
    nbytes: int
    """Size of the whole segment."""

    @property
    def summary(self) -> BatchSummary:
        """Return the summary of the batch."""
        return BatchSummary(self.identity, self.longest, self.typical, self.operators)

    @property
    def token_rows(self) -> int:
        """Tokens x parameter vectors x rows of one evaluation."""
        return self.tokens * self.vectors * self.rows

    @classmethod
    def of(cls, evaluation: Evaluation, layout: Layout) -> SegmentLayout:
        """Lay out an evaluation that has been checked."""
        dtype = layout.dtype.str
        results = [
            (output.name, dtype if output.is_of_data else "<f8", shape)
            for output, shape in evaluation.outputs(layout).items()
        ]
        return cls._of(evaluation, layout, results)

    @classmethod
    def of_fit(cls, request: FitRequest, layout: Layout) -> SegmentLayout:
        """Lay out a fit that has been checked."""
        settings, counts = request.settings, request.problem.batch.parameter_counts.astype(np.int64)
        total, vectors = int(counts.sum()), request.vectors
        squares = int(np.square(counts).sum())
        arrays: list[_Array] = [
            (name, dtype, (total,))
            for name, dtype in FIT_SETTING_ARRAYS.items()
            if getattr(settings, name) is not None
        ]
        arrays.append(("parameters", "<f8", (vectors * total,)))
        arrays += [
            (name, dtype, (len(counts), vectors)) for name, dtype in FIT_RESULT_ARRAYS.items()
        ]
        if settings.standard_errors:
            arrays.append(("standard_errors", "<f8", (vectors * total,)))
        if settings.covariance:
            arrays.append(("covariances", "<f8", (vectors * squares,)))
        if settings.curvature:
            arrays.append(("curvatures", "<f8", (vectors * squares,)))
        return cls._of(request.problem, layout, arrays)

    @classmethod
    def _of(cls, evaluation: Evaluation, layout: Layout, others: list[_Array]) -> SegmentLayout:
        batch, custom = evaluation.batch, evaluation.custom_loss
        programs, vectors, rows = evaluation.shape(layout)
        tokens = len(batch.codes)
        inputs: list[_Array] = [
            ("flags", "u1", (2 * MOST_PARTS,)),
            ("batch_starts", "<u4", (programs + 1,)),
            ("batch_parameter_starts", "<u4", (programs + 1,)),
            ("batch_values", "<f8", (tokens,)),
            ("batch_parameters", "<f8", (len(batch.parameters),)),
            ("batch_codes", "u1", (tokens,)),
        ]
        if custom is not None:
            shape = (len(custom.row.codes),)
            inputs += [("loss_values", "<f8", shape), ("loss_codes", "u1", shape)]
        program_bytes = vectors * rows * layout.dtype.itemsize
        counts = programs, tokens, vectors, rows, program_bytes
        # The arrays lie one after the other.
        places, end = {}, 0
        for name, dtype, dimensions in (*inputs, *others):
            places[name] = (dtype, dimensions, end)
            size = _DTYPES[dtype].itemsize
            for length in dimensions:
                size *= length
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        return cls(*counts, *BatchSummary.of(batch), places, end)

    def split(self, batch: Batch, bounds: Sequence[int]) -> list[SegmentLayout]:
        """Return the layouts of parts of the request, in the segment of the whole one.

        The results of all parts together are those of the whole request.

        Args:
            batch: of the whole request.
            bounds: ascending numbers of programs from 0 to all; part i has those from ``bounds[i]``
                to ``bounds[i + 1]``, and ends with the arrays that belong to them.
        """
        counts = batch.parameter_counts.astype(np.int64)
        edges = {
            "programs": np.arange(self.programs + 1),
            "tokens": batch.starts,
            "parameters": np.concatenate([[0], np.cumsum(counts)]),
            "squares": np.concatenate([[0], np.cumsum(np.square(counts))]),
        }
        totals = {name: int(at[-1]) for name, at in edges.items()}
        parts = []
        for number, (first, stop) in enumerate(pairwise(bounds)):
            ranges = {name: at[[first, stop]].tolist() for name, at in edges.items()}
            arrays = dict(self.arrays)
            dtype, _, offset = arrays["flags"]
            arrays["flags"] = (dtype, (2,), offset + 2 * number)
            for name, (dtype, shape, offset) in self.arrays.items():
                unit = _UNITS.get(name, "programs")
                if unit == "whole":
                    continue
                low, high = ranges[unit]
                copies = shape[0] // totals[unit] if totals[unit] else 0  # one for each vector
                row_bytes = math.prod(shape[1:]) * _DTYPES[dtype].itemsize
                if name in _STARTS:
                    copies, high = 1, high + 1
                own = ((high - low) * copies, *shape[1:])
                arrays[name] = (dtype, own, offset + low * copies * row_bytes)
            begin, end = ranges["tokens"]
            part = self._replace(programs=stop - first, tokens=end - begin, arrays=arrays)
            parts.append(part._replace(**BatchSummary.of(batch[first:stop])._asdict()))
        return parts

    def array(self, name: str, segment: Segment) -> NDArray[Any] | None:
        """View of an array in the segment; None if this request has none of that name."""
        return self.require(name, segment) if name in self.arrays else None

    def require(self, name: str, segment: Segment) -> NDArray[Any]:
        """View of an array that this request is known to have.

        Raises:
            KeyError: if it has not.
        """
        dtype, shape, offset = self.arrays[name]
        return segment.array(_DTYPES[dtype], shape, offset)

    def view(self, name: str, segment: Segment) -> memoryview:
        """View of an array as bytes.

        Raises:
            KeyError: if this request has none of that name.
        """
        dtype, shape, offset = self.arrays[name]
        return segment.view()[offset : offset + math.prod(shape) * _DTYPES[dtype].itemsize]

    def place(self, name: str, segment: Segment) -> tuple[int, int]:
        """Return the address in this process and the bytes of an array."""
        dtype, shape, offset = self.arrays[name]
        return segment.address + offset, math.prod(shape) * _DTYPES[dtype].itemsize

    def results(self, segment: Segment) -> dict[str, NDArray[Any]]:
        """Views of all arrays that the engine fills."""
        return {name: self.require(name, segment) for name in self.arrays if name not in _INPUTS}

    @property
    def flag_offset(self) -> int:
        """Offset of the cancellation flag, one byte, which the state follows."""
        return self.arrays["flags"][2]

    def state(self, segment: Segment) -> int:
        """Return the request's state: `QUEUED`, `PROVEN`, `BEGUN` or `ALONE`."""
        return segment.map[self.flag_offset + 1]

    def batch_part(self, segment: Segment) -> BatchPart:
        """Return where the batch lies in this process, and what is known of it."""
        start, arrays, places = segment.address, self.arrays, []
        for name, size in _BATCH_ITEMS:
            _, (count,), offset = arrays[name]
            places.append((start + offset, count * size))
        return BatchPart(places, self.summary, partial(self._batch_arrays, segment))

    def batch(self, segment: Segment) -> SharedBatch:
        """Return the batch in the segment."""
        return SharedBatch([self.batch_part(segment)], self.vectors)

    def _batch_arrays(self, segment: Segment) -> dict[str, NDArray[Any]]:
        """Return the arrays of a `Batch`, of which those of tokens are views of the segment."""
        found = {}
        for name, dtype in BATCH_ARRAYS.items():
            _, (count,), offset = self.arrays[f"batch_{name}"]
            found[name] = np.frombuffer(segment.map, dtype, count, offset)
        counts = np.diff(found.pop("starts")), np.diff(found.pop("parameter_starts"))
        return found | {"lengths": counts[0], "parameter_counts": counts[1]}

    def custom_loss(self, segment: Segment, closing: Closing) -> LossFunction:
        """Copy the caller's own loss function out of the segment."""
        codes = self.require("loss_codes", segment)
        return LossFunction(Program(codes, self.require("loss_values", segment)), closing)

    def write(
        self,
        segment: Segment,
        evaluation: Evaluation,
        others: Mapping[str, NDArray[Any]] = MappingProxyType({}),
    ) -> None:
        """Copy batch, loss function and other inputs into the segment; clear flag and state."""
        batch = evaluation.batch
        inputs: dict[str, NDArray[Any]] = {
            "batch_values": batch.values,
            "batch_parameters": batch.parameters,
            "batch_codes": batch.codes,
            **others,
        }
        if evaluation.custom_loss is not None:
            row = evaluation.custom_loss.row
            inputs |= {"loss_values": row.values, "loss_codes": row.codes}
        memory = segment.view()
        _, (length,), offset = self.arrays["flags"]
        memory[offset : offset + length] = bytes([QUEUED]) * length
        for name, array in inputs.items():
            offset = self.arrays[name][2]
            if array.nbytes > _LONG_BYTES:  # NumPy gives Python's lock up, so that others go on
                np.frombuffer(memory, array.dtype, len(array), offset)[...] = array
            elif len(array):  # Python keeps it: waiting for it again takes longer than the copy
                memory[offset : offset + array.nbytes] = array.data.cast("B")
        for name, lengths in (
            ("starts", batch.lengths),
            ("parameter_starts", batch.parameter_counts),
        ):
            dtype, (count,), offset = self.arrays[f"batch_{name}"]
            starts = np.frombuffer(memory, _DTYPES[dtype], count, offset)
            starts[0] = 0
            np.add.accumulate(lengths, out=starts[1:])
