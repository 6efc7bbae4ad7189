"""The documents say what is true: figures, names and files; and they are the site's pages."""

import importlib
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml

from support.repository.readmes import READMES

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "tests" / "bench" / "results"


def test_generated_parts_are_up_to_date():
    command = [sys.executable, ROOT / "tests" / "bench" / "figures.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.parametrize("readme", READMES)
def test_every_file_that_is_named_exists(readme):
    named = r"`((?:client|server|proto|tests|deploy)/[\w/.]*)`"
    for path in re.findall(named, (ROOT / readme).read_text()):
        assert (ROOT / path).exists(), path


def test_the_architecture_names_modules_that_exist():
    text = (ROOT / "server" / "README.md").read_text()
    product = [ROOT / "server" / "warpfit_server", ROOT / "client" / "warpfit", ROOT]
    names = {path.name for folder in product for path in folder.rglob("*.*")}
    for path in re.findall(r"`([\w/]+(?:\.py|\.cu|/))`", text):
        if "/" in path:
            assert any((folder / path).exists() for folder in product), path
        else:
            assert path in names, path


def test_result_files_name_machine_and_versions():
    for path in RESULTS.glob("*.json"):
        result = json.loads(path.read_text())
        assert result["machine"]["cores"] and result["versions"]["warpfit"], path


@pytest.mark.parametrize("name", ["guard", "guard_16_cores", "guard_cuda"])
def test_overload_and_greedy_tenants_stay_within_what_is_promised(name):
    measured = json.loads((RESULTS / f"{name}.json").read_text())
    over = measured["ten_times_overload"]
    assert max(case["p99_ratio"] for case in measured["greedy_tenant"].values()) <= 2
    for part in (over, over["ten_times_the_clients_that_obey"]):
        assert part["goodput_of_peak"] >= 0.9
    assert over["refused_as_one_client_saw_it"]["p99_ms"] < 10


def test_faults_and_fuzzing_ended_as_they_should():
    faults = json.loads((RESULTS / "faults.json").read_text())["faults"]
    assert all(fault["as_expected"] for fault in faults.values())
    fuzz = json.loads((RESULTS / "fuzz.json").read_text())
    assert fuzz["crashes"] == fuzz["internal"] == len(fuzz["not_allowed"]) == 0


@pytest.mark.parametrize("readme", [*READMES, "server/SEARCH.md", "CHANGELOG.md"])
def test_every_name_in_backticks_is_one_of_the_project(readme):
    """Names with an underscore or a capital inside, but for those of other programs."""
    text = re.sub(r"```.*?```", "", (ROOT / readme).read_text(), flags=re.DOTALL)
    unknown = {
        name
        for quoted in re.findall(r"`([^`\n]+)`", text)
        for name in re.findall(r"[A-Za-z_]\w*", quoted)
        if re.search(r"[a-z0-9]_[a-z0-9]|^_[A-Za-z]+$|[a-z][A-Z]", name)
    } - words_of_the_project()
    assert unknown - FOREIGN == set()


#: Names of proxies, systemd, scikit-learn, OpenTelemetry, PySR, DEAP and SciPy, and of functions
#: that a reader writes.
FOREIGN = {
    *("client_body_timeout", "client_header_timeout", "client_max_body_size", "grpc_buffer_size"),
    *("grpc_pass", "grpc_read_timeout", "http2_max_concurrent_streams", "keepalive_requests"),
    *("limit_conn", "limit_conn_zone", "binary_remote_addr", "connection_limit", "http2_protocol"),
    *("global_downstream_max_connections", "http2_protocol_options", "initial_stream_window_size"),
    *("premature_reset_total_stream_count", "request_headers_timeout", "stream_idle_timeout"),
    *("explicit_http_config", "max_direct_response_body_size_bytes", "CPUQuota"),
    *("HistGradientBoostingRegressor", "LinearRegression", "find_servers"),
    *("TemplateExpressionSpec", "TensorBoardLoggerSpec", "HallOfFame", "soft_l1"),
}


def files(*patterns: str) -> list[str]:
    """Files of the repository."""
    command = ["git", "ls-files", "--", *patterns]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@cache
def words_of_the_project() -> frozenset[str]:
    """All names in sources, settings and names of files, but for those that stand here."""
    listed = files(".", ":!*.md", ":!tests/data")
    words = set(re.findall(r"[A-Za-z_]\w*", "\n".join(listed)))
    kinds = {".py", ".cu", ".proto", ".toml", ".yaml", ".yml", ".json", ".cpp", ".sh"}
    for path in (ROOT / line for line in listed):
        if path.suffix in kinds and path != Path(__file__) and path.parent != RESULTS:
            words |= set(re.findall(r"[A-Za-z_]\w*", path.read_text()))
    return frozenset(words)


# ---------------------------------------------------------------------------------------- the site
SITE = ROOT / "deploy" / "site"
#: Documents that are for the folder that they are in.
ELSEWHERE = {f"tests/data/{name}/README.md" for name in ("feynman", "nist_strd")}
ELSEWHERE |= {".github/CODE_OF_CONDUCT.md"}


@pytest.fixture
def build(monkeypatch):
    monkeypatch.syspath_prepend(str(SITE))
    return importlib.import_module("build_site")


def test_each_document_is_a_page(build):
    assert set(files("*.md")) - ELSEWHERE <= set(build.PAGES)
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


def test_a_link_to_nothing_is_refused(build, tmp_path):
    with pytest.raises(SystemExit, match=r"there is no nothing\.md"):
        build.linked("[a](nothing.md)", "client/README.md", tmp_path)
    text = build.linked("`server/README.md`, `no/such.md`", "client/README.md", tmp_path)
    assert text == "[`server/README.md`](../server/index.md), `no/such.md`"


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
    for words in ("Coming from PySR", "SymbolicRegressor", "puromycin", "linear_scaling"):
        assert words in index
