"""The CPU and the CUDA image, built with buildah and run as a container engine would.

A container runs as its user on a read-only root with a volume, in a network of its own, in which
its ports are the image's.

``python -m pytest tests/images`` as root, where buildah and debootstrap are; about ten minutes and
8 GB. It is no part of the usual tests.
"""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import pytest

import warpfit
from support.repository import deployments
from support.repository.readmes import commands, snippets
from support.servers.network import Authority, Proxy
from warpfit.transport.connection import TlsConfig

MISSING = [name for name in ("buildah", "debootstrap", "ip") if shutil.which(name) is None]
WHY = f"needs root {MISSING}"
pytestmark = [pytest.mark.timeout(3600)]
pytestmark += [pytest.mark.skipif(bool(MISSING) or os.geteuid() != 0, reason=WHY)]

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


BASE = "localhost/warpfit-base"
PACKAGES = "python3,python3-venv,python3-pip,ca-certificates"
#: Seconds for each step of a build; downloading CUDA's libraries takes most.
STEP_SECONDS = 900
#: What pip needs of this machine during a build, where it is there.
FROM_MACHINE = ("/etc/pip.conf", "/etc/ssl/certs", "/etc/resolv.conf")
#: Makes a container's view, then runs a command there as the image's user.
ENTER = """
set -e
mount --make-rprivate /
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777,size=64m tmpfs "$root/tmp"
mount --bind "$volume" "$root$mounted_at"
if [ -n "$folder" ]; then
    mkdir -p "$root$folder_at"
    mount --bind "$folder" "$root$folder_at"
fi
mount -o remount,bind,ro "$root"
exec chroot "$root" setpriv --reuid "${user%%:*}" --regid "${user##*:}" --clear-groups \
    --no-new-privs --bounding-set=-all env -i "$@"
"""


class Network:
    """A network namespace for containers, joined to this machine by a pair of devices."""

    name = f"warpfit-{os.getpid()}"
    #: Addresses of the container and of this machine, of the range for measurements.
    container, machine = "198.18.77.2", "198.18.77.1"

    def make(self) -> None:
        pair, there = f"wf{os.getpid()}", ["ip", "-n", self.name]
        for command in (
            ["ip", "netns", "add", self.name],
            ["ip", "link", "add", pair, "type", "veth", "peer", "eth0", "netns", self.name],
            ["ip", "address", "add", f"{self.machine}/30", "dev", pair],
            ["ip", "link", "set", pair, "up"],
            [*there, "address", "add", f"{self.container}/30", "dev", "eth0"],
            [*there, "link", "set", "eth0", "up"],
            [*there, "link", "set", "lo", "up"],
        ):
            subprocess.run(command, check=True, capture_output=True)

    def remove(self) -> None:
        subprocess.run(["ip", "netns", "delete", self.name], check=True)

    @contextmanager
    def published(self, port: str) -> Iterator[str]:
        """Give the address of a free port of this machine that leads to one of the container."""
        with Proxy(f"{self.container}:{port}") as proxy:
            yield proxy.address


