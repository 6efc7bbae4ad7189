"""All pairs of formulas by least squares, one pair after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def plain_errors(
    target: Floats,
    weights: Floats,
    base: Floats,
    left: NDArray[Any],
    right: NDArray[Any],
    *,
    is_product: bool,
    beside: bool = True,
) -> Floats:
    """Return the error of each pair; infinite for what hardly varies beside the others.

    It is infinite, too, if u alone explains the target.

    Args:
        target: [rows].
        weights: [rows], with sum 1.
        base: formulas that are fitted beside each pair, [formulas, rows].
        left: values of u, [left, rows].
        right: values of v, [right, rows].
        is_product: whether pairs are a + c u + b u v, or a + c u + b v.
        beside: whether c u is there.
    """
    roots, errors = np.sqrt(weights), np.full((len(left), len(right)), np.inf)
    for i, u in enumerate(left.astype(float)):
        basis = [np.ones_like(u), *base, *([u] if beside or not is_product else [])]
        # Columns of length 1, so that `lstsq` leaves out what is a rounding error of the others.
        design = np.array(basis).T * roots[:, None]
        design = design / np.linalg.norm(design, axis=0)
        rest = target * roots
        rest = rest - design @ np.linalg.lstsq(design, rest, rcond=1e-7)[0]
        if rest @ rest <= 1e-12:
            continue
        for j, v in enumerate(right.astype(float)):
            f = (u * v if is_product else v) * roots
            alone = f - design @ np.linalg.lstsq(design, f, rcond=1e-7)[0]
            if alone @ alone > 1e-4 * (f @ f):
                whole = np.column_stack([design, f / np.linalg.norm(f)])
                fitted = np.linalg.lstsq(whole, target * roots, rcond=1e-7)[0]
                errors[i, j] = np.square(target * roots - whole @ fitted).sum()
    return errors


def plain_best(errors: Floats, count: int) -> tuple[Floats, NDArray[np.int64], NDArray[np.int64]]:
    """Return the least finite errors, and the places of their pairs; ties by their order."""
    order = np.argsort(errors.ravel(), kind="stable")[:count]
    order = order[np.isfinite(errors.ravel()[order])]
    return (errors.ravel()[order], *np.divmod(order, errors.shape[1]))
