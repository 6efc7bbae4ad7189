"""Statuses of failed calls: google.rpc.Status with warpfit's own detail and the standard ones."""

import logging
from typing import Any, Final

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from warpfit.codec import ERROR_METADATA_KEY, error_to_status
from warpfit.errors import (
    CancelledError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    WarpfitError,
)
from warpfit_server.system.machine import shortage

_LOG: Final = logging.getLogger("warpfit.service")
_DOMAIN: Final = "warpfit"
_FACTS: Final = ("field", "expression", "token", "needed", "available")


def fail_call(context: Any, error: Exception, trailing: tuple[tuple[str, str], ...]) -> None:
    """Give a call the status of an error, unless it has a status already.

    Metadata that every answer carries, ``trailing``, are sent beside those of the error.
    """
    if context.code() is not None:
        return
    if isinstance(error, grpc.RpcError) and not context.is_active():
        _LOG.debug("the client went away")
        return
    if isinstance(error, CancelledError) and context.time_remaining() == 0:
        error = DeadlineExceededError(  # gRPC ends such a call as if its caller had cancelled it
            "the deadline of the call passed", "DEADLINE_EXCEEDED", "Raise timeout="
        )
    if not isinstance(error, WarpfitError):
        known = shortage(error)
        if known is None:
            _LOG.error("call failed", exc_info=error)
        error = known or InternalError(
            "the server failed on this call", "INTERNAL", "Report it as a bug"
        )
    standard = status_pb2.Status(details=_standard_details(error)).SerializeToString()
    details = ERROR_METADATA_KEY, error_to_status(error, standard)
    context.set_trailing_metadata((*trailing, details))
    context.set_code(grpc.StatusCode[error.status])
    context.set_details(str(error))


def _standard_details(error: WarpfitError) -> list[any_pb2.Any]:
    """Return the applicable details of google.rpc, for tools that know no others."""
    facts = {name: getattr(error, name) for name in _FACTS}
    known = {name: str(value) for name, value in facts.items() if value not in (None, "")}
    messages: list[Any] = [
        error_details_pb2.ErrorInfo(
            reason=error.reason, domain=_DOMAIN, metadata={**known, "remedy": error.remedy}
        )
    ]
    if isinstance(error, InvalidArgumentError):
        place = error.field
        if error.expression is not None:  # such as programs[3].tokens[4]
            token = "" if error.token is None else f".tokens[{error.token}]"
            place = f"programs[{error.expression}]{token}"
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=place, description=error.message
        )
        messages.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, ResourceExhaustedError):
        short = error_details_pb2.QuotaFailure.Violation(
            subject=error.reason, description=error.message
        )
        messages.append(error_details_pb2.QuotaFailure(violations=[short]))
    if error.retry_after is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after * 1e9))
        messages.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = [any_pb2.Any() for _ in messages]
    for entry, message in zip(packed, messages, strict=True):
        entry.Pack(message)
    return packed
