"""Health checks of a server."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def check(address: str, service: str = "readiness", timeout: float = 2.0) -> str:
    """Status of a service, or UNREACHABLE."""
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        try:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service=service)
            status = stub.Check(request, timeout=timeout).status
        except grpc.RpcError:
            return "UNREACHABLE"
    return health_pb2.HealthCheckResponse.ServingStatus.Name(status)


def wait_for(address: str, status: str, service: str = "readiness", timeout: float = 20.0) -> float:
    """Seconds until a service has this status."""
    started = time.monotonic()
    while check(address, service) != status:
        assert time.monotonic() < started + timeout, f"{service} does not become {status}"
        time.sleep(0.02)
    return time.monotonic() - started


@contextmanager
def watched(address: str) -> Iterator[Iterator[str]]:
    """Readiness as it changes; the first status is that of now."""
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        request = health_pb2.HealthCheckRequest(service="readiness")
        heard = health_pb2_grpc.HealthStub(channel).Watch(request, timeout=120)
        names = health_pb2.HealthCheckResponse.ServingStatus.Name
        yield (names(answer.status) for answer in heard)
