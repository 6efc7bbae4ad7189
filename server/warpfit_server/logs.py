"""Logging for people or for machines; every line of a call carries its id."""

from __future__ import annotations

import json
import logging
import time
from contextvars import ContextVar
from typing import Final

_REQUEST_ID: Final[ContextVar[str]] = ContextVar("request id", default="")


def works_for(request_id: str) -> None:
    """Let the log lines of this thread name a call from now on; an empty string names none."""
    _REQUEST_ID.set(request_id)


def current_id() -> str:
    """Id of the call that this thread works for, or an empty string."""
    return _REQUEST_ID.get()


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
        request_id = current_id()
        if request_id:
            entry["request_id"] = request_id
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


class _TextFormatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        request_id = current_id()
        line = super().formatMessage(record)
        return f"{line} [{request_id}]" if request_id else line


def configure_logging(level: str, style: str) -> None:
    """Log to standard error at ``level``, as ``text`` or as ``json`` lines."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        _JsonFormatter()
        if style == "json"
        else _TextFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
