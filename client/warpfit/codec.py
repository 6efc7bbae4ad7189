"""The conversion between warpfit's types and the protobuf messages of evaluator.proto.

Long arrays are framed by hand, because protobuf would copy them several times more. What a server
sends is checked as what a client sends: a broken answer is an InternalError that says so.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from enum import StrEnum
from functools import cache, lru_cache, wraps
from types import MappingProxyType
from typing import Any, Final, Generic, ParamSpec, TypeVar
from urllib.parse import unquote

import grpc
import numpy as np
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet
from numpy.typing import DTypeLike, NDArray

from warpfit import errors
from warpfit import server_info as info
from warpfit.dataset import DTYPE_CODES, DTYPES, ClientDataset, DatasetReference, Layout, ServerFile
from warpfit.errors import REQUEST_ID_KEY, InternalError, InvalidArgumentError, WarpfitError
from warpfit.ir import Batch, Program
from warpfit.losses import Closing, LossFunction
from warpfit.ops import FIRST_OPERATOR, OPERATORS
from warpfit.request import (
    FURTHER_OUTPUTS,
    OUTPUTS,
    REASONS,
    Evaluation,
    FitProgress,
    FitRequest,
    FitResult,
    FitSettings,
    Loss,
    Method,
    Missing,
    Precision,
    Result,
    Tier,
    Timings,
)
from warpfit.v1 import evaluator_pb2 as pb

# ------------------------------------------------------------------------------------------ framing

E = TypeVar("E", bound=StrEnum | None)
M = TypeVar("M", bound=Message)
T = TypeVar("T")
P = ParamSpec("P")

#: Numbers in messages, little-endian.
U8: Final = np.dtype("u1")
U32: Final = np.dtype("<u4")
F64: Final = np.dtype("<f8")

#: Version of the contract that this version of warpfit keeps.
CONTRACT: Final[int] = pb.CONTRACT_VERSION
#: Bytes up to which a message is parsed, in 5 ms, however many fields it has; most fields of
#: others.
_SHORT: Final = 1 << 18
_MOST_FIELDS: Final = 256
#: Wire types: numbers, bytes and messages, and the lengths of numbers of fixed length.
_VARINT: Final = 0
_BYTES: Final = 2
_FIXED: Final = {1: 8, 5: 4}


class WireEnum(Generic[E]):
    """Conversion between the members of an enumeration and their codes in messages.

    The contract's names are those of the members with a prefix; None is called NONE there.
    """

    def __init__(self, members: Iterable[E], codes: Any) -> None:
        prefix = codes.keys()[0].partition("_")[0]
        names = {member: "NONE" if member is None else member.name for member in members}
        self.codes: dict[E, Any] = {m: codes.Value(f"{prefix}_{n}") for m, n in names.items()}
        self._members = {code: member for member, code in self.codes.items()}

    def member(self, code: int, field: str) -> E:
        """Decode a code; raise InvalidArgumentError if it is not defined."""
        try:
            return self._members[code]
        except KeyError:
            raise InvalidArgumentError(
                f"{field} {code} is not defined",
                "BAD_ENUM",
                f"Use a value from 0 to {max(self._members)}",
                field,
            ) from None


TIERS: Final = WireEnum(Tier, pb.Tier)


def parse_message(cls: type[M], data: bytes, *, most_fields: int | None = _MOST_FIELDS) -> M:
    """Parse a request; raise InvalidArgumentError if the bytes are not a message of this type.

    A long message has few fields that are long. Protobuf takes seconds for one of many short ones,
    in which no other thread runs, so it is refused; ``most_fields=None`` takes any.
    """
    kind = cls.DESCRIPTOR
    if most_fields is not None and len(data) > _SHORT:
        left = _count_fields(memoryview(data), kind, most_fields)
        if left < 0:
            raise _malformed(f"{kind.full_name} of at most {most_fields} fields")
    try:
        message = cls.FromString(data)
    except DecodeError as error:
        raise _malformed(kind.full_name) from error
    _refuse_unknown_fields(message)
    return message


def _refuse_unknown_fields(message: Message) -> None:
    """Raise UnimplementedError for a field that this version of the contract has not."""
    found: Any = UnknownFieldSet(message)  # its stubs lack the iterator
    for unknown in found:
        raise errors.UnimplementedError(
            f"this server does not know field {unknown.field_number} of "
            f"{message.DESCRIPTOR.full_name}; it keeps version {CONTRACT} of the contract",
            "UNKNOWN_FIELD",
            "Update the server, or leave out what only newer ones can do",
        )
    for name, kind in _parts(message.DESCRIPTOR):
        parts = getattr(message, name)
        if kind == "one":
            parts = (parts,) if message.HasField(name) else ()
        for part in parts.values() if kind == "map" else parts:
            _refuse_unknown_fields(part)


@cache
def _parts(kind: Descriptor) -> list[tuple[str, str]]:
    """Return the fields that have messages, each as "one", "several" or a "map" of them."""
    found = []
    for one in kind.fields:
        part = one.message_type
        if part is None:
            continue
        if not part.GetOptions().map_entry:
            found.append((one.name, "several" if one.is_repeated else "one"))
        elif part.fields_by_name["value"].message_type is not None:
            found.append((one.name, "map"))
    return found


def _count_fields(data: memoryview, descriptor: Any, left: int) -> int:
    """Count the fields of a message and inside of it down from ``left``; -1 if it is malformed."""
    at = 0
    while at < len(data):
        tag, start = read_varint(data, at)
        size, at = read_varint(data, start)
        kind, field = tag & 7, descriptor.fields_by_number.get(tag >> 3)
        left -= 1
        if kind == _BYTES:
            if field is not None and field.message_type is not None:
                left = _count_fields(data[at : at + size], field.message_type, left)
            at += size
        elif kind in _FIXED:
            at = start + _FIXED[kind]
        if left < 0 or at <= start or kind not in (_VARINT, _BYTES, *_FIXED):
            return -1
    return left


def _malformed(expected: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the request is not a {expected}",
        "MALFORMED_MESSAGE",
        "Encode it from warpfit/v1/evaluator.proto, and do not compress it",
    )


def read_varint(data: bytes | memoryview, start: int) -> tuple[int, int]:
    """Return the number at ``start`` and the index behind it; (0, start) if there is none."""
    value = 0
    for position, byte in enumerate(data[start : start + 10]):
        value |= (byte & 0x7F) << (7 * position)
        if byte < 0x80:
            return value, start + position + 1
    return 0, start


@lru_cache(1 << 12)  # sizes of arrays come again; encoding seven of them took 6% of a client's call
def varint(value: int) -> bytes:
    """Encode a number as protobuf does."""
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)


def bytes_tag(number: int) -> bytes:
    """Encode the tag of a field of bytes or of a message (wire type 2)."""
    return varint(number << 3 | 2)


def pack(array: NDArray[Any], dtype: DTypeLike) -> bytes:
    """Pack numbers as little-endian bytes."""
    return np.ascontiguousarray(array, dtype=dtype).tobytes()


def unpack(data: bytes, dtype: np.dtype[Any], field: str) -> NDArray[Any]:
    """Unpack the little-endian numbers of a request without copying."""
    try:
        return np.frombuffer(data, dtype)
    except ValueError:
        size = dtype.itemsize
        raise InvalidArgumentError(
            f"{field} has {len(data)} bytes, not a multiple of {size}",
            "LENGTH_MISMATCH",
            f"Pack {size}-byte little-endian numbers without padding",
            field,
        ) from None


def received_array(
    data: bytes, dtype: np.dtype[Any], shape: tuple[int, ...], name: str
) -> NDArray[Any]:
    """Unpack an array of an answer without copying; raise InternalError for another shape."""
    try:
        return np.frombuffer(data, dtype=dtype).reshape(shape)
    except ValueError as error:
        raise broken_answer(f"has {len(data)} bytes of {name}") from error


def broken_answer(what: str) -> InternalError:
    """Return the error for an answer of a server that breaks the contract."""
    return InternalError(
        f"the server's answer {what}",
        "BROKEN_ANSWER",
        "Check that a warpfit server of the client's version listens at the address",
    )


def decodes_answer(decode: Callable[P, T]) -> Callable[P, T]:
    """Have a function raise InternalError for whatever is wrong in an answer.

    Otherwise the checks that it shares with requests would blame the arguments of the caller.
    """

    @wraps(decode)
    def decoded(*args: P.args, **options: P.kwargs) -> T:
        try:
            return decode(*args, **options)
        except InvalidArgumentError as error:
            raise broken_answer(f"breaks the contract: {error.message}") from error
        except (DecodeError, ValueError, TypeError, LookupError, OverflowError) as error:
            raise broken_answer("cannot be decoded") from error

    return decoded


def printable(text: str) -> str:
    """Return a server's text with escapes for all that would control a terminal or a log."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


