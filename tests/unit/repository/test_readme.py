"""The README says what is true: its files, its commands and the layout that it shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from warpfit.bench import findings

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text()


def test_every_file_that_it_names_exists():
    for path in re.findall(r"`((?:client|server|proto|tests|deploy)/[\w/.]*)`", README):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize(
    "name",
    [
        *("cpu_vs_pyoperon", "fit", "service", "call_cost", "feynman", "import_time"),
        *("newcomer", "transport"),
    ],
)
def test_result_files_name_machine_and_versions(name):
    result = json.loads((ROOT / "tests" / "bench" / "results" / f"{name}.json").read_text())
    assert result["machine"]["cores"]
    assert result["versions"]["warpfit"]


def test_figures_are_those_of_the_result_files():
    results = ROOT / "tests" / "bench" / "results"
    cases = json.loads((results / "cpu_vs_pyoperon.json").read_text())["cases"]
    for case in cases:
        ratio = case["times_pyoperon"]["warpfit precise values"]
        row = f"| {case['rows']:,} | {case['threads']} |"
        line = next(line for line in README.splitlines() if line.startswith(row))
        assert f" {ratio:.1f} " in line
    service = json.loads((results / "service.json").read_text())
    for figure in (
        f"{service['evaluate_300_fresh_1000_rows_loss']['overhead_p50_ms']:.1f} ms",
        f"{service['transfers']['answer_gb_s']:.2f} GB/s",
        f"{service['transfers']['upload_gb_s']:.2f} GB/s",
        f"{service['start_up_seconds']:.1f} s",
    ):
        assert figure in README


def test_figures_of_transports_are_those_of_the_result_file():
    result = json.loads((ROOT / "tests" / "bench" / "results" / "transport.json").read_text())
    for what, case, rate in (
        ("120 MB of values, moved alone", "answer", "best_gb_s"),
        ("on the same two cores", "answer_with_cpu_engine", "best_gb_s"),
        ("400 MB upload, hashed by the server", "upload", "best_gb_s"),
        ("transposed and hashed by the client", "upload", "with_ready_best_gb_s"),
    ):
        assert f"{what} | {result[case][rate]:.2f} GB/s |" in README
    bounds = {name: f"{rates['best_gb_s']:.1f}" for name, rates in result["bounds"].items()}
    for figure in (
        f"copying memory reached {bounds['memory_copy']} GB/s",
        f"SHA-256 {bounds['sha256']},",
        f"{bounds['bare_stream_answer']} (answers)",
        f"{bounds['bare_stream_upload']} (uploads)",
    ):
        assert figure in " ".join(README.split())


def test_rates_of_sixteen_cores_are_those_of_the_result_file():
    path = ROOT / "tests" / "bench" / "results" / "transport_16_cores.json"
    result = json.loads(path.read_text())
    values, uploads = (result[what]["gb_s"] for what in ("answer", "upload"))
    flat = " ".join(README.split())
    assert f"are {values:.2f} GB/s for values and {uploads:.2f} GB/s for uploads" in flat
    assert result["machine"]["cores"] == 16


def test_the_cpu_time_of_a_call_is_that_of_the_result_file():
    result = json.loads((ROOT / "tests" / "bench" / "results" / "call_cost.json").read_text())
    client, server = result["client_us"], result["server_us"]
    decoder = f"{server['door'] / 1000:.2f} + {server['tokens_compiled'] / 1000:.2f}"
    kilobytes = f"{result['request_bytes'] / 1000:.0f} kB"
    for what, milliseconds in (
        ("losses back: CPU time in the client", f"{client['fresh'] / 1000:.2f}"),
        ("the same programs with other parameters", f"{client['repeated'] / 1000:.2f}"),
        (f"of that gRPC, which sends {kilobytes}", f"{client['grpc_alone'] / 1000:.2f}"),
        ("to decode 300 programs, and to check their tokens", decoder),
    ):
        assert f"{what} | {milliseconds} ms |" in README, what


def test_figures_of_fits_are_those_of_the_result_file():
    result = json.loads((ROOT / "tests" / "bench" / "results" / "fit.json").read_text())
    for case in result["cases"]:
        row = f"| {case['iterations']} | {case['threads']} | "
        line = next(line for line in README.splitlines() if line.startswith(row))
        losses = case["final_loss"]["warpfit precise"]
        assert f"| {case['times_pyoperon']['warpfit precise']:.1f} |" in line
        assert " / ".join(str(losses[name]) for name in ("better", "equal", "worse")) in line
    (cost,) = (c for c in result["cost_of_derivatives"] if c["rows"] == 100_000)
    for what in ("loss and gradient", "loss, gradient, normal matrix"):
        assert f"{cost['precise']['times_loss'][what]:.2f} times" in README


def test_the_comparison_with_gplearn_is_that_of_the_result_file():
    result = json.loads((ROOT / "tests" / "bench" / "results" / "feynman.json").read_text())
    ours, peer = (result["recovered"][side] for side in ("warpfit", "gplearn"))
    assert ours >= peer
    assert len(result["equations"]) == 20
    assert result["seconds"]["warpfit"] <= result["seconds"]["gplearn"]
    flat = " ".join(README.split())
    assert f"recovers {ours} and gplearn {peer}" in flat


def test_figures_of_the_gpu_are_those_of_the_result_files():
    fits = json.loads((ROOT / "tests" / "bench" / "results" / "gpu_fit.json").read_text())
    viable = fits["wire"]["precise"]["optimize_viable"]
    figures = [
        f"| {viable['default_tolerances']['ms']:.0f} ms | ",
        f"| {viable['no_tolerances']['ms']:.0f} ms | ",
        f"one worker | {fits['run_viable']['seconds']:.1f} s |",
        f"{fits['wire']['precise']['ratio']:.1f} times the loss alone",
    ]
    flat = " ".join(README.split())
    for figure in figures:
        assert figure.strip() in flat, figure


def test_figures_of_the_service_on_a_gpu_are_those_of_the_result_file():
    result = json.loads((ROOT / "tests" / "bench" / "results" / "gpu_service.json").read_text())
    for title, case in {
        "300 expressions, 100,000 rows": "fresh 300 x 100000",
        "300 expressions, 1,000,000 rows": "fresh 300 x 1000000",
        "5,000 expressions, 10,000 rows": "fresh 5000 x 10000",
        "50,000 expressions, 1,000 rows": "fresh 50000 x 1000",
        "loss and gradient, 300 expressions, 100,000 rows": "fresh 300 x 100000, gradient",
        "300 expressions that repeat, 100,000 rows": "repeated auto",
    }.items():
        found = result["one client"][case]
        assert f"| {title} | {found['p50_ms']:.1f} ms | {found['p99_ms']:.1f} ms |" in README
    few, many = result["sustained"]
    flat = " ".join(README.split())
    rates = [one["token_rows_per_second"] / 1e12 for one in (few, many)]
    assert f"16 workers reach {rates[0]:.2f} Ttok/s together, 64 workers {rates[1]:.2f}" in flat
    assert f"within {many['p99_ms']:.1f} ms (99th percentile)" in flat


def test_the_table_of_kernels_is_that_of_the_result_files():
    results = ROOT / "tests" / "bench" / "results"
    interpreter, measured = (
        json.loads((results / f"gpu_{name}.json").read_text())
        for name in ("interpreter", "compiled")
    )
    interpreter, compiled = interpreter["results"], measured["results"]
    rows = [
        (f"interpreter, {mode}", [one for one in interpreter if one["mode"] == mode])
        for mode in ("float32 fast", "float32 precise", "float64")
    ]
    rows += [
        (
            f"compiled, {mode}" + (", `+ - *` only" if mix == "+ - *" else ""),
            [one for one in compiled if (one["mix"], one["mode"]) == (mix, mode)],
        )
        for mix, mode in (
            *(("thesis mix", mode) for mode in ("float32 fast", "float32 precise", "float64")),
            ("+ - *", "float32 fast"),
        )
    ]
    for title, found in rows:
        times = {
            one["rows"]: (
                one.get("microseconds", one.get("interpret_us")),
                one.get("token_rows_per_second", one.get("tokens_per_second")),
            )
            for one in found
        }
        cells = [
            f"{times[rows][0]:,.0f} us = {times[rows][1] / 1e12:.2f} Ttok/s"
            for rows in (10**4, 10**5, 10**6)
        ]
        assert f"| {title} | {' | '.join(cells)} |" in README
    seconds, threads = measured["compile_300_expressions_seconds"], measured["compiler_threads"]
    assert (
        f"expressions take {seconds['float32 fast']:.2f} s on {threads} threads in fast mode, "
        f"{seconds['float32 precise']:.2f} s in precise mode" in " ".join(README.split())
    )


@pytest.fixture(scope="module")
def benched():
    """Systems of the benchmark's results: H200, the cores beside it, and two cores elsewhere."""
    names = ("bench_gpu", "bench_cpu")
    results = ROOT / "tests" / "bench" / "results"
    return findings.systems([json.loads((results / f"{n}.json").read_text()) for n in names])


