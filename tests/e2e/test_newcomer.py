"""What a newcomer pastes works where nothing is installed: install, start, evaluate.

These are the snippets that install; ``test_readmes.py`` runs all others in the tests' environment.
"""

from __future__ import annotations

import re
import socket
import tomllib

import pytest

from support.repository.fresh_machine import FreshMachine, index_answers
from support.repository.readmes import READMES, ROOT, Snippet, installs, programs, snippets

ADDRESS = "127.0.0.1:50551"
#: Compiling thousands of modules, few of them used, takes longer than installing them. pip reads
#: the value as what `--no-compile` sets: whether it compiles.
QUICK = {"PIP_NO_COMPILE": "0"}


def installing() -> list[Snippet]:
    """All snippets that install something."""
    return [snippet for path in READMES for snippet in snippets(path) if installs(snippet)]


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def test_this_file_knows_every_snippet_that_installs():
    assert [snippet.path for snippet in installing()] == [*["README.md"] * 2, "client/README.md"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for snippet in installing():
        (extra,) = re.findall(r"\[(\w+)\]'", snippet.code)
        assert extra in project["optional-dependencies"]


@pytest.mark.timeout(900)  # on a busy machine
def test_install_start_evaluate(tmp_path):
    """The first command of the README, then in its environment the start of the tutorial."""
    if not index_answers():
        pytest.skip("needs a package index")
    machine = FreshMachine(tmp_path)
    command, _, server = installing()
    out = machine.shell(f"{command.code.rstrip()} --generations 8", **QUICK)
    assert re.search(r"progression = .*\n\s*LaTeX: ", out)
    assert (machine.checkout / "diabetes_gp.png").stat().st_size > 10_000

    address = f"127.0.0.1:{free_port()}"
    first = programs("client/README.md")[0][0].code.replace(ADDRESS, address)
    (machine.checkout / "first.py").write_text(first)
    start = server.code.replace("50551", address.partition(":")[2])
    wait = f"until warpfit info {address}; do sleep 1; done"
    out = machine.shell(f"{start}\n{wait}\npython first.py", machine.checkout / ".venv", **QUICK)
    losses = re.search(r"^\[\s*(\S+)\s+(\S+)\s+(\S+?)\s*\]$", out, re.M)
    assert float(losses[2]) < 1e-6 < float(losses[1])
    assert "cpu" in out


def test_ci_is_the_second_command():
    """Running it here would run this test again."""
    make, install, test = installing()[1].code.strip().split(" && ")
    ci = (ROOT / ".ci" / "run").read_text()
    assert make == "python3 -m venv .venv"
    assert 'python3 -m venv "$environment/venv"\n' in ci
    extra = re.fullmatch(r"\.venv/bin/pip install -q -e '\.\[(\w+)\]'", install)[1]
    assert re.search(rf"/pip\" install .*-e '\.\[{extra},lint\]'", ci)
    assert f"\n{test.removeprefix('.venv/bin/')}\n" in ci
