"""Examples run and find what they say.

`test_readmes` runs another one as the first command of the README.
"""

import re
import runpy
import subprocess
import sys
import types
from pathlib import Path

import pytest

from support.servers.server import ServerProcess

EXAMPLES = Path(__file__).resolve().parents[2] / "client" / "examples"


def run(name: str, *flags: object) -> str:
    command = [sys.executable, str(EXAMPLES / name), *map(str, flags)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def kinds(cell) -> set[str]:
    return {kind for output in cell.get("outputs", ()) for kind in output.get("data", ())}


@pytest.mark.thorough
def test_the_notebook_runs_from_top_to_bottom(server: ServerProcess, monkeypatch):
    nbformat, nbclient = map(pytest.importorskip, ("nbformat", "nbclient"))
    monkeypatch.setenv("WARPFIT_ADDRESS", server.address)
    notebook = nbformat.read(EXAMPLES / "first_steps.ipynb", 4)
    nbformat.validate(notebook)
    for cell in notebook.cells:  # on the server that is there, and quickly
        code = cell.source.replace("(warpfit.local())", "(warpfit.connect())")
        cell.source = code.replace("generations=5", "generations=1, population=50")
    shown = [kinds(cell) for cell in notebook.cells]
    done = nbclient.NotebookClient(notebook, timeout=200, kernel_name="python3").execute()
    # The outputs that are stored are of the same kinds.
    assert [kinds(cell) for cell in done.cells] == shown
    assert sum("image/png" in found for found in shown) == 2


@pytest.mark.thorough
def test_the_gallery_agrees_with_what_is_certified(server: ServerProcess, tmp_path):
    out = run("gallery.py", "--address", server.address, "--plots", tmp_path)
    digits = re.search(r"Misra1a: .*, ([0-9.]+) certified digits", out)
    assert float(digits[1]) > 6
    assert len(re.findall(r"enzyme: (.+?) +(-?[\d.]+) nats", out)) == 4
    assert re.search(r"^groups: rate = .*p1", out, re.MULTILINE)
    names = {"gallery_nist.svg", "gallery_enzyme.svg", "gallery_groups.svg"}
    assert {path.name for path in tmp_path.iterdir()} == names


@pytest.mark.thorough
def test_kepler_finds_the_third_law(server: ServerProcess, tmp_path):
    out = run("kepler.py", "--address", server.address, "--plot", tmp_path / "law.svg")
    assert "<svg" in (tmp_path / "law.svg").read_text()
    (law,) = re.findall(r"^ *period = .*", out, re.MULTILINE)[:1]
    assert [name for name in ("distance", "mass", "eccentricity") if name in law] == ["distance"]
    (exponent,) = re.findall(r"distance \^ (-?[0-9.]+)", out)[-1:]
    assert abs(abs(float(exponent)) - 1.5) < 0.003, out


def test_a_logger_takes_any_callable_of_numbers():
    logger = runpy.run_path(str(EXAMPLES / "log_search.py"))["SearchLogger"]
    sizes = {1: 3.0, 5: 0.5, 7: 0.7}
    one = types.SimpleNamespace
    front = [one(loss=loss, complexity=n, equation=f"x{n}") for n, loss in sizes.items()]
    told, texts = [], []
    logger(lambda *words: told.append(words), lambda *words: texts.append(words))(None, 4, front)
    assert told == [("search/loss", 0.5, 4), ("search/size", 5, 4), ("search/formulas", 3, 4)]
    assert texts == [("search/best", "x5", 4)]


def test_a_loop_of_proposals_finds_an_oscillation(server: ServerProcess):
    flags = ("--address", server.address, "--rounds", 2, "--skeletons", 60)
    out = run("propose_loop.py", *flags)
    first, best, second, better, law, r2, *_ = out.splitlines()
    for number, heading, line in ((1, first, best), (2, second, better)):
        told = rf"round {number}: \d+ of 60 predict better than the mean, \d+ refused"
        assert re.fullmatch(told, heading)
        assert re.fullmatch(r"  held-out R2 [01]\.\d{4}  .*\bp1\b.*", line)
    assert law == "y = 3 * exp(-0.4 * t) * cos(2.5 * t) + 1"
    assert re.fullmatch(r"  R2 on the rows held out (0\.99\d\d|1\.0000)", r2)
