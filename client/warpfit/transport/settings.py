"""The settings of a client's connection: retries, messages, keepalive, gRPC's environment."""

import os
import re
import sys
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Final, Self

from warpfit.errors import bad_setting

#: gRPC's event engine keeps a thread for each core and wakes one of them at every step of a call.
#: On 16 cores a small call takes 0.4 to 0.8 ms with it, and 0.2 ms with the older poller, where the
#: waiting thread does the work itself (measured with grpcio 1.85.1). Servers have the event engine:
#: in the older poller one connection that sends frames without a pause, which takes no credentials,
#: kept the thread that serves all others for as long as it liked.
_EXPERIMENTS: Final = "-event_engine_client"

#: Form of a proxy's address; gRPC reaches servers by the method CONNECT of HTTP.
_PROXY: Final = re.compile(r"http://(?:[^\s/@]+@)?[^\s/@]+:\d+/?")

#: Between calls nobody waits in the older poller, so that a connection that is being made only
#: progresses when gRPC polls by itself: every 5,000 ms by default. After a restart of the server
#: clients were cut off for 3 to 18 s; with this interval it is 0.1 to 0.9 s.
_POLL_MILLISECONDS: Final = "100"


def configure_grpc() -> None:
    """Choose gRPC's poller, its interval and its care for forks by environment variables.

    gRPC reads them on import. Variables that are set already stay, and so does everything if gRPC
    is imported already.
    """
    if "grpc" not in sys.modules:
        os.environ.setdefault("GRPC_EXPERIMENTS", _EXPERIMENTS)
        os.environ.setdefault("GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS", _POLL_MILLISECONDS)
        os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "1")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Rules for repeating calls that the server could not take; all calls are idempotent.

    A call is repeated if it failed with UNAVAILABLE, or with RESOURCE_EXHAUSTED and a time to wait.
    That time is then the shortest pause.
    """

    total_seconds: float = 20.0
    """Give up this long after a call failed for the first time; 0 never repeats. An engine that
    restarts is back within a few seconds. A first call where nobody listens gives up earlier; see
    ``wait`` of `warpfit.connect`."""
    initial_backoff: float = 0.05
    """Seconds before the first repetition."""
    maximum_backoff: float = 1.0
    """Upper bound of the growing pauses, in seconds."""
    multiplier: float = 2.0
    """Factor by which each pause is longer than the one before."""
    jitter: float = 0.5
    """Share of each pause that is random, so that many workers do not return all at once."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        _check_numbers(self, 0.0)

    def pause(self, failures: int, random: float) -> float:
        """Return the seconds to wait after failed attempts; ``random`` is from [0, 1)."""
        growth = self.multiplier ** min(failures - 1, 64)
        full = min(self.initial_backoff * growth, self.maximum_backoff)
        return full * (1.0 - self.jitter * random)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportConfig:
    """Settings of the gRPC channel. Nothing is compressed, because numbers hardly compress."""

    chunk_bytes: int = 1 << 20
    """Size of the pieces in which a data set is uploaded."""
    message_bytes: int = 128 << 20
    """Largest message to send or to accept; a larger matrix always comes in pieces."""
    keepalive_seconds: float | None = None
    """Time between keepalive pings while a call is in flight; None for 30 with one server, for 1
    with several, where another one can take over the calls of one that hangs."""
    keepalive_timeout_seconds: float | None = None
    """A connection is closed when a ping stays unanswered this long; None for 10 with one server,
    and for 2 with several."""
    reconnect_seconds: tuple[float, float] = (0.1, 1.0)
    """First and longest pause between attempts to connect again."""
    connect_seconds: float = 5.0
    """Shortest time limit of one attempt to connect; a busy machine needs some time to answer."""
    proxy: str | None = field(
        default_factory=lambda: os.environ.get("WARPFIT_PROXY") or None, repr=False
    )
    """HTTP proxy ``http://[USER:PASSWORD@]HOST:PORT`` through which servers on other machines are
    reached; by default WARPFIT_PROXY, and none without it. Variables such as ``http_proxy`` are
    meant for other programs and are not read."""

    def __post_init__(self) -> None:
        """Check the settings."""
        _check_numbers(self, 1e-3)
        proxy = self.proxy
        if proxy is not None and not (isinstance(proxy, str) and _PROXY.fullmatch(proxy)):
            raise bad_setting("proxy", proxy, "http://HOST:PORT (WARPFIT_PROXY, if none is given)")

    def for_several(self) -> Self:
        """Return the settings for a channel to one of several servers."""
        return replace(
            self,
            keepalive_seconds=self.keepalive_seconds or 1.0,
            keepalive_timeout_seconds=self.keepalive_timeout_seconds or 2.0,
        )

    def channel_options(self) -> list[tuple[str, int]]:
        """Return the same settings, but for the proxy, as gRPC channel arguments."""
        first, longest = (round(1000 * seconds) for seconds in self.reconnect_seconds)
        timeout = round(1000 * (self.keepalive_timeout_seconds or 10.0))
        return [
            ("grpc.max_send_message_length", self.message_bytes),
            ("grpc.max_receive_message_length", self.message_bytes),
            ("grpc.keepalive_time_ms", round(1000 * (self.keepalive_seconds or 30.0))),
            ("grpc.keepalive_timeout_ms", timeout),
            # A keepalive ping waits for the longer of the two times (grpcio 1.85): a minute.
            ("grpc.http2.ping_timeout_ms", timeout),
            ("grpc.initial_reconnect_backoff_ms", first),
            ("grpc.min_reconnect_backoff_ms", round(1000 * self.connect_seconds)),
            ("grpc.max_reconnect_backoff_ms", longest),
            # warpfit retries by itself, because it knows the caller's deadline.
            ("grpc.enable_retries", 0),
        ]


def _check_numbers(settings: RetryPolicy | TransportConfig, least: float) -> None:
    for name in settings.__slots__:
        value = getattr(settings, name)
        if name == "proxy":
            continue
        numbers = value if isinstance(value, tuple) else (least if value is None else value,)
        if not all(isinstance(number, Real) and float(number) >= least for number in numbers):
            raise bad_setting(name, value, f"a number from {least:g}")
