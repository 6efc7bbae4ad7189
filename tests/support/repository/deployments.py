"""The Dockerfile, the chart and other files of deploy/, and checks of commands that use them."""

import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from warpfit_server.config import Config

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "kubernetes"


# ---------------------------------------------------------------------------------------- chart


def values(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Values of the chart with some changed, each of which must be there."""
    tree: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    for path, value in changes.items():
        *parents, last = path.split(".")
        place = tree
        for name in parents:
            place = place[name]
        assert last in place, f"{path} is no value of the chart"
        place[last] = value
    return tree


def can_render() -> bool:
    """Whether there is something that knows the templates' language."""
    return bool(shutil.which("helm") or shutil.which("go"))


def render(changes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every manifest of the chart, by helm or by Go's own templates."""
    if shutil.which("helm"):
        command = ["helm", "template", "release", str(CHART), "--values", "-"]
        ran = subprocess.run(
            command, input=yaml.safe_dump(values(changes)), capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr
        return [manifest for manifest in yaml.safe_load_all(ran.stdout) if manifest]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    context = {
        "Values": values(changes),
        "Chart": {key[0].upper() + key[1:]: value for key, value in chart.items()},
        "Release": {"Name": "release", "Namespace": "default", "Service": "Helm"},
    }
    templates = {path.name: path.read_text() for path in (CHART / "templates").iterdir()}
    ran = subprocess.run(
        ["go", "run", str(ROOT / "tests/support/repository/chart/render.go")],
        input=json.dumps({"Context": context, "Templates": templates}),
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    rendered = json.loads(ran.stdout)
    assert "50551" in rendered["NOTES.txt"]
    texts = [text for name, text in sorted(rendered.items()) if name.endswith(".yaml")]
    return [m for text in texts for m in yaml.safe_load_all(text) if m]


def check_schemas(manifests: Iterable[Mapping[str, Any]]) -> None:
    """Check manifests against the schemas of Kubernetes, with `kubernetes_validate`."""
    import kubernetes_validate as checker

    for manifest in manifests:
        if manifest["kind"] != "ServiceMonitor":  # not one of Kubernetes' own
            checker.validate(manifest, "1.31", strict=True)


def check_environment(environment: Mapping[str, str]) -> None:
    """Check that the server knows every variable of its own, and can use its value."""
    named = {name: value for name, value in environment.items() if name.startswith("WARPFIT_")}
    Config.from_arguments([], named)  # raises if a value is none
    known = set(Config.__dataclass_fields__)
    assert {name.removeprefix("WARPFIT_").lower() for name in named} <= known


# ------------------------------------------------------------------------------------- commands


def image_of(line: str) -> tuple[str, str]:
    """Name and variant of the image that a ``docker build`` makes."""
    text = dockerfile()
    (variant,) = re.findall(r"VARIANT=(\S+)", line) or set(re.findall(r"ARG VARIANT=(\S+)", text))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert variant in project["optional-dependencies"]
    return re.search(r" -t (\S+)", line)[1], variant


def check_command(line: str, images: Mapping[str, str]) -> None:
    """Check a command of docker or helm about our files; ``images`` are their variants by name."""
    text, words = dockerfile(), line.split()
    for path in re.findall(r"(?<![\w/])deploy/[\w./]+", line):
        assert (ROOT / path).exists(), path
    if "run" in words:
        assert ("--gpus" in words) == images[words[-1]].startswith("cuda")
        folders = re.search(r"^RUN install -d (.*)$", text, re.M)[1].split()
        assert set(re.findall(r"-v [^:]+:(\S+)", line)) <= set(folders)
        exposed = re.search(r"^EXPOSE (.*)$", text, re.M)[1].split()
        ports = re.findall(r"-p (\S+):\d+:(\d+)", line)
        assert all(host == "127.0.0.1" and inside in exposed for host, inside in ports)
        check_environment(dict(re.findall(r"-e (\w+)=(\S+)", line)))
    for profile in re.findall(r"COMPOSE_PROFILES=(\w+)", line):
        compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
        assert any(profile in s.get("profiles", ()) for s in compose["services"].values())
    changes = {name: yaml.safe_load(v) for name, v in re.findall(r"--set ([\w.]+)=(\S+)", line)}
    values(changes)
    if changes and can_render():  # every text that was set arrives in a manifest
        rendered = json.dumps(render(changes))
        assert all(not isinstance(value, str) or value in rendered for value in changes.values())


def dockerfile() -> str:
    """The Dockerfile, its continued lines joined."""
    return (ROOT / "Dockerfile").read_text().replace("\\\n", "")
