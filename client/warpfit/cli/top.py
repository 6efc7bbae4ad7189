"""``warpfit top``: a live view of a server's Prometheus metrics.

Whoever answers chooses the texts. They are shown as they are: without control characters, and not
as markup.
"""

import math
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from itertools import pairwise
from typing import Any, Final, TypeAlias
from urllib.error import URLError

from warpfit.errors import InvalidArgumentError, UnavailableError, WarpfitError, require

_TIMEOUT_SECONDS = 5.0
#: Most bytes that are read of a page.
_MOST_BYTES = 64 << 20
_STAGES = ("decode", "queue", "copy", "kernel", "encode")


# ------------------------------------------------------------------------------ reading of metrics


@dataclass(frozen=True, slots=True, eq=False)
class Scrape:
    """All samples of one moment."""

    moment: float
    """``time.monotonic()``."""
    samples: dict[tuple[str, frozenset[tuple[str, str]]], float]
    """Values by name and labels."""

    def matching(self, name: str, **labels: str) -> Iterator[tuple[dict[str, str], float]]:
        """Yield labels and value of every sample of this name that has these labels."""
        for (known, pairs), value in self.samples.items():
            if known == name and labels.items() <= pairs:
                yield dict(pairs), value

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of this name that have these labels."""
        return sum(value for _, value in self.matching(name, **labels))

    def labels(self, name: str, label: str) -> list[str]:
        """Return the values of a label, in order."""
        return sorted({pairs[label] for pairs, _ in self.matching(name) if label in pairs})


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """Two scrapes of one server; a counter that is lower in the second one was reset."""

    before: Scrape
    after: Scrape

    def increase(self, name: str, **labels: str) -> float:
        """Return how much counters have grown together."""
        grown = self.after.total(name, **labels) - self.before.total(name, **labels)
        return grown if grown >= 0 else self.after.total(name, **labels)

    def rate(self, name: str, **labels: str) -> float:
        """Return how much counters have grown for each second."""
        return self.increase(name, **labels) / max(self.after.moment - self.before.moment, 1e-9)

    def mean(self, name: str, **labels: str) -> float | None:
        """Return the mean of what a histogram observed in between; None without observations."""
        count = self.increase(f"{name}_count", **labels)
        return self.increase(f"{name}_sum", **labels) / count if count else None

    def quantile(self, share: float, name: str, **labels: str) -> float | None:
        """Return a quantile of what a histogram observed, interpolated as Prometheus does."""
        bounds = {pairs["le"] for pairs, _ in self.after.matching(f"{name}_bucket", **labels)}
        buckets = [
            (float(bound), self.increase(f"{name}_bucket", le=bound, **labels))
            for bound in sorted(bounds, key=float)
        ]
        if not buckets or not buckets[-1][1]:
            return None
        wanted = share * buckets[-1][1]
        for (low, below), (high, count) in pairwise([(0.0, 0.0), *buckets]):
            if count >= wanted:
                if high == float("inf") or count <= below:
                    return low
                return low + (high - low) * (wanted - below) / (count - below)
        return None


def scrape(address: str) -> Scrape:
    """Read all metrics of a server from its metrics port; raise WarpfitError if there are none."""
    require("prometheus_client", "warpfit[top]")
    from prometheus_client.parser import text_string_to_metric_families as parse

    from warpfit.codec import printable  # loaded late, because it brings gRPC

    try:
        with urllib.request.urlopen(
            f"http://{address}/metrics", timeout=_TIMEOUT_SECONDS
        ) as answer:
            text = answer.read(_MOST_BYTES).decode()
        samples = {
            (
                sample.name,
                frozenset((label, printable(value)) for label, value in sample.labels.items()),
            ): float(sample.value)
            for family in parse(text)
            for sample in family.samples
        }
        for name, pairs in samples:
            if name.endswith("_bucket"):
                float(dict(pairs)["le"])
    except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
        raise _no_metrics(address, error) from error
    if not any(name.startswith("warpfit_") for name, _ in samples):
        raise _no_metrics(address, None)
    return Scrape(time.monotonic(), samples)


def _no_metrics(address: str, error: Exception | None) -> WarpfitError:
    """Return the error for an address where nothing answers, or something without metrics."""
    remedy = (
        "Give the server's metrics port, which `warpfit serve --metrics-port PORT` opens and its "
        "start-up line names; the port for gRPC has no metrics"
    )
    cause = error.reason if isinstance(error, URLError) else error
    if isinstance(cause, TimeoutError | ConnectionRefusedError | socket.gaierror):
        return UnavailableError(f"nothing answers at {address}: {cause}", "NO_METRICS", remedy)
    return InvalidArgumentError(
        f"what answers at {address} has no metrics of warpfit", "NO_METRICS", remedy, "address"
    )


# --------------------------------------------------------------------------------------- the view


def top(address: str, interval: float, *, once: bool) -> None:
    """Show the view until interrupted; with ``once`` print what happens in one interval."""
    require("rich", "warpfit[top]")
    from rich.console import Console
    from rich.live import Live

    console = Console(markup=False, emoji=False)
    before = scrape(address)
    time.sleep(interval)
    after = scrape(address)
    if once:
        console.print(view(Change(before, after)))
        return
    with Live(view(Change(before, after)), console=console, screen=True) as live:
        while True:
            time.sleep(interval)
            try:
                before, after = after, scrape(address)
                live.update(view(Change(before, after)))
            except UnavailableError:
                live.update(f"{address} does not answer")


def view(change: Change) -> Any:
    """Lay out what happened between two scrapes, as a rich renderable."""
    from rich.columns import Columns

    after = change.after
    build = next((labels for labels, _ in after.matching("warpfit_build_info")), {})
    state = "ready" if after.total("warpfit_ready") else "NOT READY"
    summary = _table(f"warpfit {build.get('version', '')} {build.get('engine', '')}: {state}")
    rates = {"calls/s": "requests", "programs/s": "programs", "token-rows/s": "token_rows"}
    for title, name in rates.items():
        summary.add_row(title, _number(change.rate(f"warpfit_{name}_total")))
    summary.add_row("in flight", _number(after.total("warpfit_requests_in_flight")))
    summary.add_row("data sets", _number(after.total("warpfit_resident_datasets")))
    sizes = ("warpfit_resident_bytes", "warpfit_resident_limit_bytes")
    summary.add_row("resident", _share(after, *sizes))
    summary.add_row("evictions", _number(after.total("warpfit_evictions_total")))
    summary.add_row("engine restarts", _number(after.total("warpfit_engine_restarts_total")))
    tables = [summary]
    for (title, label, metric), cells in _TABLES.items():
        table = _table(title, label, *cells)
        for value in after.labels(metric, label):
            of = {label: value}
            table.add_row(value, *(cell(change, of) for cell in cells.values()))
        tables.append(table)
    stages = _table("stages", "stage", "mean", "p99")
    for stage in _STAGES:
        mean = change.mean("warpfit_stage_seconds", stage=stage)
        if mean is not None:
            high = change.quantile(0.99, "warpfit_stage_seconds", stage=stage)
            stages.add_row(stage, _seconds(mean), _seconds(high))
    tables.insert(3, stages)  # behind those of devices and calls
    return Columns([table for table in tables if table.row_count], padding=(0, 3))


def _table(title: str, *columns: str) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_header=bool(columns))
    for number, column in enumerate(columns or ("", "")):
        table.add_column(column, justify="right" if number else "left", min_width=10)
    return table


def _share(found: Scrape, used: str, total: str, **labels: str) -> str:
    return f"{_bytes(found.total(used, **labels))} of {_bytes(found.total(total, **labels))}"


def _number(value: float) -> str:
    return _scaled(value, 1000.0, ("", "k", "M", "G", "T", "P"))


def _bytes(value: float) -> str:
    return _scaled(value, 1024.0, (" B", " KiB", " MiB", " GiB", " TiB"))


def _seconds(value: float | None) -> str:
    return "-" if value is None else _scaled(value * 1e6, 1000.0, (" us", " ms", " s"))


def _scaled(value: float, base: float, units: Sequence[str]) -> str:
    """Write a number with the first unit that leaves it below ``base``, or the last."""
    if not math.isfinite(value):
        return str(value)
    power = 0
    while abs(value) >= base and power < len(units) - 1:
        value, power = value / base, power + 1
    text = f"{value:.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.3g}"
    return text + units[power]


# ------------------------------------------------------------------------------------- the tables

#: What a cell shows of a change, of the samples with some labels.
Cell: TypeAlias = Callable[[Change, dict[str, str]], str]


def _rate(name: str) -> Cell:
    return lambda change, of: _number(change.rate(name, **of))


def _total(name: str, shown: Callable[[float], str] = _number) -> Cell:
    return lambda change, of: shown(change.after.total(name, **of))


def _quantile(share: float) -> Cell:
    name = "warpfit_request_seconds"
    return lambda change, of: _seconds(change.quantile(share, name, **of))


#: Cells of tables by their title, a label, and the metric whose values of the label are the rows.
_TABLES: Final[Mapping[tuple[str, str, str], Mapping[str, Cell]]] = {
    ("devices", "device", "warpfit_device_ready"): {
        "state": _total("warpfit_device_ready", lambda up: "ready" if up else "NOT READY"),
        "calls/s": _rate("warpfit_evaluations_total"),
        "work left": _total("warpfit_device_work_seconds", _seconds),
        "restarts": _total("warpfit_engine_restarts_total"),
    },
    ("calls", "method", "warpfit_requests_total"): {
        "calls/s": _rate("warpfit_requests_total"),
        "failed/s": lambda change, of: _number(
            change.rate("warpfit_requests_total", **of)
            - change.rate("warpfit_requests_total", **of, status="OK")
        ),
        "p50": _quantile(0.5),
        "p90": _quantile(0.9),
        "p99": _quantile(0.99),
    },
    ("tenants", "tenant", "warpfit_requests_total"): {
        "calls/s": _rate("warpfit_requests_total"),
        "programs/s": _rate("warpfit_programs_total"),
        "token-rows/s": _rate("warpfit_token_rows_total"),
    },
    ("caches", "cache", "warpfit_cache_hits_total"): {
        "hits/s": _rate("warpfit_cache_hits_total"),
        "misses/s": _rate("warpfit_cache_misses_total"),
        "evictions": _total("warpfit_cache_evictions_total"),
        "size": _total("warpfit_cache_bytes", _bytes),
    },
    ("GPUs", "gpu", "warpfit_gpu_memory_used_bytes"): {
        "busy": _total("warpfit_gpu_utilization_ratio", lambda part: f"{100 * part:.0f} %"),
        "memory": lambda change, of: _share(
            change.after, "warpfit_gpu_memory_used_bytes", "warpfit_gpu_memory_total_bytes", **of
        ),
    },
    ("processes", "process", "warpfit_process_resident_bytes"): {
        "memory": _total("warpfit_process_resident_bytes", _bytes),
        "open files": _total("warpfit_process_open_files"),
    },
}