# ------------------------------------------------------------------------------------------- errors

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
#: gRPC's own messages of handshakes that fail in the client: a pattern, and reason, message and
#: remedy of the error.
_TLS_MISTAKES: Final = (
    (
        re.compile("Hostname Verification Check failed"),
        "WRONG_SERVER_NAME",
        "the server's certificate is for another name",
        "Connect to a name in the certificate, or give one of its names: TlsConfig(server_name=...)"
        ", WARPFIT_SERVER_NAME, or --server-name of a command",
    ),
    (
        re.compile("WRONG_VERSION_NUMBER"),
        "NO_TLS",
        "the server does not speak TLS, as this client does",
        "Connect with tls=False, or start the server with --tls-cert and --tls-key",
    ),
    (
        re.compile("certificate (?:has expired|is not yet valid)"),
        "CERTIFICATE_NOT_VALID",
        "the server's certificate has expired, or is not valid yet",
        "Renew it, and check the clocks of both machines",
    ),
    (
        re.compile("CERTIFICATE_VERIFY_FAILED|certificate signature failure"),
        "UNTRUSTED_CERTIFICATE",
        "the server's certificate is from no authority that this client trusts",
        "Give the authority's certificate: TlsConfig(ca=...), WARPFIT_CA, or --ca of a command",
    ),
)
_NOBODY_REMEDY: Final = (
    "Check host and port (WARPFIT_ADDRESS, if no address is given), start a server there with "
    "`warpfit serve`, or wait for one that is starting with connect(..., wait=SECONDS)"
)
#: Remedies for gRPC's own errors by status.
_REMEDIES: Final = {
    "UNAVAILABLE": "Check that the server runs and that address and port are right",
    "DEADLINE_EXCEEDED": "Raise timeout=, or ask for less at once; the first fit on a machine "
    "waits until the server has compiled its code, which `warpfit precompile` does beforehand",
    "UNAUTHENTICATED": "Give a valid token= or client certificate",
    "UNIMPLEMENTED": "Server and client differ in version, or this is no server's main port, but "
    "that for health checks, or one of another program",
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


def detail_of_status(data: bytes, status: str) -> pb.ErrorDetail | None:
    """Return the detail that `error_to_status` has put into a status; None if there is none.

    It counts only for a call of the same ``status``: where the call's time ends as its answer
    arrives, gRPC says DEADLINE_EXCEEDED beside the details of another error.

    Raises:
        DecodeError: if the bytes are no status.
    """
    found = pb.ErrorStatus.FromString(data)
    if found.code != grpc.StatusCode[status].value[0]:
        return None
    for detail in found.details:
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
        detail = detail_of_status(data, status) if isinstance(data, bytes) else None
    if detail is None:
        error = _grpc_error(cls, status, printable(details))
    else:
        numbers: dict[str, Any] = {
            name: getattr(detail, name) if detail.HasField(name) else None for name in _NUMBERS
        }
        if detail.HasField("retry_after_ms"):
            numbers["retry_after"] = detail.retry_after_ms / 1000
        if cls is InvalidArgumentError and numbers["expression"] is not None:
            cls = errors.ProgramError
        message, reason, remedy, field = (printable(getattr(detail, name)) for name in _TEXTS)
        error = cls(message, reason, remedy, field, **numbers)
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
    for pattern, reason, message, remedy in _TLS_MISTAKES:
        if status == "UNAVAILABLE" and pattern.search(details):
            return errors.UnavailableError(message, reason, remedy)
    if status == "DEADLINE_EXCEEDED":  # what gRPC says depends on where the time ended
        message = "the call did not end in its time"
        return errors.DeadlineExceededError(message, status, _REMEDIES[status])
    if status == "CANCELLED":  # by a server that stops; a caller that cancels gets no status
        return errors.UnavailableError("the call was cut off", "CALL_CUT_OFF", "Repeat the call")
    return cls(details or status, status, _REMEDIES.get(status, ""))


# --------------------------------------------------------------------------- a server's description


def info_request() -> pb.GetServerInfoRequest:
    """Encode the request of GetServerInfo."""
    return pb.GetServerInfoRequest()


def info_to_message(server: info.ServerInfo) -> pb.ServerInfo:
    """Encode a server's description."""
    return pb.ServerInfo(
        version=server.version,
        engine=server.engine,
        devices=[
            pb.Device(**_fields(device, info.Device, tiers=[TIERS.codes[t] for t in device.tiers]))
            for device in server.devices
        ],
        limits=pb.Limits(**_fields(server.limits, info.Limits)),
        operators=[pb.OperatorInfo(**_fields(o, info.OperatorInfo)) for o in server.operators],
        datasets=server.datasets,
        contract=server.contract,
    )


def check_contract(message: pb.ServerInfo, address: str) -> None:
    """Refuse a server that would silently ignore unknown fields.

    Raises:
        UnimplementedError: if it has no version of the contract.
    """
    if not message.contract:
        raise errors.UnimplementedError(
            f"the server at {address} is older than this client (warpfit "
            f"{printable(message.version) or 'of unknown version'}), and would leave out what it "
            "does not know",
            "SERVER_TOO_OLD",
            "Update the server, or use the client of its version",
        )


@decodes_answer
def info_from_message(message: pb.ServerInfo) -> info.ServerInfo:
    """Decode a server's description."""
    return info.ServerInfo(
        version=printable(message.version),
        engine=printable(message.engine),
        devices=tuple(
            info.Device(
                **_fields(
                    device,
                    info.Device,
                    tiers=tuple(TIERS.member(tier, "tiers") for tier in device.tiers),
                )
            )
            for device in message.devices
        ),
        limits=info.Limits(**_fields(message.limits, info.Limits)),
        operators=tuple(
            info.OperatorInfo(**_fields(o, info.OperatorInfo)) for o in message.operators
        ),
        datasets=message.datasets,
        contract=message.contract,
    )


def _fields(source: object, cls: type, **converted: object) -> dict[str, Any]:
    """Return the fields of a dataclass by name, taken from a message or an object of the class."""
    found = {f.name: getattr(source, f.name) for f in fields(cls)} | converted
    return {name: printable(v) if isinstance(v, str) else v for name, v in found.items()}


def operator_infos() -> tuple[info.OperatorInfo, ...]:
    """Return the operator table of this version."""
    return tuple(
        info.OperatorInfo(op.code, op.name, op.arity, op.symbol or "", op.notes)
        for op in OPERATORS.values()
    )


# ---------------------------------------------------------------------------------------- data sets

CONTENT_ID_BYTES: Final = 32
#: Field 2 (``data``) of UploadVariablesRequest, wire type 2.
_DATA_TAG: Final = bytes([2 << 3 | 2])
#: Field 2 (``layout``) of DatasetInfo.
_LAYOUT_TAG: Final = bytes([2 << 3 | 2])


def layout_to_message(layout: Layout) -> pb.DatasetLayout:
    """Encode a data set's shape."""
    return pb.DatasetLayout(
        dtype=DTYPE_CODES[layout.dtype],
        variables=layout.variables,
        rows=layout.rows,
        has_target=layout.has_target,
        has_weights=layout.has_weights,
        names=layout.names,
    )


def encode_names(names: Sequence[str]) -> bytes:
    """Encode names of variables as they stand at the end of an encoded DatasetLayout."""
    return pb.DatasetLayout(names=names).SerializeToString()


def layout_from_message(message: pb.DatasetLayout) -> Layout:
    """Decode and check a data set's shape; raise InvalidArgumentError if it is none."""
    layout = Layout(
        dtype=_dtype(message.dtype, "layout.dtype"),
        variables=message.variables,
        rows=message.rows,
        has_target=message.has_target,
        has_weights=message.has_weights,
        names=tuple(message.names),
    )
    layout.check()
    return layout


def _dtype(code: int, field: str) -> np.dtype[Any]:
    if code not in DTYPES:
        raise InvalidArgumentError(
            f"dtype {code} is not supported",
            "BAD_DTYPE",
            "Send DTYPE_FLOAT32 or DTYPE_FLOAT64",
            field,
        )
    return DTYPES[code]


def upload_messages(dataset: ClientDataset, chunk_bytes: int) -> Iterator[bytes]:
    """Serialize an upload: the header, then the payload in pieces of ``chunk_bytes``.

    The pieces are framed by hand, because protobuf would copy each of them twice more.
    """
    layout = layout_to_message(dataset.layout)
    header = pb.UploadHeader(layout=layout, content_id=dataset.content_id)
    yield pb.UploadVariablesRequest(header=header).SerializeToString()
    for chunk in dataset.chunks(chunk_bytes):
        yield b"".join((_DATA_TAG, varint(len(chunk)), chunk))


def open_message(file: ServerFile) -> pb.OpenDatasetRequest:
    """Encode the request of OpenDataset."""
    return pb.OpenDatasetRequest(
        name=file.name,
        x=file.x,
        y=file.y,
        weights=file.weights,
        dtype=pb.DTYPE_UNSPECIFIED if file.dtype is None else DTYPE_CODES[file.dtype],
    )


def open_request(message: pb.OpenDatasetRequest) -> ServerFile:
    """Decode the request of OpenDataset; raise InvalidArgumentError for an unknown dtype."""
    dtype = None if message.dtype == pb.DTYPE_UNSPECIFIED else _dtype(message.dtype, "dtype")
    columns = tuple(message.x), message.y, message.weights
    return ServerFile(message.name, *columns, dtype)


@decodes_answer
def opened_dataset(message: pb.DatasetInfo, file: ServerFile) -> DatasetReference:
    """Decode the answer to OpenDataset; raise InternalError if it describes other data."""
    layout = layout_from_message(message.layout)
    asked = bool(file.y), bool(file.weights), file.dtype or layout.dtype
    if (layout.has_target, layout.has_weights, layout.dtype) != asked:
        raise broken_answer("has another layout than was asked for")
    if file.x and layout.names != tuple(file.x):
        raise broken_answer("has other variables than were asked for")
    controls = {c for c in "".join(layout.names) if unicodedata.category(c) == "Cc"}
    if not file.x and controls - set("\t\r\n"):
        raise broken_answer("has names with control characters, which the file may have: give x=")
    chosen = replace(file, dtype=layout.dtype)
    return DatasetReference(layout, check_content_id(message.content_id), chosen)


@decodes_answer
def check_dataset(dataset: ClientDataset, message: pb.DatasetInfo) -> None:
    """Check the answer to a call that makes a data set resident, or finds it.

    Raises:
        InternalError: if it is about another data set.
    """
    if message.content_id != dataset.content_id:
        raise broken_answer("is about another data set")
    if layout_from_message(message.layout) != dataset.layout:
        raise broken_answer("has another layout than the data set")


def get_message(dataset: ClientDataset) -> pb.GetVariablesRequest:
    """Encode the request of GetVariables."""
    return pb.GetVariablesRequest(content_id=dataset.content_id)


def release_message(
    dataset: ClientDataset, *, everywhere: bool = False
) -> pb.ReleaseVariablesRequest:
    """Encode the request of ReleaseVariables."""
    return pb.ReleaseVariablesRequest(content_id=dataset.content_id, everywhere=everywhere)


def release_response() -> pb.ReleaseVariablesResponse:
    """Encode the answer to ReleaseVariables."""
    return pb.ReleaseVariablesResponse()


def upload_data(message: bytes) -> memoryview:
    """Return the payload bytes of a message of an upload after the first, without copying."""
    length, start = read_varint(message, 1)
    if message[:1] == _DATA_TAG and start + length == len(message):
        return memoryview(message)[start:]
    parsed = parse_message(pb.UploadVariablesRequest, message)  # other encodings of the same
    if parsed.WhichOneof("part") != "data":
        raise InvalidArgumentError(
            "a message of the upload after the first carries no data",
            "BAD_HEADER",
            "Send one header, then only messages with `data`",
            "header",
        )
    return memoryview(parsed.data)


def upload_start(data: bytes) -> tuple[Layout, bytes]:
    """Return layout and content id of the first message of an upload."""
    return upload_header(parse_message(pb.UploadVariablesRequest, data, most_fields=None))


def upload_header(message: pb.UploadVariablesRequest) -> tuple[Layout, bytes]:
    """Decode the first message of an upload, once it is parsed; see `upload_start`."""
    if message.WhichOneof("part") != "header":
        raise InvalidArgumentError(
            "the upload does not start with a header",
            "BAD_HEADER",
            "Send one message with `header` first, then messages with `data`",
            "header",
        )
    content_id = check_content_id(message.header.content_id)
    return layout_from_message(message.header.layout), content_id


def check_content_id(content_id: bytes) -> bytes:
    """Return a content id of the right length; raise InvalidArgumentError for any other length."""
    if len(content_id) != CONTENT_ID_BYTES:
        raise InvalidArgumentError(
            f"content_id has {len(content_id)} bytes, not {CONTENT_ID_BYTES}",
            "BAD_DATASET_ID",
            "Send the SHA-256 of the data set",
            "content_id",
        )
    return content_id


def dataset_info(
    content_id: bytes, layout: Layout, names: bytes = b"", lost_digits: str = ""
) -> bytes:
    """Encode the answer to UploadVariables, OpenDataset and GetVariables.

    ``names`` are what `encode_names` has made of the names of a layout that is given without them.
    """
    shape = layout_to_message(layout).SerializeToString() + names
    rest = pb.DatasetInfo(content_id=content_id, lost_digits=lost_digits).SerializeToString()
    return b"".join((rest, _LAYOUT_TAG, varint(len(shape)), shape))


# ----------------------------------------------------------------------------- requests of Evaluate

_PRECISIONS: Final = WireEnum(Precision, pb.Precision)
LOSSES: Final = WireEnum((None, *Loss), pb.Loss)
_CLOSINGS: Final = WireEnum(Closing, pb.Closing)
#: Tokens from which on a batch leaves out the values of operators: such messages are half as long,
#: but picking the values takes time, too: 4 ms for 50,000 programs, whose message then has 7.7 MB.
_LONG: Final = 1 << 16
_VECTORS_TAG: Final = varint(pb.Programs.VECTORS_FIELD_NUMBER << 3)
_PROGRAMS_TAG: Final = bytes_tag(pb.EvaluateRequest.PROGRAMS_FIELD_NUMBER)
#: Arrays of a batch: name, tag of the field and dtype.
_BATCH_ARRAYS: Final = (
    ("codes", bytes_tag(pb.Programs.CODES_FIELD_NUMBER), U8),
    ("values", bytes_tag(pb.Programs.VALUES_FIELD_NUMBER), F64),
    ("lengths", bytes_tag(pb.Programs.LENGTHS_FIELD_NUMBER), U32),
    ("parameter_counts", bytes_tag(pb.Programs.PARAMETER_COUNTS_FIELD_NUMBER), U32),
    ("parameters", bytes_tag(pb.Programs.PARAMETERS_FIELD_NUMBER), F64),
)


def evaluation_to_bytes(evaluation: Evaluation, *, pieces: bool = False) -> bytes:
    """Serialize an evaluation, whose answer may come in ``pieces``; else it is one message.

    The batch is framed by hand and appended, because protobuf would copy it three times more.
    """
    outputs = {name: True for name in FURTHER_OUTPUTS if getattr(evaluation, name)}
    message = pb.EvaluateRequest(
        content_id=evaluation.dataset_id,
        precision=_PRECISIONS.codes[evaluation.precision],
        values=evaluation.values,
        loss=LOSSES.codes[evaluation.loss],
        tier=TIERS.codes[evaluation.tier],
        pieces=pieces,
        **outputs,  # type: ignore[arg-type]
    )
    custom = evaluation.custom_loss
    if custom is not None:
        set_custom_loss(message.loss_function, custom)
    if evaluation.rows is not None:
        message.rows.start, message.rows.stop = evaluation.rows
    batch = evaluation.batch
    framed: list[Any] = [_VECTORS_TAG + varint(batch.vectors)]
    size = len(framed[0])
    for name, tag, dtype in _BATCH_ARRAYS:
        array = np.ascontiguousarray(getattr(batch, name), dtype=dtype)
        if name == "values" and len(batch.codes) == len(array) >= _LONG:
            array = array[np.flatnonzero(batch.codes < FIRST_OPERATOR)]
        if array.nbytes:
            head = tag + varint(array.nbytes)
            framed += (head, array)
            size += len(head) + array.nbytes
    return b"".join((message.SerializeToString(), _PROGRAMS_TAG, varint(size), *framed))


def evaluation_to_message(evaluation: Evaluation) -> pb.EvaluateRequest:
    """Encode an evaluation as a message, to be part of another one."""
    return pb.EvaluateRequest.FromString(evaluation_to_bytes(evaluation))


def batch_from_message(programs: pb.Programs, field: str = "programs") -> Batch:
    """Decode a batch, whose arrays are views; `Batch.check_shapes` must follow."""
    codes = unpack(programs.codes, U8, f"{field}.codes")
    values = unpack(programs.values, F64, f"{field}.values")
    if len(values) < len(codes):  # the values of operators are left out
        leaves = np.flatnonzero(codes < FIRST_OPERATOR)
        if len(leaves) == len(values):  # otherwise checks of the batch say what does not fit
            values_of_leaves, values = values, np.zeros(len(codes))
            values[leaves] = values_of_leaves
    return Batch(
        codes,
        values,
        unpack(programs.lengths, U32, f"{field}.lengths"),
        unpack(programs.parameter_counts, U32, f"{field}.parameter_counts"),
        unpack(programs.parameters, F64, f"{field}.parameters"),
        programs.vectors or 1,
    )


def set_custom_loss(message: pb.LossFunction, loss: LossFunction) -> None:
    """Encode a loss function of the caller in place."""
    message.codes = pack(loss.row.codes, U8)
    message.values = pack(loss.row.values, F64)
    message.closing = _CLOSINGS.codes[loss.closing]


def custom_loss_of(message: pb.EvaluateRequest | pb.SearchRequest) -> LossFunction | None:
    """Decode the loss function of the caller; None if the request has none."""
    if not message.HasField("loss_function"):
        return None
    custom = message.loss_function
    row = Program(
        unpack(custom.codes, U8, "loss_function.codes"),
        unpack(custom.values, F64, "loss_function.values"),
    )
    return LossFunction(row, _CLOSINGS.member(custom.closing, "loss_function.closing"))


def evaluation_from_message(
    message: pb.EvaluateRequest, dataset_id: bytes | None = None
) -> Evaluation:
    """Decode an evaluation; `Evaluation.check` must follow.

    ``dataset_id`` is the name of the data set if it is not the content id.
    """
    return Evaluation(
        dataset_id=dataset_id or check_content_id(message.content_id),
        batch=batch_from_message(message.programs),
        rows=(message.rows.start, message.rows.stop) if message.HasField("rows") else None,
        precision=_PRECISIONS.member(message.precision, "precision"),
        loss=LOSSES.member(message.loss, "loss"),
        values=message.values,
        tier=TIERS.member(message.tier, "tier"),
        custom_loss=custom_loss_of(message),
        **{name: getattr(message, name) for name in FURTHER_OUTPUTS},
    )


def evaluation_from_bytes(data: bytes) -> Evaluation:
    """Parse and decode an evaluation; `Evaluation.check` must follow."""
    return evaluation_from_message(parse_message(pb.EvaluateRequest, data))


# ------------------------------------------------------------------------------ answers of Evaluate

#: Of an answer in pieces, other arrays come whole in the last message if each has no more bytes.
_WHOLE_BYTES: Final = 64 << 10
#: Fields in the data set's dtype, which come in pieces however short they are.
_IN_PIECES: Final = tuple([output.name for output in OUTPUTS if output.is_of_data])
#: Fields of an answer with an array each, in their order.
ANSWER_ARRAYS: Final = (*_IN_PIECES, *[each.name for each in OUTPUTS if not each.is_of_data])
#: Their tags.
_TAGS: Final = {
    name: bytes_tag(pb.EvaluateResponse.DESCRIPTOR.fields_by_name[name].number)
    for name in ANSWER_ARRAYS
}


def is_whole(name: str, nbytes: int) -> bool:
    """Return whether an array of the answer comes whole in the last message."""
    return nbytes <= _WHOLE_BYTES and name not in _IN_PIECES


def is_short(evaluation: Evaluation, layout: Layout) -> bool:
    """Return whether the answer is better in one message than in pieces, as none of it is long."""
    shapes = evaluation.outputs(layout).values()
    return 8 * sum(map(math.prod, shapes)) <= _WHOLE_BYTES


@lru_cache(1 << 10)  # the batches of a search have the same shape
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
    timings: Timings,
    arrays: Mapping[str, NDArray[np.float64] | memoryview] = MappingProxyType({}),
) -> bytes:
    """Serialize the last message of an answer: timings, and the arrays that come whole."""
    message = pb.EvaluateResponse()
    set_timings(message.timings, timings)
    for name, array in arrays.items():
        setattr(message, name, bytes(array))
    return message.SerializeToString()


