"""Where compiled code is kept: for exactly these sources, and only where it can be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from warpfit_server.code_cache import default_cache_directory, engine_environment, fingerprint


@pytest.fixture
def free(monkeypatch):
    """Nobody has said where."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)


@pytest.fixture
def sources(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "one.py").write_text("one = 1")
    (tmp_path / "inner" / "two.py").write_text("two = 2")
    return tmp_path


def test_the_place_is_configured_or_the_users(monkeypatch):
    monkeypatch.setenv("WARPFIT_CACHE_DIR", os.fspath(Path("some") / "place"))
    assert default_cache_directory() == Path("some/place")
    monkeypatch.delenv("WARPFIT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "other")
    assert default_cache_directory() == Path("other/warpfit")


def test_an_engine_keeps_code_below_the_cache(free, tmp_path):
    place = Path(engine_environment(tmp_path)["NUMBA_CACHE_DIR"])
    assert place.parent == tmp_path
    assert place.is_dir()
    assert engine_environment(tmp_path)["NUMBA_CACHE_DIR"] == str(place)
    assert {**os.environ, "NUMBA_CACHE_DIR": str(place)} == engine_environment(tmp_path)


def test_who_has_said_where_is_obeyed(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBA_CACHE_DIR", "elsewhere")
    assert engine_environment(tmp_path)["NUMBA_CACHE_DIR"] == "elsewhere"
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_can_be_written_nothing_is_said(free, tmp_path):
    (tmp_path / "file").write_text("")
    assert engine_environment(tmp_path / "file") == dict(os.environ)


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
