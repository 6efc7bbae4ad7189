"""Several processes behave as one server, whichever of them dies or is stopped."""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import warpfit
from support.load.load import OwnConnection
from support.servers import health
from support.servers.rpcs import OWN_CONNECTION, SERVICE, request
from support.servers.server import ServerProcess, eventually, runs
from warpfit.cli.main import main
from warpfit.cli.top import scrape

FRONT_ENDS = 3
CLIENTS = 8
X = np.random.default_rng(8).normal(size=(1000, 2))


@pytest.fixture
def server(family):
    return family


@pytest.fixture
def clients(server):
    """So many clients that each process has some; the kernel deals them out by chance."""
    with ExitStack() as stack:
        connected: list[warpfit.Client] = []
        while len(connected) < CLIENTS or len(processes_with_connections(server)) < FRONT_ENDS:
            assert len(connected) < 20 * CLIENTS
            client = warpfit.connect(server.address, transport=OwnConnection())
            connected.append(stack.enter_context(client))
            client.info()
        yield connected


def processes_with_connections(server: ServerProcess) -> set[int]:
    port = int(server.address.rpartition(":")[2])
    return {
        process.pid
        for process in server.front_ends()
        for connection in process.net_connections("tcp")
        if connection.laddr.port == port and connection.status == psutil.CONN_ESTABLISHED
    }


def assert_right(client: warpfit.Client, data: Any, factor: float) -> None:
    got = client.evaluate(data, ["p1*x1 + x2"], parameters=[[factor]])
    np.testing.assert_array_equal(got[:, 0], factor * X[:, 0] + X[:, 1])


def test_threads_that_compute_make_way_for_what_answers_calls(server, clients):
    data = clients[0].upload(np.ones((100_000, 2)))
    clients[0].evaluate(data, ["sin(x1)*x2"] * 8, reductions=["mean"])
    own = os.getpriority(os.PRIO_PROCESS, 0)
    threads = [one.id for one in server.engine().threads()]
    assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} == {own, own + 10}


@pytest.mark.thorough
def test_a_second_signal_cuts_calls_off(tmp_path):
    log = tmp_path / "log"
    impatient = warpfit.RetryPolicy(total_seconds=0)
    with (
        ThreadPoolExecutor(1) as pool,
        ServerProcess("--grace", "600", "--threads", "1", log=log) as server,
        warpfit.connect(server.address, retry=impatient) as client,
    ):
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


def test_a_start_that_fails_says_why_in_the_logs_own_form():
    command = [sys.executable, "-m", "warpfit_server", "--devices", "cpu", "--log-format", "json"]
    for flags, limit, reason in (
        (["--host", "no-such-host.invalid"], "", "NO_SUCH_HOST"),
        ([], "ulimit -f 8; ", "SYSTEM_LIMIT"),
    ):
        script = f'{limit}exec "$@"'
        started = ["bash", "-c", script, "bash", *command, "--port", "0", *flags]
        done = subprocess.run(started, capture_output=True, text=True, timeout=200)
        assert done.returncode == 2, done.stderr
        told = [json.loads(line) for line in done.stderr.splitlines()]
        assert told[-1]["level"] == "error"
        assert told[-1]["reason"] == reason


# ------------------------------------------------------------------------------------ observation


@pytest.mark.parametrize("service", ["liveness", "readiness", "", "warpfit.v1.Evaluator"])
def test_health_on_both_ports(server, service):
    for _ in range(CLIENTS):
        assert health.check(server.address, service) == "SERVING"
    assert health.check(server.facts["health"], service) == "SERVING"


def test_every_process_knows_that_the_engine_is_gone_and_the_next_one_serves_it(server, clients):
    data = clients[0].upload(X, dtype="float64")
    before = scrape(server.facts["metrics"])
    server.kill_engine()
    for address in (server.facts["health"], server.address):
        health.wait_for(address, "NOT_SERVING", timeout=2)
    assert health.check(server.facts["health"], "liveness") == "SERVING"
    for number, client in enumerate(clients):
        assert_right(client, data, float(number))
    for _ in range(CLIENTS):
        health.wait_for(server.address, "SERVING")
    name, after = "warpfit_engine_restarts_total", scrape(server.facts["metrics"])
    assert after.total(name, cause="SIGKILL") == before.total(name, cause="SIGKILL") + 1


