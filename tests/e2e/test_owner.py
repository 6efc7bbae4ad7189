"""A server that a program has started ends with it, however the program ends."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress

import numpy as np
import psutil
import pytest

import warpfit
from support.servers.server import eventually

#: What programs do that have a server: they print its processes, and then wait.
BEGIN = """
import json, os, psutil, signal, sys, threading, time, warpfit
def show():
    own = [one.pid for one in psutil.Process().children(recursive=True)]
    print(json.dumps(own), flush=True)
flags = ("--devices", "cpu", "--threads", "1", "--front-ends", "1")
"""
WAIT = "with warpfit.local(*flags) as client:\n    client.info(); show(); time.sleep(100)\n"
#: Forks by Python close the pipe; one that does not go through Python leaves it open.
FORK = """
with warpfit.local(*flags) as client:
    client.info(); show()
    if __import__("ctypes").CDLL(None).fork() == 0:
        time.sleep(100)
        os._exit(0)
    time.sleep(100)
"""
EXEC = """
with warpfit.local(*flags) as client:
    client.info(); show()
    sys.stdin.readline()
    os.execv("/bin/sleep", ["sleep", "100"])
"""
#: The thread that has started the server ends, and the server goes on.
THREAD = """
def begin():
    global client
    client = stack.enter_context(warpfit.local(*flags))
from contextlib import ExitStack
with ExitStack() as stack:
    thread = threading.Thread(target=begin)
    thread.start(); thread.join()
    time.sleep(2)
    client.info(); show(); time.sleep(100)
"""


def lives(process):
    """Tell whether a process runs: one that its parent has not waited for does not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("program", "end"),
    [
        pytest.param(WAIT, signal.SIGINT, id="SIGINT", marks=pytest.mark.thorough),
        pytest.param(FORK, signal.SIGKILL, id="a child that Python does not know lives longer"),
        pytest.param(EXEC, None, id="another program in its place", marks=pytest.mark.thorough),
        pytest.param(THREAD, signal.SIGTERM, id="its thread ends", marks=pytest.mark.thorough),
    ],
)
def test_a_server_ends_with_its_owner_and_leaves_nothing(tmp_path, program, end):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", BEGIN + program]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        children = [psutil.Process(pid) for pid in json.loads(owner.stdout.readline())]
        assert len(children) >= 3, "the server, a front end, an engine"
        others = {one.pid for one in psutil.Process(owner.pid).children()} - {
            one.pid for one in children
        }
        if program is EXEC:
            owner.stdin.write("\n")
            owner.stdin.flush()
        if end is not None:
            owner.send_signal(end)
        try:
            eventually(lambda: not any(map(lives, children)), 60)
            eventually(lambda: not list(tmp_path.glob("warpfit-*")), 60)
        finally:
            for pid in {owner.pid, *others, *(one.pid for one in children if one.is_running())}:
                subprocess.run(["kill", "-9", str(pid)], stderr=subprocess.DEVNULL, check=False)


@pytest.mark.thorough
def test_an_owner_that_is_killed_while_the_server_starts(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", BEGIN + WAIT]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as owner:
        own = psutil.Process(owner.pid)
        eventually(own.children)
        time.sleep(0.3)
        children = own.children(recursive=True)
        owner.kill()
        _, alive = psutil.wait_procs(children, 60)
    assert not alive
    assert not list(tmp_path.glob("warpfit-*"))


@pytest.mark.thorough
def test_a_server_of_its_own_outlives_its_parent_and_under_nohup_the_terminal(tmp_path):
    log = tmp_path / "log"
    begin = f"nohup {sys.executable} -m warpfit_server --port 0 --devices cpu --threads 1"
    with log.open("w") as opened:
        subprocess.run(["sh", "-c", f"{begin} </dev/null & echo $!"], stdout=opened, check=True)
    pid = int(log.read_text().split()[0])
    try:
        eventually(lambda: "listening" in log.read_text(), 100)
        os.kill(pid, signal.SIGHUP)
        time.sleep(1)
        assert psutil.pid_exists(pid)
        assert psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    finally:
        os.kill(pid, signal.SIGTERM)
    eventually(lambda: not psutil.pid_exists(pid) or not lives(psutil.Process(pid)), 100)


@pytest.mark.thorough
def test_sighup_ends_a_server_in_good_order(tmp_path):
    command = [sys.executable, "-m", "warpfit_server", "--port", "0"]
    command += ["--devices", "cpu", "--threads", "1"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    pipe = subprocess.PIPE
    given = {"stdout": pipe, "env": environment, "text": True}
    # The tests themselves may run under nohup.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        process = subprocess.Popen(command, **given)
    finally:
        signal.signal(signal.SIGHUP, before)
    with process:
        assert process.stdout is not None
        try:
            assert "listening" in process.stdout.readline()
        finally:
            process.send_signal(signal.SIGHUP)
        assert process.wait(100) == 0
    assert not list(tmp_path.glob("warpfit-*"))


# ---------------------------------------------------------------------------- a block with a server


X = np.random.default_rng(5).normal(size=(100, 2))


def test_a_local_server_serves_this_process_and_others_and_stops():
    with warpfit.local("--devices", "cpu", "--threads", "1") as client:
        data = client.upload(X, X[:, 0], dtype="auto")
        population = data_population()
        here = client.evaluate(data, population, loss="mse")
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            there = pool.submit(client.evaluate, data, population, loss="mse").result()
        np.testing.assert_array_equal(here, there)
        assert here[0] == 0.0
        client.optimize(data, ["p1*x1 + p2*sin(p3*x2)"])
        assert os.getpriority(os.PRIO_PROCESS, 0) in set(nice_of_engines())
    with pytest.raises(warpfit.WarpfitError):
        client.evaluate(data, ["x1"])


def nice_of_engines():
    """Yield the niceness of each thread of the engines that this process has started."""
    for child in psutil.Process().children(recursive=True):
        if "warpfit_server.engine.process" in child.cmdline():
            for thread in child.threads():
                with suppress(ProcessLookupError):  # it has ended
                    yield os.getpriority(os.PRIO_PROCESS, thread.id)


def data_population():
    return warpfit.Population.of([warpfit.parse(text) for text in ("x1", "asinh(x2)", "x1*x2")])
