"""The one place that touches protobuf messages: domain types <-> messages of evaluator.proto."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message
from numpy.typing import DTypeLike, NDArray

from warpfit import errors, info
from warpfit.dataset import DTYPES, Dataset, Layout
from warpfit.errors import InvalidArgumentError, WarpfitError
from warpfit.info import ServerInfo
from warpfit.ir import Batch
from warpfit.ops import OPERATORS
from warpfit.request import Evaluation, Loss, Precision, Result, Tier, Timings
from warpfit.v1 import evaluator_pb2 as pb

K = TypeVar("K")

#: Name of the trailing metadata entry with the ErrorDetail of a failed call.
ERROR_METADATA_KEY: Final = "warpfit-error-bin"
CONTENT_ID_BYTES: Final = 32
_UINT64_MAX: Final = 2**64 - 1

#: Field 3 (``values``) of EvaluateResponse, wire type 2.
_VALUES_TAG: Final = bytes([3 << 3 | 2])
#: Field 2 (``data``) of UploadVariablesRequest, wire type 2.
_DATA_TAG: Final = bytes([2 << 3 | 2])

_DTYPES: Final = {np.dtype("<f4"): pb.DTYPE_FLOAT32, np.dtype("<f8"): pb.DTYPE_FLOAT64}
_PRECISIONS: Final = {Precision.PRECISE: pb.PRECISION_PRECISE, Precision.FAST: pb.PRECISION_FAST}
_TIERS: Final = {
    Tier.AUTO: pb.TIER_AUTO,
    Tier.INTERPRETER: pb.TIER_INTERPRETER,
    Tier.COMPILED: pb.TIER_COMPILED,
}
_LOSSES: Final = {
    None: pb.LOSS_NONE,
    Loss.SSE: pb.LOSS_SSE,
    Loss.MSE: pb.LOSS_MSE,
    Loss.RMSE: pb.LOSS_RMSE,
    Loss.MAE: pb.LOSS_MAE,
    Loss.R2: pb.LOSS_R2,
    Loss.NMSE: pb.LOSS_NMSE,
}


#: gRPC's own words for a message over the limit, sent or received.
_TOO_LARGE: Final = re.compile(r"larger than max \((\d+) vs\. (\d+)\)")
#: What to do about an error that gRPC itself raised.
_REMEDIES: Final = {
    "UNAVAILABLE": "Check that the server runs and that address and port are right",
    "DEADLINE_EXCEEDED": "Raise timeout=, or ask for less at once",
    "UNIMPLEMENTED": "Server and client differ in version: upgrade the older one",
}

M = TypeVar("M", bound=Message)


def parse_message(cls: type[M], data: bytes) -> M:
    """Parse a request.

    Raises:
        InvalidArgumentError: if the bytes are not a message of this type.

    """
    try:
        return cls.FromString(data)
    except DecodeError as error:
        raise InvalidArgumentError(
            f"the request is not a {cls.DESCRIPTOR.full_name}",
            "MALFORMED_MESSAGE",
            "Encode it from warpfit/v1/evaluator.proto",
        ) from error


# ------------------------------------------------------------------------------------ data sets


def layout_to_message(layout: Layout) -> pb.DatasetLayout:
    """Encode a data set's shape."""
    return pb.DatasetLayout(
        dtype=_DTYPES[layout.dtype],
        variables=layout.variables,
        rows=layout.rows,
        has_target=layout.has_target,
        has_weights=layout.has_weights,
        names=layout.names,
    )


def layout_from_message(message: pb.DatasetLayout) -> Layout:
    """Decode and check a data set's shape.

    Raises:
        InvalidArgumentError: for an unknown dtype, no rows, or names that do not fit.

    """
    if message.dtype not in DTYPES:
        raise InvalidArgumentError(
            f"dtype {message.dtype} is not supported",
            "BAD_DTYPE",
            "Send DTYPE_FLOAT32 or DTYPE_FLOAT64",
            "layout.dtype",
        )
    layout = Layout(
        dtype=DTYPES[message.dtype],
        variables=message.variables,
        rows=message.rows,
        has_target=message.has_target,
        has_weights=message.has_weights,
        names=tuple(message.names),
    )
    layout.check()
    return layout


