"""Callers at the level of gRPC, one at a time, in loops, and in processes of their own."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import grpc

from support.load.processes import Processes, in_threads
from support.servers.rpcs import OWN_CONNECTION, SERVICE, bearer, detail_of

EVALUATE, OPTIMIZE = SERVICE + "Evaluate", SERVICE + "Optimize"
#: The threads of a generator take turns of this many seconds: its Python is not what is measured.
TURN_SECONDS = 0.0005


class Outcome(NamedTuple):
    """How a call ended, and when by ``time.perf_counter()``, which all processes share."""

    status: str
    seconds: float
    moment: float


Outcomes = list[Outcome]


@dataclass(frozen=True)
class Target:
    """What is called, and how."""

    address: str
    token: str
    request: bytes
    method: str = EVALUATE


class Caller:
    """Sends one request again and again over a connection of its own."""

    def __init__(self, target: Target) -> None:
        channel = grpc.insecure_channel(target.address, OWN_CONNECTION)
        self._method = channel.unary_stream(target.method)
        self._metadata = bearer(target.token)
        self._request = target.request
        grpc.channel_ready_future(channel).result(30)  # connecting is not measured

    def aim(self, target: Target) -> None:
        """Ask for something else of the same method from now on, over the same connection."""
        self._request = target.request

    def call(self) -> tuple[Outcome, float]:
        """Call once; return the outcome, and the seconds to wait before the next."""
        started = time.perf_counter()
        status, wait = "OK", 0.0
        try:
            for _ in self._method(self._request, timeout=60, metadata=self._metadata):
                continue
        except grpc.RpcError as error:
            status, wait = error.code().name, detail_of(error).retry_after_ms / 1000
        ended = time.perf_counter()
        return Outcome(status, ended - started, ended), wait


def closed_loop(caller: Caller, seconds: float, least: float = 0.0) -> Outcomes:
    """Call for some seconds, again once there is an answer, or once a refusal allows it.

    From one call to the next are ``least`` seconds at least.
    """
    outcomes = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        outcome, wait = caller.call()
        outcomes.append(outcome)
        pause = max(wait, least - outcome.seconds)
        time.sleep(max(0.0, min(pause, end - time.perf_counter())))
    return outcomes


def closed_loops(callers: list[Caller], seconds: float) -> Outcomes:
    outcomes: Outcomes = []
    with in_threads(lambda caller: outcomes.extend(closed_loop(caller, seconds)), callers):
        pass
    return outcomes


def open_loop(callers: list[Caller], rate: float, seconds: float) -> Outcomes:
    """Call at a fixed rate whatever the answers are; refusals are not repeated."""
    outcomes: Outcomes = []
    started = time.perf_counter()
    turns = iter(range(int(rate * seconds)))
    lock = threading.Lock()

    def work(caller: Caller) -> None:
        while True:
            with lock:
                turn = next(turns, None)
            if turn is None:
                return
            time.sleep(max(0.0, started + turn / rate - time.perf_counter()))
            outcomes.append(caller.call()[0])

    with in_threads(work, callers):
        pass
    return outcomes


class Crew(Processes):
    """Processes that share so many ``callers``, on the cores that its maker may use."""

    def __init__(self, target: Target, processes: int, callers: int) -> None:
        shares = [len(range(number, callers, processes)) for number in range(processes)]
        super().__init__(_serve_crew, [(target, share) for share in shares])

    def closed(self, clients: int, seconds: float) -> Outcomes:
        count = len(self.ends)
        shares = [len(range(number, clients, count)) for number in range(count)]
        return list(chain(*self.ask([("closed", share, seconds) for share in shares])))

    def open(self, rate: float, seconds: float) -> Outcomes:
        count = len(self.ends)
        return list(chain(*self.ask([("open", rate / count, seconds)] * count)))


def _serve_crew(target: Target, count: int, end: Any) -> None:
    """Process of a crew: does what it is told until it is told nothing more."""
    sys.setswitchinterval(TURN_SECONDS)
    callers = [Caller(target) for _ in range(count)]
    end.send(None)
    while (order := end.recv()) is not None:
        kind, amount, seconds = order
        if kind == "closed":
            end.send(closed_loops(callers[:amount], seconds))
        else:
            end.send(open_loop(callers, amount, seconds))


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """Let what this thread starts in the ``with`` block run on some cores only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
