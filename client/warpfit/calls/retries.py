"""Deadlines and retries of a call."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass
from typing import Final

from warpfit.calls.checks import number
from warpfit.errors import DeadlineExceededError, InvalidArgumentError, WarpfitError
from warpfit.transport.settings import RetryPolicy

#: Seconds between two lines of the log about a call that waits.
_TELL_SECONDS: Final = 10.0
#: Not the module's own functions, whose seed decides the searches of callers.
_RANDOM: Final = random.SystemRandom()


class Deadline:
    """A moment that all attempts of an operation share."""

    def __init__(self, timeout: float | None) -> None:
        wanted = "seconds, or None to wait for ever"
        timeout = None if timeout is None else number(timeout, "timeout", wanted)
        if timeout is not None and not timeout > 0:
            raise InvalidArgumentError(
                f"timeout {timeout} is not positive", "BAD_TIMEOUT", f"Give {wanted}", "timeout"
            )
        self.timeout = None if timeout == math.inf else timeout
        self._end = None if self.timeout is None else time.monotonic() + self.timeout

    def remaining(self) -> float | None:
        """Return the seconds left, at least 0; None without a deadline."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def part(self, share: float) -> Deadline:
        """Return a deadline after this share of the time left."""
        remaining = self.remaining()
        return Deadline(None if remaining is None else max(1e-3, share * remaining))


@dataclass(slots=True)
class Retries:
    """Counts the failures of one call at all servers, and decides whether it is repeated."""

    policy: RetryPolicy
    deadline: Deadline
    failures: int = 0
    first_failure: float = 0.0
    told_at: float = -math.inf

    def restart(self) -> None:
        """Count from the beginning, because something has been achieved."""
        self.failures = 0

    def must_tell(self) -> bool:
        """Return whether users want to read again that the call waits; true every few seconds."""
        now = time.monotonic()
        if now < self.told_at + _TELL_SECONDS:
            return False
        self.told_at = now
        return True

    def pause_after(self, error: WarpfitError, total_seconds: float) -> float:
        """Return the policy's pause, or the time that the server asked for if it is longer.

        Raises:
            WarpfitError: ``error``, once ``total_seconds`` after the first failure have passed, or
                if the server asks for more.
            DeadlineExceededError: if the caller's deadline comes before the next attempt.
        """
        now = time.monotonic()
        self.first_failure = self.first_failure if self.failures else now
        self.failures += 1
        time_left = self.first_failure + total_seconds - now
        # The time that the server asks for is spread, so that workers do not return all at once.
        asked = (error.retry_after or 0.0) * (1.0 + self.policy.jitter * _RANDOM.random())
        if time_left <= 0 or asked > time_left:
            raise error
        pause = max(asked, min(time_left, self.policy.pause(self.failures, _RANDOM.random())))
        remaining = self.deadline.remaining()
        if remaining is not None and pause >= remaining:
            raise DeadlineExceededError(
                f"no answer within {self.deadline.timeout:g} s; the last of {self.failures} "
                f"attempts failed: {error.message}",
                "DEADLINE_EXCEEDED",
                "Raise timeout=, and look at the server's log",
            ) from error
        return float(pause)
