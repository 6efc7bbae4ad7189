"""Every snippet of every README works when it is pasted, and what the READMEs name exists."""

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import warpfit
from support.load.faults import free_port
from support.repository import deployments
from support.repository.readmes import READMES, ROOT, Snippet, commands, programs, snippets
from support.repository.required_packages import absent_modules
from support.servers.server import ServerProcess
from warpfit.cli.main import main

ADDRESS = "127.0.0.1:50551"
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
#: Pages like the one of PySR.
_OF_OTHERS = [f"deploy/site/pages/coming_from_{name}.md" for name in ("gplearn", "operon", "deap")]
#: Those of the front page have a test of their own.
PROGRAMS = [program for path in READMES if path != "README.md" for program in programs(path)]
SHELL = [s for path in READMES for s in snippets(path) if s.language == "sh"]
LINES = [line for snippet in SHELL for line in commands(snippet)]
_SLOW = r"protoc |warpfit serve(?! --help)"
INSTALLING = [snippet for snippet in SHELL if "pip install" in snippet.code]
#: Once each, though several READMEs may name them. Compiling a worker in C++ takes long, and
#: other tests start servers, too.
RUNNING = [
    pytest.param(s, marks=[pytest.mark.thorough] * bool(re.search(_SLOW, s.code)))
    for s in {s.code: s for s in SHELL if s not in INSTALLING}.values()
]
#: Beginnings of commands that are not run as they stand: they install, measure for hours, or have
#: tests of their own. All other command lines of the READMEs are run, in blocks and in sentences.
NOT_RUN = (
    *("python client/examples/diabetes_gp.py", "python -m pytest", "python tests/bench/"),
    *("python proto/generate.py", "python -m warpfit_server.write_instructions", "pip ", "docker "),
    *("umask ", "sudo ", "COMPOSE_PROFILES=", "helm ", "chmod ", "warpfit info HOST:50551 --ca"),
    *(f"warpfit {name}" for name in ("ray", "precompile", "mcp", "top", "health")),
)
BUILD_TOOLS = ("protoc", "grpc_cpp_plugin", "g++", "pkg-config")
MAIN = "import sys; from warpfit.cli.main import main; sys.exit(main())"


# ---------------------------------------------------------------------------------- Python blocks
def execute(program: list[Snippet], server: ServerProcess, **sizes: int) -> dict[str, Any]:
    """Run the blocks of one program; one that goes on finds an open client and its data.

    A search takes one generation or second, and other sizes that are given.
    """
    names: dict[str, Any] = {}
    for snippet in program:
        if snippet.language == "py":
            client, columns = warpfit.connect(server.address), names["data"].names
            data = client.upload(names["X"], names["y"], names=columns)
            names |= {"client": client, "data": data}
        code = snippet.code.replace(ADDRESS, server.address)
        # As they stand they take minutes.
        for name, size in [("generations", 1), ("seconds", 1), *sizes.items()]:
            code = re.sub(rf"\b{name}=\d+", f"{name}={size}", code)
        exec(compile(code, str(snippet), "exec"), names)
    return names


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(one, marks=pytest.mark.thorough if one[0].path in _OF_OTHERS else ())
        for one in PROGRAMS
    ],
    ids=lambda program: str(program[0]),
)
def test_python(program, server, monkeypatch, tmp_path):
    for library in ("deap", "sympy", "gplearn", "pyoperon", "sklearn"):
        if any(re.search(rf"^(import|from) (warpfit\.)?{library}", s.code, re.M) for s in program):
            pytest.importorskip(library)
    writes = any("write_" in snippet.code for snippet in program)
    monkeypatch.chdir(tmp_path if writes else ROOT)
    monkeypatch.setenv("WARPFIT_ADDRESS", server.address)  # where an estimator would start one
    for value in execute(program, server, population=50).values():
        if isinstance(value, warpfit.Client):
            value.close()


def test_the_front_page_finds_a_law_and_evaluates_a_population(server: ServerProcess, monkeypatch):
    """Each in at most ten lines, and the law whatever the seed is."""
    monkeypatch.setenv("WARPFIT_ADDRESS", server.address)
    search, worker = programs("README.md")
    assert all(len(part.code.strip().splitlines()) <= 10 for part in (*search, *worker))
    for seed in range(3):
        model = execute(search, server, generations=5, random_state=seed)["model"]
        assert model.expression_ == "x1 ^ 1.5"
    assert "# x1 ^ 1.5" in search[0].code
    names = execute(worker, server)
    assert np.asarray(names["losses"]).argmin() == 0
    np.testing.assert_allclose(names["fit"].parameters[0], [2.5, 1.0], rtol=1e-3)
    names["client"].close()


