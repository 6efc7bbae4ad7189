"""``warpfit mcp``: tools for agents, by the Model Context Protocol."""

from __future__ import annotations

import argparse
import ipaddress
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from warpfit.cli.shared import CommandParser
from warpfit.cli.table import seconds, whole_from
from warpfit.embedded import server_at
from warpfit.errors import InvalidArgumentError, require
from warpfit.transport.connection import add_flags, from_flags


def main(words: Sequence[str]) -> int:
    """Serve tools over stdio, or over HTTP, until the reader or an interrupt ends it."""
    options = _parser().parse_args(words)
    require("mcp", "warpfit[mcp]")
    from warpfit.mcp_server import Settings, serve_http, serve_stdio

    if options.root is not None and not options.root.is_dir():
        raise InvalidArgumentError(
            f"{options.root} is no folder", "BAD_FILE", "Name a folder with files of data", "root"
        )
    is_alone = options.host == "localhost"
    with suppress(ValueError):  # it is a name
        is_alone |= ipaddress.ip_address(options.host).is_loopback
    if options.http and not is_alone and not options.allow_host:
        raise InvalidArgumentError(
            f"{options.host} is no address of this machine alone",
            "BAD_SETTING",
            "Name the host that callers write with --allow-host, so that other pages' requests are "
            "refused, and put a proxy with TLS in front",
            "host",
        )
    arguments = from_flags(options) if options.address else {"tls": False}
    with server_at(options.address) as address:
        settings = Settings(
            address=address,
            connection=arguments,
            root=options.root,
            most_bytes=options.max_bytes,
            most_seconds=options.max_seconds,
        )
        if options.http:
            serve_http(
                settings, options.host, options.port, options.allow_host, options.allow_origin
            )
        else:
            serve_stdio(settings)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="warpfit mcp",
        description="Offer tools to agents by the Model Context Protocol: describe_data, propose, "
        "search, simplify, predict and plot. Over stdio unless --http is given.",
        epilog="example: warpfit mcp --root ~/measurements",
    )
    add = parser.add_argument
    add("--root", type=Path, metavar="DIR", help="folder whose files of data may be read")
    add("--address", default=os.environ.get("WARPFIT_ADDRESS"), metavar="HOST:PORT",
        help="default: WARPFIT_ADDRESS, or start a server here")  # fmt: skip
    add("--max-bytes", type=whole_from(1), default=1 << 28, metavar="N",
        help="largest file, when unpacked (default: 268435456)")  # fmt: skip
    add("--max-seconds", type=seconds, default=600.0, metavar="SECONDS",
        help="longest search (default: 600)")  # fmt: skip
    group = parser.add_argument_group(
        "HTTP", "callers bring bearer tokens of their own, which are passed on to the server"
    )
    add = group.add_argument
    add("--http", action="store_true", help="streamable HTTP at http://HOST:PORT/mcp")
    add("--host", default="127.0.0.1", help="default: 127.0.0.1")
    add("--port", type=whole_from(0), default=8000, help="default: 8000; 0 is a free one")
    add("--allow-host", action="append", default=[], metavar="NAME",
        help="further name in the Host header of requests; may be repeated")  # fmt: skip
    add("--allow-origin", action="append", default=[], metavar="ORIGIN",
        help="web page that may call, such as http://localhost:3000; may be repeated")  # fmt: skip
    add_flags(parser)
    return parser
