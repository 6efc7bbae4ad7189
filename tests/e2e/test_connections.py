"""Connections of a server: from where, and how many."""

import socket
import time

import pytest

import warpfit
from support.servers import health
from support.servers.server import ServerProcess

#: Open files of each process, and the connections that a front end has of these.
FILES, MOST = 256, 102


@pytest.fixture(scope="module")
def server():
    flags = ("--host", "0.0.0.0", "--insecure", "--front-ends", "1", "--health-port", "0")
    with ServerProcess(*flags, files=FILES) as process:
        yield process


def connect(address):
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def closed(client) -> bool:
    """Whether the server has closed a connection."""
    client.settimeout(2)
    try:
        while True:
            if client.recv(4096) == b"":
                return True
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True


def test_further_connections_are_closed_and_places_come_back(server):
    """The first test here, because the client of an earlier one could leave its place meanwhile."""
    clients = [connect(server.address) for _ in range(2 * MOST)]
    try:
        assert sum(closed(client) for client in clients[MOST:]) == MOST
        assert health.check(server.facts["health"]) == "SERVING"
    finally:
        for client in clients:
            client.close()
    deadline = time.monotonic() + 20
    while True:
        try:
            with warpfit.connect(server.address) as client:
                assert client.info().engine == "cpu"
            return
        except warpfit.WarpfitError:
            assert time.monotonic() < deadline


def test_plain_text_on_all_addresses_if_it_is_asked_for(server):
    port = server.address.rpartition(":")[2]
    with warpfit.connect(f"127.0.0.2:{port}") as client:
        assert client.info().engine == "cpu"
