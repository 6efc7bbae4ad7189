"""Measure skeletons a second through `propose`, as an agent calls it: parse, fit, evidence, terms.

The 300 skeletons are those of the grammar of client/examples/propose_loop.py over three variables,
each searched from ones and from eight drawn starts, on float64 data; ``--devices 0 --name
proposals_gpu`` measures the first GPU.
"""

import runpy
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness import SEED, arguments, connected, save

import warpfit

EXAMPLE = Path(__file__).resolve().parents[3] / "client" / "examples" / "propose_loop.py"
NAMES = ("a", "b", "c")
RESTARTS = 8


def measured(client: warpfit.Client, rows: int, options: Any) -> dict[str, Any]:
    """Measure a number of skeletons on so many rows."""
    skeletons = runpy.run_path(str(EXAMPLE))["Grammar"](NAMES, SEED).propose(options.skeletons, [])
    rng = np.random.default_rng(SEED)
    X = rng.uniform(0.5, 3.0, (rows, len(NAMES)))
    y = 2.5 * np.exp(-0.4 * X[:, 0]) * np.cos(1.3 * X[:, 1]) + 0.7 * X[:, 2]
    data = client.upload(X, y + rng.normal(0.0, 0.02, rows), names=NAMES, dtype="float64")
    client.propose(data, skeletons[:20], restarts=RESTARTS)  # warms up
    walls, own = [], []
    for seed in range(options.rounds):
        begun, used = time.perf_counter(), time.process_time()
        answers = client.propose(data, skeletons, restarts=RESTARTS, seed=seed, timeout=3600.0)
        walls.append(time.perf_counter() - begun)
        own.append(time.process_time() - used)
    losses = [each.loss for each in answers if each.error is None]
    return {
        "skeletons_per_second": round(len(skeletons) / statistics.median(walls), 1),
        "seconds": [round(wall, 3) for wall in walls],
        "client_cpu_ms_per_skeleton": round(1e3 * statistics.median(own) / len(skeletons), 3),
        "answered_with_a_fit": len(losses),
        "finite": int(np.isfinite(losses).sum()),
    }


def main() -> None:
    sizes: dict[str, Any] = {"rows": (1000, 100_000), "skeletons": 300, "rounds": 3}
    options = arguments(__doc__, "proposals", devices="cpu", **sizes)
    with connected(devices=options.devices) as (_, client):
        cases = {f"{rows} rows": measured(client, rows, options) for rows in options.rows}
    content = {"devices": options.devices, "skeletons": options.skeletons, "restarts": RESTARTS}
    save(options.name, {**content, "seed": SEED, "cases": cases}, options.folder)
