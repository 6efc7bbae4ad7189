"""The CPU and the CUDA image, built and run: as their user, on a read-only root, with a volume.

``python -m pytest tests/images`` as root, where buildah and debootstrap are; about ten minutes and
8 GB. It is no part of the usual tests.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from pathlib import Path

import numpy as np
import pytest

import warpfit
from support.load.faults import free_port
from support.repository import deployments
from support.repository.readmes import commands, snippets
from support.servers.network import Authority
from warpfit.transport.connection import TlsConfig, new_token

pytestmark = pytest.mark.timeout(3600)

ROOT = Path(__file__).resolve().parents[2]
USER = 10001
#: Seconds in which a server with an empty cache must be healthy: it compiles first.
COLD_SECONDS = 600
WARM_SECONDS = 60
#: Loads what the CUDA engine takes from wheels, and compiles a kernel, which needs no GPU.
COMPILE = """
import cuda.bindings.driver, cupy, pynvml
from warpfit_server.engine.cuda.interpreter.source import Variant, interpreter_source
from warpfit_server.engine.arithmetic import Arithmetic
from warpfit_server.engine.cuda.runtime import nvjitlink, nvrtc

print(nvrtc.version(), nvjitlink.version())
print(len(interpreter_source(Variant(Arithmetic.PRECISE, 4)).compile(90)))
"""


@pytest.fixture
def volume(tmp_path):
    """A new volume, which takes over owner and mode of the image's folder."""
    place = tmp_path / "volume"
    place.mkdir(mode=0o700)
    os.chown(place, USER, USER)
    return place


def settings(**changes):
    """Ports that are free here, on loopback: containers share this machine's network."""
    ports = {
        f"WARPFIT_{name}": str(free_port()) for name in ("PORT", "HEALTH_PORT", "METRICS_PORT")
    }
    return {"WARPFIT_HOST": "127.0.0.1", **ports, **changes}


def serve(image, volume, log, seconds, **changes):
    """Serve until one evaluation has been answered; return the log and the seconds it took."""
    variables = settings(**changes)
    health = f"127.0.0.1:{variables['WARPFIT_HEALTH_PORT']}"
    image = image.with_health(health)
    started = time.monotonic()
    with log.open("w") as lines, image.serve(volume, lines, seconds, **variables) as server:
        healthy = time.monotonic() - started
        with warpfit.connect(f"127.0.0.1:{variables['WARPFIT_PORT']}") as client:
            got = client.evaluate(client.upload(np.arange(6.0).reshape(3, 2)), ["x1 + x2"])
            assert got[:, 0].tolist() == [1.0, 5.0, 9.0]
            assert client.info().engine == "cpu"
        status = Path(f"/proc/{server.pid}/status").read_text()
        assert re.search(r"^Uid:\t(\d+)\t(\d+)", status, re.M).groups() == (str(USER), str(USER))
        assert re.search(r"^CapBnd:\t0+$", status, re.M)
    assert server.returncode == 0
    return log.read_text(), healthy


def locked(variant):
    text = (ROOT / f"deploy/requirements/{variant}.txt").read_text()
    return dict(re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.M))


def installed(image, volume):
    code = (
        "import json; from importlib.metadata import distributions;"
        "print(json.dumps([(found.name, found.version) for found in distributions()]))"
    )
    ran = image.run(volume, ["python", "-c", code])
    assert ran.returncode == 0, ran.stderr
    return {name.lower().replace("_", "-"): version for name, version in json.loads(ran.stdout)}


def test_the_cpu_image_serves_on_a_read_only_root(cpu_image, volume, tmp_path):
    log, cold = serve(cpu_image, volume, tmp_path / "log", COLD_SECONDS)
    assert "temporary directory" not in log
    kept = [path for path in volume.rglob("*") if path.is_file()]
    assert kept
    assert {path.stat().st_uid for path in kept} == {USER}
    log, warm = serve(cpu_image, volume, tmp_path / "log", WARM_SECONDS)
    assert "compiling values" not in log
    print(f"healthy after {cold:.1f} s, with a filled volume after {warm:.1f} s")


