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
#: Arrays of float64 in the last message, and the field of `Evaluation` that requests each.
EXTRAS: Final[Mapping[str, str]] = {
    "gradients": "gradient",
    "variable_gradients": "variable_gradient",
    "reductions": "reductions",
    "scaling": "linear_scaling",
    "correlations": "correlation",
}

#: Other arrays come whole in the last message if each has no more bytes, says the contract.
WHOLE_BYTES: Final = 64 << 10
#: Fields in the data set's dtype, which come in pieces however short they are.
_IN_PIECES: Final = ("values", "jacobian")
#: Fields of an answer that may come in pieces, and their tags.
_TAGS: Final = {
    name: bytes_tag(pb.EvaluateResponse.DESCRIPTOR.fields_by_name[name].number)
    for name in ("values", "jacobian", "losses", *EXTRAS)
}


def is_one_message(evaluation: Evaluation, layout: Layout) -> bool:
    """Return whether the contract promises an answer of one message."""
    shapes = _shapes(evaluation, layout)
    return not shapes.keys() & set(_IN_PIECES) and all(
        8 * math.prod(shape) <= WHOLE_BYTES for shape in shapes.values()
    )


def result_start(layout: Layout, shape: tuple[int, int, int]) -> bytes:
    """Serialize the header of an answer whose value matrix is [programs, K, rows].

    Serialized messages may be concatenated: ``result_start + piece + result_end`` is one message.
    """
    programs, vectors, rows = shape
    header = pb.ResultHeader(
        dtype=DTYPE_CODES[layout.dtype], programs=programs, vectors=vectors, rows=rows
    )
    return pb.EvaluateResponse(header=header).SerializeToString()


def array_pieces(name: str, data: memoryview, offset: int, chunk_bytes: int) -> Iterator[bytes]:
    """Serialize the bytes of a contiguous part of an array of the answer in messages.

    They are framed by hand, because protobuf would copy each piece twice more. So a long array also
    never holds Python's lock for long.

    Args:
        name: field of the array.
        data: the bytes.
        offset: index of the first of them in the array.
        chunk_bytes: most bytes of a message.
    """
    tag = _TAGS[name]
    for begin in range(0, len(data), chunk_bytes):
        piece = data[begin : begin + chunk_bytes]
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
    shapes = _shapes(evaluation, layout)
    names = dict.fromkeys(("values", *shapes))
    for message in messages:
        if message.HasField("header"):
            _check_header(evaluation, layout, message.header)
            matrices |= {
                name: _Matrix(shapes[name], layout.dtype) for name in _IN_PIECES if name in shapes
            }
        is_last = message.HasField("timings")
        # Reading a field of bytes copies it, so only what was requested is read, and values.
        for name in names:
            piece = b"" if is_last and name not in _IN_PIECES else getattr(message, name)
            if not piece:
                continue
            if name not in matrices:
                if name in _IN_PIECES:
                    raise broken_answer("has value bytes out of order")
                matrices[name] = _Matrix(shapes[name], F64)
            matrices[name].fill(piece, message.offset)
        if is_last:
            last = {
                name: received_array(getattr(message, name), F64, shape, name)
                for name, shape in shapes.items()
                if name not in _IN_PIECES and name not in matrices
            }
            last["timings"] = _timings(message)
    for name in _IN_PIECES:
        if name in shapes and name not in matrices:
            raise broken_answer(f"has no {name}")
    if not last:
        raise broken_answer("has no end")
    last |= {name: matrix.complete() for name, matrix in matrices.items()}
    return Result(**last)


def _shapes(evaluation: Evaluation, layout: Layout) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the arrays that were requested, by field."""
    programs, vectors, rows = evaluation.shape(layout)
    cells, parameters = (programs, vectors), len(evaluation.batch.parameters)
    requested: dict[str, tuple[bool, tuple[int, ...]]] = {
        "values": (evaluation.values, (*cells, rows)),
        "jacobian": (evaluation.jacobian, (parameters, rows)),
        "losses": (evaluation.loss_function is not None, cells),
        "gradients": (evaluation.gradient, (parameters,)),
        "variable_gradients": (evaluation.variable_gradient, (*cells, layout.variables)),
        "reductions": (evaluation.reductions, (*cells, 5)),
        "scaling": (evaluation.linear_scaling, (*cells, 2)),
        "correlations": (evaluation.correlation, cells),
    }
    return {name: shape for name, (is_wanted, shape) in requested.items() if is_wanted}


def _check_header(evaluation: Evaluation, layout: Layout, header: pb.ResultHeader) -> None:
    if (header.programs, header.vectors, header.rows) != evaluation.shape(layout):
        raise broken_answer("has another shape than the request")
    if header.dtype != DTYPE_CODES[layout.dtype]:
        raise broken_answer("has values of another dtype than the data set")


@decodes_answer
def _timings(message: pb.EvaluateResponse) -> Timings:
    return timings_from_message(message.timings)


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
