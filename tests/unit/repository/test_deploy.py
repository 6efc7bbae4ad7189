"""What is under deploy/: rendered, checked against schemas, and against what the server exports."""

import json
import re
import shlex
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

from support.repository.deployments import (
    CHART,
    DEPLOY,
    ROOT,
    can_render,
    check_environment,
    check_schemas,
    dockerfile,
    render,
    values,
)
from support.servers.metrics_page import collector
from warpfit.request import Timings
from warpfit_server.config import Config
from warpfit_server.engine.interface import COUNTERS
from warpfit_server.metrics import GpuUsage
from warpfit_server.observability.records import (
    CALL_COUNTERS,
    HISTOGRAMS,
    CallRecord,
    Recorder,
)

#: Values under which the chart is rendered.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "cpu": {"gpu.enabled": False, "replicas": 3},
    "everything": {
        "autoscaling.enabled": True,
        "serviceMonitor.enabled": True,
        "serviceMonitor.labels": {"release": "prometheus"},
        "prometheusRule.enabled": True,
        "tls.secretName": "tls",
        "tls.clientCaSecretName": "ca",
        "tokens.secretName": "tokens",
        "cache.persistent": True,
        "cache.storageClass": "fast",
        "service.annotations": {"a": "b"},
        "serviceAccount.annotations": {"a": "b"},
        "podAnnotations": {"a": "b"},
        "imagePullSecrets": [{"name": "registry"}],
        "gpu.runtimeClassName": "nvidia",
        "nodeSelector": {"gpu": "h200"},
        "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {"nodeAffinity": {}},
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
    page = collector(
        dict.fromkeys(COUNTERS, 1.0), gpus=[GpuUsage("0", "H200", 1, 1, 1.0)], recorder=recorder
    )
    families = list(page.collect())
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


def adapter() -> str:
    return (CHART / "adapter-rules.yaml").read_text()


@pytest.mark.parametrize("place", ["dashboard", "rules", "adapter"])
def test_every_query_asks_for_metrics_that_there_are(place):
    texts = {
        "dashboard": dashboard,
        "rules": lambda: [rule["expr"] for rule in rules()],
        "adapter": lambda: [adapter()],
    }[place]()
    names = {name for text in texts for name in re.findall(r"\bwarpfit_\w+", text)}
    assert names
    assert names - exported() - {"warpfit_queue_seconds_mean"} == set()


def test_the_dashboard_shows_every_metric():
    shown = {name for text in dashboard() for name in re.findall(r"\bwarpfit_\w+", text)}
    families = {re.sub("_(bucket|sum|count)$", "", name) for name in exported()}
    assert families - {re.sub("_(bucket|sum|count)$", "", name) for name in shown} == set()


def test_labels_in_queries_are_those_of_the_metrics():
    labels = {name: family.labels for name, family in {**CALL_COUNTERS, **HISTOGRAMS}.items()}
    for text in [*dashboard(), *(rule["expr"] for rule in rules())]:
        for name, selector in re.findall(
            r"warpfit_(\w+?)(?:_total|_bucket|_sum|_count)\{([^}]*)", text
        ):
            used = set(re.findall(r"(\w+)\s*[=!]", selector)) - {"instance"}
            assert used <= set(labels.get(name, used)), text


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
def test_each_alert_fires_for_the_fault_that_it_names_and_for_no_other():
    cases = ROOT / "tests/data/alerts.yml"
    ran = subprocess.run(["promtool", "test", "rules", cases], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_each_alert_has_a_case():
    """Which `promtool` runs, where there is one."""
    tests = yaml.safe_load((ROOT / "tests/data/alerts.yml").read_text())["tests"]
    cases = [case for test in tests for case in test.get("alert_rule_test", ())]
    fired = {case["alertname"] for case in cases if case["exp_alerts"]}
    assert fired == {rule["alert"] for rule in rules() if "alert" in rule}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
def test_prometheus_accepts_the_rules():
    config = str(DEPLOY / "prometheus/prometheus.yml")
    ran = subprocess.run(["promtool", "check", "config", config], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


# --------------------------------------------------------------------------------------- chart


@pytest.fixture(scope="module", params=VARIANTS)
def manifests(request):
    if not can_render():
        pytest.skip("needs helm or go")
    rendered = render(VARIANTS[request.param])
    return SimpleNamespace(
        variant=request.param,
        all=rendered,
        kinds={m["kind"]: m for m in rendered if not m["metadata"]["name"].endswith("-headless")},
    )


def test_manifests_follow_the_schemas_of_kubernetes(manifests):
    pytest.importorskip("kubernetes_validate")
    check_schemas(manifests.all)


def environment_of(manifests) -> dict[str, str]:
    pod = manifests.kinds["StatefulSet"]["spec"]["template"]["spec"]
    return {entry["name"]: entry["value"] for entry in pod["containers"][0]["env"]}


def test_the_chart_asks_for_tls_and_tokens_unless_told(manifests):
    environment = environment_of(manifests)
    assert "WARPFIT_INSECURE" not in environment
    assert environment["WARPFIT_TLS_CERT"]
    assert environment["WARPFIT_TOKEN_FILE"]
    volumes = manifests.kinds["StatefulSet"]["spec"]["template"]["spec"]["volumes"]
    for name in ("tls", "tokens"):
        (mode,) = (v["secret"]["defaultMode"] for v in volumes if v["name"] == name)
        assert mode & 0o027 == 0  # as `warpfit.transport.connection.check_secret` demands
    Config.from_arguments([], environment).check_exposure()


def test_the_cache_is_a_folder_that_the_server_makes_itself(manifests):
    """The volume's own root can be written by its group, which the server would refuse."""
    pod = manifests.kinds["StatefulSet"]["spec"]["template"]["spec"]
    (mount,) = (m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "cache")
    cache = environment_of(manifests)["WARPFIT_CACHE_DIR"]
    assert cache.startswith(mount["mountPath"] + "/")
    assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"


@pytest.mark.skipif(not can_render(), reason="needs helm or go")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tls.secretName": ""}, "insecure.plainText"),
        ({"tokens.secretName": ""}, "insecure.anonymous"),
    ],
)
def test_the_chart_refuses_what_is_open_by_accident(changes, message):
    with pytest.raises(AssertionError, match=message):
        render(changes)
    choice = render({**changes, message: True})
    (found,) = (m for m in choice if m["kind"] == "StatefulSet")
    (container,) = found["spec"]["template"]["spec"]["containers"]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    assert ("WARPFIT_INSECURE" in environment) is (message == "insecure.plainText")
    Config.from_arguments([], environment).check_exposure()


def test_the_server_knows_every_setting_of_the_chart(manifests):
    check_environment(environment_of(manifests))


@pytest.mark.skipif(not can_render(), reason="needs helm or go")
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {
                **{"max-requests": 123456789, "grace": 2.5, "host": "::", "devices": "0,1"},
                **{"max_resident_bytes": "3GiB", "expose-tenants": True},
            },
            {
                **{"MAX_REQUESTS": "123456789", "GRACE": "2.5", "HEALTH_PORT": "[::]:50552"},
                **{"DEVICES": "0,1", "MAX_RESIDENT_BYTES": "3GiB", "EXPOSE_TENANTS": "true"},
            },
        ),
        (
            {"max_requests": 10**15, "max-resident-bytes": 4096.0},
            {
                **{"MAX_REQUESTS": "1000000000000000", "MAX_RESIDENT_BYTES": "4096"},
                "METRICS_PORT": "0.0.0.0:9464",
            },
        ),
    ],
)
def test_a_setting_reaches_the_server_once_and_as_it_is_meant(settings, expected):
    changes = {f"settings.{name}": value for name, value in settings.items()}
    (found,) = (m for m in render(changes) if m["kind"] == "StatefulSet")
    entries = found["spec"]["template"]["spec"]["containers"][0]["env"]
    names = [entry["name"] for entry in entries]
    assert len(names) == len(set(names))
    environment = {entry["name"].removeprefix("WARPFIT_"): entry["value"] for entry in entries}
    assert {name: environment[name] for name in expected} == expected
    check_environment({entry["name"]: entry["value"] for entry in entries})


