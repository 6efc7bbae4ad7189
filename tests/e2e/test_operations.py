"""Health checks, metrics, request ids and the live view of a running server."""

import json
import threading
import time

import grpc
import numpy as np
import pytest

import warpfit
from support.load.load import OwnConnection
from support.servers import health
from support.servers.server import ServerProcess
from warpfit import codec
from warpfit.calls.arguments import build_evaluation
from warpfit.cli.main import main
from warpfit.cli.prometheus_reader import scrape

X = np.random.default_rng(5).normal(size=(100, 3))
FRONT_ENDS = 2
CLIENTS = 8


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return tmp_path_factory.mktemp("operations") / "log"


@pytest.fixture(scope="module")
def server(log):
    ports = ("--health-port", "0", "--metrics-port", "0", "--front-ends", str(FRONT_ENDS))
    flags = ("--log-format", "json", "--log-level", "debug", "--max-resident-bytes", "64KiB")
    with ServerProcess(*ports, *flags, log=log) as process:
        yield process


@pytest.fixture
def clients(server):
    """Enough clients that each process has some."""
    connected = [warpfit.connect(server.address, transport=OwnConnection()) for _ in range(CLIENTS)]
    yield connected
    for client in connected:
        client.close()


@pytest.mark.parametrize("service", ["liveness", "readiness", "", "warpfit.v1.Evaluator"])
def test_health_on_both_ports(server, service):
    for _ in range(CLIENTS):
        assert health.check(server.address, service) == "SERVING"
    assert health.check(server.facts["health"], service) == "SERVING"


def test_unknown_services_have_no_health(server):
    assert health.check(server.address, "else") == "UNREACHABLE"


def test_every_process_knows_that_the_engine_is_gone(server):
    server.kill_engine()
    for address in (server.facts["health"], server.address):
        health.wait_for(address, "NOT_SERVING", timeout=2)
    assert health.check(server.facts["health"], "liveness") == "SERVING"
    for _ in range(CLIENTS):
        health.wait_for(server.address, "SERVING")
    page = scrape(server.facts["metrics"])
    assert page.total("warpfit_engine_restarts_total", cause="SIGKILL") == 1


def test_calls_of_every_process_are_counted_once(server, clients):
    data = clients[0].upload(X, dtype="float64")
    health.wait_for(server.address, "SERVING")
    before = settled(server)
    for client in clients:
        client.evaluate(data, ["x1 + x2", "p1"], [[], [1.0]], rows=slice(0, 50))
        with pytest.raises(warpfit.ProgramError):
            client.evaluate(data, ["x1 + x9"])
    after = settled(server)

    def grown(name, **labels):
        return after.total(name, **labels) - before.total(name, **labels)

    evaluate = {"method": "Evaluate", "tenant": "default"}
    assert grown("warpfit_requests_total", **evaluate, status="OK") == CLIENTS
    assert grown("warpfit_requests_total", **evaluate, status="INVALID_ARGUMENT") == CLIENTS
    assert grown("warpfit_programs_total", tenant="default") == 2 * CLIENTS
    assert grown("warpfit_tokens_total", tenant="default") == 4 * CLIENTS
    assert grown("warpfit_token_rows_total", tenant="default") == 4 * 50 * CLIENTS
    assert grown("warpfit_evaluations_total") == CLIENTS
    for stage in ("decode", "queue", "copy", "kernel", "encode"):
        assert grown("warpfit_stage_seconds_count", stage=stage) == CLIENTS
    assert grown("warpfit_request_seconds_count", method="Evaluate") == 2 * CLIENTS
    assert after.total("warpfit_requests_in_flight") == 0
    assert {pairs["process"] for pairs, _ in after.matching("warpfit_process_open_files")} == {
        "main",
        "front end 1",
        "engine cpu:0",
    }


def settled(server):
    """The metrics, once the further processes have sent theirs."""
    time.sleep(0.8)
    return scrape(server.facts["metrics"])


def test_data_sets_are_counted(server, clients):
    before = scrape(server.facts["metrics"])
    sizes = [clients[0].upload(X + shift, dtype="float64") for shift in range(1, 31)]
    after = scrape(server.facts["metrics"])
    assert after.total("warpfit_evictions_total") > before.total("warpfit_evictions_total")
    assert after.total("warpfit_resident_limit_bytes") == 64 << 10
    assert 0 < after.total("warpfit_resident_bytes") <= 64 << 10
    received = "warpfit_received_bytes_total"
    assert after.total(received) - before.total(received) == len(sizes) * X.nbytes


def test_request_ids_go_in_come_out_and_stand_in_the_log(server, clients, log):
    data = clients[0].upload(X)
    evaluation, _ = build_evaluation(data, ["x1"], None, True, {})
    request = codec.evaluation_to_message(evaluation).SerializeToString()
    with grpc.insecure_channel(server.address) as channel:
        method = channel.unary_stream("/warpfit.v1.Evaluator/Evaluate")
        for given in ("run-7/call.3", "", "no good!"):
            metadata = [("x-request-id", given)] if given else []
            answer = method(request, metadata=metadata, timeout=20)
            list(answer)
            trailing = dict(answer.trailing_metadata())
            used = trailing["x-request-id"]
            assert (used == given) is (given == "run-7/call.3")
            assert used
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    (line,) = [line for line in lines if line.get("request_id") == "run-7/call.3"]
    assert line["method"] == "Evaluate"
    assert line["status"] == "OK"
    assert line["tenant"] == "default"
    assert line["seconds"] > 0


def test_errors_carry_the_request_id(clients, log):
    data = clients[0].upload(X)
    for client in clients:
        with pytest.raises(warpfit.ProgramError) as caught:
            client.evaluate(data, ["x1 + x9"])
        assert f'"request_id": "{caught.value.request_id}"' in log.read_text()
        assert caught.value.__notes__ == [f"request {caught.value.request_id}"]


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


def test_the_health_command_without_a_server(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["health", "127.0.0.1:1", "--timeout", "1"])
    assert caught.value.code == 1
    assert "UNAVAILABLE" in capsys.readouterr().out


def test_top_prints_what_happens(server, clients, capsys):
    data = clients[0].upload(X)

    def work():
        for _ in range(20):
            clients[0].evaluate(data, ["x1"])
            time.sleep(0.02)

    thread = threading.Thread(target=work)
    thread.start()
    assert main(["top", server.facts["metrics"], "--once", "--interval", "1"]) == 0
    thread.join()
    printed = capsys.readouterr().out
    for word in (
        "cpu",
        "ready",
        "calls/s",
        "Evaluate",
        "kernel",
        "default",
        "engine",
        "front end 1",
        "cpu:0",
        "work left",
    ):
        assert word in printed


def test_top_without_a_server(capsys):
    assert main(["top", "127.0.0.1:1", "--once"]) == 2
    assert "--metrics-port" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--health-port", "--metrics-port"])
def test_a_port_in_use_is_refused(server, flag, tmp_path):
    taken = server.facts[flag.strip("-").partition("-")[0]].rpartition(":")[2]
    log = tmp_path / "log"
    with pytest.raises(RuntimeError, match="did not start"):
        ServerProcess(flag, taken, log=log)
    assert f"127.0.0.1:{taken}" in log.read_text()
