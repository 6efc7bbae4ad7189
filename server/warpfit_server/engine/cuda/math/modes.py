"""Modes of arithmetic: data type and precision of a kernel."""

from __future__ import annotations

from enum import Enum
from typing import Final

import numpy as np

from warpfit.request import Precision

#: Compiler options. Contraction to multiply-add would change precise results.
NVRTC_PRECISE: Final = ("--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
NVRTC_FAST: Final = ("--fmad=true", "--ftz=true", "--prec-div=false", "--prec-sqrt=false")


class Mode(Enum):
    """Data type and precision with which a kernel computes."""

    PRECISE = ("f32", Precision.PRECISE, np.dtype(np.float32))
    FAST = ("f32", Precision.FAST, np.dtype(np.float32))
    DOUBLE = ("f64", Precision.PRECISE, np.dtype(np.float64))

    def __init__(self, type_name: str, precision: Precision, dtype: np.dtype[np.floating]) -> None:
        self.type_name = type_name
        """PTX type of the values."""
        self.precision = precision
        self.dtype = dtype

    @classmethod
    def of(cls, dtype: np.dtype[np.floating], precision: Precision) -> Mode:
        """Return the mode for data of ``dtype``; float64 is always precise."""
        if dtype == np.float64:
            return cls.DOUBLE
        return cls.FAST if precision is Precision.FAST else cls.PRECISE

    @property
    def is_fast(self) -> bool:
        """Return whether approximate operators are used."""
        return self is Mode.FAST

    @property
    def real(self) -> str:
        """CUDA C++ name of the data type."""
        return "double" if self is Mode.DOUBLE else "float"

    @property
    def label(self) -> str:
        """Name of the mode in the tier chooser and in its file of costs."""
        return "float64" if self is Mode.DOUBLE else self.name.lower()

    @property
    def kind(self) -> str:
        """Register class of a value in PTX."""
        return "d" if self is Mode.DOUBLE else "r"

    @property
    def compiler_options(self) -> tuple[str, ...]:
        """NVRTC options for `prelude.operator_source`."""
        return NVRTC_FAST if self.is_fast else NVRTC_PRECISE


#: Token-rows of a launch for each multiprocessor: about 2 ms of an H200.
_TOKEN_ROWS: Final = {Mode.FAST: 180_000_000, Mode.PRECISE: 90_000_000, Mode.DOUBLE: 45_000_000}


def max_token_rows(mode: Mode, multiprocessors: int) -> int:
    """Return the most token-rows of one launch of compiled kernels.

    A device runs launches in the order in which it gets them, so large work is launched in pieces,
    between which other evaluations get their turn.
    """
    return _TOKEN_ROWS[mode] * multiprocessors


def max_interpreted_token_rows(mode: Mode, multiprocessors: int) -> int:
    """Return the most token-rows of one launch of an interpreter.

    It runs at half the rate of compiled kernels.
    """
    return max_token_rows(mode, multiprocessors) // 2
