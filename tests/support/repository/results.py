"""Result files of benchmarks: numbers with the hardware and versions that they hold for."""

import json
import os
import platform
import re
import shutil
import subprocess
import time
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Final

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
_PACKAGES: Final = (
    *("warpfit", "numpy", "numba", "grpcio", "protobuf", "pyoperon", "gplearn", "deap"),
    *("cupy-cuda13x", "cupy-cuda12x", "torch", "jax", "evogp", "matplotlib", "scikit-learn"),
)
_GPU_FIELDS: Final = ("name", "driver_version", "clocks.max.sm", "memory.total", "compute_cap")


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
