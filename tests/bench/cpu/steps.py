"""How long an engine's thread does not look at its queue, and memory beyond what was admitted.

Runs a request for each option of Evaluate, Optimize and Search, at a server's limits or near them,
on a CPU engine of this process, while others wait as they do while another tenant calls. ``--only
WORDS`` runs the cases whose names have these words, ``--scale 0.1`` a tenth of the rows, programs
and variables.

What counts is processor time of the engine's thread, so that other work on the machine does not.
Beside it stand that of all threads meanwhile, because the engine's thread waits for those that help
it, and the seconds on the wall. The least of two rounds counts.
"""

import gc
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from harness import SEED, arguments, save

from support.engines.requests import EngineRequest, Pause, run_steps
from support.random_programs import thesis_mix
from warpfit import LossFunction, parse
from warpfit.dataset import Dataset
from warpfit.ir import Batch
from warpfit.request import Evaluation, FitRequest, FitSettings, Loss, Method, Missing
from warpfit.searching import BASE_UNITS, Rules, SearchRequest, Units
from warpfit.server_info import Limits
from warpfit_server.engine.cpu.engine import CpuEngine
from warpfit_server.engine.evaluation import LoadedDatasets
from warpfit_server.engine.interface import Steps
from warpfit_server.engine.runner import RequestRunner
from warpfit_server.limits import check_fit, check_result, check_search, evaluation_memory

#: Most seconds without a look at the queue, and most bytes that were not admitted.
MOST_SECONDS, MOST_BYTES = 0.05, 64 << 20
THREADS, ROUNDS = 2, 2
LIMITS: Final = Limits()
#: Bytes that a server admits in all, of which searches have a part.
MOST_PENDING: Final = 4 << 30
#: A row loss as long as a server allows; it is dear and has no derivatives that are simple.
LONG_LOSS: Final = "abs(d)" + "".join(f"+tanh(d*{k}.5)*lgamma(f)" for k in range(1, 36))
#: The same tokens without functions that are dear.
LONG_SUM: Final = "abs(d)" + "+abs(d)" * 62


class Shape(NamedTuple):
    """A data set: rows, variables, type, share of rows of weight 0 (None: without weights)."""

    rows: int = 1_000_000
    variables: int = 2
    dtype: str = "float32"
    weightless: float | None = None


@cache
def dataset(shape: Shape) -> Dataset:
    rng = np.random.default_rng(SEED)
    X = np.empty((shape.variables, shape.rows), shape.dtype)
    for column in X:
        column[:] = rng.random(shape.rows, dtype="f4")
        column += 0.5
    weights = None
    if shape.weightless is not None:
        weights = (rng.random(shape.rows, dtype="f4") >= shape.weightless).astype(shape.dtype)
    return Dataset.of(X.T, 2 * X[0] + 0.1, weights, dtype=shape.dtype)


class Case(NamedTuple):
    """A request at the limits: an evaluation, a fit, or a search if it has no batch.

    ``given`` are the options of an evaluation, or a search's; ``fit`` those of a fit, and
    ``ranges`` the number of requests with different row ranges, one after the other.
    """

    shape: Shape
    batch: Callable[[], Batch] | None
    given: dict[str, Any]
    fit: dict[str, Any] | None = None
    ranges: int = 1


def repeated(text: str, count: int, vectors: int = 1) -> Callable[[], Batch]:
    """Return what makes a batch of one program again and again."""

    def make() -> Batch:
        program = parse(text)
        start = np.linspace(0.5, 1.5, vectors)[:, None] + np.zeros(program.parameters)
        return Batch.of([program] * count, [start] * count)

    return make


