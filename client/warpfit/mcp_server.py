"""The tools of ``warpfit mcp``, a server of the Model Context Protocol with the official SDK.

An agent calls `Tools.describe_data`, `propose`, `search`, `simplify`, `predict` and `plot`. Data
are named by a path below a root, or written into the call. A call of a tool is one or more calls of
a warpfit client, with its limits, its tenant and its errors; one that is cancelled is cancelled
there, too.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import os
import re
import socket
import stat
import time
import zlib
from argparse import Namespace
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Final, Literal

import anyio
import numpy as np
import uvicorn
from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.transport_security import TransportSecuritySettings

import warpfit
from warpfit.aio import AsyncClient, AsyncUploadedDataset
from warpfit.calls.proposals import for_json
from warpfit.cli.standard_streams import tell
from warpfit.cli.table import ColumnChoice, Table, read_table
from warpfit.client import Client, connect
from warpfit.errors import InvalidArgumentError, ResourceExhaustedError, WarpfitError, require
from warpfit.expressions.language import to_text
from warpfit.expressions.real_numbers import missing_value
from warpfit.parse import function_names
from warpfit.transport.call import Cancellation
from warpfit.transport.connection import token_digest

#: Callers over HTTP that are remembered, and tables.
_MOST_CALLERS: Final = 64
_MOST_TABLES: Final = 4
#: Most values that `predict` returns, points of a plot, and rows of a description.
_MOST_VALUES: Final = 1000
_MOST_POINTS: Final = 5000
_HEAD: Final = 5
#: First bytes of a packed file.
_GZIP: Final = b"\x1f\x8b"

_INSTRUCTIONS: Final = """\
Finds formulas for tables of numbers. Begin with describe_data. Propose many different skeletons at
once with propose: text over the names of the columns, with p1, p2, ... for each constant, such as
"p1*exp(-p2*t) + p3"; a skeleton costs milliseconds. Read the held-out loss and the warnings, not
the loss alone, and propose again. search lets genetic programming propose. Operators are + - * / ^
and comparisons; functions are {functions}."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of ``warpfit mcp``."""

    address: str
    """Address of the warpfit server."""
    connection: dict[str, Any]
    """Further arguments of `warpfit.connect`."""
    root: Path | None
    """Folder below which files may be read; None for none."""
    most_bytes: int
    """Most bytes of a file, when unpacked, and of the data in a call."""
    most_seconds: float
    """Most seconds of a search."""