# ----------------------------------------------------------------------------------- shell blocks
@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what snippets touch, with a table of data."""
    tmp_path, ignored = tmp_path_factory.mktemp("checkout"), shutil.ignore_patterns("__pycache__")
    for folder in ("client", "proto"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    rows = ["x1,x2,y", *(f"{a},{a * a},{2.0 * a + a * a}" for a in (0.5, 1.0, 1.5, 2.0))]
    (tmp_path / "data.csv").write_text("\n".join(rows) + "\n")
    return tmp_path


@pytest.mark.parametrize("snippet", RUNNING, ids=str)
def test_shell(snippet, server, checkout, monkeypatch):
    """Commands that would start a server for themselves use the one that runs."""
    monkeypatch.setenv("WARPFIT_ADDRESS", server.address)
    if "protoc " in snippet.code:
        check_build(snippet, server, checkout)
        return
    for line in commands(snippet):
        line = line.replace("--max-seconds 60", "--max-seconds 1")
        check_command(re.sub(f"{ADDRESS}|HOST:PORT", server.address, line), checkout)


def check_command(line: str, checkout: Path) -> None:
    """Run a command, or check what it names where it is not run."""
    words = shlex.split(line.replace(".venv/bin/", "").rstrip("&"), comments=True)
    if any(shlex.join(words).startswith(known.strip()) for known in NOT_RUN):
        check_words(words, checkout)
    elif words[:2] == ["warpfit", "serve"] and "--help" not in words:
        command = executed([*words, "--port", "0"], checkout)
        with subprocess.Popen(**command, stdout=subprocess.PIPE, text=True) as server:
            try:
                banner = server.stdout.readline()
                assert "listening on" in banner
                assert "cpu" in run(["warpfit", "info", banner.split()[3]], checkout)
            finally:
                server.terminate()
            assert server.wait(30) == 0
    else:
        run(words, checkout)


def check_words(words: list[str], checkout: Path) -> None:
    """Check that files, flags and extras which a command names are there."""
    line = shlex.join(words)
    for path in re.findall(r"(?<![\w/.])(?:deploy|tests|client|proto)/[\w./]+", line):
        assert (ROOT / path).exists() or (ROOT / f"{path}.py").exists(), path
    for extras in re.findall(r"'\.\[([\w,]+)\]'", line):
        assert set(extras.split(",")) <= set(EXTRAS), line
    for changes in [deployments.chart_changes(words)] if words[0] == "helm" else []:
        deployments.values(changes)
    for profile in re.findall(r"COMPOSE_PROFILES=(\w+)", line):
        services = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]
        assert any(profile in service.get("profiles", ()) for service in services.values())
    if line.startswith("docker build"):
        deployments.image_of(line)
    if words[0] == "warpfit" or words[1:2] == ["client/examples/diabetes_gp.py"]:
        length = 3 if words[1:2] in (["bench"], ["ray"]) and words[2:3] != ["--profile"] else 2
        given = [word for word in words[:length] if "." not in word or word.endswith(".py")]
        check_flags(line, *given)


def check_flags(line: str, *words: str) -> None:
    flags = [word for word in shlex.split(line, comments=True) if word[:2] == "--"]
    assert all(flag.partition("=")[0] in help_of(*words) for flag in flags), line


def sentences(path: str) -> set[str]:
    """Commands in sentences, but for those with which a command of a block begins."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / path).read_text(), flags=re.S | re.M)
    command = r"`((?:\.venv/bin/)?(?:warpfit|python|pip|docker|helm|chmod|sudo)\s[^`]+)`"
    found = {" ".join(line.split()) for line in re.findall(command, text)}
    return {line for line in found if not any(other.startswith(line) for other in LINES)}


SENTENCES = sorted(set().union(*map(sentences, READMES)))


@pytest.mark.parametrize("line", SENTENCES)
def test_commands_in_sentences(line: str, server, checkout, monkeypatch):
    """A name in capitals stands for what a user has."""
    monkeypatch.setenv("WARPFIT_ADDRESS", server.address)
    line = line.replace("HOST:PORT", server.address).replace("PATH", "addresses")
    if line in ("docker --cpus", "python -m"):  # flags
        return
    words = line.removeprefix(".venv/bin/").split()
    if words[0] == "warpfit" and words[1] in ("serve", "search"):  # blocks run them
        check_flags(line, *words[:2])
    else:
        check_command(line, checkout)


def executed(words: list[str], folder: Path) -> dict[str, Any]:
    """Arguments that run a command with this interpreter."""
    known = {"warpfit": [sys.executable, "-c", MAIN], "python": [sys.executable]}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return {"args": known.get(words[0], words[:1]) + words[1:], "cwd": folder, "env": environment}


