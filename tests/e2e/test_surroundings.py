"""The owner of a process, its forks, its folder and its descriptors."""

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import warpfit
from support.servers.server import eventually
from warpfit.child_processes import clean_environment

# ---------------------------------------------- a server ends with the program that has started it
#: A program that has a server, prints its processes, and forks in a way that leaves its pipe open:
#: forks by Python close it.
OWNER = """
import json, os, psutil, time, warpfit
def show():
    own = [one.pid for one in psutil.Process().children(recursive=True)]
    print(json.dumps(own), flush=True)
flags = ("--devices", "cpu", "--threads", "1", "--front-ends", "1")
with warpfit.local(*flags) as client:
    client.info(); show()
    if __import__("ctypes").CDLL(None).fork() == 0:
        time.sleep(100)
        os._exit(0)
    time.sleep(100)
"""


def lives(process):
    """Tell whether a process runs: one that its parent has not waited for does not."""
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE


def test_a_server_ends_with_its_owner_and_leaves_nothing(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, env=environment, text=True, **pipes) as owner:
        children = [psutil.Process(pid) for pid in json.loads(owner.stdout.readline())]
        assert len(children) >= 3, "the server, a front end, an engine"
        others = {*psutil.Process(owner.pid).children()} - {*children}
        owner.kill()
        try:
            eventually(lambda: not any(map(lives, children)), 60)
            eventually(lambda: not list(tmp_path.glob("warpfit-*")), 60)
        finally:
            for process in (*others, *children):
                with suppress(psutil.NoSuchProcess):
                    process.kill()


# ---------------------------------------------------------------- forks of a process with a client
CLIENT = """
import asyncio, multiprocessing, os, sys, threading, time
import numpy as np
import warpfit

client = warpfit.connect(sys.argv[1])
data = client.upload(np.arange(10.0)[:, None], np.arange(10.0))

def call(i):
    return float(client.evaluate(data, [f"x1 + {i}"], loss="mse", timeout=5)[0])

def call_often():
    while True:
        client.evaluate(data, ["x1"], loss="mse")
"""
POOL = """
with multiprocessing.get_context("fork").Pool(4) as pool:
    assert pool.map_async(call, range(40)).get(30) == [float(i * i) for i in range(40)]
assert call(3) == 9.0
"""
PROGRAMS = {
    "while a thread calls": "threading.Thread(target=call_often, daemon=True).start()\n"
    "time.sleep(0.3)" + POOL,
    "without support of forks": """
child = os.fork()
if not child:
    try:
        call(1)
    except warpfit.InvalidArgumentError as error:
        sys.exit(7 if "GRPC_ENABLE_FORK_SUPPORT" in str(error) else 3)
    sys.exit(4)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
""",
}


@pytest.mark.parametrize(
    "case",
    PROGRAMS,
)
def test_a_fork_leaves_calls_that_work_or_say_why(server, case):
    command = [sys.executable, "-W", "ignore", "-c", CLIENT + PROGRAMS[case], server.address]
    supports = "0" if case == "without support of forks" else "1"
    environment = {**os.environ, "GRPC_ENABLE_FORK_SUPPORT": supports}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert ended.returncode == 0, ended.stderr[-2000:]


# --------------------------------------------------------------------------- what processes import
ROOT = Path(__file__).resolve().parents[2]
TRAP = (
    "open({marker!r}, 'a').write(__name__ + chr(10))\nraise ImportError('not of the installation')"
)
#: What starts children runs here, in a process that is itself safe.
COMPILERS = """
import pathlib, tempfile
from warpfit_server.engine.native.numba_cache import begin, wait
place = pathlib.Path(tempfile.mkdtemp())
begin(place, "warpfit_server.engine.cpu.codegen.parts", {"none": {("check",): 1.0}}, 1)
wait(place, "none")
print((place / "none.complete").exists())
"""