@dataclass
class Data:
    """A table of numbers.

    Give either path, of a CSV or Parquet file below the server's root, or columns, lists of numbers
    by name, with null for a missing one. target names the column to explain, weights that of the
    rows' weights, ignore columns that are not used. missing="drop" leaves out rows without a value.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}
    path: str | None = None
    columns: dict[str, list[float | None]] | None = None
    target: str | None = None
    weights: str | None = None
    ignore: list[str] = field(default_factory=list)
    missing: Literal["error", "drop"] = "error"


# -------------------------------------------------------------------------------------------- data


def open_below(root: Path, name: str) -> int:
    """Open a file below a folder for reading; return its descriptor.

    No symbolic link is followed on the way, so that no path leads out of the folder, also while
    others change it.

    Raises:
        InvalidArgumentError: if there is no such regular file.
    """
    parts = PurePosixPath(name).parts
    file = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    with suppress(OSError, ValueError):  # a zero byte is a ValueError
        for place, part in enumerate(parts if not {"/", "//", ".."} & {*parts} else ()):
            # Opening a pipe would wait for its writer.
            kind = os.O_DIRECTORY if place < len(parts) - 1 else os.O_NONBLOCK
            above, file = file, os.open(part, os.O_RDONLY | os.O_NOFOLLOW | kind, dir_fd=file)
            os.close(above)
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    with os.scandir(root) as entries:
        known = sorted(e.name for e in entries if e.is_file(follow_symlinks=False))
    raise InvalidArgumentError(
        f"there is no file {name[:80]!r} below the root",
        "BAD_FILE",
        f"Symbolic links are not followed. The root holds {', '.join(known[:20]) or 'no files'}",
        "path",
    )


def read_content(descriptor: int, name: str, most_bytes: int) -> io.BytesIO:
    """Read and close an open file, unpacked; one that is too large is refused before it is read.

    Raises:
        InvalidArgumentError: if it is too large, also as a Parquet file's table, or packed twice.
    """

    def refused(why: str) -> InvalidArgumentError:
        return InvalidArgumentError(f"{name[:80]} {why}", "BAD_FILE", "Give another file", "path")

    with os.fdopen(descriptor, "rb") as raw:
        is_packed = raw.peek(2)[:2] == _GZIP
        try:
            content = (gzip.GzipFile(fileobj=raw) if is_packed else raw).read(most_bytes + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise refused(f"cannot be read: {error}") from error
    if is_packed and content[:2] == _GZIP:
        raise refused("is packed twice")
    size = len(content)
    if content[:4] == b"PAR1" and size <= most_bytes:
        require("pyarrow", "warpfit[arrow]")
        import pyarrow
        from pyarrow.parquet import ParquetFile

        try:
            facts = ParquetFile(io.BytesIO(content)).metadata
        except pyarrow.ArrowException as error:
            raise refused(f"cannot be read: {error}") from error
        size = 8 * facts.num_rows * facts.num_columns
    if size > most_bytes:
        raise refused("is larger than --max-bytes allows")
    return io.BytesIO(content)


def table_of(data: Data, content: io.BytesIO | None, most_bytes: int) -> Table:
    """Read the table of a call from its file's content, or else take its columns.

    Raises:
        InvalidArgumentError: if it is too large, or holds what are no numbers.
    """
    options = Namespace(
        file=data.path or "the data", columns=None, decimal=None,
        target=data.target, weights=data.weights, ignore=data.ignore, missing=data.missing,
    )  # fmt: skip
    if content is not None:
        return read_table(options, content)
    columns = data.columns or {}
    lengths = {len(column) for column in columns.values()}
    what = ""
    if len(lengths) != 1:
        what = "columns differ in length" if lengths else "no column is given"
    elif 8 * len(columns) * max(lengths) > most_bytes:
        what = "the data are larger than --max-bytes allows"
    if what:
        remedy = "Give columns of one length, with fewer rows"
        raise InvalidArgumentError(what, "BAD_DATA", remedy, "data")
    chosen = ColumnChoice.of("the data", list(columns), options)
    used = [list(columns.values())[index] for index in chosen.used]
    numbers = np.array(used, np.float64).reshape(len(used), *lengths).T  # None becomes NaN
    for column in used if data.missing == "error" else ():
        if None in column:
            raise missing_value("the data", column.index(None))
    gaps = np.asarray(np.isnan(numbers).any(axis=1) & (data.missing == "drop"))
    places = [f"row {i + 1}" for i in range(len(numbers))]
    return chosen.table("the data", numbers, places, gaps)


# --------------------------------------------------------------------------------------- the tools


@dataclass
class _Caller:
    """A tenant's client, and how many calls use it."""

    blocking: Client
    client: AsyncClient
    calls: int = 0