def upload_messages(dataset: Dataset, chunk_bytes: int) -> Iterator[bytes]:
    """Serialize an upload: the header, then the payload in pieces of ``chunk_bytes``.

    Framed by hand: protobuf would copy each piece twice more.
    """
    layout = layout_to_message(dataset.layout)
    header = pb.UploadHeader(layout=layout, content_id=dataset.content_id)
    yield pb.UploadVariablesRequest(header=header).SerializeToString()
    for chunk in dataset.chunks(chunk_bytes):
        yield b"".join((_DATA_TAG, _varint(len(chunk)), chunk))


def get_message(dataset: Dataset) -> pb.GetVariablesRequest:
    """Encode the question whether a data set is resident."""
    return pb.GetVariablesRequest(content_id=dataset.content_id)


def release_message(dataset: Dataset) -> pb.ReleaseVariablesRequest:
    """Encode the release of a data set."""
    return pb.ReleaseVariablesRequest(content_id=dataset.content_id)


def release_response() -> pb.ReleaseVariablesResponse:
    """Encode that a data set was released."""
    return pb.ReleaseVariablesResponse()


def upload_data(message: bytes) -> memoryview:
    """Decode a message of an upload after the first; returns the payload bytes without copying.

    Raises:
        InvalidArgumentError: if it carries no data.

    """
    length, start = _read_varint(message, 1)
    if message[:1] == _DATA_TAG and start + length == len(message):
        return memoryview(message)[start:]
    parsed = parse_message(pb.UploadVariablesRequest, message)  # whatever else protobuf allows
    if parsed.WhichOneof("part") != "data":
        raise InvalidArgumentError(
            "a message of the upload after the first carries no data",
            "BAD_HEADER",
            "Send one header, then only messages with `data`",
            "header",
        )
    return memoryview(parsed.data)


def upload_header(message: pb.UploadVariablesRequest) -> tuple[Layout, bytes]:
    """Decode the first message of an upload.

    Raises:
        InvalidArgumentError: if it is no header, or the header is wrong.

    """
    if message.WhichOneof("part") != "header":
        raise InvalidArgumentError(
            "the upload does not start with a header",
            "BAD_HEADER",
            "Send one message with `header` first, then messages with `data`",
            "header",
        )
    content_id = check_content_id(message.header.content_id)
    return layout_from_message(message.header.layout), content_id


def upload_start(data: bytes) -> tuple[Layout, bytes]:
    """Decode the serialized first message of an upload; fails as `upload_header` does."""
    return upload_header(parse_message(pb.UploadVariablesRequest, data))


def check_content_id(content_id: bytes) -> bytes:
    """Return a content id of the right length.

    Raises:
        InvalidArgumentError: for any other length.

    """
    if len(content_id) != CONTENT_ID_BYTES:
        raise InvalidArgumentError(
            f"content_id has {len(content_id)} bytes, not {CONTENT_ID_BYTES}",
            "BAD_DATASET_ID",
            "Send the SHA-256 of the data set",
            "content_id",
        )
    return content_id


def dataset_info(content_id: bytes, layout: Layout) -> pb.DatasetInfo:
    """Encode what identifies a resident data set."""
    return pb.DatasetInfo(content_id=content_id, layout=layout_to_message(layout))


def dataset_info_from_bytes(data: bytes) -> pb.DatasetInfo:
    """Parse the answer to an upload."""
    return pb.DatasetInfo.FromString(data)


# ------------------------------------------------------------------------------- the way there


def evaluation_to_message(evaluation: Evaluation) -> pb.EvaluateRequest:
    """Encode an evaluation."""
    batch = evaluation.batch
    message = pb.EvaluateRequest(
        content_id=evaluation.dataset_id,
        programs=pb.Programs(
            codes=_pack(batch.codes, "u1"),
            values=_pack(batch.values, "<f8"),
            lengths=_pack(batch.lengths, "<u4"),
            parameter_counts=_pack(batch.parameter_counts, "<u4"),
            parameters=_pack(batch.parameters, "<f8"),
            vectors=batch.vectors,
        ),
        precision=_PRECISIONS[evaluation.precision],
        values=evaluation.values,
        loss=_LOSSES[evaluation.loss],
        tier=_TIERS[evaluation.tier],
    )
    if evaluation.rows is not None:
        message.rows.start, message.rows.stop = evaluation.rows
    return message


