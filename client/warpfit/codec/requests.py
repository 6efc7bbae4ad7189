"""Encoding and decoding of the request of Evaluate."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.codec import framing
from warpfit.codec.datasets import check_content_id
from warpfit.ir import Batch, Program
from warpfit.losses import Closing, LossFunction
from warpfit.ops import FIRST_OPERATOR
from warpfit.request import OUTPUTS, Evaluation, Loss, Precision
from warpfit.v1 import evaluator_pb2 as pb

_PRECISIONS: Final = framing.WireEnum(Precision, pb.Precision)
_LOSSES: Final = framing.WireEnum((None, *Loss), pb.Loss)
_CLOSINGS: Final = framing.WireEnum(Closing, pb.Closing)
#: Tokens from which on a batch leaves out the values of operators: such messages are half as long,
#: but picking the values takes time, too: 4 ms for 50,000 programs, whose message then has 7.7 MB.
_LONG: Final = 1 << 16
_VECTORS_TAG: Final = framing.varint(pb.Programs.VECTORS_FIELD_NUMBER << 3)
_PROGRAMS_TAG: Final = framing.bytes_tag(pb.EvaluateRequest.PROGRAMS_FIELD_NUMBER)
#: Arrays of a batch: name, tag of the field and dtype.
_ARRAYS: Final = (
    ("codes", framing.bytes_tag(pb.Programs.CODES_FIELD_NUMBER), framing.U8),
    ("values", framing.bytes_tag(pb.Programs.VALUES_FIELD_NUMBER), framing.F64),
    ("lengths", framing.bytes_tag(pb.Programs.LENGTHS_FIELD_NUMBER), framing.U32),
    ("parameter_counts", framing.bytes_tag(pb.Programs.PARAMETER_COUNTS_FIELD_NUMBER), framing.U32),
    ("parameters", framing.bytes_tag(pb.Programs.PARAMETERS_FIELD_NUMBER), framing.F64),
)


def evaluation_to_bytes(evaluation: Evaluation) -> bytes:
    """Serialize an evaluation.

    The batch is framed by hand and appended, because protobuf would copy it three times more.
    """
    outputs = {output: True for output in OUTPUTS if getattr(evaluation, output)}
    message = pb.EvaluateRequest(
        content_id=evaluation.dataset_id,
        precision=_PRECISIONS.codes[evaluation.precision],
        values=evaluation.values,
        loss=_LOSSES.codes[evaluation.loss],
        tier=framing.TIERS.codes[evaluation.tier],
        **outputs,  # type: ignore[arg-type]
    )
    custom = evaluation.custom_loss
    if custom is not None:
        message.loss_function.codes = framing.pack(custom.row.codes, framing.U8)
        message.loss_function.values = framing.pack(custom.row.values, framing.F64)
        message.loss_function.closing = _CLOSINGS.codes[custom.closing]
    if evaluation.rows is not None:
        message.rows.start, message.rows.stop = evaluation.rows
    pieces, size = _programs(evaluation.batch)
    return b"".join((message.SerializeToString(), _PROGRAMS_TAG, framing.varint(size), *pieces))


def _programs(batch: Batch) -> tuple[list[Any], int]:
    """Serialize a batch in pieces, which are to be joined; also return their bytes."""
    head = _VECTORS_TAG + framing.varint(batch.vectors)
    pieces: list[Any] = [head]
    size = len(head)
    for name, tag, dtype in _ARRAYS:
        array = np.ascontiguousarray(getattr(batch, name), dtype=dtype)
        if name == "values" and len(batch.codes) == len(array) >= _LONG:
            array = array[np.flatnonzero(batch.codes < FIRST_OPERATOR)]
        if array.nbytes:
            head = tag + framing.varint(array.nbytes)
            pieces += (head, array)
            size += len(head) + array.nbytes
    return pieces, size


def evaluation_to_message(evaluation: Evaluation) -> pb.EvaluateRequest:
    """Encode an evaluation as a message, to be part of another one."""
    return pb.EvaluateRequest.FromString(evaluation_to_bytes(evaluation))


def evaluation_from_message(
    message: pb.EvaluateRequest, dataset_id: bytes | None = None
) -> Evaluation:
    """Decode an evaluation; `Evaluation.check` must follow.

    ``dataset_id`` is the name of the data set if it is not the content id.
    """
    programs = message.programs
    arrays = {
        name: framing.unpack(getattr(programs, name), dtype, f"programs.{name}")
        for name, _, dtype in _ARRAYS
    }
    arrays["values"] = _of_all_tokens(arrays["values"], arrays["codes"])
    batch = Batch(**arrays, vectors=programs.vectors or 1)
    return Evaluation(
        dataset_id=dataset_id or check_content_id(message.content_id),
        batch=batch,
        rows=(message.rows.start, message.rows.stop) if message.HasField("rows") else None,
        precision=_PRECISIONS.member(message.precision, "precision"),
        loss=_LOSSES.member(message.loss, "loss"),
        values=message.values,
        tier=framing.TIERS.member(message.tier, "tier"),
        custom_loss=_custom_loss(message),
        **{output: getattr(message, output) for output in OUTPUTS},
    )


def _of_all_tokens(values: NDArray[Any], codes: NDArray[Any]) -> NDArray[Any]:
    """Return a value for each token, 0 for operators, whether or not the message has theirs."""
    if len(values) >= len(codes):
        return values
    leaves = np.flatnonzero(codes < FIRST_OPERATOR)
    if len(values) != len(leaves):
        return values  # checks of the batch say that the lengths do not fit
    every = np.zeros(len(codes))
    every[leaves] = values
    return every


def evaluation_from_bytes(data: bytes) -> Evaluation:
    """Parse and decode an evaluation; `Evaluation.check` must follow."""
    return evaluation_from_message(framing.parse_message(pb.EvaluateRequest, data))


def _custom_loss(message: pb.EvaluateRequest) -> LossFunction | None:
    if not message.HasField("loss_function"):
        return None
    custom = message.loss_function
    row = Program(
        framing.unpack(custom.codes, framing.U8, "loss_function.codes"),
        framing.unpack(custom.values, framing.F64, "loss_function.values"),
    )
    return LossFunction(row, _CLOSINGS.member(custom.closing, "loss_function.closing"))
