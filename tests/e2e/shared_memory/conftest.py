"""A server of one door and of two, and clients that put everything in windows."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

import warpfit
from support.server import ServerProcess
from support.shared_memory import (
    CLIENTS,
    DOORS,
    EverythingInWindows,
    eventually,
    served_windows,
)


@pytest.fixture(scope="module", params=DOORS)
def server(request):
    flags = ("--threads", "2", "--front-doors", str(request.param), "--local-socket", "auto")
    with ServerProcess(*flags) as process:
        yield process


@pytest.fixture
def path(server):
    return server.facts["local"]


@pytest.fixture
def network(server):
    with warpfit.connect(server.address) as client:
        yield client


@pytest.fixture
def clients(server):
    """Enough clients that each door has some."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                warpfit.connect(server.address, transport=EverythingInWindows(), shared_memory=True)
            )
            for _ in range(CLIENTS)
        ]


@pytest.fixture
def local(network):
    return network.info().local


@pytest.fixture
def baseline(server):
    """Check that the server has the windows that it had."""
    before = served_windows(server)
    yield
    eventually(lambda: served_windows(server) <= before)
