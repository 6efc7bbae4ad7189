"""``warpfit search``: finds formulas for a column of a CSV file."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warpfit.cli.table import Table, read_table
from warpfit.errors import require

if TYPE_CHECKING:
    from warpfit.sklearn import SymbolicRegressor


def main(words: Sequence[str]) -> int:
    """Search, print the front and the chosen formula, and write the files that were asked for."""
    options = _parser().parse_args(words)
    require("sklearn", "warpfit[sklearn]")
    if options.plot:
        require("matplotlib", "matplotlib")
    table, target = read_table(options.file).split(options.target)
    assert target is not None  # the flag is required
    model = _model(options).fit(_named(table), target)
    from warpfit.sklearn.equations import EquationTable

    print(EquationTable(tuple(model.front_)))
    print(f"\n{options.target} = {model.expression_}")
    if options.json:
        options.json.write_text(json.dumps(_document(model, options), indent=2) + "\n")
    if options.plot:
        from matplotlib import pyplot

        figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5))
        model.plot_front(left)
        model.plot_fit(_named(table), target, ax=right)
        figure.savefig(options.plot)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="warpfit search",
        description="Search formulas for a column of a CSV file; the header names the variables.",
        epilog="example: warpfit search data.csv --target y --seconds 60 --plot y.png",
    )
    add = parser.add_argument
    add("file", type=Path, metavar="FILE.csv")
    add("--target", metavar="COLUMN", required=True, help="column to predict")
    add("--seconds", type=float, default=60.0, help="time of the search (default: 60)")
    add("--operators", nargs="+", metavar="NAME", help="names or symbols, such as + '*' sin")
    add("--loss", default="mse", help="a name, or an expression over f, y, w and d (default: mse)")
    add("--select", default="bic", choices=("best", "accuracy", "score", "bic"))
    add("--max-size", type=int, default=25, metavar="N", help="most tokens (default: 25)")
    add("--seed", type=int, default=0)
    add("--json", type=_new_file, metavar="FILE", help="write the front as JSON")
    add("--plot", type=_new_file, metavar="FILE", help="draw the front and the fit, such as y.png")
    add("--checkpoint", type=_new_file, metavar="FILE", help="save the search, or go on from it")
    add("--address", default=os.environ.get("WARPFIT_ADDRESS"), metavar="HOST:PORT",
        help="default: WARPFIT_ADDRESS, or start a server here")  # fmt: skip
    add("--engine", default="auto", choices=("auto", "cpu"), help="of a server started here")
    add("--quiet", action="store_true", help="show no progress")
    return parser


def _new_file(text: str) -> Path:
    """Refuse a file that cannot be written before an hour of searching."""
    if not Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(Path(text).parent)!r}")
    return Path(text)


def _model(options: argparse.Namespace) -> SymbolicRegressor:
    from warpfit.sklearn import SymbolicRegressor

    given = {"operators": options.operators} if options.operators else {}
    return SymbolicRegressor(
        address=options.address,
        engine=options.engine,
        loss=options.loss,
        model_selection=options.select,
        max_size=options.max_size,
        generations=10**6,
        max_seconds=options.seconds,
        checkpoint=options.checkpoint,
        verbose=not options.quiet,
        random_state=options.seed,
        **given,
    )


def _named(table: Table) -> Any:
    """Return the columns with their names, as far as there is pandas."""
    if find_spec("pandas") is None:
        return table.columns
    import pandas

    return pandas.DataFrame(table.columns, columns=list(table.names))


def _document(model: SymbolicRegressor, options: argparse.Namespace) -> dict[str, Any]:
    rows = [
        {name: value for name, value in asdict(equation).items() if name != "program"}
        for equation in model.front_
    ]
    chosen = model.front_.index(next(e for e in model.front_ if e.program == model.program_))
    return {
        "file": options.file.name,
        "target": options.target,
        "generations": model.n_iter_,
        "selection": options.select,
        "chosen": chosen,
        "equation": model.expression_,
        "front": [{k: None if v != v else v for k, v in row.items()} for row in rows],
    }
