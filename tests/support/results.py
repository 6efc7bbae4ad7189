"""Result files of benchmarks: numbers with the hardware and versions that they hold for."""

from __future__ import annotations

import json
import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "bench" / "results"
_PACKAGES = (
    *("warpfit", "numpy", "numba", "grpcio", "protobuf", "cupy-cuda13x"),
    *("pyoperon", "gplearn", "scikit-learn"),
)


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
    """CPU model, the cores that this process may use, memory, GPU."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), "unknown")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter and are installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
