"""Fixtures for a client, once in the server's process and once over gRPC."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import warpfit
from support.servers.examples import QUICK
from support.servers.loopback import serve
from warpfit import testing


@pytest.fixture
def server() -> testing.InProcessServer:
    return testing.InProcessServer(chunk_bytes=256)


@pytest.fixture(params=["in process", "grpc"])
def connect(
    request: pytest.FixtureRequest, server: testing.InProcessServer
) -> Iterator[Callable[..., warpfit.Client]]:
    """Return a function that makes clients of ``server``."""
    if request.param == "in process":
        yield lambda **options: testing.client(server, **options)
        return
    with serve(server) as (address, _):
        yield lambda retry=QUICK, **options: warpfit.connect(address, retry=retry, **options)


@pytest.fixture
def client(connect: Callable[..., Any]) -> Iterator[warpfit.Client]:
    with connect() as made:
        yield made
