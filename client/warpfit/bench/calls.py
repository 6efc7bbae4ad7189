"""The process of a load generator: clients that call by a timetable, or without a pause.

With a timetable the latency of a call counts from the moment at which it was due, not from the one
at which a client got round to sending it. A server that stalls for a second makes the calls that
were due meanwhile late, and their waiting is part of the result; to count only from sending is the
mistake that Tene calls coordinated omission.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.bench.scenarios import Kind, Scenario
from warpfit.bench.work import Batch, Expressions, table
from warpfit.calls.dataset_handle import DatasetHandle
from warpfit.client import Client, connect
from warpfit.errors import WarpfitError
from warpfit.transport.settings import RetryPolicy

#: Batches of each kind that a process prepares.
_BATCHES: Final = 8
#: Kinds of calls by name, and their share of the mix.
Mix = dict[str, float]
OUTPUTS: Final = ("losses", "values", "gradients", "fits")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One call; seconds after the common start."""

    due: float
    sent: float
    """NaN if the time was over before a client was free."""
    done: float
    """When it ended; of one that was never sent, when the time was over."""
    error: str
    """Reason of a failure, empty if there was none."""


@dataclass(frozen=True, slots=True, eq=False)
class Callers:
    """What one process of a load generator does."""

    address: str
    scenario: Scenario
    """Rows, expressions, precision and tier of every call."""
    mix: Mix
    seed: int
    process: int
    clients: int
    due: NDArray[np.float64] | None
    """When calls begin, seconds after the start; None to call without a pause."""
    stop: float
    """Seconds after the start at which nothing is sent any more."""
    timeout: float

    def perform(self, begin: Callable[[], float]) -> list[Outcome]:
        """Call as the timetable says, or without a pause."""
        given = table(self.scenario.rows, self.seed)
        work = self._work()
        kinds = self._kinds()
        with ExitStack() as stack:
            never = RetryPolicy(total_seconds=0.0)
            clients = [
                stack.enter_context(connect(self.address, retry=never)) for _ in range(self.clients)
            ]
            uploaded = [client.upload(given.X, given.y) for client in clients]
            for client, data in zip(clients, uploaded, strict=True):  # connects, and warms up
                self._send(client, data, *work[kinds[0]][0])
            numbers = itertools.count()  # its next() is atomic
            start = begin()

            def loop(number: int) -> list[Outcome]:
                done: list[Outcome] = []
                for turn in numbers:
                    due = self._due(turn, start)
                    if due is None:
                        return done
                    batches = work[kinds[turn % len(kinds)]]
                    scenario, batch = batches[turn % len(batches)]
                    outcome = self._call(
                        clients[number], uploaded[number], scenario, batch, due, start
                    )
                    done.append(outcome)
                return done

            with ThreadPoolExecutor(self.clients) as pool:
                found = list(pool.map(loop, range(self.clients)))
        return [outcome for outcomes in found for outcome in outcomes]

    def _due(self, turn: int, start: float) -> float | None:
        """When a call is due; None if there is none any more."""
        if self.due is not None:
            return float(self.due[turn]) if turn < len(self.due) else None
        now = time.monotonic() - start
        return max(0.0, now) if now < self.stop else None

    def _call(
        self,
        client: Client,
        data: DatasetHandle,
        scenario: Scenario,
        batch: Batch,
        due: float,
        start: float,
    ) -> Outcome:
        time.sleep(max(0.0, start + due - time.monotonic()))
        sent = time.monotonic() - start
        if sent > self.stop and self.due is not None:
            return Outcome(due, np.nan, sent, "NOT_SENT")
        error = ""
        try:
            self._send(client, data, scenario, batch)
        except WarpfitError as failure:
            error = failure.reason or failure.status
        return Outcome(due, sent, time.monotonic() - start, error)

    def _send(self, client: Client, data: DatasetHandle, scenario: Scenario, batch: Batch) -> None:
        options: dict[str, Any] = {"precision": scenario.precision, "timeout": self.timeout}
        if scenario.kind is Kind.OPTIMIZE:
            client.optimize(data, *batch, max_iterations=10, **options)
            return
        wants_values = scenario.output == "values"
        client.run(
            data,
            *batch,
            values=wants_values,
            loss=None if wants_values else "mse",
            gradient=scenario.output == "gradients",
            tier=scenario.tier,
            **options,
        )

    def _work(self) -> dict[str, list[tuple[Scenario, Batch]]]:
        drawn = Expressions(self.seed, (self.process,))
        size = self.scenario.expressions, self.scenario.tokens
        return {
            name: [(of_kind(self.scenario, name), drawn.fresh(*size)) for _ in range(_BATCHES)]
            for name in self.mix
        }

    def _kinds(self) -> Sequence[str]:
        """Kinds of a long row of calls, drawn by their shares."""
        rng = np.random.default_rng([self.seed, self.process])
        shares = np.array(list(self.mix.values()))
        return [str(name) for name in rng.choice(list(self.mix), 997, p=shares / shares.sum())]


def of_kind(scenario: Scenario, name: str) -> Scenario:
    """Make the scenario of a kind of calls in a mix."""
    if name == "fits":
        return replace(scenario, kind=Kind.OPTIMIZE)
    return replace(scenario, output=name)
