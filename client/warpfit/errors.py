"""The exceptions of the client and the server, and the gRPC status of each.

::

    WarpfitError
    ├── InvalidArgumentError        what the caller sent is wrong
    │   ├── ProgramError            ... in one token of one expression
    │   └── ParseError              ... in the text of one expression (never leaves the client)
    ├── DatasetNotFoundError        the data set is not resident (the client re-uploads by itself)
    ├── ResourceExhaustedError      over a limit, out of memory, or busy (the client waits)
    ├── UnavailableError            the engine is starting or restarting; retry
    ├── DeadlineExceededError       the deadline passed before the answer was ready
    ├── CancelledError              the caller cancelled
    ├── UnauthenticatedError        no valid credentials
    ├── UnimplementedError          this server or its engine cannot do it
    ├── PermissionDeniedError       valid credentials, not allowed
    ├── FailedPreconditionError     the server will not do it again: it has crashed the engine
    └── InternalError               a bug of warpfit
"""

import difflib
from collections.abc import Callable, Iterable, KeysView, Mapping, Set
from dataclasses import dataclass, fields
from functools import wraps
from importlib.util import find_spec
from inspect import signature
from itertools import islice
from typing import Any, ClassVar, Final, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

#: Largest size of each text in bytes. An error travels in trailing metadata, which contain its
#: texts up to four times, encoded; gRPC drops a call whose metadata are larger than 8 KiB.
_MOST_BYTES: Final = {"message": 480, "remedy": 240, "field": 128, "reason": 64}
#: Most names that one is compared with: a table may have many columns.
_MOST_COMPARED: Final = 2_000
#: Least similarity, as difflib has it, of a slip and the word that is meant: below it words such as
#: params and partial, or cosine and cospi, are taken for each other.
_SIMILAR: Final = 0.75
#: Most characters of a list of names in a remedy, which has room for little more.
_MOST_LISTED: Final = 170
#: Name of the metadata entry with the id of a call, in the request and in every answer.
REQUEST_ID_KEY: Final = "x-request-id"
#: The class to raise for each gRPC status name; any other status becomes InternalError.
BY_STATUS: Final[dict[str, "type[WarpfitError]"]] = {}


