"""What the benchmark programs share: timing in turns, evaluations of an engine, and result files.

Importing it makes ``support`` importable. ``python tests/bench/run.py`` lists the programs.
"""

import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Final

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.servers.server import ServerProcess
from warpfit.dataset import Dataset
from warpfit.request import Evaluation, Precision
from warpfit_server.engine.interface import Outputs

__all__ = ["ServerProcess"]

RESULTS = Path(__file__).resolve().parent / "results"
_PACKAGES: Final = (
    *("warpfit", "numpy", "numba", "grpcio", "protobuf", "pyoperon", "gplearn", "deap"),
    *("cupy-cuda13x", "cupy-cuda12x", "torch", "jax", "evogp", "matplotlib", "scikit-learn"),
)
_GPU_FIELDS: Final = ("name", "driver_version", "clocks.max.sm", "memory.total", "compute_cap")
#: Seed of programs and data, where a program has no flag for it.
SEED = 20261121
MODES = {
    "float32 fast": (np.float32, Precision.FAST),
    "float32 precise": (np.float32, Precision.PRECISE),
    "float64": (np.float64, Precision.PRECISE),
}


def seconds_of(action: Callable[[], object], rounds: int, *, warm_up: int = 0) -> list[float]:
    """Return the wall time of each round, without those that warm up."""
    times = []
    for _ in range(warm_up + rounds):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return times[warm_up:]


def median_seconds(action: Callable[[], object], rounds: int, *, warm_up: int = 0) -> float:
    """Return the median wall time of some rounds."""
    return statistics.median(seconds_of(action, rounds, warm_up=warm_up))


def medians_in_turn(
    cases: Mapping[str, Callable[[], object]], *, rounds: int = 5, seconds: float = 0.0
) -> dict[str, float]:
    """Return the median wall time of each case, repetitions interleaved.

    Other load on the machine so meets all of them alike. Each case warms up once, and runs for at
    least ``rounds`` times and, with the others, for ``seconds``.
    """
    for run in cases.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in cases}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or min(map(len, times.values())) < rounds:
        for name, run in cases.items():
            times[name] += seconds_of(run, 1)
    return {name: statistics.median(series) for name, series in times.items()}


def percentiles(seconds: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Return median, 90th and 99th percentile in milliseconds."""
    quantiles = (50, 90, 99)
    found = np.percentile(np.array(seconds) * 1e3, quantiles).tolist()
    return {f"p{q}_ms": round(ms, digits) for q, ms in zip(quantiles, found, strict=True)}


def precompile() -> None:
    """Compile the CPU engine's code, so that no measured call waits for a compiler."""
    run = "from warpfit.cli.main import main; main(['precompile'])"
    subprocess.run([sys.executable, "-c", run], check=True, stdout=subprocess.DEVNULL)


def start_up_seconds(devices: str = "cpu") -> float:
    """Return the median time from the command to the start-up line, with a filled compile cache."""
    times = []
    for _ in range(3):
        started = time.perf_counter()
        server = ServerProcess(devices=devices)
        times.append(time.perf_counter() - started)
        server.stop()
    return statistics.median(times)


def uniform_data(rows: int, dtype: Any, seed: int = 0) -> Dataset:
    """Draw ten variables from [0.5, 2) and a normal target."""
    rng = np.random.default_rng(seed)
    return Dataset.of(rng.uniform(0.5, 2, (rows, 10)), rng.normal(size=rows), dtype=dtype)


def outputs_of(evaluation: Evaluation, values: Any = None) -> Outputs:
    """Make the outputs of an evaluation with losses, or of one into an array of values."""
    return Outputs(
        values,
        np.empty((len(evaluation.batch), 1)) if evaluation.loss is not None else None,
        np.zeros(1, np.uint8),
        lambda _: None,
        gradients=np.empty(len(evaluation.batch.parameters)) if evaluation.gradient else None,
    )


def save(name: str, content: dict[str, Any], directory: Path | None = None) -> None:
    """Write the result into ``directory``, by default among the results, and print it."""
    print(write_result(name, content, directory or RESULTS).read_text())


def write_result(name: str, content: dict[str, Any], directory: Path = RESULTS) -> Path:
    """Write ``<name>.json`` with ``content``, machine and versions; return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    document = {
        "benchmark": name,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
        "versions": versions(),
        **content,
    }
    path.write_text(json.dumps(document, indent=2) + "\n")
    return path


def machine() -> dict[str, Any]:
    """Return CPU, cores that this process may use, memory, system, and GPUs if there are any."""
    information = Path("/proc/cpuinfo")
    text = information.read_text() if information.exists() else ""
    model = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found: dict[str, Any] = {
        "cpu": model[1] if model else platform.processor() or "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
    }
    gpus = _gpus()
    return {**found, "gpus": gpus} if gpus else found


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that matter."""
    installed = {found.name.lower(): found.version for found in distributions()}
    names = (name for name in _PACKAGES if name in installed)
    return {"python": platform.python_version(), **{str(n): installed[n] for n in names}}


def _gpus() -> list[dict[str, str]]:
    """Ask nvidia-smi about each GPU; empty without it."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.split(", ") for line in text.splitlines() if line.strip()]
    return [dict(zip(_GPU_FIELDS, row, strict=False)) for row in rows]
