"""Queries of a server's health service, without the package that has its stubs."""

import grpc

from warpfit.transport.addresses import check_address
from warpfit.transport.forks import CALLS
from warpfit.transport.security import Security

#: HealthCheckResponse.ServingStatus by number.
_STATUS = ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")


def health(address: str, service: str, timeout: float) -> str:
    """Return a service's status from grpc.health.v1, or the gRPC status of a call that failed."""
    check_address(address)
    name = service.encode()[:127]
    request = b"\n" + bytes([len(name)]) + name if name else b""  # HealthCheckRequest.service
    with CALLS, Security().channel(address, []) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check", None, None)
        try:
            answer = check(request, timeout=timeout)
        except grpc.RpcError as error:
            return str(error.code().name)
    # HealthCheckResponse.status
    number = answer[1] if answer[:1] == b"\x08" and len(answer) > 1 else 0
    return _STATUS[number] if number < len(_STATUS) else "UNKNOWN"
