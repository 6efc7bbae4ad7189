"""Arithmetics: the data types and precisions with which engines compute."""

from __future__ import annotations

from enum import Enum

import numpy as np

from warpfit.request import Precision


class Arithmetic(Enum):
    """Data type and precision with which a kernel computes."""

    PRECISE = ("f32", Precision.PRECISE, np.dtype(np.float32))
    FAST = ("f32", Precision.FAST, np.dtype(np.float32))
    """Approximate functions."""
    DOUBLE = ("f64", Precision.PRECISE, np.dtype(np.float64))

    def __init__(self, type_name: str, precision: Precision, dtype: np.dtype[np.floating]) -> None:
        self.type_name = type_name
        """PTX type of the values."""
        self.precision = precision
        self.dtype = dtype

    @classmethod
    def of(cls, dtype: np.dtype[np.floating], precision: Precision) -> Arithmetic:
        """Return the arithmetic for data of ``dtype``; float64 is always precise."""
        if dtype == np.float64:
            return cls.DOUBLE
        return cls.FAST if precision is Precision.FAST else cls.PRECISE

    @property
    def is_fast(self) -> bool:
        """Return whether approximate operators are used."""
        return self is Arithmetic.FAST

    @property
    def is_single(self) -> bool:
        """Return whether the data is float32."""
        return self is not Arithmetic.DOUBLE

    @property
    def real(self) -> str:
        """C++ name of the data type."""
        return "float" if self.is_single else "double"

    @property
    def label(self) -> str:
        """Name in files, and in the tier chooser."""
        return self.name.lower() if self.is_single else "float64"