def mixed(count: int) -> Callable[[], Batch]:
    """Return what makes a batch of random programs."""

    def make() -> Batch:
        programs, starts = thesis_mix(SEED, min(count, 2000), variables=2)
        times = -(-count // len(programs))
        return Batch.of((programs * times)[:count], (starts * times)[:count])

    return make


def chain(tokens: int, term: str = "x{}", sign: str = "+") -> str:
    return sign.join(term.format(1 + k % 2) for k in range(tokens // 2))


def cases(scale: float) -> dict[str, Case]:
    """Return the cases by name; ``scale`` makes rows, programs and variables fewer."""

    def n(count: int) -> int:
        return max(1, int(count * scale))

    loss = {"loss": Loss.MSE, "values": False}
    million = Shape(n(1_000_000))
    many = Shape(n(30_000_000), 1)
    wide, small = Shape(1024, n(100_000)), Shape(1000)
    double, part = million._replace(dtype="float64"), many._replace(weightless=0.5)
    outputs = {
        **{"losses": loss, "values": {}},
        "gradient": {**loss, "gradient": True},
        "variable gradient": {**loss, "variable_gradient": True},
        "jacobian": {"values": False, "jacobian": True},
        "reductions": {"values": False, "reductions": True},
        "scaling": {**loss, "linear_scaling": True},
        "correlation": {"values": False, "correlation": True},
        "r2": {"loss": Loss.R2, "values": False},
        "own loss": {"custom_loss": LossFunction.parse(LONG_SUM), "values": False},
        "own dear loss": {"custom_loss": LossFunction.parse(LONG_LOSS), "values": False},
        "gradient of an own loss": {
            "custom_loss": LossFunction.parse(LONG_LOSS), "values": False, "gradient": True,
        },
    }  # fmt: skip
    found: dict[str, Case] = {}

    def add(name: str, *given: Any) -> None:
        found[name] = Case(*given)

    line, curve = "p1*x1", "p1*exp(p2*x1)+p3"
    for name, options in outputs.items():
        count, programs = (100, 20_000) if name in ("values", "jacobian") else (200, 100_000)
        add(f"{name}: short programs, 1,000,000 rows", million, repeated(line, count), options)
        add(f"{name}: float64", double, repeated(line, count // 2), options)
        if name != "jacobian":
            long, dear = repeated(chain(9_999), 4), repeated(chain(9_999, "sin(x{})"), 2)
            add(f"{name}: 10,000 tokens, 1,000,000 rows", million, long, options)
            add(f"{name}: 10,000 dear tokens, 1,000,000 rows", million, dear, options)
        add(f"{name}: 30,000,000 rows", many, repeated(line, 4), options)
        add(f"{name}: 100,000 programs", small, mixed(n(programs)), options)
        vectors = repeated("p1*x1+p2", n(100), n(10_000))
        add(f"{name}: 100 programs of 10,000 vectors", Shape(50), vectors, options)
        add(f"{name}: half of 30,000,000 rows without weight", part, repeated(line, 2), options)
    for name in ("r2", "scaling", "correlation"):
        add(f"{name}: changing row ranges", many, repeated(line, 1), outputs[name], None, 4)
    slopes = outputs["variable gradient"]
    add("variable gradient: 100,000 variables", wide, repeated("x1", n(200)), slopes)
    add("losses: 100,000 variables", wide, repeated("x1", n(2000)), loss)
    one = {"max_iterations": 2}
    settings = {
        "fit": one,
        "bfgs": {**one, "method": Method.BFGS},
        "missing rows dropped": {**one, "missing": Missing.DROP},
        "covariance": {**one, "covariance": True, "standard_errors": True, "curvature": True},
        "all starts": {**one, "all_starts": True, "restarts": 3},
    }
    five = "+".join(f"p{k}*x{1 + k % 2}" for k in range(1, 501))
    for name, fit in settings.items():
        add(f"{name}: 30,000,000 rows", many, repeated(line, 1), loss, fit)
        add(f"{name}: float64", double, repeated(curve, 10), loss, fit)
        add(f"{name}: 100,000 variables", wide, repeated(line, 1), loss, fit)
        add(f"{name}: 100,000 programs", small, mixed(n(100_000)), loss, fit)
        add(f"{name}: 10,000 starts", small, repeated(curve, 10, n(10_000)), loss, fit)
        add(f"{name}: 500 parameters", small, repeated(five, 4), loss, fit)
        half = f"{name}: half of 30,000,000 rows without weight"
        add(half, part, repeated(line, 1), loss, fit)
    own = {"custom_loss": LossFunction.parse(LONG_LOSS), "values": False}
    add("fit of an own loss: 1,000,000 rows", million, repeated(line, 20), own, one)
    drawn, ten = {**one, "restarts": n(9_000)}, {**one, "restarts": 10}
    add("fit: 9,000 restarts", small, repeated(curve, 10), loss, drawn)
    add("fit: restarts of 20,000 programs", small, mixed(n(20_000)), loss, ten)
    add("fit: 100,000 variables, restarts", wide, repeated(line, 1), loss, ten)
    return found | search_cases(n)


def search_cases(n: Callable[[int], int]) -> dict[str, Case]:
    """Return searches by name, as `cases` returns other requests; ``n`` makes numbers smaller."""
    small, wide = Shape(2000), Shape(1024, n(100_000))
    many, usual = Shape(n(30_000_000), 1), {"max_generations": 60}
    short, few = {"rules": Rules(max_size=7)}, {"max_generations": 3}
    plain = {**few, "pairs": False}
    length = np.ones((2, BASE_UNITS))
    powers = {"units": Units(length, length[0], True), **plain}
    rules = Rules(nesting={("exp", "exp"): 0, ("sin", "exp"): 1}, counts={"sin": 1}, max_depth=6)
    crowd = {**short, **plain, "population": n(300_000), "islands": n(65_536)}
    screened = {**short, **plain, "population": 100, "screening_rows": n(1_000_000)}
    guesses = repeated("p1*exp(p2*x1)+p3*x2", n(20_000))()
    asked: dict[str, tuple[Shape, dict[str, Any]]] = {
        "usual": (small, usual),
        "float64": (small._replace(dtype="float64"), usual),
        "pairs, 5,000 screening rows": (Shape(5000), {**usual, "screening_rows": 5000}),
        "long formulas": (small, {**usual, "rules": Rules(max_size=200)}),
        "mean absolute error": (small, {**usual, "loss": Loss.MAE}),
        "own dear loss": (small, {**few, "custom_loss": LossFunction.parse(LONG_LOSS)}),
        "units": (small, powers),
        "rules": (small, {**plain, "rules": rules, "population": n(100_000)}),
        "a population of 1,000,000": (small, {**short, **plain, "population": n(1_000_000)}),
        "65,536 islands": (small, {**crowd, "fit_iterations": 1}),
        "1,000,000 screening rows": (Shape(n(1_000_000)), screened),
        "30,000,000 rows": (many, plain),
        "half of 30,000,000 rows without weight": (many._replace(weightless=0.5), plain),
        "100,000 variables": (wide, few),
        "20,000 guesses": (small, {**plain, "guesses": guesses}),
        "many iterations": (small, {**plain, "fit_iterations": 10_000}),
    }
    return {f"search: {name}": Case(shape, None, given) for name, (shape, given) in asked.items()}


def status(name: str) -> int:
    """Return a size of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(name))
    return int(line.split()[1]) << 10


def requests_of(
    engine: CpuEngine, datasets: LoadedDatasets, case: Case
) -> Iterator[tuple[Steps[Any], int, Any]]:
    """Yield the steps of each request of a case, the memory that is admitted, and what it needs."""
    data, settings = dataset(case.shape), None
    runner = RequestRunner(engine, datasets, 1 << 20)
    if case.batch is None:
        asked = SearchRequest(data.content_id, **case.given)
        admitted = check_search(asked, data.layout, LIMITS, MOST_PENDING)
        nobody: dict[str, Any] = {"cancelled": np.zeros(1, np.uint8), "report": lambda _: None}
        yield engine.search(asked, datasets, **nobody), admitted, None
        return
    for number in range(case.ranges):
        rows = None if case.ranges == 1 else (number + 1, data.layout.rows - number)
        problem = Evaluation(data.content_id, case.batch(), rows=rows, **case.given)
        if case.fit is None:
            admitted = check_result(problem, data.layout, LIMITS)
            admitted += evaluation_memory(problem, data.layout)
        else:
            settings = FitSettings(**case.fit)
            admitted = check_fit(FitRequest(problem, settings), data.layout, LIMITS)
        request = EngineRequest(engine, data, problem, settings, runner)
        yield request.steps, admitted, request


def measured(engine: CpuEngine, datasets: LoadedDatasets, case: Case) -> dict[str, float]:
    """Run a case; return its longest pauses and the most memory beyond what was admitted."""
    data = dataset(case.shape)
    datasets.load(data)
    engine.others_wait(True)
    pauses, beyond = list[Pause](), 0
    for steps, admitted, request in requests_of(engine, datasets, case):
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the most memory is what there is now
        before = status("VmRSS")
        run_steps(steps, pauses.append)
        beyond = max(beyond, status("VmHWM") - before - admitted)
        del steps, request
    datasets.unload(data.content_id)
    return {
        "longest_ms": round(1e3 * max(pause.seconds for pause in pauses), 1),
        "all_threads_ms": round(1e3 * max(pause.process for pause in pauses), 1),
        **{"wall_ms": round(1e3 * max(pause.wall for pause in pauses), 1), "looks": len(pauses)},
        **{"waits": sum(pause.waits for pause in pauses), "admitted_MiB": admitted >> 20},
        "beyond_MiB": max(0, beyond >> 20),
    }


def main() -> None:
    options = arguments(__doc__, "steps", only="", scale=1.0)
    engine = CpuEngine(THREADS)
    for kernels in engine._derivatives:
        kernels.result()
    datasets = LoadedDatasets(engine)
    found: dict[str, dict[str, float]] = {}
    for name, case in cases(options.scale).items():
        if options.only not in name:
            continue
        for _ in range(ROUNDS):
            try:
                one = measured(engine, datasets, case)
            except Exception as error:
                print(name, repr(error)[:300])
                break
            best = found.setdefault(name, one)
            for key in ("longest_ms", "all_threads_ms", "wall_ms", "beyond_MiB"):
                best[key] = min(best[key], one[key])
            if best["longest_ms"] <= 1e3 * MOST_SECONDS and best["beyond_MiB"] <= MOST_BYTES >> 20:
                break
        if name in found:
            print(f"{name:60} {found[name]}", flush=True)
    content = {
        **{"scale": options.scale, "threads": THREADS, "load": os.getloadavg(), "cases": found},
        "longest_ms": max((each["longest_ms"] for each in found.values()), default=0.0),
        "most_beyond_MiB": max((each["beyond_MiB"] for each in found.values()), default=0),
    }
    save(options.name, content, options.folder)