def test_calls_of_every_process_are_counted_once(server, clients):
    data = clients[0].upload(X, dtype="float64")
    health.wait_for(server.address, "SERVING")
    before = settled(server)
    for client in clients:
        client.evaluate(data, ["x1 + x2", "p1"], [[], [1.0]], rows=slice(0, 50))
        with pytest.raises(warpfit.ProgramError) as caught:
            client.evaluate(data, ["x1 + x9"])
        assert (caught.value.reason, caught.value.expression) == ("VARIABLE_OUT_OF_RANGE", 0)
    after = settled(server)

    def grown(name, **labels):
        return after.total(name, **labels) - before.total(name, **labels)

    evaluate, calls = {"method": "Evaluate", "tenant": "default"}, len(clients)
    assert grown("warpfit_requests_total", **evaluate, status="OK") == calls
    assert grown("warpfit_requests_total", **evaluate, status="INVALID_ARGUMENT") == calls
    assert grown("warpfit_programs_total", tenant="default") == 2 * calls
    assert grown("warpfit_tokens_total", tenant="default") == 4 * calls
    assert grown("warpfit_token_rows_total", tenant="default") == 4 * 50 * calls
    assert grown("warpfit_evaluations_total") == calls
    for stage in ("decode", "queue", "copy", "kernel", "encode"):
        assert grown("warpfit_stage_seconds_count", stage=stage) == calls
    assert grown("warpfit_request_seconds_count", method="Evaluate") == 2 * calls
    assert after.total("warpfit_requests_in_flight") == 0
    named = {pairs["process"] for pairs, _ in after.matching("warpfit_process_open_files")}
    front_ends = {f"front end {number}" for number in range(1, FRONT_ENDS + 1)}
    assert named == {"main", "engine cpu:0", *front_ends}


def settled(server):
    """The metrics, once the further processes have sent theirs."""
    time.sleep(0.8)
    return scrape(server.facts["metrics"])


def test_request_ids_go_in_come_out_and_stand_in_the_log(server, clients, log):
    data = clients[0].upload(X)
    with grpc.insecure_channel(server.address) as channel:
        method = channel.unary_stream(f"{SERVICE}Evaluate")
        metadata = [("x-request-id", "run-7/call.3")]
        answer = method(request(data, ["x1"]), metadata=metadata, timeout=20)
        list(answer)
        assert dict(answer.trailing_metadata())["x-request-id"] == "run-7/call.3"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    (line,) = [line for line in lines if line.get("request_id") == "run-7/call.3"]
    assert (line["method"], line["status"], line["tenant"]) == ("Evaluate", "OK", "default")
    assert line["seconds"] > 0
    for client in clients:
        with pytest.raises(warpfit.ProgramError) as caught:
            client.evaluate(data, ["x1 + x9"])
        assert f'"request_id": "{caught.value.request_id}"' in log.read_text()
        assert caught.value.__notes__ == [f"request {caught.value.request_id}"]
    for _ in range(CLIENTS):
        with grpc.insecure_channel(server.address, OwnConnection().channel_options()) as channel:
            _, call = channel.unary_unary(f"{SERVICE}GetServerInfo").with_call(b"", timeout=20)
        name = dict(call.trailing_metadata())["x-request-id"]
        eventually(lambda name=name: f'"request_id": "{name}"' in log.read_text())


@pytest.mark.parametrize(
    ("service", "status", "code"),
    [("readiness", "SERVING", 0), ("liveness", "SERVING", 0), ("else", "NOT_FOUND", 1)],
)
def test_the_health_command(server, capsys, service, status, code):
    for address in (server.address, server.facts["health"]):
        try:
            got = main(["health", address, "--service", service])
        except SystemExit as end:
            got = end.code
        assert got == code
        assert capsys.readouterr().out == f"{service}: {status}\n"


def test_commands_without_a_server(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["health", "127.0.0.1:1", "--timeout", "1"])
    assert caught.value.code == 1
    assert "UNAVAILABLE" in capsys.readouterr().out
    assert main(["top", "127.0.0.1:1", "--once"]) == 2
    assert "--metrics-port" in capsys.readouterr().err


def test_top_prints_what_happens(server, clients, capsys):
    data = clients[0].upload(X)

    def work():
        for _ in range(20):
            clients[0].evaluate(data, ["x1"])
            time.sleep(0.02)

    thread = threading.Thread(target=work)
    thread.start()
    assert main(["top", server.facts["metrics"], "--once", "--interval", "0.6"]) == 0
    thread.join()
    printed = capsys.readouterr().out
    words = ["cpu", "ready", "calls/s", "Evaluate", "kernel", "default", "engine", "front end 1"]
    assert not [word for word in (*words, "cpu:0", "work left") if word not in printed]


@pytest.mark.parametrize(
    "kind",
    ["address", *(pytest.param(one, marks=pytest.mark.thorough) for one in ("health", "metrics"))],
)
def test_a_port_in_use_is_refused(server, kind, tmp_path):
    address = server.address if kind == "address" else server.facts[kind]
    flag = "--port" if kind == "address" else f"--{kind}-port"
    log, taken = tmp_path / "log", address.rpartition(":")[2]
    with pytest.raises(RuntimeError, match="did not start"):
        ServerProcess("--front-ends", "2", flag, taken, log=log)
    assert f"127.0.0.1:{taken}" in log.read_text()


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
        options = OwnConnection().channel_options()
        with (
            grpc.insecure_channel(server.address, options) as channel,
            pytest.raises(grpc.RpcError) as caught,
        ):
            list(channel.unary_stream(SERVICE + "Evaluate")(message, timeout=10))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert clients[1].evaluate(data, ["x1"]).shape == (200_000, 1), "it is uploaded again"


def test_the_main_process_answers_no_calls(server):
    listening = psutil.Process(server.process.pid).net_connections("tcp")
    ports = {c.laddr.port for c in listening if c.status == psutil.CONN_LISTEN}
    assert ports == {int(server.facts["metrics"].rpartition(":")[2])}


