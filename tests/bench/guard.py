"""How the server treats too much work: ten times overload, and a greedy tenant beside a modest one.

With ``--seconds 4`` of each phase it takes some 150 s. Load comes from processes of their own.
Against overload, server and generator have cores of their own, so that the generator takes nothing
of the server's at the peak and at ten times that, and the same processes call in both. With a
greedy tenant all share all cores. Ratios compare figures of one run, measured in turn.
"""

import itertools
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from harness import SEED, ServerProcess, arguments, percentiles, save

import warpfit
from support.load import callers
from support.load.callers import Caller, Crew, Outcomes, Target, closed_loop, on_cores
from support.load.processes import beside, in_threads
from support.random_programs import thesis_mix
from support.servers.server import tenants_file, token_file
from warpfit import codec
from warpfit.calls.arguments import build_evaluation, build_fit

VARIABLES = 10
#: Calls a second that each tenant may make beside another: all share a few cores.
RATE = 200
#: Seconds between two calls of the modest tenant at least, so that it stays below that.
PACE = 1.1 / RATE
#: Times that what is compared is measured in turn, so that a neighbour's work is in all of it.
ROUNDS = 4
#: Times its latency alone that the modest tenant takes from one call to the next at least: it asks
#: for less than half of the engine, which is its share beside another.
REST = 2.5
#: Pause of the client that watches how long refusals take.
WATCH_SECONDS = 0.02
#: Clients of which the number is taken that gets most answers; one tenant has twelve places.
CLIENTS = (2, 4, 8, 12)
#: Most programs that are drawn for a batch; larger ones repeat them.
DRAWN = 1000
#: Connections of the generator of overload.
CALLERS = 10 * CLIENTS[-1]
_CONTEXT = multiprocessing.get_context("spawn")
_PAUSE = -1


class Job(NamedTuple):
    """Calls that are all alike: evaluations, or fits of some iterations."""

    programs: int
    rows: int
    iterations: int = 0
    gradient: bool = False


class Work(NamedTuple):
    """What is asked of an engine, greedy tenants with a number of clients each."""

    overload: Job
    victim: Job
    greedy: dict[str, tuple[int, Job]]


def work(rows: int) -> Work:
    """Work of batches over ``rows`` rows; small messages, so that sending them costs little."""
    half = rows // 2
    greedy = {
        "batches of the same size": (16, Job(100, half)),
        "batches ten times larger": (8, Job(1000, half)),
        "very small batches": (16, Job(1, 1000)),
        "fits": (8, Job(30, half, iterations=3)),
        "very large batches with gradients": (4, Job(30_000, 1000, gradient=True)),
    }
    return Work(Job(200, rows), Job(100, half), greedy)


#: Of each engine: a batch takes some 80 ms of a core, and some milliseconds of a GPU.
WORK = {"cpu": work(100_000), "cuda": work(4_000_000)}


