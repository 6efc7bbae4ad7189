"""What stands before every method: who calls, may they, not too often, not too much at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import grpc

from warpfit.errors import ResourceExhaustedError
from warpfit_server.admission import Admission
from warpfit_server.auth import Authenticator, TokenFile
from warpfit_server.config import Config
from warpfit_server.ledger import Ledger
from warpfit_server.service import errors_to_status
from warpfit_server.tenants import TenantBook, assign_tenant

Behaviour = Callable[[Any, Any], Any]
_KINDS: Final = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
}


def make_guard(
    config: Config, ledger: Ledger, *, trusts_doors: bool = False
) -> tuple[Admission, Guard]:
    """Make admission and guard of one door.

    Args:
        config: the server's configuration.
        ledger: what all doors count in.
        trusts_doors: whether this is the front door, to which the others pass calls on.

    Raises:
        InvalidArgumentError: if the token file or the tenants file cannot be used.

    """
    has_tenants = bool(config.token_file or config.tls_client_ca)
    book = TenantBook(config.limits(), config.tenants_file or None, shared=has_tenants)
    admission = Admission(config, book, ledger)
    authenticator = Authenticator(
        TokenFile(config.token_file) if config.token_file else None,
        certificates=bool(config.tls_client_ca),
        trusts_doors=trusts_doors,
    )
    return admission, Guard(authenticator, admission)


class Guard:
    """Puts authentication and limits before the methods of a service.

    After it, `warpfit_server.tenants.tenant_of` names a call's tenant.
    """

    def __init__(self, authenticator: Authenticator, admission: Admission) -> None:
        self._authenticator = authenticator
        self._admission = admission

    def protect(self, handlers: Mapping[str, Any]) -> dict[str, Any]:
        """Return the handlers, each behind the guard."""
        return {name: self._protected(handler) for name, handler in handlers.items()}

    def _protected(self, handler: Any) -> Any:
        streams_in, streams_out = handler.request_streaming, handler.response_streaming
        behaviour = next(
            found
            for found in (handler.unary_unary, handler.unary_stream, handler.stream_unary)
            if found is not None
        )
        checked = self._checked_stream if streams_in else self._checked_message

        def call(request: Any, context: grpc.ServicerContext) -> Any:
            return behaviour(checked(request, context), context)

        def stream(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            yield from behaviour(checked(request, context), context)

        return _KINDS[streams_in, streams_out](stream if streams_out else call)

    def _checked_message(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        with errors_to_status(context):
            most = self._enter(context)
            _check_size(message, most)
        return message

    def _checked_stream(
        self, messages: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        with errors_to_status(context):
            most = self._enter(context)
        return _each_checked(messages, most)

    def _enter(self, context: grpc.ServicerContext) -> int:
        """Name the caller's tenant; return how many bytes a message of it may have."""
        tenant = self._authenticator.tenant(context)
        assign_tenant(context, tenant)
        limits = self._admission.limits(tenant)
        if not self._authenticator.is_forwarded(context):  # else the door has counted it
            self._admission.check_rate(tenant)
        return limits.message_bytes


def _each_checked(messages: Iterator[bytes], most: int) -> Iterator[bytes]:
    for message in messages:
        _check_size(message, most)
        yield message


def _check_size(message: bytes, most: int) -> None:
    if len(message) > most:
        raise ResourceExhaustedError(
            f"one message has {len(message)} bytes, the limit is {most}",
            "MESSAGE_TOO_LARGE",
            "Send smaller batches or pieces, or ask for a higher limit",
            needed=len(message),
            available=most,
        )
