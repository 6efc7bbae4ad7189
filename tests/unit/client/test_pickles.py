"""Handles and errors that are pickled, and imports on systems other than Linux."""

import asyncio
import copy
import multiprocessing
import pickle
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest

import warpfit
from support.refusals import refused
from support.servers.loopback import serve
from warpfit import testing
from warpfit.transport.connection import TransportConfig

X = np.random.default_rng(2).normal(size=(40, 2))
Y = X[:, 0] + 1.0


def test_a_process_that_gets_client_and_handle_uses_the_resident_data():
    server = testing.InProcessServer()
    processes = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    with serve(server) as (address, _), warpfit.connect(address) as client, processes as pool:
        data = client.upload(X, Y, names=("a", "b"))
        calls = len(server.calls)
        loss = pool.submit(client.evaluate, data, ["a + 1", "b"], loss="mse").result()
        np.testing.assert_array_equal(loss, client.evaluate(data, ["a + 1", "b"], loss="mse"))
        asked = [call for call in server.calls[calls:] if call != "GetServerInfo"]
        assert asked == ["Evaluate", "Evaluate"]  # after a question on each new connection
        server.forget()
        with pytest.raises(warpfit.DatasetNotFoundError, match=r"client\.upload"):
            pool.submit(client.evaluate, data, ["a"]).result()
        client.evaluate(data, ["a"])  # here the numbers are
        assert pool.submit(client.evaluate, data, ["a"]).result().shape == (40, 1)
        fit = pool.submit(client.optimize, data, ["p1*a"], [[0.5]]).result()
        assert fit.r2 is None
        assert fit.parameters == client.optimize(data, ["p1*a"], [[0.5]]).parameters


def test_a_client_is_pickled_as_its_arguments(monkeypatch):
    monkeypatch.setenv("WARPFIT_ADDRESS", "127.0.0.1:1,127.0.0.1:2")
    transport = TransportConfig(chunk_bytes=1234)
    with warpfit.connect(token="secret", transport=transport, replicas=1) as client:
        monkeypatch.delenv("WARPFIT_ADDRESS")
        with pickle.loads(pickle.dumps(client)) as again:
            one, other = (each._failover.connection for each in (client, again))
            assert one == other
            assert other.arguments[0] == ["127.0.0.1:1", "127.0.0.1:2"]


def test_an_asyncio_client_and_its_handles_are_pickled_too():
    async def body(address):
        async with warpfit.connect_async(address) as client:
            data = await client.upload(X, Y)
            again = pickle.loads(pickle.dumps(data))
            async with again._client as other:
                return await other.evaluate(again, ["x1 + 1"], loss="mse")

    server = testing.InProcessServer()
    with serve(server) as (address, _):
        assert asyncio.run(body(address)) == pytest.approx([0.0], abs=1e-12)
    assert server.calls.count("UploadVariables") == 1


def test_a_client_without_a_server_says_that_it_cannot_be_pickled():
    with testing.client() as client:
        data = client.upload(X, Y)
        for thing in (client, data):
            refused("cannot be pickled", pickle.dumps, thing)
        assert copy.deepcopy(data) is data


# ------------------------------------------------------------------------------------ other systems


#: Imports other libraries first, which look for the system themselves; then takes away what Windows
#: or macOS lack, imports every module of the client, and makes calls.
SCRIPT = """
import importlib, multiprocessing, os, pkgutil, signal, socket, subprocess, sys, tempfile
import grpc, matplotlib, numpy, pyarrow, sklearn.utils.validation

lacking = "fork register_at_fork memfd_create pread pwrite getuid geteuid getgid killpg setsid"
lacking += " sched_getaffinity sched_setaffinity statvfs sysconf mkfifo posix_spawn uname chown"
lacking += " fchmod nice getloadavg"
for name in lacking.split():
    delattr(os, name)
for name in ("SIGKILL", "SIGHUP", "SIGPIPE", "SIGUSR1", "SIGCHLD", "pthread_sigmask"):
    delattr(signal, name)
del socket.AF_UNIX
for name in ("fcntl", "pwd", "grp", "resource", "termios", "syslog"):
    sys.modules[name] = None

import warpfit.testing

for module in pkgutil.walk_packages(warpfit.__path__, "warpfit."):
    if module.name == "warpfit.mcp_server":
        continue  # the MCP SDK looks at the name of the platform, which is still Linux
    importlib.import_module(module.name)
with warpfit.testing.client() as client:
    data = client.upload([[1.0], [2.0]], [2.0, 4.0])
    assert client.evaluate(data, ["2*x1"], loss="sse")[0] == 0.0
with warpfit.connect("127.0.0.1:1", wait=0) as client:
    try:
        client.info()
    except warpfit.UnavailableError as error:
        print(error.reason)
"""


@pytest.mark.thorough
def test_the_client_runs_without_what_only_linux_has():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.stdout == "CONNECTION_REFUSED\n", done.stderr
