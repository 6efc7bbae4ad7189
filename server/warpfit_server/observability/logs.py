"""Log lines as text or JSON; every line of a call carries the call's id.

Callers, some of them anonymous, choose much of the text in the log: names in certificates,
metadata, texts of errors. So no place in the code writes more than a few lines a second, and
characters that would end a line, or do something to a terminal, are written as escape sequences.
"""

import json
import logging
import os
import threading
import time
from contextvars import ContextVar
from typing import Any, Final

#: Most names whose lines are counted at a time; with more of them all counts begin anew.
_MOST_NAMES: Final = 10_000
#: Lines that one place in the code may write in a process: in a burst, and a second.
_BURST_LINES, _LINES_A_SECOND = 200, 2.0
#: gRPC's logger. A part of it gets a traceback for each header that is not UTF-8, which callers
#: without credentials can send thousands of a second. Such headers are read as Latin-1 and do no
#: harm.
_GRPC_LOGGER: Final = "grpc"
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


class _PlaceLimit(logging.Filter):
    """Leaves out lines of a place in the code that writes too many; debug lines stay."""

    def __init__(self) -> None:
        super().__init__()
        self._lines = LogRateLimiter(_BURST_LINES, _LINES_A_SECOND)

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.INFO:
            return True
        left_out = self._lines.take(f"{record.name}:{record.lineno}", time.monotonic())
        if left_out:
            record.msg = f"{record.getMessage()} (after {left_out} such lines that were left out)"
            record.args = None
        return left_out is not None


def printable(text: str) -> str:
    """Return a text on one line: control characters, line ends and the like are escaped."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def _request_id(record: logging.LogRecord) -> str:
    """Return the id of the call that a line is about; lines of other packages are about none."""
    return LOGGED_REQUEST_ID.get() if record.name.startswith("warpfit") else ""


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
        if request_id := _request_id(record):
            entry["request_id"] = request_id
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


class _TextFormatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        request_id = _request_id(record)
        record.message = printable(record.message)
        line = super().formatMessage(record)
        return f"{line} [{request_id}]" if request_id else line

    def formatException(self, ei: Any) -> str:  # noqa: N802 (logging's name)
        # Indented, so that no line of it looks like one of the log's own.
        lines = super().formatException(ei).split("\n")
        return "\n".join(f"    {printable(line)}" for line in lines)


def json_line(message: str, level: str = "info", **fields: object) -> str:
    """Return a line of the log in JSON for what does not go through `logging`."""
    record = logging.makeLogRecord({"msg": message, "name": "warpfit", "levelname": level})
    record.fields = fields
    return _JsonFormatter().format(record)


def configure_logging(level: str, style: str) -> None:
    """Log to standard error from ``level`` on, as ``text`` or ``json`` lines.

    gRPC's own lines, of which each failed handshake causes some, are left out in this process and
    its children unless the environment has ``GRPC_VERBOSITY``; gRPC reads it as it is imported.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    handler = logging.StreamHandler()
    handler.setFormatter(
        _JsonFormatter()
        if style == "json"
        else _TextFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    )
    handler.addFilter(_PlaceLimit())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger(_GRPC_LOGGER).setLevel(logging.CRITICAL)
