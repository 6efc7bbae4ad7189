"""Forks of a process with a client: calls of the child work, or fail at once and say why."""

import os
import subprocess
import sys

import pytest

BEGIN = """
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
    "after calls without a deadline": 'client.evaluate(data, ["x1"], loss="mse")' + POOL,
    "a client of the child": """
call(0)
def call(i):
    with warpfit.connect(sys.argv[1]) as own:
        return float(own.evaluate(data, [f"x1 + {i}"], loss="mse", timeout=5)[0])
"""
    + POOL,
    "asyncio before and after": """
other = warpfit.connect_async(sys.argv[1])
asyncio.run(other.info())
def call(i):
    options = {"loss": "mse", "timeout": 5}
    return float(asyncio.run(other.evaluate(data, [f"x1 + {i}"], **options))[0])
"""
    + POOL,
    "a child that ends as programs do": """
client.evaluate(data, ["x1"], loss="mse")
child = os.fork()
if not child:
    assert call(3) == 9.0
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert call(3) == 9.0
""",
    "while a long call is in flight": """
import socket
silent = socket.create_server(("127.0.0.1", 0))
def wait():
    try:
        warpfit.connect(f"127.0.0.1:{silent.getsockname()[1]}").info(timeout=4)
    except warpfit.DeadlineExceededError as error:
        ends.append(error)
ends = []
thread = threading.Thread(target=wait)
thread.start()
time.sleep(0.5)
begin = time.monotonic()
child = os.fork()
if not child:
    assert call(1) == 1.0
    assert warpfit.connect(sys.argv[1]).info().engine == "cpu"
    sys.exit(7)
assert time.monotonic() - begin < 3
assert thread.is_alive(), "the long call was to be in flight all the time"
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert call(3) == 9.0
thread.join()
assert ends
""",
    "while a long fit follows another one in a call": """
X = np.random.default_rng(0).normal(size=(20_000, 3))
other = client.upload(X, np.exp(-X[:, 0] ** 2) * np.cos(3 * X[:, 1]) + X[:, 2])
text = "+".join(f"p{3 * i + 1}*sin(p{3 * i + 2}*x{i % 3 + 1} + p{3 * i + 3})" for i in range(9))
starts = np.linspace(0.1, 2.7, 27)[None, :] * np.linspace(1, 2, 40)[:, None]
fits, begun = [], threading.Event()
def fit():
    client.optimize(other, ["p1*x1"])
    begun.set()
    fits.append(client.optimize(other, [text], [starts], max_iterations=60))
thread = threading.Thread(target=fit)
thread.start()
begun.wait()
time.sleep(0.3)
child = os.fork()
if not child:
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert thread.is_alive(), "the fit was to be in flight all the time"
thread.join()
assert fits
""",
}


#: A fork beside short calls; the others differ in the calls before, beside or after.
_USUAL = {"while a thread calls"}


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if c in _USUAL else pytest.mark.thorough) for c in PROGRAMS],
)
def test_a_fork_leaves_calls_that_work_or_say_why(server, case):
    run(BEGIN + PROGRAMS[case], server.address, {"GRPC_ENABLE_FORK_SUPPORT": "1"})


def test_a_child_says_that_grpc_was_loaded_without_care_for_forks(server):
    script = (
        BEGIN
        + """
child = os.fork()
if not child:
    try:
        call(1)
    except warpfit.InvalidArgumentError as error:
        sys.exit(7 if "GRPC_ENABLE_FORK_SUPPORT" in str(error) else 3)
    sys.exit(4)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""
    )
    run(script, server.address, {"GRPC_ENABLE_FORK_SUPPORT": "0"})


def run(script, address, environment):
    command = [sys.executable, "-W", "ignore", "-c", script, address]
    environment = os.environ | environment
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