def test_a_front_end_that_dies_is_replaced(server, clients):
    data = clients[0].upload(X, dtype="float64")
    old = {process.pid for process in server.front_ends()}
    os.kill(min(old), signal.SIGKILL)
    for number, client in enumerate(clients):
        assert_right(client, data, float(number))
    eventually(lambda: {process.pid for process in server.front_ends()} - old)


def test_sigterm_lets_calls_finish_whichever_thread_gets_it(tmp_path):
    wide = np.random.default_rng(4).normal(size=(100_000, 4))
    long = "x1"
    for _ in range(20):
        long = f"sin({long} + x2)"
    flags = ("--front-ends", "2", "--address-file", str(tmp_path / "servers"))
    with (
        ServerProcess("--threads", "1", *flags) as server,
        warpfit.connect(f"file://{tmp_path}/servers") as client,
    ):
        data = client.upload(wide)
        answers = []
        thread = threading.Thread(target=lambda: answers.append(client.evaluate(data, [long] * 60)))
        family = server.family().values()
        thread.start()
        eventually(lambda: server.in_flight().engine_ns)
        assert not answers, "it is at work"
        pid = server.process.pid
        threads = {int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()}
        assert ctypes.CDLL(None).tgkill(pid, max(threads - {pid}), signal.SIGTERM) == 0
        assert server.process.wait(timeout=30) == 0
        thread.join()
        assert answers[0].shape == (100_000, 60)
        _, alive = psutil.wait_procs(family, 5)
        assert not alive
    assert not list(tmp_path.iterdir()), "the file with its address is gone, too"


@pytest.mark.thorough
def test_sigterm_waits_for_calls_and_not_for_those_that_watch_its_health():
    """A front end may have to ask the main process for a data set, while it ends itself."""
    with (
        ServerProcess("--front-ends", "2", "--grace", "30") as server,
        warpfit.connect(server.address) as client,
        ExitStack() as stack,
    ):
        message, has_stopped = request(client.upload(X), ["x1"]), threading.Event()
        longest = client.info().limits.message_bytes  # counted until a message is there
        heard = []

        def messages():
            has_stopped.wait()
            yield message

        calls = []
        while len(calls) < CLIENTS or len(processes_with_connections(server)) < 2:
            channel = stack.enter_context(grpc.insecure_channel(server.address, OWN_CONNECTION))
            calls.append(channel.stream_stream(SERVICE + "Evaluate")(messages(), timeout=60))
            eventually(lambda: server.in_flight().nbytes == len(calls) * longest)
            stub = health_pb2_grpc.HealthStub(channel)
            heard.append(stub.Watch(health_pb2.HealthCheckRequest(), timeout=60))
            assert next(heard[-1]).status == health_pb2.HealthCheckResponse.SERVING
        server.process.terminate()
        for watched in heard:
            assert next(watched).status == health_pb2.HealthCheckResponse.NOT_SERVING
        eventually(lambda: not is_listening(server.address))
        has_stopped.set()
        assert [] not in [list(call) for call in calls]
        assert server.process.wait(timeout=25) == 0  # before its grace has passed


@pytest.mark.thorough
def test_front_ends_are_not_ready_while_the_main_process_is_silent_and_end_with_it():
    """Also one that has just started."""
    flags = ("--front-ends", "2", "--hang-seconds", "7.5", "--grace", "30")
    with ServerProcess(*flags) as server, grpc.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watched = stub.Watch(health_pb2.HealthCheckRequest(), timeout=60)
        assert next(watched).status == health_pb2.HealthCheckResponse.SERVING
        server.process.send_signal(signal.SIGSTOP)
        try:
            assert next(watched).status == health_pb2.HealthCheckResponse.NOT_SERVING
        finally:
            server.process.send_signal(signal.SIGCONT)
        assert next(watched).status == health_pb2.HealthCheckResponse.SERVING
        watched.cancel()
        old = server.front_ends()[0]
        old.kill()
        known = {process.pid for process in server.front_ends()} | {old.pid}
        eventually(lambda: {new.pid for new in server.front_ends()} - known)
        server.process.terminate()
        assert server.process.wait(timeout=15) == 0


def is_listening(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port))).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.thorough
def test_sigterm_in_a_first_start_ends_all_that_compile(tmp_path):
    """Which would take a minute, and be of no use to anybody."""
    command = [sys.executable, "-m", "warpfit_server", "--port", "0", "--devices", "cpu:2"]
    cache, compiler = ("--cache-dir", str(tmp_path / "cache")), "warpfit_server.engine.cpu"
    with subprocess.Popen([*command, *cache], stdout=subprocess.PIPE, text=True) as server:
        started = psutil.Process(server.pid)

        def is_compiling():
            words = [" ".join(child.cmdline()) for child in started.children(recursive=True)]
            return any(compiler in word for word in words)

        eventually(is_compiling)
        family = started.children(recursive=True)
        server.terminate()
        assert server.wait(timeout=8) == 0
        assert not server.stdout.read(), "it has not said that it listens"
    eventually(lambda: not any(runs(process, "-m") for process in family))
