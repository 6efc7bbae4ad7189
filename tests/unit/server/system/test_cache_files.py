"""Files of compiled code: whole or not used, this user's alone or not used, and never needed."""

from __future__ import annotations

import errno
import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

import warpfit_server
from warpfit_server.engine.native.numba_cache import njit
from warpfit_server.system import compile_cache

CODE = b"machine code" * 100
OTHER_USER = 65534
is_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def add_one(number):
    return number + 1


@pytest.fixture
def full_disk(monkeypatch):
    """Every temporary file is on a disk without room."""

    def refuse(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(compile_cache.tempfile, "NamedTemporaryFile", refuse)
    compile_cache._log_once.cache_clear()


@pytest.fixture
def numba_place(monkeypatch, tmp_path):
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path / "numba"))
    return tmp_path / "numba"


def test_what_was_written_is_read(tmp_path):
    path = tmp_path / "new" / "inner" / "code"
    assert compile_cache.write(path, CODE) == path.stat().st_size
    assert compile_cache.read(path) == compile_cache.find(path) == CODE
    assert compile_cache.find(tmp_path / "else") is None


def test_files_and_directories_are_this_users_alone_whatever_the_umask(tmp_path):
    before = os.umask(0o002)
    try:
        compile_cache.write(tmp_path / "new" / "inner" / "code", CODE)
    finally:
        os.umask(before)
    for name in ("new", "new/inner", "new/inner/code"):
        assert (tmp_path / name).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("change", [lambda b: b"", lambda b: b[:-1], lambda b: b[:-1] + b"x"])
def test_what_is_not_whole_is_not_used(tmp_path, change, caplog):
    path = tmp_path / "code"
    compile_cache.write(path, CODE)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(compile_cache.DamagedFileError, match="damaged"):
        compile_cache.read(path)
    assert compile_cache.find(path) is None
    assert caplog.text.count(str(path)) == 1


@pytest.mark.parametrize("mode", [0o660, 0o602, 0o666])
def test_what_others_may_write_is_not_used(tmp_path, mode):
    path = tmp_path / "code"
    compile_cache.write(path, CODE)
    path.chmod(mode)
    with pytest.raises(compile_cache.DamagedFileError, match="group or by others"):
        compile_cache.read(path)


@is_root
def test_what_belongs_to_another_user_is_not_used(tmp_path):
    path = tmp_path / "code"
    compile_cache.write(path, CODE)
    os.chown(path, OTHER_USER, OTHER_USER)
    with pytest.raises(compile_cache.DamagedFileError, match=f"user {OTHER_USER}"):
        compile_cache.read(path)


def test_links_and_pipes_are_not_followed(tmp_path):
    compile_cache.write(tmp_path / "code", CODE)
    (tmp_path / "link").symlink_to(tmp_path / "code")
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert compile_cache.find(tmp_path / "link") is None
    assert compile_cache.find(tmp_path / "pipe") is None


def test_a_full_disk_costs_one_line(tmp_path, full_disk, caplog):
    for number in range(5):
        compile_cache.write(tmp_path / str(number), CODE)
    assert list(tmp_path.iterdir()) == []
    assert caplog.text.count("No space left on device") == 1


def test_nothing_is_left_of_a_file_that_did_not_fit(tmp_path, monkeypatch):
    def refuse(self, target):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(Path, "replace", refuse)
    compile_cache.write(tmp_path / "code", CODE)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------- functions by Numba


def test_numba_finds_what_it_has_kept(numba_place):
    assert njit("int64(int64)")(add_one)(1) == 2
    again = njit("int64(int64)")(add_one)
    assert again(1) == 2
    assert sum(again.stats.cache_hits.values()) == 1
    kept = [path for path in numba_place.rglob("*") if path.is_file()]
    assert {path.suffix for path in kept} == {".nbi", ".nbc"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in (numba_place, *kept))


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
@pytest.mark.parametrize("keep", [0, 0.5, 0.99])
def test_numba_compiles_again_what_is_not_whole(numba_place, suffix, keep, caplog):
    njit("int64(int64)")(add_one)
    (path,) = numba_place.rglob(f"*{suffix}")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole))])
    assert njit("int64(int64)")(add_one)(1) == 2
    assert str(path) in caplog.text
    compile_cache.read(path)  # it is whole again
    assert sum(njit("int64(int64)")(add_one).stats.cache_hits.values()) == 1


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
def test_numba_does_not_unpickle_what_others_may_write(numba_place, suffix):
    njit("int64(int64)")(add_one)
    (path,) = numba_place.rglob(f"*{suffix}")
    path.chmod(0o666)
    again = njit("int64(int64)")(add_one)
    assert again(1) == 2
    assert not again.stats.cache_hits


def test_code_of_a_copy_of_the_sources_is_current(numba_place, tmp_path):
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
        copies.append(njit("int64(int64)")(module.double))
    assert [sum(copy.stats.cache_hits.values()) for copy in copies] == [0, 1]
    assert [copy(21) for copy in copies] == [42, 42]


def test_numba_works_on_a_full_disk(numba_place, full_disk, caplog):
    caplog.set_level(logging.WARNING)
    assert njit("int64(int64)")(add_one)(1) == 2
    assert njit()(add_one)(1.5) == 2.5
    assert caplog.text.count("No space left on device") == 1


def test_no_function_uses_numbas_own_cache():
    """Its pickles are read without a check."""
    root = Path(warpfit_server.__file__).parent
    assert [p for p in root.rglob("*.py") if "cache=True" in p.read_text()] == []


def test_processes_without_an_environment_keep_code_with_the_rest(tmp_path):
    code = (
        "from warpfit_server.engine import validate; print(validate.sound_tokens._cache.cache_path)"
    )
    environment = {**os.environ, "WARPFIT_CACHE_DIR": str(tmp_path)}
    environment.pop("NUMBA_CACHE_DIR", None)
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert Path(ran.stdout).parent.parent == tmp_path
