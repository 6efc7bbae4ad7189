"""The oldest release of gRPC that is allowed; all other tests run with the newest one."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Packages of one release.
PACKAGES = ("grpcio", "grpcio-health-checking", "grpcio-status")
#: Calls through the client and by hand, with uploads and with answers of one and of many messages.
CORE = "gets_the_answer or error_ends or take_turns or closes_at_once"


@pytest.mark.timeout(300)
def test_the_oldest_release_serves_and_calls(tmp_path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (bound,) = (need for need in project["dependencies"] if need.startswith("grpcio"))
    oldest = re.search(r">=([\d.]+)", bound)[1]
    install = ["pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(tmp_path)]
    packages = [f"{name}=={oldest}.0" for name in PACKAGES]
    got = subprocess.run(
        [sys.executable, "-m", *install, *packages], capture_output=True, text=True
    )
    if got.returncode:
        pytest.skip(f"there is no such release here: {got.stderr.strip()[-200:]}")
    paths = [str(tmp_path), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    environment.pop("PYTEST_XDIST_WORKER", None)
    code = "import grpc; print(grpc.__version__)"
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == f"{oldest}.0"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    tests = [str(ROOT / "tests" / "e2e" / "test_open_calls.py"), "-k", CORE]
    ended = subprocess.run(
        [*command, *tests], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout[-3000:]
