"""Flags, servers, timing in turns and result files of the benchmark programs.

Importing it makes ``support`` importable. ``python tests/bench/run.py`` lists the programs.
"""

import argparse
import json
import multiprocessing
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib.metadata import distributions
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import warpfit
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
Action, Clock = Callable[[], object], Callable[[], float]
MODES = {
    "float32 fast": (np.float32, Precision.FAST),
    "float32 precise": (np.float32, Precision.PRECISE),
    "float64": (np.float64, Precision.PRECISE),
}


def arguments(document: str | None, name: str, words: str = "", **flags: Any) -> Any:
    """Read the command line of a program whose docstring is ``document``; return its flags.

    Each keyword is a flag with its default: a tuple has several values, False is a switch, and a
    type is that of a value that is None unless it is given. Arguments without a flag are a list
    that ``words`` names. Every program has ``--name`` and ``--folder`` of its result.
    """
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=document, formatter_class=shape)
    if words:
        parser.add_argument(words, nargs="*")
    for flag, default in {"name": name, "folder": RESULTS, **flags}.items():
        given: dict[str, Any] = {"default": default, "type": type(default)}
        if isinstance(default, bool):
            given = {"action": "store_true"}
        elif isinstance(default, type):
            given = {"type": default}
        elif isinstance(default, tuple):
            given |= {"nargs": "+", "type": type(default[0]) if default else str}
        parser.add_argument(f"--{flag.replace('_', '-')}", **given)
    return parser.parse_args()


@contextmanager
def connected(
    *flags: str, devices: str = "cpu", **environment: Any
) -> Iterator[tuple[ServerProcess, warpfit.Client]]:
    """Start a server on loopback, and connect a client to it."""
    with (
        ServerProcess(*flags, devices=devices, **environment) as server,
        warpfit.connect(server.address) as client,
    ):
        yield server, client


def seconds_of(
    action: Action, rounds: int, *, warm_up: int = 0, clock: Clock = perf_counter
) -> list[float]:
    """Return the time of each round, without those that warm up."""
    times = []
    for _ in range(warm_up + rounds):
        started = clock()
        action()
        times.append(clock() - started)
    return times[warm_up:]


def medians_in_turn(
    cases: Mapping[str, Action], rounds: int = 5, seconds: float = 0.0, clock: Clock = perf_counter
) -> dict[str, float]:
    """Return the median time of each case, repetitions interleaved.

    Other load on the machine so meets all of them alike. Each case warms up once, and runs for at
    least ``rounds`` times and, with the others, for ``seconds``.
    """
    for run in cases.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in cases}
    end = perf_counter() + seconds
    while perf_counter() < end or min(map(len, times.values())) < rounds:
        for name, run in cases.items():
            times[name] += seconds_of(run, 1, clock=clock)
    return {name: statistics.median(series) for name, series in times.items()}


def percentiles(seconds: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Return median, 90th and 99th percentile in milliseconds."""
    quantiles = (50, 90, 99)
    found = np.percentile(np.array(seconds) * 1e3, quantiles).tolist()
    return {f"p{q}_ms": round(ms, digits) for q, ms in zip(quantiles, found, strict=True)}


def worker_pool(
    processes: int, threads: int, begin: Callable[..., None], *given: Any
) -> ProcessPoolExecutor:
    """Make processes that call ``begin`` first, with a queue of their numbers and what is given.

    Libraries of linear algebra take so many threads: waiting ones would count as time.
    """
    for library in ("OPENBLAS", "OMP", "MKL"):
        os.environ[f"{library}_NUM_THREADS"] = str(threads)
    context = multiprocessing.get_context("spawn")
    places = context.Queue()
    for place in range(processes):
        places.put(place)
    return ProcessPoolExecutor(processes, context, begin, (places, *given))


def precompile() -> None:
    """Compile the CPU engine's code, so that no measured call waits for a compiler."""
    run = "from warpfit.cli.main import main; main(['precompile'])"
    subprocess.run([sys.executable, "-c", run], check=True, stdout=subprocess.DEVNULL)


def start_up_seconds(devices: str = "cpu") -> float:
    """Return the median time from the command to the start-up line, with a filled compile cache."""
    times = []
    for _ in range(3):
        started = perf_counter()
        server = ServerProcess(devices=devices)
        times.append(perf_counter() - started)
        server.stop()
    return statistics.median(times)


def uniform_data(rows: int, dtype: Any, seed: int = 0) -> Dataset:
    """Draw ten variables from [0.5, 2) and a normal target."""
    rng = np.random.default_rng(seed)
    return Dataset.of(rng.uniform(0.5, 2, (rows, 10)), rng.normal(size=rows), dtype=dtype)


def outputs_of(evaluation: Evaluation, values: Any = None) -> Outputs:
    """Make the outputs of an evaluation with losses, or of one into an array of values."""
    losses = np.empty((len(evaluation.batch), 1)) if evaluation.loss is not None else None
    gradients = np.empty(len(evaluation.batch.parameters)) if evaluation.gradient else None
    return Outputs(values, losses, np.zeros(1, np.uint8), lambda _: None, gradients=gradients)


def save(name: str, content: dict[str, Any], folder: Path = RESULTS, *, show: bool = True) -> None:
    """Write ``<name>.json`` with ``content``, machine and versions, and print it."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {"benchmark": name, "date": time.strftime("%Y-%m-%d", time.gmtime())}
    about |= {"machine": machine(), "versions": versions()}
    text = json.dumps({**about, **content}, indent=2) + "\n"
    (folder / f"{name}.json").write_text(text)
    if show:
        print(text)


def machine() -> dict[str, Any]:
    """Return CPU, cores that this process may use, memory, system, and GPUs if there are any."""
    information = Path("/proc/cpuinfo")
    text = information.read_text() if information.exists() else ""
    model = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpus = _gpus()
    return {
        "cpu": model[1] if model else platform.processor() or "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        **({"gpus": gpus} if gpus else {}),
    }


def versions() -> dict[str, str]:
    installed = {found.name.lower(): found.version for found in distributions()}
    names = (name for name in _PACKAGES if name in installed)
    return {"python": platform.python_version(), **{str(n): installed[n] for n in names}}


def _gpus() -> list[dict[str, str]]:
    """Ask nvidia-smi about each GPU; empty without it."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    rows = [line.split(", ") for line in done.stdout.splitlines()] if not done.returncode else []
    return [dict(zip(_GPU_FIELDS, row, strict=False)) for row in rows]