def test_children_import_nothing_of_the_working_directory(tmp_path):
    """Somebody else could write to that folder."""
    folder, marker = tmp_path / "hostile", tmp_path / "names"
    folder.mkdir()
    names = {*sys.stdlib_module_names, *importlib.metadata.packages_distributions()}
    for name in names | {"sitecustomize", "usercustomize", "warpfit", "warpfit_server"}:
        if name.isidentifier():
            (folder / f"{name}.py").write_text(TRAP.format(marker=str(marker)))
    (folder / ".numba_config.yaml").write_text("disable_jit: 1\n")
    (folder / "libcuda.so.1").write_text("no library")
    own = clean_environment(os.environ)
    entry = os.pathsep + own.get("PYTHONPATH", "")
    start = f"import os; os.environ['PYTHONPATH'] = {entry!r}; del os.environ['PYTHONSAFEPATH']\n"
    code = f"{start}os.environ['LD_LIBRARY_PATH'] = ':'\nimport warpfit\n{COMPILERS}"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "True", done.stderr
    assert not marker.exists(), marker.read_text()


def test_every_child_is_started_in_one_way():
    files = [*ROOT.glob("client/warpfit/**/*.py"), *ROOT.glob("server/**/*.py")]
    found = [path.name for path in files if "sys.executable" in path.read_text()]
    assert found == ["child_processes.py"]


FOLDERS = {".:./": None, ":/more": "/more", "/more::/other:": "/more:/other"}
FOLDERS["packages:/more"] = "{here}/packages:/more"


@pytest.mark.parametrize("variable", ["PYTHONPATH", "LD_LIBRARY_PATH"])
def test_folders_of_a_variable(variable):
    for given, kept in FOLDERS.items():
        expected = {} if kept is None else {variable: kept.format(here=Path.cwd())}
        cleaned = clean_environment({variable: given, "HOME": "/h"})
        assert cleaned == {"HOME": "/h", "PYTHONSAFEPATH": "1", **expected}


# ------------------------------------------ standard output that is closed, full or read by nobody
WARPFIT = f"exec {sys.executable} -c 'import sys, warpfit.cli.main as m; sys.exit(m.main())'"


@pytest.fixture
def shell(tmp_path, server):
    """Run the command in a shell, with redirections; return its status and standard error."""
    path = tmp_path / "t.csv"
    path.write_text("a,y\n" + "".join(f"{i},{2 * i + 1}\n" for i in range(20)))

    def run(text, redirections, unbuffered=""):
        own = {"ADDRESS": server.address, "TABLE": str(path), "PYTHONUNBUFFERED": unbuffered}
        given = {"env": {**os.environ, **own}, "capture_output": True, "text": True}
        done = subprocess.run(["sh", "-c", f"{WARPFIT} {text} {redirections}"], **given)
        return done.returncode, done.stderr

    return run


@pytest.mark.parametrize(
    ("text", "output", "unbuffered"),
    [
        ("info $ADDRESS", ">/dev/full", ""),
        ("token alice", ">&-", "1"),
    ],
)
def test_a_command_that_cannot_print_says_so(shell, text, output, unbuffered):
    status, err = shell(text, output, unbuffered)
    assert status == 2
    lines = err.strip().splitlines()
    assert lines[-1].startswith("warpfit: error: standard output cannot be written: "), err
    assert len(lines) == (3 if text == "token alice" else 1), err
    assert "Traceback" not in err


def test_a_command_that_cannot_complain_does_its_work(shell):
    assert shell("fit $TABLE 'p1*a + p2' --target y --address $ADDRESS", "<&- 2>&-")[0] == 0
    assert shell("eval $TABLE 'a +' --address $ADDRESS", ">&- 2>/dev/full")[0] == 2


@pytest.mark.thorough
def test_a_server_serves_whatever_its_descriptors_are(tmp_path):
    file = tmp_path / "address"
    serve = f"{WARPFIT} serve --port 0 --devices cpu --threads 1 --front-ends 1"
    line = f"{serve} --address-file {file} <&- >&- 2>&-"
    with subprocess.Popen(["sh", "-c", line], stderr=subprocess.DEVNULL) as process:
        try:
            address = f"file://{file}"
            with warpfit.connect(address, wait=60, tls=False) as client:
                data = client.upload([[1.0], [2.0]])
                for _ in range(20):
                    assert client.evaluate(data, ["2*x1"]).tolist() == [[2.0], [4.0]]
            assert process.poll() is None
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
