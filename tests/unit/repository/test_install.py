"""What a worker's machine needs: few packages, and an import that loads little."""

import os
import subprocess
import sys

import pytest

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


@pytest.mark.parametrize(
    "statement",
    [
        "import warpfit; warpfit.parse('x1 + sin(p1)')._repr_latex_()",
        "import warpfit.frontends",
        "import warpfit.frontends.deap, warpfit.frontends.gplearn",
        "import warpfit.frontends.operon, warpfit.frontends.pysr",
    ],
)
def test_imports_load_little(statement):
    assert not loaded(statement) & HEAVY


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
    assert "warpfit[sklearn]" in done.stdout


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
