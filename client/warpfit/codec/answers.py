"""Encoding and decoding of the answer to Evaluate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
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
    decodes_answer,
    pack,
    printable,
    received_array,
    varint,
)
from warpfit.dataset import DTYPE_CODES, Layout
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
    message = pb.EvaluateResponse(losses=b"" if losses is None else pack(losses, F64))
    set_timings(message.timings, timings)
    for name, array in extras.items():
        setattr(message, name, pack(array, F64))
    return message.SerializeToString()


def set_timings(message: pb.Timings, timings: Timings) -> None:
    """Encode timings in place, because protobuf would copy a message that is part of another."""
    for name in _TIMINGS:
        setattr(message, name, getattr(timings, name))
    message.tier = TIERS.codes[timings.tier]


def timings_from_message(message: pb.Timings) -> Timings:
    """Decode timings."""
    copies = message.copy_in, message.compute, message.copy_out
    tier = TIERS.member(message.tier, "tier")
    device = printable(message.device)
    return Timings(message.decode, message.queue, *copies, tier, message.cache_hits, device)


@decodes_answer
def answer_from_bytes(data: bytes) -> pb.EvaluateResponse:
    """Parse one message of an answer."""
    return pb.EvaluateResponse.FromString(data)


def read_result(
    evaluation: Evaluation, layout: Layout, messages: Iterable[pb.EvaluateResponse]
) -> Result:
    """Read the answer to an evaluation, matrices into preallocated arrays.

    Args:
        evaluation: the request.
        layout: of its data set, which decides shapes and dtype of the answer.
        messages: of the answer.

    Raises:
        InternalError: if the server breaks the contract.
        ResourceExhaustedError: if there is no memory for the answer here.
    """
    matrices: dict[str, _Matrix] = {}
    last: dict[str, Any] = {}
    for message in messages:
        if message.HasField("header"):
            matrices = _matrices(evaluation, layout, message.header)
        # Reading a field of bytes copies it, so the Jacobian is read only if it was requested.
        for name in ("values", "jacobian") if evaluation.jacobian else ("values",):
            piece = getattr(message, name)
            if piece and name not in matrices:
                raise broken_answer("has value bytes out of order")
            if piece:
                matrices[name].fill(piece, message.offset)
        if message.HasField("timings"):
            last = _last(evaluation, layout, message)
    for name in ("values", "jacobian"):
        if getattr(evaluation, name) and name not in matrices:
            raise broken_answer(f"has no {name}")
    if not last:
        raise broken_answer("has no end")
    last |= {name: matrix.complete() for name, matrix in matrices.items()}
    return Result(**last)


def _matrices(
    evaluation: Evaluation, layout: Layout, header: pb.ResultHeader
) -> dict[str, _Matrix]:
    shape = evaluation.shape(layout)
    if (header.programs, header.vectors, header.rows) != shape:
        raise broken_answer("has another shape than the request")
    if header.dtype != DTYPE_CODES[layout.dtype]:
        raise broken_answer("has values of another dtype than the data set")
    shapes = {"values": shape, "jacobian": (len(evaluation.batch.parameters), shape[-1])}
    return {
        name: _Matrix(shape, layout.dtype)
        for name, shape in shapes.items()
        if getattr(evaluation, name)
    }


@decodes_answer
def _last(evaluation: Evaluation, layout: Layout, message: pb.EvaluateResponse) -> dict[str, Any]:
    """Return the timings and the arrays of the last message."""
    cells = len(evaluation.batch), evaluation.batch.vectors
    last_axis = {"variable_gradients": (layout.variables,), "reductions": (5,), "scaling": (2,)}
    found: dict[str, Any] = {}
    for name, output in EXTRAS.items():
        if getattr(evaluation, output):
            shape: tuple[int, ...] = (*cells, *last_axis.get(name, ()))
            if name == "gradients":
                shape = (len(evaluation.batch.parameters),)
            found[name] = received_array(getattr(message, name), F64, shape, name)
    if evaluation.loss_function is not None:
        found["losses"] = received_array(message.losses, F64, cells, "losses")
    found["timings"] = timings_from_message(message.timings)
    return found


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
