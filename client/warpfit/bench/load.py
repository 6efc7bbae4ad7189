"""``warpfit bench load``: what latencies callers see at a given load, and how much load is fine."""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from warpfit.bench.arrivals import arrivals
from warpfit.bench.calls import OUTPUTS, Callers, Mix, Outcome
from warpfit.bench.processes import Processes, processes
from warpfit.bench.scenarios import Scenario
from warpfit.bench.statistics import told_percentile
from warpfit.client import connect
from warpfit.errors import InvalidArgumentError

PERCENTILES: Final = (50.0, 90.0, 99.0, 99.9)
#: Calls that may fail while an objective still counts as met.
_FAILURES: Final = 0.001
_ANSWER_SECONDS: Final = 10.0
#: A search ends when it knows the rate to this factor.
_CLOSE: Final = 1.06


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is put on a server."""

    address: str
    scenario: Scenario
    mix: Mix
    rate: float | None
    """Calls a second; None for clients that call without a pause."""
    seconds: float
    ramp: float = 0.0
    """Seconds during which the rate grows to ``rate``; they are not part of the result."""
    arrivals: str = "poisson"
    clients: int = 64
    """Most calls in flight."""
    timeout: float = 10.0
    seed: int = 1

    def tasks(self, count: int) -> list[Callers]:
        """Deal the timetable out to processes."""
        due = None
        if self.rate is not None:
            due = arrivals(self.rate, self.seconds, self.ramp, self.arrivals, self.seed)
        # With a timetable, what is late is still sent for as long as a call may take.
        stop = self.ramp + self.seconds + (self.timeout if due is not None else 0.0)
        used = min(count, self.clients)
        return [
            Callers(
                address=self.address,
                scenario=self.scenario,
                mix=self.mix,
                seed=self.seed,
                process=number,
                clients=self.clients // used + (number < self.clients % used),
                due=None if due is None else due[number::used],
                stop=stop,
                timeout=self.timeout,
            )
            for number in range(used)
        ]


@dataclass(frozen=True, slots=True)
class Objective:
    """A service-level objective: a percentile of the latency, at most so many seconds."""

    percent: float
    seconds: float

    @classmethod
    def parse(cls, text: str) -> Objective:
        """Read ``p99=20ms`` or ``p99.9=0.5s``."""
        match = re.fullmatch(r"p(\d+(?:\.\d+)?)=(\d+(?:\.\d+)?)(ms|s)", text)
        if match is None or not 0 < float(match[1]) < 100:
            raise argparse.ArgumentTypeError(f"{text!r} is not like p99=20ms")
        return cls(float(match[1]), float(match[2]) * (1e-3 if match[3] == "ms" else 1.0))


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


def meets(outcomes: Sequence[Outcome], load: Load, objective: Objective) -> bool:
    """Whether the calls met an objective, failures included."""
    counted = [outcome for outcome in outcomes if outcome.due >= load.ramp]
    if not counted:
        return False
    failed = sum(bool(outcome.error) for outcome in counted)
    latencies = [outcome.done - outcome.due for outcome in counted]
    fast = float(np.percentile(latencies, objective.percent)) <= objective.seconds
    return fast and failed <= _FAILURES * len(counted)


def perform(load: Load, pool: Processes) -> list[Outcome]:
    """Put the load on the server."""
    seconds = load.ramp + load.seconds + 2 * load.timeout
    found = pool.perform(load.tasks(pool.count), seconds)
    return [outcome for outcomes in found for outcome in outcomes]


def search(load: Load, pool: Processes, objective: Objective, say: Any = print) -> dict[str, Any]:
    """Find the highest rate that meets an objective, by bisection on a logarithmic scale.

    It starts from what clients that call without a pause reach, which no timetable can exceed for
    long.
    """
    flat_out = replace(load, rate=None, ramp=0.0)
    most = summarise_calls(perform(flat_out, pool), flat_out)["answered_per_second"]
    say(f"without a pause: {most:.0f} calls/s")
    low, high = 0.0, 1.1 * most
    trials = []
    while high > _CLOSE * max(low, most / 256):
        rate = math.sqrt(max(low, most / 256) * high)
        trial = replace(load, rate=rate)
        outcomes = perform(trial, pool)
        good = meets(outcomes, trial, objective)
        low, high = (rate, high) if good else (low, rate)
        found = summarise_calls(outcomes, trial)
        trials.append({**found, "met": good})
        say(f"{rate:.0f} calls/s: {'met' if good else 'missed'}, {_words(found)}")
    return {
        "objective": {"percent": objective.percent, "seconds": objective.seconds},
        "without_a_pause": most,
        "highest_rate": low,
        "trials": trials,
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("address", metavar="HOST:PORT")
    loads = parser.add_mutually_exclusive_group()
    loads.add_argument("--rate", type=float, metavar="R", help="calls a second, open loop")
    loads.add_argument(
        "--concurrency", type=int, metavar="N", help="N clients that call without a pause"
    )
    loads.add_argument(
        "--slo", type=Objective.parse, metavar="pQ=T", help="search the rate, such as p99=20ms"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="default: %(default)s")
    parser.add_argument("--ramp", type=float, default=1.0, metavar="S", help="default: %(default)s")
    parser.add_argument("--arrivals", choices=("poisson", "even"), default="poisson")
    parser.add_argument(
        "--clients", type=int, default=64, help="most calls in flight (default: %(default)s)"
    )
    parser.add_argument("--processes", type=int, default=2, help="default: %(default)s")
    parser.add_argument(
        "--mix",
        type=_mix,
        default={"losses": 1.0},
        metavar="losses=8,values=1",
        help=f"kinds of calls and their shares, of {', '.join(OUTPUTS)} (default: losses)",
    )
    parser.add_argument("--rows", type=int, default=1_000, help="default: %(default)s")
    parser.add_argument("--expressions", type=int, default=300, help="default: %(default)s")
    parser.add_argument("--precision", choices=("fast", "precise"), default="fast")
    parser.add_argument(
        "--tier", choices=("auto", "interpreter", "compiled"), default="interpreter"
    )
    parser.add_argument("--timeout", type=float, default=10.0, help="of a call (default: 10)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, metavar="FILE.json")


def run(options: argparse.Namespace) -> None:
    """Run the command with its parsed flags."""
    load = _load(options)
    with connect(load.address) as client:  # says at once what is wrong with the address
        client.info(_ANSWER_SECONDS)
    with processes(max(1, min(options.processes, load.clients))) as pool:
        if options.slo:
            found = search(load, pool, options.slo)
            print(f"highest rate that meets it: {found['highest_rate']:.0f} calls/s")
        else:
            found = summarise_calls(perform(load, pool), load)
            print(_table(found))
    if options.out:
        date = time.strftime("%Y-%m-%d", time.gmtime())
        options.out.write_text(json.dumps({"date": date, **found}, indent=1) + "\n")


def _load(options: argparse.Namespace) -> Load:
    if not options.slo and not options.rate and not options.concurrency:
        raise InvalidArgumentError(
            "nothing says how much load", "RATE_MISSING", "Give --rate, --concurrency or --slo"
        )
    for name in ("rate", "concurrency", "seconds", "clients", "timeout", "rows", "expressions"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise InvalidArgumentError(f"--{name} {value} is not positive", "BAD_LOAD", "Raise it")
    return Load(
        address=options.address,
        scenario=Scenario(
            engine="remote",
            rows=options.rows,
            expressions=options.expressions,
            precision=options.precision,
            tier=options.tier,
        ),
        mix=options.mix,
        rate=options.rate,
        seconds=options.seconds,
        ramp=0.0 if options.concurrency else max(0.0, options.ramp),
        arrivals=options.arrivals,
        clients=options.concurrency or options.clients,
        timeout=options.timeout,
        seed=options.seed,
    )


def _mix(text: str) -> Mix:
    try:
        pairs = [part.partition("=") for part in text.split(",")]
        mix = {name.strip(): float(share or 1) for name, _, share in pairs}
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not like losses=8,values=1") from error
    if not set(mix) <= set(OUTPUTS) or min(mix.values()) <= 0:
        raise argparse.ArgumentTypeError(f"kinds are {', '.join(OUTPUTS)}, shares positive")
    return mix


def _percentiles(seconds: Sequence[float]) -> dict[str, float | None]:
    ordered = np.sort(np.asarray(seconds, dtype=np.float64))
    if not len(ordered):
        return {}
    told = {f"p{percent:g}": told_percentile(ordered, percent) for percent in PERCENTILES}
    return {"mean": float(ordered.mean()), **told, "greatest": float(ordered[-1])}


def _words(found: dict[str, Any]) -> str:
    told = {name: value for name, value in found["latency"].items() if value is not None}
    parts = [f"{name} {1e3 * value:.1f} ms" for name, value in told.items() if name[0] == "p"]
    failed = sum(found["failed"].values())
    return ", ".join([*parts, *([f"{failed} failed"] if failed else [])])


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
    if found["rate"]:
        lines.append(
            f"{found['late']:.1%} were sent more than 1 ms late: clients or machine were busy"
        )
    else:
        lines.append("clients that wait for answers slow down with the server: see --rate")
    lines += [f"failed: {reason} {count}" for reason, count in found["failed"].items()]
    return "\n".join(lines)
