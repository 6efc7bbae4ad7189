"""Fixtures for end-to-end tests: a server that files share, and leave as they found it."""

from collections.abc import Iterator

import grpc
import pytest

import warpfit
from support.load import load
from support.servers.rpcs import OWN_CONNECTION, Caller
from support.servers.server import ServerProcess

PORTS = ("--health-port", "0", "--metrics-port", "0")


@pytest.fixture(scope="session", autouse=True)
def calm_load() -> Iterator[None]:
    """Let clients that only show that answers go on leave the cores to other tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "_PAUSE", 0.03)
        yield


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """A usual server of two front ends."""
    with ServerProcess("--threads", "2", "--front-ends", "2", *PORTS) as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[warpfit.Client]:
    with warpfit.connect(server.address) as connected:
        yield connected


@pytest.fixture
def caller(server: ServerProcess) -> Iterator[Caller]:
    """Makes raw calls over a connection of its own."""
    with grpc.insecure_channel(server.address, OWN_CONNECTION) as channel:
        yield Caller(channel)
