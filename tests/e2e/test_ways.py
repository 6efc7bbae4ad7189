"""The way to a server: proxies, which are used only if they are asked for, and dead ends."""

import asyncio
import contextlib
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import warpfit
from warpfit.cli.main import main

#: Variables that gRPC, or other programs, take a proxy from.
VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy", "all_proxy")
DEAD = "http://127.0.0.1:9"
NAME = "warpfit.invalid"


@contextlib.contextmanager
def connecting_proxy(target):
    """Yield the address of an HTTP proxy that connects everybody to one server, and its log."""
    host, _, port = target.rpartition(":")
    asked = []

    def forward(source, sink):
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                sink.sendall(piece)

    def serve():
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                asked.append(client.recv(4096).split(b"\r\n")[0].decode())
                server = socket.create_connection((host, int(port)))
                client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                for way in ((client, server), (server, client)):
                    threading.Thread(target=forward, args=way, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}", asked


@pytest.fixture
def proxies(monkeypatch):
    """An environment that sends everything to a proxy that is not there."""
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy", "WARPFIT_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in VARIABLES:
        monkeypatch.setenv(name, DEAD)
        monkeypatch.setenv(name.upper(), DEAD)
    return monkeypatch


def test_a_proxy_in_the_environment_is_not_used(proxies, server, capsys):
    with warpfit.connect(server.address) as client:
        assert client.evaluate(client.upload([[1.0]]), "x1").tolist() == [[1.0]]
    assert asyncio.run(warpfit.connect_async(server.address).info()).engine == "cpu"
    for command in ("info", "health"):
        main([command, server.address])
    assert "SERVING" in capsys.readouterr().out
    # The name of a server on another machine is not asked of the proxy either.
    with pytest.raises(warpfit.UnavailableError, match=f"{NAME}.* cannot be resolved") as caught:
        warpfit.connect(f"{NAME}:5", retry=warpfit.RetryPolicy(total_seconds=0)).info()
    assert "127.0.0.1:9" not in str(caught.value)


def test_a_proxy_that_is_asked_for_is_used_but_for_this_machine(proxies, server):
    with connecting_proxy(server.address) as (address, asked):
        given = warpfit.TransportConfig(proxy=f"http://{address}")
        with warpfit.connect(f"{NAME}:50551", transport=given) as client:
            assert client.info().engine == "cpu"
        proxies.setenv("WARPFIT_PROXY", f"http://user:secret@{address}")
        with warpfit.connect(f"{NAME}:50552") as client:
            assert client.info().engine == "cpu"
        with warpfit.connect(server.address) as client:
            assert client.info().engine == "cpu"
        assert asked == [f"CONNECT {NAME}:{port} HTTP/1.1" for port in (50551, 50552)]


def test_an_error_tells_the_proxy_from_the_server_and_no_password(proxies):
    proxies.setenv("WARPFIT_PROXY", "http://user:secret@127.0.0.1:9")
    with pytest.raises(warpfit.UnavailableError) as caught:
        warpfit.connect(f"{NAME}:5").info()
    assert f"{NAME}:5, asked for by the proxy 127.0.0.1:9: nothing listens" in str(caught.value)
    assert "secret" not in str(caught.value) + repr(warpfit.TransportConfig())


DEAD_ENDS = {
    "unix:stale.sock": "nothing listens at unix:stale.sock",
    "unix:plain/none.sock": "cannot be reached: Not a directory",
    "unix-abstract:warpfit-none": "nothing listens at unix-abstract:warpfit-none",
    "[::1]:9": "at \\[::1\\]:9|\\[::1\\]:9 cannot be reached",
    f"{NAME}:9": f"{NAME}:9 cannot be resolved",
}


def test_a_dead_end_is_told_within_the_time_of_a_first_contact(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain").touch()
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind("stale.sock")

    def told(address):
        with warpfit.connect(address) as client, pytest.raises(warpfit.UnavailableError) as caught:
            client.info()
        return str(caught.value)

    began = time.monotonic()
    with ThreadPoolExecutor(len(DEAD_ENDS)) as pool:
        for words, said in zip(DEAD_ENDS.values(), pool.map(told, DEAD_ENDS), strict=True):
            assert re.search(words, said)
    assert time.monotonic() - began < 15  # a server that has answered is waited for for 20
