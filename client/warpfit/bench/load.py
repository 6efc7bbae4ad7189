"""``warpfit bench load``: the latencies that callers see at a given load."""

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from warpfit.bench.callers import Load, Outcome
from warpfit.bench.scenarios import Kind, Scenario
from warpfit.bench.statistics import percentile
from warpfit.client import connect
from warpfit.errors import InvalidArgumentError

#: Fields of the scenario of each kind of calls.
_CALLS: Final[dict[str, dict[str, Any]]] = {
    **{output: {"output": output} for output in ("losses", "values", "gradients")},
    "fits": {"kind": Kind.OPTIMIZE},
}
_PERCENTILES: Final = (50.0, 90.0, 99.0, 99.9)


def summarise_calls(outcomes: Sequence[Outcome], load: Load) -> dict[str, Any]:
    """Summarise the calls that were due after the ramp; seconds.

    ``latency`` counts from the moment at which a call was due; of one that was never sent or
    failed it is the time until that was known. ``service`` counts from sending it: what one would
    report without regard to the calls that had to wait for a free client.
    """
    counted = [outcome for outcome in outcomes if outcome.due >= load.ramp]
    sent = [outcome for outcome in counted if outcome.error != "NOT_SENT"]
    good = sum(not outcome.error for outcome in counted)
    end = max((outcome.done for outcome in counted), default=load.ramp)
    return {
        "rate": load.rate,
        "clients": load.clients,
        "seconds": load.seconds,
        "calls": len(counted),
        "answered_per_second": good / max(end - load.ramp, load.seconds),
        "failed": dict(Counter(outcome.error for outcome in counted if outcome.error)),
        "latency": _percentiles([outcome.done - outcome.due for outcome in counted]),
        "service": _percentiles([outcome.done - outcome.sent for outcome in sent]),
        "late": sum(outcome.sent - outcome.due > 0.001 for outcome in sent) / max(1, len(counted)),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    loads = parser.add_mutually_exclusive_group(required=True)
    loads.add_argument("--rate", type=float, metavar="R", help="calls a second, open loop")
    loads.add_argument("--concurrency", type=int, metavar="N", help="N clients without a pause")
    add = parser.add_argument
    add("address", metavar="HOST:PORT")
    add("--seconds", type=float, default=10.0, help="default: %(default)s")
    add("--ramp", type=float, default=1.0, metavar="S", help="default: %(default)s")
    add("--clients", type=int, default=64, help="most calls in flight (default: %(default)s)")
    add("--processes", type=int, default=2, help="default: %(default)s")
    add("--calls", choices=list(_CALLS), default="losses", help="default: %(default)s")
    add("--rows", type=int, default=1_000, help="default: %(default)s")
    add("--expressions", type=int, default=300, help="default: %(default)s")
    add("--timeout", type=float, default=10.0, help="of a call (default: 10)")
    add("--seed", type=int, default=1)
    add("--out", type=Path, metavar="FILE.json")


def run(options: argparse.Namespace) -> None:
    """Run the command with its parsed flags."""
    load = _load(options)
    with connect(load.address) as client:  # says at once what is wrong with the address
        client.info(10.0)
    found = summarise_calls(load.perform(), load)
    print(_table(found))
    if options.out:
        date = time.strftime("%Y-%m-%d", time.gmtime())
        options.out.write_text(json.dumps({"date": date, **found}, indent=1) + "\n")


def _load(options: argparse.Namespace) -> Load:
    for name in ("rate", "concurrency", "seconds", "clients", "timeout", "rows", "expressions"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise InvalidArgumentError(f"--{name} {value} is not positive", "BAD_LOAD", "Raise it")
    size = {"rows": options.rows, "expressions": options.expressions}
    same = ("address", "rate", "seconds", "processes", "timeout", "seed")
    return Load(
        scenario=Scenario(engine="remote", **size, **_CALLS[options.calls]),
        ramp=0.0 if options.concurrency else max(0.0, options.ramp),
        clients=options.concurrency or options.clients,
        **{name: getattr(options, name) for name in same},
    )


def _percentiles(seconds: Sequence[float]) -> dict[str, float | None]:
    ordered = np.sort(np.asarray(seconds, dtype=np.float64))
    if not len(ordered):
        return {}
    found = {f"p{percent:g}": percentile(ordered, percent) for percent in _PERCENTILES}
    return {"mean": float(ordered.mean()), **found, "greatest": float(ordered[-1])}


def _table(found: dict[str, Any]) -> str:
    asked = f"{found['rate']:g} calls/s asked" if found["rate"] else "called without a pause"
    lines = [
        f"{found['calls']} calls in {found['seconds']:g} s by {found['clients']} clients, {asked}, "
        f"{found['answered_per_second']:.1f} answered a second",
        f"{'milliseconds':14}" + "".join(f"{name:>10}" for name in found["latency"]),
    ]
    kinds = [("latency", "as due"), ("service", "as sent")] if found["rate"] else []
    for kind, name in kinds or [("latency", "latency")]:
        cells = [f"{'-' if v is None else f'{1e3 * v:.2f}':>10}" for v in found[kind].values()]
        lines.append(f"{name:14}" + "".join(cells))
    late = f"{found['late']:.1%} were sent more than 1 ms late: clients or machine were busy"
    waiting = "clients that wait for answers slow down with the server: see --rate"
    lines.append(late if found["rate"] else waiting)
    lines += [f"failed: {reason} {count}" for reason, count in found["failed"].items()]
    return "\n".join(lines)
