"""Answers on their way to the client."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit import errors
from warpfit.codec.framing import (
    TIERS,
    WIRE_DTYPES,
    enum_member,
    pack,
    varint,
)
from warpfit.dataset import DTYPES, Layout
from warpfit.request import Evaluation, Result, Timings
from warpfit.v1 import evaluator_pb2 as pb

#: Field 3 (``values``) of EvaluateResponse, wire type 2.
_VALUES_TAG: Final = bytes([3 << 3 | 2])


def result_start(layout: Layout, shape: tuple[int, int, int]) -> bytes:
    """Serialize the header of an answer, whose value matrix is [programs, K, rows].

    Serialized messages may be concatenated: ``result_start + piece + result_end`` is one message.
    """
    programs, vectors, rows = shape
    header = pb.ResultHeader(
        dtype=WIRE_DTYPES[layout.dtype], programs=programs, vectors=vectors, rows=rows
    )
    return pb.EvaluateResponse(header=header).SerializeToString()


def value_pieces(values: memoryview, offset: int, chunk_bytes: int) -> Iterator[bytes]:
    """Serialize a contiguous part of the value matrix, which begins at byte ``offset``.

    Yields serialized EvaluateResponse messages of at most ``chunk_bytes`` of values each, framed
    by hand because protobuf would copy each piece twice more.
    """
    for begin in range(0, len(values), chunk_bytes):
        piece = values[begin : begin + chunk_bytes]
        place = pb.EvaluateResponse(offset=offset + begin).SerializeToString()
        yield b"".join((place, _VALUES_TAG, varint(len(piece)), piece))


def result_end(losses: NDArray[np.float64] | None, timings: Timings) -> bytes:
    """Serialize the last message of an answer: losses [programs, K] and timings."""
    return pb.EvaluateResponse(
        losses=b"" if losses is None else pack(losses, "<f8"), timings=timings_to_message(timings)
    ).SerializeToString()


def timings_to_message(timings: Timings) -> pb.Timings:
    """Encode timings."""
    return pb.Timings(
        decode=timings.decode,
        queue=timings.queue,
        copy_in=timings.copy_in,
        compute=timings.compute,
        copy_out=timings.copy_out,
        tier=TIERS[timings.tier],
        cache_hits=timings.cache_hits,
    )


def timings_from_message(message: pb.Timings) -> Timings:
    """Decode timings."""
    return Timings(
        decode=message.decode,
        queue=message.queue,
        copy_in=message.copy_in,
        compute=message.compute,
        copy_out=message.copy_out,
        tier=enum_member(TIERS, message.tier, "tier"),
        cache_hits=message.cache_hits,
    )


def answer_from_bytes(data: bytes) -> pb.EvaluateResponse:
    """Parse one message of an answer that `value_pieces` or `result_end` framed."""
    return pb.EvaluateResponse.FromString(data)


class ResultAssembler:
    """Collects the messages of one answer; the values go into one preallocated array."""

    def __init__(self, evaluation: Evaluation) -> None:
        self._evaluation = evaluation
        self._values: NDArray[Any] | None = None
        self._losses: NDArray[np.float64] | None = None
        self._filled = 0
        self._timings: Timings | None = None

    def add(self, message: pb.EvaluateResponse) -> None:
        """Take the next message.

        Raises:
            InternalError: if the server breaks the contract.

        """
        if message.HasField("header"):
            self._start(message)
        piece = message.values  # protobuf copies the bytes each time that one asks
        if piece:
            self._fill(piece, message.offset)
        if message.HasField("timings"):
            self._finish(message)

    def result(self) -> Result:
        """Finish.

        Raises:
            InternalError: if a part of the answer never came.

        """
        if self._evaluation.values and self._values is None:
            raise _broken_answer("has no values")
        total = 0 if self._values is None else self._values.nbytes
        if self._timings is None or self._filled != total:
            raise _broken_answer(f"ended after {self._filled} of {total} value bytes")
        return Result(self._values, self._losses, self._timings)

    def _start(self, message: pb.EvaluateResponse) -> None:
        header = message.header
        batch = self._evaluation.batch
        if (header.programs, header.vectors) != (len(batch), batch.vectors):
            raise _broken_answer("has another shape than the request")
        if header.dtype not in DTYPES:
            raise _broken_answer(f"has values of unknown dtype {header.dtype}")
        if self._evaluation.values:
            shape = (header.programs, header.vectors, header.rows)
            self._values = _allocate(shape, DTYPES[header.dtype])

    def _finish(self, message: pb.EvaluateResponse) -> None:
        if self._evaluation.loss is not None:
            batch = self._evaluation.batch
            if len(message.losses) != 8 * len(batch) * batch.vectors:
                raise _broken_answer(f"has {len(message.losses)} bytes of losses")
            losses = np.frombuffer(message.losses, dtype="<f8")
            self._losses = losses.reshape(len(batch), batch.vectors)
        self._timings = timings_from_message(message.timings)

    def _fill(self, piece: bytes, offset: int) -> None:
        if self._values is None or offset != self._filled:
            raise _broken_answer("has value bytes out of order")
        target = self._values.reshape(-1).view(np.uint8)
        if self._filled + len(piece) > len(target):
            raise _broken_answer("has surplus value bytes")
        target[self._filled : self._filled + len(piece)] = np.frombuffer(piece, dtype=np.uint8)
        self._filled += len(piece)


def _allocate(shape: tuple[int, int, int], dtype: np.dtype[Any]) -> NDArray[Any]:
    try:
        return np.empty(shape, dtype=dtype)
    except (MemoryError, ValueError) as error:
        raise errors.ResourceExhaustedError(
            f"there is no memory here for {' x '.join(map(str, shape))} values",
            "MEMORY",
            "Ask for losses, for fewer rows or for fewer expressions at once",
            needed=math.prod(shape) * dtype.itemsize,
        ) from error


def _broken_answer(what: str) -> errors.InternalError:
    return errors.InternalError(f"the server's answer {what}", "BROKEN_ANSWER")
