"""Code compiled by several processes, once for all engines, and kept in sealed files."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from numba import types

from warpfit_server.engine.cpu.codegen import parts
from warpfit_server.engine.native import compile_processes
from warpfit_server.engine.native.numba_cache import load, njit


@pytest.mark.parametrize("group", parts.GROUPS)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_processes_get_parts_of_about_equal_time(count, group):
    families = parts.GROUPS[group]
    seconds = {names: sum(parts.PARTS[name].seconds for name in names) for names in families}
    shares = compile_processes.share_out(seconds, count)
    assert sorted(itertools.chain(*shares)) == sorted(seconds)
    loads = [sum(seconds[name] for name in names) for names in shares]
    assert max(loads) <= max(*seconds.values(), 1.25 * sum(loads) / count)


def test_every_part_is_in_one_group():
    grouped = itertools.chain(*itertools.chain(*parts.GROUPS.values()))
    assert sorted(grouped) == sorted(parts.PARTS)


@pytest.fixture
def group_of_one(monkeypatch, tmp_path):
    """A group that takes a second, and a directory for its code."""
    monkeypatch.setitem(parts.GROUPS, "values", (("parallel",),))
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))


@pytest.mark.thorough
def test_another_process_compiles_into_the_directory(group_of_one, tmp_path, caplog):
    parts.compile_group("values", 2)
    names = {path.name.split("-")[0] for path in tmp_path.rglob("*.nbi")}
    functions = ("expect", "begin", "finish", "help_others", "close")
    assert names == {f"parallel_loop.{name}" for name in functions}
    assert caplog.text == ""
    begun = time.time()
    (marker,) = tmp_path.glob("values-*.complete")
    marker.unlink()
    parts.compile_group("values", 2)
    assert max(path.stat().st_mtime for path in tmp_path.rglob("*.nb?")) < begun, "only loaded"


def test_a_process_that_fails_is_logged_and_nothing_else(tmp_path, caplog):
    compile_processes.compile_once(tmp_path, "all", parts.__name__, [["no such part"]])
    assert "no such part" in caplog.text
    assert (tmp_path / "all.complete").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_directory_that_cannot_be_entered_costs_a_line(tmp_path, caplog):
    os.seteuid(65534)
    try:
        compile_processes.compile_once(tmp_path / "closed", "all", parts.__name__, [])
    finally:
        os.seteuid(0)
    assert "cannot compile by several processes" in caplog.text


class Slow:
    """A process that takes a while."""

    started: list[list[str]]
    ended: list[list[str]]

    def __init__(self, place, module, names, lock, *, urgent):
        self.names = names
        self.started.append(names)

    def wait(self):
        time.sleep(0.2)
        self.ended.append(self.names)
        return 0


def test_one_engine_compiles_and_the_others_wait(monkeypatch, tmp_path):
    Slow.started, Slow.ended = [], []

    def compile_all(number):
        compile_processes.compile_once(tmp_path, "all", "module", [["part"]])
        return len(Slow.ended)

    monkeypatch.setattr(compile_processes, "_start", Slow)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(compile_all, range(4)))
    assert found == [1] * 4
    assert Slow.started == [["part"]]


def test_processes_whose_engine_has_ended_are_waited_for(tmp_path):
    """An engine that is started again and again must not have the same compiled side by side."""
    script = (
        "import os, pathlib, sys\n"
        "from warpfit_server.engine.native import compile_processes\n"
        "command = [sys.executable, '-c', 'import time; time.sleep(1.5)']\n"
        "with compile_processes._locked(pathlib.Path(sys.argv[1])) as lock:\n"
        "    compile_processes.subprocess.Popen(command, pass_fds=[lock])\n"
        "    os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", script, tmp_path / "lock"], check=True)
    begun = time.monotonic()
    with compile_processes._locked(tmp_path / "lock"):
        assert time.monotonic() - begun > 0.5


# ------------------------------------------------------------------------------------- sealed files


def add_one(number):
    return number + 1


def compiled(function=add_one):
    """Load the code of a function that takes and returns an integer."""
    made = njit()(function)
    load(made, types.int64(types.int64))
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


def test_a_call_finds_the_code_of_a_function_that_another_process_has_loaded(place):
    compiled()
    called = njit()(add_one)
    assert called(1) == 2
    assert sum(called.stats.cache_hits.values()) == 1


def test_a_function_that_returns_another_type_is_not_loaded(place):
    with pytest.raises(AssertionError, match="returns int64"):
        load(njit()(add_one), types.float64(types.int64))


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
        "from warpfit_server.engine.lowering import tokens_are_valid as function; "
        "print(function._cache.cache_path)"
    )
    environment = {**os.environ, "WARPFIT_CACHE_DIR": str(tmp_path)}
    environment.pop("NUMBA_CACHE_DIR", None)
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert Path(ran.stdout).parent.parent == tmp_path