@pytest.mark.skipif(not can_render(), reason="needs helm or go")
@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({"settings.notice": 2.5, "settings.grace": 7.5}, 5 + 3 + 8 + 15),
        ({"settings.grace": "12"}, 5 + 12 + 15),
    ],
)
def test_a_pod_may_take_as_long_as_its_server_to_stop(changes, seconds):
    (found,) = (m for m in render(changes) if m["kind"] == "StatefulSet")
    assert found["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == seconds


def chart_schema() -> Any:
    return json.loads((CHART / "values.schema.json").read_text())


def test_the_schema_of_the_values_knows_them_all_and_no_others():
    jsonschema = pytest.importorskip("jsonschema")
    for variant in VARIANTS.values():
        jsonschema.validate(values(variant), chart_schema())
    names = {
        name.replace("-", "_") for name in chart_schema()["properties"]["settings"]["properties"]
    }
    ports = {"port", "health_port", "metrics_port"}
    assert names == {field.name for field in fields(Config)} - ports


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("replica", 3),
        ("setings", {}),
        ("settings.max-requsts", 3),
        ("settings.port", 50999),
        ("settings.grace", None),
        ("tls.secret", "x"),
        ("gpu.enabled", "yes"),
        ("ports.grpc", 70000),
        ("autoscaling.max", 3),
    ],
)
def test_the_schema_refuses_values_that_mean_nothing(path, value):
    jsonschema = pytest.importorskip("jsonschema")
    tree = values({})
    *parents, last = path.split(".")
    place = tree
    for name in parents:
        place = place[name]
    place[last] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(tree, chart_schema())