def set_timings(message: pb.Timings, timings: Timings) -> None:
    """Encode timings in place, because protobuf would copy a message that is part of another."""
    message.decode, message.queue = timings.decode, timings.queue
    message.copy_in, message.compute = timings.copy_in, timings.compute
    message.copy_out, message.cache_hits = timings.copy_out, timings.cache_hits
    message.device = timings.device
    message.tier = TIERS.codes[timings.tier]


@decodes_answer
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
    shapes = {output.name: shape for output, shape in evaluation.outputs(layout).items()}
    names = dict.fromkeys(("values", *shapes))
    for message in messages:
        if message.HasField("header"):
            header = message.header
            if (header.programs, header.vectors, header.rows) != evaluation.shape(layout):
                raise broken_answer("has another shape than the request")
            if header.dtype != DTYPE_CODES[layout.dtype]:
                raise broken_answer("has values of another dtype than the data set")
            for name in shapes.keys() & _IN_PIECES:
                matrices[name] = _Matrix(shapes[name], layout.dtype)
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
            last["timings"] = timings_from_message(message.timings)
    for name in _IN_PIECES:
        if name in shapes and name not in matrices:
            raise broken_answer(f"has no {name}")
    if not last:
        raise broken_answer("has no end")
    for name, matrix in matrices.items():
        last[name] = matrix.complete()
    return Result(**last)


