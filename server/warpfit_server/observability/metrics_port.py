"""The HTTP port of the metrics: one thread, few connections, little time for each.

Nobody needs credentials to connect, so a connection costs no thread and nothing that a client says
makes the server wait: where there are too many connections the oldest one goes, because a scrape is
over long before it would be the oldest.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from http import HTTPStatus
from typing import Final, Protocol

from warpfit.errors import UnavailableError

_LOG: Final = logging.getLogger("warpfit.metrics")
_MOST_CONNECTIONS: Final = 32
#: Most bytes of the lines of a request.
_MOST_BYTES: Final = 16 << 10
#: Seconds in which a request must come and its answer be taken.
_SECONDS: Final = 5.0


class Page(Protocol):
    """What is served at ``/metrics``."""

    def render(self, accept: str) -> tuple[str, bytes]:
        """Return type and content for a request's ``Accept`` header."""


class MetricsPort:
    """Serves one page over HTTP. ``port`` is the port that it listens on.

    Args:
        page: served at ``/metrics``; rendered in the port's thread.
        host: address to listen on.
        port: number, 0 for a free one.

    Raises:
        UnavailableError: if the port is taken, or the address is none of this machine.

    """

    def __init__(self, page: Page, host: str, port: int) -> None:
        self._page = page
        self._open: dict[asyncio.StreamWriter, None] = {}
        self._loop = asyncio.new_event_loop()
        try:
            self._server = self._loop.run_until_complete(
                asyncio.start_server(self._serve, host, port, limit=_MOST_BYTES)
            )
        except OSError as error:
            self._loop.close()
            raise UnavailableError(
                f"cannot listen on {host}:{port}: {error.strerror}",
                "PORT_IN_USE",
                "Choose another --metrics-port or --metrics-host",
            ) from error
        self.port = int(self._server.sockets[0].getsockname()[1])
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close the port and its connections."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._close())
        self._loop.close()

    async def _close(self) -> None:
        self._server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open[writer] = None
        if len(self._open) > _MOST_CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        try:
            async with asyncio.timeout(_SECONDS):
                request = await reader.readuntil(b"\r\n\r\n")
                writer.write(answer(request, self._page.render))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            _LOG.debug("a client of the metrics port was too slow, too long, or has gone")
        finally:
            self._open.pop(writer, None)
            writer.transport.abort()


def answer(request: bytes, render: Callable[[str], tuple[str, bytes]]) -> bytes:
    """Answer an HTTP request, of which there is one on each connection.

    Args:
        request: its lines, the empty one at their end included.
        render: makes type and content of the page.

    """
    first, *lines = request.decode("latin-1").split("\r\n")
    method, _, rest = first.partition(" ")
    path = rest.partition(" ")[0].partition("?")[0]
    if path != "/metrics":
        return _response(HTTPStatus.NOT_FOUND, "text/plain", b"the metrics are at /metrics\n")
    if method not in ("GET", "HEAD"):
        return _response(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b"use GET\n")
    headers = {name.strip().lower(): value for name, _, value in map(_split, lines)}
    try:
        content_type, content = render(headers.get("accept", "").strip())
    except Exception:
        _LOG.exception("the metrics could not be collected")
        return _response(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", b"see the log\n")
    return _response(HTTPStatus.OK, content_type, content, with_content=method == "GET")


def _split(line: str) -> tuple[str, str, str]:
    return line.partition(":")


def _response(
    status: HTTPStatus, content_type: str, content: bytes, *, with_content: bool = True
) -> bytes:
    lines = (
        f"HTTP/1.1 {status.value} {status.phrase}",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(content)}",
        "Connection: close",
    )
    head = "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"
    return head + content if with_content else head
