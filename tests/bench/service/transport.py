"""What moving matrices costs between processes of one machine, and the bounds of that.

A value matrix of 120 MB (with an engine that computes nothing, then with the CPU engine, which
takes the same processors) and an upload of 400 MB. Beside them stand the bounds of the machine in
the same run: copying memory and SHA-256. The best round says what the machine can do, the median
what other programs on it have left.
"""

import hashlib
import statistics
import time
from typing import Any

import numpy as np
from harness import SEED, arguments, connected, save, seconds_of

import warpfit
from support.load.faults import injected
from warpfit.calls.dataset_handle import DatasetHandle
from warpfit.dataset import Dataset
from warpfit.transport.call import Request

ROUNDS = 9
ROWS, PROGRAMS = 100_000, 300
UPLOAD_ROWS, UPLOAD_VARIABLES = 1_000_000, 100


def rates(size: int, seconds: list[float]) -> dict[str, float]:
    return {"gb_s": size / statistics.median(seconds) / 1e9, "best_gb_s": size / min(seconds) / 1e9}


def answers(client: warpfit.Client, *, idle: bool) -> dict[str, Any]:
    """A value matrix, again and again; an idle engine computes nothing, so that it only moves."""
    X = np.random.default_rng(SEED).normal(size=(ROWS, 10)).astype(np.float32)
    expressions = [warpfit.parse(f"x{n % 10 + 1}") for n in range(PROGRAMS)]
    data, expected = client.upload(X), np.tile(X, PROGRAMS // 10)
    first = client.run(data, expressions).values  # makes segments
    if not (idle or np.array_equal(first, expected)):
        raise SystemExit("wrong values")
    del first
    seconds = seconds_of(lambda: client.run(data, expressions), ROUNDS)
    return {"bytes": expected.nbytes, **rates(expected.nbytes, seconds)}


def uploads(client: warpfit.Client) -> dict[str, Any]:
    """Fresh content each time: making it ready (transposed, hashed), and sending."""
    X = np.random.default_rng(SEED).normal(size=(UPLOAD_ROWS, UPLOAD_VARIABLES)).astype(np.float32)
    ready, seconds, failover = [], [], client._failover
    for turn in range(5):
        X[0, 0] = turn
        started = time.perf_counter()
        dataset = Dataset.of(X)
        ready.append(time.perf_counter() - started)
        asked = Request("GetVariables", None, dataset=dataset)
        server = next(iter(failover.servers))
        seconds += seconds_of(lambda a=asked, s=server: failover.upload(s, a), 1)
        client.release(DatasetHandle(dataset), everywhere=True)
    both = rates(X.nbytes, np.add(ready, seconds).tolist())
    found = {"bytes": X.nbytes, "ready": rates(X.nbytes, ready), **rates(X.nbytes, seconds)}
    return {**found, "with_ready_gb_s": both["gb_s"]}


def main() -> None:
    options, one = arguments(__doc__, "transport"), ("--front-ends", "1")
    size = ROWS * PROGRAMS * 4
    source, target = np.random.default_rng(SEED).bytes(size), np.zeros(size, np.uint8)
    view = np.frombuffer(source, np.uint8)
    bounds = {
        "memory_copy": rates(size, seconds_of(lambda: np.copyto(target, view), ROUNDS)),
        "sha256": rates(size, seconds_of(lambda: hashlib.sha256(source).digest(), 3)),
    }
    with connected(*one, **injected("idle=1")) as (_, client):
        moved = answers(client, idle=True)
    with connected(*one) as (_, client):
        found = {"answer": moved, "answer_with_cpu_engine": answers(client, idle=False)}
        found["upload"] = uploads(client)
    save(options.name, {"seed": SEED, "bounds": bounds, **found}, options.folder)
