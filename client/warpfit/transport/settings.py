"""How a client retries and how it speaks to the network: frozen settings, filled once."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """When to repeat a call that the server could not take; every call of warpfit is idempotent.

    That is a call that failed with UNAVAILABLE, or with RESOURCE_EXHAUSTED and a time to wait,
    which is the shortest pause then.
    """

    total_seconds: float = 20.0
    """Give up this long after a call failed for the first time; 0 never repeats. An engine that
    restarts is back within a few seconds."""
    initial_backoff: float = 0.05
    """Seconds before the first repetition."""
    maximum_backoff: float = 1.0
    """Upper bound of the growing pauses, in seconds."""
    multiplier: float = 2.0
    """Factor by which each pause is longer than the one before."""
    jitter: float = 0.5
    """Share of each pause that is random, so that many workers do not return all at once."""

    def pause(self, failures: int, random: float) -> float:
        """Seconds to wait after ``failures`` failed attempts (from 1), given a draw from [0, 1)."""
        growth = self.multiplier ** min(failures - 1, 64)
        full = min(self.initial_backoff * growth, self.maximum_backoff)
        return full * (1.0 - self.jitter * random)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportConfig:
    """How messages cross the network. Nothing is compressed: numbers hardly compress."""

    chunk_bytes: int = 1 << 20
    """Size of the pieces in which a data set is uploaded."""
    message_bytes: int = 128 << 20
    """Largest message to send or to accept; a larger matrix always comes in pieces."""
    keepalive_seconds: float = 30.0
    """Ask this often whether the server is still there while a call is in flight."""
    keepalive_timeout_seconds: float = 10.0
    """Give a connection up when that question stays unanswered this long."""
    reconnect_seconds: tuple[float, float] = (0.1, 1.0)
    """First and longest pause between attempts to connect again."""
    connect_seconds: float = 5.0
    """Give one attempt to connect at least this long: a busy machine needs some time to answer."""

    def channel_options(self) -> list[tuple[str, int]]:
        """Return the same settings as gRPC channel arguments."""
        first, longest = (round(1000 * seconds) for seconds in self.reconnect_seconds)
        return [
            ("grpc.max_send_message_length", self.message_bytes),
            ("grpc.max_receive_message_length", self.message_bytes),
            ("grpc.keepalive_time_ms", round(1000 * self.keepalive_seconds)),
            ("grpc.keepalive_timeout_ms", round(1000 * self.keepalive_timeout_seconds)),
            ("grpc.initial_reconnect_backoff_ms", first),
            ("grpc.min_reconnect_backoff_ms", round(1000 * self.connect_seconds)),
            ("grpc.max_reconnect_backoff_ms", longest),
            # The client repeats by itself and knows the caller's deadline.
            ("grpc.enable_retries", 0),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """All settings of a client."""

    retry: RetryPolicy = field(default_factory=RetryPolicy)
    transport: TransportConfig = field(default_factory=TransportConfig)
