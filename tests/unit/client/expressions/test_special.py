"""Special functions in NumPy, against mpmath."""

import mpmath
import numpy as np

from warpfit.expressions import special


def test_digamma_has_thirteen_digits():
    """But for its zeros, next to which the error is absolute."""
    rng = np.random.default_rng(0)
    near_poles = -rng.integers(0, 20, 300) + rng.choice([-1, 1], 300) * 10 ** rng.uniform(
        -9, -1, 300
    )
    sizes = 10.0 ** rng.uniform(-300, 300, 300)
    a = np.concatenate(
        [rng.uniform(-30, 30, 1000), near_poles, sizes, -(10 ** rng.uniform(0, 6, 99))]
    )
    exact = np.array([float(mpmath.digamma(x)) for x in a.tolist()])
    with np.errstate(all="ignore"):
        error = np.abs(special.digamma(a) - exact) / np.maximum(np.abs(exact), 0.1)
    assert error.max() < 1e-13


def test_digamma_at_poles_and_limits():
    a = np.array([0.0, -0.0, -1.0, -7.0, -1e300, -np.inf, np.inf, np.nan, 5e-324, 1e308])
    wanted = [-np.inf, np.inf, 0.0, 0.0, 0.0, 0.0, np.inf, np.nan, -np.inf, np.log(1e308)]
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(special.digamma(a), wanted, rtol=1e-15)
