"""Statistics of repeated measurements: medians with their intervals, percentiles, crossovers."""

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike


def summarise(samples: ArrayLike) -> dict[str, Any]:
    """Summarise repeated measurements, [n], to five significant digits.

    Returns:
        Number ``n``, ``median``, the ends ``low`` and ``high`` of its 95% confidence interval,
        ``p90``, ``p99`` (None with fewer than 500), and ``spread``, the interquartile range
        divided by the median. The interval's ranks are those of the binomial distribution's normal
        approximation (Conover 1999, Practical Nonparametric Statistics, 3.2); with fewer than six
        measurements it is their range.

    Raises:
        ValueError: if there are none.
    """
    ordered = np.sort(np.asarray(samples, dtype=np.float64))
    n = len(ordered)
    if not n:
        raise ValueError("nothing was measured")
    reach = 1.959964 * math.sqrt(n) / 2  # the two-sided 95% quantile of the normal distribution
    first = max(0, math.floor(n / 2 - reach) - 1) if n > 5 else 0
    last = min(n - 1, math.ceil(n / 2 + reach)) if n > 5 else n - 1
    p25, median, p75, p90 = np.percentile(ordered, [25, 50, 75, 90]).tolist()
    spread = (p75 - p25) / median if median else 0.0
    numbers = {"median": median, "low": ordered[first], "high": ordered[last], "spread": spread}
    numbers |= {"p90": p90, "p99": percentile(ordered, 99)}
    rounded = {k: None if v is None else float(f"{v:.5g}") for k, v in numbers.items()}
    return {"n": n, **rounded}


def percentile(ordered: ArrayLike, percent: float) -> float | None:
    """Return a percentile of sorted measurements, or None if fewer than five lie beyond it."""
    values = np.asarray(ordered, dtype=np.float64)
    if len(values) * (100 - percent) / 100 < 5:
        return None
    return float(np.percentile(values, percent))


def crossover(x: ArrayLike, ratio: ArrayLike) -> float | None:
    """Return the least x from which on ``ratio`` stays at or above 1, both positive, [n].

    It is interpolated on logarithmic axes; None if the ratio is below 1 at the last x.
    """
    values = np.asarray(x, dtype=np.float64)
    places = np.log(values)
    heights = np.log(np.asarray(ratio, dtype=np.float64))
    below = np.flatnonzero(heights < 0)
    if not len(below):
        return float(values[0])
    last = int(below[-1])
    if last == len(places) - 1:
        return None
    share = -heights[last] / (heights[last + 1] - heights[last])
    return float(np.exp(places[last] + share * (places[last + 1] - places[last])))