def test_only_the_volume_and_tmp_can_be_written(cpu_image, volume):
    for place, works in (("/var/cache/warpfit/x", True), ("/tmp/x", True), ("/opt/x", False)):
        assert (cpu_image.run(volume, ["touch", place]).returncode == 0) is works
    assert cpu_image.run(volume, ["touch", "/opt/warpfit/bin/warpfit"]).returncode != 0


def test_the_image_alone_does_not_serve_plain_text(cpu_image, volume):
    ran = cpu_image.run(volume, cpu_image.command)
    assert ran.returncode == 2
    assert "plain text on 0.0.0.0" in ran.stderr


LINES = [
    made
    for snippet in snippets("deploy/README.md")
    for line in commands(snippet)
    if line.startswith("docker run ")
    for made in [deployments.container(shlex.split(line)[2:])]
    if made.gpus is None and made.command[1:] == ("serve",)
]


@pytest.mark.parametrize("made", LINES, ids=range(len(LINES)))
def test_the_documented_lines_start_a_container_that_serves(cpu_image, volume, tmp_path, made):
    """With the variables, mounts and the host of the line; the ports are free ones."""
    assert len(LINES) == 2
    variables = settings(**dict(made.environment))
    for name in ("PORT", "HEALTH_PORT", "METRICS_PORT"):
        variables[f"WARPFIT_{name}"] = str(free_port())
    variables.pop("PATH")
    folders = {inside: place for inside, place in made.mounts.items() if "/" in place}
    security, folder = {}, ("", "")
    if folders:
        (inside,) = folders
        keys = tmp_path / "keys"
        keys.mkdir(mode=0o700)
        authority, (token, line) = Authority(tmp_path), new_token("alice")
        pair = authority.issue("", file="server")
        for path in (pair.certificate, pair.key):
            path.rename(keys / path.name)
        (keys / "tokens").write_text(f"{line}\n")
        for path in (keys, *keys.iterdir()):
            os.chown(path, USER, USER)
            path.chmod(0o700 if path.is_dir() else 0o600)
        security = {"tls": TlsConfig(ca=authority.file), "token": token}
        folder = (str(keys), inside)
    image = cpu_image.with_health(f"127.0.0.1:{variables['WARPFIT_HEALTH_PORT']}")
    with (tmp_path / "log").open("w") as log:
        with image.serve(volume, log, COLD_SECONDS, folder, **variables) as server:
            address = f"127.0.0.1:{variables['WARPFIT_PORT']}"
            with warpfit.connect(address, **security) as client:
                assert client.evaluate(client.upload([[1.0]]), ["x1 + 1"]).tolist() == [[2.0]]
        assert server.returncode == 0


@pytest.mark.parametrize(
    ("fixture", "variant"), [("cpu_image", "server"), ("cuda_image", "cuda13")]
)
def test_an_image_has_what_is_locked_and_nothing_else(request, volume, fixture, variant):
    found = installed(request.getfixturevalue(fixture), volume)
    expected = locked(variant)
    assert found.pop("warpfit")
    assert found.keys() == expected.keys()
    assert {name: v for name, v in found.items() if name != "numpy"} == {
        name: v for name, v in expected.items() if name != "numpy"
    }


def test_the_cuda_image_serves_with_the_cpu_engine(cuda_image, volume, tmp_path):
    serve(cuda_image, volume, tmp_path / "log", COLD_SECONDS, WARPFIT_DEVICES="cpu")


def test_the_cuda_image_compiles_for_a_gpu(cuda_image, volume):
    cache = {"CUPY_CACHE_DIR": "/var/cache/warpfit/cupy"}
    ran = cuda_image.run(volume, ["python", "-c", COMPILE], **cache)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout.split()[-1]) > 10_000
