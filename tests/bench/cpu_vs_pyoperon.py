"""Speed of the CPU engine beside pyoperon's `EvaluateTrees`, on the same machine in the same run.

    python tests/bench/cpu_vs_pyoperon.py [--threads 1 2] [--rows 1000 10000 100000] [--seed 1]

Both evaluate the thesis mix (300 random expressions of 10 to 50 tokens over 10 variables, operators
``+ - * / ^ abs log exp sqrt``) on float32 data, into a preallocated matrix of values; the engine
also with losses in place of values. Repetitions are interleaved, medians are reported: other load
on the machine meets all of them alike. A token-row is one token of the postfix program evaluated
for one row. Answers are checked against the float64 reference before anything is timed, and the
error of each operator is measured for both sides, so that one can see which of the engine's
precisions to compare with: pyoperon has one precision, the engine two.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyoperon
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.repository.results import write_result
from warpfit.bench.measure import AGREEMENT, agreement
from warpfit.dataset import Dataset
from warpfit.expressions import reference
from warpfit.expressions.workload import THESIS_OPERATORS, thesis_mix
from warpfit.frontends.operon import to_operon_infix
from warpfit.ir import Batch, Program
from warpfit.ops import BY_CODE, OPERATORS
from warpfit.request import Evaluation, Loss, Precision
from warpfit_server.engine.cpu.engine import CpuEngine
from warpfit_server.engine.interface import Outputs, run_to_end

VARIABLES = 10
SECONDS_A_CASE = 1.5


@dataclass
class Case:
    """One way of evaluating the mix: what to call, and where its values are."""

    run: Callable[[], Any]
    values: NDArray[np.float32] | None


class Peer:
    """pyoperon on one matrix; keeps the array alive, which `pyoperon.Dataset` does not."""

    def __init__(self, matrix: NDArray[np.float32]) -> None:
        self.array = np.asfortranarray(matrix)
        self.dataset = pyoperon.Dataset(self.array)
        self.names = {v.Name: v.Hash for v in self.dataset.Variables}

    def case(self, programs: list[Program], parameters: list[Any], threads: int) -> Case:
        trees = [
            pyoperon.InfixParser.Parse(
                to_operon_infix(program, list(self.names), vector), self.names
            )
            for program, vector in zip(programs, parameters, strict=True)
        ]
        rows = pyoperon.Range(0, len(self.array))
        values = np.zeros((len(trees), len(self.array)), np.float32)
        return Case(
            lambda: pyoperon.EvaluateTrees(trees, self.dataset, rows, values, threads), values
        )


def engine_case(
    engine: CpuEngine, data: Dataset, batch: Batch, precision: Precision, *, losses: bool = False
) -> Case:
    loss = Loss.MSE if losses else None
    evaluation = Evaluation(
        data.content_id, batch, precision=precision, loss=loss, values=not losses
    )
    evaluation.check(data.layout)
    shape = evaluation.shape(data.layout)
    outputs = Outputs(
        values=None if losses else np.zeros(shape, np.float32),
        losses=np.zeros(shape[:2]) if losses else None,
        cancelled=np.zeros(1, np.uint8),
        ready=lambda ready: None,
    )
    values = None if outputs.values is None else outputs.values[:, 0]

    def evaluate() -> object:
        engine._programs.clear()  # as if the programs were new, as those of genetic programming are
        return run_to_end(engine.evaluate(evaluation, outputs))

    return Case(evaluate, values)


def operator_errors(engine: CpuEngine, peer_data: NDArray[np.float32]) -> dict[str, Any]:
    """Largest error of each operator on [0.1, 5), in float32 ulp."""
    data = Dataset.of(peer_data, dtype=np.float32)
    engine.load(data)
    names = list(THESIS_OPERATORS)
    programs = [
        Program.apply(name, *(Program.variable(k) for k in range(OPERATORS[name].arity)))
        for name in names
    ]
    batch = Batch.of(programs)
    expected = reference.evaluate(programs, data.variables)
    cases = {"pyoperon": Peer(peer_data).case(programs, [()] * len(programs), 1)}
    for precision in Precision:
        cases[precision.value] = engine_case(engine, data, batch, precision)
    found: dict[str, Any] = {}
    for who, case in cases.items():
        case.run()
        assert case.values is not None
        with np.errstate(all="ignore"):
            spacing = np.spacing(np.abs(expected.astype(np.float32))).astype(np.float64)
            error = np.abs(case.values - expected) / spacing
        found[who] = {n: round(float(e), 2) for n, e in zip(names, error.max(axis=1), strict=True)}
    return found


def measure(cases: dict[str, Case]) -> dict[str, float]:
    """Median seconds of each case, their repetitions interleaved."""
    for case in cases.values():
        case.run()
    times: dict[str, list[float]] = {name: [] for name in cases}
    end = time.perf_counter() + SECONDS_A_CASE * len(cases)
    while time.perf_counter() < end or len(times[next(iter(times))]) < 5:
        for name, case in cases.items():
            start = time.perf_counter()
            case.run()
            times[name].append(time.perf_counter() - start)
    return {name: float(np.median(series)) for name, series in times.items()}


def compare(rows: int, threads: int, seed: int) -> dict[str, Any]:
    """Compare at one size and number of threads."""
    programs, parameters = thesis_mix(seed, variables=VARIABLES)
    tokens = sum(len(program) for program in programs)
    matrix = np.random.default_rng(seed).uniform(0.1, 5, (rows, VARIABLES)).astype(np.float32)
    data = Dataset.of(matrix, matrix[:, 0])
    batch = Batch.of(programs, parameters)
    engine = CpuEngine(threads)
    engine.load(data)
    cases = {"pyoperon": Peer(matrix).case(programs, parameters, threads)}
    for precision in Precision:
        name = f"warpfit {precision.value}"
        cases[f"{name} values"] = engine_case(engine, data, batch, precision)
        cases[f"{name} losses"] = engine_case(engine, data, batch, precision, losses=True)
    shares = check(cases, programs, parameters, data)
    seconds = measure(cases)
    engine.close()
    rates = {name: tokens * rows / value / 1e9 for name, value in seconds.items()}
    ratios = {name: rate / rates["pyoperon"] for name, rate in rates.items() if name != "pyoperon"}
    return {
        "rows": rows,
        "threads": threads,
        "expressions": len(programs),
        "tokens": tokens,
        "milliseconds": {name: round(value * 1e3, 3) for name, value in seconds.items()},
        "giga_token_rows_per_second": {name: round(rate, 3) for name, rate in rates.items()},
        "times_pyoperon": {name: round(ratio, 2) for name, ratio in ratios.items()},
        "share_within_one_percent_of_reference": shares,
    }


def check(
    cases: dict[str, Case], programs: list[Program], parameters: list[Any], data: Dataset
) -> dict[str, float]:
    """Run every case once and compare its values with the reference on the first rows."""
    used = min(1000, data.layout.rows)
    expected = reference.evaluate(programs, data.variables[:, :used], parameters)
    shares = {}
    for name, case in cases.items():
        case.run()
        if case.values is not None:
            shares[name] = round(agreement(case.values[:, :used], expected), 4)
    wrong = {name: share for name, share in shares.items() if share < AGREEMENT}
    if wrong:
        raise SystemExit(f"answers disagree with the reference: {wrong}")
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    engine = CpuEngine(1)
    matrix = np.random.default_rng(0).uniform(0.1, 5, (20_000, 2)).astype(np.float32)
    errors = operator_errors(engine, matrix)
    engine.close()
    cases = []
    for threads in arguments.threads:
        for rows in arguments.rows:
            cases.append(compare(rows, threads, arguments.seed))
            print(rows, threads, cases[-1]["times_pyoperon"], flush=True)
    path = write_result(
        "cpu_vs_pyoperon",
        {
            "workload": f"thesis_mix({arguments.seed}), float32, uniform on [0.1, 5)",
            "operators": sorted({BY_CODE[OPERATORS[n].code].name for n in THESIS_OPERATORS}),
            "largest_operator_error_ulp": errors,
            "cases": cases,
        },
    )
    print(path)


if __name__ == "__main__":
    main()
