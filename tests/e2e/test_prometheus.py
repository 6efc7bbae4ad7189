"""A real Prometheus reads a real server and answers the queries of dashboard and rules."""

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import yaml

import warpfit
from support.load.faults import free_port
from support.servers.server import ServerProcess

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus")

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
#: Metrics that only a server with a GPU has, or one that something happened to.
EMPTY = ("warpfit_gpu_", "warpfit_cache_", "warpfit_engine_restarts", 'status!="OK"')


def queries() -> list[str]:
    panels = json.loads((DEPLOY / "grafana/dashboards/warpfit.json").read_text())["panels"]
    shown = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    return [q.replace("$instance", ".*").replace("$__rate_interval", "10s") for q in shown]


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory):
    """Ask a Prometheus that has scraped a server at work."""
    directory = tmp_path_factory.mktemp("prometheus")
    address = f"127.0.0.1:{free_port()}"
    with ServerProcess("--metrics-port", "0") as server:
        config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(DEPLOY / "prometheus/rules.yml")]
        config["scrape_configs"][0]["static_configs"] = [{"targets": [server.facts["metrics"]]}]
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        process = subprocess.Popen(
            [
                *("prometheus", f"--config.file={directory}/prometheus.yml"),
                *(f"--storage.tsdb.path={directory}/data", f"--web.listen-address={address}"),
            ],
            stderr=subprocess.DEVNULL,
        )
        try:
            _work_until_answered(server, address)
            yield address
        finally:
            process.terminate()
            process.wait(20)


def _work_until_answered(server: ServerProcess, address: str) -> None:
    """Evaluate until Prometheus has scraped twice and evaluated its rules."""
    deadline = time.monotonic() + 60
    with warpfit.connect(server.address) as client:
        data = client.upload(np.ones((100, 2)))
        turn = 0
        while turn % 50 or not _answers(address):
            assert time.monotonic() < deadline, "Prometheus has no figures"
            client.evaluate(data, ["x1 + x2"])
            time.sleep(0.01)
            turn += 1


def _answers(address: str) -> bool:
    try:
        return bool(ask(address, "warpfit:queue_seconds:mean2m"))
    except OSError:
        return False  # it has not started yet


def ask(address: str, query: str) -> list:
    text = urllib.parse.urlencode({"query": query})
    try:
        with urllib.request.urlopen(f"http://{address}/api/v1/query?{text}", timeout=10) as answer:
            return json.load(answer)["data"]["result"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{query}: {error.read().decode()}") from error


def test_the_dashboards_queries_have_answers(prometheus):
    for query in queries():
        found = ask(prometheus, query)
        assert found or any(name in query for name in EMPTY), query


def test_the_rules_are_evaluated(prometheus):
    assert ask(prometheus, "warpfit:queue_seconds:mean2m")
    with urllib.request.urlopen(f"http://{prometheus}/api/v1/rules", timeout=10) as answer:
        groups = json.load(answer)["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == 8
    assert all(rule["health"] == "ok" and not rule.get("lastError") for rule in rules)
    states = {rule["name"]: rule["state"] for rule in rules if rule["type"] == "alerting"}
    assert set(states.values()) == {"inactive"}
