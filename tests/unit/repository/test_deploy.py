"""What is under deploy/: rendered, checked against schemas, and against what the server exports."""

import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.repository import deployments
from support.repository.deployments import CHART, DEPLOY, ROOT, check_environment, render, values
from warpfit.request import Timings
from warpfit_server.config import Config
from warpfit_server.dataset_store import StoreUsage
from warpfit_server.engine.interface import COUNTERS
from warpfit_server.logs import CALL_COUNTERS, HISTOGRAMS, CallRecord, Recorder
from warpfit_server.metrics import GpuUsage, ServerCollector

CONFIG = "deploy/prometheus/prometheus.yml"
#: Values under which the chart is rendered.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "everything": {
        **{f"{name}.enabled": True for name in ("autoscaling", "serviceMonitor", "prometheusRule")},
        **{f"{name}.annotations": {"a": "b"} for name in ("service", "serviceAccount")},
        **{"podAnnotations": {"a": "b"}, "serviceMonitor.labels": {"release": "prometheus"}},
        **{"tls.secretName": "tls", "tls.clientCaSecretName": "ca", "tokens.secretName": "tokens"},
        **{"cache.persistent": True, "cache.storageClass": "fast"},
        **{"imagePullSecrets": [{"name": "registry"}], "gpu.runtimeClassName": "nvidia"},
        **{"nodeSelector": {"gpu": "h200"}, "affinity": {"nodeAffinity": {}}},
        "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
    },
}


# ------------------------------------------------------------------------------------- metrics
def exported() -> set[str]:
    """Every series name that a server with a GPU can export."""
    recorder = Recorder()
    amounts = {"received_bytes": 1, "programs": 1, "tokens": 1, "token_rows": 1}
    timings = Timings(*[1] * 5, tier="tier", cache_hits=1)
    recorder.end(CallRecord("Evaluate", "", 0, "x", status="OK", timings=timings, **amounts))
    totals = recorder.totals()
    assert {name for name, _ in totals.counts} == set(CALL_COUNTERS)
    assert {name for name, _ in totals.histograms} == set(HISTOGRAMS)
    one = SimpleNamespace
    supervisors = [one(device=one(label="cuda:0"), counters=dict.fromkeys(COUNTERS, 1.0))]
    serving, engine = one(serving={"cuda:0"}), one(label="cuda:0", probe_seconds=0.5)
    restarts = {("cuda:0", "hung"): 2}
    server = one(
        **{"recorder": recorder, "config": Config(max_resident_bytes=1000)},
        engines=one(engine="cuda", restarts=restarts, supervisors=supervisors),
        datasets=one(usage=lambda: StoreUsage(1, 100, 3)),
        watchdog=one(readiness=serving, engines=[engine]),
        **{"processes": lambda: {"main": 1}, "quotas": one(work=lambda: [0])},
    )
    families = [*ServerCollector(server, lambda: [GpuUsage("0", "H200", 1, 1, 1.0)]).collect()]
    assert all(family.samples for family in families)
    return {sample.name for family in families for sample in family.samples}


