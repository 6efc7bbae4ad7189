"""The package for its users: pickles, other systems, the server for their tests, and types."""

import asyncio
import copy
import inspect
import itertools
import multiprocessing
import pickle
import pydoc
import re
import subprocess
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from rlcompleter import Completer

import numpy as np
import pytest

import warpfit
from support.refusals import refused
from support.servers.loopback import serve
from warpfit import codec, testing
from warpfit.dataset import Dataset
from warpfit.transport.call import Request
from warpfit.transport.connection import TransportConfig

X = np.random.default_rng(2).normal(size=(40, 2))
Y = X[:, 0] + 1.0


def test_a_process_that_gets_client_and_handle_uses_the_resident_data():
    server = testing.InProcessServer()
    processes = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    with serve(server) as (address, _), warpfit.connect(address) as client, processes as pool:
        data, calls = client.upload(X, Y, names=("a", "b")), len(server.calls)
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


def test_a_client_is_pickled_as_its_arguments_if_it_has_a_server(monkeypatch):
    monkeypatch.setenv("WARPFIT_ADDRESS", "127.0.0.1:1,127.0.0.1:2")
    transport = TransportConfig(chunk_bytes=1234)
    with warpfit.connect(token="secret", transport=transport, replicas=1) as client:
        monkeypatch.delenv("WARPFIT_ADDRESS")
        with pickle.loads(pickle.dumps(client)) as again:
            one, other = (each._failover.connection for each in (client, again))
            assert one == other and other.arguments[0] == ["127.0.0.1:1", "127.0.0.1:2"]
    with testing.client() as client:
        data = client.upload(X, Y)
        for thing in (client, data):
            refused("cannot be pickled", pickle.dumps, thing)
        assert copy.deepcopy(data) is data


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


ROWS = np.random.default_rng(8).uniform(0.1, 3, size=(20, 3))


def test_the_upload_is_checked():
    for change, reason in (
        *((lambda sent, _: sent[1:], "BAD_HEADER"), (lambda sent, _: sent[:-1], "BAD_DIGEST")),
        (lambda sent, _: [*sent, sent[-1]], "BAD_DIGEST"),
        (lambda sent, other: [sent[0], *other[1:]], "BAD_DIGEST"),
        (lambda sent, _: [*sent[:2], sent[0], *sent[2:]], "BAD_HEADER"),
    ):
        sent, other = (list(codec.upload_messages(Dataset.of(x), 100)) for x in (ROWS, ROWS + 1))
        request = Request("UploadVariables", iter(change(sent, other)))
        refused(reason, testing.InProcessServer().answer, request)


def test_the_server_package_is_not_needed():
    code = "import sys; sys.modules['warpfit_server'] = None; import warpfit.testing as testing; "
    code += "client = testing.client(); client.evaluate(client.upload([[1.0]]), 'x1 + 1')"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_warning_of_numpy_reaches_callers():
    columns = [[0.0, 1.0, 0.0], [np.inf, 1.0, -np.inf], [1e300, 2e300, 3e300], [0.0, 0.0, 0.0]]
    outputs = dict.fromkeys(("values", "reductions", "correlation", "linear_scaling"), True)
    with testing.client() as client, warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", warpfit.PrecisionWarning)
        for x, y in itertools.product(columns, columns):
            data = client.upload(np.array(x)[:, None], y)
            answer = client.run(data, ["1/x1", "log(x1)", "exp(1000*x1)"], loss="mse", **outputs)
            assert repr(answer) and repr(answer.reductions)
            fit = client.optimize(data, "p1*x1", covariance=True, max_iterations=2)
            assert repr(fit) and len(fit.band([[1.0]]).low) == 1


