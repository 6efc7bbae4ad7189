"""The one door for numbers of callers: what is taken, what is refused, and why.

Arrays, frames, lists, parameters, bounds, starts and weights pass `real_numbers`; columns of Arrow
tables (`warpfit.dataset.tables`) and cells of CSV files (`warpfit.cli.table`) raise the same
errors.
"Data that are taken and refused" in client/README.md is the table.

What is missing, hidden or no real number is never replaced by a number: masked elements, None and
NA are missing values, text is no number even if it can be read as one, and an object that float64
cannot hold is refused. NaN and infinities are numbers.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, MappingView, Sequence, Set
from dataclasses import dataclass
from decimal import Decimal
from importlib import import_module
from itertools import chain
from numbers import Complex, Real
from operator import attrgetter
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from warpfit.errors import InvalidArgumentError, require

#: Types of elements of lists that NumPy makes an array of without a surprise.
_PLAIN: Final = frozenset({float, int, bool, np.float64, np.float32, np.int64, np.bool_})
#: Names of the types of pandas' missing values, which is not imported for them.
_MISSING: Final = frozenset({"NoneType", "NAType", "NaTType"})
#: Number of the processor among the devices of DLPack.
_DLPACK_CPU: Final = 1
#: Types that have a float value but are no numbers.
_NO_NUMBERS: Final = (str, bytes, np.ndarray, np.datetime64, np.timedelta64)


def real_numbers(data: Any, name: str, start: int = 0, place: str = "row") -> NDArray[Any]:
    """Convert a caller's argument to an array of real numbers, of any shape.

    Args:
        data: an array, a series or frame, nested lists, a number, or what NumPy makes an array of.
        name: of the argument or column in errors.
        start: index of the first row of ``data``, for errors.
        place: what an index along the first axis is called in errors.

    Returns:
        The numbers, of a NumPy type of booleans, integers or floats, without a copy where that is
        possible; Python's numbers and wider floats become float64.

    Raises:
        InvalidArgumentError: MISSING_VALUE for masked elements, None, NA and NaT; NOT_NUMBERS for
            text, dates, complex numbers, ragged lists and other objects; OVERFLOW for numbers that
            float64 cannot hold.
    """
    if not isinstance(data, np.ndarray | list | tuple):
        require_order(data, name)
        data = _dense_on_host(data, name)
    array = _as_array(data, name, start, place)
    for masked in (array, data):
        mask = getattr(masked, "mask", None)
        if mask is not None and np.shape(mask) == array.shape and np.any(mask):
            raise missing_value(name, start + _row(np.asarray(mask)), place)
    array = np.asarray(array)
    kind, is_wide = array.dtype.kind, array.dtype.itemsize > 8
    if kind == "O" or (kind == "f" and is_wide):
        return _from_objects(array, name, start, place)
    if array.dtype.names is not None:
        raise InvalidArgumentError(
            f"{name} is a structured array with the fields {', '.join(array.dtype.names)}",
            "NOT_NUMBERS",
            f"Give an array of one of its fields, or a table: pandas.DataFrame({name})",
            name,
        )
    if kind not in "biuf":
        text = "there is text in it, and " if kind in "SU" else ""
        raise no_numbers(name, f"{text}its dtype is {array.dtype}")
    return array


def unwrapped(data: Any) -> Any:
    """Return the element of an array without axes, which stands for it; other data as they are."""
    return data.item() if isinstance(data, np.ndarray) and data.ndim == 0 else data


def require_order(data: Any, name: str) -> None:
    """Refuse iterators, sets, dicts and views of them, which NumPy takes for a single object.

    Raises:
        InvalidArgumentError: NOT_NUMBERS, with what is taken.
    """
    is_array = hasattr(data, "__array__") or hasattr(data, "shape")  # a sparse one may be a dict
    if is_array or not isinstance(data, (Iterator, Set, Mapping, MappingView)):
        return
    remedy = f"Give an array, a table, or list({name})"
    if isinstance(data, Mapping):
        remedy = f"Give one of its arrays, or a table: pandas.DataFrame({name})"
    elif isinstance(data, Set):
        remedy = "Give an array, a list or a table, whose numbers have an order"
    raise InvalidArgumentError(
        f"{name} is a {type(data).__name__}, which is no array of numbers",
        "NOT_NUMBERS",
        remedy,
        name,
    )


def _dense_on_host(data: Any, name: str) -> Any:
    """Return an array of a device as a copy on the host, and anything else as it is.

    Devices' arrays have ``__cuda_array_interface__`` or DLPack. An InvalidArgumentError says that
    the data are sparse or not computed yet, or that they cannot be copied.
    """
    if hasattr(data, "toarray") and hasattr(data, "nnz"):
        raise InvalidArgumentError(
            f"{name} is a sparse matrix of type {type(data).__name__}",
            "SPARSE_MATRIX",
            f"Data sets are dense: give {name}.toarray()",
            name,
        )
    if hasattr(data, "collect") and hasattr(data, "lazy"):
        raise InvalidArgumentError(
            f"{name} is a {type(data).__name__}, which is not computed yet",
            "LAZY_FRAME",
            f"Compute it: give {name}.collect()",
            name,
        )
    try:
        if hasattr(data, "detach") and hasattr(data, "cpu"):  # of PyTorch
            tensor = data.detach().cpu()
            return tensor.float() if "bfloat16" in str(tensor.dtype) else tensor
        if hasattr(data, "__cuda_array_interface__"):
            for copy in ("get", "copy_to_host", "__array__"):  # of CuPy, Numba, JAX
                if hasattr(data, copy):
                    return getattr(data, copy)()
            require("cupy", "cupy-cuda12x", name)
            return import_module("cupy").asarray(data).get()
        if hasattr(data, "__dlpack__") and not hasattr(data, "__array__"):
            is_here = data.__dlpack_device__()[0] == _DLPACK_CPU
            return np.from_dlpack(data) if is_here else np.from_dlpack(data, device="cpu")
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise no_numbers(name, f"it cannot be copied to the host: {error}") from error
    return data


def _as_array(data: Any, name: str, start: int, place: str) -> NDArray[Any]:
    """Return an array, with its mask if it has one; check missing values that NumPy would hide."""
    if isinstance(data, list | tuple):
        level: Any = data
        while (kinds := set(map(type, level))) and kinds <= {list, tuple}:
            level = list(chain.from_iterable(level))
        if not kinds <= _PLAIN:
            given, data = data, []
            for row, part in enumerate(given, start):
                is_array = hasattr(part, "__array__") and not isinstance(part, np.generic)
                if is_array or isinstance(part, list | tuple):
                    try:
                        part = real_numbers(part, f"{place} {row} of {name}", place="position")
                    except InvalidArgumentError as error:
                        if error.reason == "MISSING_VALUE":
                            raise missing_value(name, row, place) from None
                        error.field = name
                        raise
                data.append(part)
    elif hasattr(data, "iloc") and data.ndim == 2:
        columns = (data.iloc[:, column] for column in range(data.shape[1]))
        arrays = [real_numbers(column, name, start, place) for column in columns]
        return np.stack(arrays, axis=1) if arrays else np.empty(data.shape)
    elif hasattr(data, "isna") and not isinstance(getattr(data, "dtype", None), np.dtype):
        # A series, index or array of pandas with a type of pandas.
        is_decimal = str(data.dtype).startswith("decimal")  # of Arrow
        if data.dtype.kind not in "biuf" and not is_decimal:
            raise no_numbers(name, f"its dtype is {data.dtype}")
        missing = np.asarray(data.isna())
        if missing.any():
            raise missing_value(name, start + _row(missing), place)
        if is_decimal:
            return np.asarray(data.to_numpy(dtype=object))
        kind = data.dtype.kind
        return np.asarray(data.to_numpy(np.dtype(f"{kind}8" if kind in "iu" else np.float64)))
    elif hasattr(data, "is_null") and hasattr(data, "null_count"):  # Arrow and Polars
        nulls = np.asarray(data.is_null())
        if nulls.any():
            raise missing_value(name, start + _row(nulls), place)
    try:
        array: NDArray[Any] = np.asanyarray(data)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise no_numbers(name, str(error)) from error
    return array


def _from_objects(array: NDArray[Any], name: str, start: int, place: str) -> NDArray[np.float64]:
    """Convert Python's objects, or floats that are wider, to float64."""
    objects = array.ravel().tolist() if array.dtype.kind == "O" else list(array.ravel())

    def row(index: int) -> int:
        return start + (int(np.unravel_index(index, array.shape)[0]) if array.ndim else 0)

    for kind in set(map(type, objects)):
        is_missing = kind.__name__ in _MISSING
        is_number = issubclass(kind, Real | Decimal | np.bool_) or (
            hasattr(kind, "__float__") and not issubclass(kind, Complex)
        )
        if is_missing or not is_number or issubclass(kind, _NO_NUMBERS):
            index = next(i for i, value in enumerate(objects) if type(value) is kind)
            if is_missing or np.ma.is_masked(objects[index]):
                raise missing_value(name, row(index), place)
            what = f"{objects[index]!r:.40} of type {kind.__name__}"
            raise no_numbers(name, f"{what} in {place} {row(index)} is no real number")
    numbers = np.empty(array.shape)
    with np.errstate(all="ignore"):
        for index, value in enumerate(objects):
            try:
                numbers.flat[index] = number = float(value)
                if np.isfinite(number):
                    fits = bool(number) == bool(value)
                else:  # infinite or NaN, and not only too large for float64
                    fits = isinstance(value, Decimal) and not value.is_finite()
                    fits = fits or not bool(value - value == 0)
            except OverflowError:  # of whole numbers and fractions
                fits = False
            except (TypeError, ValueError) as error:
                what = f"{value!r:.40} in {place} {row(index)} is no real number: {error}"
                raise no_numbers(name, what) from error
            if not fits:
                raise InvalidArgumentError(
                    f"{name} has a number in {place} {row(index)} (counted from 0) that float64 "
                    "cannot hold",
                    "OVERFLOW",
                    "Choose another unit",
                    name,
                )
    return numbers