@dataclass(eq=False)
class WarpfitError(Exception):
    """Base of all errors that warpfit raises on purpose.

    ``str(error)`` names what is wrong, the place and the remedy.
    """

    message: str
    """The message: one sentence without a full stop."""
    reason: str = ""
    """Stable upper-case identifier such as ``STACK_UNDERFLOW``; programs may test it."""
    remedy: str = ""
    """The remedy."""
    field: str = ""
    """Field of the request or argument of the call that is wrong."""
    expression: int | None = None
    """Index of the expression in the batch, from 0."""
    token: int | None = None
    """Index of the token in that expression, from 0."""
    needed: int | None = None
    """Amount that the request needs (bytes unless the message says otherwise)."""
    available: int | None = None
    """Amount that is available, or the limit."""
    retry_after: float | None = None
    """Seconds after which the server wants the call repeated; None where repeating cannot help."""
    request_id: str = ""
    """Id of the call that failed, as the server's log has it; empty if no server was asked."""

    status: ClassVar[str] = "INTERNAL"
    """Name of the gRPC status code."""

    def __init_subclass__(cls, status: str = "") -> None:
        """Take the gRPC status of a class; its subclasses have the same."""
        if status:
            cls.status = status
            BY_STATUS[status] = cls

    def __post_init__(self) -> None:
        """Cut long texts, because an error must fit into gRPC's metadata, and escape surrogates."""
        for name, most in _MOST_BYTES.items():
            encoded = getattr(self, name).encode(errors="backslashreplace")
            setattr(self, name, encoded.decode())
            if len(encoded) > most:
                setattr(self, name, encoded[: most - 3].decode(errors="ignore") + "...")

    def __str__(self) -> str:
        """Return message, place and remedy in one line."""
        place = [
            f"{name} {value}"
            for name, value in (("expression", self.expression), ("token", self.token))
            if value is not None
        ]
        where = f" ({', '.join(place)})" if place else ""
        remedy = f". {self.remedy}" if self.remedy else ""
        return f"{self.message}{where}{remedy}"

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle all fields; the default of exceptions pickles the message alone."""
        return type(self), tuple(getattr(self, field.name) for field in fields(self))


class InvalidArgumentError(WarpfitError, status="INVALID_ARGUMENT"):
    """The request is wrong; repeating the call cannot help."""


@dataclass(eq=False)
class _PlacedError(InvalidArgumentError):
    """An error in the text of an expression; ``str`` shows the place with a caret."""

    text: str = ""
    """The whole text."""
    position: int | None = None
    """Index of the character where it went wrong, from 0."""

    def __str__(self) -> str:
        """Return message, place and remedy, then the text around the place and a caret below it."""
        summary = super().__str__()
        if self.position is None:
            return summary
        start = max(0, self.position - 50)
        excerpt = self.text[start : self.position + 30]
        line = "".join(character if character.isprintable() else " " for character in excerpt)
        return f"{summary}\n    {line}\n    {' ' * (self.position - start)}^"


class ProgramError(_PlacedError):
    """A program of the batch is malformed; ``expression`` and ``token`` say where.

    A client adds the text of the program, so that ``str`` shows the place with a caret.
    """


class ParseError(_PlacedError):
    """The text of an expression cannot be parsed; ``str`` shows the place with a caret."""


@dataclass(eq=False)
class DatasetNotFoundError(WarpfitError, status="NOT_FOUND"):
    """The data set is not resident on the server."""

    message: str = "the data set is not resident"
    reason: str = "DATASET_NOT_FOUND"
    remedy: str = "Upload it (again) with UploadVariables, then repeat the call"
    field: str = "content_id"


class ResourceExhaustedError(WarpfitError, status="RESOURCE_EXHAUSTED"):
    """A limit is exceeded or memory is short; ``needed`` and ``available`` say by how much.

    With ``retry_after`` the server is busy; the client waits that long and repeats the call as its
    retry policy allows.
    """


class UnavailableError(WarpfitError, status="UNAVAILABLE"):
    """The server cannot answer now; a retry after a short wait is safe and likely to succeed."""


class DeadlineExceededError(WarpfitError, status="DEADLINE_EXCEEDED"):
    """The deadline of the call passed before the answer was ready."""


class CancelledError(WarpfitError, status="CANCELLED"):
    """The caller cancelled the call."""


class UnauthenticatedError(WarpfitError, status="UNAUTHENTICATED"):
    """The call carries no valid credentials."""


class PermissionDeniedError(WarpfitError, status="PERMISSION_DENIED"):
    """The caller is known but not allowed to do this."""


class UnimplementedError(WarpfitError, status="UNIMPLEMENTED"):
    """The server, or its engine, does not support the request."""


class FailedPreconditionError(WarpfitError, status="FAILED_PRECONDITION"):
    """The server will not do this, because it has crashed the engine before.

    Repeating the call cannot help before the server forgets, after an hour or when it restarts.
    """


class InternalError(WarpfitError, status="INTERNAL"):
    """A bug of warpfit; the server's log has the details."""


def require(module: str, package: str, field: str = "") -> None:
    """Check that an optional dependency is installed.

    Args:
        module: what will be imported.
        package: what pip installs it with.
        field: argument of the call that needs it.

    Raises:
        InvalidArgumentError: if it is not.
    """
    if find_spec(module) is None:
        raise InvalidArgumentError(
            f"this needs {module}, which is not installed",
            "MISSING_PACKAGE",
            f"Install it: pip install '{package}'",
            field,
        )


def bad_setting(field: str, value: object, wanted: str) -> InvalidArgumentError:
    """Return the error for a setting that makes no sense."""
    return InvalidArgumentError(f"{field} is {value!r}", "BAD_SETTING", f"Give {wanted}", field)


def did_you_mean(name: object, known: Iterable[object], otherwise: str, suffix: str = "") -> str:
    """Return the remedy for a name that is not known: the one that was meant, if one is similar.

    Args:
        name: the name that was given.
        known: the names that there are.
        otherwise: the remedy where none is similar.
        suffix: text behind a name, such as "=" behind keywords.
    """
    close = similar(name, known)
    return f"Did you mean {close[0]}{suffix}?" if close else otherwise