class _Matrix:
    """A matrix whose bytes arrive in order, in pieces."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        try:
            self._array = np.empty(shape, dtype=dtype)
        except (MemoryError, ValueError) as error:
            raise errors.ResourceExhaustedError(
                f"there is no memory here for {' x '.join(map(str, shape))} values",
                "MEMORY",
                "Ask for losses, for fewer rows or for fewer expressions at once",
                needed=math.prod(shape) * dtype.itemsize,
            ) from error
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


# ----------------------------------------------------------------------------------------- Optimize

_METHODS: Final = WireEnum(Method, pb.Method)
_MISSING: Final = WireEnum(Missing, pb.Missing)
_TOLERANCES: Final = ("gradient_tolerance", "step_tolerance", "loss_tolerance")
_SWITCHES: Final = (
    *("all_starts", "standard_errors", "covariance", "partial", "progress", "curvature"),
    "absolute_sigma",
)
#: Arrays of a request, one number for each parameter of each program.
_BOUNDS: Final[Mapping[str, np.dtype[Any]]] = {"lower": F64, "upper": F64, "fixed": U8}
#: Arrays of a result.
_FIT_ARRAYS: Final[Mapping[str, np.dtype[Any]]] = {
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
        restarts=settings.restarts,
        seed=settings.seed,
        missing=_MISSING.codes[settings.missing],
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
        restarts=message.restarts,
        seed=message.seed,
        missing=_MISSING.member(message.missing, "missing"),
        **tolerances,
        **bounds,
        **{name: getattr(message, name) for name in _SWITCHES},
    )
    no_outputs: Any = dict.fromkeys(("values", *FURTHER_OUTPUTS), False)  # a fit has others
    problem = replace(evaluation_from_message(message.problem, dataset_id), **no_outputs)
    if problem.loss_function is None:
        raise InvalidArgumentError(
            "a fit needs a loss, which it minimises",
            "LOSS_MISSING",
            "Set problem.loss or problem.loss_function",
            "problem.loss",
        )
    return FitRequest(problem, settings)


def fit_from_bytes(data: bytes) -> FitRequest:
    """Parse and decode a fit; `FitRequest.check` must follow."""
    return fit_from_message(parse_message(pb.OptimizeRequest, data))


def progress_to_bytes(progress: FitProgress) -> bytes:
    """Serialize a message of an answer that carries progress."""
    return pb.OptimizeResponse(
        progress=pb.FitProgress(
            iterations=progress.iterations, active=progress.active, searches=progress.searches
        )
    ).SerializeToString()


def fit_to_bytes(result: FitResult) -> bytes:
    """Serialize the message of an answer that carries the result."""
    arrays: Any = {name: pack(getattr(result, name), dtype) for name, dtype in _FIT_ARRAYS.items()}
    message = pb.FitResult(**arrays)
    set_timings(message.timings, result.timings)
    for name in ("standard_errors", "covariances", "curvatures"):
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
    shapes = dict.fromkeys(_FIT_ARRAYS, (len(batch), vectors)) | {"parameters": (total,)}
    dtypes = dict(_FIT_ARRAYS)
    if request.settings.standard_errors:
        dtypes["standard_errors"], shapes["standard_errors"] = F64, (total,)
    if request.settings.covariance:
        dtypes["covariances"], shapes["covariances"] = F64, (squares,)
    if request.settings.curvature:
        dtypes["curvatures"], shapes["curvatures"] = F64, (squares,)
    arrays = {
        name: received_array(getattr(message, name), dtype, shapes[name], name)
        for name, dtype in dtypes.items()
    }
    if not ((arrays["reasons"] > 0) & (arrays["reasons"] <= len(REASONS))).all():
        raise broken_answer("has an unknown reason")
    if (arrays["starts"] >= request.starts).any():
        raise broken_answer("names a start that there was not")
    return FitResult(**arrays, timings=timings_from_message(message.timings))