def dashboard() -> list[str]:
    """Every query of the dashboard, its variables replaced."""
    panels = json.loads((DEPLOY / "grafana/dashboards/warpfit.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    return [q.replace("$instance", ".*").replace("$__rate_interval", "1m") for q in queries]


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "prometheus/rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def metrics_in(texts) -> set[str]:
    return {name for text in texts for name in re.findall(r"\bwarpfit_\w+", text)}


def test_queries_ask_for_metrics_that_there_are_and_the_dashboard_shows_all():
    adapter = (CHART / "adapter-rules.yaml").read_text()
    asked = metrics_in([*dashboard(), *(rule["expr"] for rule in rules()), adapter])
    assert asked - exported() - {"warpfit_queue_seconds_mean"} == set()
    pages = exported(), metrics_in(dashboard())
    families, shown = (
        {re.sub("_(bucket|sum|count)$", "", name) for name in page} for page in pages
    )
    assert families - shown == set()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
@pytest.mark.parametrize(
    "words", [("test", "rules", "tests/data/alerts.yml"), ("check", "config", CONFIG)]
)
def test_each_alert_fires_for_its_fault_alone_and_prometheus_accepts_the_rules(words):
    ran = subprocess.run(["promtool", *words], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_each_alert_has_a_case():
    """Which `promtool` runs, where there is one."""
    tests = yaml.safe_load((ROOT / "tests/data/alerts.yml").read_text())["tests"]
    cases = [case for test in tests for case in test.get("alert_rule_test", ())]
    fired = {case["alertname"] for case in cases if case["exp_alerts"]}
    assert fired == {rule["alert"] for rule in rules() if "alert" in rule}


# --------------------------------------------------------------------------------------- chart
def container_of(manifests) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """The variables of the server, and the volumes of its pod."""
    (found,) = (m for m in manifests if m["kind"] == "StatefulSet")
    pod = found["spec"]["template"]["spec"]
    return {e["name"]: e["value"] for e in pod["containers"][0]["env"]}, pod["volumes"]


@pytest.mark.skipif(not deployments.can_render(), reason="needs helm or go")
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_chart_asks_for_tls_and_tokens_and_sets_what_the_server_knows(variant):
    manifests = render(VARIANTS[variant])
    environment, volumes = container_of(manifests)
    assert "WARPFIT_INSECURE" not in environment
    assert environment["WARPFIT_TLS_CERT"]
    assert environment["WARPFIT_TOKEN_FILE"]
    for name in ("tls", "tokens"):
        (mode,) = (v["secret"]["defaultMode"] for v in volumes if v["name"] == name)
        assert mode & 0o027 == 0  # as `warpfit.transport.connection.check_secret` demands
    check_environment(environment).check_exposure()
    pytest.importorskip("kubernetes_validate")
    deployments.check_schemas(manifests)


@pytest.mark.skipif(not deployments.can_render(), reason="needs helm or go")
def test_the_chart_refuses_what_is_open_by_accident():
    changes, consent = {"tls.secretName": ""}, "insecure.plainText"
    with pytest.raises(AssertionError, match=consent):
        render(changes)
    environment, _ = container_of(render({**changes, consent: True}))
    assert "WARPFIT_INSECURE" in environment
    check_environment(environment).check_exposure()


def test_the_schema_of_the_values_knows_them_all_and_no_others():
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((CHART / "values.schema.json").read_text())
    for variant in VARIANTS.values():
        jsonschema.validate(values(variant), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**values({}), "replica": 3}, schema)
    names = {name.replace("-", "_") for name in schema["properties"]["settings"]["properties"]}
    ports = {"port", "health_port", "metrics_port"}
    assert names == {field.name for field in fields(Config)} - ports


# ------------------------------------------------------------------------- compose, image, unit
def test_the_server_knows_the_settings_of_compose_image_and_unit():
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    image = deployments.image_settings()[0]
    unit = re.sub("(?m)^#.*", "", (DEPLOY / "systemd/warpfit.service").read_text())
    check_environment(image)
    for name in ("warpfit-gpu", "warpfit-cpu"):
        check_environment({**image, **services[name]["environment"]}).check_exposure()
    check_environment(dict(re.findall(r"(WARPFIT_\w+)=(\S+)", unit))).check_exposure()
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


@pytest.mark.parametrize("variant", ["server", "cuda12", "cuda13"])
def test_the_lock_satisfies_the_project(variant):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    names = {"server", "arrow", "tracing", variant}
    wanted = [*project["dependencies"], *(text for name in names for text in extras[name])]
    text = (DEPLOY / f"requirements/{variant}.txt").read_text()
    locked = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE))
    for requirement in map(Requirement, wanted):
        if requirement.name != "warpfit":
            assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)])
