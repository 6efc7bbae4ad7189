"""Calls, and the load generator: processes that call by a timetable, or without a pause.

With a timetable the latency of a call counts from the moment at which it was due, not from the one
at which a client was free to send it. A server that stalls for a second makes the calls that were
due meanwhile late, and their waiting is part of the result; to count only from sending is the
mistake that Tene calls coordinated omission.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import signal
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from threading import Barrier
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit.bench.batches import Batch, Expressions, table
from warpfit.bench.scenarios import Kind, Scenario
from warpfit.calls.dataset_handle import DatasetHandle
from warpfit.client import Client, connect
from warpfit.errors import WarpfitError
from warpfit.request import STAGES, Timings
from warpfit.transport.settings import RetryPolicy

Floats = NDArray[np.float64]
#: Batches that a process prepares: drawing them between the calls would take the processor from
#: server and clients.
_BATCHES: Final = 32
#: A process that starts imports, connects and uploads within this time.
_PATIENCE_SECONDS: Final = 120.0
#: Iterations of a fit: what a local search in a GP run would spend.
_FIT_ITERATIONS: Final = 10


@dataclass(frozen=True, slots=True)
class Call:
    """One call, in nanoseconds."""

    wall: int
    timings: Timings

    @property
    def engine(self) -> int:
        """Time in the engine: kernels, and the copies and preparations for them."""
        return self.timings.copy_in + self.timings.compute + self.timings.copy_out

    def to_json(self) -> dict[str, float]:
        """Return seconds, as a whole and by stage; ``rest`` is client, wire and front end."""
        stages = {name: getattr(self.timings, name) / 1e9 for name in STAGES}
        rest = self.wall - self.engine - self.timings.decode - self.timings.queue
        return {"wall": self.wall / 1e9, **stages, "rest": max(0, rest) / 1e9}


def call(
    client: Client, data: DatasetHandle, scenario: Scenario, batch: Batch, **options: Any
) -> Call:
    """Perform one call as the scenario says; ``options`` are keywords of the client's method."""
    options["precision"] = "precise" if scenario.precision == "float64" else scenario.precision
    started = time.perf_counter_ns()
    if scenario.kind is Kind.OPTIMIZE:
        timings = client.optimize(data, *batch, max_iterations=_FIT_ITERATIONS, **options).timings
    else:
        timings = client.run(
            data,
            *batch,
            values=scenario.output == "values",
            loss=None if scenario.output == "values" else "mse",
            gradient=scenario.output == "gradients",
            tier=scenario.tier,
            **options,
        ).timings
    return Call(time.perf_counter_ns() - started, timings)


class Outcome(NamedTuple):
    """One call; seconds after the start."""

    due: float
    sent: float
    """NaN if the time was over before a client was free."""
    done: float
    """The moment when it ended; for a call that was never sent, the end of the load."""
    error: str
    """Reason of a failure, or empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The load that clients put on a server."""

    address: str
    scenario: Scenario
    """The kind of every call."""
    rate: float | None = None
    """Calls a second; None for clients that call without a pause."""
    seconds: float
    ramp: float = 0.0
    """Seconds during which the rate grows to ``rate``; they are not part of the result."""
    clients: int = 64
    """Most calls in flight."""
    processes: int = 2
    timeout: float = 10.0
    retries: bool = False
    """Whether a client repeats calls that the server was too busy for, and waits meanwhile."""
    seed: int = 1

    def perform(self) -> list[Outcome]:
        """Put the load on the server: deal timetable and clients out to processes, and wait."""
        due = None
        if self.rate is not None:
            due = arrivals(self.rate, self.seconds, self.ramp, self.seed)
        count = max(1, min(self.processes, self.clients))
        shares = [self.clients // count + (n < self.clients % count) for n in range(count)]
        tasks = [
            (self, number, clients, None if due is None else due[number::count].tolist())
            for number, clients in enumerate(shares)
        ]
        context = multiprocessing.get_context("spawn")
        barrier = context.Barrier(count)
        patience = self.ramp + self.seconds + 2 * self.timeout + _PATIENCE_SECONDS
        with ProcessPoolExecutor(count, context, _keep_barrier, (barrier,)) as pool:
            found = list(pool.map(_run_process, tasks, timeout=patience))
        return [outcome for outcomes in found for outcome in outcomes]


Task = tuple[Load, int, int, list[float] | None]


def run_clients(task: Task, barrier: Barrier) -> list[Outcome]:
    """Connect the clients of one process, wait for the other processes, and call.

    A task has the load, the number of the process, that of its clients, and when its calls begin,
    seconds after the start; None to call without a pause.
    """
    load, process, count, due = task
    scenario, drawn = load.scenario, Expressions(load.seed, (process,))
    batches = [drawn.draw(scenario.expressions, scenario.workload) for _ in range(_BATCHES)]
    given = table(scenario.rows, load.seed)
    retry = RetryPolicy() if load.retries else RetryPolicy(total_seconds=0.0)
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(load.address, retry=retry)) for _ in range(count)]
        uploaded = [client.upload(given.X, given.y) for client in clients]
        for client, data in zip(clients, uploaded, strict=True):  # warms up
            call(client, data, scenario, batches[0])
        # The clients take from both iterators, whose next() is atomic.
        moments = itertools.repeat(None) if due is None else iter(due)
        turns = itertools.cycle(batches)
        barrier.wait(_PATIENCE_SECONDS)
        start = time.monotonic()

        def loop(client: Client, data: DatasetHandle) -> list[Outcome]:
            outcomes: list[Outcome] = []
            for moment in moments:
                now = time.monotonic() - start
                if moment is None and now >= load.ramp + load.seconds:
                    break
                due = now if moment is None else moment
                perform = functools.partial(call, client, data, scenario, next(turns))
                outcomes.append(_outcome(perform, load, due, start))
            return outcomes

        with ThreadPoolExecutor(count) as pool:
            return [outcome for found in pool.map(loop, clients, uploaded) for outcome in found]


def _outcome(perform: Callable[..., Call], load: Load, due: float, start: float) -> Outcome:
    time.sleep(max(0.0, start + due - time.monotonic()))
    sent = time.monotonic() - start
    # With a timetable, what is late is still sent for as long as a call may take.
    if sent > load.ramp + load.seconds + load.timeout:
        return Outcome(due, np.nan, sent, "NOT_SENT")
    error = ""
    try:
        perform(timeout=load.timeout)
    except WarpfitError as failure:
        error = failure.reason or failure.status
    return Outcome(due, sent, time.monotonic() - start, error)


def arrivals(rate: float, seconds: float, ramp: float, seed: int) -> Floats:
    """Return the seconds after the start at which calls of many independent callers begin.

    It is a Poisson process whose rate grows from 0 to ``rate``, calls a second, during ``ramp``
    seconds and stays there for ``seconds``.
    """
    total = rate * (ramp / 2 + seconds)
    rng = np.random.default_rng(seed)
    counts = np.cumsum(rng.exponential(size=int(total + 6 * np.sqrt(total) + 10)))
    counts = counts[counts < total]
    # The inverse of the integrated rate: the moment by which so many calls are due.
    growing = np.sqrt(2 * counts * ramp / rate)
    return np.where(counts < rate * ramp / 2, growing, counts / rate + ramp / 2)


def _keep_barrier(barrier: Barrier) -> None:
    global _barrier
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    _barrier = barrier


def _run_process(task: Task) -> list[Outcome]:
    try:
        return run_clients(task, _barrier)
    except BaseException:
        _barrier.abort()
        raise


_barrier: Barrier
