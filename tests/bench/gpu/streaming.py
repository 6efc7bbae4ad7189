"""Benchmark of streamed data sets: the rate against those of the bus and of the kernels.

A data set of 10 variables and a target, float32, is streamed by an engine that may use 8 GiB of the
device. For each kind of evaluation and each number of programs of the random mix, fast mode:

* ``seconds``: one evaluation of the losses, the least of some.
* ``copy_seconds``: the copies of all windows alone, without kernels.
* ``kernel_seconds``: the device time of the kernels on as many rows as a window has, resident, the
  least of some, times the windows; ``streamed_kernel_seconds``: while rows are copied.
* ``of_bound``: the longer of copies and kernels alone over ``seconds``; 1 if nothing is lost.
"""

import time
from itertools import product
from typing import Any

import numpy as np
from harness import SEED, arguments, outputs_of, save

from support.random_programs import thesis_mix
from warpfit.dataset import Dataset, Layout
from warpfit.ir import Batch
from warpfit.request import Evaluation, Loss, Precision, Tier
from warpfit_server.engine.cuda.engine import CudaEngine
from warpfit_server.engine.cuda.runtime.datasets import StreamedDataset, cut_rows
from warpfit_server.engine.interface import run_to_end

COLUMNS = 11
#: What is evaluated: losses by either tier, or losses with their gradients.
KINDS: dict[str, dict[str, Any]] = {
    "interpreted": {"tier": Tier.INTERPRETER},
    "compiled": {"tier": Tier.COMPILED},
    "gradients": {"tier": Tier.INTERPRETER, "gradient": True},
}
#: Rows that are drawn; the data set repeats them.
DRAWN = 1 << 20
MEMORY = 8 << 30
REPEATS = 3


def main() -> None:
    asked: dict[str, Any] = {"gigabytes": 20.0, "programs": (300, 3000), "kinds": ("interpreted",)}
    options = arguments(__doc__, "gpu_streaming", **asked)
    whole = repeated(int(options.gigabytes * 1e9) // (4 * COLUMNS))
    engine = CudaEngine(memory_limit=MEMORY)
    started = time.perf_counter()
    engine.load(whole)
    loaded, streamed = time.perf_counter() - started, engine._resident(whole.content_id)
    assert isinstance(streamed, StreamedDataset), "the data set fits on the device"
    copies, window = copy_seconds(engine, streamed), repeated(streamed.window_rows)
    engine.load(window)
    content: dict[str, Any] = {
        **{"bytes": whole.layout.nbytes, "rows": whole.layout.rows, "load_seconds": loaded},
        **{"window_rows": streamed.window_rows, "copy_seconds": copies, "results": []},
    }
    for kind, count in product(options.kinds, options.programs):
        row = measure(engine, whole, window, kind, count)
        row["of_bound"] = max(row["kernel_seconds"], copies) / row["seconds"]
        content["results"].append(row)
    save(options.name, content, options.folder)


def repeated(rows: int) -> Dataset:
    drawn = np.random.default_rng(SEED).uniform(0.5, 2, (COLUMNS, DRAWN)).astype(np.float32)
    matrix = np.empty((COLUMNS, rows), np.float32)
    for start in range(0, rows, DRAWN):
        stop = min(start + DRAWN, rows)
        matrix[:, start:stop] = drawn[:, : stop - start]
    layout = Layout(matrix.dtype, variables=COLUMNS - 1, rows=rows, has_target=True)
    return Dataset.resident(layout, matrix, rows.to_bytes(32, "little"))


def copy_seconds(engine: CudaEngine, streamed: StreamedDataset) -> float:
    spans = cut_rows((0, streamed.dataset.layout.rows), streamed.window_rows)
    started = time.perf_counter()
    with (
        engine._device.stream() as context,
        streamed.windows(spans, context, np.zeros(1, np.uint8)) as next_window,
    ):
        for _ in spans:
            run_to_end(next_window())
    return time.perf_counter() - started


def measure(
    engine: CudaEngine, whole: Dataset, window: Dataset, kind: str, programs: int
) -> dict[str, Any]:
    batch = Batch.of(*thesis_mix(1, programs))
    asked = {"loss": Loss.MSE, "values": False, "precision": Precision.FAST, **KINDS[kind]}

    def run(dataset: Dataset) -> tuple[float, float]:
        evaluation = Evaluation(dataset.content_id, batch, **asked)
        started = time.perf_counter()
        timings = run_to_end(engine.evaluate(evaluation, outputs_of(evaluation)))
        return time.perf_counter() - started, timings.compute / 1e9

    windows = whole.layout.rows / window.layout.rows
    kernels = min(run(window)[1] for _ in range(REPEATS))
    seconds, streamed = min(run(whole) for _ in range(REPEATS))
    return {
        **{"kind": kind, "programs": programs, "seconds": seconds},
        "kernel_seconds": kernels * windows,
        "streamed_kernel_seconds": streamed,
    }