@dataclass(frozen=True)
class Image:
    """A built image: its files, and what it says about how it is run."""

    network: Network
    root: Path
    user: str
    environment: Mapping[str, str]
    command: Sequence[str]
    health: Sequence[str]
    volume: str

    def start(self, volume: Path, command, changes: Mapping[str, str], folder=("", ""), **options):
        """Run a command in a container of the image; ``options`` are those of `subprocess.Popen`.

        The image's volume is a folder of this machine. ``changes`` are variables that differ from
        the image's, ``folder`` is one of this machine, and where it is in the container.
        """
        outside = {
            **{"root": str(self.root), "user": self.user, "volume": str(volume)},
            **{"mounted_at": self.volume, "folder": folder[0], "folder_at": folder[1]},
            **{"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        }
        inside = {**self.environment, **changes}
        assignments = [f"{name}={value}" for name, value in inside.items()]
        within = ["ip", "netns", "exec", self.network.name, "unshare", "--mount"]
        words = [*within, "sh", "-c", ENTER, "sh", *assignments, *command]
        return subprocess.Popen(words, env=outside, **options)

    def run(self, volume: Path, command: Sequence[str], **changes: str):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with self.start(volume, command, changes, **pipes) as process:
            try:
                out, err = process.communicate(timeout=STEP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    @contextmanager
    def serve(self, volume: Path, log: IO[str], seconds: float, folder, **changes: str):
        """Start the image's own command; give the process once its health check succeeds."""
        with self.start(volume, self.command, changes, folder, stderr=log) as server:
            try:
                deadline = time.monotonic() + seconds
                while self.run(volume, self.health, **changes).returncode:
                    assert server.poll() is None, Path(log.name).read_text()
                    assert time.monotonic() < deadline, "the server does not become healthy"
                    time.sleep(0.5)
                yield server
            finally:
                server.terminate()
                try:
                    server.wait(60)
                except subprocess.TimeoutExpired:
                    server.kill()


class Builder:
    """Makes a base and images on it, in a storage of its own in the folder ``work``."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self._network = Network()

    def make_base(self) -> None:
        """Make what stands for the official image of Python: the same Debian, its Python."""
        self._network.make()
        base = self._work / "base"
        flags = ("--variant=minbase", f"--include={PACKAGES}")
        self._checked(["debootstrap", *flags, "bookworm", base])
        (base / "usr/local/bin/python").symlink_to("/usr/bin/python3")
        for mark in base.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
            mark.unlink()
        container = self._buildah("from", "scratch")
        self._buildah("add", "--quiet", container, str(base), "/")
        self._buildah("commit", "--quiet", "--rm", container, BASE)
        shutil.rmtree(base)

    def build(self, variant: str) -> Image:
        name = f"localhost/warpfit-{variant}"
        there = [place for place in FROM_MACHINE if Path(place).exists()]
        volumes = [f"--volume={place}:{place}:ro" for place in there]
        # Kernels are compiled for one architecture: for all of them it takes minutes.
        given = {"PYTHON": BASE, "VARIANT": variant, "ARCHITECTURES": "90"}
        arguments = [f"--build-arg={name}={value}" for name, value in given.items()]
        # Docker's format: that of OCI knows no health checks.
        kind = ("--format=docker", "--network=host", "--pull-never")
        self._buildah("build", *kind, *volumes, *arguments, f"--tag={name}", str(ROOT))
        container = self._buildah("from", "--pull-never", name)
        config = json.loads(self._buildah("inspect", container))["Docker"]["config"]
        environment = dict(entry.split("=", 1) for entry in config["Env"])
        command, health = [*config["Entrypoint"], *config["Cmd"]], config["Healthcheck"]["Test"][1:]
        own = config["User"], environment, command, health, next(iter(config["Volumes"]))
        return Image(self._network, Path(self._buildah("mount", container)), *own)

    def remove(self) -> None:
        self._network.remove()
        self._buildah("rm", "--all")
        self._buildah("rmi", "--all", "--force")

    def _buildah(self, *words: str) -> str:
        places = [f"--root={self._work / 'storage'}", f"--runroot={self._work / 'run'}"]
        return self._checked(["buildah", *places, *words]).strip()

    def _checked(self, command: Sequence[str | Path]) -> str:
        environment = {**os.environ, "BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "vfs"}
        given = {"env": environment, "capture_output": True, "text": True, "timeout": STEP_SECONDS}
        ran = subprocess.run(command, **given)
        assert ran.returncode == 0, f"{command}\n{ran.stdout[-4000:]}\n{ran.stderr[-4000:]}"
        return ran.stdout


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
def serving(image, volume, log, folder, **changes):
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


STARTED = [
    line for s in snippets("deploy/README.md") for line in commands(s) if line[:10] == "docker run"
]
LINES = [deployments.container(shlex.split(line)[2:]) for line in STARTED]
LINES = [made for made in LINES if made.command[1:] == ("serve",)]


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
    code = "import json; from importlib.metadata import distributions as found;"
    code += "print(json.dumps([(each.name, each.version) for each in found()]))"
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
