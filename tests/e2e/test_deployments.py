"""The documented lines that start a server start one, as they stand.

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

import warpfit
from support.load.faults import free_port
from support.repository import deployments
from support.repository.docker import PORTS
from support.repository.readmes import Snippet, commands, snippets
from support.servers.network import Authority
from warpfit.transport.connection import TlsConfig
from warpfit_server.compile_cache import default_cache_directory

ROOT = deployments.ROOT
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
SHELL = [snippet for snippet in snippets("deploy/README.md") if snippet.language == "sh"]
BLOCKS = [snippet for snippet in SHELL if "docker run" in snippet.code]


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
        **{name: value for name, value in os.environ.items() if name[:8] != "WARPFIT_"},
        "WARPFIT_CACHE_DIR": str(default_cache_directory()),
        "PATH": os.pathsep.join([str(binaries), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([*map(str, [ROOT / "client", ROOT / "server"])]),
        PORTS: json.dumps({port: str(free_port()) for port in inside}),
    }


@contextmanager
def started(line: str, environment: Mapping[str, str], folder: Path) -> Iterator[int]:
    """Start a server, give its port once it listens, and end it as init systems do."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(["bash", "-c", line], env=environment, cwd=folder, **pipes) as server:
        try:
            banner = server.stdout.readline()
            found = re.search(r"warpfit listening on \S+:(\d+)", banner)
            assert found, banner or server.communicate(timeout=30)[1]
            yield int(found[1])
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=60)
    assert server.returncode == 0


def answers(port: int, **security) -> bool:
    with warpfit.connect(f"127.0.0.1:{port}", wait=60, **security) as client:
        return client.evaluate(client.upload([[1.0], [2.0]]), ["x1 + 1"]).tolist() == [[2], [3]]


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
        with started(command, environment, tmp_path) as port:
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
    given = {"env": environment, "cwd": folder, "capture_output": True, "text": True}
    done = subprocess.run(["bash", "-c", line], **given)
    assert done.returncode == 0, f"{line}\n{done.stderr}"
    return done.stdout


@pytest.mark.thorough
def test_the_job_of_slurm_runs_to_its_end(environment, tmp_path):
    ask = "print(client.evaluate(client.upload([[1.0]]), ['x1 + 1']))\n"
    program = f"import warpfit\nclient = warpfit.connect(tls=False, wait=600)\n{ask}"
    (tmp_path / "search.py").write_text(program)
    variables = {**environment, "SLURM_JOB_ID": "7", "WARPFIT_DEVICES": "cpu"}
    out = run(f"bash {ROOT / 'deploy/slurm/warpfit.sbatch'}", variables, tmp_path)
    assert "[[2.]]" in out
    assert not list(tmp_path.glob("warpfit-7"))
