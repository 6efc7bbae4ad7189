"""The Dockerfile, the chart and other files of deploy/, and checks of commands that use them."""

import argparse
import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

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


class _Grammar(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise AssertionError(f"{self.prog}: {message}")


def check_command(words: Sequence[str], images: Mapping[str, str]) -> None:
    """Check a command of docker or helm: each option, and all that it says about our files.

    Args:
        words: the command, variables before it included.
        images: the variant of each image that there is, by its name.
    """
    before = takewhile(re.compile(r"[A-Z_]+=").match, words)
    variables = dict(word.split("=", 1) for word in before)
    command, *rest = list(words)[len(variables) :]
    if command == "helm":
        _check_helm(rest)
    elif rest[0] == "compose":
        _check_compose(rest[1:], variables)
    elif rest[0] == "build":
        built(rest[1:])
    else:
        assert rest[0] == "run"
        _check_run(rest[1:], images)


def built(words: Sequence[str]) -> tuple[str, str]:
    """Name and variant of the image that the arguments of ``docker build`` make."""
    grammar = _Grammar("docker build")
    grammar.add_argument("-t", "--tag", required=True)
    grammar.add_argument("--build-arg", action="append", default=[])
    grammar.add_argument("context", type=Path)
    options = grammar.parse_args(words)
    assert (ROOT / options.context / "Dockerfile").is_file()
    defaults = dict(re.findall(r"^ARG (\w+)=(\S+)", _dockerfile(), re.MULTILINE))
    given = dict(argument.split("=", 1) for argument in options.build_arg)
    assert given.keys() <= defaults.keys()
    variant = {**defaults, **given}["VARIANT"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert variant in project["optional-dependencies"]
    return options.tag, variant


def _check_run(words: Sequence[str], images: Mapping[str, str]) -> None:
    grammar = _Grammar("docker run")
    grammar.add_argument("--read-only", action="store_true")
    grammar.add_argument("--gpus")
    for name in ("--tmpfs", "-v", "-p", "-e"):
        grammar.add_argument(name, action="append", default=[])
    grammar.add_argument("image")
    options = grammar.parse_args(words)
    text = _dockerfile()
    for volume in options.v:
        assert volume.split(":")[1] in re.search(r"^RUN install -d (.*)$", text, re.M)[1].split()
    assert options.image in images, f"no command builds {options.image}"
    assert bool(options.gpus) == images[options.image].startswith("cuda")
    exposed = re.search(r"^EXPOSE (.*)$", text, re.MULTILINE)[1].split()
    for port in options.p:
        host, _, inside = port.split(":")
        assert host == "127.0.0.1"
        assert inside in exposed
    check_environment(dict(variable.split("=", 1) for variable in options.e))
    assert not options.read_only or options.tmpfs == ["/tmp"]


def _check_compose(words: Sequence[str], variables: Mapping[str, str]) -> None:
    grammar = _Grammar("docker compose")
    grammar.add_argument("-f", "--file", type=Path, required=True)
    grammar.add_argument("command", choices=("up",))
    grammar.add_argument("-d", "--detach", action="store_true")
    options = grammar.parse_args(words)
    services = yaml.safe_load((ROOT / options.file).read_text())["services"].values()
    profiles = {profile for service in services for profile in service.get("profiles", ())}
    assert set(variables) == {"COMPOSE_PROFILES"}
    assert variables["COMPOSE_PROFILES"] in profiles


def _check_helm(words: Sequence[str]) -> None:
    grammar = _Grammar("helm")
    grammar.add_argument("command", choices=("install",))
    grammar.add_argument("release")
    grammar.add_argument("chart", type=Path)
    grammar.add_argument("--set", action="append", default=[])
    options = grammar.parse_args(words)
    assert ROOT / options.chart == CHART
    changes = dict(value.split("=", 1) for value in options.set)
    changes = {name: yaml.safe_load(value) for name, value in changes.items()}
    values(changes)
    if can_render():
        check_texts(render(changes), changes)


def check_texts(manifests: Sequence[Mapping[str, Any]], changes: Mapping[str, Any]) -> None:
    """Check that every text that was set arrives in a manifest."""
    rendered = json.dumps(manifests)
    for name, value in changes.items():
        assert not isinstance(value, str) or value in rendered, name


def _dockerfile() -> str:
    return (ROOT / "Dockerfile").read_text()
