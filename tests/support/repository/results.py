"""Result files of benchmarks: numbers with the hardware and versions that they hold for."""

import json
import time
from pathlib import Path
from typing import Any

from warpfit.bench.hardware import machine, versions

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"


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