def test_the_alerts_know_the_servers_by_the_job_that_they_are_scraped_as(manifests):
    if manifests.variant != "everything":
        pytest.skip("no monitor")
    monitor, rule = manifests.kinds["ServiceMonitor"], manifests.kinds["PrometheusRule"]
    service = manifests.kinds["Service"]["metadata"]["labels"]
    job = service[monitor["spec"]["jobLabel"]]
    assert rule["spec"] == yaml.safe_load((DEPLOY / "prometheus/rules.yml").read_text())
    (scraped,) = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())[
        "scrape_configs"
    ]
    jobs = {name for found in rules() for name in re.findall(r'job="(.*?)"', found["expr"])}
    assert jobs == {job} == {scraped["job_name"]}


# ------------------------------------------------------------------------- compose, image, unit


def test_compose():
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for name in ("warpfit-gpu", "warpfit-cpu"):
        assert services[name]["read_only"]
        check_environment(services[name]["environment"])
    for service in services.values():
        assert service["mem_limit"]
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_the_image_sets_what_the_server_knows():
    check_environment(dict(re.findall(r"(WARPFIT_\w+)=(\S+)", dockerfile())))


def test_the_unit_sets_what_the_server_knows():
    text = (DEPLOY / "systemd/warpfit.service").read_text()
    environment = dict(re.findall(r"(WARPFIT_[A-Z_]+)=(\S+)", text.partition("[Service]")[2]))
    check_environment(environment)
    grace = Config.from_arguments([], environment).grace
    assert float(re.search(r"TimeoutStopSec=(\d+)", text)[1]) > grace
    assert re.search(r"^MemoryMax=\d+%$", text, re.MULTILINE)
    assert re.search(r"^TasksMax=\d+$", text, re.MULTILINE)


def test_the_job_of_slurm_starts_a_server_that_its_workers_find():
    script = DEPLOY / "slurm/warpfit.sbatch"
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
    text = script.read_text().replace("\\\n", " ")
    (words,) = re.findall(r"warpfit serve (.*) &$", text, re.MULTILINE)
    config = Config.from_arguments(shlex.split(words), {})
    config.check_exposure()
    assert f'WARPFIT_ADDRESS="file://{config.address_file}"' in text


def test_the_base_is_named_by_its_digest():
    assert set(re.findall(r"^FROM (\S+)", dockerfile(), re.MULTILINE)) == {"${PYTHON}"}
    (base,) = re.findall(r"^ARG PYTHON=(\S+)", dockerfile(), re.MULTILINE)
    assert re.fullmatch(r"python:[\w.-]+@sha256:[0-9a-f]{64}", base)


def requirements(variant: str) -> dict[str, str]:
    """Locked versions; every one has hashes."""
    text = (DEPLOY / f"requirements/{variant}.txt").read_text()
    entries = re.findall(r"^([\w.-]+)==([^\s;]+)([^\n]*(?:\n    --hash=\S+(?: \\)?)+)?", text, re.M)
    assert entries
    for name, _, hashes in entries:
        assert "--hash=sha256:" in hashes, name
    return {name: version for name, version, _ in entries}


@pytest.mark.parametrize("variant", ["server", "cuda12", "cuda13"])
def test_the_lock_satisfies_the_project(variant):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    names = {"server", "arrow", "tracing", variant}
    wanted = [*project["dependencies"], *(text for name in names for text in extras[name])]
    locked = requirements(variant)
    for requirement in map(Requirement, wanted):
        if requirement.name != "warpfit":
            assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)])


def test_the_lock_can_build_the_wheel():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    locked = requirements("build")
    for requirement in map(Requirement, project["build-system"]["requires"]):
        assert requirement.specifier.contains(locked[requirement.name])


def test_the_image_installs_nothing_that_is_not_locked():
    for command in re.findall(
        r"pip .*? install (.*?)(?=&&|\nRUN|\nCOPY|\nFROM)", dockerfile(), re.S
    ):
        assert "--require-hashes" in command or "--no-index" in command, command