class Tools:
    """The tools, as functions of their arguments; each returns what JSON can say, or an image."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._callers: OrderedDict[bytes, _Caller] = OrderedDict()
        self._tables: OrderedDict[tuple[Any, ...], Table] = OrderedDict()

    async def describe_data(self, ctx: Context, data: Data) -> dict[str, Any]:
        """Say what a table holds: rows, and of each column range, mean, gaps, correlation."""
        async with self._caller(ctx):
            table = await self._table(data)
            return await asyncio.to_thread(_description, table)

    async def propose(
        self,
        ctx: Context,
        data: Data,
        skeletons: list[Any],
        loss: str = "mse",
        restarts: int = 8,
        seed: int = 0,
        held_out: float = 0.2,
        missing: Literal["refuse", "drop"] = "refuse",
        units: dict[str, str] | None = None,
        target_unit: str | None = None,
    ) -> dict[str, Any]:
        """Fit skeletons, and say of each how good and how sure its formula is.

        A skeleton is text over the names of the columns with p1, p2, ... for its constants, such as
        "p1*exp(-p2*t) + p3". Each gets an answer: an error with place and remedy, or formula, loss,
        loss on rows held out (drawn at random), evidence, terms, warnings, and how often it was
        tried before. units by column, such as {"v": "m/s"}, switch a check of units on.
        missing="drop" leaves rows out in which a formula is not finite, with a penalty.
        """
        async with self._caller(ctx) as caller, self._uploaded(caller, data, True) as uploaded:
            found = await caller.client.propose(
                uploaded,
                skeletons,
                loss=loss,
                restarts=restarts,
                seed=seed,
                held_out=held_out,
                missing=missing,
                units=units,
                target_unit=target_unit,
                progress=_reporter(ctx),
            )
        best = None if found.best is None else found.index(found.best)
        # Simplifying takes milliseconds a formula, for which other calls would wait.
        answers = await asyncio.to_thread(lambda: [answer.as_dict() for answer in found])
        return {"answers": answers, "best": best}

    async def search(
        self,
        ctx: Context,
        data: Data,
        max_seconds: float = 30.0,
        max_size: int | None = None,
        operators: list[str] | None = None,
        loss: str = "mse",
        units: dict[str, str] | None = None,
        seed: int = 0,
    ) -> dict[str, Any]:
        """Search formulas by genetic programming for at most max_seconds.

        Returns the best formula of each complexity, and which one is chosen.
        """
        require("sklearn", "warpfit[mcp]")
        if not 0.0 < max_seconds <= self._settings.most_seconds:
            most = self._settings.most_seconds
            raise ToolError(f"max_seconds is {max_seconds:g}. Give a time above 0, up to {most:g}")
        if not 0 <= seed < 2**32:
            raise ToolError(f"seed is {seed}. Give a number from 0, below {2**32}")
        async with self._caller(ctx) as caller:
            table = await self._table(data)
            _require_target(table)
            table.require_finite(str(data.target), data.weights)
            cancellation = Cancellation()
            client = caller.blocking.with_cancellation(cancellation)
            given: dict[str, Any] = {"operators": operators} if operators else {}
            report, begun = _reporter(ctx), time.monotonic()

            def run() -> dict[str, Any]:
                return _search(
                    client,
                    table,
                    lambda: report(min(time.monotonic() - begun, max_seconds), max_seconds),
                    max_seconds=max_seconds,
                    generations=10**6,
                    max_size=max_size,
                    loss=loss,
                    units=units,
                    random_state=seed,
                    **given,
                )

            try:
                return await asyncio.to_thread(run)
            finally:
                cancellation.cancel()

    async def simplify(
        self, ctx: Context, data: Data, expressions: list[str], tolerance: float = 0.01
    ) -> dict[str, Any]:
        """Shorten formulas with their numbers, as far as no loss grows by more than tolerance."""
        async with self._caller(ctx) as caller, self._uploaded(caller, data) as uploaded:
            found = await caller.client.simplify(uploaded, expressions, tolerance=tolerance)
        formulas = [
            {
                "expression": to_text(program, found.names),
                "latex": program.latex(found.names),
                "loss": found.loss[i],
                "initial_loss": found.initial_loss[i],
            }
            for i, program in enumerate(found.programs)
        ]
        return for_json({"formulas": formulas})

    async def predict(
        self,
        ctx: Context,
        data: Data,
        expression: str,
        parameters: list[float] | None = None,
        start: int = 0,
        rows: int = 100,
    ) -> dict[str, Any]:
        """Evaluate a formula in rows of a table: at most 1,000 values, and their range over all."""
        async with self._caller(ctx) as caller:
            table = await self._table(data)
            count = len(table.columns)
            stop = min(count, max(start, 0) + min(rows, _MOST_VALUES))
            if not 0 <= start < stop:
                raise ToolError(f"the table has {count} rows. Give start and rows within them")
            async with self._uploaded(caller, data) as uploaded:
                ask = (uploaded, expression, parameters)
                part = await caller.client.run(*ask, values=True, rows=(start, stop))
                loss = None if table.target is None else "mse"
                whole = await caller.client.run(*ask, loss=loss, reductions=True)
        shape = whole.reductions
        assert part.values is not None and shape is not None
        names = ("min", "mean", "max", "non_finite")
        found: dict[str, Any] = {name: getattr(shape, name)[0] for name in names}
        if whole.losses is not None:
            found["mse"] = whole.losses[0]
        return for_json(found | {"start": start, "values": part.values[:, 0]})

    async def plot(
        self,
        ctx: Context,
        data: Data,
        expression: str,
        parameters: list[float] | None = None,
        over: str | None = None,
    ) -> Any:
        """Draw a formula as PNG: its values over the target, or both over a column."""
        require("matplotlib", "warpfit[mcp]")
        async with self._caller(ctx) as caller:
            table = await self._table(data)
            target = _require_target(table)
            if over is not None and over not in table.names:
                raise ToolError(f"there is no column {over!r}. Use {', '.join(table.names)}")
            async with self._uploaded(caller, data) as uploaded:
                answer = await caller.client.run(uploaded, expression, parameters, values=True)
            assert answer.values is not None
            step = -(-len(target) // _MOST_POINTS)
            column = None if over is None else table.columns[::step, table.names.index(over)]
            picture = await asyncio.to_thread(
                _drawn, target[::step], answer.values[::step, 0], column, over, expression
            )
            return Image(data=picture, format="png")

    # ----------------------------------------------------------------------------- what tools share

    @asynccontextmanager
    async def _caller(self, ctx: Context) -> AsyncIterator[_Caller]:
        """Yield the client of who calls; errors of warpfit become those of the tool.

        Over HTTP this is the tenant of the request's bearer token, over stdio that of this process.
        A caller that the server does not know reads no file.
        """
        connection = dict(self._settings.connection)
        headers = ctx.headers
        if headers is not None:
            scheme, _, token = headers.get("authorization", "").partition(" ")
            connection["token"] = token.strip() if scheme.lower() == "bearer" else ""
        key = token_digest(connection.get("token") or "")
        try:
            caller = self._callers.get(key)
            if caller is None:
                idle = [known for known, each in self._callers.items() if not each.calls]
                if len(self._callers) >= _MOST_CALLERS:
                    if not idle:
                        raise ResourceExhaustedError(
                            "too many callers are at work", "BUSY", "Call again a little later"
                        )
                    await self._callers.pop(idle[0]).client.close()
                blocking = connect(self._settings.address, **connection)
                caller = _Caller(blocking, AsyncClient(blocking))
                await caller.client.info(timeout=30.0)
                caller = self._callers.setdefault(key, caller)
            self._callers.move_to_end(key)
            caller.calls += 1
            try:
                yield caller
            finally:
                caller.calls -= 1
        except WarpfitError as error:
            text = re.sub(r"--(?=[a-z])", "", str(error))  # flags of commands are arguments here
            raise ToolError(f"{error.reason}: {text}") from error

    async def _table(self, data: Data) -> Table:
        """Return the table of a call; files that have not changed are remembered."""
        settings = self._settings
        if (data.path is None) == (data.columns is None):
            raise ToolError("Give either the path of a file or columns: data={path: ...}")
        if data.path is None:
            return await asyncio.to_thread(table_of, data, None, settings.most_bytes)
        if settings.root is None:
            raise InvalidArgumentError(
                "this server reads no files",
                "NO_DATA_ROOT",
                "Give columns, or start it with --root DIR",
                "path",
            )
        descriptor = open_below(settings.root, data.path)
        facts = os.fstat(descriptor)
        given = (data.target, data.weights, *data.ignore, data.missing)
        key = (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, *given)
        if key in self._tables:
            os.close(descriptor)
            self._tables.move_to_end(key)
            return self._tables[key]
        most = settings.most_bytes
        content = await asyncio.to_thread(read_content, descriptor, data.path, most)
        table = await asyncio.to_thread(table_of, data, content, most)
        self._tables[key] = table
        while len(self._tables) > _MOST_TABLES:
            self._tables.popitem(last=False)
        return table

    @asynccontextmanager
    async def _uploaded(
        self, caller: _Caller, data: Data, shuffled: bool = False
    ) -> AsyncIterator[AsyncUploadedDataset]:
        """Upload a table, on request with its rows in a random order, always the same."""
        table = await self._table(data)
        order = (
            np.random.default_rng(0).permutation(len(table.columns)) if shuffled else slice(None)
        )
        weights = None if table.weights is None else table.weights[order]
        async with await caller.client.upload(
            table.columns[order],
            None if table.target is None else table.target[order],
            weights,
            names=table.names,
            dtype="float64",
        ) as uploaded:
            yield uploaded


def _require_target(table: Table) -> np.ndarray[Any, Any]:
    if table.target is None:
        raise ToolError("the data have no target. Name a column: data={..., target: ...}")
    return table.target


def _reporter(ctx: Context) -> Callable[[float, float], None]:
    """Return what tells the caller of progress, from any thread; progress only grows."""
    loop, last = asyncio.get_running_loop(), -1.0

    def report(done: float, total: float) -> None:
        nonlocal last
        if done > last:
            last = done
            asyncio.run_coroutine_threadsafe(ctx.report_progress(done, total), loop)

    return report


@np.errstate(all="ignore")
def _description(table: Table) -> dict[str, Any]:
    def facts(column: np.ndarray[Any, Any]) -> dict[str, Any]:
        finite = column[np.isfinite(column)]
        found: dict[str, Any] = {"non_finite": len(column) - len(finite)}
        if len(finite):
            found |= {"least": finite.min(), "greatest": finite.max(), "mean": finite.mean()}
            found |= {"deviation": finite.std(), "distinct": len(np.unique(finite))}
        return found

    columns = []
    for name, column in zip(table.names, table.columns.T, strict=True):
        columns.append({"name": name, **facts(column)})
        if table.target is not None and len(column) > 1:
            columns[-1]["correlation"] = np.corrcoef(column, table.target)[0, 1]
    described: dict[str, Any] = {"rows": len(table.columns), "columns": columns}
    if table.target is not None:
        described["target"] = facts(table.target)
    return for_json(described | {"first_rows": table.columns[:_HEAD]})


def _search(
    client: Client, table: Table, report: Callable[[], None], **settings: Any
) -> dict[str, Any]:
    from warpfit.sklearn import SymbolicRegressor

    model = SymbolicRegressor(callback=lambda *_: report(), **settings)
    model.connected_client = client
    model.variable_names = table.names
    model.fit(table.columns, _require_target(table), table.weights)
    front = [
        {
            "complexity": equation.complexity,
            "loss": equation.loss,
            "held_out_r2": equation.r2_held_out,
            "description_length": equation.description_length,
            "expression": equation.equation,
        }
        for equation in model.front_
    ]
    found = {"expression": model.expression_, "generations": model.n_iter_, "front": front}
    return for_json(found)


def _drawn(
    target: np.ndarray[Any, Any],
    values: np.ndarray[Any, Any],
    column: np.ndarray[Any, Any] | None,
    over: str | None,
    expression: str,
) -> bytes:
    from matplotlib.figure import Figure

    from warpfit.sklearn.equations import plot_fit

    figure = Figure(figsize=(6, 4.5), layout="tight")
    axes = figure.subplots()
    if column is None:
        plot_fit(target, values, axes)
    else:
        axes.plot(column, target, ".", alpha=0.5, label="target")
        axes.plot(column, values, ".", label="formula")
        axes.set(xlabel=str(over).replace("$", r"\$"))
        axes.legend()
    axes.set_title(expression[:80].replace("$", r"\$"), fontsize=9)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=100)
    return picture.getvalue()


# ----------------------------------------------------------------------------------- the transports


class _StrictServer(MCPServer):  # type: ignore[misc]
    """The SDK's server, which refuses arguments that a tool does not have: a slip has no effect."""

    async def call_tool(self, name: str, arguments: dict[str, Any], context: Any = None) -> Any:
        """Call a tool; see `mcp.server.mcpserver.MCPServer`."""
        for tool in await self.list_tools():
            known = tool.input_schema["properties"]
            if tool.name == name and (odd := [each for each in arguments if each not in known]):
                raise ToolError(f"{name} has no argument {odd[0][:80]!r}. Use {', '.join(known)}")
        return await super().call_tool(name, arguments, context)


