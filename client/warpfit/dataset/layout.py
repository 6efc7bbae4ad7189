"""The shape of a data set, and the header that is hashed before its numbers."""

import struct
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike

from warpfit.errors import InvalidArgumentError

_MAGIC: Final = b"warpfit.dataset.v1\n"
#: Wire code of each dtype.
DTYPES: Final[dict[int, np.dtype[Any]]] = {1: np.dtype("<f4"), 2: np.dtype("<f8")}
DTYPE_CODES: Final[dict[np.dtype[Any], Any]] = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape of a data set: everything about it but the numbers."""

    dtype: np.dtype[Any]
    """float32 or float64, little-endian."""
    variables: int
    rows: int
    has_target: bool = False
    has_weights: bool = False
    names: tuple[str, ...] = ()
    """Variable names, one for each variable, or empty."""

    @property
    def columns(self) -> int:
        """Number of columns of the payload: variables, target and weights."""
        return self.variables + self.has_target + self.has_weights

    @property
    def column_names(self) -> list[str]:
        """Names of the columns in errors: variables without names are x1, x2, ..."""
        variables = self.names or [f"x{number}" for number in range(1, self.variables + 1)]
        return [*variables, *["y"] * self.has_target, *["weights"] * self.has_weights]

    @property
    def nbytes(self) -> int:
        """Size of the payload in bytes."""
        return self.columns * self.rows * self.dtype.itemsize

    def header(self) -> bytes:
        """Return the bytes that are hashed before the payload; see UploadHeader in the contract."""
        encoded = [name.encode() for name in self.names]
        kind = DTYPE_CODES[self.dtype], self.has_target, self.has_weights
        numbers = struct.pack("<BBBQQI", *kind, self.variables, self.rows, len(encoded))
        return b"".join(
            [_MAGIC, numbers, *(struct.pack("<I", len(name)) + name for name in encoded)]
        )

    def check(self) -> None:
        """Check that there are rows, variables, and names that fit."""
        for count, what in ((self.rows, "rows"), (self.variables, "variables")):
            if count < 1:
                raise InvalidArgumentError(
                    f"the data set has {count} {what}",
                    "EMPTY_DATASET",
                    "Send at least one row and one variable",
                    what,
                )
        if self.names and len(self.names) != self.variables:
            raise InvalidArgumentError(
                f"{len(self.names)} names for {self.variables} variables",
                "NAME_MISMATCH",
                "Name every variable, or none",
                "names",
            )
        if len(set(self.names)) != len(self.names):
            raise InvalidArgumentError(
                "variable names repeat", "NAME_MISMATCH", "Give each a name of its own", "names"
            )


def canonical_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """Return the little-endian dtype of a data set; raise InvalidArgumentError for any other."""
    try:
        canonical = np.dtype(dtype).newbyteorder("<")
    except TypeError:
        canonical = np.dtype(object)
    if canonical not in DTYPE_CODES:
        raise InvalidArgumentError(
            f"dtype {dtype} is not supported",
            "BAD_DTYPE",
            "Use float32, float64 or auto",
            "dtype",
        )
    return canonical
