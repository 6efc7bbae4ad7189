"""Fixtures for end-to-end tests: servers that several files share, and leave as they found them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import warpfit
from support.load import load
from support.load.faults import FATAL, injected
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


@pytest.fixture(scope="session")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of `family`."""
    return tmp_path_factory.mktemp("family") / "log"


@pytest.fixture(scope="session")
def family(log: Path) -> Iterator[ServerProcess]:
    """A server of three front ends, parts of which may be killed."""
    flags = ("--front-ends", "3", "--max-resident-bytes", "16MiB", "--threads", "2", *PORTS)
    with ServerProcess(*flags, "--log-format", "json", "--log-level", "debug", log=log) as process:
        yield process


@pytest.fixture(scope="session")
def harmed() -> Iterator[ServerProcess]:
    """A server of two front ends with planted faults."""
    flags = ("--threads", "1", "--front-ends", "2", *PORTS)
    with ServerProcess(*flags, **injected(f"harm={FATAL}")) as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[warpfit.Client]:
    with warpfit.connect(server.address) as connected:
        yield connected
