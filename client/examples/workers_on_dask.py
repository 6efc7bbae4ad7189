"""Compare formulas on all workers of a Dask cluster; warpfit's servers compute the losses.

    warpfit serve                                     # on one machine or on several
    dask scheduler & dask worker localhost:8786 &     # and workers on other machines
    python client/examples/workers_on_dask.py localhost:8786 --servers HOST:PORT,HOST:PORT

Each Dask task draws formulas of its own, has the server fit their parameters, and returns the best
one. Only formulas pass through Dask: each worker process has one client, which all its tasks share,
and a data set is uploaded to a server once, by whichever client needs it first. Dask repeats the
tasks of a worker that is lost, clients turn to another server if one is. Needs ``pip install
distributed``.
"""

from __future__ import annotations

import argparse
import functools
import random

import numpy as np
from distributed import Client, as_completed
from numpy.typing import NDArray

import warpfit

BASES = ("x1", "x2", "x1*x2", "x1^2", "exp(-x1)", "sqrt(x2)", "log(x1 + x2)")


def table() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Draw points of a law to be found, 3 exp(-x1) + x1 x2 / 2, with a little noise."""
    rng = np.random.default_rng(0)
    X = rng.uniform(0.5, 3.0, (10_000, 2))
    return X, 3 * np.exp(-X[:, 0]) + X[:, 0] * X[:, 1] / 2 + rng.normal(0, 0.01, len(X))


@functools.cache
def connection(servers: str) -> tuple[warpfit.Client, object]:
    """Return the client of this process, and the handle of the data set."""
    client = warpfit.connect(servers, wait=60.0)
    return client, client.upload(*table())


def best_of(seed: int, servers: str, count: int = 200) -> tuple[float, str, list[float]]:
    """Fit formulas that are drawn with a seed; return loss, text and parameters of the best."""
    draw = random.Random(seed)
    client, data = connection(servers)
    texts = [
        " + ".join(f"p{n}*{base}" for n, base in enumerate(draw.sample(BASES, 2), start=1))
        for _ in range(count)
    ]
    fit = client.optimize(data, texts, [[1.0, 1.0]] * count, loss="mse")
    best = int(np.argmin(fit.loss))
    return float(fit.loss[best]), texts[best], fit.parameters[best].tolist()


def main() -> None:
    """Run the whole example."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scheduler", help="address of Dask's scheduler")
    parser.add_argument("--servers", default="127.0.0.1:50551", help="addresses of warpfit servers")
    parser.add_argument("--tasks", type=int, default=20)
    options = parser.parse_args()
    with Client(options.scheduler) as dask:
        tasks = dask.map(best_of, range(options.tasks), servers=options.servers)
        best = min(task.result() for task in as_completed(tasks))
    loss, text, parameters = best
    print(f"mean square error {loss:.3g}: {text} with {np.round(parameters, 4)}")


if __name__ == "__main__":
    main()
