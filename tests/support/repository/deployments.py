"""The Dockerfile, the chart and other files of deploy/, and checks of commands that use them."""

import argparse
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from warpfit_server.config import Config

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "kubernetes"


def values(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Values of the chart with some changed, each of which must be there."""
    tree: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    for path, value in changes.items():
        *parents, last = path.split(".")
        place = tree
        for name in parents:
            place = place[name]
        assert last in place or parents == ["settings"], f"{path} is no value of the chart"
        place[last] = value
    return tree


def can_render() -> bool:
    """Whether there is something that knows the templates' language."""
    return bool(shutil.which("helm") or shutil.which("go"))


def render(changes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every manifest of the chart, by helm or by Go's own templates."""
    if shutil.which("helm"):
        command = ["helm", "template", "release", str(CHART), "--values", "-"]
        given = yaml.safe_dump(values(changes))
        ran = subprocess.run(command, input=given, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        return [manifest for manifest in yaml.safe_load_all(ran.stdout) if manifest]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    release = {"Name": "release", "Namespace": "default", "Service": "Helm"}
    chart = {key[0].upper() + key[1:]: value for key, value in chart.items()}
    context = {"Values": values(changes), "Chart": chart, "Release": release}
    templates = {path.name: path.read_text() for path in (CHART / "templates").iterdir()}
    files = {path.name: path.read_text() for path in CHART.glob("*.yml")}
    command = ["go", "run", str(ROOT / "tests/support/repository/chart/render.go")]
    given = json.dumps({"Context": context, "Templates": templates, "Files": files})
    ran = subprocess.run(command, input=given, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    rendered = json.loads(ran.stdout)
    assert "50551" in rendered["NOTES.txt"]
    texts = [text for name, text in sorted(rendered.items()) if name.endswith(".yaml")]
    return [m for text in texts for m in yaml.safe_load_all(text) if m]


def check_schemas(manifests: Iterable[Mapping[str, Any]]) -> None:
    """Check manifests against the schemas of Kubernetes, with `kubernetes_validate`."""
    import kubernetes_validate as checker

    for manifest in manifests:
        if manifest["apiVersion"] != "monitoring.coreos.com/v1":  # not one of Kubernetes' own
            checker.validate(manifest, "1.31", strict=True)


def check_environment(environment: Mapping[str, str]) -> Config:
    """Check that the server knows every variable of its own, and can use its value."""
    named = {name: value for name, value in environment.items() if name.startswith("WARPFIT_")}
    known = set(Config.__dataclass_fields__)
    assert {name.removeprefix("WARPFIT_").lower() for name in named} <= known
    return Config.from_arguments([], named)  # raises if a value is none


# ------------------------------------------------------------------------------------- commands
@dataclass(frozen=True)
class Container:
    """What a ``docker run`` of our image starts; by names, places and ports in the container."""

    image: str
    environment: Mapping[str, str]
    mounts: Mapping[str, str]
    published: Mapping[str, tuple[str, str]]
    gpus: str | None
    command: tuple[str, ...]


def container(words: list[str]) -> Container:
    """Read the words after ``docker run``; a flag that is not known here is an error."""
    parser = argparse.ArgumentParser(prog="docker run", exit_on_error=False, allow_abbrev=False)
    for switch in ("--read-only", "--rm"):
        parser.add_argument(switch, action="store_true")
    parser.add_argument("--gpus")
    for several in ("--tmpfs", "-v", "-p", "-e"):
        parser.add_argument(several, action="append", default=[])
    parser.add_argument("image")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args(words)
    environment, entrypoint, command = image_settings()
    mounts = [mount.split(":") for mount in given.v]
    ports = [port.rsplit(":", 2) for port in given.p]
    return Container(
        given.image,
        environment | dict(variable.split("=", 1) for variable in given.e),
        {inside: outside for outside, inside, *_ in mounts},
        {inside: (address[0] if address else "", port) for *address, port, inside in ports},
        given.gpus,
        (*entrypoint, *(given.command or command)),
    )


def image_settings() -> tuple[dict[str, str], list[str], list[str]]:
    """Variables, entry point and command of the image, from the last stage of the Dockerfile."""
    stage = dockerfile().rpartition("\nFROM ")[2]
    (variables,) = re.findall(r"^ENV (.*)$", stage, re.M)
    lines = "ENTRYPOINT", "CMD"
    (entrypoint,), (command,) = (re.findall(rf"^{x} (\[.*\])$", stage, re.M) for x in lines)
    pairs = dict(pair.split("=", 1) for pair in shlex.split(variables))
    return pairs, json.loads(entrypoint), json.loads(command)


def image_of(line: str) -> tuple[str, str]:
    """Name and variant of the image that a ``docker build`` makes."""
    text = dockerfile()
    (variant,) = re.findall(r"VARIANT=(\S+)", line) or set(re.findall(r"ARG VARIANT=(\S+)", text))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert variant in project["optional-dependencies"]
    return re.search(r" -t (\S+)", line)[1], variant


def check_container(made: Container, images: Mapping[str, str]) -> None:
    """Check what a container may use against the Dockerfile; ``images`` are variants by name."""
    text = dockerfile()
    assert bool(made.gpus) == images[made.image].startswith("cuda")
    folders = re.search(r"^RUN install -d (.*)$", text, re.M)[1].split()
    volumes = {inside for inside, outside in made.mounts.items() if "/" not in outside}
    assert volumes <= set(folders)
    exposed = re.search(r"^EXPOSE (.*)$", text, re.M)[1].split()
    assert made.published.keys() <= set(exposed)
    if "WARPFIT_TLS_CERT" not in made.environment:
        assert all(address == "127.0.0.1" for address, _ in made.published.values())
    check_environment(made.environment)


def chart_changes(words: list[str]) -> dict[str, Any]:
    """The values that a ``helm install`` sets."""
    given = (text.split("=", 1) for flag, text in pairwise(words) if flag == "--set")
    return {name: yaml.safe_load(value) for name, value in given}


def dockerfile() -> str:
    """The Dockerfile, its continued lines joined."""
    return (ROOT / "Dockerfile").read_text().replace("\\\n", "")
