"""Clients and servers that die, tenants, and where there are no windows."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from contextlib import ExitStack

import grpc
import numpy as np
import pytest

import warpfit
from support.rpcs import OWN_CONNECTION, Caller, bearer, evaluate_request
from support.server import ServerProcess
from support.shared_memory import (
    CLIENTS,
    EverythingInWindows,
    X,
    eventually,
    into,
    refused,
    served_windows,
)
from support.windows import RawWindow, client_windows, memory_file
from warpfit import codec
from warpfit.arguments import build_evaluation
from warpfit.dataset import Dataset
from warpfit.security import new_token


def _die_in_mid_call(address: str, method: str) -> None:
    """Process: be killed while a call with a window runs."""
    with warpfit.connect(address, transport=EverythingInWindows(), shared_memory=True) as client:
        rng = np.random.default_rng(os.getpid())
        data = client.upload(rng.normal(size=(200_000, 2)), dtype="float64")
        assert client_windows()
        if method == "upload":

            def progress(done: int, total: int) -> None:
                if done > 0:
                    os.kill(os.getpid(), signal.SIGKILL)

            client.upload(rng.normal(size=(1_000_000, 2)), dtype="float64", progress=progress)
        long = "+".join(f"sin(x1*{k})" for k in range(1, 100))
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        client.evaluate(data, ["x2"] * 20 + [long] * 300)


@pytest.mark.parametrize("method", ["evaluate", "upload"])
def test_clients_that_die_leave_nothing(baseline, server, network, method):
    network.run(network.upload(X), ["x1"])
    before = server.descriptors()
    context = multiprocessing.get_context("spawn")
    dying = [
        context.Process(target=_die_in_mid_call, args=(server.address, method)) for _ in range(2)
    ]
    for process in dying:
        process.start()
    for process in dying:
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
    eventually(lambda: served_windows(server) == 0)
    # The front door's two descriptors of each data set that the dead have uploaded stay. So do the
    # connection by which the other door passes calls on, if one of them was the first to use it,
    # and the memory of a second lane, if both were there at a time.
    eventually(lambda: server.descriptors() <= before + 2 * len(dying) + 2, 20)


def test_windows_of_a_tenant(tmp_path):
    made = {name: new_token(name) for name in ("alice", "bob")}
    path = tmp_path / "tokens"
    path.write_text("".join(f"{line}\n" for _, line in made.values()))
    flags = ("--front-doors", "2", "--local-socket", "auto", "--token-file", str(path))
    with ServerProcess(*flags) as server, ExitStack() as stack:
        tokens = {name: token for name, (token, _) in made.items()}
        locals_ = {}
        for name, token in tokens.items():
            client = stack.enter_context(warpfit.connect(server.address, token=token))
            locals_[name] = client.info().local
        assert locals_["alice"].ticket != locals_["bob"].ticket
        dataset = Dataset.of(X[:50, :2], dtype="float64")
        window = stack.enter_context(RawWindow.of(locals_["alice"], 4096))
        request = evaluate_request(dataset.content_id)
        theirs = into(request, codec.Piece(window.identifier, 0, 4096))
        unknown = into(request, codec.Piece(bytes(16), 0, 4096))
        for _ in range(CLIENTS):
            for name, token in tokens.items():
                with grpc.insecure_channel(server.address, OWN_CONNECTION) as channel:
                    caller = Caller(channel, bearer(token))
                    caller.call("UploadVariables", dataset)
                    if name == "alice":
                        assert caller.send("Evaluate", theirs)
                    else:
                        found = refused(caller, "Evaluate", theirs)
                        assert found == refused(caller, "Evaluate", unknown)
                        assert found[1] == "WINDOW_UNKNOWN"
        # Windows of the same client work; a ticket of an end that is no tenant's does not.
        with warpfit.connect(
            server.address, token=tokens["bob"], transport=EverythingInWindows(), shared_memory=True
        ) as bob:
            bob.evaluate(bob.upload(X), ["x1"])
            assert client_windows() >= 2
        with RawWindow(locals_["bob"].socket, b"bob", [memory_file(4096)]) as forged:
            assert forged.reason == "TICKET_UNKNOWN"


def test_another_servers_windows(tmp_path):
    """A server that was killed leaves its socket; the next one replaces it, and no third one."""
    path = tmp_path / "socket"
    server = ServerProcess("--local-socket", str(path))
    port = server.address.rpartition(":")[2]
    with warpfit.connect(
        server.address, transport=EverythingInWindows(), shared_memory=True
    ) as client:
        data = client.upload(X, dtype="float64")
        client.evaluate(data, ["x1"])
        server.kill()
        server.stop()
        assert path.is_socket()
        with ServerProcess("--local-socket", str(path), "--port", port):
            for _ in range(3):
                np.testing.assert_array_equal(client.evaluate(data, ["x2"])[:, 0], X[:, 1])
            assert client_windows(), "after one call the windows are those of the new server"
            with pytest.raises(RuntimeError, match="did not start"):
                ServerProcess("--local-socket", str(path))
    assert not path.exists()


def assert_the_network_is_used(address: str, shared_memory: bool | str) -> None:
    with warpfit.connect(
        address, transport=EverythingInWindows(), shared_memory=shared_memory
    ) as client:
        data = client.upload(X, dtype="float64")
        np.testing.assert_array_equal(client.evaluate(data, ["x1"])[:, 0], X[:, 0])
        assert not client_windows()


def test_without_a_server_at_the_path(server, caplog):
    assert_the_network_is_used(server.address, "/nowhere/socket")
    assert "the network is used" in caplog.text


def test_without_a_socket_of_the_server(caplog):
    with ServerProcess() as server:
        assert_the_network_is_used(server.address, shared_memory=True)
    assert "--local-socket" in caplog.text


def test_what_does_not_move_matrices_needs_no_window(server):
    with warpfit.connect(server.address, shared_memory=True) as client:
        data = client.upload(X[:100], X[:100, 0])
        client.evaluate(data, ["x1"], loss="mse")
        assert not client_windows()
        request, _ = build_evaluation(data, ["x1"], None, None, {"loss": "mse"})
        assert request.matrix_bytes(data.layout) == 0
