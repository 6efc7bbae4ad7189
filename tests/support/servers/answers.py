"""Calls of every kind that engines share, to compare the bits of servers with several engines."""

import hashlib
from typing import Any

import numpy as np

import warpfit
from warpfit.expressions.workload import thesis_mix

_SEED = 5
_TEXTS = ("p1*x1 + p2", "p1*exp(p2*x2) + p3", "sin(p1*x1) * p2", "p1*x1^2 + p2*x3 + p3")
_PARAMETERS = (2, 3, 2, 3)


def table(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Four variables and a target that the fits can describe in part."""
    X = np.random.default_rng(_SEED).uniform(0.5, 2.0, (rows, 4)).astype(np.float32)
    return X, np.sin(X[:, 0]) + 0.1 * X[:, 1]


def answers(
    client: warpfit.Client, rows: int, programs: int, fits: int, **upload: Any
) -> tuple[dict[str, str], dict[str, set[str]]]:
    """Ask for every kind of output; return hashes of all bits of the answers, and their devices.

    A tenth of the programs are asked for outputs with a number for each row; ``fits`` are fitted,
    from two starts each.
    """
    data = client.upload(*table(rows), **upload)
    expressions, parameters = thesis_mix(_SEED, programs, variables=4)
    few = expressions[: programs // 10], parameters[: programs // 10]
    calls: dict[str, tuple[Any, dict[str, Any]]] = {
        "losses": ((expressions, parameters), {"loss": "mse"}),
        "fast": ((expressions, parameters), {"loss": "rmse", "precision": "fast"}),
        "gradients": ((expressions, parameters), {"loss": "mae", "gradient": True}),
        "variables": ((expressions, parameters), {"loss": "mse", "variable_gradient": True}),
        "statistics": (
            (expressions, parameters),
            {"loss": "mse", "linear_scaling": True, "reductions": True},
        ),
        "some rows": (
            (expressions, parameters),
            {"loss": "huber", "correlation": True, "rows": (rows // 5, rows - 7)},
        ),
        "values": (few, {"values": True}),
        "jacobian": (few, {"jacobian": True, "values": True}),
    }
    found, devices = {}, {}
    for name, (batch, options) in calls.items():
        answer = client.run(data, *batch, tier="interpreter", **options)
        found[name], devices[name] = _digest(answer), set(answer.timings.device.split(","))
    starts = np.random.default_rng(_SEED).uniform(0.5, 1.5, (2, 3))
    texts = [_TEXTS[number % 4] for number in range(fits)]
    given = [starts[:, : _PARAMETERS[number % 4]] for number in range(fits)]
    for method in ("lm", "bfgs"):
        fit = client.optimize(
            *(data, texts, given),
            method=method,
            max_iterations=8,
            covariance=True,
            standard_errors=True,
        )
        found[method], devices[method] = _digest(fit), set(fit.timings.device.split(","))
    client.release(data, everywhere=True)
    return found, devices


def _digest(answer: Any) -> str:
    """Hash every array of an answer."""
    found = hashlib.sha256()
    for name in type(answer).__slots__:
        field = getattr(answer, name)
        for array in field if isinstance(field, list | tuple) else [field]:
            if isinstance(array, np.ndarray):
                text = array.astype(str) if array.dtype == object else array
                found.update(np.ascontiguousarray(text).tobytes())
    return found.hexdigest()