CLIENT = Path(__file__).resolve().parents[3] / "client"
#: Expressions of a caller, and what a checker is to know of them.
REVEALED = {
    "client.evaluate(data, texts)": "ndarray[…, dtype[floating[…]]]",
    "client.evaluate(data, texts, rows=(0, 2), tier='compiled')": "ndarray[…, dtype[floating[…]]]",
    "client.evaluate(data, texts, loss='mse')": "ndarray[…, dtype[float64]]",
    "client.evaluate(data, texts, loss='mse', gradient=True)[1][0]": "ndarray[…, dtype[float64]]",
    "client.evaluate(data, texts, loss='mse', linear_scaling=True)[2]": "dtype[float64]]",
    "client.evaluate(data, texts, jacobian=flag)": "ndarray[…, dtype[floating[…]]] | list[",
    "client.optimize(data, texts)": "warpfit.calls.results.Fit",
    "client.propose(data, texts).best": "warpfit.calls.proposals.Proposal | None",
    "client.search(data, seconds=1.0).best": "warpfit.ir.Program",
    "warpfit.connect_async().evaluate(data, texts, loss='mse')": "Coroutine[…, …, ndarray[…",
}
#: What a checker is to refuse.
REFUSED = {
    "client.evaluate(data, texts, losss='mse')": "call-overload",
    "client.evaluate(data, texts, tier='fast')": "call-overload",
    "client.optimize(data, texts, method='newton')": "arg-type",
    **{"client.optimize(data, texts).popt": "attr-defined", "data.shape": "attr-defined"},
    "SymbolicRegressor(model_selection='bestest')": "arg-type",
    "ParameterOptimizer(method='newton')": "arg-type",
}


CALLER = """\
import numpy as np
import warpfit
from warpfit.sklearn import ParameterOptimizer, SymbolicRegressor
client = warpfit.connect("127.0.0.1:50551")
data = client.upload(np.ones((3, 1)), np.ones(3))
texts = ["x1", "p1*x1"]
def some(flag: bool) -> None:
"""


@pytest.mark.thorough
def test_a_checker_knows_what_calls_return(tmp_path):
    pytest.importorskip("mypy")
    lines = [f"reveal_type({one})" for one in REVEALED] + list(REFUSED)
    text = CALLER + "".join(f"    {line}\n" for line in lines)
    (tmp_path / "caller.py").write_text(text)
    (tmp_path / "mypy.ini").write_text(f"[mypy]\nmypy_path = {CLIENT}\nfollow_imports = silent\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--no-pretty", "caller.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    first = CALLER.count("\n") + 1
    found: dict[int, list[str]] = {}
    for number, told in re.findall(r"^caller\.py:(\d+): (.*)$", done.stdout, re.MULTILINE):
        found.setdefault(int(number) - first, []).append(told)
    assert found, done.stdout + done.stderr
    for place, (one, wanted) in enumerate(REVEALED.items()):
        told = " ".join(found.pop(place))
        shown = told.replace("numpy.", "").replace("typing.", "")
        # Shapes, precisions of NumPy's, and what is sent into a coroutine, are unknown.
        shown = shown.replace("tuple[Any, ...]", "…").replace("floating[Any]", "floating[…]")
        shown = shown.replace("Coroutine[Any, Any,", "Coroutine[…, …,")
        assert wanted in shown, (one, told)
        assert not re.search(r"\bAny\b", shown), (one, told)
    for place, (one, code) in enumerate(REFUSED.items(), len(REVEALED)):
        assert any(f"[{code}]" in told for told in found.pop(place, ())), one
    assert not found


def test_a_shell_shows_public_names_and_keywords_alone():
    """Also what is imported at first use."""
    shell = Completer({"warpfit": warpfit})
    assert shell.complete("warpfit.conn", 0).startswith("warpfit.connect(")
    assert shell.complete("warpfit.SearchN", 0) is None
    shown = dir(warpfit)
    assert {"connect", "local", "Client", "testing", "__version__"} <= {*shown}
    assert not {"Any", "Final", "TYPE_CHECKING", "import_module"} & {*shown}
    assert all(getattr(warpfit, name) is not None for name in shown)
    for kind in (warpfit.Client, warpfit.AsyncClient):
        for name in ("upload", "open", "evaluate", "run", "optimize", "simplify", "propose"):
            assert "options" not in inspect.signature(getattr(kind, name)).parameters, name
            head = pydoc.render_doc(getattr(kind, name), renderer=pydoc.plaintext)
            assert len(head.splitlines()[2]) < 1600, name
            assert "_SupportsArray" not in head and "ForwardRef" not in head
