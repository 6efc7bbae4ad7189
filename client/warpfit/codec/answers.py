"""Encoding and decoding of the answer to Evaluate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit import errors
from warpfit.codec.framing import (
    F64,
    TIERS,
    broken_answer,
    bytes_tag,
    pack,
    received_array,
    varint,
)
from warpfit.dataset import DTYPE_CODES, DTYPES, Layout
from warpfit.request import STAGES, Evaluation, Result, Timings
from warpfit.v1 import evaluator_pb2 as pb

_TIMINGS: Final = (*STAGES, "cache_hits", "device")
_VALUES_TAG: Final = bytes_tag(pb.EvaluateResponse.VALUES_FIELD_NUMBER)
_JACOBIAN_TAG: Final = bytes_tag(pb.EvaluateResponse.JACOBIAN_FIELD_NUMBER)
#: Arrays of float64 in the last message, and the field of `Evaluation` that requests each.
EXTRAS: Final[Mapping[str, str]] = {
    "gradients": "gradient",
    "variable_gradients": "variable_gradient",
    "reductions": "reductions",
    "scaling": "linear_scaling",
    "correlations": "correlation",
}


def result_start(layout: Layout, shape: tuple[int, int, int]) -> bytes:
    """Serialize the header of an answer whose value matrix is [programs, K, rows].

    Serialized messages may be concatenated: ``result_start + piece + result_end`` is one message.
    """
    programs, vectors, rows = shape
    header = pb.ResultHeader(
        dtype=DTYPE_CODES[layout.dtype], programs=programs, vectors=vectors, rows=rows
    )
    return pb.EvaluateResponse(header=header).SerializeToString()


def value_pieces(
    values: memoryview, offset: int, chunk_bytes: int, *, jacobian: bool = False
) -> Iterator[bytes]:
    """Serialize the bytes of a contiguous part of the value or Jacobian matrix in messages.

    They are framed by hand, because protobuf would copy each piece twice more. ``offset`` is the
    index of the part's first byte in the matrix.
    """
    tag = _JACOBIAN_TAG if jacobian else _VALUES_TAG
    for begin in range(0, len(values), chunk_bytes):
        piece = values[begin : begin + chunk_bytes]
        place = pb.EvaluateResponse(offset=offset + begin).SerializeToString()
        yield b"".join((place, tag, varint(len(piece)), piece))


def result_end(
    losses: NDArray[np.float64] | None,
    timings: Timings,
    extras: Mapping[str, NDArray[np.float64]] = MappingProxyType({}),
) -> bytes:
    """Serialize the last message of an answer: losses [programs, K], timings and `EXTRAS`."""
    message = pb.EvaluateResponse(
        losses=b"" if losses is None else pack(losses, F64), timings=timings_to_message(timings)
    )
    for name, array in extras.items():
        setattr(message, name, pack(array, F64))
    return message.SerializeToString()


def timings_to_message(timings: Timings) -> pb.Timings:
    """Encode timings."""
    given = {name: getattr(timings, name) for name in _TIMINGS}
    return pb.Timings(tier=TIERS.codes[timings.tier], **given)


def timings_from_message(message: pb.Timings) -> Timings:
    """Decode timings."""
    given = {name: getattr(message, name) for name in _TIMINGS}
    return Timings(tier=TIERS.member(message.tier, "tier"), **given)


def answer_from_bytes(data: bytes) -> pb.EvaluateResponse:
    """Parse one message of an answer."""
    return pb.EvaluateResponse.FromString(data)


class ResultAssembler:
    """Collects the messages of one answer to Evaluate, matrices in preallocated arrays."""

    def __init__(self, evaluation: Evaluation) -> None:
        self._evaluation = evaluation
        self._values: _Matrix | None = None
        self._jacobian: _Matrix | None = None
        self._last: dict[str, NDArray[np.float64]] = {}
        self._timings: Timings | None = None

    @property
    def is_single(self) -> bool:
        """Whether the contract promises that the answer is one message."""
        return not (self._evaluation.values or self._evaluation.jacobian)

    def add(self, message: pb.EvaluateResponse) -> None:
        """Take the next message; raise InternalError if the server breaks the contract."""
        if message.HasField("header"):
            self._start(message)
        # Reading a field of bytes copies it, so the Jacobian is read only if it was requested.
        _fill(self._values, message.values, message.offset)
        if self._evaluation.jacobian:
            _fill(self._jacobian, message.jacobian, message.offset)
        if message.HasField("timings"):
            self._finish(message)

    def result(self) -> Result:
        """Return the whole result; raise InternalError if a part of the answer is missing."""
        arrays = {}
        for name in ("values", "jacobian"):
            matrix: _Matrix | None = getattr(self, f"_{name}")
            if matrix is not None:
                arrays[name] = matrix.complete()
            elif getattr(self._evaluation, name):
                raise broken_answer(f"has no {name}")
        if self._timings is None:
            raise broken_answer("has no end")
        return Result(timings=self._timings, **arrays, **self._last)

    def _start(self, message: pb.EvaluateResponse) -> None:
        header = message.header
        batch = self._evaluation.batch
        if (header.programs, header.vectors) != (len(batch), batch.vectors):
            raise broken_answer("has another shape than the request")
        if header.dtype not in DTYPES:
            raise broken_answer(f"has values of unknown dtype {header.dtype}")
        dtype = DTYPES[header.dtype]
        if self._evaluation.values:
            self._values = _Matrix((header.programs, header.vectors, header.rows), dtype)
        if self._evaluation.jacobian:
            self._jacobian = _Matrix((len(batch.parameters), header.rows), dtype)

    def _finish(self, message: pb.EvaluateResponse) -> None:
        batch = self._evaluation.batch
        cells = len(batch), batch.vectors
        if self._evaluation.loss_function is not None:
            self._last["losses"] = received_array(message.losses, F64, cells, "losses")
        shapes: dict[str, tuple[int, ...]] = {
            "gradients": (len(batch.parameters),),
            "variable_gradients": (*cells, -1),
            "reductions": (*cells, 5),
            "scaling": (*cells, 2),
            "correlations": cells,
        }
        for name, output in EXTRAS.items():
            if getattr(self._evaluation, output):
                self._last[name] = received_array(getattr(message, name), F64, shapes[name], name)
        self._timings = timings_from_message(message.timings)


def _fill(matrix: _Matrix | None, piece: bytes, offset: int) -> None:
    if not piece:
        return
    if matrix is None:
        raise broken_answer("has value bytes out of order")
    matrix.fill(piece, offset)


class _Matrix:
    """A matrix whose bytes arrive in order, in pieces."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._array = _allocate(shape, dtype)
        self._filled = 0

    def fill(self, piece: bytes, offset: int) -> None:
        if offset != self._filled:
            raise broken_answer("has value bytes out of order")
        target = self._array.reshape(-1).view(np.uint8)
        if self._filled + len(piece) > len(target):
            raise broken_answer("has surplus value bytes")
        target[self._filled : self._filled + len(piece)] = np.frombuffer(piece, dtype=np.uint8)
        self._filled += len(piece)

    def complete(self) -> NDArray[Any]:
        if self._filled != self._array.nbytes:
            raise broken_answer(f"ended after {self._filled} of {self._array.nbytes} value bytes")
        return self._array


def _allocate(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    try:
        return np.empty(shape, dtype=dtype)
    except (MemoryError, ValueError) as error:
        raise errors.ResourceExhaustedError(
            f"there is no memory here for {' x '.join(map(str, shape))} values",
            "MEMORY",
            "Ask for losses, for fewer rows or for fewer expressions at once",
            needed=math.prod(shape) * dtype.itemsize,
        ) from error
