"""Builds images with buildah and runs them as a container engine would.

A container has a read-only root and a network of its own, in which its ports are the image's.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from support.servers.network import Proxy

ROOT = Path(__file__).resolve().parents[2]
BASE = "localhost/warpfit-base"
PACKAGES = "python3,python3-venv,python3-pip,ca-certificates"
#: The one that kernels are compiled for during a build; all of them take minutes.
ARCHITECTURE = "90"
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

    def start(
        self,
        volume: Path,
        command: Sequence[str],
        changes: Mapping[str, str],
        folder: tuple[str, str] = ("", ""),
        **options: Any,
    ) -> subprocess.Popen[Any]:
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

    def run(
        self, volume: Path, command: Sequence[str], **changes: str
    ) -> subprocess.CompletedProcess[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with self.start(volume, command, changes, **pipes) as process:
            try:
                out, err = process.communicate(timeout=STEP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    @contextmanager
    def serve(
        self, volume: Path, log: IO[str], seconds: float, folder: tuple[str, str], **changes: str
    ):
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
        given = {"PYTHON": BASE, "VARIANT": variant, "ARCHITECTURES": ARCHITECTURE}
        arguments = [f"--build-arg={name}={value}" for name, value in given.items()]
        # Docker's format: that of OCI knows no health checks.
        kind = ("--format=docker", "--network=host", "--pull-never")
        self._buildah("build", *kind, *volumes, *arguments, f"--tag={name}", str(ROOT))
        container = self._buildah("from", "--pull-never", name)
        config = json.loads(self._buildah("inspect", container))["Docker"]["config"]
        return Image(
            self._network,
            Path(self._buildah("mount", container)),
            config["User"],
            dict(entry.split("=", 1) for entry in config["Env"]),
            [*config["Entrypoint"], *config["Cmd"]],
            config["Healthcheck"]["Test"][1:],
            next(iter(config["Volumes"])),
        )

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
