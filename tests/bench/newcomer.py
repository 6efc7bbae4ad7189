"""How long a newcomer waits: from a clone, and from a package index, to a first evaluation.

    python tests/bench/newcomer.py

Runs the READMEs' own commands where nothing is installed and nothing compiled, and writes
results/newcomer.json. `pip` has to fetch packages, so this depends on the network, too. The clock
is what a newcomer sees; processor time is what the same takes on an idle core.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.repository.fresh import FreshMachine
from support.repository.readmes import installs, programs, snippets
from support.repository.results import write_result


@contextmanager
def fresh_machine() -> Iterator[Callable[..., str]]:
    """Yield the shell of a machine on which warpfit can be installed and has never run."""
    with tempfile.TemporaryDirectory() as folder:
        machine = FreshMachine(Path(folder))
        machine.publish()
        first = programs("client/README.md")[0][0].code
        (machine.checkout / "first.py").write_text(first)
        environment = machine.checkout / ".venv"
        cache = {"WARPFIT_CACHE_DIR": str(Path(folder) / "cache")}
        yield lambda code: machine.shell(code, environment, **cache)


def seconds(action: Callable[[], object]) -> dict[str, float]:
    """Time that passes, and processor time of all that it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    action()
    elapsed = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"elapsed": round(elapsed, 1), "processor": round(used, 1)}


def main() -> None:
    """Measure both ways and write the result."""
    clone, published = (
        next(filter(installs, snippets(path))).code for path in ("README.md", "client/README.md")
    )
    wait = "until warpfit info 127.0.0.1:50551; do sleep 0.2; done"
    with fresh_machine() as shell:
        run = seconds(lambda: shell(clone))
    with fresh_machine() as shell:
        shell("python3 -m venv .venv")
        evaluation = seconds(lambda: shell(f"{published}\n{wait}\npython first.py"))
    content = {
        "from_clone_to_the_end_of_the_first_run": run,
        "from_pip_install_to_a_first_evaluation": evaluation,
    }
    print(content)
    print(write_result("newcomer", content))


if __name__ == "__main__":
    main()
