"""Where compiled code is kept: for exactly these sources, and only where it can be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from warpfit.errors import InvalidArgumentError
from warpfit_server.system import compile_cache
from warpfit_server.system.compile_cache import (
    check_private,
    default_cache_directory,
    engine_environment,
    fingerprint,
    usable_cache_directory,
)

OTHER_USER = 65534


@pytest.fixture
def sources(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "one.py").write_text("one = 1")
    (tmp_path / "inner" / "two.py").write_text("two = 2")
    return tmp_path


@pytest.fixture
def cache(tmp_path):
    """A directory as an engine leaves it."""
    place = tmp_path / "cache"
    for inner in ("cpu-1/engine_1", "numba-1", "kernels/ab", "cupy"):
        (place / inner).mkdir(mode=0o700, parents=True)
        (place / inner / "file").write_text("code")
    return place


def test_the_place_is_configured_or_the_users(monkeypatch):
    monkeypatch.setenv("WARPFIT_CACHE_DIR", os.fspath(Path("some") / "place"))
    assert default_cache_directory() == Path.cwd() / "some" / "place"
    monkeypatch.delenv("WARPFIT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/other")
    assert default_cache_directory() == Path("/other/warpfit")
    monkeypatch.setenv("HOME", "/home/alice")
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert default_cache_directory() == Path("/home/alice/.cache/warpfit")


def test_an_engine_keeps_code_below_the_cache_whatever_was_said(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/elsewhere")
    monkeypatch.setenv("CUPY_CACHE_DIR", "/elsewhere")
    environment = engine_environment(tmp_path)
    assert Path(environment["NUMBA_CACHE_DIR"]).parent == tmp_path
    assert Path(environment["CUPY_CACHE_DIR"]).parent == tmp_path
    places = ("NUMBA_CACHE_DIR", "CUPY_CACHE_DIR")
    assert {**os.environ, **{name: environment[name] for name in places}} == environment


# ----------------------------------------------------------- who may have written it


def test_a_private_directory_is_used(cache):
    check_private(cache)
    with usable_cache_directory(cache) as place:
        assert place == cache


def test_what_is_missing_is_made_for_this_user_alone(tmp_path):
    before = os.umask(0o002)
    try:
        with usable_cache_directory(tmp_path / "new" / "cache") as place:
            assert place == tmp_path / "new" / "cache"
    finally:
        os.umask(before)
    assert [p.stat().st_mode & 0o077 for p in (place, place.parent)] == [0, 0]


@pytest.mark.parametrize("mode", [0o20, 0o02])
@pytest.mark.parametrize(
    "level", [".", "cpu-1", "cpu-1/engine_1", "cpu-1/engine_1/file", "numba-1", "kernels/ab/file"]
)
def test_a_level_that_others_may_write_is_named(cache, level, mode):
    place = cache / level
    place.chmod(place.stat().st_mode | mode)
    with pytest.raises(InvalidArgumentError) as caught, usable_cache_directory(cache):
        pass
    assert caught.value.reason == "UNSAFE_CACHE"
    assert f"{cache / level} can be written by its group or by others" in str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("level", [".", "cpu-1", "cpu-1/engine_1/file"])
def test_a_level_of_another_user_is_named(cache, level):
    os.chown(cache / level, OTHER_USER, OTHER_USER)
    with (
        pytest.raises(InvalidArgumentError, match=f"{level.strip('.')} belongs to user"),
        usable_cache_directory(cache),
    ):
        pass


def test_a_link_to_a_directory_is_followed_and_checked(cache, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(cache)
    check_private(link)
    (cache / "numba-1").chmod(0o777)
    with pytest.raises(InvalidArgumentError, match="numba-1"):
        check_private(link)


# ------------------------------------------------------------ where nothing can be kept


@pytest.fixture
def refusing(monkeypatch):
    """Make a directory one that cannot be written, without touching its files."""
    problems = {}
    monkeypatch.setattr(compile_cache, "_unwritable", lambda path: problems.get(path))
    return problems


def test_a_directory_that_cannot_be_written_is_copied(cache, refusing, caplog):
    refusing[cache] = "Read-only file system"
    with usable_cache_directory(cache) as place:
        assert place != cache
        assert (place / "cpu-1/engine_1/file").read_text() == "code"
        assert not (place / "kernels").exists()
        check_private(place)
    assert not place.exists()
    assert len(caplog.records) == 1
    assert f"{cache} cannot be used: Read-only file system" in caplog.text


def test_without_room_for_a_temporary_directory_the_cache_is_read_in_place(
    cache, tmp_path, refusing, caplog
):
    refusing[cache] = refusing[tmp_path] = "No space left on device"
    with usable_cache_directory(cache, within=str(tmp_path)) as place:
        assert place == cache
    assert len(caplog.records) == 1


def test_a_file_in_the_way_is_no_reason_to_stop(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with usable_cache_directory(tmp_path / "file" / "cache") as place:
        assert place.is_dir()
    assert len(caplog.records) == 1


def test_a_disk_that_is_nearly_full_is_not_used(cache, monkeypatch):
    usage = type("Usage", (), {"free": 5 << 20})
    monkeypatch.setattr(compile_cache.shutil, "disk_usage", lambda path: usage)
    assert compile_cache._unwritable(cache) == "only 5 MiB of its disk are free"


@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / "inner" / "two.py").write_text("two = 3"),
        lambda root: (root / "three.py").write_text(""),
        lambda root: (root / "one.py").rename(root / "eins.py"),
        lambda root: (root / "one.py").unlink(),
    ],
    ids=["content", "more", "name", "less"],
)
def test_other_sources_get_another_place(sources, change):
    before = fingerprint([sources])
    assert fingerprint([sources]) == before
    change(sources)
    assert fingerprint([sources]) != before


def test_what_is_no_source_does_not_count(sources):
    before = fingerprint([sources])
    (sources / "notes.txt").write_text("x")
    (sources / "one.py").touch()
    assert fingerprint([sources]) == before
