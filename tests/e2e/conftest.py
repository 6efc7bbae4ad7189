"""Fixtures for end-to-end tests."""

from collections.abc import Iterator

import pytest

import warpfit
from support.servers.server import ServerProcess


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """Start one server for all tests that leave it as they found it."""
    with ServerProcess("--threads", "2") as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[warpfit.Client]:
    with warpfit.connect(server.address) as connected:
        yield connected
