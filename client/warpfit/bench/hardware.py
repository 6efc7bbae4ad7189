"""The hardware and versions that a result holds for, and the least time that they allow a call."""

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Final

import numpy as np

from warpfit.bench.batches import VARIABLES
from warpfit.bench.scenarios import Scenario
from warpfit.ir import Program
from warpfit.ops import BY_CODE, OPERATORS

_PACKAGES: Final = (
    *("warpfit", "numpy", "numba", "grpcio", "protobuf", "pyoperon", "gplearn", "deap"),
    *("cupy-cuda13x", "cupy-cuda12x", "torch", "jax", "evogp", "matplotlib", "scikit-learn"),
)
_GPU_FIELDS: Final = ("name", "driver_version", "clocks.max.sm", "memory.total", "compute_cap")
#: Special functions of each operator: a power is a logarithm and an exponential.
_SPECIAL: Final = {"div": 1, "pow": 2, "log": 1, "exp": 1, "sqrt": 1}
#: Vector instructions of one special function on a device without a unit for them: a polynomial of
#: degree 6, and bringing its argument into range and back.
_INSTRUCTIONS: Final = 10


def machine() -> dict[str, Any]:
    """Return CPU, cores that this process may use, memory, system, and GPUs if there are any."""
    cpu = _cpu_fields()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found: dict[str, Any] = {
        "cpu": cpu.get("model name", platform.processor() or "unknown"),
        "cores": _cores(),
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


@dataclass(frozen=True, slots=True)
class Peaks:
    """The peak rates of a device, the roof of the roofline model."""

    device: str
    lanes_per_second: float
    """Float32 instructions (one lane each) that can be issued in a second."""
    special_per_second: float
    """Float32 divisions, roots, logarithms or exponentials in a second; 0 if nothing is special."""
    bytes_per_second: float
    source: str

    def bound(self, scenario: Scenario, programs: Sequence[Program]) -> dict[str, Any]:
        """Return ``operations`` and ``bytes`` of one call, its least ``seconds``, ``by`` what.

        Counted is an instruction for each operator, a special function where one is, variables and
        target read once, values written once. Code that computes equal values once may take less.
        """
        word = 8 if scenario.precision == "float64" else 4
        times = scenario.rows * scenario.vectors
        counts = np.bincount(np.concatenate([p.codes for p in programs]), minlength=256)
        operators = times * int(sum(counts[code] for code in BY_CODE))
        special = times * sum(n * int(counts[OPERATORS[name].code]) for name, n in _SPECIAL.items())
        written = scenario.expressions if scenario.output == "values" else 0
        traffic = (VARIABLES + 1 + written) * scenario.rows * word
        own_unit = self.special_per_second > 0
        issued = operators + (0 if own_unit else (_INSTRUCTIONS - 1) * special)
        seconds = {
            "issue": issued * (word / 4) / self.lanes_per_second,
            "memory": traffic / self.bytes_per_second,
        }
        if own_unit and scenario.precision == "fast":
            seconds["special functions"] = special / self.special_per_second
        by = max(seconds, key=lambda name: seconds[name])
        return {"operations": issued, "bytes": traffic, "seconds": seconds[by], "by": by}


def cpu_peaks() -> Peaks:
    """Return the peaks of all cores together, at two vector instructions a clock for each core.

    Threads that share a physical core share them. Memory is measured by copying.
    """
    cpu = _cpu_fields()
    flags = cpu.get("flags", "").split()
    lanes = 16 if "avx512f" in flags else 8 if "avx2" in flags else 4
    shared = int(cpu.get("siblings", 1)) / max(1, int(cpu.get("cpu cores", 1)))
    clock = float(cpu.get("cpu MHz", 2000.0)) * 1e6
    source = f"{lanes} lanes x 2 a clock at {clock / 1e9:.2f} GHz; memory measured by copying"
    issued = _cores() / max(1.0, shared) * 2 * lanes * clock
    return Peaks(cpu.get("model name", "CPU"), issued, 0.0, _copy_rate(), source)


def gpu_peaks() -> Peaks | None:
    """Return the peaks of the first CUDA device; None without one, or without CuPy to ask it."""
    try:
        import cupy

        attributes = cupy.cuda.Device(0).attributes
        name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
        wanted = ("MultiProcessorCount", "ClockRate", "MemoryClockRate", "GlobalMemoryBusWidth")
        multiprocessors, clock, memory_clock, width = (float(attributes[a]) for a in wanted)
    except Exception:  # CuPy raises its own kinds for every way in which a device can be missing
        return None
    clocks = multiprocessors * clock * 1e3
    source = "as the driver reports them; 128 lanes and 16 special functions a clock"
    return Peaks(name, 128 * clocks, 16 * clocks, 2 * memory_clock * 1e3 * width / 8, source)


def _cpu_fields() -> dict[str, str]:
    """Return the fields of the first core, with the highest clock of all."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    lines = path.read_text().splitlines()
    fields = [line.partition(":") for line in lines]
    pairs = [(name.strip(), value.strip()) for name, _, value in fields if value]
    clocks = [float(value) for name, value in pairs if name == "cpu MHz"]
    first = dict(reversed(pairs))
    return {**first, "cpu MHz": str(max(clocks))} if clocks else first


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _copy_rate() -> float:
    """Measure how many bytes all cores together read and write in a second; the best of five."""
    threads, count = min(_cores(), 16), 32 << 20
    pairs = [(np.ones(count // 8), np.empty(count // 8)) for _ in range(threads)]
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(5):
            started = time.perf_counter()
            list(pool.map(lambda pair: np.copyto(pair[1], pair[0]), pairs))
            best = max(best, 2 * count * threads / (time.perf_counter() - started))
    return best


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
