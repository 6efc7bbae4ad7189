"""The HTTP port that Prometheus reads metrics from: one thread, few connections, short timeouts.

Connecting needs no credentials. So a connection costs no thread, and no client can keep the server
waiting: when there are too many connections, the oldest one is closed, because a scrape ends long
before it would be the oldest.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

from warpfit.errors import UnavailableError

_LOG: Final = logging.getLogger("warpfit.metrics")
_MOST_CONNECTIONS: Final = 32
#: Most bytes of the lines of a request.
_MOST_BYTES: Final = 16 << 10
#: Seconds within which a request must come and its answer be read.
_SECONDS: Final = 5.0
#: Returns type and content of the page for a request's ``Accept`` header.
Render = Callable[[str], tuple[str, bytes]]


class MetricsPort:
    """Serves one page over HTTP, which the port's thread renders; port 0 takes a free one.

    Raises:
        UnavailableError: if the port is taken, or the host is no address of this machine.
    """

    def __init__(self, render: Render, host: str, port: int) -> None:
        self._render = render
        self._open: dict[asyncio.StreamWriter, None] = {}
        self._loop = asyncio.new_event_loop()
        try:
            self._server = self._loop.run_until_complete(
                asyncio.start_server(self._serve, host, port, limit=_MOST_BYTES)
            )
        except (OSError, UnicodeError) as error:  # UnicodeError of a host that cannot be a name
            self._loop.close()
            raise UnavailableError(
                f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}",
                "PORT_IN_USE",
                "Choose another --metrics-port or --metrics-host",
            ) from error
        self.port: Final = int(self._server.sockets[0].getsockname()[1])
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
                writer.write(_answer(request, self._render))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            _LOG.debug("a client of the metrics port was too slow, sent too much, or has gone")
        finally:
            self._open.pop(writer, None)
            writer.transport.abort()


def _answer(request: bytes, render: Render) -> bytes:
    """Answer a connection's only HTTP request, given with the empty line at its end."""
    first, *lines = request.decode("latin-1").split("\r\n")
    method, _, rest = first.partition(" ")
    path = rest.partition(" ")[0].partition("?")[0]
    if path != "/metrics":
        return _response(HTTPStatus.NOT_FOUND, "text/plain", b"the metrics are at /metrics\n")
    if method not in ("GET", "HEAD"):
        return _response(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b"use GET\n")
    headers = {name.lower(): value for name, _, value in (line.partition(":") for line in lines)}
    try:
        content_type, content = render(headers.get("accept", "").strip())
    except Exception:
        _LOG.exception("the metrics could not be collected")
        return _response(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", b"see the log\n")
    return _response(HTTPStatus.OK, content_type, content, has_body=method == "GET")


def _response(
    status: HTTPStatus, content_type: str, content: bytes, *, has_body: bool = True
) -> bytes:
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\n"
        f"Content-Type: {content_type}\r\n"
        f"Content-Length: {len(content)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (content if has_body else b"")
