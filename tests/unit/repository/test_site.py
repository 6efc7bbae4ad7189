"""The documentation site: its pages are those of the repository, and their links lead somewhere."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
SITE = ROOT / "deploy" / "site"
#: Documents that are for the folder that they are in.
ELSEWHERE = {"tests/data/feynman/README.md", "tests/data/nist_strd/README.md"}
ELSEWHERE |= {".github/CODE_OF_CONDUCT.md"}


@pytest.fixture
def build(monkeypatch):
    monkeypatch.syspath_prepend(str(SITE))
    return importlib.import_module("build_site")


def documents():
    listed = ["git", "ls-files", "--", "*.md"]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_each_document_is_a_page(build):
    assert documents() - ELSEWHERE <= set(build.PAGES)
    assert all((ROOT / path).exists() for path in build.PAGES)
    assert len(set(build.PAGES.values())) == len(build.PAGES)


def test_links_between_documents_become_links_between_pages(build, tmp_path):
    build.write_sources(tmp_path)
    pages = {str(path.relative_to(tmp_path / "docs")) for path in (tmp_path / "docs").rglob("*.md")}
    assert set(build.PAGES.values()) <= pages
    index = (tmp_path / "docs" / "index.md").read_text()
    assert "](client/index.md)" in index
    for page in build.PAGES.values():
        text = (tmp_path / "docs" / page).read_text()
        plain = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", plain):
            assert (tmp_path / "docs" / page).parent.joinpath(target).exists(), (page, target)
        for target in re.findall(rf"{re.escape(build.SOURCES)}([^)#\s]+)", plain):
            assert (ROOT / target).exists(), (page, target)


def test_programs_are_pages_that_can_be_copied(build, tmp_path):
    build.write_sources(tmp_path)
    programs = [path for path in build.PAGES if path.endswith(".py")]
    named = (SITE / "pages" / "gallery.md").read_text()
    assert set(re.findall(r"client/examples/\w+\.py", named)) <= set(programs)
    for path in programs:
        page = (tmp_path / "docs" / build.PAGES[path]).read_text()
        (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
        assert block == (ROOT / path).read_text()
    gallery = (tmp_path / "docs" / "pages" / "gallery.md").read_text()
    assert "](../client/examples/gallery.md)" in gallery


def test_a_link_to_nothing_is_refused(build, tmp_path):
    with pytest.raises(SystemExit, match=r"there is no nothing\.md"):
        build.linked("[a](nothing.md)", "client/README.md", tmp_path)
    same = "```\n[a](nothing.md) and `client/README.md`\n```"
    assert build.linked(same, "client/README.md", tmp_path) == same
    text = build.linked("`server/README.md`, `no/such.md`", "client/README.md", tmp_path)
    assert text == "[`server/README.md`](../server/index.md), `no/such.md`"


def test_modules_of_the_reference_exist(build):
    for name in build.MODULES:
        if name != "warpfit.ray":  # which needs Ray
            assert importlib.import_module(name).__doc__


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_the_site_is_built_without_a_broken_link(build, tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, SITE / "build_site.py", "--folder", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    settings = yaml.safe_load((tmp_path / "mkdocs.yml").read_text())
    assert [next(iter(part)) for part in settings["nav"]] == [*build.CONTENTS, "Python"]
    index = (tmp_path / "site" / "search" / "search_index.json").read_text()
    for words in ("Coming from PySR", "SymbolicRegressor", "Puromycin".lower(), "linear_scaling"):
        assert words in index
    page = (tmp_path / "site" / "reference" / "warpfit.sklearn" / "index.html").read_text()
    assert "SymbolicRegressor" in page