def make_server(settings: Settings) -> MCPServer:
    """Return the SDK's server with all tools."""
    tools = Tools(settings)
    instructions = _INSTRUCTIONS.format(functions=", ".join(function_names()))
    server = _StrictServer(
        "warpfit", instructions=instructions, version=warpfit.__version__, log_level="WARNING"
    )
    for tool in (
        *(tools.describe_data, tools.propose, tools.search),
        *(tools.simplify, tools.predict, tools.plot),
    ):
        server.add_tool(tool)
    return server


def serve_stdio(settings: Settings) -> None:
    """Serve the process that has started this one, until it closes the pipe."""
    make_server(settings).run("stdio")


def serve_http(
    settings: Settings, host: str, port: int, hosts: Sequence[str], origins: Sequence[str]
) -> None:
    """Serve streamable HTTP at ``/mcp``.

    Args:
        settings: of the tools.
        host: address to listen on.
        port: 0 takes a free one.
        hosts: names that a request's Host header may have, beside those of loopback.
        origins: web pages that may call; requests with another Origin header are refused.
    """
    names = ["127.0.0.1", "localhost", "[::1]", *hosts]
    security = TransportSecuritySettings(
        enable_dns_rebinding_protection=True,
        allowed_hosts=[form for name in names for form in (name, f"{name}:*")],
        allowed_origins=list(origins),
    )
    app = make_server(settings).streamable_http_app(transport_security=security, host=host)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise InvalidArgumentError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            "BAD_ADDRESS",
            "Choose another --port",
        ) from error
    with listener:
        shown = f"[{host}]" if ":" in host else host
        tell(f"warpfit mcp listening on http://{shown}:{listener.getsockname()[1]}/mcp")
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        anyio.run(server.serve, [listener])
