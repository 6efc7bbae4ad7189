"""The built-in losses in NumPy by their definitions, against which all engines are tested."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from warpfit.request import Loss

Floats = NDArray[np.float64]


def reference_loss(
    kind: Loss, values: ArrayLike, target: ArrayLike, weights: ArrayLike | None = None
) -> Floats:
    """Compute a built-in loss [...] of values [..., rows] by its definition, in float64."""
    f = np.asarray(values, dtype=np.float64)
    y = np.asarray(target, dtype=np.float64)
    w = np.ones_like(y) if weights is None else np.asarray(weights, dtype=np.float64)
    with np.errstate(all="ignore"):
        if kind is Loss.MAE:
            return np.asarray(np.sum(w * np.abs(f - y), axis=-1) / np.sum(w))
        sse = np.sum(w * np.square(f - y), axis=-1)
        from_first = y - y[0]  # so that a large mean costs no digits
        mean = np.sum(w * from_first) / np.sum(w)
        total = np.sum(w * np.square(from_first - mean))
        return np.asarray(
            {
                Loss.SSE: sse,
                Loss.MSE: sse / np.sum(w),
                Loss.RMSE: np.sqrt(sse / np.sum(w)),
                Loss.R2: 1.0 - sse / total,
                Loss.NMSE: sse / total,
            }[kind]
        )


def moments_of(f: ArrayLike, y: ArrayLike, w: ArrayLike) -> Floats:
    """Moments in long double, by definition but for the first row as the origin of the means."""
    f, y, w = (np.asarray(column, dtype=np.longdouble) for column in (f, y, w))
    first_f, first_y = f[0], y[0]
    f, y = f - first_f, y - first_y
    mean_f, mean_y = (w * f).sum() / w.sum(), (w * y).sum() / w.sum()
    df, dy = f - mean_f, y - mean_y
    squares, products = (w * df * df).sum(), (w * df * dy).sum()
    left = (w * (dy - (products / squares if squares else 0) * df) ** 2).sum()
    means = [first_f + mean_f, first_y + mean_y]
    return np.array([w.sum(), *means, squares, (w * dy * dy).sum(), products, left], dtype=float)
