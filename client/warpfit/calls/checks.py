"""Checks of what callers pass as keywords: names, numbers and members of enumerations."""

import difflib
import operator
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar

from warpfit.errors import InvalidArgumentError, bad_setting
from warpfit.expressions.real_numbers import real_numbers

E = TypeVar("E", bound=StrEnum)


def check_keywords(given: Mapping[str, Any], known: Any) -> None:
    """Check that all keywords of a call are those of a TypedDict."""
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
    """Return a number that a caller gave; raise InvalidArgumentError for text and other things."""
    try:
        array = real_numbers(value, field)
    except InvalidArgumentError:
        raise bad_setting(field, value, wanted) from None
    if array.size != 1:
        raise bad_setting(field, value, wanted)
    return float(array.item())


def whole_number(value: Any, field: str, wanted: str = "a whole number") -> int:
    """Return an integer that a caller gave, NumPy's included; raise InvalidArgumentError if not."""
    try:
        return operator.index(value)
    except TypeError:
        raise bad_setting(field, value, wanted) from None


def member(kind: type[E], value: Any, field: str) -> E:
    """Return the member of an enumeration; raise InvalidArgumentError for an unknown value."""
    try:
        return kind(value)
    except ValueError:
        known = f"Use one of: {', '.join(kind)}"
        what = f"{field} {value!r} is not known"
        raise InvalidArgumentError(what, "BAD_ENUM", known, field) from None
