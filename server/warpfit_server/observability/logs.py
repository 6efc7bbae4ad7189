"""Log lines as text or JSON; every line of a call carries the call's id."""

import json
import logging
import threading
import time
from contextvars import ContextVar
from typing import Final

#: Most names whose lines are counted at a time; with more of them all counts begin anew.
_MOST_NAMES: Final = 10_000
#: Id of the call that this thread works for, which its log lines carry; "" for none.
LOGGED_REQUEST_ID: Final[ContextVar[str]] = ContextVar("request id", default="")


class LogRateLimiter:
    """Limits the lines of each name, so that a client that repeats a mistake fills no disk.

    It allows ``burst`` lines without a pause, and ``rate`` a second in the long run, by the generic
    cell rate algorithm, as in `warpfit_server.tenancy.quotas`.
    """

    def __init__(self, burst: int, rate: float) -> None:
        self._ahead = burst / rate
        self._step = 1 / rate
        self._lock = threading.Lock()
        self._used: dict[str, tuple[float, int]] = {}
        """Moment of the next line, and number of lines left out since the last one, by name."""

    def take(self, name: str, now: float) -> int | None:
        """Ask whether a line may be written at ``now``, in seconds on a monotonic clock.

        Returns how many of the name were left out since the last one, or None to leave it out, too.
        """
        with self._lock:
            if name not in self._used and len(self._used) >= _MOST_NAMES:
                self._used.clear()
            until, left_out = self._used.get(name, (now, 0))
            until = max(until, now) + self._step
            if until - now > self._ahead + 1e-9:
                self._used[name] = (until - self._step, left_out + 1)
                return None
            self._used[name] = (until, 0)
            return left_out


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
        }
        request_id = LOGGED_REQUEST_ID.get()
        if request_id:
            entry["request_id"] = request_id
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


class _TextFormatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        request_id = LOGGED_REQUEST_ID.get()
        line = super().formatMessage(record)
        return f"{line} [{request_id}]" if request_id else line


def configure_logging(level: str, style: str) -> None:
    """Log to standard error from ``level`` on, as ``text`` or ``json`` lines."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        _JsonFormatter()
        if style == "json"
        else _TextFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
