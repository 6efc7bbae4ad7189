"""Searches that run on a device from pass to pass, beside the host's passes: what tests share."""

import re
from dataclasses import replace

import numpy as np

from support.engines.fits import prepared
from warpfit.dataset import Dataset
from warpfit_server.engine.fit.driver import optimize
from warpfit_server.engine.interface import run_to_end

#: Well behaved; linear; ill-conditioned; plateau; not finite; without parameters; without effect;
#: with squares that float32 does not hold, too small and too large ones.
TEXTS = [
    *("p1 * exp(p2 * x1) + p3 * x2 + p4", "p1 * sin(p2 * x1 + p3)", "p1 + p2 * x1"),
    *("p1 + p2 * (x1 + 1000) + p3 * (x1 + 1000) ^ 2", "p1 * x1 + p2 * x1", "x1 + x2"),
    *("exp(p1 * x1) + exp(p2 * x1)", "p1 / (p2 + x1) + p3 * x2", "log(p1) * x1", "x1 + 0 * p1"),
    *("p1 * abs(x1) ^ p2 + p1 * p3", "(p1 - x1) ^ 2 * p2", "p1 * x1 + p2 * 1e-20"),
    "p1 * x1 + sin(p2 * 1e20)",
]
ROWS = 300


def make_dataset(rows: int = ROWS, dtype: str = "float64", weights: bool = False) -> Dataset:
    rng = np.random.default_rng(11)
    X = rng.uniform(0.5, 3.0, size=(rows, 2))
    y = 2.0 * np.exp(-0.7 * X[:, 0]) + 0.5 * X[:, 1] + 0.05 * rng.normal(size=rows)
    given = rng.uniform(0.0, 1.0, size=rows) if weights else None
    return Dataset.of(X, y, given, dtype=dtype)


def starts_of(texts, seed: int = 5) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=len(set(re.findall(r"\bp\d+", text)))) for text in texts]


def both(engine, dataset, texts=TEXTS, starts=None, **options):
    """Return the results of both ways, and how many passes the first one asked for."""
    engine.load(dataset)
    starts = starts_of(texts) if starts is None else starts
    request, context = prepared(dataset, texts, starts, engine=engine, **options)
    passes = []

    def linearise(evaluation, *given, **named):
        passes.append(len(evaluation.batch))
        return engine.linearise(evaluation, *given, **named)

    own = run_to_end(optimize(request, replace(context, linearise=linearise)))
    other = run_to_end(optimize(request, replace(context, small_fits=None)))
    engine.unload(dataset.content_id)
    return own, other, passes


def assert_same(own, other, rtol=0.0):
    np.testing.assert_array_equal(own.reasons, other.reasons)
    for name in ("iterations", "evaluations", "starts"):
        np.testing.assert_array_equal(getattr(own, name), getattr(other, name))
    for name in ("parameters", "losses", "initial_losses", "standard_errors", "curvatures"):
        one, two = getattr(own, name), getattr(other, name)
        if two is not None:
            np.testing.assert_allclose(one, two, rtol=rtol)
