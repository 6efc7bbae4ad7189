"""The compiled code of the fit methods, which engines compile and load with their derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numba
import numpy as np
from numba import types

from warpfit_server.engine.fit import (
    bfgs,
    levenberg_marquardt,
    linear_model,
    separable,
    starts,
    triangles,
)
from warpfit_server.engine.fit.searches import SearchLimits
from warpfit_server.engine.native import numba_cache

_NUMBERS, _ROWS, _COUNTS = types.float64[::1], types.float64[:, ::1], types.int64[:, ::1]
_LIMITS: Final = numba.typeof(SearchLimits(0.0, 0.0, 0.0, 0, False, 0.0, 0.0, 0.0, True, False))
_SPACE: Final = numba.typeof(linear_model.workspace(1, np.zeros(1, dtype=np.uint8)))
#: Arguments of both methods: the state of the searches, and the results of a pass.
_STATE: Final = _COUNTS, _ROWS, _ROWS, _COUNTS, *[_NUMBERS] * 4


def load() -> None:
    """Load the code of all methods, or compile it."""
    numba_cache.load(
        levenberg_marquardt.advance, types.void(*_STATE, _NUMBERS, types.boolean, _LIMITS, _SPACE)
    )
    codes = types.Array(types.uint8, 1, "C", readonly=True)
    values = types.Array(types.float64, 1, "C", readonly=True)
    flag = types.uint8[::1]
    found = _ROWS, _ROWS, values, values, types.int64[::1], _ROWS, _NUMBERS, _NUMBERS
    numba_cache.load(triangles.absorb, types.void(*found, flag))
    places = types.int64[::1]
    mark_linear = types.void(codes, values, places, places, _COUNTS, _COUNTS, _NUMBERS)
    numba_cache.load(separable.mark_linear, mark_linear)
    starts.load()
    flags = types.boolean, types.boolean
    numba_cache.load(bfgs.advance, types.void(*_STATE, *flags, _LIMITS, _SPACE))


#: What other processes compile: seconds that it takes, and what loads it. The methods share most
#: functions, which one process types and lowers once.
PARTS: Final[dict[str, tuple[float, Callable[[], None]]]] = {"fits": (7.0, load)}
