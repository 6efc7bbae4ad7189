"""The commands and flags that the READMEs name in their sentences and tables exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from contextlib import redirect_stdout, suppress
from functools import cache
from io import StringIO

import pytest

from support.repository.deployments import values
from support.repository.readmes import READMES, ROOT, inline_code
from warpfit.cli.main import main

#: Which help knows the flags that a README names alone.
COMMANDS = {
    "README.md": ("serve", "eval"),
    "client/README.md": ("serve",),
    "server/README.md": ("serve", "eval"),
    "server/OPERATING.md": ("serve",),
    "server/SECURITY.md": ("serve", "eval"),
    "deploy/README.md": ("serve", "precompile", "ray up"),
    "proto/README.md": ("serve",),
    "tests/bench/README.md": ("serve",),
    "client/warpfit/bench/README.md": ("bench", "bench load"),
}
EXAMPLE = "client/examples/diabetes_gp.py"
#: Flags of other programs, each beside its name.
OTHERS = {
    "--ipc": "docker run",
    "--build-arg": "docker build",
    "--check": "worker.cpp and figures.py",
}


@cache
def flags_of(command: str) -> frozenset[str]:
    """Flags in the help of one of our commands, or of a script."""
    run = helps_alone if command.endswith(".py") else helps
    return frozenset(re.findall(r"(?<![\w-])--[a-z][\w-]*", run(command)))


def helps(command: str) -> str:
    """What a command of ours prints about itself."""
    with redirect_stdout(StringIO()) as printed, suppress(SystemExit):
        main([*command.split(), "--help"])
    return printed.getvalue()


def helps_alone(script: str) -> str:
    """What a script prints about itself."""
    command = [sys.executable, str(ROOT / script), "--help"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def flags_in(code: str) -> set[str]:
    return {word.partition("=")[0] for word in shlex.split(code) if word.startswith("--")}


@pytest.mark.parametrize("path", READMES)
def test_commands_have_these_flags(path: str):
    commands = [code for code in inline_code(path) if re.match(r"(\.venv/bin/)?warpfit \w", code)]
    for code in commands:
        words = code.removeprefix(".venv/bin/").split()[1:]
        has_two = words[0] == "ray" or words[1:2] in (["load"], ["report"])
        name = " ".join(words[: 2 if has_two else 1])
        assert flags_in(code) <= flags_of(name) | {"--help"}, code


@pytest.mark.parametrize("path", READMES)
def test_flags_that_stand_alone_are_flags_of_something(path: str):
    known = frozenset.union(frozenset(OTHERS), *map(flags_of, COMMANDS.get(path, ())))
    if path == "README.md":
        known |= flags_of(EXAMPLE)
    for code in inline_code(path):
        if code.startswith("--set "):
            values({code.split()[1].partition("=")[0]: None})
        elif code.startswith("--") and code not in ("--", "--some-name"):
            assert flags_in(code) <= known | {"--help"}, code


@pytest.mark.parametrize("path", READMES)
def test_what_is_installed_is_an_extra(path: str):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for code in inline_code(path):
        for names in re.findall(r"warpfit\[([\w,]+)\]", code):
            assert set(names.split(",")) <= project["optional-dependencies"].keys(), code
