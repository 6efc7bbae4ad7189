"""Marks functions that compiled code may call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba.extending import register_jitable

_Function = TypeVar("_Function", bound=Callable[..., Any])


def jitable(function: _Function) -> _Function:
    """Let Numba compile ``function`` where compiled code calls it; keep its type."""
    return cast(_Function, register_jitable(function))
