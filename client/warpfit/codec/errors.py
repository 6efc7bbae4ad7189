"""Encoding and decoding of errors, and the meaning of gRPC's own errors."""

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError

from warpfit import errors
from warpfit.codec.framing import broken_answer, printable
from warpfit.errors import REQUEST_ID_KEY, InvalidArgumentError, WarpfitError
from warpfit.v1 import evaluator_pb2 as pb

#: Name of the trailing metadata entry with the ErrorStatus of a failed call, fixed by gRPC's richer
#: error model.
ERROR_METADATA_KEY: Final = "grpc-status-details-bin"
_DETAIL_TYPE: Final = f"type.googleapis.com/{pb.ErrorDetail.DESCRIPTOR.full_name}"
_TEXTS: Final = ("message", "reason", "remedy", "field")
_NUMBERS: Final = ("expression", "token", "needed", "available")
_LONGEST_ID: Final = 128
_UINT64_MAX: Final = 2**64 - 1
#: gRPC's own message for a message over the limit, sent or received.
_TOO_LARGE: Final = re.compile(r"larger than max \((\d+) vs\. (\d+)\)")
#: gRPC's own message when there are more calls than threads, and the seconds to wait then.
_TOO_MANY_CALLS: Final = "Concurrent RPC limit exceeded"
_TOO_MANY_CALLS_SECONDS: Final = 0.1
#: gRPC's own messages where no server can be reached; the place is ``ipv4:HOST:PORT`` or alike.
_NOBODY_LISTENS: Final = re.compile(
    r"(?:ipv[46]:)?(\S+): (?:Failed to connect to remote host|connect(?: failed)?): .*?"
    r"(Connection refused|No such file or directory|Not a directory|Permission denied|"
    r"Network is unreachable|No route to host|Cannot assign requested address)"
)
_NOBODY_THERE: Final = frozenset({"Connection refused", "No such file or directory"})
_NAME_UNKNOWN: Final = re.compile(r"address lookup failed for (\S+):")
_NOBODY_REMEDY: Final = (
    "Check host and port (WARPFIT_ADDRESS, if no address is given), start a server there with "
    "`warpfit serve`, or wait for one that is starting with connect(..., wait=SECONDS)"
)
#: Remedies for gRPC's own errors by status.
_REMEDIES: Final = {
    "UNAVAILABLE": "Check that the server runs and that address and port are right",
    "DEADLINE_EXCEEDED": "Raise timeout=, or ask for less at once",
    "UNAUTHENTICATED": "Give a valid token= or client certificate",
    "UNIMPLEMENTED": "Server and client differ in version: upgrade the older one",
}


def error_to_status(error: WarpfitError, more: bytes = b"") -> bytes:
    """Serialize an error for the trailing metadata entry ``ERROR_METADATA_KEY``.

    ``more`` is a serialized google.rpc.Status with other details, which are appended.
    """
    numbers = {name: getattr(error, name) for name in _NUMBERS}
    wait = error.retry_after
    numbers["retry_after_ms"] = None if wait is None else math.ceil(1000 * wait)
    texts = {name: getattr(error, name) for name in _TEXTS}
    detail = pb.ErrorDetail(
        **texts,
        **{n: None if v is None else min(_UINT64_MAX, max(0, v)) for n, v in numbers.items()},
    )
    packed = pb.ErrorStatus.Detail(type_url=_DETAIL_TYPE, value=detail.SerializeToString())
    code = grpc.StatusCode[error.status].value[0]
    status = pb.ErrorStatus(code=code, message=str(error), details=[packed])
    return status.SerializeToString() + more  # one message: repeated fields are concatenated


def detail_of_status(data: bytes) -> pb.ErrorDetail | None:
    """Return the detail that `error_to_status` has put into a status; None if there is none.

    Raises:
        DecodeError: if the bytes are no status.
    """
    for detail in pb.ErrorStatus.FromString(data).details:
        if detail.type_url == _DETAIL_TYPE:
            return pb.ErrorDetail.FromString(detail.value)
    return None


def error_from_status(
    status: str, details: str, metadata: Sequence[tuple[str, str | bytes]] | None
) -> WarpfitError:
    """Rebuild the server's error from status, message and trailing metadata of a failed call.

    The message is used where the server sent no detail, as for gRPC's own errors. Texts are made
    printable, because they end up in terminals and logs.
    """
    if status == "OK":
        return broken_answer("has no message")
    cls = errors.BY_STATUS.get(status, errors.InternalError)
    entries = dict(metadata or ())
    detail, data = None, entries.get(ERROR_METADATA_KEY)
    with suppress(DecodeError):  # so that the plain status is used
        detail = detail_of_status(data) if isinstance(data, bytes) else None
    known = None if detail is None else _error_from_detail(cls, detail)
    error = known or _grpc_error(cls, status, printable(details))
    request_id = entries.get(REQUEST_ID_KEY)
    if isinstance(request_id, str):
        error.request_id = printable(request_id[:_LONGEST_ID])
        error.add_note(f"request {error.request_id}")
    return error


def _grpc_error(cls: type[WarpfitError], status: str, details: str) -> WarpfitError:
    """Return the error for one that gRPC itself raised, on either side."""
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
    if _TOO_MANY_CALLS in details:
        return errors.ResourceExhaustedError(
            "the server has as many calls in flight as it can take",
            "TOO_MANY_REQUESTS",
            "Retry with back-off",
            retry_after=_TOO_MANY_CALLS_SECONDS,
        )
    place = _NOBODY_LISTENS.search(details)
    if status == "UNAVAILABLE" and place:
        where = unquote(place[1])
        if place[2] in _NOBODY_THERE:
            message, reason = f"nothing listens at {where}", "CONNECTION_REFUSED"
        else:
            message, reason = f"{where} cannot be reached: {place[2]}", "CANNOT_CONNECT"
        return errors.UnavailableError(message, reason, _NOBODY_REMEDY)
    name = _NAME_UNKNOWN.search(details)
    if status == "UNAVAILABLE" and name:
        return errors.UnavailableError(
            f"the name in {name[1]} cannot be resolved", "NAME_NOT_RESOLVED", _NOBODY_REMEDY
        )
    if status == "CANCELLED":  # by a server that stops; a caller that cancels gets no status
        return errors.UnavailableError("the call was cut off", "CALL_CUT_OFF", "Repeat the call")
    return cls(details or status, status, _REMEDIES.get(status, ""))


def _error_from_detail(cls: type[WarpfitError], detail: pb.ErrorDetail) -> WarpfitError:
    optional: dict[str, Any] = {
        name: getattr(detail, name) if detail.HasField(name) else None for name in _NUMBERS
    }
    if detail.HasField("retry_after_ms"):
        optional["retry_after"] = detail.retry_after_ms / 1000
    if cls is InvalidArgumentError and optional["expression"] is not None:
        cls = errors.ProgramError
    message, reason, remedy, field = (printable(getattr(detail, name)) for name in _TEXTS)
    return cls(message, reason, remedy, field, **optional)