def leaves_float64(text: str, value: float) -> bool:
    """Return whether a text says a number that float64 takes for infinite or for 0.

    Args:
        text: of a number, or of an infinity or NaN, which it means.
        value: its float64.
    """
    digits = [int(digit) for digit in text.lower().partition("e")[0] if digit.isdecimal()]
    return bool(digits) and (math.isinf(value) or (value == 0.0 and any(digits)))


def _row(wanted: NDArray[np.bool_]) -> int:
    """Return the first index along the first axis at which anything is true."""
    return int(np.unravel_index(wanted.argmax(), wanted.shape)[0]) if wanted.ndim else 0


def no_numbers(name: str, why: str) -> InvalidArgumentError:
    """Return the error for anything but real numbers."""
    return InvalidArgumentError(
        f"{name} must be real numbers: {why.rstrip('.')}",
        "NOT_NUMBERS",
        f"Convert text, dates and ragged lists in {name} to numbers first",
        name,
    )


def missing_value(name: str, row: int, place: str = "row") -> InvalidArgumentError:
    """Return the error for a cell without a value."""
    remedy = "Give a number there"
    if place == "row":
        remedy = "Leave such rows out, or fill the cell; NaN is a number and makes results NaN"
    what = f"{name} has no value in {place} {row} (counted from 0)"
    return InvalidArgumentError(what, "MISSING_VALUE", remedy, name)