def prepared(address: str, token: str, job: Job, number: int = 0) -> Target:
    """Upload the job's data; return how it is asked for, with other programs by each number."""
    rng = np.random.default_rng(SEED)
    X = rng.uniform(0.5, 2, size=(job.rows, VARIABLES)).astype(np.float32)
    with warpfit.connect(address, token=token) as client:
        data = client.upload(X, X[:, 0])
    drawn = thesis_mix(SEED + number, min(job.programs, DRAWN))
    programs, parameters = (-(-job.programs // DRAWN) * some for some in drawn)
    if job.iterations:
        fit = build_fit(data, programs, parameters, {"max_iterations": job.iterations})
        message = codec.fit_to_message(fit).SerializeToString()
        return Target(address, token, message, callers.OPTIMIZE)
    options = {"loss": "mse", "gradient": job.gradient}
    evaluation, _ = build_evaluation(data, programs, parameters, None, options)
    return Target(address, token, codec.evaluation_to_bytes(evaluation))


def _flood(targets: list[Target], count: int, turn: Any, stop: Any) -> None:
    """Process: closed loops of ``count`` threads in each turn, until told to stop."""

    def work(_: int) -> None:
        caller = Caller(targets[0])
        while not stop.is_set():
            if turn.value == _PAUSE:
                time.sleep(0.01)
            else:
                caller.aim(targets[turn.value])
                time.sleep(caller.call()[1])

    with in_threads(work, range(count)):
        pass


def milliseconds(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {"calls": 0}
    most = round(1e3 * max(seconds), 2)
    return {"calls": len(seconds), **percentiles(seconds, 2), "max_ms": most}


def greedy(address: str, tokens: dict[str, str], asked: Work, seconds: float) -> dict[str, Any]:
    """A victim's latencies alone and beside each kind of greedy tenant."""
    caller = Caller(prepared(address, tokens["victim"], asked.victim))
    usual = float(np.median(_times(closed_loop(caller, 2, PACE))))
    pace = max(PACE, REST * usual)
    result: dict[str, Any] = {}
    for name, (threads, job) in asked.greedy.items():
        alone, rounds = [], []
        # Other programs in each round, as from one generation to the next: they are compiled anew.
        targets = [prepared(address, tokens["greedy"], job, number) for number in range(ROUNDS)]
        Caller(targets[0]).call()  # the first fit on a machine compiles what steers fits, once
        turn = _CONTEXT.Value("i", _PAUSE)
        with beside(_flood, targets, threads, turn):
            time.sleep(3)
            for number in range(ROUNDS):
                turn.value = _PAUSE
                time.sleep(1)  # what it has begun ends
                alone += closed_loop(caller, seconds / ROUNDS, pace)
                turn.value = number
                time.sleep(0.5)
                rounds.append(closed_loop(caller, 2 * seconds / ROUNDS, pace))
        assert all(outcome.status == "OK" for outcome in itertools.chain(*rounds))
        quiet, beside_it = (milliseconds(_times(x)) for x in (alone, [*itertools.chain(*rounds)]))
        result[f"{threads} greedy clients, {name}"] = {
            "alone": quiet,
            "beside": beside_it,
            "p99_ratio": round(beside_it["p99_ms"] / quiet["p99_ms"], 2),
            "beside_p99_ms_of_each_round": [milliseconds(_times(one))["p99_ms"] for one in rounds],
        }
    return result


def _times(outcomes: Outcomes, wanted: str = "OK") -> list[float]:
    return [outcome.seconds for outcome in outcomes if outcome.status == wanted]


def _watch(target: Target, go: Any, stop: Any) -> Outcomes:
    """Process: one client that does nothing else calls now and then."""
    caller = Caller(target)
    outcomes = []
    while not stop.wait(WATCH_SECONDS):
        if go.wait(0.2):
            outcomes.append(caller.call()[0])
    return outcomes


class Account:
    """Answers of one kind of phase, of which there are several, and the rates of calls and answers.

    The first quarter of a phase, in which its calls begin to queue, does not count, nor what is
    answered after its end.
    """

    def __init__(self, seconds: float) -> None:
        self._length = seconds
        self._counted: list[tuple[float, float]] = []
        self.outcomes: Outcomes = []

    def phase(self, calls: Callable[[float], Outcomes]) -> None:
        """Count what calls of so many seconds bring."""
        started = time.perf_counter()
        self.outcomes += calls(self._length)
        self._counted.append((started + self._length / 4, started + self._length))

    def rate(self, wanted: str = "OK") -> float:
        moments = [x.moment for x in self.outcomes if wanted in ("", x.status)]
        counted = sum(begin <= at < end for at in moments for begin, end in self._counted)
        return counted / sum(end - begin for begin, end in self._counted)


def overload(target: Target, crew: Crew, seconds: float) -> dict[str, Any]:
    """Peak of closed loops, and ten times as much, in turn.

    Ten times the rate from callers that take no advice, and ten times the clients, which come again
    when they are told to, as warpfit's own do.
    """
    trials = {}
    for count in CLIENTS:
        (trial := Account(seconds / 2)).phase(partial(crew.closed, count))
        trials[count] = trial.rate()
    clients = max(trials, key=trials.__getitem__)
    peak, beyond, patient = (Account(seconds / 2) for _ in range(3))
    go = _CONTEXT.Event()
    with beside(_watch, target, go) as found:
        for _ in range(ROUNDS):
            peak.phase(partial(crew.closed, clients))
            go.set()
            beyond.phase(partial(crew.open, 10 * peak.rate()))
            go.clear()
            patient.phase(partial(crew.closed, 10 * clients))
    (seen,) = found
    beyond.outcomes += seen  # its answers are answers, too
    answered = _times(beyond.outcomes)
    refused = _times(beyond.outcomes, "RESOURCE_EXHAUSTED")
    return {
        "rounds": ROUNDS,
        "answers_per_second_of_so_many_clients": {n: round(rate, 1) for n, rate in trials.items()},
        "peak_clients": clients,
        "peak_calls_per_second": round(peak.rate(), 1),
        "offered_calls_per_second": round(beyond.rate(""), 1),
        "goodput_calls_per_second": round(beyond.rate(), 1),
        "goodput_of_peak": round(beyond.rate() / peak.rate(), 3),
        "refused": milliseconds(refused),
        "refused_as_one_client_saw_it": milliseconds(_times(seen, "RESOURCE_EXHAUSTED")),
        "answered": milliseconds(answered),
        "other": len(beyond.outcomes) - len(refused) - len(answered),
        "ten_times_the_clients_that_obey": {
            "calls_per_second": round(patient.rate(""), 1),
            "goodput_calls_per_second": round(patient.rate(), 1),
            "goodput_of_peak": round(patient.rate() / peak.rate(), 3),
        },
    }


def overloaded(engine: str, asked: Work, seconds: float) -> dict[str, Any]:
    """Measure overload with the machine's cores divided between server and generator."""
    cores = sorted(os.sched_getaffinity(0))
    count = max(1, len(cores) // 4)
    with ExitStack() as held:
        with on_cores(set(cores[count:])):
            process, tokens = held.enter_context(server(engine, "--max-requests", "16"))
        held.enter_context(on_cores(set(cores[:count])))
        target = prepared(process.address, tokens["victim"], asked.overload)
        crew = held.enter_context(Crew(target, count, CALLERS))
        result = overload(target, crew, seconds)
    return {"server_cores": len(cores) - count, "generator_cores": count, **result}


@contextmanager
def server(
    engine: str, *flags: str, limits: str = ""
) -> Iterator[tuple[ServerProcess, dict[str, str]]]:
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        path, tokens = token_file(folder, "victim", "greedy")
        files = ("--token-file", path, "--tenants-file", tenants_file(folder, limits))
        with ServerProcess(*files, *flags, devices="0" if engine == "cuda" else engine) as process:
            yield process, tokens


def main() -> None:
    options = arguments(__doc__, "", seconds=15.0, engine="cpu")
    sys.setswitchinterval(callers.TURN_SECONDS)
    asked = WORK[options.engine]
    busy = round(os.getloadavg()[0], 1)  # other programs of the machine slow everything down
    too_much = overloaded(options.engine, asked, options.seconds)
    with server(options.engine, limits=f"[default]\nrate = {RATE}\n") as (process, tokens):
        fairness = greedy(process.address, tokens, asked, options.seconds)
    content = {
        **{"seed": SEED, "engine": options.engine},
        **{"calls_a_second_of_each_tenant_beside_another": RATE, "load_average_before": busy},
        **{"greedy_tenant": fairness, "ten_times_overload": too_much},
    }
    usual = "guard" if options.engine == "cpu" else f"guard_{options.engine}"
    save(options.name or usual, content, options.folder)
