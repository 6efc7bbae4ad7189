"""Proves the Dockerfile where there is no Docker: runs its steps in clean root file systems.

``python tests/bench/image.py BASE.tar`` (as root) takes a root file system with Python, makes each
stage from it by the instructions of the Dockerfile, and starts the result as the Dockerfile says:
as its user, on a read-only root. Then it asks the health check, evaluates, and stops the server. A
base is made by ``mmdebstrap --variant=minbase
--include=python3,python3-venv,python3-pip,ca-certificates bookworm BASE.tar``; ``--share`` names
folders of this machine that pip needs. Writes results/image.json, for another ``--variant`` than
``server`` results/image_VARIANT.json. Of a CUDA variant on a machine without a GPU it proves that
its libraries are there and load, and that the CPU engine serves in place of the device, with a log
line that says why.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import warpfit
from support.results import write_result

ROOT = Path(__file__).resolve().parents[2]
#: Seconds in which a server with an empty cache must be healthy; it compiles first.
_HEALTHY_SECONDS = 600
#: Loads what the CUDA engine takes from wheels, and compiles a kernel, which needs no GPU.
_COMPILE = """
import json
import cuda.bindings.driver, cupy, numpy, pynvml
from warpfit.request import Precision
from warpfit_server.engine.cuda import compile, nvrtc
from warpfit_server.engine.cuda.interpreter import interpreter_cubin
from warpfit_server.engine.cuda.source import Variant

variant = Variant(numpy.dtype("f4"), Precision.PRECISE, 4)
print(json.dumps({
    "cupy": cupy.__version__,
    "nvrtc": nvrtc.version(),
    "nvjitlink": compile.version(),
    "interpreter_for_compute_capability_9_0_bytes": len(interpreter_cubin(variant, 90)),
}))
"""
#: Makes a container's view: own mounts, devices, and what is shared, then runs a command there.
_ENTER = """
set -e
mount --make-rprivate /
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
for place in $shared; do mkdir -p "$root$place"; mount --bind "$place" "$root$place"; done
for place in $writable; do mount -t tmpfs -o mode=1777 tmpfs "$root$place"; done
if [ -n "$read_only" ]; then mount -o remount,bind,ro "$root"; fi
exec chroot "$root" setpriv --reuid "$user" --regid "$user" --clear-groups --no-new-privs \
    sh -c 'cd "$0" && exec "$@"' "$directory" env -i "$@"
"""


@dataclass
class Stage:
    """A root file system on its way, and what the Dockerfile has set for it."""

    root: Path
    arguments: dict[str, str]
    environment: dict[str, str] = field(default_factory=dict)
    directory: str = "/"
    user: str = "0"
    settings: dict[str, str] = field(default_factory=dict)
    """Text of HEALTHCHECK, ENTRYPOINT, CMD and others."""


def instructions(text: str) -> list[tuple[str, str]]:
    """Name and arguments of each instruction, continued lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [tuple(line.split(None, 1)) for line in joined.splitlines()]