def test_the_table_of_the_benchmark_is_that_of_the_result_files(benched):
    gpu, beside, elsewhere = benched
    for title, system, way in (
        ("H200, fresh expressions (interpreter)", gpu, {"tier": "interpreter", "reuse": "fresh"}),
        ("H200, repeated (compiled)", gpu, {"tier": "compiled", "reuse": "repeated"}),
        ("16 cores beside it, CPU engine", beside, {"tier": "interpreter", "reuse": "fresh"}),
        ("2 cores of an Intel Xeon, CPU engine", elsewhere, {"tier": "interpreter"}),
    ):
        times = system.grid("wall", **way)
        row = [f"{1e3 * times[rows, 300]:.1f} ms" for rows in (10**3, 10**4, 10**5, 10**6)]
        assert f"| {title} | {' | '.join(row)} |" in README


def test_the_benchmarks_peers_are_those_of_the_result_files(benched):
    flat = " ".join(README.split())
    for system in benched:
        for cell in system.select(kind="peer"):
            if (cell["scenario"]["rows"], cell["scenario"]["expressions"]) == (10**5, 300):
                assert f"{cell['peer']} {cell['times_warpfit']:.1f}" in flat


def test_when_compiling_pays_is_that_of_the_result_file(benched):
    found = [r for r in findings.repeats(benched[0]) if r.expressions == 300]
    calls = sorted(r.break_even for r in found)
    least = min(r.first / r.fresh for r in findings.repeats(benched[0]))
    flat = " ".join(README.split())
    assert f"after {round(calls[0], -1):.0f} to {round(calls[-1], -1):.0f} calls" in flat
    assert f"takes {least:.0f} times as long" in flat


def test_a_newcomer_needs_less_than_three_minutes():
    result = json.loads((ROOT / "tests" / "bench" / "results" / "newcomer.json").read_text())
    run = result["from_clone_to_the_end_of_the_first_run"]["elapsed"]
    evaluation = result["from_pip_install_to_a_first_evaluation"]["elapsed"]
    assert max(run, evaluation) < 180
    flat = " ".join(README.split())
    assert f"From a clone to the plot that took {run:.0f} s" in flat
    assert f"to a first evaluation, as in `client/README.md`, {evaluation:.0f} s" in flat


def test_few_lines_change_in_a_deap_program():
    text = (ROOT / "client" / "README.md").read_text()
    program = next(code for code in text.split("```") if "from deap import" in code)
    lines = [line for line in program.splitlines() if re.search(r"warpfit|\bevaluate\b", line)]
    assert len(lines) == 6
    assert "Six lines make a DEAP program one" in text
