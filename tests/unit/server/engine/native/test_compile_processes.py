"""Code that is compiled once for all engines, by several processes, and kept in sealed files."""

import importlib.util
import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numba
import numpy as np
import pytest
from numba import types
from numba.extending import register_jitable

from support.servers.server import eventually
from warpfit_server.engine.cpu.codegen import parts
from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.native.intrinsics import inlined, uncounted
from warpfit_server.engine.native.numba_cache import load, njit


@pytest.mark.parametrize("count", [1, 2, 4])
def test_processes_get_parts_of_about_equal_time(count, monkeypatch):
    shares = []

    def child(option, module, place, *words):
        shares.append(
            [[name for name in word.split(":", 2)[2].split(",") if name] for word in words]
        )
        return {"args": ["true"], "env": {}}

    monkeypatch.setattr(numba_cache, "python_child", child)
    parts.begin_compiling(count)
    assert len(shares) == count
    named = list(itertools.chain(*itertools.chain(*shares)))
    assert sorted(named) == sorted(parts.PARTS)
    for groups in (1, len(parts.GROUPS)):  # what a start waits for, and all
        loads = [sum(parts.PARTS[n].seconds for g in share[:groups] for n in g) for share in shares]
        longest = max(part.seconds for part in parts.PARTS.values())
        assert max(loads) <= max(longest, 1.25 * sum(loads) / count)


def test_a_process_that_fails_is_logged_and_nothing_else(tmp_path, caplog):
    numba_cache.begin(tmp_path, parts.__name__, {"all": {("no such part",): 1.0}}, 1)
    numba_cache.wait(tmp_path, "all")
    eventually(lambda: "no such part" in caplog.text)
    assert (tmp_path / "all.complete").exists()


#: Compiles nothing, but takes a while to do so, and notes it.
COMPILER = """
import sys, time
from pathlib import Path
from warpfit_server.engine.native.numba_cache import run_parts

def compile():
    place = Path(sys.argv[1])
    with (place / "log").open("a") as log:
        log.write(".")
    while not (place / "go on").exists():
        time.sleep(0.01)

run_parts({"first": lambda: None, "second": compile}, sys.argv[1:])
"""


@pytest.fixture
def groups(monkeypatch):
    child = numba_cache.python_child
    monkeypatch.setattr(
        numba_cache, "python_child", lambda _, __, *words: child("-c", COMPILER, *words)
    )
    return {"early": {("first",): 1.0}, "late": {("second",): 1.0}}


def test_one_engine_compiles_and_the_others_wait_for_each_group(groups, tmp_path):
    with ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            numba_cache.begin(tmp_path, "module", groups, 1)
        list(pool.map(lambda _: numba_cache.wait(tmp_path, "early"), range(4)))
        late = [pool.submit(numba_cache.wait, tmp_path, "late") for _ in range(4)]
        eventually(lambda: (tmp_path / "log").exists())
        assert not any(one.done() for one in late)
        (tmp_path / "go on").touch()
    numba_cache.begin(tmp_path, "module", groups, 1)
    assert (tmp_path / "log").read_text() == "."


def test_a_group_is_done_though_its_engine_has_ended_before(groups, tmp_path):
    """Else each of many short runs would start processes again."""
    numba_cache.begin(tmp_path, "module", groups, 2)
    eventually((tmp_path / "early.complete").exists)
    assert not (tmp_path / "late.complete").exists()
    (tmp_path / "go on").touch()
    eventually((tmp_path / "late.complete").exists)


def add_one(number):
    return number + 1


def compiled(function=add_one):
    made = njit()(function)
    load(made, types.int64(types.int64))
    return made


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
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


def chain(decorate, root):
    """Return a function that calls others, some of them in two ways and with two types."""

    @decorate
    def power(number, exponent):
        return number if exponent == 1 else number * power_of(number, exponent - 1)

    @decorate
    def power_of(number, exponent):
        result = number
        for _ in range(exponent - 1):
            result *= number
        return result

    @decorate
    def norm(vector):
        total = 0.0
        for i in range(len(vector)):
            total += power(vector[i], 2)
        return total

    @root
    def combine(vector, exponent):
        if exponent < 1:
            raise ValueError("no such power")
        return norm(vector) + power(exponent, 3) + power_of(vector[0], exponent)

    return combine, norm


def loaded(decorate):
    combine, norm = chain(decorate, njit(error_model="numpy"))
    load(combine, SIGNATURE)
    return combine, norm


SIGNATURE = types.float64(types.float64[::1], types.int64)
#: Decorators of functions that compiled code calls.
MAKERS = [inlined, uncounted, register_jitable, numba.njit]


@pytest.mark.parametrize(
    ("decorate", "known"),
    [*((each, numba_cache.KNOWN_VERSIONS) for each in MAKERS), (numba.njit, ())],
)
def test_callees_are_compiled_with_the_function_that_calls_them(decorate, known, monkeypatch):
    """With a version of Numba that is not known they are compiled as usual."""
    monkeypatch.setattr(numba_cache, "KNOWN_VERSIONS", known)
    vector = np.array([1.5, -2.0])
    for _ in range(2):  # compiled, and from the disk
        combine, _ = loaded(decorate)
        assert combine(vector, 2) == 6.25 + 8 + 2.25
        with pytest.raises(ValueError, match="no such power"):
            combine(vector, 0)


@pytest.mark.parametrize("decorate", [inlined, numba.njit])
def test_other_functions_may_call_a_callee_too(decorate):
    _, norm = loaded(decorate)

    @numba.njit
    def plain(vector):
        return norm(vector) + 1.0

    assert plain(np.array([3.0, 1.0])) == 11.0
    other, _ = loaded(decorate)
    assert other(np.array([3.0]), 1) == 9.0 + 1.0 + 3.0


def test_one_function_that_python_calls_may_call_another():
    combine, _ = chain(inlined, njit(error_model="numpy"))

    @njit(error_model="numpy")
    def twice(vector, exponent):
        return 2.0 * combine(vector, exponent)

    load(twice, SIGNATURE)
    load(combine, SIGNATURE)
    vector = np.array([1.5, -2.0])
    assert twice(vector, 2) == 2.0 * combine(vector, 2) == 33.0
    with pytest.raises(ValueError, match="no such power"):
        twice(vector, 0)