def evaluation_from_message(message: pb.EvaluateRequest) -> Evaluation:
    """Decode an evaluation; `Evaluation.check` must follow.

    Raises:
        InvalidArgumentError: if a field cannot be decoded.

    """
    programs = message.programs
    batch = Batch(
        codes=_unpack(programs.codes, "u1", "programs.codes"),
        values=_unpack(programs.values, "<f8", "programs.values"),
        lengths=_unpack(programs.lengths, "<u4", "programs.lengths"),
        parameter_counts=_unpack(programs.parameter_counts, "<u4", "programs.parameter_counts"),
        parameters=_unpack(programs.parameters, "<f8", "programs.parameters"),
        vectors=programs.vectors or 1,
    )
    return Evaluation(
        dataset_id=check_content_id(message.content_id),
        batch=batch,
        rows=(message.rows.start, message.rows.stop) if message.HasField("rows") else None,
        precision=_enum(_PRECISIONS, message.precision, "precision"),
        loss=_enum(_LOSSES, message.loss, "loss"),
        values=message.values,
        tier=_enum(_TIERS, message.tier, "tier"),
    )


def _pack(array: NDArray[Any], dtype: DTypeLike) -> bytes:
    return np.ascontiguousarray(array, dtype=dtype).tobytes()


def _unpack(data: bytes, dtype: str, field: str) -> NDArray[Any]:
    size = np.dtype(dtype).itemsize
    if len(data) % size:
        raise InvalidArgumentError(
            f"{field} has {len(data)} bytes, not a multiple of {size}",
            "LENGTH_MISMATCH",
            f"Pack {size}-byte little-endian numbers without padding",
            field,
        )
    return np.frombuffer(data, dtype=dtype)


def _enum(table: Mapping[K, int], value: int, field: str) -> K:
    for key, code in table.items():
        if code == value:
            return key
    raise InvalidArgumentError(
        f"{field} {value} is not defined",
        "BAD_ENUM",
        f"Use a value from 0 to {max(table.values())}",
        field,
    )


# -------------------------------------------------------------------------------- the way back


def result_start(layout: Layout, shape: tuple[int, int, int]) -> bytes:
    """Serialize the header of an answer, whose value matrix is [programs, K, rows].

    Serialized messages may be concatenated: ``result_start + piece + result_end`` is one message.
    """
    programs, vectors, rows = shape
    header = pb.ResultHeader(
        dtype=_DTYPES[layout.dtype], programs=programs, vectors=vectors, rows=rows
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
        yield b"".join((place, _VALUES_TAG, _varint(len(piece)), piece))


def result_end(losses: NDArray[np.float64] | None, timings: Timings) -> bytes:
    """Serialize the last message of an answer: losses [programs, K] and timings."""
    return pb.EvaluateResponse(
        losses=b"" if losses is None else _pack(losses, "<f8"), timings=timings_to_message(timings)
    ).SerializeToString()


def _read_varint(data: bytes, start: int) -> tuple[int, int]:
    """Return the number at ``start`` and where it ends; (0, start) if there is none."""
    value = 0
    for position, byte in enumerate(data[start : start + 10]):
        value |= (byte & 0x7F) << (7 * position)
        if byte < 0x80:
            return value, start + position + 1
    return 0, start


def _varint(value: int) -> bytes:
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)


