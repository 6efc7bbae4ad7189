"""``warpfit bench``: run, report, load."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from warpfit.bench.progress import progress
from warpfit.bench.scenarios import PROFILES
from warpfit.errors import InvalidArgumentError

_DEFAULT_OUT: Final = Path("warpfit-bench.json")
_LOAD_WORDS: Final = ("report", "load")


def main(arguments: Sequence[str]) -> int:
    """Run the command with the words behind ``warpfit bench``; return its exit status."""
    words = list(arguments)
    chosen = words[0] if words[:1] and words[0] in _LOAD_WORDS else ""
    parser = {"": _run_parser, "report": _report_parser, "load": _load_parser}[chosen]()
    options = parser.parse_args(words[1:] if chosen else words)
    command: Callable[[argparse.Namespace], int] = options.command
    return command(options)


def _run_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="warpfit bench",
        description="Measure this machine's engines and their peers.",
        epilog="Further commands: `warpfit bench report RESULTS.json` writes a page with plots, "
        "`warpfit bench load HOST:PORT` puts load on a running server. A run that was "
        "interrupted continues when the same command is given again.",
    )
    parser.add_argument("--profile", choices=list(PROFILES), default="quick")
    parser.add_argument(
        "--out", type=Path, default=_DEFAULT_OUT, metavar="FILE", help="default: %(default)s"
    )
    parser.add_argument(
        "--engine",
        choices=("all", "cpu", "cuda"),
        default="all",
        help="engines to start servers with (default: all that this machine can run)",
    )
    parser.add_argument(
        "--address", metavar="HOST:PORT", help="measure a running server instead of starting any"
    )
    parser.add_argument("--seed", type=int, help="of data and expressions (default: a new one)")
    parser.add_argument(
        "--seconds", type=float, metavar="N", help="time for measuring (default: the profile's)"
    )
    parser.add_argument("--no-peers", action="store_true", help="leave other libraries out")
    parser.add_argument("--note", action="append", default=[], help="kept in the results")
    parser.add_argument(
        "--afresh", action="store_true", help="replace the file instead of continuing it"
    )
    parser.set_defaults(command=_run)
    return parser


def _report_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="warpfit bench report",
        description="Write a page and plots from results; several machines' go together.",
    )
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULTS.json")
    parser.add_argument(
        "--out", type=Path, metavar="DIRECTORY", help="default: beside the first file"
    )
    parser.set_defaults(command=_report)
    return parser


def _load_parser() -> argparse.ArgumentParser:
    from warpfit.bench.load import add_options

    parser = argparse.ArgumentParser(
        prog="warpfit bench load",
        description="Put load on a running server and tell the latencies that callers see.",
    )
    add_options(parser)
    parser.set_defaults(command=_load)
    return parser


def _run(options: argparse.Namespace) -> int:
    from warpfit.bench.results import Results, head, read
    from warpfit.bench.runner import Plan, Run

    if not options.out.parent.is_dir():
        raise InvalidArgumentError(
            f"there is no directory {options.out.parent}", "BAD_PATH", "Make it first", "--out"
        )
    seed = options.seed
    if seed is None:
        continued = options.out.exists() and not options.afresh
        seed = read(options.out)["seed"] if continued else int.from_bytes(os.urandom(4), "little")
    start = head(options.profile, seed, address=options.address, notes=options.note)
    results = Results.begin(options.out, start, afresh=options.afresh)
    before = len(results.cells)
    profile = PROFILES[options.profile]
    if options.seconds is not None:
        profile = replace(profile, total_seconds=options.seconds)
    plan = Plan(
        profile=profile,
        engines=_engines(options.engine),
        address=options.address,
        with_peers=not options.no_peers,
    )
    if "cuda" not in plan.engines and options.engine == "all" and not plan.address:
        results.skip("engine/cuda", "this machine shows no NVIDIA GPU")
    try:
        with progress() as shown:
            Run(plan, results, shown).perform()
    except KeyboardInterrupt:
        print(
            f"warpfit: interrupted; {options.out} holds {len(results.cells)} measurements, the "
            "same command continues",
            file=sys.stderr,
        )
        return 130
    print(f"{len(results.cells)} measurements in {options.out}")
    if before == len(results.cells):
        print("nothing was left to measure; --afresh measures everything again")
    return 0


def _engines(chosen: str) -> tuple[str, ...]:
    from warpfit.bench.hardware import has_gpu

    if chosen != "all":
        return (chosen,)
    return ("cuda", "cpu") if has_gpu() else ("cpu",)


def _report(options: argparse.Namespace) -> int:
    from warpfit.bench.report import write_report

    directory = options.out or options.results[0].with_suffix("")
    for path in write_report(options.results, directory):
        print(path)
    return 0


def _load(options: argparse.Namespace) -> int:
    from warpfit.bench.load import run

    run(options)
    return 0