class Builder:
    """Runs the instructions of a Dockerfile."""

    def __init__(self, base: Path, work: Path, shared: list[str], variant: str) -> None:
        self._base, self._work, self._shared = base, work, shared
        self._arguments = {"VARIANT": variant}
        self.stages: dict[str, Stage] = {}
        self.last: Stage | None = None

    def run(self, text: str) -> Stage:
        for name, rest in instructions(text):
            getattr(self, f"_{name.lower()}", self._setting(name))(rest)
        assert self.last is not None
        return self.last

    def _from(self, rest: str) -> None:
        name = rest.partition(" AS ")[2] or "final"
        root = self._work / name
        root.mkdir()
        subprocess.run(["tar", "-xf", self._base, "-C", root, "--exclude=./dev/*"], check=True)
        (root / "usr/local/bin/python").symlink_to("/usr/bin/python3")
        for place in ("etc/resolv.conf", "etc/ssl/certs/ca-certificates.crt"):
            shutil.copy(f"/{place}", root / place)
        self.last = self.stages[name] = Stage(root, {})

    def _arg(self, rest: str) -> None:
        name, _, default = rest.partition("=")
        if self.last is not None:
            self.last.arguments[name] = self._arguments.get(name, default)

    def _env(self, rest: str) -> None:
        self.last.environment |= dict(re.findall(r"(\w+)=(\S+)", self._expanded(rest)))

    def _workdir(self, rest: str) -> None:
        self.last.directory = rest
        (self.last.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def _user(self, rest: str) -> None:
        self.last.user = rest.partition(":")[0]

    def _copy(self, rest: str) -> None:
        *options, target = rest.split()
        source_root = ROOT
        if options[0].startswith("--from="):
            source_root = self.stages[options.pop(0).partition("=")[2]].root
        place = self.last.root / self.last.directory.lstrip("/") / target.removesuffix("/")
        if target.startswith("/"):
            place = self.last.root / target.lstrip("/")
        for source in options:
            path = source_root / source.lstrip("/")
            if path.is_dir():
                ignored = shutil.ignore_patterns("__pycache__") if source_root == ROOT else None
                shutil.copytree(path, place, symlinks=True, ignore=ignored)
            else:
                shutil.copy(path, place)

    def _run(self, rest: str) -> None:
        pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        stage = self.last
        environment = {**pip, **stage.environment, **stage.arguments}
        started = enter(stage, ["/bin/sh", "-c", rest], environment, shared=self._shared)
        if started.wait():
            raise SystemExit(f"failed: RUN {rest}")

    def _setting(self, name: str) -> Any:
        return lambda rest: self.last.settings.__setitem__(name, rest)

    def _expanded(self, text: str) -> str:
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return text.replace("${PATH}", path)


def enter(
    stage: Stage,
    command: list[str],
    environment: dict[str, str],
    *,
    shared: list[str] | None = None,
    writable: tuple[str, ...] = ("/tmp",),
    read_only: bool = False,
    **options: Any,
) -> subprocess.Popen[Any]:
    """Start a command in a stage's root file system, as its user."""
    outside = {
        "root": str(stage.root),
        "shared": " ".join(shared or ()),
        "writable": " ".join(writable),
        "read_only": "1" if read_only else "",
        "user": stage.user,
        "directory": stage.directory,
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    }
    inside = {"PATH": "/usr/local/bin:/usr/bin:/bin", **environment}
    assignments = [f"{name}={value}" for name, value in inside.items()]
    arguments = ["unshare", "--mount", "sh", "-c", _ENTER, "sh", *assignments, *command]
    return subprocess.Popen(arguments, env=outside, **options)


def size(root: Path) -> int:
    ran = subprocess.run(["du", "-sbx", root], capture_output=True, text=True, check=True)
    return int(ran.stdout.split()[0])


def serve(stage: Stage, log: IO[str]) -> dict[str, Any]:
    """Start the image's command on a read-only root, use it, stop it; it logs to a file."""
    command = [*json.loads(stage.settings["ENTRYPOINT"]), *json.loads(stage.settings["CMD"])]
    check = json.loads(stage.settings["HEALTHCHECK"].partition("CMD ")[2])
    options = {"writable": ("/tmp", stage.settings["VOLUME"]), "read_only": True}
    attempt = enter(stage, ["touch", "/opt/x"], stage.environment, stderr=-3, **options)
    started = time.monotonic()
    insecure = {**stage.environment, "WARPFIT_INSECURE": "true"}
    server = enter(stage, command, insecure, stderr=log, **options)
    try:
        while enter(stage, check, stage.environment, stdout=-3, **options).wait():
            assert server.poll() is None, "the server has ended"
            assert time.monotonic() < started + _HEALTHY_SECONDS, (
                "the server does not become healthy"
            )
            time.sleep(0.5)
        healthy = time.monotonic() - started
        with warpfit.connect("127.0.0.1:" + stage.environment["WARPFIT_PORT"]) as client:
            got = client.evaluate(client.upload(np.arange(6.0).reshape(3, 2)), ["x1 + x2"])
            engine = client.info().engine
        status = Path(f"/proc/{server.pid}/status").read_text()
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(60)
    return {
        "engine": engine,
        "said_of_the_engine": _said(log, "warpfit.engine"),
        "healthy_after_seconds_with_an_empty_cache": round(healthy, 1),
        "answer_is_right": got[:, 0].tolist() == [1.0, 5.0, 9.0],
        "user": int(re.search(r"Uid:\s+(\d+)", status)[1]),
        "root_is_read_only": attempt.wait() != 0,
        "exit_status_after_sigterm": code,
    }


def _said(log: IO[str], logger: str) -> list[str]:
    """Messages of a logger in a log of JSON lines."""
    log.seek(0)
    lines = [json.loads(line) for line in log if line.startswith("{")]
    return [line["message"] for line in lines if line["logger"] == logger]


def compiled(stage: Stage) -> dict[str, Any]:
    """Compile for a GPU inside the image, as its user, on a read-only root."""
    started = enter(
        stage,
        ["python", "-c", _COMPILE],
        stage.environment,
        writable=("/tmp", stage.settings["VOLUME"]),
        read_only=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    output, _ = started.communicate()
    assert started.returncode == 0, "the CUDA libraries do not load"
    return {"cuda_libraries": json.loads(output)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", type=Path)
    parser.add_argument("--variant", default="server")
    parser.add_argument("--share", action="append", default=[])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work, tempfile.TemporaryFile("w+") as log:
        builder = Builder(options.base, Path(work), options.share, options.variant)
        stage = builder.run((ROOT / "Dockerfile").read_text())
        is_cuda = options.variant.startswith("cuda")
        seen = {**serve(stage, log), **(compiled(stage) if is_cuda else {})}
        sizes = {"image_bytes": size(stage.root), "of_it_warpfit": size(stage.root / "opt/warpfit")}
    passed = seen["answer_is_right"] and seen["root_is_read_only"] and seen["user"] == 10001
    passed &= seen["exit_status_after_sigterm"] == 0
    content = {"variant": options.variant, "passed": passed, **seen, **sizes}
    name = "image" if options.variant == "server" else f"image_{options.variant}"
    print(write_result(name, content).read_text())
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
