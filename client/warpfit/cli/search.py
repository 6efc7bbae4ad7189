"""``warpfit search``: finds formulas for a column of a file of data."""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from warpfit.calls.proposals import for_json
from warpfit.cli.shared import CommandParser, writing_file
from warpfit.cli.table import add_table_flags, read_table, seconds, whole_from
from warpfit.errors import InvalidArgumentError, require
from warpfit.expressions.language import to_text
from warpfit.transport.connection import add_flags, from_flags

#: Exit status for what has ended a search early: 128 plus the signal, or that of an error.
_STATUS: Final = {"interrupt": 130, "terminate": 143, "server": 2}


def main(words: Sequence[str]) -> int:
    """Search, print the front and the chosen formula, and write the files that were asked for.

    An interrupt, SIGTERM or the loss of the server ends the search, and not the command: what has
    been found is printed and written.
    """
    options = _parser().parse_args(words)
    require("sklearn", "warpfit[sklearn]")
    _check_outputs(options)
    table = read_table(options)
    table.require_finite(options.target, options.weights)
    target = table.target
    assert target is not None  # the flag is required
    from warpfit.sklearn import SymbolicRegressor
    from warpfit.sklearn.equations import plot_fit

    given = {"operators": options.operators} if options.operators else {}
    model = SymbolicRegressor(
        address=options.address,
        **from_flags(options),
        engine=options.engine,
        loss=options.loss,
        template=options.template,
        model_selection=options.model_selection,
        max_size=options.max_size,
        generations=options.generations,
        max_seconds=options.max_seconds,
        digits=options.digits,
        checkpoint=options.checkpoint,
        verbose=not options.quiet,
        random_state=options.random_state,
        **given,
    )
    model.variable_names, model.group = table.names, table.group
    columns: Any = table.columns
    if table.groups:
        columns = columns.astype(object)
        columns[:, table.group] = np.array(table.groups)[table.columns[:, table.group].astype(int)]
    try:
        model.fit(columns, target, table.weights)
    except ValueError as error:  # of scikit-learn, which refuses some data
        raise InvalidArgumentError(
            f"{table.file}: {str(error).strip().splitlines()[0]}", "BAD_DATA", "Change the data"
        ) from error
    print(model.equations_)
    print(f"\n{options.target} = {model.expression_}")
    for name, text in model.subformulas_.items():
        print(f"{name} = {text}")
    if options.json:
        names, rows = model._names(), []
        for equation in model.front_:  # its text with all digits
            row = {key: value for key, value in asdict(equation).items() if key != "program"}
            rows.append(row | {"equation": to_text(equation.program, names)})
        chosen = next(i for i, e in enumerate(model.front_) if e.program == model.program_)
        document = {
            "file": options.file.name,
            "target": options.target,
            "generations": model.n_iter_,
            "reason": model.reason_,
            "model_selection": options.model_selection,
            "chosen": chosen,
            "equation": rows[chosen]["equation"],
            "front": rows,
        }
        text = json.dumps(for_json(document), indent=2, allow_nan=False) + "\n"
        with writing_file(options.json):
            options.json.write_text(text, encoding="utf-8")
    if options.plot:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(11, 4.5))
        left, right = figure.subplots(1, 2)
        model.plot_front(left)
        plot_fit(target, model.predict(columns), right)
        with writing_file(options.plot):
            figure.savefig(options.plot)
    if model.undone_:
        print(f"\nThere was no time for everything: {'; '.join(model.undone_)}.")
    return _STATUS.get(model.reason_, 0)


