"""Every documented way to start a server starts one: the lines and files of deploy/, as they stand.

A container is replaced by a process with the same variables and arguments (`support.repository
.docker`), so that settings which refuse to work together are found on every machine.
`tests/images` starts the same lines in real containers.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

import warpfit
from support.load.faults import free_port
from support.repository import deployments
from support.repository.docker import PORTS
from support.repository.readmes import Snippet, commands, snippets
from support.servers.network import Authority
from support.servers.server import write_secret
from warpfit.transport.connection import TlsConfig, new_token
from warpfit_server.compile_cache import default_cache_directory

ROOT = deployments.ROOT
DEPLOY = ROOT / "deploy"
MAIN = "import sys; from warpfit.cli.main import main; sys.exit(main())"
#: Commands that are replaced in a shell: name, and what runs instead.
REPLACED = {
    "warpfit": f'exec {sys.executable} -c "{MAIN}" "$@"',
    "python": f'exec {sys.executable} "$@"',
    "docker": f'exec {sys.executable} {ROOT}/tests/support/repository/docker.py "$@"',
    "sudo": 'test "$1" = chown',  # to the image's user, which is not there
    # The servers and the workers of a job are one process each, here.
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
}
BLOCKS = [
    snippet
    for snippet in snippets("deploy/README.md")
    if snippet.language == "sh" and "docker run" in snippet.code
]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Variables of a shell that finds this tree's commands, and ports that are free."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    for name, command in REPLACED.items():
        (binaries / name).write_text(f"#!/bin/sh\n{command}\n")
        (binaries / name).chmod(0o755)
    settings = deployments.image_settings()[0]
    inside = [settings[f"WARPFIT_{name}"] for name in ("PORT", "HEALTH_PORT", "METRICS_PORT")]
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("WARPFIT_")},
        "WARPFIT_CACHE_DIR": str(default_cache_directory()),
        "PATH": os.pathsep.join([str(binaries), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([*map(str, [ROOT / "client", ROOT / "server"])]),
        PORTS: json.dumps({port: str(free_port()) for port in inside}),
    }


@contextmanager
def started(
    words: Sequence[str], environment: Mapping[str, str], folder: Path
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start a server, give it and its port once it listens, and end it as init systems do."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, env=environment, cwd=folder, **pipes) as server:
        try:
            banner = server.stdout.readline()
            found = re.search(r"warpfit listening on \S+:(\d+)", banner)
            assert found, banner or server.communicate(timeout=30)[1]
            yield server, int(found[1])
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=60)
    assert server.returncode == 0


def answers(port: int, **security) -> bool:
    with warpfit.connect(f"127.0.0.1:{port}", wait=60, **security) as client:
        return client.evaluate(client.upload([[1.0], [2.0]]), ["x1 + 1"]).tolist() == [[2], [3]]


# ------------------------------------------------------------------------------------ containers


@pytest.mark.parametrize(
    "block", [BLOCKS[0], pytest.param(BLOCKS[1], marks=pytest.mark.thorough)], ids=str
)
def test_every_line_with_a_container_works_as_it_stands(block: Snippet, environment, tmp_path):
    """Line by line, in one folder; a server of a line runs until the next line that starts one."""
    authority = Authority(tmp_path)
    authority.file.rename(tmp_path / "ca.crt")
    pair = authority.issue("", file="server")
    assert {pair.certificate.name, pair.key.name} == {"server.crt", "server.key"}
    built = "\n".join(block.code for block in BLOCKS)
    images = dict(map(deployments.image_of, re.findall(r"^docker build.*$", built, re.M)))
    address = f"127.0.0.1:{json.loads(environment[PORTS])['50551']}"
    lines = [line for line in commands(block) if "docker compose" not in line]
    umask = "; ".join([*re.findall(r"umask \d+", block.code), ""])  # which a shell keeps
    while lines:
        line = umask + lines.pop(0)
        words = shlex.split(line.removeprefix(umask), comments=True)
        if words[:2] != ["docker", "run"] or "token" in words:
            run(line.replace("HOST:50551", address), environment, tmp_path)
            continue
        made = deployments.container(words[2:])
        deployments.check_container(made, images)
        if made.gpus:
            continue  # there may be no GPU here, and its process would be that of the line before
        secure = "WARPFIT_TLS_CERT" in made.environment
        command = f"{umask}exec {line.removeprefix(umask)}"
        with started(["bash", "-c", command], environment, tmp_path) as (_, port):
            assert str(port) == address.partition(":")[2]
            if secure:
                token = (tmp_path / "alice.token").read_text().strip()
                assert answers(port, tls=TlsConfig(ca=tmp_path / "ca.crt"), token=token)
                with pytest.raises(warpfit.WarpfitError):
                    answers(port, tls=TlsConfig(ca=tmp_path / "ca.crt"), token="wrong")
            else:
                assert answers(port)
            while lines and not lines[0].startswith("docker"):
                run(lines.pop(0).replace("HOST:50551", address), environment, tmp_path)


def run(line: str, environment: Mapping[str, str], folder: Path) -> str:
    done = subprocess.run(
        ["bash", "-c", line], env=environment, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{line}\n{done.stderr}"
    return done.stdout


def in_process(settings: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of a server: those of the image and some that replace them, ports that are free."""
    ports = json.loads(environment[PORTS])
    image = deployments.image_settings()[0]
    named = {name: v for name, v in {**image, **settings}.items() if name.startswith("WARPFIT_")}
    free = {name: ports.get(value, "0") for name, value in named.items() if name.endswith("_PORT")}
    named.pop("WARPFIT_CACHE_DIR")
    return {**environment, **named, **free}


