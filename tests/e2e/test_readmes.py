"""Every snippet of every README works when it is pasted.

Those that install something are in `test_newcomer.py`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import warpfit
from support.repository.deployments import built
from support.repository.deployments import check_command as check_deployment
from support.repository.readmes import (
    READMES,
    ROOT,
    Snippet,
    commands,
    installs,
    programs,
    snippets,
)
from support.servers.server import ServerProcess

ADDRESS = "127.0.0.1:50551"
#: The first ones of these two have tests of their own.
LOOKED_AT = ("README.md", "client/README.md")
PROGRAMS = [program for path in READMES for program in programs(path)[path in LOOKED_AT :]]
SHELL = [
    snippet
    for path in READMES
    for snippet in snippets(path)
    if snippet.language == "sh" and not installs(snippet)
]
#: What is not run here, by a word of the command, and why; what the command names is checked.
NOT_RUN = {
    "docker": "needs a container engine: `tests/images` builds and runs the images with another",
    "helm": "needs a cluster: the chart is rendered, with what the command sets",
    "bench": "`test_bench.py` runs its commands with small sizes",
    "client/examples/diabetes_gp.py": "`test_examples.py` runs it",
}
BUILD_TOOLS = ("protoc", "grpc_cpp_plugin", "g++", "pkg-config")


def execute(program: list[Snippet], server: ServerProcess) -> dict[str, Any]:
    """Run the blocks of one program; one that goes on finds an open client and its data."""
    names: dict[str, Any] = {}
    for snippet in program:
        if snippet.language == "py":
            client = warpfit.connect(server.address)
            columns = names["data"].names
            data = client.upload(names["X"], names["y"], names=columns)
            names |= {"client": client, "data": data}
        code = snippet.code.replace(ADDRESS, server.address)
        exec(compile(code, str(snippet), "exec"), names)
    return names


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: str(program[0]))
def test_python(program: list[Snippet], server: ServerProcess, monkeypatch: pytest.MonkeyPatch):
    for library in ("deap", "sympy", "gplearn", "pyoperon", "sklearn"):
        if any(re.search(rf"^(import|from) (warpfit\.)?{library}", s.code, re.M) for s in program):
            pytest.importorskip(library)
    monkeypatch.chdir(ROOT)
    names = execute(program, server)
    for client in [value for value in names.values() if isinstance(value, warpfit.Client)]:
        client.close()


def test_the_first_example_is_short_and_right(server: ServerProcess, capsys):
    program = programs("README.md")[0]
    assert len(program[0].code.strip().splitlines()) <= 12
    names = execute(program, server)
    assert np.asarray(names["losses"])[0] < 1e-12
    assert np.shape(names["values"]) == (1000, 3)
    assert "(1000, 3)" in capsys.readouterr().out
    fit = names["fit"]
    np.testing.assert_allclose(fit.parameters[0], [2.5, 1.0], rtol=1e-3)
    assert (fit.loss <= fit.initial_loss).all()


def test_the_tutorial_finds_the_law_and_points_at_the_mistake(
    server: ServerProcess, capsys, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    names = execute(programs("client/README.md")[0], server)
    np.testing.assert_allclose(names["fit"].parameters[0], [1.5, 0.3], rtol=1e-3)
    assert names["model"].score(names["X"], names["y"]) > 0.9
    lines = capsys.readouterr().out.splitlines()
    (place,) = [index for index, line in enumerate(lines) if line.strip() == "^"]
    assert lines[place - 1][lines[place].index("^")] == "d"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what snippets touch, with a table of data."""
    for folder in ("client", "proto"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    rows = ["x1,x2,y", *(f"{a},{a * a},{2.0 * a + a * a}" for a in (0.5, 1.0, 1.5, 2.0))]
    (tmp_path / "data.csv").write_text("\n".join(rows) + "\n")
    return tmp_path


@pytest.mark.parametrize("snippet", SHELL, ids=str)
def test_shell(snippet: Snippet, server: ServerProcess, checkout: Path):
    if "protoc " in snippet.code:
        check_build(snippet, server, checkout)
        return
    for line in commands(snippet):
        line = line.replace(".venv/bin/", "")
        for address in (ADDRESS, "HOST:PORT"):
            line = line.replace(address, server.address)
        check_command(line, checkout)


def check_command(line: str, checkout: Path) -> None:
    """Run a command, or check what it names where it cannot be run."""
    words = shlex.split(line.rstrip("&"), comments=True)
    if {"docker", "helm"} & set(words):
        check_deployment(words, images())
    elif set(NOT_RUN) & set(words):
        length = 3 if words[2:3] in (["load"], ["report"]) else 2
        check_flags([*words[:length], "--help"], words, checkout)
    elif words[:2] == ["warpfit", "serve"] and "--help" not in words:
        serve(words, checkout)
    else:
        run(words, checkout)


def executed(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """A command with this interpreter, and its environment."""
    if words[0] == "warpfit":
        main = "import sys; from warpfit.cli.main import main; sys.exit(main())"
        words = [sys.executable, "-c", main, *words[1:]]
    elif words[0] == "python":
        words = [sys.executable, *words[1:]]
    return words, {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def run(words: list[str], folder: Path) -> str:
    """Run a command to its end."""
    command, environment = executed(words)
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def serve(words: list[str], folder: Path) -> None:
    """Start a server on a free port, ask it who it is, and stop it."""
    command, environment = executed([*words, "--port", "0"])
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            banner = server.stdout.readline()
            assert "listening on" in banner
            assert "cpu" in run(["warpfit", "info", banner.split()[3]], folder)
        finally:
            server.terminate()
        assert server.wait(30) == 0


def images() -> dict[str, str]:
    """Variants of the images that commands of the READMEs build, by name."""
    lines = [line for snippet in SHELL for line in commands(snippet)]
    return dict(built(shlex.split(line)[2:]) for line in lines if line.startswith("docker build "))


def check_flags(ask: list[str], words: list[str], folder: Path) -> None:
    known = run(ask, folder)
    for word in words:
        if word.startswith("--"):
            assert word.partition("=")[0] in known, f"{word} is no flag of {' '.join(ask[:2])}"


def check_build(snippet: Snippet, server: ServerProcess, checkout: Path) -> None:
    """Build the C++ worker, let it check itself, and run it against the server."""
    if not all(map(shutil.which, BUILD_TOOLS)):
        pytest.skip(f"needs {', '.join(BUILD_TOOLS)}")
    libraries = ["pkg-config", "--exists", "grpc++", "protobuf", "libcrypto"]
    if subprocess.run(libraries, check=False).returncode:
        pytest.skip("needs the development files of gRPC, protobuf and OpenSSL")
    code = snippet.code.replace(ADDRESS, server.address)
    done = subprocess.run(
        ["sh", "-e", "-c", code], cwd=checkout, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    agree, first, second = done.stdout.splitlines()
    assert re.fullmatch(r"(\d+) of \1 agree", agree)
    assert "fitted" in first
    assert float(re.search(r"p1 = (\S+)", first)[1]) == pytest.approx(2.5)
    assert second.startswith("expression 1")


def test_the_languages_of_snippets():
    assert {snippet.language for path in READMES for snippet in snippets(path)} == {
        *("python", "py", "sh", "text")
    }
