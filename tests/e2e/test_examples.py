"""The examples run from the command line and find what they say, each within two minutes."""

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


def test_the_deap_example_fits_constants(server: ServerProcess, tmp_path):
    flags = ("--address", server.address, "--generations", 2, "--population", 60, "--workers", 1)
    out = run("diabetes_gp.py", *flags, "--plot", tmp_path / "fitted.png", "--optimize")
    assert (tmp_path / "fitted.png").stat().st_size
    # A constant reaches the standard deviation of the target.
    assert float(re.findall(r"train RMSE ([0-9.]+)", out)[0]) < 77
