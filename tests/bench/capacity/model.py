"""A discrete-event model of warpfit: workers that call servers, each with one GPU.

A call passes through the worker's own processor, the network, a front-end process, the engine and
the device, and the same way back. What each of these takes is measured and stands in `Costs`; what
waiting adds is what the model is for. simpy (https://simpy.readthedocs.io) runs the events.
"""

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import simpy
from simpy.events import Event
from tables.layout import result

#: Most token-rows that are merged into one step, and token-rows of a call with 300 expressions x
#: 100,000 rows: `warpfit_server.engine.cuda.engine` for an H200.
_MERGED, CALL = 110e6 * 132, 8.77e8
#: What nothing here measures: a network of a computing centre.
LATENCY, BANDWIDTH = 50e-6, 25e9 / 8


@dataclass(frozen=True)
class Costs:
    """Seconds and bytes of one call: 300 fresh expressions x 100,000 rows, losses, fast mode."""

    client: float
    """Processor time of the worker."""
    front_end: float
    """Processor time of a front-end process: gRPC, decoding, handing over, encoding."""
    step: float
    """Processor time of the engine process for a step, whatever is in it."""
    request: float
    """The same for each call that is merged into the step."""
    launch: float
    """Time of the device for a step without rows."""
    device: float
    """Time of the device for the rows of one call."""
    spread: float
    """Standard deviation of the logarithm of the processor times of a call."""
    request_bytes: float = 90e3
    answer_bytes: float = 3e3
    busy: float = 1.0
    """How much longer processor times are once every hardware thread is busy: two threads share a
    core, all share caches and memory, and a process that has to wait is woken."""

    @property
    def alone(self) -> float:
        """Median latency of a lone caller on the server's machine."""
        own = self.client + self.front_end + self.step + self.request
        return own + self.launch + self.device


def measured() -> Costs:
    """Read the costs from the result files; `busy` is left at 1."""
    service = result("gpu_service")["one client"]
    one, few, many = (
        service[f"fresh {case}"] for case in ("300 x 100000", "300 x 1000", "5000 x 1000")
    )
    call_cost = result("call_cost")
    request = (many["copy_in_us"] - few["copy_in_us"]) / 4700 * 300
    times = {
        case["rows"]: case["interpret_us"]
        for case in result("gpu_interpreter")["results"]
        if case["mode"] == "float32 fast"
    }
    slope = (times[10**5] - times[10**4]) / 90_000
    stages = one["copy_in_us"] + one["compute_us"]
    client = call_cost["client_us"]["fresh"]
    return Costs(
        client=client / 1e6,
        front_end=(one["p50_ms"] * 1e3 - client - stages) / 1e6,
        step=(one["copy_in_us"] - request) / 1e6,
        request=request / 1e6,
        launch=(one["compute_us"] - slope * 1e5) / 1e6,
        device=slope * 0.1,
        spread=math.log(one["p99_ms"] / one["p50_ms"]) / 2.326,
        request_bytes=call_cost["request_bytes"],
    )


class Station:
    """First come, first served by some equal servants whose times are known beforehand."""

    def __init__(self, env: simpy.Environment, servants: int = 1) -> None:
        self.env, self.servants, self.worked = env, servants, 0.0
        self._free = [0.0] * servants

    def serve(self, seconds: float) -> Event:
        """Return the event that the work, queued now, is done."""
        now = self.env.now
        done = max(now, heapq.heappop(self._free)) + seconds
        heapq.heappush(self._free, done)
        self.worked += seconds
        return self.env.timeout(done - now)

    def busy(self) -> float:
        """Share of the servants that work now."""
        now = self.env.now
        return sum(end > now for end in self._free) / self.servants


class ServerLostError(Exception):
    """The server of a call is gone."""


