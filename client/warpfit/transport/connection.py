"""The checked arguments of `warpfit.connect`, as which a client is pickled, too."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from warpfit.errors import InvalidArgumentError
from warpfit.transport.addresses import Address, Target, target_of
from warpfit.transport.security import Security, TlsConfig
from warpfit.transport.settings import ClientConfig, RetryPolicy, TransportConfig


@dataclass(frozen=True, slots=True, repr=False)  # a token should not appear in logs
class Connection:
    """The arguments of `warpfit.connect`, checked, with the environment's where none are given."""

    target: Target = field(compare=False)
    config: ClientConfig
    security: Security = Security()  # noqa: RUF009 (it is frozen)
    arguments: tuple[Any, ...] | None = None
    """As they were given, but for the address, which a copy elsewhere must not take from there;
    None without a server."""

    @classmethod
    def of(
        cls,
        address: Address,
        token: str | None,
        tls: TlsConfig | bool | None,
        retry: RetryPolicy | None,
        transport: TransportConfig | None,
        wait: float | None,
        replicas: int,
    ) -> Connection:
        """Check the arguments; errors as `warpfit.connect`."""
        target = target_of(address)
        config = ClientConfig.of(retry, transport, wait, replicas)
        found = list(target.addresses) or address or target.text
        arguments = (found, token, tls, retry, transport, wait, replicas)
        return cls(target, config, Security.of(target, token, tls), arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments, a token among them; a copy connects anew."""
        if self.arguments is None:
            raise InvalidArgumentError(
                "a client without a server cannot be pickled",
                "NOT_CONNECTED",
                "Make one in each process",
            )
        return Connection.of, self.arguments
