"""What is published: complete metadata, one version, a wheel and an sdist that can be uploaded."""

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
WORKFLOWS = ROOT / ".github" / "workflows"


def test_metadata_are_complete():
    prefix = "Programming Language :: Python :: "
    named = [c.removeprefix(prefix) for c in PROJECT["classifiers"] if c.startswith(prefix)]
    assert named == ["3", *PYTHONS]
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
    assert {"Repository", "Documentation", "Changelog", "Issues"} <= PROJECT["urls"].keys()
    assert PROJECT["authors"]


def test_the_version_is_in_one_place():
    """The chart has to repeat it, because Helm reads nothing else."""
    chart = yaml.safe_load((ROOT / "deploy/kubernetes/Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == PROJECT["version"]
    assert f"\n## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("name", ["ci", "release"])
def test_what_is_published_is_tried_with_every_python(name):
    workflow = yaml.safe_load((WORKFLOWS / f"{name}.yml").read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert {"run": ".ci/release"} in steps
    tried = [
        s["with"]["python-version"].split() for s in steps if "python-version" in s.get("with", {})
    ]
    assert PYTHONS in tried
    for word in [step["run"].split()[0] for step in steps if step.get("run", "").startswith(".ci")]:
        assert (ROOT / word).stat().st_mode & 0o100


def test_publishing_needs_no_password():
    workflow = yaml.safe_load((WORKFLOWS / "release.yml").read_text())
    publish = workflow["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert "secrets." not in (WORKFLOWS / "release.yml").read_text()


@pytest.mark.thorough
def test_wheel_and_sdist_can_be_uploaded(tmp_path):
    for words in (["hatchling", "build", "-d", tmp_path], ["twine", "check", "--strict"]):
        files = sorted(tmp_path.iterdir()) if words[0] == "twine" else []
        command = [sys.executable, "-m", *map(str, words), *map(str, files)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    wheel, sdist = (next(tmp_path.glob(pattern)) for pattern in ("*.whl", "*.tar.gz"))
    packed = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert packed == {"warpfit", "warpfit_server", f"{wheel.name.split('-py3')[0]}.dist-info"}
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "proto/warpfit/v1/evaluator.proto"} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith("dist")]