# -------------------------------------------------------------------------------- parameter vectors

#: The remedy for parameters that are none.
_REMEDY: Final = "Give one vector [n] or K vectors [K, n] of numbers, [] where it has no parameters"

_FLOAT64: Final = np.dtype(np.float64)
_DTYPE, _NDIM = attrgetter("dtype"), attrgetter("ndim")


@dataclass(frozen=True, slots=True, eq=False)
class ParameterVectors:
    """The parameter vectors of all programs of a batch."""

    counts: NDArray[np.uint32]
    """Length of each program's vector; [programs]."""
    numbers: NDArray[np.float64]
    """For each program in turn its K vectors, C order [K, count]; flat."""
    count: int = 1
    """K, the number of vectors for each program."""
    leading_axis: bool = False
    """Whether a caller gave K vectors [K, n] for a program, so that answers have an axis of K."""

    @classmethod
    def of(cls, programs: int, entries: Sequence[ArrayLike] | None) -> ParameterVectors:
        """Take one vector [n] or K vectors [K, n] for each program; None gives none to any.

        Raises:
            InvalidArgumentError: if the number of entries is not the number of programs, if K
                differs between programs, or if an entry is no array of numbers.
        """
        if entries is None or len(entries) == programs == 0:
            return cls(np.zeros(programs, dtype=np.uint32), np.empty(0))
        if len(entries) != programs:
            raise InvalidArgumentError(
                f"{len(entries)} parameter entries for {programs} programs",
                "LENGTH_MISMATCH",
                "Give one vector [n] or K vectors [K, n] for each program, [] where it has none",
                "parameters",
            )
        if (joined := join_vectors(entries)) is not None:
            return joined
        arrays = [float_array(entry, index) for index, entry in enumerate(entries)]
        dimensions = {array.ndim for array in arrays}
        if dimensions == {1}:
            return cls(np.array(list(map(len, arrays)), np.uint32), np.concatenate(arrays))
        vectors = {array.shape[0] for array in arrays if array.ndim == 2}
        if len(vectors) != 1:
            raise InvalidArgumentError(
                f"parameter entries disagree about the number of vectors: {sorted(vectors)}",
                "VECTOR_MISMATCH",
                "Give each program one vector [n], or the same number K of vectors [K, n]",
                "parameters",
            )
        k = vectors.pop()
        blocks = [a if a.ndim == 2 else a.reshape(1, -1).repeat(k, axis=0) for a in arrays]
        return cls(
            np.array([block.shape[1] for block in blocks], np.uint32),
            np.concatenate([block.ravel() for block in blocks]),
            k,
            leading_axis=True,
        )


