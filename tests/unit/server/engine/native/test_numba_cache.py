"""Functions compiled by Numba, kept in sealed files."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from warpfit_server.engine.native.numba_cache import load, njit


def add_one(number):
    return number + 1


def compiled(function=add_one):
    """Load the code of a function that takes and returns an integer."""
    made = njit()(function)
    load(made, "int64(int64)")
    return made


@pytest.fixture
def place(monkeypatch, tmp_path):
    """The directory where Numba keeps code."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "numba"))
    return tmp_path / "numba"


def test_a_function_is_compiled_once_and_its_files_are_private(place):
    assert compiled()(1) == 2
    again = compiled()
    assert again(1) == 2
    assert sum(again.stats.cache_hits.values()) == 1
    kept = [path for path in place.rglob("*") if path.is_file()]
    assert {path.suffix for path in kept} == {".nbi", ".nbc"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in (place, *kept))


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
def test_a_file_that_others_may_write_is_not_unpickled(place, suffix):
    compiled()
    (path,) = place.rglob(f"*{suffix}")
    path.chmod(0o666)
    again = compiled()
    assert again(1) == 2
    assert not again.stats.cache_hits


def test_a_copy_of_the_sources_uses_the_same_code(place, tmp_path):
    """Another checkout, or the same package installed again, compiles nothing."""
    copies = []
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / "sources.py"
        path.write_text("def double(number):\n    return 2 * number\n")
        os.utime(path, (len(copies), len(copies)))
        spec = importlib.util.spec_from_file_location("sources", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        copies.append(compiled(module.double))
    assert [sum(copy.stats.cache_hits.values()) for copy in copies] == [0, 1]
    assert [copy(21) for copy in copies] == [42, 42]


def test_processes_without_an_environment_keep_code_with_the_rest(tmp_path):
    code = (
        "from warpfit_server.engine.lowering.validate import tokens_are_valid as function; "
        "print(function._cache.cache_path)"
    )
    environment = {**os.environ, "WARPFIT_CACHE_DIR": str(tmp_path)}
    environment.pop("NUMBA_CACHE_DIR", None)
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert Path(ran.stdout).parent.parent == tmp_path
