"""What is told about repeated measurements: medians, percentiles, spread and their uncertainty."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike

#: A percentile is told from this many measurements beyond it on.
_BEYOND: Final = 5
#: Two-sided 95% quantile of the normal distribution.
_Z: Final = 1.959964


@dataclass(frozen=True, slots=True)
class Summary:
    """Repeated measurements of one quantity, in its unit (seconds, unless said otherwise)."""

    n: int
    median: float
    low: float
    """Lower end of the 95% confidence interval of the median, from order statistics."""
    high: float
    """Its upper end. With fewer than six measurements the interval is their range."""
    p10: float
    p90: float
    p99: float | None
    """None with fewer than 500 measurements: fewer than 5 would lie beyond it."""
    least: float
    greatest: float
    spread: float
    """Interquartile range divided by the median."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields, rounded to five significant digits."""
        return {name: _rounded(value) for name, value in asdict(self).items()}


def summarise(samples: ArrayLike) -> Summary:
    """Summarise repeated measurements, [n].

    The confidence interval is the distribution-free one: the ranks are those of the binomial
    distribution's normal approximation (Conover 1999, Practical Nonparametric Statistics, 3.2).

    Raises:
        ValueError: if there are none.

    """
    ordered = np.sort(np.asarray(samples, dtype=np.float64))
    n = len(ordered)
    if not n:
        raise ValueError("nothing was measured")
    reach = _Z * math.sqrt(n) / 2
    first = max(0, math.floor(n / 2 - reach) - 1) if n > 5 else 0
    last = min(n - 1, math.ceil(n / 2 + reach)) if n > 5 else n - 1
    p10, p25, median, p75, p90 = np.percentile(ordered, [10, 25, 50, 75, 90]).tolist()
    return Summary(
        n=n,
        median=median,
        low=float(ordered[first]),
        high=float(ordered[last]),
        p10=p10,
        p90=p90,
        p99=told_percentile(ordered, 99),
        least=float(ordered[0]),
        greatest=float(ordered[-1]),
        spread=(p75 - p25) / median if median else 0.0,
    )


def told_percentile(ordered: Sequence[float] | ArrayLike, percent: float) -> float | None:
    """Percentile of sorted measurements; None if too few lie beyond it to tell."""
    values = np.asarray(ordered, dtype=np.float64)
    if len(values) * (100 - percent) / 100 < _BEYOND:
        return None
    return float(np.percentile(values, percent))


def crossover(x: ArrayLike, ratio: ArrayLike) -> float | None:
    """Least x from which on ``ratio`` stays at or above 1, interpolated on logarithmic axes.

    Args:
        x: increasing positive numbers, [n].
        ratio: positive numbers, [n].

    Returns:
        The first x if the ratio is never below 1, None if it is below 1 at the last x.

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


def _rounded(value: float | None) -> float | None:
    return value if value is None or isinstance(value, int) else float(f"{value:.5g}")