def join_vectors(entries: Sequence[ArrayLike]) -> ParameterVectors | None:
    """Join the entries in one step if each is one plain vector [n]; else return None."""
    try:
        # First, because so quick a pass has the cache fetch many arrays at a time.
        counts = list(map(len, entries))  # type: ignore[arg-type]
        kinds = set(map(type, entries))
        if kinds == {np.ndarray} and set(map(_DTYPE, entries)) == {_FLOAT64}:
            if set(map(_NDIM, entries)) != {1}:
                return None
            # A third of the time of np.concatenate.
            numbers = np.frombuffer(bytearray().join(entries))  # type: ignore[arg-type]
        else:
            lists: list[Any] = [entry for entry in entries if isinstance(entry, list)]
            elements = set(map(type, chain.from_iterable(lists)))
            # An array of one number in a list would pass for a number.
            if not (kinds <= {list, np.ndarray} and elements <= {float, int, bool, np.float64}):
                return None
            if kinds == {list}:
                # Half of the time that NumPy takes to make an array of each list.
                numbers = np.fromiter(chain.from_iterable(lists), np.float64)
            else:
                numbers = np.concatenate(entries, dtype=np.float64)
    except (TypeError, ValueError, OverflowError, BufferError):
        return None
    if numbers.ndim != 1 or sum(counts) != len(numbers):
        return None
    return ParameterVectors(lengths_array(counts), numbers)


def lengths_array(lengths: Iterable[int]) -> NDArray[np.uint32]:
    """Return lengths below 2**32 as an array, in a third of the time that NumPy takes."""
    return np.frombuffer(array("I", lengths), np.uint32)


def float_array(entry: ArrayLike, index: int | None = None) -> NDArray[np.float64]:
    """Return the parameter vector [n] or vectors [K, n] of the expression of this index."""
    try:
        array = real_numbers(entry, "parameters", place="position")
    except InvalidArgumentError as error:
        error.expression, error.remedy = index, _REMEDY
        raise
    if array.ndim in (1, 2):
        return array.astype(np.float64, copy=False)
    raise InvalidArgumentError(
        f"the parameters of an expression are no vector of numbers: {entry!r}",
        "VECTOR_MISMATCH",
        _REMEDY,
        "parameters",
        expression=index,
    )
