"""The checked arguments of `warpfit.connect`, as which a client is pickled, too."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, TypeVar

from warpfit.errors import InvalidArgumentError, bad_setting
from warpfit.transport.addresses import Address, Target, target_of
from warpfit.transport.security import Security, TlsConfig
from warpfit.transport.settings import RetryPolicy, TransportConfig

T = TypeVar("T")


@dataclass(frozen=True, slots=True, repr=False)  # a token should not appear in logs
class Connection:
    """The arguments of `warpfit.connect`, checked, with the environment's where none are given."""

    target: Target = field(compare=False)
    retry: RetryPolicy = RetryPolicy()  # noqa: RUF009 (it is frozen, as the next ones)
    transport: TransportConfig = TransportConfig()  # noqa: RUF009
    security: Security = Security()  # noqa: RUF009
    wait: float | None = None
    """Seconds for which the first call waits for a server; None as `warpfit.connect` says."""
    replicas: int = 2
    """Number of servers on which a data set lives."""
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
        if not isinstance(replicas, Integral) or isinstance(replicas, bool) or replicas < 1:
            raise bad_setting("replicas", replicas, "a number of servers for each data set, from 1")
        if wait is not None and not (isinstance(wait, Real) and wait >= 0):
            raise bad_setting("wait", wait, "seconds from 0, or None")
        found = list(target.addresses) or address or target.text
        return cls(
            target,
            _checked(retry, RetryPolicy, "retry"),
            _checked(transport, TransportConfig, "transport"),
            Security.of(target, token, tls),
            None if wait is None else float(wait),
            int(replicas),
            (found, token, tls, retry, transport, wait, replicas),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments, a token among them; a copy connects anew."""
        if self.arguments is None:
            raise InvalidArgumentError(
                "a client without a server cannot be pickled",
                "NOT_CONNECTED",
                "Make one in each process",
            )
        return Connection.of, self.arguments


def _checked(given: T | None, kind: type[T], name: str) -> T:
    """Return settings of a kind, by default new ones."""
    if given is None or isinstance(given, kind):
        return given or kind()
    raise bad_setting(name, given, f"a warpfit.{kind.__name__}")
