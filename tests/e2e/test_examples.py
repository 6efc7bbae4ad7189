"""An example runs from the command line and finds what it says.

`test_readmes` runs another one as the first command of the README.
"""

import re
import subprocess
import sys
from pathlib import Path

from support.servers.server import ServerProcess

EXAMPLES = Path(__file__).resolve().parents[2] / "client" / "examples"


def run(name: str, *flags: object) -> str:
    command = [sys.executable, str(EXAMPLES / name), *map(str, flags)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_kepler_finds_the_third_law(server: ServerProcess):
    out = run("kepler.py", "--address", server.address)
    law = next(line for line in out.splitlines() if line.strip().startswith("period = "))
    assert "distance" in law
    assert "mass" not in law
    assert "eccentricity" not in law
    (exponent,) = re.findall(r"distance \^ (-?[0-9.]+)", out)[-1:]
    assert abs(abs(float(exponent)) - 1.5) < 0.003, out


def test_a_loop_of_proposals_finds_an_oscillation(server: ServerProcess):
    flags = ("--address", server.address, "--rounds", 2, "--skeletons", 60)
    out = run("propose_loop.py", *flags)
    assert "y = 3 * exp(-0.4 * t) * cos(2.5 * t) + 1" in out
