"""The CPU and the CUDA image, built and run: as their user, on a read-only root, with a volume.

``python -m pytest tests/images`` as root, where buildah and debootstrap are; about ten minutes and
8 GB. It is no part of the usual tests.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import warpfit
from images.containers import Builder
from support.repository import deployments
from support.repository.readmes import commands, snippets
from support.servers.network import Authority
from warpfit.transport.connection import TlsConfig

MISSING = [name for name in ("buildah", "debootstrap", "ip") if shutil.which(name) is None]
pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.skipif(bool(MISSING) or os.geteuid() != 0, reason=f"needs root {MISSING}"),
]

ROOT = Path(__file__).resolve().parents[2]
USER = 10001
#: Seconds in which a server with an empty cache must be healthy: it compiles first.
COLD_SECONDS = 600
#: Loads what the CUDA engine takes from wheels, and compiles a kernel, which needs no GPU.
COMPILE = """
import cuda.bindings.driver, cupy, pynvml
from warpfit_server.engine.cuda.interpreter.tier import Variant, interpreter_source
from warpfit_server.engine.interface import Arithmetic
from warpfit_server.engine.cuda.runtime import compiler

print(compiler.nvrtc_version(), compiler.linker_version())
print(len(interpreter_source(Variant(Arithmetic.PRECISE, 4)).compile(90)))
"""


@pytest.fixture(scope="module")
def builder():
    with tempfile.TemporaryDirectory(prefix="warpfit-images-") as work:
        made = Builder(Path(work))
        try:
            made.make_base()
            yield made
        finally:
            made.remove()


@pytest.fixture(scope="module")
def cpu_image(builder):
    return builder.build("server")


@pytest.fixture(scope="module")
def cuda_image(builder):
    return builder.build("cuda13")


@pytest.fixture
def volume(tmp_path):
    """A new volume, which takes over owner and mode of the image's folder."""
    place = tmp_path / "volume"
    place.mkdir(mode=0o700)
    os.chown(place, USER, USER)
    return place


@contextmanager
def serving(image, volume, log, folder=("", ""), **changes):
    """Serve in a container; give the server, and the address that its port is published at."""
    with (
        log.open("w") as lines,
        image.serve(volume, lines, COLD_SECONDS, folder, **changes) as server,
        image.network.published(image.environment["WARPFIT_PORT"]) as address,
    ):
        yield server, address
    assert server.returncode == 0


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
    if made.command[1:] == ("serve",)
]


@pytest.mark.parametrize("made", LINES, ids=range(len(LINES)))
def test_the_documented_lines_start_a_container_that_serves(request, volume, tmp_path, made):
    """With the variables, mounts, ports and host of the line; without a GPU on the CPU."""
    assert len(LINES) == 3
    kind = made.image.partition(":")[2]
    image = request.getfixturevalue(f"{kind}_image")
    variables = {**made.environment, **({"WARPFIT_DEVICES": "cpu"} if kind == "cuda" else {})}
    folders = {inside: place for inside, place in made.mounts.items() if "/" in place}
    security, folder = {}, ("", "")
    if folders:
        (inside,) = folders
        keys = tmp_path / "keys"
        keys.mkdir(mode=0o700)
        authority = Authority(tmp_path)
        pair = authority.issue("", file="server")
        for path in (pair.certificate, pair.key):
            path.rename(keys / path.name)
        made_token = image.run(volume, ["warpfit", "token", "alice"])
        (keys / "tokens").write_text(made_token.stderr)
        for path in (keys, *keys.iterdir()):
            os.chown(path, USER, USER)
            path.chmod(0o700 if path.is_dir() else 0o600)
        security = {"tls": TlsConfig(ca=authority.file), "token": made_token.stdout.strip()}
        folder = (str(keys), inside)
    log = tmp_path / "log"
    for _ in range(2):
        with serving(image, volume, log, folder, **variables) as (server, address):
            with warpfit.connect(address, **security) as client:
                data = client.upload(np.arange(6.0).reshape(3, 2))
                assert client.evaluate(data, ["x1 + x2"])[:, 0].tolist() == [1.0, 5.0, 9.0]
                assert client.info().engine == "cpu"
            status = Path(f"/proc/{server.pid}/status").read_text()
            ids = re.search(r"^Uid:\t(\d+)\t(\d+)", status, re.M).groups()
            assert ids == (str(USER), str(USER))
            assert re.search(r"^CapBnd:\t0+$", status, re.M)
            for port in ("WARPFIT_HEALTH_PORT", "WARPFIT_METRICS_PORT"):
                with image.network.published(image.environment[port]) as closed:
                    assert not answers(closed)
    kept = [path for path in volume.rglob("*") if path.is_file()]
    assert kept
    assert {path.stat().st_uid for path in kept} == {USER}
    text = log.read_text()
    assert "temporary directory" not in text
    assert "compiling values" not in text


def answers(address):
    """Whether a server's port sends anything at all to who asks."""
    host, _, port = address.partition(":")
    with socket.create_connection((host, int(port)), 10) as asking:
        try:
            asking.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            return bool(asking.recv(1))
        except OSError:
            return False


@pytest.mark.parametrize(
    ("fixture", "variant"), [("cpu_image", "server"), ("cuda_image", "cuda13")]
)
def test_an_image_has_what_is_locked_and_nothing_else(request, volume, fixture, variant):
    code = (
        "import json; from importlib.metadata import distributions;"
        "print(json.dumps([(found.name, found.version) for found in distributions()]))"
    )
    ran = request.getfixturevalue(fixture).run(volume, ["python", "-c", code])
    assert ran.returncode == 0, ran.stderr
    found = {name.lower().replace("_", "-"): version for name, version in json.loads(ran.stdout)}
    text = (ROOT / f"deploy/requirements/{variant}.txt").read_text()
    locked = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.M))
    assert found.pop("warpfit")
    assert found == {**locked, "numpy": found["numpy"]}


def test_the_cuda_image_compiles_for_a_gpu(cuda_image, volume):
    cache = {"CUPY_CACHE_DIR": "/var/cache/warpfit/cupy"}
    ran = cuda_image.run(volume, ["python", "-c", COMPILE], **cache)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout.split()[-1]) > 10_000
