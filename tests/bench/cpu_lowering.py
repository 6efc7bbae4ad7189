"""What sharing the lowering of fresh programs among threads gains on the CPU engine.

``python tests/bench/cpu_lowering.py`` writes results/cpu_lowering.json: times of evaluations whose
programs come for the first time, over few rows, with lowering cut for all threads and in one piece,
measured in turn.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.repository.results import write_result
from warpfit.dataset import Dataset
from warpfit.expressions.workload import thesis_mix
from warpfit.ir import Batch
from warpfit.request import Evaluation, Loss, Precision
from warpfit_server.engine.cpu import chunked_work
from warpfit_server.engine.cpu.engine import CpuEngine
from warpfit_server.engine.interface import Outputs, run_to_end

SEED, ROWS, VARIABLES = 20261121, 1000, 10
#: Programs of a batch, and how many batches.
CASES = ((30, 200), (300, 100), (3000, 30))
ONE_PIECE = 1 << 40


def seconds(engine: CpuEngine, data: Dataset, batch: Batch, *, gradient: bool) -> float:
    """Time of an evaluation of programs that have not been there before."""
    evaluation = Evaluation(
        data.content_id,
        batch,
        precision=Precision.FAST,
        loss=Loss.MSE,
        values=False,
        gradient=gradient,
    )
    outputs = Outputs(
        None,
        np.empty((len(batch), 1)),
        np.zeros(1, np.uint8),
        lambda _: None,
        gradients=np.empty(len(batch.parameters)) if gradient else None,
    )
    started = time.perf_counter()
    run_to_end(engine.evaluate(evaluation, outputs))
    return time.perf_counter() - started


def compare(engine: CpuEngine, data: Dataset, count: int, batches: int) -> dict[str, Any]:
    """Median milliseconds both ways, of losses alone and with gradients."""
    found: dict[str, Any] = {}
    for gradient in (False, True):
        times: dict[str, list[float]] = {"one piece": [], "shared": []}
        first = SEED + gradient * 2 * batches
        mixes = [thesis_mix(first + n, count, variables=VARIABLES) for n in range(2 * batches)]
        for number, batch in enumerate([Batch.of(*mix) for mix in mixes]):
            way = ("one piece", "shared")[number % 2]
            size = ONE_PIECE if way == "one piece" else chunked_work._TOKENS_A_CHUNK
            with mock.patch.object(chunked_work, "_TOKENS_A_CHUNK", size):
                times[way].append(seconds(engine, data, batch, gradient=gradient))
        median = {way: 1e3 * float(np.median(each[2:])) for way, each in times.items()}
        found["losses and gradients" if gradient else "losses"] = {
            "one_piece_ms": round(median["one piece"], 3),
            "shared_ms": round(median["shared"], 3),
            "ratio": round(median["shared"] / median["one piece"], 3),
        }
    return found


def main() -> None:
    engine = CpuEngine()
    rng = np.random.default_rng(SEED)
    X = rng.uniform(0.5, 2, (ROWS, VARIABLES))
    data = Dataset.of(X, X[:, 0], dtype="float32")
    engine.load(data)
    cases = {str(count): compare(engine, data, count, batches) for count, batches in CASES}
    engine.close()
    content = {"seed": SEED, "rows": ROWS, "threads": engine.threads, "programs": cases}
    print(write_result("cpu_lowering", content).read_text())


if __name__ == "__main__":
    main()
