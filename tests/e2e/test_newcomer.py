"""The snippets of the READMEs that install something run with those packages alone.

``test_readmes.py`` runs all other snippets in the tests' environment.
CI itself installs from nothing, with more extras. Here the packages of no other extra are found.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from support.load.faults import free_port
from support.repository.readmes import READMES, ROOT, Snippet, installs, programs, snippets
from support.repository.required_packages import absent_modules

ADDRESS = "127.0.0.1:50551"
#: The commands that an installation makes.
COMMANDS = {
    "python": f'exec {sys.executable} "$@"',
    "warpfit": "exec python -c 'import sys; from warpfit.cli.main import main; sys.exit(main())' "
    '"$@"',
}


def installing() -> list[Snippet]:
    """All snippets that install something."""
    return [snippet for path in READMES for snippet in snippets(path) if installs(snippet)]


def extra_of(snippet: Snippet) -> str:
    (extra,) = re.findall(r"\[(\w+)\]'", snippet.code)
    return extra


def shell(code: str, extra: str, folder: Path) -> str:
    """Paste code into a shell where one extra is installed; return what it prints.

    What it leaves in the background is ended.
    """
    binaries = folder / "bin"
    binaries.mkdir()
    for name, command in COMMANDS.items():
        (binaries / name).write_text(f"#!/bin/sh\n{command}\n")
        (binaries / name).chmod(0o700)
    paths = [ROOT / "tests" / "support" / "repository" / "absent", ROOT / "client", ROOT / "server"]
    environment = {
        "PATH": os.pathsep.join([str(binaries), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "WARPFIT_TEST_ABSENT": " ".join(absent_modules(f"warpfit[{extra}]")),
    }
    done = subprocess.run(
        ["bash", "-e", "-c", f"trap 'kill $(jobs -p) 2>&- || true; wait' EXIT\n{code}"],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_this_file_knows_every_snippet_that_installs():
    assert [snippet.path for snippet in installing()] == [*["README.md"] * 2, "client/README.md"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"warpfit": "warpfit.cli.main:main"}
    for snippet in installing():
        assert extra_of(snippet) in project["optional-dependencies"]


def test_packages_of_other_extras_are_not_found(tmp_path):
    with pytest.raises(AssertionError, match="No module named 'sklearn'"):
        shell("python -c 'import numba, sklearn'", "server", tmp_path)


def test_the_first_command(tmp_path):
    command = installing()[0]
    make, install, start = command.code.strip().split(" && ")
    assert make == "python3 -m venv .venv"
    assert install == f".venv/bin/pip install -q -e '.[{extra_of(command)}]'"
    (tmp_path / "client").symlink_to(ROOT / "client")
    start = start.removeprefix(".venv/bin/")
    out = shell(f"{start} --generations 8", extra_of(command), tmp_path)
    assert re.search(r"progression = .*\n\s*LaTeX: ", out)
    assert (tmp_path / "diabetes_gp.png").stat().st_size > 10_000


def test_the_start_of_the_tutorial(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    first = programs("client/README.md")[0][0].code.replace(ADDRESS, address)
    (tmp_path / "first.py").write_text(first)
    server = installing()[2]
    install, start = server.code.splitlines()
    assert install == f"pip install -e '.[{extra_of(server)}]'"
    start = start.replace("50551", address.partition(":")[2])
    wait = f"until warpfit info {address}; do sleep 0.2; done"
    out = shell(f"{start}\n{wait}\npython first.py", extra_of(server), tmp_path)
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
