"""Files by which others install, build and contribute: they parse, and agree with the project."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from warpfit.cli.main import main

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
RECIPE = yaml.safe_load((ROOT / "deploy" / "conda" / "recipe.yaml").read_text())
APPTAINER = (ROOT / "deploy" / "apptainer.def").read_text()
#: Packages whose names at conda-forge are others than their distributions'.
OF_CONDA = {"prometheus_client": "prometheus-client", "python-xxhash": "xxhash"}


def requirements(texts):
    """Return version limits by name, in an order of their own."""
    found = [Requirement(text) for text in texts]
    return {canonicalize_name(one.name): str(one.specifier) for one in found if not one.extras}


# -------------------------------------------------------------------------------------- conda-forge


def of_conda(output, part):
    named = [text.split(" ", 1) for text in RECIPE["outputs"][output]["requirements"][part]]
    return [" ".join([OF_CONDA.get(name, name), *limit]) for name, *limit in named]


def test_the_recipe_has_the_version_and_dependencies_of_the_project():
    assert RECIPE["context"]["version"] == PROJECT["version"]
    client = requirements([each for each in of_conda(0, "run") if not each.startswith("python ")])
    assert client == requirements(PROJECT["dependencies"])
    assert f"python {PROJECT['requires-python']}" in of_conda(0, "run")
    extras = PROJECT["optional-dependencies"]
    server = requirements([each for each in of_conda(1, "run") if "${{" not in each])
    assert server == requirements([*extras["server"], *extras["sklearn"]])


def test_the_recipe_builds_as_the_project_says_and_has_its_commands():
    system = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]
    assert (
        requirements(system["requires"]).items()
        <= requirements(
            [each for each in of_conda(0, "host") if not each.startswith("python ")]
        ).items()
    )
    points = RECIPE["outputs"][0]["build"]["python"]["entry_points"]
    assert points == [f"{name} = {where}" for name, where in PROJECT["scripts"].items()]
    assert RECIPE["about"]["license"] == PROJECT["license"]
    assert RECIPE["about"]["homepage"] == PROJECT["urls"]["Repository"]
    assert RECIPE["about"]["summary"] == PROJECT["description"]


def commands_of_the_recipe():
    for output in RECIPE["outputs"]:
        for test in output["tests"]:
            yield from test.get("script", ())
            for name in test.get("python", {}).get("imports", ()):
                yield f"python -c import({name!r})"


@pytest.mark.parametrize("command", sorted(set(commands_of_the_recipe())))
def test_what_the_recipe_tries_after_a_build_works(command):
    program, *words = command.split()
    if program == "warpfit":
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert not ended.value.code
    else:
        import_module(re.findall(r"'([\w.]+)'", command)[0])


# ---------------------------------------------------------------------------------------- Apptainer


def test_the_apptainer_image_is_built_by_a_shell():
    script = re.search(r"%post\n(.*?)\n\n%", APPTAINER, re.DOTALL)[1]
    done = subprocess.run(["sh", "-n"], input=script, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    variants = re.findall(r"variant=(\w+)", APPTAINER)
    assert {"server", "cuda13"} == set(variants)
    assert all((ROOT / f"deploy/requirements/{name}.txt").exists() for name in variants)


# ------------------------------------------------------------------------------------------- GitHub


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_what_is_there_with_little_power(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["name"] == path.stem
    assert workflow[True]  # YAML's word for `on`
    assert workflow["permissions"]["contents"] == "read"
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 180
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            for command in re.findall(r"\.ci/\w+", step.get("run", "")):
                assert (ROOT / command).exists()
            for extras in re.findall(r"\.\[([\w,]+)\]", step.get("run", "")):
                assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
            for where in re.findall(r"pytest (tests/\w+)", step.get("run", "")):
                assert (ROOT / where).is_dir()


def workflow(name):
    return yaml.safe_load((GITHUB / "workflows" / f"{name}.yml").read_text())


def test_the_client_is_tried_on_each_system_and_each_python():
    matrix = workflow("clients")["jobs"]["client"]["strategy"]["matrix"]
    named = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert matrix["python"] == named
    assert {name.partition("-")[0] for name in matrix["system"]} == {"ubuntu", "macos", "windows"}


@pytest.mark.thorough
def test_what_is_tried_there_works_here():
    done = subprocess.run([sys.executable, ROOT / ".ci" / "client"], capture_output=True, text=True,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "errors work" in done.stdout


def test_images_of_each_variant_are_published_by_a_tag_alone():
    job = workflow("images")["jobs"]["image"]
    variants = {row["variant"] for row in job["strategy"]["matrix"]["include"]}
    locked = {path.stem for path in (ROOT / "deploy" / "requirements").glob("*.txt")}
    assert variants == locked - {"build"}
    push = [s["with"]["push"] for s in job["steps"] if "push" in s.get("with", {})]
    assert push == ["${{ startsWith(github.ref, 'refs/tags/v') }}"]


def test_the_nightly_run_has_a_job_for_a_runner_with_a_gpu():
    jobs = workflow("nightly")["jobs"]
    assert "gpu" in jobs["gpu"]["runs-on"]
    assert "-m thorough" in jobs["thorough"]["steps"][-1]["run"]


@pytest.mark.parametrize(
    "path", sorted((GITHUB / "ISSUE_TEMPLATE").glob("[!c]*.yml")), ids=lambda path: path.stem
)
def test_a_form_asks_for_what_github_knows(path):
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= form.keys()
    ids = [part["id"] for part in form["body"]]
    assert len(set(ids)) == len(ids)
    for part in form["body"]:
        assert part["type"] in {"textarea", "input", "dropdown", "checkboxes"}
        assert part["attributes"]["label"]


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "CODE_OF_CONDUCT.md"])
def test_what_contributors_read_names_what_there_is(name):
    text = (GITHUB / name).read_text()
    for target in re.findall(r"\]\((?!https?://)([^)#]+)\)", text):
        assert (GITHUB / target).exists(), target
    for path in re.findall(r"(?:`| )((?:tests|\.ci)/[\w/.]+\w)", text):
        assert (ROOT / path).exists(), path
    for extras in re.findall(r"\.\[([\w,]+)\]", text):
        assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()


# ----------------------------------------------------------------------------------------- notebook


def cells_of_colab():
    notebook = json.loads((ROOT / "client" / "examples" / "colab_gpu.ipynb").read_text())
    return [cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_installs_extras_that_there_are():
    install, *others = cells_of_colab()
    extras = re.search(r"warpfit\[([\w,]+)\] @ git\+(\S+)\"", install)
    assert set(extras[1].split(",")) <= PROJECT["optional-dependencies"].keys()
    assert extras[2] == PROJECT["urls"]["Repository"]
    for cell in others:
        ast.parse(cell)