@pytest.mark.thorough
def test_the_services_of_the_compose_file_start(environment, tmp_path):
    """The two differ by the devices, and there may be no GPU here."""
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    given = [services[f"warpfit-{kind}"]["environment"] for kind in ("cpu", "gpu")]
    variables, other = (in_process(each, environment) for each in given)
    assert other.pop("WARPFIT_DEVICES") == "all"
    variables.pop("WARPFIT_DEVICES", None)
    assert variables == other
    with started(["warpfit", "serve"], variables, tmp_path) as (_, port):
        assert answers(port)


HELM = [line for s in snippets("deploy/README.md") for line in commands(s) if "helm " in line]


@pytest.mark.thorough
@pytest.mark.skipif(not deployments.can_render(), reason="needs helm or go")
@pytest.mark.parametrize("changes", [deployments.chart_changes(shlex.split(x)) for x in HELM])
def test_the_pods_of_the_chart_start(changes, environment, tmp_path):
    (found,) = (m for m in deployments.render(changes) if m["kind"] == "StatefulSet")
    (made,) = found["spec"]["template"]["spec"]["containers"]
    variables = in_process({e["name"]: e["value"] for e in made["env"]}, environment)
    variables.pop("WARPFIT_DEVICES")
    security, mounts = {}, {m["name"]: m["mountPath"] for m in made["volumeMounts"]}
    if "tls" in mounts:
        authority, (token, line) = Authority(tmp_path), new_token("alice")
        pair = authority.issue("", file="tls")
        write_secret(tmp_path / "tokens", line)
        assert pair.certificate.name == "tls.crt"
        for name in ("TLS_CERT", "TLS_KEY", "TOKEN_FILE"):
            inside = Path(variables[f"WARPFIT_{name}"])
            assert str(inside.parent) in mounts.values()
            variables[f"WARPFIT_{name}"] = str(tmp_path / inside.name)
        security = {"tls": TlsConfig(ca=authority.file), "token": token}
    with started(["warpfit", "serve"], variables, tmp_path) as (_, port):
        assert answers(port, **security)


@pytest.mark.thorough
def test_the_unit_of_systemd_starts(environment, tmp_path):
    """With the tokens that the unit names in a comment."""
    unit = (DEPLOY / "systemd/warpfit.service").read_text()
    extra = "WARPFIT_TOKEN_FILE=%d/tokens"
    assert extra in unit
    lines = [*re.findall(r"^Environment=(.*)$", unit, re.M), extra.replace("%d", str(tmp_path))]
    settings = dict(pair.split("=", 1) for line in lines for pair in shlex.split(line))
    (command,) = re.findall(r"^ExecStart=(.*)$", unit, re.M)
    settings.pop("WARPFIT_CACHE_DIR")
    for name in settings:
        if name.endswith("_PORT"):
            settings[name] = str(free_port())
    token, line = new_token("alice")
    write_secret(tmp_path / "tokens", line)
    variables = {**environment, **settings, "WARPFIT_PORT": "0"}
    words = [Path(command.split()[0]).name, *command.split()[1:]]
    with started(words, variables, tmp_path) as (_, port):
        assert answers(port, token=token)


@pytest.mark.thorough
def test_the_job_of_slurm_runs_to_its_end(environment, tmp_path):
    (tmp_path / "search.py").write_text(
        "import warpfit\n"
        "with warpfit.connect(tls=False, wait=600) as client:\n"
        "    print(client.evaluate(client.upload([[1.0]]), ['x1 + 1']))\n"
    )
    variables = {**environment, "SLURM_JOB_ID": "7", "WARPFIT_DEVICES": "cpu"}
    out = run(f"bash {DEPLOY / 'slurm/warpfit.sbatch'}", variables, tmp_path)
    assert "[[2.]]" in out
    assert not list(tmp_path.glob("warpfit-7"))