def timings_to_message(timings: Timings) -> pb.Timings:
    """Encode timings."""
    return pb.Timings(
        decode=timings.decode,
        queue=timings.queue,
        copy_in=timings.copy_in,
        compute=timings.compute,
        copy_out=timings.copy_out,
        tier=_TIERS[timings.tier],
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
        tier=_enum(_TIERS, message.tier, "tier"),
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


# --------------------------------------------------------------------------------------- errors


def error_to_detail(error: WarpfitError) -> bytes:
    """Serialize an error for the trailing metadata entry ``ERROR_METADATA_KEY``."""
    return pb.ErrorDetail(
        reason=error.reason,
        message=error.message,
        remedy=error.remedy,
        field=error.field,
        expression=error.expression,
        token=error.token,
        needed=None if error.needed is None else min(error.needed, _UINT64_MAX),
        available=error.available,
    ).SerializeToString()


def error_from_status(
    status: str, details: str, metadata: Sequence[tuple[str, str | bytes]] | None
) -> WarpfitError:
    """Rebuild the server's error from a failed call.

    Args:
        status: name of the gRPC status code.
        details: status message, used when the server sent no detail (gRPC's own errors).
        metadata: trailing metadata of the call.

    """
    cls = errors.BY_STATUS.get(status, errors.InternalError)
    for key, value in metadata or ():
        if key == ERROR_METADATA_KEY and isinstance(value, bytes):
            try:
                return _error_from_detail(cls, value)
            except DecodeError:
                break  # the plain status is better than nothing
    return _grpc_error(cls, status, details)


def _grpc_error(cls: type[WarpfitError], status: str, details: str) -> WarpfitError:
    """Explain an error that gRPC itself raised, on either side."""
    sizes = _TOO_LARGE.search(details)
    if sizes:
        return errors.ResourceExhaustedError(
            f"one message has {sizes[1]} bytes, the limit is {sizes[2]}",
            "MESSAGE_TOO_LARGE",
            "Send fewer expressions at once, or raise the limit on the side that refused it "
            "(client: TransportConfig.message_bytes; server: its message limit)",
            needed=int(sizes[1]),
            available=int(sizes[2]),
        )
    return cls(details or status, status, _REMEDIES.get(status, ""))


def _error_from_detail(cls: type[WarpfitError], data: bytes) -> WarpfitError:
    detail = pb.ErrorDetail.FromString(data)
    optional = {
        name: getattr(detail, name) if detail.HasField(name) else None
        for name in ("expression", "token", "needed", "available")
    }
    if cls is InvalidArgumentError and optional["expression"] is not None:
        cls = errors.ProgramError
    return cls(detail.message, detail.reason, detail.remedy, detail.field, **optional)


# --------------------------------------------------------------------------------------- server


def info_request() -> pb.GetServerInfoRequest:
    """Encode the question what the server is."""
    return pb.GetServerInfoRequest()


def info_to_message(server: ServerInfo) -> pb.ServerInfo:
    """Encode a server's description."""
    return pb.ServerInfo(
        version=server.version,
        engine=server.engine,
        devices=[
            pb.Device(
                name=device.name,
                threads=device.threads,
                memory=device.memory,
                compute_capability=device.compute_capability,
                driver=device.driver,
                tiers=[_TIERS[tier] for tier in device.tiers],
            )
            for device in server.devices
        ],
        limits=pb.Limits(**{f.name: getattr(server.limits, f.name) for f in fields(info.Limits)}),
        operators=[
            pb.OperatorInfo(code=o.code, name=o.name, arity=o.arity, symbol=o.symbol, notes=o.notes)
            for o in server.operators
        ],
    )


def info_from_message(message: pb.ServerInfo) -> ServerInfo:
    """Decode a server's description."""
    return ServerInfo(
        version=message.version,
        engine=message.engine,
        devices=tuple(
            info.Device(
                name=device.name,
                threads=device.threads,
                memory=device.memory,
                compute_capability=device.compute_capability,
                driver=device.driver,
                tiers=tuple(_enum(_TIERS, tier, "tiers") for tier in device.tiers),
            )
            for device in message.devices
        ),
        limits=info.Limits(
            **{f.name: getattr(message.limits, f.name) for f in fields(info.Limits)}
        ),
        operators=tuple(
            info.OperatorInfo(o.code, o.name, o.arity, o.symbol, o.notes) for o in message.operators
        ),
    )


def operator_infos() -> tuple[info.OperatorInfo, ...]:
    """Describe the operator table of this version."""
    return tuple(
        info.OperatorInfo(op.code, op.name, op.arity, op.symbol or "", op.notes)
        for op in OPERATORS.values()
    )
