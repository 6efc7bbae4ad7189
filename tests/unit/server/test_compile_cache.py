"""The compile cache: its directory, and files that are whole and this user's alone."""

import ast
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

import warpfit
from support.refusals import refused
from warpfit_server import compile_cache

CODE = b"machine code" * 100
OTHER_USER = 65534
is_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def cache(tmp_path):
    place = tmp_path / "cache"
    for inner in ("cpu-1/engine_1", "numba-1", "kernels/ab", "cupy"):
        (place / inner).mkdir(mode=0o700, parents=True)
        (place / inner / "file").write_text("code")
    return place


@pytest.fixture
def group_writable_umask():
    before = os.umask(0o002)
    yield
    os.umask(before)


def test_the_directory_is_configured_or_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("WARPFIT_CACHE_DIR", os.fspath(Path("some") / "place"))
    assert compile_cache.default_cache_directory() == Path.cwd() / "some" / "place"
    monkeypatch.delenv("WARPFIT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert compile_cache.default_cache_directory() == tmp_path / "other" / "warpfit"
    monkeypatch.setenv("HOME", str(tmp_path))
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert compile_cache.default_cache_directory() == tmp_path / ".cache" / "warpfit"


def test_an_engine_keeps_code_below_the_cache_whatever_the_environment_says(monkeypatch, tmp_path):
    names = ("NUMBA_CACHE_DIR", "CUPY_CACHE_DIR")
    for name in names:
        monkeypatch.setenv(name, "/elsewhere")
    environment = compile_cache.engine_environment(tmp_path)
    assert [Path(environment[name]).parent for name in names] == [tmp_path, tmp_path]
    assert {**os.environ, **{name: environment[name] for name in names}} == environment


def test_the_fingerprint_is_of_names_and_contents_of_sources(tmp_path):
    one, inner = tmp_path / "one.py", tmp_path / "inner"
    inner.mkdir()
    found = []
    for change in (
        *(partial((inner / name).write_text, "1") for name in ("two.py", "kernel.cu")),
        *(one.touch, (tmp_path / "notes.txt").touch),
        *(partial((inner / name).write_text, "2") for name in ("two.py", "kernel.cu")),
        partial(one.rename, tmp_path / "eins.py"),
    ):
        change()
        found.append(compile_cache.fingerprint([tmp_path]))
    assert found[2] == found[3] != found[1]
    assert len({*found}) == 6


def test_sources_take_constants_of_other_sources_only(monkeypatch):
    """So that compiled code, in which constants are frozen, changes its directory with them."""
    roots = Path(warpfit.__file__).parents[1], Path(compile_cache.__file__).parents[1]
    sources, given = set(), []
    monkeypatch.setattr(compile_cache, "fingerprint", given.extend)
    compile_cache.source_fingerprint()
    for path in given:
        assert path.exists()
        sources |= set(path.rglob("*.py")) if path.is_dir() else {path}
    unseen = set()
    for node in (node for path in sources for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("warpfit"):
            place = str(node.module).replace(".", "/") + ".py"
            is_source = any(root / place in sources for root in roots)
            constants = [alias.name for alias in node.names if alias.name.isupper()]
            unseen |= set() if is_source else {f"{node.module}.{name}" for name in constants}
    assert not unseen


def test_missing_directories_are_made_for_this_user_alone(tmp_path, group_writable_umask):
    with compile_cache.usable_cache_directory(tmp_path / "new" / "cache") as place:
        assert place == tmp_path / "new" / "cache"
    assert [p.stat().st_mode & 0o077 for p in (place, place.parent)] == [0, 0]


@pytest.mark.parametrize("mode", [0o20, 0o02])
@pytest.mark.parametrize("level", [".", "cpu-1/engine_1", "cpu-1/engine_1/file", "kernels/ab/file"])
def test_the_error_names_what_others_may_write(cache, level, mode):
    place = cache / level
    place.chmod(place.stat().st_mode | mode)
    told = f"UNSAFE_CACHE.*{place} can be written by its group or by others"
    refused(told, compile_cache.usable_cache_directory(cache).__enter__)


@is_root
@pytest.mark.parametrize("level", [".", "cpu-1", "cpu-1/engine_1/file", "numba-1/folder"])
def test_the_error_names_what_another_user_owns(cache, level):
    """Also a folder that this user cannot list, which root can; so is a link to a folder."""
    (cache / "numba-1/folder").symlink_to(cache / "cupy")
    os.chown(cache / level, OTHER_USER, OTHER_USER, follow_symlinks=False)
    refused(f"{level.strip('.')} belongs to user", compile_cache.check_private, cache)


def test_a_temporary_copy_replaces_an_unwritable_directory(cache, monkeypatch, caplog):
    problems = {cache: "Read-only file system"}
    monkeypatch.setattr(compile_cache, "_unwritable", problems.get)
    with compile_cache.usable_cache_directory(cache) as place:
        assert place != cache
        assert (place / "cpu-1/engine_1/file").read_text() == "code"
        assert not (place / "kernels").exists()
        compile_cache.check_private(place)
    assert not place.exists()
    assert len(caplog.records) == 1
    assert f"{cache} cannot be used: Read-only file system" in caplog.text


@pytest.mark.parametrize("mode", [0o660, 0o602, pytest.param(None, marks=is_root)])
def test_a_file_that_others_could_have_written_is_not_used(tmp_path, mode):
    path = tmp_path / "code"
    compile_cache.write(path, CODE)
    if mode:
        path.chmod(mode)
    else:
        os.chown(path, OTHER_USER, OTHER_USER)
    problem = "group or by others" if mode else f"user {OTHER_USER}"
    with pytest.raises(compile_cache.DamagedFileError, match=problem):
        compile_cache.read(path)
    # Links and pipes are not followed.
    (tmp_path / "link").symlink_to(tmp_path / "code")
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert compile_cache.find(tmp_path / "link") is compile_cache.find(tmp_path / "pipe") is None


def test_kernels_survive_a_restart_and_damaged_ones_are_misses(tmp_path):
    cache = compile_cache.DiskCache(tmp_path, 50_000)
    cache.put("key", CODE)
    assert compile_cache.DiskCache(tmp_path, 50_000).get("key") == CODE
    (entry,) = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 99]
    for damaged in (entry.read_bytes()[:-1], b"", entry.read_bytes()[:-3] + b"xyz"):
        entry.write_bytes(damaged)
        assert compile_cache.DiskCache(tmp_path, 50_000).get("key") is None
        cache.put("key", CODE)
        assert cache.get("key") == CODE
    for number in range(100):  # the bytes on disk are bounded
        cache.put(f"key{number}", bytes([number]) * 1000)
    total = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert total <= 55_000
    assert cache.get("key99") == bytes([99]) * 1000


def test_several_servers_write_the_same_entries(tmp_path):
    def write(_):
        cache = compile_cache.DiskCache(tmp_path, 1 << 20)
        for number in range(40):
            cache.put(f"key{number}", bytes([number]) * 500)
            assert cache.get(f"key{number}") == bytes([number]) * 500

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))


def test_content_that_was_written_is_read_and_private(tmp_path, group_writable_umask):
    path = tmp_path / "new" / "inner" / "code"
    assert compile_cache.write(path, CODE) == path.stat().st_size
    assert compile_cache.read(path) == compile_cache.find(path) == CODE
    for made in (path, path.parent, path.parent.parent):
        assert made.stat().st_mode & 0o077 == 0
