"""Functions that compiled code calls, and that generate LLVM instructions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from numba.extending import intrinsic


def compiled_intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let compiled code call a function that generates LLVM instructions."""
    return cast(Callable[..., Any], intrinsic(function))
