"""Result files of `warpfit bench`."""

import json
import os
from pathlib import Path
from typing import Any, Final

from warpfit.errors import InvalidArgumentError

SCHEMA: Final = 1
BENCHMARK: Final = "warpfit bench"


def write(path: Path, document: dict[str, Any]) -> None:
    """Replace the file in one step: a reader never sees half of it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(document, indent=1) + "\n")
    beside.replace(path)


def read(path: Path) -> dict[str, Any]:
    """Read a result file; an InvalidArgumentError says that it is missing or something else."""
    remedy = "Name a file of `warpfit bench`"
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"{path}: {error}", "BAD_RESULTS", remedy) from error
    if not isinstance(document, dict) or document.get("benchmark") != BENCHMARK:
        raise InvalidArgumentError(f"{path} is no benchmark result", "BAD_RESULTS", remedy)
    return document
