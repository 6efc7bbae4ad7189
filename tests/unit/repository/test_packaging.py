"""Dependencies of the package, files of a release, and generated files."""

import ast
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import warpfit
from support.repository.required_packages import required_packages

#: Loaded by none of the imports below: each costs tens of milliseconds or more.
HEAVY = {
    *("grpc", "google", "numba", "llvmlite", "scipy", "sklearn", "pandas", "sympy", "deap"),
    *("gplearn", "pyoperon", "jax", "matplotlib", "tqdm", "asyncio", "warpfit_server"),
}


def loaded(statement):
    names = "{name.partition('.')[0] for name in sys.modules}"
    command = [sys.executable, "-c", f"import sys; {statement}; print(*sorted({names}))"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_a_client_installs_fewer_than_five_packages():
    needed = required_packages("warpfit")
    assert {"numpy", "grpcio", "protobuf"} <= needed
    assert len(needed) < 5, needed


def test_imports_load_little():
    libraries = ", ".join(f"warpfit.frontends.{name}" for name in ("deap", "gplearn", "operon"))
    parsed = "warpfit.parse('x1 + sin(p1)')._repr_latex_()"
    assert not loaded(f"import {libraries}, warpfit.frontends.pysr; {parsed}") & HEAVY


def test_import_warpfit_adds_no_package_to_numpy():
    added = loaded("import warpfit") - loaded("import numpy, importlib.metadata, enum, hashlib")
    assert added - set(sys.stdlib_module_names) == {"warpfit"}


def test_connecting_loads_grpc_and_no_more():
    found = loaded("import warpfit; warpfit.connect('127.0.0.1:1').close()")
    assert "grpc" in found
    # gRPC itself imports asyncio.
    assert not found & (HEAVY - {"grpc", "google", "asyncio"})


def test_a_missing_library_says_how_to_get_it():
    script = (
        "import sys; sys.modules['sklearn'] = None\n"
        "try: import warpfit.sklearn\n"
        "except ImportError as error: print(error.__notes__)"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "'warpfit[sklearn]'" in done.stdout


@pytest.mark.parametrize("name", warpfit.__all__)
def test_every_exported_name_exists(name):
    assert getattr(warpfit, name) is not None


@pytest.mark.parametrize(("given", "expected"), [(None, "-event_engine_client"), ("x", "x")])
def test_grpcs_poller_is_chosen_before_it_is_imported(given, expected):
    environment = {k: v for k, v in os.environ.items() if k != "GRPC_EXPERIMENTS"}
    if given is not None:
        environment["GRPC_EXPERIMENTS"] = given
    code = "import os, sys, warpfit; print(os.environ['GRPC_EXPERIMENTS'], 'grpc' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    experiments, is_imported = ran.stdout.split()
    assert experiments.split(",")[0] == expected
    assert is_imported == "False"


# -------------------------------------------------------------------------------- what is published


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


def brought(extra):
    """Return the distributions that an extra names, those of its extras too."""
    found = set()
    for requirement in map(Requirement, PROJECT["optional-dependencies"][extra]):
        found.add(canonicalize_name(requirement.name))
        for other in requirement.extras if requirement.name == "warpfit" else ():
            found |= brought(other)
    return found


def test_an_extra_brings_what_examples_use():
    """Imports of the examples, and SymPy, which the methods of a formula import when called."""
    known = brought("examples") | brought("ray") | {"numpy", "distributed"}
    known |= {"torch", "tensorboardX"}  # either writes events, where a flag asks for it
    modules = {"sympy"}
    for path in (ROOT / "client" / "examples").glob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [one.name for one in node.names] if isinstance(node, ast.Import) else []
            modules |= {name.partition(".")[0] for name in names}
    needed = modules - set(sys.stdlib_module_names)
    assert {"scikit-learn" if name == "sklearn" else name for name in needed} <= known


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
    pytest.importorskip("hatchling")
    pytest.importorskip("twine")
    for words in (["hatchling", "build", "-d", tmp_path], ["twine", "check", "--strict"]):
        files = sorted(tmp_path.iterdir()) if words[0] == "twine" else []
        command = [sys.executable, "-m", *map(str, words), *map(str, files)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    wheel, sdist = (next(tmp_path.glob(pattern)) for pattern in ("*.whl", "*.tar.gz"))
    packed = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    own = {"warpfit", "warpfit_command.py", "warpfit_server"}
    assert packed == {*own, f"{wheel.name.split('-py3')[0]}.dist-info"}
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "proto/warpfit/v1/evaluator.proto"} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith("dist")]


# -------------------------------------------------------------------------------- what is generated


PACKAGE = Path("warpfit", "v1")


def test_stubs_are_fresh(tmp_path):
    command = [sys.executable, ROOT / "proto" / "generate.py", tmp_path]
    subprocess.run(command, check=True)
    generated = {path.name: path.read_bytes() for path in (tmp_path / PACKAGE).iterdir()}
    committed = {
        path.name: path.read_bytes() for path in (ROOT / "client" / PACKAGE).glob("*_pb2*.py*")
    }
    assert set(generated) == set(committed)
    for name, content in generated.items():
        assert committed[name] == content, f"run python proto/generate.py: {name} is stale"