def similar(
    name: object, known: Iterable[object], most: int = 1, least: float = _SIMILAR
) -> list[str]:
    """Return the closest known names, at most so many, of a least similarity from 0 to 1.

    One that begins with the name, as a longer word does with a shortened one, comes first.
    """
    by_letters: dict[str, str] = {}
    for one in islice(known, _MOST_COMPARED):
        by_letters.setdefault(str(one).lower(), str(one))
    given = str(name)[:100].lower()
    longer = [one for one in by_letters if len(given) > 3 and one.startswith(given)]
    close = [*longer[:1], *difflib.get_close_matches(given, by_letters, most, least)]
    return [by_letters[each] for each in dict.fromkeys(close)][:most]


def nearest_first(name: object, known: Iterable[object]) -> str:
    """Return a list of names for a remedy; if not all have room, those most like ``name``."""
    names = list(map(str, islice(known, _MOST_COMPARED)))
    if len(listed := ", ".join(names)) <= _MOST_LISTED:
        return listed
    listed = ", ".join(similar(name, names, _MOST_COMPARED, 0.0))
    return f"{listed[:_MOST_LISTED].rpartition(', ')[0]}, ..."


def unknown_keyword(
    name: str, known: Iterable[str], remedy: str | None, otherwise: str = ""
) -> InvalidArgumentError:
    """Return the error for a keyword that a call has not, with a remedy or those that it has."""
    names = list(known)
    usual = did_you_mean(name, names, otherwise or f"Use {nearest_first(name, names)}", "=")
    what = f"there is no keyword {name!r}"
    return InvalidArgumentError(what, "UNKNOWN_KEYWORD", remedy or usual, name)


def explains_keywords(otherwise: str = "", **words: str) -> Callable[[F], F]:
    """Have a function refuse a keyword that it has not, as the methods of clients do.

    ``words`` are remedies for keywords of other packages, and ``otherwise`` is that for others.
    """

    def decorate(function: F) -> F:
        known = [name for name in signature(function).parameters if name != "self"]

        @wraps(function)
        def checked(*arguments: Any, **keywords: Any) -> Any:
            for name in keywords:
                if name not in known:
                    raise unknown_keyword(name, known, words.get(name), otherwise)
            return function(*arguments, **keywords)

        return cast(F, checked)

    return decorate


def no_attribute(
    owner: str, name: str, known: Iterable[str], words: Mapping[str, str] | None = None
) -> AttributeError:
    """Return the error for an attribute that there is not: what is meant, or what to use.

    Args:
        owner: name of the class.
        name: the attribute.
        known: the names that there are; private ones are left out.
        words: what to use instead of names of other packages.
    """
    message = f"{owner!r} object has no attribute {name!r}"
    if name in (words or {}):
        return attribute_error(message, f"Use {(words or {})[name]}")
    remedy = did_you_mean(name, [one for one in known if not one.startswith("_")], "")
    return attribute_error(message, remedy if name[0] != "_" else "")


def attribute_error(message: str, remedy: str) -> AttributeError:
    """Return an error to which Python adds no guess of its own, as it does without an object."""
    return AttributeError(f"{message}. {remedy}" if remedy else message, obj=message)


def list_of_texts(
    given: Iterable[str], field: str = "names", reason: str = "BAD_SETTING"
) -> tuple[str, ...]:
    """Return several texts in their order.

    Raises:
        InvalidArgumentError: for one text, whose letters it would mean, for sets and dicts, whose
            order is not that of the columns, and for what are no texts.
    """
    wanted = f"a list, such as [{given!r}]" if isinstance(given, str) else "a list of texts"
    is_unordered = isinstance(given, Set | Mapping) and not isinstance(given, KeysView)
    has_order = not (is_unordered or isinstance(given, str)) and getattr(given, "ndim", 1) == 1
    found = tuple(given) if has_order and isinstance(given, Iterable) else None
    if found is None or not all(issubclass(kind, str) for kind in set(map(type, found))):
        shown = repr(given)
        shown = shown if len(shown) < 100 else f"{shown[:97]}..."
        raise InvalidArgumentError(f"{field} is {shown}", reason, f"Give {wanted}", field)
    return found


def check_encodable(text: str, what: str, field: str) -> None:
    """Raise InvalidArgumentError for a text with a lone surrogate, which UTF-8 cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(
            f"{what} {text[:80]!a} has half a character at {error.start}",
            "BAD_TEXT",
            "Give text that UTF-8 can hold: it may have been decoded with errors='surrogateescape'",
            field,
        ) from error
