"""The tools of ``warpfit mcp``, a server of the Model Context Protocol with the official SDK.

An agent calls `Tools.describe_data`, `propose`, `search`, `simplify`, `predict` and `plot`. Data
are named by a path below a root, or written into the call. A call of a tool is one or more calls of
a warpfit client, with its limits, its tenant and its errors; one that is cancelled is cancelled
there, too.
"""

from __future__ import annotations

import asyncio
import copy
import gzip
import io
import json
import math
import os
import re
import socket
import stat
import sys
import time
import zlib
from argparse import Namespace
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

import anyio
import numpy as np
import uvicorn
from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.transport_security import TransportSecuritySettings
from mcp_types import CallToolResult, TextContent
from pydantic import Field, ValidationError, WithJsonSchema

import warpfit
from warpfit.aio import AsyncClient, AsyncUploadedDataset
from warpfit.calls.proposals import Proposal, Proposals, for_json
from warpfit.cli.shared import tell
from warpfit.cli.table import ColumnChoice, Table, table_of_file
from warpfit.client import Client, connect
from warpfit.display import shortened
from warpfit.errors import (
    InvalidArgumentError,
    ResourceExhaustedError,
    WarpfitError,
    did_you_mean,
    nearest_first,
    require,
)
from warpfit.expressions.language import DIGITS, to_latex, to_text
from warpfit.expressions.real_numbers import missing_value
from warpfit.parse import function_names
from warpfit.transport.call import Cancellation
from warpfit.transport.connection import token_digest

T = TypeVar("T")
#: Callers over HTTP that are remembered, and tables.
_MOST_CALLERS: Final = 64
_MOST_TABLES: Final = 4
#: Threads for short work, such as reading a table, and for searches.
_SHORT_THREADS: Final = 8
_SEARCH_THREADS: Final = 8
#: Searches of a caller at a time, other calls that are under way, and those that wait for these.
_MOST_SEARCHES: Final = 2
_MOST_CALLS: Final = 8
_MOST_WAITING: Final = 32
#: Connections over HTTP at a time.
_MOST_CONNECTIONS: Final = 512
#: Part of this process's time that a caller over HTTP may take, what it may take at once in
#: seconds, the longest that a request waits for its part, and what requests and bytes are taken to
#: need: measured on one core, tables in JSON.
_SHARE: Final = 0.25
_BURST_SECONDS: Final = 0.25
_LONGEST_WAIT: Final = 10.0
_REQUEST_SECONDS: Final = 0.006
_BYTE_SECONDS: Final = 0.3e-6
#: Seconds after which a thread lets others run that wait for Python's lock, such as that of HTTP.
_SWITCH_SECONDS: Final = 0.0005
#: Errors that `propose` explains in full.
_MOST_ERRORS: Final = 20
#: Columns that are described, and numbers that can be drawn.
_MOST_COLUMNS: Final = 500
_FARTHEST_POINT: Final = 1e150
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
    """A table of numbers: give either path or columns."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}
    path: Annotated[
        str | None, Field(description="CSV or Parquet file, relative to the server's root")
    ] = None
    columns: Annotated[
        dict[str, list[float | None]] | None,
        Field(description="lists of numbers of one length by name; null is a missing number"),
    ] = None
    target: Annotated[str | None, Field(description="name of the column to explain")] = None
    weights: Annotated[str | None, Field(description="name of the column of rows' weights")] = None
    ignore: Annotated[list[str], Field(description="names of columns that are not used")] = field(
        default_factory=list
    )
    missing: Annotated[
        Literal["refuse", "drop"],
        Field(description='rows without a value: refuse the table, or "drop" them'),
    ] = "refuse"


#: Arguments that several tools have.
_Table = Annotated[Data, Field(description="the table, such as {path: 'a.csv', target: 'y'}")]
_Loss = Annotated[
    str, Field(description="loss to minimise: mse, mae, rmse, huber, ..., or text of f and y")
]
_Units = Annotated[
    dict[str, str] | None, Field(description='unit of each column, such as {"v": "m/s"}')
]
_Expression = Annotated[
    str, Field(description="formula as text over the names of the columns, with p1, p2, ...")
]
_Constants = Annotated[
    list[float] | None, Field(description="values of p1, p2, ..., if the formula has them")
]
_Skeletons = Annotated[
    list[Any],
    Field(description="formulas as text over the names of the columns, with p1, p2, ... for each "
          "constant, such as 'p1*exp(-p2*t) + p3'"),
    WithJsonSchema({"type": "array", "items": {"type": "string"}}),
]  # fmt: skip

#: Remedies of errors by their reasons, in words of these tools, not of the client of Python.
_REMEDIES: Final = {
    "TARGET_MISSING": "Name the column to explain: data={..., target: ...}",
    "UNKNOWN_EXPRESSION_TYPE": "Give text, such as 'p1*x + p2'",
    "PARAMETER_OUT_OF_RANGE": "Give a number for each of p1, p2, ... in parameters, or write "
    "numbers into the expression",
    "LENGTH_MISMATCH": "Give a number for each of p1, p2, ... in parameters",
    "PARAMETERS_LEFT": "Write the fitted numbers into the expression: propose returns them",
}


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
        did_you_mean(
            name,
            known,
            "Symbolic links are not followed. The root holds "
            f"{', '.join(known[:20]) or 'no files'}",
        ),
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
        target=data.target, weights=data.weights, ignore=data.ignore,
        missing=data.missing,
    )  # fmt: skip
    if content is not None:
        return table_of_file(options, content)
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
    given = list(columns.values())
    used = [given[index] for index in chosen.used]
    numbers = np.array(used, np.float64).reshape(len(used), *lengths).T  # None becomes NaN
    for column in used if data.missing == "refuse" else ():
        if None in column:
            raise missing_value("the data", column.index(None))
    gaps = np.asarray(np.isnan(numbers).any(axis=1) & (data.missing == "drop"))
    places = [f"row {i + 1}" for i in range(len(numbers))]
    return chosen.table("the data", numbers, places, gaps)


# --------------------------------------------------------------------------------------- the tools


@dataclass
class _Caller:
    """A tenant's client, and the calls that use it."""

    blocking: Client
    client: AsyncClient
    calls: int = 0
    """Calls that are under way or wait."""
    searches: int = 0
    """Searches whose threads have not ended."""
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MOST_CALLS))
    """Turns of the calls that are no searches."""


