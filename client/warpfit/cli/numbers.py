"""Readers of numbers in arguments, whose errors say what is wanted."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Final

from warpfit.cli.table import cell_number

#: Most seconds, or days, of anything: 31 years, below what clocks and threads can wait for.
MOST_SECONDS: Final = 1e9


def number(text: str) -> float:
    """Read a number as one of a table."""
    try:
        return cell_number(text.strip())
    except ValueError as error:
        raise ArgumentTypeError(f"{text.strip()!r} is no number") from error


def amount(text: str) -> float:
    """Read a number that is not negative."""
    value = number(text)
    if not 0.0 <= value < math.inf:
        raise ArgumentTypeError(f"{text.strip()!r} is no number from 0")
    return value


def seconds(text: str) -> float:
    """Read a time that is not 0."""
    value = number(text)
    if not 0.0 < value <= MOST_SECONDS:
        raise ArgumentTypeError(f"{text.strip()!r} is no time from above 0 to {MOST_SECONDS:g}")
    return value


def whole_from(least: int) -> Callable[[str], int]:
    """Return a reader of whole numbers from ``least``, and below 2^31."""

    def read(text: str) -> int:
        value = number(text)
        if not (value.is_integer() and least <= value < 2**31):
            raise ArgumentTypeError(f"{text.strip()!r} is no whole number from {least}")
        return int(value)

    return read
