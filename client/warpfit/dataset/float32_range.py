"""Warnings of expressions that float32 data cannot be evaluated with, by the name of what is lost.

A constant such as 1e39 is infinite in float32, Planck's constant to the fourth power is 0, and
``exp(100*x1)/exp(99*x1)`` is NaN at 1. They are looked for where they are likely: in expressions
with numbers far from 1, and in those whose results are not finite or whose fit could not begin.
Such an expression is evaluated here on a few rows in both types.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset.canonical import ClientDataset, Dataset
from warpfit.dataset.checks import PrecisionWarning, caller_level
from warpfit.expressions.language import to_text
from warpfit.ir import Batch, Program
from warpfit.ops import CONSTANT, PARAMETER, VARIABLE, Operator

#: Numbers above this size, or below its inverse, are worth a look.
_FAR: Final = 1e10
#: Most expressions of a call that are looked at, and most rows.
EXPRESSIONS: Final = 10
_ROWS: Final = 200
#: Relative error that other roundings of float32 do not reach where nothing cancels.
_WRONG: Final = 1e-2
_LARGEST: Final = float(np.finfo(np.float32).max)
_LEAST: Final = float(np.finfo(np.float32).tiny)


def suspects_of(values: NDArray[Any] | None, losses: NDArray[np.float64] | None) -> list[int]:
    """Return the indices of expressions with a loss, or a value among a few, that is not finite.

    Args:
        values: [programs, vectors, rows], or None.
        losses: [programs, vectors], or None.
    """
    odd: Any = False
    # Most often all are finite, which one pass over them shows.
    if losses is not None and np.count_nonzero(finite := np.isfinite(losses)) < losses.size:
        odd = ~finite.all(axis=1)
    if values is not None:
        step = -(-values.shape[2] // _ROWS)
        odd = odd | ~np.isfinite(values[:, :, ::step]).all(axis=(1, 2))
    return [] if odd is False else np.flatnonzero(odd).tolist()


def warn_of_range(batch: Batch, dataset: ClientDataset, suspects: Sequence[int] = ()) -> bool:
    """Warn of the first expression whose results are wrong because numbers leave float32's range.

    Those with a number far from 1 are looked at, and the suspects.

    Args:
        batch: of a call.
        dataset: one of float64 is passed over.
        suspects: indices of expressions.

    Returns:
        Whether there was such an expression.
    """
    layout = dataset.layout
    if layout.dtype.itemsize > 4:
        return False
    looked = list(dict.fromkeys([*_with_far_numbers(batch), *suspects]))[:EXPRESSIONS]
    if not looked:
        return False
    rows = np.zeros((layout.variables, 0))
    if isinstance(dataset, Dataset):  # of others a few rows take a pass over all
        step = -(-layout.rows // _ROWS)
        rows = dataset.every(step)[: layout.variables].astype(np.float64)
    for index in looked:
        for vector in batch.program_parameters(index)[:1]:
            found = _first_lost(batch.program(index), vector, rows)
            if found is not None:
                part, size = found
                warnings.warn(
                    f"float32 cannot hold {to_text(part, layout.names)} of expression {index}, "
                    f"which reaches {size:.3g}: its results are wrong. Upload with "
                    'dtype="float64", or choose other units',
                    PrecisionWarning,
                    stacklevel=caller_level(),
                )
                return True
    return False


def _with_far_numbers(batch: Batch) -> list[int]:
    """Return the indices of expressions with a constant or a parameter far from 1."""
    found: set[int] = set()
    for numbers, starts in ((batch.values, "starts"), (batch.parameters, "parameter_starts")):
        sizes = np.abs(numbers)
        is_far = (sizes > _FAR) | ((sizes < 1.0 / _FAR) & (sizes > 0.0))
        if np.count_nonzero(is_far):  # none usually: indices, which are values too, are near
            is_far &= sizes < np.inf
            if numbers is batch.values:
                is_far &= batch.codes == CONSTANT
            (places,) = is_far.nonzero()
            found |= set((np.searchsorted(getattr(batch, starts), places, "right") - 1).tolist())
    return sorted(found)


def _first_lost(
    program: Program, parameters: NDArray[np.float64], rows: NDArray[np.float64]
) -> tuple[Program, float] | None:
    """Return the first part of a program that float32 cannot hold, and its size.

    It is None unless the program's result is wrong for it, in a row where it has a value.
    """
    count = max(1, rows.shape[1])
    lost: list[tuple[Program, NDArray[np.bool_], NDArray[np.float64]]] = []

    def note(part: Program, exact: Any, single: Any) -> Any:
        exact = np.broadcast_to(np.asarray(exact, np.float64), (count,))
        sizes = np.abs(exact)
        beyond = np.isfinite(exact) & ((sizes > _LARGEST) | ((sizes < _LEAST) & (sizes > 0.0)))
        if beyond.any():
            lost.append((part, beyond, sizes))
        return part, exact, np.broadcast_to(np.asarray(single, np.float32), (count,))

    def leaf(code: int, value: float) -> Any:
        part = Program([code], [value])
        if code == VARIABLE:
            if not rows.shape[1]:  # no row is known, and constants alone are looked at
                return note(part, np.nan, np.nan)
            return note(part, rows[int(value)], rows[int(value)])
        number = parameters[int(value)] if code == PARAMETER else value
        return note(part, number, number)

    def operator(row: Operator, operands: list[Any]) -> Any:
        parts, exact, single = zip(*operands, strict=True)
        return note(Program.apply(row, *parts), row.numpy(*exact), row.numpy(*single))

    with np.errstate(all="ignore"):
        _, exact, single = program.fold(leaf, operator)
        error = np.abs(single.astype(np.float64) - exact)
        is_wrong = np.isfinite(exact) & ~(error <= _WRONG * np.abs(exact))
    if not rows.shape[1]:
        is_wrong = np.ones(count, np.bool_)
    for part, beyond, sizes in lost:
        if (beyond & is_wrong).any():
            return part, float(sizes[beyond & is_wrong][0])
    return None