def _busy(what: str, remedy: str) -> ResourceExhaustedError:
    return ResourceExhaustedError(what, "BUSY", remedy)


class Tools:
    """The tools, as functions of their arguments; each returns what JSON can say, or an image."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._callers: OrderedDict[bytes, _Caller] = OrderedDict()
        self._short = ThreadPoolExecutor(_SHORT_THREADS, "short")
        self._searching = ThreadPoolExecutor(_SEARCH_THREADS, "search")
        self._searches = 0
        self._tables: OrderedDict[tuple[Any, ...], Table] = OrderedDict()

    async def describe_data(self, ctx: Context, data: _Table) -> dict[str, Any]:
        """Describe a table: rows, and for each column range, mean, gaps and correlation."""
        async with self._caller(ctx):
            table = await self._table(data)
            return await self._soon(lambda: _description(table, data.target))

    async def propose(
        self,
        ctx: Context,
        data: _Table,
        skeletons: _Skeletons,
        loss: _Loss = "mse",
        restarts: Annotated[int, Field(description="starts that are drawn for each fit")] = 8,
        seed: Annotated[int, Field(description="of the starts")] = 0,
        held_out: Annotated[
            float, Field(description="part of the rows, drawn at random, that no fit sees")
        ] = 0.2,
        missing: Annotated[
            Literal["refuse", "drop"],
            Field(description='"drop" leaves out rows in which a formula is not finite, with a '
                  "penalty"),
        ] = "refuse",
        units: _Units = None,
        target_unit: Annotated[str | None, Field(description="unit of the target")] = None,
        details: Annotated[
            int, Field(description="how many of the best answers are told in full", ge=0, le=50)
        ] = 10,
    ) -> dict[str, Any]:  # fmt: skip
        """Fit skeletons, and say of each how good and how sure its formula is.

        answers has the best ones, best first, with formula, loss, loss on rows held out, evidence,
        terms, warnings, and how often each was tried before; errors says what is wrong with others,
        with place and remedy; others has a line for each of the rest. index counts skeletons from
        0, and best is the index of the best one.
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
            # Simplifying takes milliseconds a formula, for which other calls would wait.
            return await self._soon(lambda: _proposed(found, details))

    async def search(
        self,
        ctx: Context,
        data: _Table,
        max_seconds: Annotated[float, Field(description="seconds of the search")] = 30.0,
        max_size: Annotated[int | None, Field(description="most tokens of a formula")] = None,
        operators: Annotated[
            list[str] | None,
            Field(description='such as ["+", "*", "exp"]; null for usual ones'),
        ] = None,
        loss: _Loss = "mse",
        units: _Units = None,
        seed: Annotated[int, Field(description="of the search")] = 0,
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
        async with self._caller(ctx, searches=True) as caller:
            self._require_room(caller)  # before the table is read
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
                return await self._search(caller, run)
            finally:
                cancellation.cancel()

    async def simplify(
        self,
        ctx: Context,
        data: _Table,
        expressions: Annotated[list[str], Field(description="formulas with their numbers")],
        tolerance: Annotated[float, Field(description="most part by which a loss may grow")] = 0.01,
    ) -> dict[str, Any]:
        """Shorten formulas with their numbers, as far as no loss grows by more than tolerance."""
        async with self._caller(ctx) as caller, self._uploaded(caller, data) as uploaded:
            found = await caller.client.simplify(uploaded, expressions, tolerance=tolerance)
        formulas = [
            {
                "expression": to_text(program, found.names, DIGITS),
                "latex": to_latex(program, found.names, DIGITS),
                "loss": found.loss[i],
                "initial_loss": found.initial_loss[i],
            }
            for i, program in enumerate(found.programs)
        ]
        return for_json({"formulas": formulas}, DIGITS)

    async def predict(
        self,
        ctx: Context,
        data: _Table,
        expression: _Expression,
        parameters: _Constants = None,
        start: Annotated[int, Field(description="first row, from 0")] = 0,
        rows: Annotated[int, Field(description="number of rows, at most 1000")] = 100,
    ) -> dict[str, Any]:
        """Evaluate a formula in rows of a table: at most 1,000 values, and their range over all.

        To predict outside of the data, give new numbers in data: {columns: {...}}.
        """
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
        data: _Table,
        expression: _Expression,
        parameters: _Constants = None,
        over: Annotated[str | None, Field(description="column of the horizontal axis")] = None,
    ) -> Any:
        """Draw a formula as PNG: its values over the target, or both over a column."""
        require("matplotlib", "warpfit[mcp]")
        async with self._caller(ctx) as caller:
            table = await self._table(data)
            target = _require_target(table)
            if over is not None and over not in table.names:
                remedy = did_you_mean(over, table.names, f"Use {nearest_first(over, table.names)}")
                raise ToolError(f"there is no column {over!r}. {remedy}")
            async with self._uploaded(caller, data) as uploaded:
                answer = await caller.client.run(uploaded, expression, parameters, values=True)
            assert answer.values is not None
            step = -(-len(target) // _MOST_POINTS)
            column = None if over is None else table.columns[::step, table.names.index(over)]
            drawn = target[::step], answer.values[::step, 0], column, over, expression
            picture = await self._soon(lambda: _drawn(*drawn))
            return Image(data=picture, format="png")

    # ----------------------------------------------------------------------------- what tools share

    async def _soon(self, work: Callable[[], T]) -> T:
        """Do short work in a thread, for which no search has to end."""
        return await asyncio.get_running_loop().run_in_executor(self._short, work)

    def _require_room(self, caller: _Caller) -> None:
        """Raise if no further search of a caller may run."""
        if caller.searches >= _MOST_SEARCHES:
            raise _busy(
                f"{caller.searches} searches of this caller are under way",
                "Call search again when one of them has ended",
            )
        if self._searches >= _SEARCH_THREADS:
            raise _busy("too many searches are under way", "Call search again a little later")

    async def _search(self, caller: _Caller, run: Callable[[], T]) -> T:
        """Run a search in a thread; it counts until the thread ends, also after it is cancelled."""
        loop = asyncio.get_running_loop()
        self._require_room(caller)

        def ended(_: Any) -> None:
            caller.searches -= 1
            caller.calls -= 1
            self._searches -= 1

        caller.searches += 1
        caller.calls += 1  # so that its client is not closed before
        self._searches += 1
        work = self._searching.submit(run)
        work.add_done_callback(lambda done: loop.call_soon_threadsafe(ended, done))
        return await asyncio.wrap_future(work)

    @asynccontextmanager
    async def _caller(self, ctx: Context, *, searches: bool = False) -> AsyncIterator[_Caller]:
        """Yield the client of who calls; errors of warpfit become those of the tool.

        Over HTTP this is the tenant of the request's bearer token, over stdio that of this process.
        A caller that the server does not know reads no file. A caller's calls, but for those that
        search, wait for one another if there are many.
        """
        connection = dict(self._settings.connection)
        headers = ctx.headers
        if headers is not None:
            scheme, _, token = headers.get("authorization", "").partition(" ")
            connection["token"] = token.strip() if scheme.lower() == "bearer" else ""
        try:
            # The server is asked about a token when it first comes.
            key = token_digest(connection.get("token") or "")
            caller = self._callers.get(key)
            if caller is None:
                idle = [known for known, each in self._callers.items() if not each.calls]
                if len(self._callers) >= _MOST_CALLERS:
                    if not idle:
                        raise _busy("too many callers are at work", "Call again a little later")
                    await self._callers.pop(idle[0]).client.close()
                blocking = connect(self._settings.address, **connection)
                made = _Caller(blocking, AsyncClient(blocking))
                try:
                    await made.client.info(timeout=30.0)
                    caller = self._callers.setdefault(key, made)
                finally:
                    if caller is not made:  # it is not known, or another call has come first
                        await made.client.close()
            self._callers.move_to_end(key)
            if caller.calls >= _MOST_CALLS + _MOST_WAITING:
                raise _busy(
                    f"{caller.calls} calls of this caller are under way or wait",
                    "Wait for answers before further calls",
                )
            caller.calls += 1
            try:
                async with nullcontext() if searches else caller.turns:
                    yield caller
            finally:
                caller.calls -= 1
        except WarpfitError as error:
            told = _in_words_of_tools(error)
            raise ToolError(f"{error.reason}: {told}") from error

    def knows(self, token: bytes) -> bool:
        """Return whether the server has accepted a token, whose digest this is."""
        return token in self._callers

    async def _table(self, data: Data) -> Table:
        """Return the table of a call; files that have not changed are remembered."""
        settings = self._settings
        if (data.path is None) == (data.columns is None):
            raise ToolError("Give either the path of a file or columns: data={path: ...}")
        if data.path is None:
            return await self._soon(lambda: table_of(data, None, settings.most_bytes))
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
        path = data.path
        content = await self._soon(lambda: read_content(descriptor, path, most))
        table = await self._soon(lambda: table_of(data, content, most))
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
        columns = (table.columns, table.target, table.weights)

        def rows() -> Sequence[Any]:
            order = np.random.default_rng(0).permutation(len(table.columns))
            return [None if column is None else column[order] for column in columns]

        sent = await self._soon(rows) if shuffled else columns
        async with await caller.client.upload(
            *sent, names=table.names, dtype="float64"
        ) as uploaded:
            yield uploaded


def _require_target(table: Table) -> np.ndarray[Any, Any]:
    if table.target is None:
        raise ToolError("the data have no target. Name a column: data={..., target: ...}")
    return table.target


def _reporter(ctx: Context) -> Callable[[float, float], None]:
    """Return a function that reports progress to the caller from any thread; it only grows."""
    loop, last = asyncio.get_running_loop(), -1.0

    def report(done: float, total: float) -> None:
        nonlocal last
        if done > last:
            last = done
            asyncio.run_coroutine_threadsafe(ctx.report_progress(done, total), loop)

    return report


def _in_words_of_tools(error: WarpfitError) -> str:
    """Return the text of an error with a remedy that a caller of tools can follow."""
    if error.reason in _REMEDIES:
        error = copy.copy(error)
        error.remedy = _REMEDIES[error.reason]
    return re.sub(r"--(?=[a-z])", "", str(error))  # flags of commands are arguments here


def _proposed(found: Proposals, details: int) -> dict[str, Any]:
    """Return the answers to skeletons as a caller reads them; see `Tools.propose`."""
    place = {id(answer): index for index, answer in enumerate(found)}
    ranked, wrong = found.ranked(), [answer for answer in found if answer.error is not None]

    def line(answer: Proposal) -> str:
        shown = f"{place[id(answer)]}: {shortened(answer.expression or answer.skeleton, 100)} | "
        if answer.error is not None:
            return f"{shown}{answer.error.reason}"
        numbers = {
            "loss": answer.loss,
            "held out": answer.held_out_loss,
            "description length": answer.description_length,
        }
        told = [f"{name} {value:.5g}" for name, value in numbers.items() if value == value]
        return shown + (", ".join(told) or "not finite")

    def record(answer: Proposal) -> dict[str, Any]:
        told = answer.as_dict(DIGITS)
        if answer.error is not None:
            told["error"]["message"] = _in_words_of_tools(answer.error)
        return {"index": place[id(answer)], **told}

    best = [answer for answer in ranked if answer.error is None]
    others = [*best[details:], *wrong[_MOST_ERRORS:]]
    told = {
        "best": None if found.best is None else place[id(found.best)],
        "answers": [record(answer) for answer in best[:details]],
        "errors": [record(answer) for answer in wrong[:_MOST_ERRORS]],
        "others": [line(answer) for answer in others],
    }
    return {name: value for name, value in told.items() if value or name in ("best", "answers")}


@np.errstate(all="ignore")
def _description(table: Table, target: str | None) -> dict[str, Any]:
    def facts(column: np.ndarray[Any, Any]) -> dict[str, Any]:
        finite = column[np.isfinite(column)]
        found: dict[str, Any] = {"non_finite": len(column) - len(finite)}
        if len(finite):
            found |= {"least": finite.min(), "greatest": finite.max(), "mean": finite.mean()}
            found |= {"deviation": finite.std(), "distinct": len(np.unique(finite))}
        return found

    columns = []
    for name, column in list(zip(table.names, table.columns.T, strict=True))[:_MOST_COLUMNS]:
        columns.append({"name": name, **facts(column)})
        if table.target is not None and len(column) > 1:
            columns[-1]["correlation"] = np.corrcoef(column, table.target)[0, 1]
    described: dict[str, Any] = {"rows": len(table.columns), "columns": columns}
    if table.left_out:
        described["rows_left_out"] = f"{table.left_out} rows lack a value"
    if len(table.names) > len(columns):
        described["columns_left_out"] = len(table.names) - len(columns)
    first = [*zip(table.names[: len(columns)], table.columns.T, strict=False)]
    if table.target is not None:
        described["target"] = {"name": target, **facts(table.target)}
        first.append((str(target), table.target))
    described["first_rows"] = {name: column[:_HEAD] for name, column in first}
    return for_json(described, DIGITS)


def _search(
    client: Client, table: Table, report: Callable[[], None], **settings: Any
) -> dict[str, Any]:
    from warpfit.sklearn import SymbolicRegressor

    # As many digits as `Tools.propose` tells: fewer would count less in a description length.
    model = SymbolicRegressor(callback=lambda *_: report(), digits=DIGITS, **settings)
    model.connected_client = client
    model.variable_names = table.names
    model.fit(table.columns, _require_target(table), table.weights)
    front = [
        {
            "complexity": equation.complexity,
            "loss": equation.loss,
            "held_out_r2": equation.r2_held_out,
            "description_length": equation.description_length,
            "surprise": equation.surprise,
            "expression": equation.equation,
        }
        for equation in model.front_
    ]
    found = {"expression": model.expression_, "generations": model.n_iter_, "front": front}
    return for_json(found, DIGITS)


def _drawn(
    target: np.ndarray[Any, Any],
    values: np.ndarray[Any, Any],
    column: np.ndarray[Any, Any] | None,
    over: str | None,
    expression: str,
) -> bytes:
    from matplotlib.figure import Figure

    from warpfit.sklearn.equations import plot_fit

    def drawable(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.where(np.abs(numbers) < _FARTHEST_POINT, numbers, np.nan)  # axes overflow beyond

    target, values = drawable(target), drawable(values)
    column = None if column is None else drawable(column)
    figure = Figure(figsize=(6, 4.5), layout="tight")
    axes = figure.subplots()
    if column is None:
        plot_fit(target, values, axes)
    else:
        # The target lies above the formula, which would hide it where it fits perfectly.
        axes.plot(column, values, ".", markersize=9, color="tab:orange", label="formula")
        axes.plot(column, target, ".", markersize=4, color="tab:blue", label="target")
        axes.set(xlabel=str(over).replace("$", r"\$"))
        axes.legend()
    axes.set_title(expression[:80].replace("$", r"\$"), fontsize=9)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=100)
    return picture.getvalue()


# ----------------------------------------------------------------------------------- the transports


class _StrictServer(MCPServer):  # type: ignore[misc]
    """The SDK's server with errors that say what to do, and answers without white space.

    It refuses arguments that a tool does not have: a slip has no effect.
    """

    async def call_tool(self, name: str, arguments: dict[str, Any], context: Any = None) -> Any:
        """Call a tool; see `mcp.server.mcpserver.MCPServer`."""
        known: Mapping[str, Any] = {}
        for tool in await self.list_tools():
            known = tool.input_schema["properties"] if tool.name == name else known
        if known and (odd := [each for each in arguments if each not in known]):
            remedy = did_you_mean(odd[0], known, f"Use {', '.join(known)}")
            raise ToolError(f"{name} has no argument {odd[0][:80]!r}. {remedy}")
        try:
            result = await super().call_tool(name, arguments, context)
        except ToolError as error:
            if not isinstance(error.__cause__, ValidationError):
                raise
            first = error.__cause__.errors(include_url=False)[0]
            path = [str(part) for part in first["loc"]]
            place = ".".join(path) or "the arguments"
            if first["type"] == "missing":
                what = f"{place} is missing"
            else:
                what = f"{place} is {shortened(repr(first['input']), 60)}: {first['msg'].lower()}"
            wanted = known.get(path[0], {}).get("description", "") if path else ", ".join(known)
            text = f"BAD_ARGUMENT: {name}: {what}. Give {wanted or 'another value'}"
            raise ToolError(text) from error
        if isinstance(result, CallToolResult) and result.structured_content is not None:
            text = json.dumps(result.structured_content, separators=(",", ":"), ensure_ascii=False)
            result.content = [TextContent(type="text", text=text)]
        return result


class _FairShares:
    """An ASGI application whose callers share the time of this process.

    Reading a request holds Python's lock, also one that is refused. Who takes more than a share of
    the time waits before the next request is read, if others have called in the last second. It is
    refused if that takes too long, or if many requests wait already (virtual scheduling, as in the
    traffic contracts of ATM: ITU-T I.371, 2004, annex A). Tokens that no server has accepted yet
    count together for each address.
    """

    def __init__(self, app: Any, is_known: Callable[[bytes], bool]) -> None:
        self._app, self._is_known = app, is_known
        self._paid: OrderedDict[bytes, float] = OrderedDict()
        """Until when each caller has used its share, the longest unused first."""
        self._waiting = Counter[bytes]()
        """Requests of each caller that wait, each of which keeps a connection."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve a request when its caller's turn has come."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        authorization = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
        caller = token_digest(authorization.partition(" ")[2].strip())
        if not self._is_known(caller):
            caller = str((scope.get("client") or ("",))[0]).encode()
        self._charge(caller, _REQUEST_SECONDS)
        now = time.monotonic()
        is_alone = all(who == caller or at < now - 1.0 for who, at in self._paid.items())
        wait = 0.0 if is_alone else self._paid[caller] - now - _BURST_SECONDS / _SHARE
        if wait > _LONGEST_WAIT or (wait > 0.0 and self._waiting[caller] >= _MOST_WAITING):
            again = str(math.ceil(wait)).encode()
            head = [(b"retry-after", again), (b"content-length", b"0")]
            await send({"type": "http.response.start", "status": 429, "headers": head})
            await send({"type": "http.response.body"})
            return
        if wait > 0.0:
            self._waiting[caller] += 1
            try:
                await asyncio.sleep(wait)
            finally:
                self._waiting[caller] -= 1
                self._waiting += Counter()  # keeps those above 0

        async def counted() -> Any:
            message = await receive()
            self._charge(caller, _BYTE_SECONDS * len(message.get("body", b"")))
            return message

        await self._app(scope, counted, send)

    def _charge(self, caller: bytes, seconds: float) -> None:
        """Count time of a caller; the one that has used none for longest is forgotten."""
        paid = max(time.monotonic(), self._paid.get(caller, 0.0))
        self._paid[caller] = paid + seconds / _SHARE
        self._paid.move_to_end(caller)
        if len(self._paid) > 2 * _MOST_CALLERS:
            self._paid.popitem(last=False)


def make_server(settings: Settings, tools: Tools | None = None) -> MCPServer:
    """Return the SDK's server with all tools."""
    tools = tools or Tools(settings)
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
    # Without sessions, which no tool needs: whoever has no token would make them at will.
    tools = Tools(settings)
    app = make_server(settings, tools).streamable_http_app(
        transport_security=security, host=host, stateless_http=True
    )
    sys.setswitchinterval(_SWITCH_SECONDS)
    with suppress(ImportError):  # at the first search it would stop all callers for half a second
        import_module("warpfit.sklearn")
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
        fair = _FairShares(app, tools.knows)
        config = uvicorn.Config(fair, log_level="warning", limit_concurrency=_MOST_CONNECTIONS)
        server = uvicorn.Server(config)
        anyio.run(server.serve, [listener])