@dataclass
class Server:
    """A server with one GPU and some cores."""

    env: simpy.Environment
    costs: Costs
    cores: int = 16
    waiting: list[Event] = field(default_factory=list)
    steps: int = 0
    alive: bool = True
    inside: int = 0
    """Calls in the server."""

    def __post_init__(self) -> None:
        self.processors = Station(self.env, self.cores)
        self.front_ends = [simpy.Resource(self.env) for _ in range(min(16, self.cores - 1))]
        self.interpreter, self.device = Station(self.env), Station(self.env)
        self.network = Station(self.env), Station(self.env)
        self.lives = 0

    def compute(self, seconds: float) -> Event:
        """Use one of the cores."""
        return self.processors.serve(seconds * self._crowding())

    def _crowding(self) -> float:
        """Return how much longer processor times are now."""
        return 1 + (self.costs.busy - 1) * self.processors.busy()

    def call(self, connection: int, noise: float) -> Iterator[Event]:
        """Answer a call that has arrived."""
        life, front_end = self.lives, self.front_ends[connection % len(self.front_ends)]
        for part in (0.6, 0.4):  # the request's way in, the answer's way out
            with front_end.request() as turn:
                yield turn
                yield self.compute(part * self.costs.front_end * noise)
            if self.lives != life:
                raise ServerLostError
            if part > 0.5:
                yield self._step_with(self.env.event())

    def _step_with(self, done: Event) -> Event:
        self.waiting.append(done)
        if self.steps < 2:
            self.steps += 1
            self.env.process(self._run_steps())
        return done

    def _run_steps(self) -> Iterator[Event]:
        """Run steps as long as calls wait; two such processes overlap host and device."""
        life, most = self.lives, int(_MERGED // CALL)
        while self.waiting and life == self.lives:
            calls, self.waiting = self.waiting[:most], self.waiting[most:]
            host = self.costs.step + self.costs.request * len(calls)
            yield self.interpreter.serve(host * self._crowding())
            yield self.device.serve(self.costs.launch + self.costs.device * len(calls))
            for done in calls:
                if not done.triggered:
                    done.succeed()
        if life == self.lives:
            self.steps -= 1

    def kill(self) -> None:
        """End; calls inside are lost."""
        self.alive, self.steps, self.lives = False, 0, self.lives + 1
        waiting, self.waiting = self.waiting, []
        for done in waiting:
            done.succeed()


@dataclass(frozen=True)
class Scenario:
    """Workers that call without a pause but for their own work, and the servers they know."""

    workers: int
    servers: int = 1
    think: float = 0.0
    """Seconds of a worker's own work between two calls."""
    replicas: int = 0
    """Servers that hold the data set; 0 for all."""
    same_machine: bool = False
    """Whether the workers run on the server's cores, as in `gpu_service`."""
    killed: int = 0
    """Servers that die in the middle of the time."""
    failover: float = 0.3
    """Seconds until a client has given up a server that is gone."""


@dataclass
class Seen:
    """Measurements of the workers after the warm-up."""

    seconds: float
    latencies: list[float]
    inside: float
    """Mean number of calls under way, integrated over time."""
    repeated: int
    use: dict[str, float]
    """Share of the time that each resource worked, mean of the servers."""

    @property
    def rate(self) -> float:
        """Answers a second."""
        return len(self.latencies) / self.seconds

    def quantile(self, q: float) -> float:
        """Return a quantile of the latencies, in seconds."""
        ordered = sorted(self.latencies)
        return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


class Cluster:
    """A run of a scenario."""

    def __init__(self, costs: Costs, scenario: Scenario, seed: int = 1) -> None:
        self.env, self.costs, self.scenario = simpy.Environment(), costs, scenario
        self.random = random.Random(seed)
        self.servers = [Server(self.env, costs) for _ in range(scenario.servers)]
        held = scenario.replicas or scenario.servers
        self.holders = self.servers[:held]
        self.began = math.inf
        self.latencies: list[float] = []
        self.repeated = 0
        self.inside, self.changed, self.area = 0, 0.0, 0.0

    def run(self, calls: int) -> Seen:
        """Run until about so many calls were answered, after some that do not count."""
        scenario = self.scenario
        for number in range(scenario.workers):
            self.env.process(self._worker(number))
        cycle = self._least_cycle()
        self.env.run(until=cycle * (3 + calls / 4 / scenario.workers))
        self._count()
        before = self._worked()
        self.began = self.env.now
        self.area = 0.0
        length = cycle * max(4.0, calls / scenario.workers)
        for server in self.holders[: scenario.killed]:
            self.env.process(self._kill(server, length / 3))
        self.env.run(until=self.began + length)
        self._count()
        use = {name: (work - before[name]) / length for name, work in self._worked().items()}
        return Seen(length, self.latencies, self.area / length, self.repeated, use)

    def _least_cycle(self) -> float:
        """Return the seconds from one call of a worker to its next, from what bounds the rate."""
        holders = len(self.holders)
        rate = holders / max(bounds(self.costs).values())
        return max(self.scenario.workers / rate, self.costs.alone + self.scenario.think)

    def _kill(self, server: Server, after: float) -> Iterator[Event]:
        yield self.env.timeout(after)
        server.kill()

    def _worked(self) -> dict[str, float]:
        servers = self.holders
        return {
            "device": sum(s.device.worked for s in servers) / len(servers),
            "engine process": sum(s.interpreter.worked for s in servers) / len(servers),
            "cores": sum(s.processors.worked / s.cores for s in servers) / len(servers),
            "network": sum(s.network[0].worked for s in servers) / len(servers),
        }

    def _count(self, change: int = 0) -> None:
        now = self.env.now
        self.area += self.inside * (now - self.changed)
        self.changed = now
        self.inside += change

    def _worker(self, number: int) -> Iterator[Event]:
        scenario, draw = self.scenario, self.random
        yield self.env.timeout(draw.random() * (self.costs.alone + scenario.think))
        connection = draw.randrange(1 << 30)
        while True:
            if scenario.think:
                yield self.env.timeout(scenario.think * draw.lognormvariate(0, self.costs.spread))
            started, noise = self.env.now, draw.lognormvariate(0, self.costs.spread)
            self._count(1)
            while True:
                server = self._choose()
                server.inside += 1
                try:
                    yield from self._attempt(server, connection, noise)
                    break
                except ServerLostError:
                    self.repeated += 1
                    yield self.env.timeout(scenario.failover)
                finally:
                    server.inside -= 1
            self._count(-1)
            if self.env.now >= self.began:
                self.latencies.append(self.env.now - started)

    def _choose(self) -> Server:
        """Choose a server as the client does; one that is known to be gone is left out."""
        draw = self.random
        alive = [s for s in draw.sample(self.holders, min(4, len(self.holders))) if s.alive]
        found = alive or [s for s in self.holders if s.alive]
        return min(found[:2], key=lambda server: server.inside)

    def _attempt(self, server: Server, connection: int, noise: float) -> Iterator[Event]:
        """Make a call: the worker's half before and after, and what lies between."""
        costs, here = self.costs, self.scenario.same_machine
        for part in (0.7, 0.3):
            own = part * costs.client * noise
            yield server.compute(own) if here else self.env.timeout(own)
            if part > 0.5:
                if not here:
                    yield self.env.timeout(LATENCY)
                    yield server.network[0].serve(costs.request_bytes / BANDWIDTH)
                yield from server.call(connection, noise)
                if not here:
                    yield server.network[1].serve(costs.answer_bytes / BANDWIDTH)
                    yield self.env.timeout(LATENCY)


def bounds(costs: Costs, cores: int = 16) -> dict[str, float]:
    """Return the least seconds a call of each resource of a server with one GPU, when it is full.

    The largest of them is what a server saturates at, however many workers there are.
    """
    most = int(_MERGED // CALL)
    return {
        "device": costs.launch / most + costs.device,
        "engine process": costs.busy * (costs.step / most + costs.request),
        "cores": costs.busy * costs.front_end / cores,
        "network": costs.request_bytes / BANDWIDTH,
    }


def simulate(costs: Costs, scenario: Scenario, calls: int = 20_000, seed: int = 1) -> Seen:
    """Run a scenario."""
    return Cluster(costs, scenario, seed).run(calls)


def calibrated(costs: Costs, rate: float, workers: int, calls: int = 20_000) -> Costs:
    """Find how much full cores slow down, from the rate of many workers beside the server."""
    low, high = 1.0, 4.0
    scenario = Scenario(workers, same_machine=True)
    for _ in range(8):
        middle = (low + high) / 2
        seen = simulate(replace(costs, busy=middle), scenario, calls)
        low, high = (middle, high) if seen.rate > rate else (low, middle)
    return replace(costs, busy=round((low + high) / 2, 2))
