"""Covariance and standard errors of fitted parameters, from the curvature at the end of a fit."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from warpfit_server.engine.fit.searches import FREE, LOSS, PAIRS, PARAMETERS, SQUARES, Searches

Floats = NDArray[np.float64]
#: Eigenvalue of the curvature, scaled to a unit diagonal, below which a direction is undetermined:
#: the rounding errors of a sum over the rows.
_RANK_TOLERANCE: Final = 1e-12


def estimate_covariances(searches: Searches, rows: int | None, result: Floats, some: slice) -> None:
    """Estimate the covariance of the parameters of some searches.

    It is s^2 times the pseudo-inverse of J^T W J over the free parameters, where s^2 is the sum of
    squares divided by rows minus rank. Fixed parameters have 0. A parameter that the data do not
    determine has NaN, and so has every parameter if there are no more rows than the rank. Bounds
    are ignored.

    Args:
        searches: with the loss and the curvature at the final parameters.
        rows: number of rows whose weight is not 0; None if weights are inverse variances, so that
            s^2 is 1.
        result: the matrices [n, n] of all searches, one after the other; flat.
        some: the searches whose matrices are filled in.
    """
    counts = searches.counts[some]
    for n in np.unique(counts[counts > 0]).tolist():
        chosen = some.start + np.flatnonzero(counts == n)
        matrices = _matrices(searches, chosen, n)
        columns = searches.edges[chosen, PARAMETERS][:, None] + np.arange(n)
        free = searches.vectors[FREE][columns] != 0.0
        places = searches.edges[chosen, SQUARES][:, None] + np.arange(n * n)
        with np.errstate(all="ignore"):
            estimate = _estimate(matrices, free, searches.numbers[chosen, LOSS], rows)
        result[places] = estimate.reshape(len(chosen), n * n)


def full_curvatures(searches: Searches) -> Floats:
    """Return the curvatures of all searches as full matrices, one after the other; flat."""
    result = np.empty(int(searches.edges[-1, SQUARES]))
    counts = searches.counts
    for n in np.unique(counts[counts > 0]).tolist():
        chosen = np.flatnonzero(counts == n)
        places = searches.edges[chosen, SQUARES][:, None] + np.arange(n * n)
        result[places] = _matrices(searches, chosen, n).reshape(len(chosen), n * n)
    return result


def standard_errors(searches: Searches, covariance: Floats) -> Floats:
    """Return the square roots of the diagonals, [P]."""
    counts = searches.counts
    first = np.repeat(searches.edges[:-1, SQUARES], counts)
    index = np.arange(len(first)) - np.repeat(searches.edges[:-1, PARAMETERS], counts)
    return np.sqrt(covariance[first + index * (np.repeat(counts, counts) + 1)])


def _matrices(searches: Searches, chosen: NDArray[np.int64], n: int) -> Floats:
    """Return the symmetric curvatures of searches with n parameters each, [chosen, n, n]."""
    row, column = np.tril_indices(n)
    packed = searches.curvature[
        searches.edges[chosen, PAIRS][:, None] + np.arange(n * (n + 1) // 2)
    ]
    matrices = np.empty((len(chosen), n, n))
    matrices[:, row, column] = packed
    matrices[:, column, row] = packed
    return matrices


def _estimate(matrices: Floats, free: NDArray[np.bool_], sums: Floats, rows: int | None) -> Floats:
    matrices = np.where(free[:, :, None] & free[:, None, :], matrices, 0.0)
    usable = np.isfinite(matrices).all(axis=(1, 2))
    matrices[~usable] = 0.0
    scale = np.sqrt(np.diagonal(matrices, axis1=1, axis2=2))
    scale = np.where(scale > 0.0, scale, 1.0)
    values, vectors = np.linalg.eigh(matrices / (scale[:, :, None] * scale[:, None, :]))
    kept = values > _RANK_TOLERANCE * matrices.shape[1]
    inverse = vectors * np.where(kept, 1.0 / values, 0.0)[:, None, :] @ vectors.swapaxes(1, 2)
    inverse /= scale[:, :, None] * scale[:, None, :]
    if rows is None:
        variance = np.where(usable, 1.0, np.nan)
    else:
        freedom = rows - kept.sum(axis=1)
        variance = np.where(usable & (freedom > 0), sums / freedom, np.nan)
    # A parameter is undetermined if a direction without information moves it.
    lost = np.einsum("sik,sk->si", np.square(vectors), (~kept).astype(np.float64)) > 1e-8
    lost &= free
    inverse[lost[:, :, None] | lost[:, None, :]] = np.nan
    covariance = inverse * variance[:, None, None]
    return np.where(free[:, :, None] & free[:, None, :], covariance, 0.0)