def _check_outputs(options: argparse.Namespace) -> None:
    """Refuse what cannot be written before an hour of searching.

    Raises:
        InvalidArgumentError: for a file that cannot be written or has another use in this command,
            a format that matplotlib does not draw, and where there is no matplotlib.
    """
    used: dict[Path, str] = {}
    for name in ("file", "json", "plot", "checkpoint"):
        path: Path | None = getattr(options, name)
        if path is None or (name == "file" and str(path) == "-"):
            continue
        flag = "the data" if name == "file" else f"--{name}"
        if name != "file":
            with writing_file(path):  # it is opened for writing, and left as it was
                is_new = not path.exists()
                if not is_new and not path.is_file() and not path.is_dir():
                    if not os.access(path, os.W_OK):  # opening a device or a pipe might wait
                        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
                else:
                    path.open("ab").close()
                    if is_new:
                        path.unlink()
                    if name == "checkpoint":  # it is written beside itself, and then renamed
                        with tempfile.TemporaryFile(dir=path.parent):
                            pass
        try:
            place = path.resolve()
        except (OSError, RuntimeError, ValueError):
            continue  # reading it says what is wrong
        if place in used and not place.is_char_device():
            raise InvalidArgumentError(
                f"{path} is meant for {used[place]} and for {flag}",
                "BAD_FILE",
                "Name another file",
                name,
            )
        used[place] = flag
    if options.plot:
        require("matplotlib", "matplotlib", "plot")
        try:
            from matplotlib.figure import Figure

            # A picture of nothing, since formats need programs and packages of their own.
            Figure().savefig(io.BytesIO(), format=options.plot.suffix[1:])
        except Exception as error:  # of any kind, also from the settings of matplotlib
            known = str(error).strip().splitlines() or [type(error).__name__]
            raise InvalidArgumentError(
                f"{options.plot} cannot be drawn: {known[0]}",
                "BAD_FORMAT",
                "Name a file such as y.png, y.svg or y.pdf",
                "plot",
            ) from error


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="warpfit search",
        description="Search formulas for a column of a file; the header names the variables.",
        epilog="example: warpfit search data.csv --target y --max-seconds 60 --plot y.png",
    )
    add_table_flags(parser, needs_target=True)
    add = parser.add_argument
    add("--max-seconds", type=seconds, default=60.0, metavar="SECONDS",
        help="time of the search itself; a start of the command, and of a server for it, take some "
        "seconds more (default: 60)")  # fmt: skip
    add("--generations", type=whole_from(0), default=10**6, metavar="N",
        help="most generations, which may end it before its time")  # fmt: skip
    add("--operators", nargs="+", metavar="NAME", help="names or symbols, such as + '*' sin")
    add(
        "--template",
        metavar="TEXT",
        help="outer form in which f, g, ... are searched: 'f(a, b)*exp(-g(c))'",
    )
    add("--group", metavar="NAME", help="column of groups, each with constants of its own")
    add("--loss", default="mse", help="a name, or an expression over f, y, w and d (default: mse)")
    add("--model-selection", default="prediction", metavar="CRITERION",
        choices=("prediction", "description_length", "evidence", "accuracy", "score", "best"),
        help="chooses the equation (default: %(default)s): %(choices)s")  # fmt: skip
    add(
        "--digits", type=whole_from(1), default=4, metavar="N", help="that are printed (default: 4)"
    )
    add("--max-size", type=whole_from(1), metavar="N",
        help="most tokens (default: 41, and any of linear regression)")  # fmt: skip
    add("--random-state", type=_seed, default=0, metavar="SEED",
        help="from 0 to 4294967295 (default: 0)")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write the front as JSON")
    add("--plot", type=Path, metavar="FILE", help="draw the front and the fit, such as y.png")
    add("--checkpoint", type=Path, metavar="FILE", help="save the search, or go on from it")
    add("--address", default=os.environ.get("WARPFIT_ADDRESS"), metavar="HOST:PORT",
        help="default: WARPFIT_ADDRESS, or start a server here")  # fmt: skip
    add("--engine", default="auto", choices=("auto", "cpu"), help="of a server started here")
    add("--quiet", action="store_true", help="show no progress")
    add_flags(parser)
    return parser


def _seed(text: str) -> int:
    if text.strip().isdecimal() and int(text) < 2**32:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text.strip()!r} is no whole number from 0 to 4294967295")
