"""Evaluations on their way to the server."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.codec.datasets import check_content_id
from warpfit.codec.framing import (
    TIERS,
    enum_member,
    pack,
)
from warpfit.errors import InvalidArgumentError
from warpfit.ir import Batch, Program
from warpfit.losses import Closing, LossFunction
from warpfit.request import Evaluation, Loss, Precision
from warpfit.v1 import evaluator_pb2 as pb

_PRECISIONS: Final = {Precision.PRECISE: pb.PRECISION_PRECISE, Precision.FAST: pb.PRECISION_FAST}
_LOSSES: Final = {
    None: pb.LOSS_NONE,
    Loss.SSE: pb.LOSS_SSE,
    Loss.MSE: pb.LOSS_MSE,
    Loss.RMSE: pb.LOSS_RMSE,
    Loss.MAE: pb.LOSS_MAE,
    Loss.R2: pb.LOSS_R2,
    Loss.NMSE: pb.LOSS_NMSE,
}
_CLOSINGS: Final = {
    Closing.SUM: pb.CLOSING_SUM,
    Closing.MEAN: pb.CLOSING_MEAN,
    Closing.ROOT: pb.CLOSING_ROOT,
    Closing.RELATIVE: pb.CLOSING_RELATIVE,
    Closing.SCORE: pb.CLOSING_SCORE,
}
#: Wishes that are a bool in the message and in the evaluation, by the same name.
_WISHES: Final = (
    *("gradient", "jacobian", "variable_gradient"),
    *("reductions", "linear_scaling", "correlation"),
)


def evaluation_to_message(evaluation: Evaluation) -> pb.EvaluateRequest:
    """Encode an evaluation."""
    batch = evaluation.batch
    message = pb.EvaluateRequest(
        content_id=evaluation.dataset_id,
        programs=pb.Programs(
            codes=pack(batch.codes, "u1"),
            values=pack(batch.values, "<f8"),
            lengths=pack(batch.lengths, "<u4"),
            parameter_counts=pack(batch.parameter_counts, "<u4"),
            parameters=pack(batch.parameters, "<f8"),
            vectors=batch.vectors,
        ),
        precision=_PRECISIONS[evaluation.precision],
        values=evaluation.values,
        loss=_LOSSES[evaluation.loss],
        tier=TIERS[evaluation.tier],
        **{wish: getattr(evaluation, wish) for wish in _WISHES},
    )
    custom = evaluation.custom_loss
    if custom is not None:
        message.loss_function.codes = pack(custom.row.codes, "u1")
        message.loss_function.values = pack(custom.row.values, "<f8")
        message.loss_function.closing = _CLOSINGS[custom.closing]
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
        codes=unpack(programs.codes, "u1", "programs.codes"),
        values=unpack(programs.values, "<f8", "programs.values"),
        lengths=unpack(programs.lengths, "<u4", "programs.lengths"),
        parameter_counts=unpack(programs.parameter_counts, "<u4", "programs.parameter_counts"),
        parameters=unpack(programs.parameters, "<f8", "programs.parameters"),
        vectors=programs.vectors or 1,
    )
    return Evaluation(
        dataset_id=check_content_id(message.content_id),
        batch=batch,
        rows=(message.rows.start, message.rows.stop) if message.HasField("rows") else None,
        precision=enum_member(_PRECISIONS, message.precision, "precision"),
        loss=enum_member(_LOSSES, message.loss, "loss"),
        values=message.values,
        tier=enum_member(TIERS, message.tier, "tier"),
        custom_loss=_custom_loss(message),
        **{wish: getattr(message, wish) for wish in _WISHES},
    )


def _custom_loss(message: pb.EvaluateRequest) -> LossFunction | None:
    if not message.HasField("loss_function"):
        return None
    custom = message.loss_function
    row = Program(
        unpack(custom.codes, "u1", "loss_function.codes"),
        unpack(custom.values, "<f8", "loss_function.values"),
    )
    return LossFunction(row, enum_member(_CLOSINGS, custom.closing, "loss_function.closing"))


def unpack(data: bytes, dtype: str, field: str) -> NDArray[Any]:
    """Unpack little-endian numbers without copying.

    Raises:
        InvalidArgumentError: if the bytes are no whole number of them.

    """
    size = np.dtype(dtype).itemsize
    if len(data) % size:
        raise InvalidArgumentError(
            f"{field} has {len(data)} bytes, not a multiple of {size}",
            "LENGTH_MISMATCH",
            f"Pack {size}-byte little-endian numbers without padding",
            field,
        )
    return np.frombuffer(data, dtype=dtype)
