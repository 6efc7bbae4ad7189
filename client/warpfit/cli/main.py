"""The ``warpfit`` command: serve, precompile, eval, fit, search, mcp, info, health, token, ..."""

from __future__ import annotations

import argparse
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

from warpfit.cli.shared import (
    CommandParser,
    discard_errors,
    discard_output,
    open_standard_streams,
    output_failure,
    reader_is_gone,
    tell,
    watch_output,
    writing_file,
)
from warpfit.cli.table import (
    add_table_flags,
    amount,
    number,
    read_table,
    seconds,
    whole_from,
)
from warpfit.display import aligned
from warpfit.errors import InvalidArgumentError, WarpfitError
from warpfit.expressions.language import DIGITS, to_text
from warpfit.parse import parse
from warpfit.request import Accuracy, Loss, Method, Precision, Reason, Tier
from warpfit.transport.connection import add_flags, from_flags

if TYPE_CHECKING:
    from warpfit.calls.dataset_handle import DatasetHandle
    from warpfit.cli.table import Table
    from warpfit.client import Client


#: Exit status of a command whose reader, such as ``head``, has closed the pipe: 128 plus SIGPIPE.
_PIPE_CLOSED: Final = 141
_ADDRESS_HELP: Final = "default: WARPFIT_ADDRESS, or 127.0.0.1:50551"
_LOSSES: Final = "a name, or an expression over f, y, w and d"
#: A negative number, a range of rows, or a formula, which has an operator or parentheses.
_BEGINS_WITH_MINUS: Final = re.compile(
    r"-((\d+\.?\d*|\.\d+)(e[+-]?\d+)?|inf(inity)?|nan|\d+:-?\d*|[^-\s][^=]*[-+*/^(].*|\(.*)",
    re.ASCII | re.IGNORECASE,
)
#: Most parameters of a fit that starts from ones.
_MOST_ONES: Final = 10_000
#: Commands with parsers of their own: the modules whose ``main`` runs them, and their help.
_DELEGATED: Final = {
    "serve": ("warpfit_server.__main__", "run a server; see `warpfit serve --help`"),
    "precompile": ("warpfit_server.precompile", "compile what a first start would compile"),
    "search": ("warpfit.cli.search", "search formulas for a column of a file"),
    "mcp": ("warpfit.cli.mcp", "offer tools to agents, by the Model Context Protocol"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status.

    It is 0, 2 for an error, and 141 if nobody reads what the command prints; an interrupt raises
    KeyboardInterrupt.
    """
    open_standard_streams()
    watch_output()
    try:
        try:
            with warnings.catch_warnings():
                # The place in the code says nothing to users.
                warnings.showwarning = lambda said, *_, **__: tell(f"warpfit: warning: {said}")
                return _run(sys.argv[1:] if arguments is None else arguments)
        finally:
            sys.stdout.flush()  # here, where an output that cannot be written can be dealt with
    except OSError:
        failure = output_failure()
        if failure is None:
            raise
        is_pipe_closed = reader_is_gone()
        discard_output()
        if is_pipe_closed:
            return _PIPE_CLOSED
        tell(f"warpfit: error: standard output cannot be written: {failure.strerror}")
        return 2
    finally:
        discard_errors()


def _run(given: Sequence[str]) -> int:
    # Behind a space argparse takes negative numbers and row ranges for no flags. Before Python 3.14
    # it knows -1 and -0.5 as numbers, and not -3e-5, -1. or -inf; formulas such as -T/P it takes
    # for flags.
    end = given.index("--") if "--" in given else len(given)
    words = [
        f" {word}" if place < end and _BEGINS_WITH_MINUS.fullmatch(word) else word
        for place, word in enumerate(given)
    ]
    try:
        if words and words[0] in _DELEGATED:
            from warpfit.embedded import require_server

            module, _ = _DELEGATED[words[0]]
            if module.startswith("warpfit_server"):
                require_server()
            return int(import_module(module).main(words[1:]))
        end = end if words[:1] == ["ray"] else len(words)
        options = _parser().parse_args(words[:end] or ["--help"])
        options.flags = words[end + 1 :]
        command: Callable[[argparse.Namespace], None] = options.command
        command(options)
    except WarpfitError as error:
        tell(f"warpfit: error: {error}")
        return 2
    except MemoryError:
        tell("warpfit: error: there is not enough memory. Give fewer rows, or free some")
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="warpfit",
        description="Evaluate expressions for symbolic regression, on a GPU or a CPU.",
    )
    parser.add_argument("--version", action="version", version=metadata.version("warpfit"))
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=CommandParser)
    for name, (_, described) in _DELEGATED.items():  # for the list of commands alone
        commands.add_parser(name, help=described)

    evaluate = commands.add_parser(
        "eval",
        help="evaluate an expression on a file of data",
        description="Evaluate an expression on a file of data. The header names the variables; p1, "
        "p2, ... are parameters. Put -- before an expression that begins with a minus.",
        epilog="example: warpfit eval data.csv 'x1*p1 + x2' --target y --params 1.5",
    )
    _add_data_flags(evaluate, "auto", needs_target=False)
    add = evaluate.add_argument
    add("--params", type=number, nargs="+", default=[], metavar="P", help="values of p1, p2, ...")
    add("--loss", help=f"{_LOSSES} (default: mse if there is a target)")
    add("--precision", choices=list(Precision), default=Precision.PRECISE)
    add("--tier", choices=list(Tier), default=Tier.AUTO)
    add("--head", type=whole_from(0), default=5, metavar="N", help="rows to print (default: 5)")
    add("--profile", action="store_true", help="print where the time went")
    evaluate.set_defaults(command=_eval)

    fit = commands.add_parser(
        "fit",
        help="fit the parameters of an expression to a file of data",
        description="Fit the parameters p1, p2, ... of an expression to the target column.",
        epilog="example: warpfit fit data.csv 'p1*exp(p2*x1)' --target y --params 1 0.1",
    )
    _add_data_flags(fit, "float64", needs_target=True)
    add = fit.add_argument
    add("--params", type=number, nargs="+", metavar="P", help="start (default: ones)")
    add("--loss", default="mse", help=f"{_LOSSES} (default: mse)")
    add("--method", choices=list(Method), default=Method.AUTO)
    accuracies = "tolerances and iterations (default: final)"
    add("--accuracy", choices=list(Accuracy), default=Accuracy.FINAL, help=accuracies)
    add("--max-iterations", type=whole_from(0), metavar="N", help="default: as the accuracy says")
    fit.set_defaults(command=_fit)

    info = commands.add_parser("info", help="describe a running server")
    info.add_argument("address", metavar="HOST:PORT", nargs="?", help=_ADDRESS_HELP)
    info.add_argument(
        "--timeout", type=seconds, default=10.0, metavar="SECONDS", help="default: 10"
    )
    add_flags(info)
    info.set_defaults(command=_info)

    token = commands.add_parser("token", help="make a bearer token for a server's token file")
    token.add_argument("tenant", help="whose token it is")
    token.add_argument("--days", type=number, metavar="N", help="days of validity (default: ever)")
    token.add_argument(
        "--append", type=Path, metavar="FILE", help="add the line to this file, of mode 600 if new"
    )
    token.set_defaults(command=_token)

    health = commands.add_parser(
        "health",
        help="ask a server whether it is ready",
        description="Ask by grpc.health.v1; the exit status is 0 if the service is up, else 1.",
    )
    health.add_argument("address", metavar="HOST:PORT", help="its health port, or the main one")
    health.add_argument("--service", default="readiness", help="default: readiness")
    health.add_argument(
        "--timeout", type=seconds, default=5.0, metavar="SECONDS", help="default: 5"
    )
    add_flags(health)
    health.set_defaults(command=_health)

    top = commands.add_parser(
        "top",
        help="watch a running server",
        description="Show throughput, latency, tenants, caches and GPUs of a server, live.",
    )
    top.add_argument("address", metavar="HOST:PORT", help="its metrics port")
    top.add_argument("--interval", type=seconds, default=2.0, metavar="SECONDS", help="default: 2")
    top.add_argument("--once", action="store_true", help="print one interval and end")
    top.set_defaults(
        command=lambda given: import_module("warpfit.cli.top").top(
            given.address, given.interval, once=given.once
        )
    )

    cluster = commands.add_parser(
        "ray",
        help="run servers on the nodes of a Ray cluster",
        description="Run a server on each node of a Ray cluster; clients connect to "
        "ray://NAMESPACE.",
    )
    actions = cluster.add_subparsers(required=True, dest="action", metavar="COMMAND")
    for name, text in (
        ("up", "start a server on each node that has GPUs and no server"),
        ("list", "print the servers' addresses"),
        ("restart", "restart the servers one after the other"),
        ("down", "stop the servers"),
    ):
        action = actions.add_parser(name, help=text)
        add = action.add_argument
        add("namespace", nargs="?", default="warpfit", help="default: %(default)s")
        if name == "up":
            add("--devices", default="all", help="all GPUs of a node, or cpu (default: all)")
            add("--cpus", type=amount, default=1.0, help="CPUs reserved for each (default: 1)")
            action.epilog = "What follows -- are further flags of `warpfit serve`."
    cluster.set_defaults(command=_ray)
    return parser


def _add_data_flags(parser: argparse.ArgumentParser, dtype: str, *, needs_target: bool) -> None:
    """Add what commands with an expression and a file of data have in common."""
    add_table_flags(parser, needs_target=needs_target)
    add = parser.add_argument
    add("expression")
    here = os.environ.get("WARPFIT_ADDRESS")
    described = "default: WARPFIT_ADDRESS, or start a server here"
    add("--address", metavar="HOST:PORT", default=here, help=described)
    choices = ("auto", "float32", "float64")
    add("--dtype", choices=choices, default=dtype, help="default: %(default)s")
    add("--rows", type=_rows, metavar="START:STOP", help="default: all rows")
    add("--timeout", type=seconds, metavar="SECONDS")
    add_flags(parser)


def _rows(text: str) -> slice:
    start, colon, stop = text.strip().partition(":")
    try:
        if colon:
            return slice(int(start) if start else None, int(stop) if stop else None)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not START:STOP")


def _rows_of(options: argparse.Namespace, count: int) -> tuple[int, int] | None:
    """Return the first row and the end of those that were asked for, of ``count`` rows."""
    if options.rows is None:
        return None
    ends = (options.rows.start, options.rows.stop)
    start, stop, _ = options.rows.indices(count)
    if start >= stop or any(end is not None and not -count <= end <= count for end in ends):
        raise InvalidArgumentError(
            f"--rows does not fit {options.file}, which has {count} rows",
            "ROWS_OUT_OF_RANGE",
            f"Give START:STOP from 0 to {count}; negative numbers count from the end",
            "rows",
        )
    return start, stop


# ------------------------------------------------------------------------------------- commands


def _info(options: argparse.Namespace) -> None:
    from warpfit.client import connect

    with connect(options.address, **from_flags(options)) as client:
        server = client.info(options.timeout)
    lines = [f"warpfit {server.version}, engine {server.engine}", "devices"]
    for device in server.devices:
        facts = [
            f"{device.threads} threads" if device.threads else "",
            f"{device.memory / 2**30:.1f} GiB" if device.memory else "",
            f"compute capability {device.compute_capability}" if device.compute_capability else "",
            f"driver {device.driver}" if device.driver else "",
            f"tiers {', '.join(device.tiers)}",
            "" if device.serving else "NOT READY",
        ]
        lines.append(f"  {device.label} {device.name}: {', '.join(fact for fact in facts if fact)}")
    lines.append(f"data sets: {server.datasets}")
    limits = {name: getattr(server.limits, name) for name in server.limits.__slots__}
    rows = [(f"  {name}", f"{most:,}" if most else "none") for name, most in limits.items()]
    names = [f"{op.name}/{op.arity}" for op in server.operators]
    lines += ["limits", aligned(rows), f"{len(names)} operators (name/operands)"]
    lines += [f"  {' '.join(names[start : start + 10])}" for start in range(0, len(names), 10)]
    print("\n".join(lines))


def _health(options: argparse.Namespace) -> None:
    from warpfit.transport.channel import health
    from warpfit.transport.connection import Security, target_of

    # The flags alone switch TLS on, not the variables: a health port beside it has none.
    security = Security.of(target_of(options.address), **from_flags(options), environment={})
    status, failure = health(options.address, options.service, options.timeout, security)
    print(f"{options.service}: {status}")
    if failure:
        tell(f"warpfit: {failure}")
    if status != "SERVING":
        raise SystemExit(1)


def _ray(options: argparse.Namespace) -> None:
    from warpfit import ray

    if options.action == "up":
        found = ray.start(
            options.namespace, devices=options.devices, flags=options.flags, cpus=options.cpus
        )
        print("\n".join(found))
    elif options.action == "list":
        print("\n".join(ray.addresses(options.namespace)))
    elif options.action == "restart":
        ray.restart(options.namespace)
    else:
        ray.down(options.namespace)


def _eval(options: argparse.Namespace) -> None:
    table = read_table(options)
    if table.target is None and (options.loss or options.weights):
        raise InvalidArgumentError(
            f"loss {options.loss} needs a target" if options.loss else "weights need a target",
            "TARGET_MISSING",
            f"Add --target with one of: {', '.join(table.names)}",
        )
    program, rows = parse(options.expression, table.names), _rows_of(options, len(table.columns))
    loss = options.loss or (None if table.target is None else Loss.MSE)
    with _data_on_server(options, table) as (client, data):
        answer = client.run(
            data,
            program,
            options.params,
            loss=loss,
            values=True,
            rows=rows,
            precision=options.precision,
            tier=options.tier,
            timeout=options.timeout,
        )
    assert answer.values is not None
    if answer.losses is not None:
        print(f"{loss}  {answer.losses[0]:.8g}")
    shown = answer.values[: options.head, 0].tolist()
    start = rows[0] if rows else 0
    lines = [["row", "value"], *([str(i), f"{v:.7g}"] for i, v in enumerate(shown, start))]
    if table.target is not None:
        targets = [f"{y:.7g}" for y in table.target[start : start + len(shown)]]
        lines = [[*line, y] for line, y in zip(lines, ["target", *targets], strict=True)]
    if shown:
        print(aligned(lines))
    rest = len(answer.values) - len(shown)
    if rest:
        print(f"... and {rest} more row{'s' if rest > 1 else ''}")
    if options.profile:
        print(answer.timings)


def _fit(options: argparse.Namespace) -> None:
    from warpfit.losses import as_function, as_loss

    table = read_table(options)
    program = parse(options.expression, table.names)
    loss = as_loss(options.loss)
    if options.params is None and program.parameters > _MOST_ONES:
        raise InvalidArgumentError(
            f"the expression has a parameter p{program.parameters}",
            "TOO_MANY_PARAMETERS",
            f"Number the parameters p1, p2, ..., at most p{_MOST_ONES}, or give --params",
        )
    start = [1.0] * program.parameters if options.params is None else options.params
    with _data_on_server(options, table) as (client, data):
        fit = client.optimize(
            data,
            program,
            start,
            loss=loss,
            method=options.method,
            accuracy=options.accuracy,
            max_iterations=options.max_iterations,
            standard_errors=as_function(loss).is_squares,
            rows=_rows_of(options, len(table.columns)),
            timeout=options.timeout,
        )
    if not fit.has_finite_target:
        table.require_finite(options.target, options.weights, of_target=True)
    if fit.reason[0] is Reason.NOT_FINITE:
        at = ", ".join(f"p{number} = {value:.6g}" for number, value in enumerate(start, 1))
        raise InvalidArgumentError(
            f"the fit could not begin{at and ' at '}{at}: {options.loss} is "
            f"{fit.initial_loss[0]:.8g} there, or derivatives or their squares are not finite, or "
            "vanish",
            "NOT_FINITE",
            "Give --params a start at which the expression is finite in all rows, or change units",
        )
    print(to_text(fit.formula(), fit.names, DIGITS))
    print(f"{options.loss}  {fit.initial_loss[0]:.8g} -> {fit.loss[0]:.8g}")
    if fit.r2 is not None and options.loss != Loss.R2:
        print(f"R2  {fit.r2[0]:.8g}")
    print(f"ended after {fit.iterations[0]} iterations: {fit.reason[0]}")
    if fit.hint:
        tell(f"warpfit: {fit.hint.replace('upload with dtype=', '--dtype ')}")
    parameters = fit.parameters[0].tolist()
    lines = [["parameter", "value"]]
    lines += [[f"p{number}", f"{value:.10g}"] for number, value in enumerate(parameters, 1)]
    if fit.standard_errors is not None:
        errors = [f"{error:.3g}" for error in fit.standard_errors[0].tolist()]
        lines = [[*line, e] for line, e in zip(lines, ["standard error", *errors], strict=True)]
    if parameters:
        print(aligned(lines))


def _token(options: argparse.Namespace) -> None:
    from warpfit.transport.connection import check_secret, new_token

    token, line = new_token(options.tenant, options.days)
    if options.append is None:
        # The line on standard error may be a token file by itself: `2> tokens` makes one.
        tell(f"# Add this line to the server's token file:\n{line}")
    else:
        with writing_file(options.append):
            # Made for its owner alone, whatever the umask is; a file that is there keeps its mode.
            file = os.open(options.append, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
            with os.fdopen(file, "r+b") as tokens:
                check_secret(options.append)
                size = tokens.seek(0, os.SEEK_END)
                tokens.seek(max(0, size - 1))
                start = b"\n" if size and tokens.read(1) != b"\n" else b""
                tokens.write(start + line.encode() + b"\n")
    print(token)


@contextmanager
def _data_on_server(
    options: argparse.Namespace, table: Table
) -> Iterator[tuple[Client, DatasetHandle]]:
    """Upload a table to the server that was named, or to one that is started for this command."""
    from warpfit.client import connect
    from warpfit.embedded import server_at

    arguments = from_flags(options) if options.address else {"tls": False}
    with server_at(options.address) as address, connect(address, **arguments) as client:
        given = {"names": table.names, "dtype": options.dtype, "weights": table.weights}
        yield client, client.upload(table.columns, table.target, **given)
