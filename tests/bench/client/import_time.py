"""How long ``import warpfit`` takes, beside NumPy alone, and how much a client installs.

    python tests/bench/run.py client/import_time [--repetitions 15]

Each import happens in a fresh interpreter, which measures it itself, after one that fills the
caches of compiled bytecode: the time that passes, and the processor time, which is the same on an
idle machine and does not count the waiting on a busy one.
"""

import argparse
import statistics
import subprocess
import sys

from harness import save

from support.repository.required_packages import required_packages

STATEMENTS = {
    "numpy": "import numpy",
    "warpfit": "import warpfit",
    "warpfit, ready to connect": "import warpfit; warpfit.connect",
    "warpfit.sklearn": "import warpfit.sklearn",
}


def milliseconds(statement: str) -> tuple[float, float]:
    """Processor time and elapsed time of a statement in a fresh interpreter."""
    code = (
        "import time; start = time.process_time(), time.perf_counter()\n"
        f"{statement}\n"
        "print((time.process_time() - start[0]) * 1000, (time.perf_counter() - start[1]) * 1000)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    processor, elapsed = map(float, done.stdout.split())
    return processor, elapsed


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=15)
    options = parser.parse_args()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in STATEMENTS}
    for repetition in range(options.repetitions + 1):
        for name, statement in STATEMENTS.items():
            found = milliseconds(statement)
            if repetition:
                times[name].append(found)
    content = {
        "repetitions": options.repetitions,
        "median_milliseconds": {
            name: {
                what: round(statistics.median(pair[index] for pair in found), 1)
                for index, what in enumerate(("processor", "elapsed"))
            }
            for name, found in times.items()
        },
        "client_installs": sorted(required_packages("warpfit")),
    }
    save("import_time", content)


if __name__ == "__main__":
    main()
