"""Stands for ``docker`` where there is none: ``docker run`` is a process without a container.

It has the variables, the entry point and the arguments that a container of the documented line
would have; the files that the line mounts are named where they lie on this machine. ``docker
build`` does nothing.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from support.repository.deployments import container

#: Ports of this machine for those of containers, as JSON.
PORTS = "TEST_WARPFIT_PORTS"
#: Variables that a process needs to find this tree's modules; containers have others.
_KEPT = ("PATH", "PYTHONPATH", "HOME", "WARPFIT_CACHE_DIR")
#: Settings that name a port.
_PORTS = ("WARPFIT_PORT", "WARPFIT_HEALTH_PORT", "WARPFIT_METRICS_PORT")


def main(words: list[str]) -> None:
    """Become the process that ``docker`` with these arguments starts."""
    if words[0] == "build":
        return
    assert words[0] == "run", words
    made = container(words[1:])
    ports = json.loads(os.environ[PORTS])
    variables = {}
    for name, value in made.environment.items():
        for inside, outside in made.mounts.items():
            if value.startswith(f"{inside}/"):
                value = outside + value.removeprefix(inside)
        variables[name] = ports[value] if name in _PORTS else value
    outside = {name: os.environ[name] for name in _KEPT if name in os.environ}
    if made.command[1:] == ("serve",):
        assert made.environment["WARPFIT_PORT"] in made.published, "nobody can reach the port"
        assert made.environment["WARPFIT_CACHE_DIR"] in made.mounts, "the root is read-only"
    os.execvpe(made.command[0], list(made.command), {**variables, **outside})


if __name__ == "__main__":
    main(sys.argv[1:])
