"""Seconds from nothing to the first formula: the first program of `README.md` in a new process.

It runs with an empty compile cache, as on a new machine, and again with the cache that this has
filled. Imports, the start of a server, compiling, the search and the output are part of the time.
"""

import os
import re
import subprocess
import tempfile
import time
from pathlib import Path

from harness import arguments, save

from warpfit.child_processes import python_child

README = Path(__file__).resolve().parents[3] / "README.md"


def main() -> None:
    options = arguments(__doc__, "first_fit", rounds=5)
    block = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    seconds: dict[str, list[float]] = {"empty cache": [], "filled cache": []}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as cache:
            own = {**os.environ, "WARPFIT_CACHE_DIR": cache}
            for series in seconds.values():
                started = time.perf_counter()
                child = python_child("-c", block[1], environment=own)
                subprocess.run(**child, check=True, capture_output=True)
                series.append(round(time.perf_counter() - started, 2))
    save(options.name, {"rounds": options.rounds, "seconds": seconds}, options.folder)
