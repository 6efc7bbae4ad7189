"""Several processes behave as one server, whichever of them dies or is stopped."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest

import warpfit
from support.load.load import OwnConnection
from support.servers import health
from support.servers.rpcs import OWN_CONNECTION, Caller, request, start
from support.servers.server import ServerProcess, eventually
from warpfit.cli.main import main
from warpfit.cli.top import scrape

PORTS = ("--health-port", "0", "--metrics-port", "0")
FRONT_ENDS = 3
CLIENTS = 8
PATIENT = warpfit.RetryPolicy(total_seconds=120)
X = np.random.default_rng(8).normal(size=(1000, 2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("family")


@pytest.fixture(scope="module")
def server(folder):
    """A server of three front ends, parts of which may be killed."""
    flags = ("--front-ends", "3", "--max-resident-bytes", "16MiB", "--threads", "2", *PORTS)
    flags += ("--address-file", str(folder / "servers"), "--log-format", "json")
    with ServerProcess(*flags, "--log-level", "debug", log=folder / "log") as process:
        yield process


@pytest.fixture
def clients(server):
    """So many clients that each process has some; the kernel deals them out by chance.

    They wait for the next engine as long as it takes to start, also on a busy machine.
    """
    with ExitStack() as stack:
        connected: list[warpfit.Client] = []
        while len(connected) < CLIENTS or not all(map(server.connections, server.front_ends())):
            assert len(connected) < 20 * CLIENTS
            client = warpfit.connect(server.address, retry=PATIENT, transport=OwnConnection())
            connected.append(stack.enter_context(client))
            client.info()
        yield connected


def assert_right(client: warpfit.Client, data: Any, factor: float) -> None:
    got = client.evaluate(data, ["p1*x1 + x2"], parameters=[[factor]])
    np.testing.assert_array_equal(got[:, 0], factor * X[:, 0] + X[:, 1])


def test_threads_that_compute_make_way_for_what_answers_calls(server, clients):
    data = clients[0].upload(np.ones((100_000, 2)))
    clients[0].evaluate(data, ["sin(x1)*x2"] * 8, reductions=["mean"])
    own = os.getpriority(os.PRIO_PROCESS, 0)
    threads = [one.id for one in server.engine().threads()]
    found = {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads}
    assert found == {own, min(own + 10, 19)}


@pytest.mark.thorough
def test_a_second_signal_cuts_calls_off(tmp_path):
    log = tmp_path / "log"
    server = ServerProcess("--grace", "600", "--threads", "1", log=log)
    client = warpfit.connect(server.address, retry=warpfit.RetryPolicy(total_seconds=0))
    with ThreadPoolExecutor(1) as pool, server, client:
        data = client.upload(np.ones((1_000_000, 2)))
        batch = ["sin(x1)*exp(x2)"] * 5000
        waiting = pool.submit(client.evaluate, data, batch, reductions=["mean"])
        eventually(lambda: server.in_flight().calls)
        server.process.terminate()
        eventually(lambda: "1 calls in flight may take 600 s" in log.read_text())
        server.process.terminate()
        assert server.process.wait(100) == 0
        with pytest.raises(warpfit.WarpfitError):
            waiting.result()
    assert "1 calls are cut off by a second signal" in log.read_text()


def test_a_start_that_fails_says_why_in_the_logs_own_form(server):
    command = [sys.executable, "-m", "warpfit_server", "--devices", "cpu", "--log-format", "json"]
    taken = server.address.rpartition(":")[2]
    for port, limit, reason in ((taken, "", "PORT_IN_USE"), ("0", "ulimit -f 8; ", "SYSTEM_LIMIT")):
        started = ["bash", "-c", f'{limit}exec "$@"', "bash", *command, "--port", port]
        done = subprocess.run(started, capture_output=True, text=True, timeout=200)
        assert done.returncode == 2, done.stderr
        told = json.loads(done.stderr.splitlines()[-1])
        assert (told["level"], told["reason"]) == ("error", reason)


# ------------------------------------------------------------------------------------ observation
def test_every_process_knows_that_the_engine_is_gone_and_the_next_one_serves_it(server, clients):
    data = clients[0].upload(X, dtype="float64")
    before = scrape(server.facts["metrics"])
    with health.watched(server.facts["health"]) as plain, health.watched(server.address) as own:
        assert [next(plain), next(own)] == ["SERVING"] * 2
        server.kill_engine()
        assert [next(plain), next(own)] == ["NOT_SERVING"] * 2
        assert health.check(server.facts["health"], "liveness") == "SERVING"
        for number, client in enumerate(clients):
            assert_right(client, data, float(number))
        assert [next(plain), next(own)] == ["SERVING"] * 2
    for _ in range(CLIENTS):
        health.wait_for(server.address, "SERVING")
    name, after = "warpfit_engine_restarts_total", scrape(server.facts["metrics"])
    assert after.total(name, cause="SIGKILL") == before.total(name, cause="SIGKILL") + 1


def test_calls_of_every_process_are_counted_once(server, clients):
    data = clients[0].upload(X, dtype="float64")
    health.wait_for(server.address, "SERVING")

    def settled():
        time.sleep(0.8)  # until the further processes have sent theirs
        return scrape(server.facts["metrics"])

    before = settled()
    for client in clients:
        client.evaluate(data, ["x1 + x2", "p1"], [[], [1.0]], rows=slice(0, 50))
        with pytest.raises(warpfit.ProgramError) as caught:
            client.evaluate(data, ["x1 + x9"])
        assert (caught.value.reason, caught.value.expression) == ("VARIABLE_OUT_OF_RANGE", 0)
    after = settled()

    def grown(name, **labels):
        more = after.total(f"warpfit_{name}", **labels) - before.total(f"warpfit_{name}", **labels)
        return more / len(clients)

    evaluate, own = {"method": "Evaluate", "tenant": "default"}, {"tenant": "default"}
    for status in ("OK", "INVALID_ARGUMENT"):
        assert grown("requests_total", **evaluate, status=status) == 1
    counts = [grown(f"{name}_total", **own) for name in ("programs", "tokens", "token_rows")]
    assert [grown("evaluations_total"), *counts] == [1, 2, 4, 4 * 50]
    for stage in ("decode", "queue", "copy", "kernel", "encode"):
        assert grown("stage_seconds_count", stage=stage) == 1
    assert grown("request_seconds_count", method="Evaluate") == 2
    assert after.total("warpfit_requests_in_flight") == 0
    named = {pairs["process"] for pairs, _ in after.matching("warpfit_process_open_files")}
    front_ends = {f"front end {number}" for number in range(1, FRONT_ENDS + 1)}
    assert named == {"main", "engine cpu:0", *front_ends}


def test_request_ids_go_in_come_out_and_stand_in_the_log(clients, caller, folder):
    data, log = clients[0].upload(X), folder / "log"
    metadata = [("x-request-id", "run-7/call.3")]
    answer = start(caller.channel, request(data, ["x1"]), metadata=metadata)
    list(answer)
    assert dict(answer.trailing_metadata())["x-request-id"] == "run-7/call.3"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    (line,) = [line for line in lines if line.get("request_id") == "run-7/call.3"]
    assert (line["method"], line["status"], line["tenant"]) == ("Evaluate", "OK", "default")
    assert line["seconds"] > 0
    with pytest.raises(warpfit.ProgramError) as caught:
        clients[0].evaluate(data, ["x1 + x9"])
    assert f'"request_id": "{caught.value.request_id}"' in log.read_text()
    assert caught.value.__notes__ == [f"request {caught.value.request_id}"]


def test_the_health_command(server, capsys):
    for address in (server.address, server.facts["health"]):
        assert main(["health", address, "--service", "warpfit.v1.Evaluator"]) == 0
        with pytest.raises(SystemExit, match="1"):
            main(["health", address, "--service", "else"])
        said = capsys.readouterr().out
        assert said == "warpfit.v1.Evaluator: SERVING\nelse: NOT_FOUND\n"


# --------------------------------------------------------------------- releases, and sudden ends
def test_every_process_sees_a_release_and_its_memory_comes_back(server, clients):
    wide = np.ones((200_000, 5))
    before = server.shared_memory()
    data = clients[0].upload(wide, dtype="float64")
    for client in clients:
        client.evaluate(data, ["x1"], rows=slice(0, 10))  # every process has a lease now
    # Connections may hold a little memory each for the next batch.
    much = before + wide.nbytes // 2
    assert server.shared_memory() > much
    clients[0].release(data, everywhere=True)
    eventually(lambda: server.shared_memory() <= much)
    message = request(data, ["x1"])
    for _ in range(CLIENTS):
        with grpc.insecure_channel(server.address, OWN_CONNECTION) as channel:
            assert Caller(channel).refused("Evaluate", message)[0] == "NOT_FOUND"
    assert clients[1].evaluate(data, ["x1"]).shape == (200_000, 1), "it is uploaded again"


def test_the_least_recently_used_data_set_goes_and_comes_back_unseen(client, caller):
    """The 16 MiB have room for one of three at a time."""
    sets = [np.random.default_rng(n).normal(size=(500_000, 3)) for n in range(3)]
    handles = [client.upload(each, dtype="float64") for each in sets]
    assert caller.call("GetVariables", handles[2].dataset)
    assert caller.refused("GetVariables", handles[0].dataset)[0] == "NOT_FOUND"
    for data, content in zip(handles, sets, strict=True):
        got = client.evaluate(data, ["x1 + x2"], rows=slice(0, 5))
        np.testing.assert_array_equal(got[:, 0], content[:5, :2].sum(axis=1))
        client.release(data, everywhere=True)
    with pytest.raises(warpfit.ResourceExhaustedError, match="more bytes"):
        client.upload(np.ones((500_000, 6)), dtype="float64")


def test_a_front_end_that_dies_is_replaced(server, clients):
    data = clients[0].upload(X, dtype="float64")
    old = {process.pid for process in server.front_ends()}
    os.kill(min(old), signal.SIGKILL)
    for number, client in enumerate(clients):
        assert_right(client, data, float(number))
    eventually(lambda: {process.pid for process in server.front_ends()} - old)


def test_sigterm_lets_calls_finish_whichever_thread_gets_it(server, folder):
    """The last test of this server."""
    wide = np.random.default_rng(4).normal(size=(40_000, 4))
    long = "sin(" * 20 + "x1" + " + x2)" * 20
    with warpfit.connect(f"file://{folder}/servers") as client, ThreadPoolExecutor(1) as pool:
        data = client.upload(wide)
        family, pid = server.family().values(), server.process.pid
        answer = pool.submit(client.evaluate, data, [long] * 60)
        eventually(lambda: server.in_flight().engine_ns)
        assert not answer.done(), "it is at work"
        threads = {int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()}
        assert ctypes.CDLL(None).tgkill(pid, max(threads - {pid}), signal.SIGTERM) == 0
        assert server.process.wait(timeout=30) == 0
        assert answer.result(30).shape == (40_000, 60)
        _, alive = psutil.wait_procs(family, 5)
        assert not alive
    assert not list(folder.glob("servers*")), "the file with its address is gone, too"
