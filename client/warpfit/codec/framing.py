"""Helpers of all conversions: parsing, enumerations, arrays, framing by hand."""

from collections.abc import Callable, Iterable
from enum import StrEnum
from functools import lru_cache, wraps
from typing import Any, Final, Generic, ParamSpec, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message
from numpy.typing import DTypeLike, NDArray

from warpfit.errors import InternalError, InvalidArgumentError
from warpfit.request import Tier
from warpfit.v1 import evaluator_pb2 as pb

E = TypeVar("E", bound=StrEnum | None)
M = TypeVar("M", bound=Message)
T = TypeVar("T")
P = ParamSpec("P")

#: Numbers in messages, little-endian.
U8: Final = np.dtype("u1")
U32: Final = np.dtype("<u4")
F64: Final = np.dtype("<f8")

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
        return cls.FromString(data)
    except DecodeError as error:
        raise _malformed(kind.full_name) from error


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
    size = dtype.itemsize
    if len(data) % size:
        raise InvalidArgumentError(
            f"{field} has {len(data)} bytes, not a multiple of {size}",
            "LENGTH_MISMATCH",
            f"Pack {size}-byte little-endian numbers without padding",
            field,
        )
    return np.frombuffer(data, dtype=dtype)


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
