"""``warpfit bench``: run, report, load."""

import argparse
import functools
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from warpfit.bench.scenarios import PROFILES
from warpfit.errors import InvalidArgumentError

_DEFAULT_OUT: Final = Path("warpfit-bench.json")
_DESCRIPTIONS: Final = {
    "": "Measure this machine's engines and other libraries beside them.",
    "report": "Write a page and plots from results; several machines' go together.",
    "load": "Put load on a running server and report the latencies that callers see.",
}
_EPILOG: Final = (
    "Further commands: `warpfit bench report RESULTS.json` writes a page with plots, "
    "`warpfit bench load HOST:PORT` puts load on a running server."
)


def main(arguments: Sequence[str]) -> int:
    """Run the command with the words behind ``warpfit bench``; return its exit status."""
    words = list(arguments)
    name = words.pop(0) if words and words[0] in ("report", "load") else ""
    parser = argparse.ArgumentParser(
        prog=f"warpfit bench {name}".rstrip(),
        description=_DESCRIPTIONS[name],
        epilog=None if name else _EPILOG,
    )
    {"": _add_run, "report": _add_report, "load": _add_load}[name](parser)
    options = parser.parse_args(words)
    options.command(options)
    return 0


def _add_run(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--profile", choices=list(PROFILES), default="quick")
    add("--out", type=Path, default=_DEFAULT_OUT, metavar="FILE", help="default: %(default)s")
    add("--engine", choices=("all", "cpu", "cuda"), default="all", help="default: all there are")
    running = "measure a running server instead of starting any (default: WARPFIT_ADDRESS)"
    add("--address", metavar="HOST:PORT", default=os.environ.get("WARPFIT_ADDRESS"), help=running)
    add("--seed", type=int, help="of data and expressions (default: a new one)")
    add("--seconds", type=float, metavar="N", help="time for each engine (default: the profile's)")
    add("--no-peers", action="store_true", help="leave other libraries out")
    add("--note", action="append", default=[], help="kept in the results")
    add("--afresh", action="store_true", help="replace the file if there is one")
    parser.set_defaults(command=_run)


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULTS.json")
    beside = "default: beside the first file"
    parser.add_argument("--out", type=Path, metavar="DIRECTORY", help=beside)
    parser.set_defaults(command=_report)


def _add_load(parser: argparse.ArgumentParser) -> None:
    from warpfit.bench import load

    load.add_options(parser)
    parser.set_defaults(command=load.run)


def _run(options: argparse.Namespace) -> None:
    from warpfit.bench.runner import Run

    if not options.out.parent.is_dir():
        raise InvalidArgumentError(
            f"there is no directory {options.out.parent}", "BAD_PATH", "Make it first", "--out"
        )
    if options.out.exists() and not options.afresh:
        raise InvalidArgumentError(
            f"{options.out} exists",
            "FILE_EXISTS",
            "Name another file with --out, or replace it with --afresh",
            "--out",
        )
    seed = int.from_bytes(os.urandom(4), "little") if options.seed is None else options.seed
    profile = PROFILES[options.profile]
    if options.seconds is not None:
        profile = replace(profile, total_seconds=options.seconds)
    choose_all = options.engine == "all" and not options.address
    run = Run(
        profile=profile,
        engines=("cuda", "cpu") if choose_all else (options.engine,),
        path=options.out,
        seed=seed,
        address=options.address,
        notes=options.note,
        with_peers=not options.no_peers,
        report=functools.partial(print, file=sys.stderr, flush=True),
    )
    try:
        run.perform()
    finally:
        print(f"{len(run.document['cells'])} measurements in {options.out}")


def _report(options: argparse.Namespace) -> None:
    from warpfit.bench.report.page import write_report

    directory = options.out or options.results[0].with_suffix("")
    for path in write_report(options.results, directory):
        print(path)
