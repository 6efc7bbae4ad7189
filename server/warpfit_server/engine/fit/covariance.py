"""Covariance and standard errors of fitted parameters, from the curvature at the end of a fit."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from warpfit.evidence import covariance_of
from warpfit_server.engine.fit.searches import FREE, LOSS, PAIRS, PARAMETERS, SQUARES, Searches

Floats = NDArray[np.float64]


def estimate_covariances(searches: Searches, rows: int | None, result: Floats, some: slice) -> None:
    """Estimate the covariance of the parameters of some searches.

    It is `warpfit.evidence.covariance_of`; bounds are ignored.

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
        estimate, _ = covariance_of(matrices, free, searches.numbers[chosen, LOSS], rows)
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
