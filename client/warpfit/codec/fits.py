"""Encoding and decoding of Optimize: requests, progress and results."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from warpfit.codec.answers import set_timings, timings_from_message
from warpfit.codec.framing import (
    F64,
    U8,
    U32,
    WireEnum,
    broken_answer,
    decodes_answer,
    pack,
    received_array,
    unpack,
)
from warpfit.codec.requests import evaluation_from_message, evaluation_to_message
from warpfit.fitting import REASONS, FitProgress, FitRequest, FitResult, FitSettings, Method
from warpfit.request import OUTPUTS
from warpfit.v1 import evaluator_pb2 as pb

_METHODS: Final = WireEnum(Method, pb.Method)
_TOLERANCES: Final = ("gradient_tolerance", "step_tolerance", "loss_tolerance")
_SWITCHES: Final = ("all_starts", "standard_errors", "covariance", "partial", "progress")
#: Arrays of a request, one number for each parameter of each program.
_BOUNDS: Final[Mapping[str, np.dtype[Any]]] = {"lower": F64, "upper": F64, "fixed": U8}
#: Arrays of a result.
_ARRAYS: Final[Mapping[str, np.dtype[Any]]] = {
    "parameters": F64,
    "losses": F64,
    "initial_losses": F64,
    "iterations": U32,
    "evaluations": U32,
    "reasons": U8,
    "starts": U32,
}
_MOST_ITERATIONS: Final = 2**32 - 1


def fit_to_message(request: FitRequest) -> pb.OptimizeRequest:
    """Encode a fit."""
    settings = request.settings
    bounds = {name: getattr(settings, name) for name in _BOUNDS}
    packed: Any = {
        name: pack(array, _BOUNDS[name]) for name, array in bounds.items() if array is not None
    }
    return pb.OptimizeRequest(
        problem=evaluation_to_message(request.problem),
        method=_METHODS.codes[settings.method],
        max_iterations=min(settings.max_iterations, _MOST_ITERATIONS),
        **{name: getattr(settings, name) for name in _TOLERANCES},
        **{name: getattr(settings, name) for name in _SWITCHES},
        **packed,
    )


def fit_from_message(message: pb.OptimizeRequest, dataset_id: bytes | None = None) -> FitRequest:
    """Decode a fit; `FitRequest.check` must follow. See `evaluation_from_message`."""
    bounds: dict[str, Any] = {
        name: unpack(getattr(message, name), dtype, name) if getattr(message, name) else None
        for name, dtype in _BOUNDS.items()
    }
    if bounds["fixed"] is not None:
        bounds["fixed"] = bounds["fixed"] != 0
    tolerances: Any = {
        name: getattr(message, name) if message.HasField(name) else None for name in _TOLERANCES
    }
    settings = FitSettings(
        method=_METHODS.member(message.method, "method"),
        max_iterations=message.max_iterations,
        **tolerances,
        **bounds,
        **{name: getattr(message, name) for name in _SWITCHES},
    )
    no_outputs: Any = dict.fromkeys(("values", *OUTPUTS), False)  # a fit returns none of them
    problem = replace(evaluation_from_message(message.problem, dataset_id), **no_outputs)
    return FitRequest(problem, settings)


def progress_to_bytes(progress: FitProgress) -> bytes:
    """Serialize a message of an answer that carries progress."""
    return pb.OptimizeResponse(
        progress=pb.FitProgress(
            iterations=progress.iterations, active=progress.active, searches=progress.searches
        )
    ).SerializeToString()


def fit_to_bytes(result: FitResult) -> bytes:
    """Serialize the message of an answer that carries the result."""
    arrays: Any = {name: pack(getattr(result, name), dtype) for name, dtype in _ARRAYS.items()}
    message = pb.FitResult(**arrays)
    set_timings(message.timings, result.timings)
    for name in ("standard_errors", "covariances"):
        array = getattr(result, name)
        if array is not None:
            setattr(message, name, pack(array, F64))
    return pb.OptimizeResponse(result=message).SerializeToString()


@decodes_answer
def fit_answer_from_bytes(data: bytes) -> pb.OptimizeResponse:
    """Parse one message of an answer to Optimize."""
    return pb.OptimizeResponse.FromString(data)


def read_fit(
    request: FitRequest,
    messages: Iterable[pb.OptimizeResponse],
    report: Callable[[FitProgress], None] | None = None,
) -> FitResult:
    """Read the answer to a fit; call ``report`` with each progress.

    Raises:
        InternalError: if the server breaks the contract.
    """
    result = None
    for message in messages:
        if message.HasField("progress") and report is not None:
            progress = message.progress
            report(FitProgress(progress.iterations, progress.active, progress.searches))
        if message.HasField("result"):
            result = _result(request, message.result)
    if result is None:
        raise broken_answer("has no result")
    return result


@decodes_answer
def _result(request: FitRequest, message: pb.FitResult) -> FitResult:
    batch, vectors = request.problem.batch, request.vectors
    counts = batch.parameter_counts.astype(np.int64)
    total = vectors * int(counts.sum())
    squares = vectors * int(np.square(counts).sum())
    shapes = dict.fromkeys(_ARRAYS, (len(batch), vectors)) | {"parameters": (total,)}
    dtypes = dict(_ARRAYS)
    if request.settings.standard_errors:
        dtypes["standard_errors"], shapes["standard_errors"] = F64, (total,)
    if request.settings.covariance:
        dtypes["covariances"], shapes["covariances"] = F64, (squares,)
    arrays = {
        name: received_array(getattr(message, name), dtype, shapes[name], name)
        for name, dtype in dtypes.items()
    }
    if not ((arrays["reasons"] > 0) & (arrays["reasons"] <= len(REASONS))).all():
        raise broken_answer("has an unknown reason")
    if (arrays["starts"] >= batch.vectors).any():
        raise broken_answer("names a start that was not given")
    return FitResult(**arrays, timings=timings_from_message(message.timings))
