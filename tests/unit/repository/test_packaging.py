"""Dependencies of the package, files of a release and of GitHub, and generated files."""

import ast
import os
import re
import runpy
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import numpy as np
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.random_programs import thesis_mix
from support.repository.required_packages import required_packages
from warpfit.expressions import reference
from warpfit.parse import parse

#: Loaded by none of the imports below: each costs tens of milliseconds or more.
HEAVY = {
    *("grpc", "google", "numba", "llvmlite", "scipy", "sklearn", "pandas", "sympy", "deap"),
    *("gplearn", "pyoperon", "jax", "matplotlib", "tqdm", "asyncio", "warpfit_server"),
}


def printed(code, **options):
    """Words that a new interpreter prints."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, **options)
    return done.stdout.split()


def loaded(statement):
    names = "{name.partition('.')[0] for name in sys.modules}"
    return {*printed(f"import sys; {statement}; print(*{names})")}


def test_a_client_installs_fewer_than_five_packages():
    needed = required_packages("warpfit")
    assert {"numpy", "grpcio", "protobuf"} <= needed
    assert len(needed) < 5, needed


def test_imports_load_little():
    libraries = ", ".join(f"warpfit.frontends.{name}" for name in ("deap", "gplearn", "operon"))
    parsed = "warpfit.parse('x1 + sin(p1)')._repr_latex_()"
    assert not loaded(f"import {libraries}, warpfit.frontends.pysr; {parsed}") & HEAVY


def test_connecting_loads_grpc_and_no_more():
    found = loaded("import warpfit; warpfit.connect('127.0.0.1:1').close()")
    assert "grpc" in found
    # gRPC itself imports asyncio.
    assert not found & (HEAVY - {"grpc", "google", "asyncio"})


def test_a_missing_library_says_how_to_get_it():
    script = "import sys; sys.modules['sklearn'] = None\ntry: import warpfit.sklearn\n"
    told = printed(script + "except ImportError as error: print(error.__notes__)")
    assert "'warpfit[sklearn]'" in " ".join(told)


@pytest.mark.parametrize(("given", "expected"), [(None, "-event_engine_client"), ("x", "x")])
def test_grpcs_poller_is_chosen_before_it_is_imported(given, expected):
    environment = {k: v for k, v in os.environ.items() if k != "GRPC_EXPERIMENTS"}
    if given is not None:
        environment["GRPC_EXPERIMENTS"] = given
    code = "import os, sys, warpfit; print(os.environ['GRPC_EXPERIMENTS'], 'grpc' in sys.modules)"
    experiments, is_imported = printed(code, env=environment)
    assert experiments.split(",")[0] == expected
    assert is_imported == "False"


# -------------------------------------------------------------------------------- what is published
ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
#: Packages whose names at conda-forge are others than their distributions'.
OF_CONDA = {"prometheus_client": "prometheus-client", "python-xxhash": "xxhash"}


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
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [one.name for one in node.names] if isinstance(node, ast.Import) else []
            modules |= {name.partition(".")[0] for name in names}
    needed = modules - set(sys.stdlib_module_names) - {"sklearn"}
    assert {*needed, "scikit-learn"} <= known


def test_the_version_is_in_one_place():
    """The chart has to repeat it, because Helm reads nothing else."""
    chart = yaml.safe_load((ROOT / "deploy/kubernetes/Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == PROJECT["version"]
    assert f"\n## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text()


def requirements(texts):
    """Return version limits by name; conda-forge has a space before a limit."""
    named = [text.split(" ", 1) for text in texts if "${{" not in text and text[:7] != "python "]
    found = [Requirement(" ".join([OF_CONDA.get(name, name), *limit])) for name, *limit in named]
    return {canonicalize_name(one.name): str(one.specifier) for one in found if not one.extras}


def test_the_recipe_of_conda_forge_has_version_dependencies_and_commands_of_the_project():
    recipe = yaml.safe_load((ROOT / "deploy" / "conda" / "recipe.yaml").read_text())
    client, server = recipe["outputs"]
    extras = PROJECT["optional-dependencies"]
    assert recipe["context"]["version"] == PROJECT["version"]
    assert requirements(client["requirements"]["run"]) == requirements(PROJECT["dependencies"])
    wanted = requirements([*extras["server"], *extras["sklearn"]])
    assert requirements(server["requirements"]["run"]) == wanted
    points = client["build"]["python"]["entry_points"]
    assert points == [f"{name} = {where}" for name, where in PROJECT["scripts"].items()]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_what_is_there_with_little_power(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"]["contents"] == "read"
    for step in (step for job in workflow["jobs"].values() for step in job["steps"]):
        assert ("uses" in step) != ("run" in step)
        for command in re.findall(r"\.ci/\w+", step.get("run", "")):
            assert (ROOT / command).stat().st_mode & 0o100
        for extras in re.findall(r"\.\[([\w,]+)\]", step.get("run", "")):
            assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
        for where in re.findall(r"pytest (tests/\w+)", step.get("run", "")):
            assert (ROOT / where).is_dir()


@pytest.mark.thorough
def test_what_is_tried_on_each_system_works_here():
    done = subprocess.run([sys.executable, ROOT / ".ci" / "client"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "errors work" in done.stdout


def test_what_contributors_read_names_what_there_is():
    for name in ("CONTRIBUTING.md", "CODE_OF_CONDUCT.md"):
        text = (ROOT / ".github" / name).read_text()
        for target in re.findall(r"\]\((?!https?://)([^)#]+)\)", text):
            assert (ROOT / ".github" / target).exists(), target
        for path in re.findall(r"(?:`| )((?:tests|\.ci)/[\w/.]+\w)", text):
            assert (ROOT / path).exists(), path


def test_the_notebook_installs_extras_that_there_are():
    notebook = (ROOT / "client" / "examples" / "colab_gpu.ipynb").read_text()
    extras = re.search(r"warpfit\[([\w,]+)\] @ git\+([\w:/.-]+)", notebook)
    assert set(extras[1].split(",")) <= PROJECT["optional-dependencies"].keys()
    assert extras[2] == PROJECT["urls"]["Repository"]


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


PACKAGE = Path("warpfit", "v1")


def test_stubs_are_fresh(tmp_path):
    command = [sys.executable, ROOT / "proto" / "generate.py", tmp_path]
    subprocess.run(command, check=True)
    generated = {path.name: path.read_bytes() for path in (tmp_path / PACKAGE).iterdir()}
    paths = (ROOT / "client" / PACKAGE).glob("*_pb2*.py*")
    committed = {path.name: path.read_bytes() for path in paths}
    assert generated == committed, "run python proto/generate.py"


def test_the_published_expressions_are_those_of_the_benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "bench"))
    program = runpy.run_path(str(ROOT / "tests" / "bench" / "expressions.py"))
    published = program["FILE"].read_text().splitlines()
    assert published == program["lines"]()
    X = np.random.default_rng(0).uniform(0.1, 5.0, (40, 10)).T
    with np.errstate(all="ignore"):
        for text, drawn, parameters in zip(published, *thesis_mix(1), strict=True):
            found = reference.evaluate_program(parse(text), X)
            bound = reference.evaluate_program(drawn.bind(parameters), X)
            np.testing.assert_allclose(found, bound, rtol=1e-12)
