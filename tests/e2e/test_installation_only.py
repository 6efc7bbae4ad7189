"""Processes of the product import nothing but the installation, whatever the working directory has.

A folder has a module of every name that Python or a package could import, a linker's library and
settings of Numba. Each module writes down that it was imported.
"""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from warpfit.child_processes import clean_environment

ROOT = Path(__file__).resolve().parents[2]
TRAP = (
    "open({marker!r}, 'a').write(__name__ + chr(10))\nraise ImportError('not of the installation')"
)
#: What starts children runs here, in a process that is itself safe.
EMBEDDED = """
with warpfit.local("--devices", "cpu") as client:
    data = client.upload([[1.0], [2.0], [3.0]], [2.0, 4.0, 6.0])
    print(client.evaluate(data, ["p1*x1"], [[2.0]], loss="mse")[0])
"""
ALGEBRA = """
from warpfit.formulas.algebra import algebraic
print(algebraic(warpfit.parse("sin(x1)^2 + cos(x1)^2"), False))
"""
COMPILERS = """
import pathlib, tempfile
from warpfit_server.engine.native.compile_processes import compile_once
place = pathlib.Path(tempfile.mkdtemp())
compile_once(place, "none", "warpfit_server.engine.cpu.codegen.parts", [[]])
print((place / "none.complete").exists())
"""
KERNELS = """
from warpfit_server.engine.cuda.runtime.compile_queue import CompileProcess
process = CompileProcess("warpfit_server.engine.cuda.runtime.compile_queue")
try:
    process.run(None)
except warpfit.WarpfitError as error:
    print(error.reason)
"""


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A folder that somebody else could write to, and the file of what was imported from it."""
    folder, marker = tmp_path_factory.mktemp("hostile"), tmp_path_factory.mktemp("seen") / "names"
    names = {*sys.stdlib_module_names, *importlib.metadata.packages_distributions()}
    for name in names | {"sitecustomize", "usercustomize", "warpfit", "warpfit_server", "shutil"}:
        if name.isidentifier():
            (folder / f"{name}.py").write_text(TRAP.format(marker=str(marker)))
    (folder / ".numba_config.yaml").write_text("disable_jit: 1\n")
    (folder / "libcuda.so.1").write_text("no library")
    return folder, marker


@pytest.mark.parametrize(
    ("script", "printed"),
    [
        (EMBEDDED, "0.0"),
        *(  # `test_every_child_is_started_in_one_way`
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in ((ALGEBRA, "1"), (COMPILERS, "True"), (KERNELS, "COMPILER_DIED"))
        ),
    ],
    ids=["embedded", "algebra", "compilers", "kernels"],
)
def test_children_import_nothing_of_the_working_directory(hostile, script, printed):
    folder, marker = hostile
    own = clean_environment(os.environ)
    entry = os.pathsep + own.get("PYTHONPATH", "")
    start = f"import os; os.environ['PYTHONPATH'] = {entry!r}; del os.environ['PYTHONSAFEPATH']\n"
    command = [
        sys.executable,
        "-c",
        f"{start}os.environ['LD_LIBRARY_PATH'] = ':'\nimport warpfit\n{script}",
    ]
    done = subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == printed, done.stderr
    assert not marker.exists(), marker.read_text()


def test_the_trap_works(hostile, tmp_path):
    folder, marker = hostile
    subprocess.run([sys.executable, "-c", "import shutil"], cwd=folder, capture_output=True)
    assert "shutil" in marker.read_text()
    marker.unlink()


def test_every_child_is_started_in_one_way():
    files = [*ROOT.glob("client/warpfit/**/*.py"), *ROOT.glob("server/**/*.py")]
    found = [path.name for path in files if "sys.executable" in path.read_text()]
    assert found == ["child_processes.py"]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("", None),
        (":", None),
        (".:./", None),
        (":/more", "/more"),
        ("/more::/other:", "/more:/other"),
        ("packages:/more", "{here}/packages:/more"),
        ("{here}", "{here}"),
    ],
)
@pytest.mark.parametrize("variable", ["PYTHONPATH", "LD_LIBRARY_PATH"])
def test_folders_of_a_variable(variable, given, kept):
    here = str(Path.cwd())
    cleaned = clean_environment({variable: given.format(here=here), "HOME": "/h"})
    expected = {} if kept is None else {variable: kept.format(here=here)}
    assert cleaned == {"HOME": "/h", "PYTHONSAFEPATH": "1", **expected}
