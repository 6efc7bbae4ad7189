"""Reader of a server's Prometheus metrics, and what changed between two readings."""

import socket
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPException
from itertools import pairwise
from urllib.error import URLError

from warpfit.errors import InvalidArgumentError, UnavailableError, WarpfitError, require

_TIMEOUT_SECONDS = 5.0
#: Most bytes that are read of a page.
_MOST_BYTES = 64 << 20


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
        return sorted({pairs[label] for pairs, _ in self.matching(name)})


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
                return low if high == float("inf") else _between(low, high, below, count, wanted)
        return None


def scrape(address: str) -> Scrape:
    """Read all metrics of a server from its metrics port; raise WarpfitError if there are none."""
    require("prometheus_client", "warpfit[top]")
    from prometheus_client.parser import text_string_to_metric_families as parse

    try:
        with urllib.request.urlopen(
            f"http://{address}/metrics", timeout=_TIMEOUT_SECONDS
        ) as answer:
            text = answer.read(_MOST_BYTES).decode()
        samples = {
            (sample.name, frozenset(sample.labels.items())): float(sample.value)
            for family in parse(text)
            for sample in family.samples
        }
    except (OSError, HTTPException, ValueError) as error:
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


def _between(low: float, high: float, below: float, count: float, wanted: float) -> float:
    return low + (high - low) * (wanted - below) / (count - below) if count > below else low
