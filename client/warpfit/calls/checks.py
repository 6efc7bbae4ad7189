"""Checks of what callers pass as keywords: names, numbers and members of enumerations."""

import difflib
import operator
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar

from warpfit.errors import InvalidArgumentError, bad_setting

E = TypeVar("E", bound=StrEnum)


def check_keywords(given: Mapping[str, Any], known: Any) -> None:
    """Check that all keywords of a call are those of a TypedDict.

    Raises:
        InvalidArgumentError: for one that is not.
    """
    for name in given.keys() - known.__optional_keys__:
        names = sorted(known.__optional_keys__)
        close = difflib.get_close_matches(name, names, n=1)
        raise InvalidArgumentError(
            f"there is no keyword {name!r}",
            "UNKNOWN_KEYWORD",
            f"Did you mean {close[0]}?" if close else f"Use {', '.join(names)}",
            name,
        )


def number(value: Any, field: str, wanted: str = "a number") -> float:
    """Return a number that a caller gave.

    Raises:
        InvalidArgumentError: if it is none, text included.
    """
    try:
        if not isinstance(value, str | bytes):
            return float(value)
    except (TypeError, ValueError):
        pass
    raise bad_setting(field, value, wanted)


def whole_number(value: Any, field: str, wanted: str = "a whole number") -> int:
    """Return an integer that a caller gave, NumPy's included.

    Raises:
        InvalidArgumentError: if it is none.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise bad_setting(field, value, wanted) from None


def member(kind: type[E], value: Any, field: str) -> E:
    """Return the member of an enumeration with this value.

    Raises:
        InvalidArgumentError: if there is none.
    """
    try:
        return kind(value)
    except ValueError:
        raise InvalidArgumentError(
            f"{field} {value!r} is not known",
            "BAD_ENUM",
            f"Use one of: {', '.join(kind)}",
            field,
        ) from None