@cache
def help_of(*words: str) -> str:
    return run([*words, "--help"], ROOT)


def run(words: list[str], folder: Path) -> str:
    """Run a command to its end; our own runs here, for which nothing has to be imported anew."""
    if words[0] == "warpfit":
        with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as out:
            try:
                status = main(words[1:])
            except SystemExit as end:
                status = end.code or 0
        assert status == 0, words
        return out.getvalue()
    done = subprocess.run(**executed(words, folder), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_build(snippet: Snippet, server: ServerProcess, checkout: Path) -> None:
    """Build the C++ worker, let it check itself, and run it against the server."""
    libraries = ["pkg-config", "--exists", "grpc++", "protobuf", "libcrypto"]
    if not all(map(shutil.which, BUILD_TOOLS)) or subprocess.run(libraries).returncode:
        pytest.skip(f"needs {', '.join(BUILD_TOOLS)}, and files of gRPC, protobuf and OpenSSL")
    code = snippet.code.replace(ADDRESS, server.address)
    agree, first, second, *search = run(["sh", "-e", "-c", code], checkout).splitlines()
    assert re.fullmatch(r"(\d+) of \1 agree", agree)
    assert "fitted" in first
    assert float(re.search(r"p1 = (\S+)", first)[1]) == pytest.approx(2.5)
    assert second.startswith("expression 1")
    kinds = [re.fullmatch(r"(size) \d+: mse \S+|\S+ s: \d+ (formulas)", line) for line in search]
    assert {kind[1] or kind[2] for kind in kinds} == {"size", "formulas"}


# ------------------------------------------- blocks that install: with the extra's packages alone
def shell(code: str, snippet: Snippet, folder: Path) -> str:
    """Paste code into a shell where the extra of a snippet is installed; return what it prints.

    What it leaves in the background is ended.
    """
    (extra,) = re.findall(r"pip install (?:-q )?-e '\.\[(\w+)\]'", snippet.code)
    assert extra in EXTRAS
    binaries = folder / "bin"
    binaries.mkdir(exist_ok=True)
    for name, command in {"python": "", "warpfit": f'-c "{MAIN}"'}.items():
        (binaries / name).write_text(f'#!/bin/sh\nexec {sys.executable} {command} "$@"\n')
        (binaries / name).chmod(0o700)
    paths = [ROOT / "tests" / "support" / "repository" / "absent", ROOT / "client", ROOT / "server"]
    environment = {
        "PATH": os.pathsep.join([str(binaries), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "TEST_WARPFIT_ABSENT": " ".join(absent_modules(f"warpfit[{extra}]")),
    }
    words = ["bash", "-e", "-c", f"trap 'kill $(jobs -p) 2>&- || true; wait' EXIT\n{code}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(words, cwd=folder, env={**os.environ, **environment}, **pipes)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_first_command(tmp_path):
    command, start = INSTALLING[0], INSTALLING[0].code.strip().rpartition(" && ")[2]
    assert command.path == "README.md"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert command.code.startswith(f"git clone {project['urls']['Repository']} && cd warpfit && ")
    (tmp_path / "client").symlink_to(ROOT / "client")
    start = start.removeprefix(".venv/bin/")
    small = "--generations 1 --population 60 --workers 1 --optimize"
    out = shell(f"{start} {small}", command, tmp_path)
    assert re.search(r"progression = .*\n\s*LaTeX: ", out)
    # A constant reaches the standard deviation of the target.
    assert float(re.findall(r"train RMSE ([0-9.]+)", out)[0]) < 77
    assert (tmp_path / "diabetes_gp.png").stat().st_size > 10_000


@pytest.mark.thorough
def test_the_start_of_the_tutorial(tmp_path):
    (server,) = INSTALLING[2:]
    address = f"127.0.0.1:{free_port()}"
    first = programs("client/README.md")[0][0].code.replace(ADDRESS, address)
    (tmp_path / "first.py").write_text(first)
    start = server.code.splitlines()[1].replace("50551", address.partition(":")[2])
    listens = f": < /dev/tcp/{address.replace(':', '/')}"
    wait = f"until ({listens}) 2>&-; do sleep 0.2; done"
    out = shell(f"{start}\n{wait}\nwarpfit info {address}\npython first.py", server, tmp_path)
    losses = re.search(r"^\[\s*(\S+)\s+(\S+)\s+(\S+?)\s*\]$", out, re.M)
    assert float(losses[2]) < 1e-6 < float(losses[1])
    assert "cpu" in out
    with pytest.raises(AssertionError, match="No module named 'sklearn'"):
        shell("python -c 'import numba, sklearn'", server, tmp_path)
