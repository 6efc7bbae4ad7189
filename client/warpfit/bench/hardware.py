"""What a result holds for: the machine, its peaks, and the versions of everything involved."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import numpy as np

_PACKAGES: Final = (
    *("warpfit", "numpy", "numba", "grpcio", "protobuf", "numexpr", "pyoperon", "gplearn"),
    *("cupy-cuda13x", "cupy-cuda12x", "torch", "jax", "evogp", "matplotlib", "scikit-learn"),
)
_GPU_FIELDS: Final = ("name", "driver_version", "clocks.max.sm", "memory.total", "compute_cap")
_COPIED_BYTES: Final = 32 << 20


def machine() -> dict[str, Any]:
    """CPU model, the cores that this process may use, memory, system; GPUs where there are any."""
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


def has_gpu() -> bool:
    """Whether there is an NVIDIA GPU to try; its libraries may still be missing."""
    return bool(_gpus()) or any(Path("/dev").glob("nvidia[0-9]*"))


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter and are installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True, slots=True)
class Peaks:
    """What a device could do at most; where a roofline lies."""

    device: str
    lanes_per_second: float
    """Float32 instructions (one lane each) that can be issued in a second."""
    special_per_second: float
    """Float32 divisions, roots, logarithms or exponentials in a second; 0 if they have no unit of
    their own."""
    bytes_per_second: float
    source: str
    """Where the numbers come from."""


def cpu_peaks() -> Peaks:
    """Peaks of all cores: lanes by instruction set and clock, memory by copying.

    Two vector instructions a clock for each physical core are assumed; threads that share a core
    share them.
    """
    cpu = _cpu_fields()
    flags = cpu.get("flags", "").split()
    lanes = 16 if "avx512f" in flags else 8 if "avx2" in flags else 4
    shared = int(cpu.get("siblings", 1)) / max(1, int(cpu.get("cpu cores", 1)))
    clock = float(cpu.get("cpu MHz", 2000.0)) * 1e6
    return Peaks(
        device=cpu.get("model name", "CPU"),
        lanes_per_second=_cores() / max(1.0, shared) * 2 * lanes * clock,
        special_per_second=0.0,
        bytes_per_second=_copy_rate(),
        source=f"{lanes} lanes x 2 a clock at {clock / 1e9:.2f} GHz; memory measured by copying",
    )


def gpu_peaks() -> Peaks | None:
    """Peaks of the first CUDA device; None without one, or without CuPy to ask it."""
    try:
        import cupy

        device = cupy.cuda.Device(0)
        attributes = device.attributes
        name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    except Exception:  # CuPy raises its own kinds for every way in which a device can be missing
        return None
    wanted = ("MultiProcessorCount", "ClockRate", "MemoryClockRate", "GlobalMemoryBusWidth")
    if not all(attributes.get(attribute) for attribute in wanted):
        return None
    multiprocessors, clock, memory_clock, width = (float(attributes[a]) for a in wanted)
    clocks = multiprocessors * clock * 1e3
    return Peaks(
        device=name,
        lanes_per_second=128 * clocks,
        special_per_second=16 * clocks,
        bytes_per_second=2 * memory_clock * 1e3 * width / 8,
        source="multiprocessors, clocks and bus width as the driver reports them; 128 lanes and "
        "16 special functions a clock",
    )


def _cpu_fields() -> dict[str, str]:
    """Fields of the first core, and the highest clock of all."""
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
    """Bytes read and written in a second by all cores together; the best of five."""
    threads = min(_cores(), 16)
    pairs = [(np.ones(_COPIED_BYTES // 8), np.empty(_COPIED_BYTES // 8)) for _ in range(threads)]
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(5):
            started = time.perf_counter()
            list(pool.map(lambda pair: np.copyto(pair[1], pair[0]), pairs))
            best = max(best, 2 * _COPIED_BYTES * threads / (time.perf_counter() - started))
    return best


def _gpus() -> list[dict[str, str]]:
    """What nvidia-smi says about each GPU; empty without it."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.split(", ") for line in text.splitlines() if line.strip()]
    return [dict(zip(_GPU_FIELDS, row, strict=False)) for row in rows]
