"""Speed of the CPU engine beside pyoperon's `EvaluateTrees`, on the same machine in the same run.

Both evaluate the random mix (300 random expressions of 10 to 50 tokens over 10 variables, operators
``+ - * / ^ abs log exp sqrt``) on float32 data, into a preallocated matrix of values. Repetitions
are interleaved, medians are reported. Answers are checked against the float64 reference before.
"""

import itertools
from typing import Any

import numpy as np
from harness import arguments, medians_in_turn, outputs_of, save
from peers import AGREEMENT, Job, Table, agreement, pyoperon_peer

from support.random_programs import THESIS_OPERATORS, thesis_mix
from warpfit.dataset import Dataset
from warpfit.expressions import reference
from warpfit.ir import Batch, Program
from warpfit.ops import BY_CODE, OPERATORS
from warpfit.request import Evaluation, Precision
from warpfit_server.engine.cpu.engine import CpuEngine
from warpfit_server.engine.interface import run_to_end

VARIABLES = 10
MIX = 1
"""Seed of the expressions, which are those of `tests/data/expressions.txt`."""
SECONDS_A_CASE = 1.5


def engine_job(engine: CpuEngine, data: Dataset, batch: Batch, precision: Precision) -> Job:
    """Evaluate the batch by the engine, into a preallocated matrix."""
    evaluation = Evaluation(data.content_id, batch, precision=precision)
    matrix = np.zeros(evaluation.shape(data.layout), np.float32)
    outputs = outputs_of(evaluation, matrix)

    def run() -> object:
        engine._programs.clear()  # as if the programs were new, as those of genetic programming are
        return run_to_end(engine.evaluate(evaluation, outputs))

    def values(rows: int) -> Any:
        run()
        return matrix[:, 0, :rows]

    return Job(run, values)


def compare(rows: int, threads: int) -> dict[str, Any]:
    programs, parameters = thesis_mix(MIX, variables=VARIABLES)
    tokens = sum(map(len, programs))
    matrix = np.random.default_rng(MIX).uniform(0.1, 5, (rows, VARIABLES)).astype(np.float32)
    data = Dataset.of(matrix, matrix[:, 0])
    batch = Batch.of(programs, parameters)
    engine = CpuEngine(threads)
    engine.load(data)
    bound = list(map(Program.bind, programs, parameters))
    jobs = {"pyoperon": pyoperon_peer(Table(matrix, matrix[:, 0]), threads, bound)}
    for precision in Precision:
        jobs[f"warpfit {precision.value} values"] = engine_job(engine, data, batch, precision)
    first = min(1000, rows)
    expected = reference.evaluate_programs(programs, data.variables[:, :first], parameters)
    shares = {n: round(agreement(job.values(first), expected), 4) for n, job in jobs.items()}
    if min(shares.values()) < AGREEMENT:
        raise SystemExit(f"answers disagree with the reference: {shares}")
    runs = {name: job.run for name, job in jobs.items()}
    seconds = medians_in_turn(runs, seconds=SECONDS_A_CASE * len(jobs))
    engine.close()
    rates = {name: tokens * rows / value / 1e9 for name, value in seconds.items()}
    ratios = {name: rate / rates["pyoperon"] for name, rate in rates.items() if name != "pyoperon"}
    return {
        **{"rows": rows, "threads": threads, "expressions": len(programs), "tokens": tokens},
        "milliseconds": {name: round(value * 1e3, 3) for name, value in seconds.items()},
        "giga_token_rows_per_second": {name: round(rate, 3) for name, rate in rates.items()},
        "times_pyoperon": {name: round(ratio, 2) for name, ratio in ratios.items()},
        "share_within_one_percent_of_reference": shares,
    }


def main() -> None:
    options = arguments(__doc__, "cpu_vs_pyoperon", threads=(1, 2), rows=(1000, 10_000, 100_000))
    settings = itertools.product(options.threads, options.rows)
    cases = [compare(rows, threads) for threads, rows in settings]
    content = {
        "workload": f"thesis_mix({MIX}), float32, uniform on [0.1, 5)",
        "operators": sorted({BY_CODE[OPERATORS[n].code].name for n in THESIS_OPERATORS}),
        "cases": cases,
    }
    save(options.name, content, options.folder)
