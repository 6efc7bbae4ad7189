"""Write the tables of the READMEs and the plots from the result files.

``python tests/bench/figures.py`` rewrites every block between ``<!-- figures: NAME -->`` and
``<!-- end of figures -->``, and the plots ``results/generation.svg`` and
``results/search_course.svg``; ``--check`` changes nothing, names what is out of date and then exits
with 1.
"""

import re
import statistics
import sys
from collections import ChainMap
from collections.abc import Iterator, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from tables import capacity, operators, reference
from tables.layout import RESULTS, result, select, table
from tables.plots import course_plot, generation_plot

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    *("README.md", "server/OPERATING.md", "server/SEARCH.md", "server/SECURITY.md"),
    *("tests/bench/README.md", "deploy/README.md", "deploy/capacity.md"),
    *("deploy/site/pages/benchmarking.md", "client/OPERATORS.md"),
    # Before 3.12, typed dictionaries do not tell their bases.
    *(["client/REFERENCE.md"] if sys.version_info >= (3, 12) else []),
)
_BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


def linked(name: str, root: str = "") -> str:
    return f"[`{name}.json`]({root}tests/bench/results/{name}.json)"


def front_page() -> Iterator[str]:
    service = result("gpu_service_h100")
    ours = service["one client"]["fresh 300 x 100000"]
    theirs = service["EvoGP"]["300 x 100000"]
    (cpu,) = select(result("cpu_vs_pyoperon")["cases"], rows=10**5, threads=2)
    rates = cpu["giga_token_rows_per_second"]
    (fits,) = select(result("fit")["cases"], iterations=50, threads=2)
    found = searches()
    solved = [found["feynman", 0.0, name]["solved"] for name in ("warpfit", "pyoperon")]
    tables = {row["method"]: row for row in result("tables_two_cores")["summary"]}
    medians = [f"{tables[name]['median_r2']:.3f}" for name in ("warpfit", "pyoperon")]
    linear = tables["warpfit"]["median_linear_r2"]
    names = ("gpu_service_h100", "cpu_vs_pyoperon", "fit", "srbench", "tables_two_cores")
    h100, values, fitted, equations, public = map(linked, names)
    yield f"""\
| what | warpfit | peer | result file |
|---|---|---|---|
| losses of 300 fresh expressions x 100,000 rows, fast mode, one H100, median | \
{ours["p50_ms"]:.1f} ms through gRPC | EvoGP 0.1.0: {theirs["p50_ms"]:.1f} ms in its process | \
{h100} |
| values of 300 expressions x 100,000 rows, precise mode, 2 CPU threads | \
{rates["warpfit precise values"]:.1f} Gtok/s | pyoperon 0.6.2: {rates["pyoperon"]:.1f} Gtok/s | \
{values} |
| fits, 10,000 rows, 50 iterations, precise mode, 2 CPU threads | \
{fits["fits_per_second"]["warpfit precise"]:,.0f} a second | \
pyoperon: {fits["fits_per_second"]["pyoperon"]:,.0f} a second | {fitted} |
{laws_row("search_laws_cpu", "two cores")}
{laws_row("search_laws_gpu_own", "one H200", " on its host's cores")}
| equations of the Feynman database found exactly (SRBench's rule), 30 s, one CPU thread | \
{solved[0]} of 100 | pyoperon: {solved[1]} of 100 | {equations} |
| twelve public tables, median R2 of rows left out, 10 s, two cores | {medians[0]} | \
pyoperon: {medians[1]}; linear regression: {linear:.3f} | {public} |"""


def cpu_engine() -> Iterator[str]:
    rows, ours, fast = [], "warpfit precise values", "warpfit fast values"
    for case in result("cpu_vs_pyoperon")["cases"]:
        rates, times = case["giga_token_rows_per_second"], case["times_pyoperon"]
        speeds = f"{rates['pyoperon']:.2f} | {rates[ours]:.2f}"
        ratios = f"{times[ours]:.1f} | {times[fast]:.1f}"
        rows.append(f"{case['rows']:,} | {case['threads']} | {speeds} | {ratios}")
    head = "rows | threads | pyoperon, Gtok/s | warpfit, Gtok/s | ratio | fast mode, ratio"
    yield from table(head, rows)


def fits() -> Iterator[str]:
    document, rows = result("fit"), []
    for case in document["cases"]:
        rates, losses = case["fits_per_second"], case["final_loss"]["warpfit precise"]
        compared = " / ".join(str(losses[name]) for name in ("better", "equal", "worse"))
        speeds = f"{rates['pyoperon']:,.0f} | {rates['warpfit precise']:,.0f}"
        ratio = f"{case['times_pyoperon']['warpfit precise']:.1f}"
        rows.append(f"{case['iterations']} | {case['threads']} | {speeds} | {ratio} | {compared}")
    head = "iterations | threads | pyoperon, fits/s | warpfit, fits/s | ratio"
    yield from table(f"{head} | loss better / equal / worse", rows)
    (cost,) = select(document["cost_of_derivatives"], rows=10**5)
    times = cost["precise"]["times_loss"]
    yield (
        f"\nAt 100,000 rows loss and gradient together take {times['loss and gradient']:.2f} times "
        "the time of the loss alone,\nwith the normal matrix of a Levenberg-Marquardt step "
        f"{times['loss, gradient, normal matrix']:.2f} times."
    )


def searches() -> dict[tuple[Any, ...], dict[str, Any]]:
    """Counts and medians of SRBench's tracks by track, noise and method."""
    keys, rows = ("track", "noise", "method"), result("srbench")["summary"]
    return {tuple(row[key] for key in keys): row for row in rows}


def found_equations() -> Iterator[str]:
    found = searches()
    ours, theirs = (found["feynman", 0.0, method] for method in ("warpfit", "pyoperon"))
    noisy = found["feynman", 0.01, "warpfit"]
    others = [found["strogatz", 0.0, method]["solved"] for method in ("warpfit", "pyoperon")]
    yield (
        "Of the 100 equations of the Feynman Symbolic Regression Database `SymbolicRegressor` "
        f"finds {ours['solved']} exactly ({ours['accurate']} with R2 > 0.999),\n"
        f"pyoperon {theirs['solved']} ({theirs['accurate']}); with noise of 1% `SymbolicRegressor` "
        f"{noisy['solved']} ({noisy['accurate']}). Of 14 Strogatz equations {others[0]} and "
        f"{others[1]}."
    )


def laws() -> Iterator[str]:
    gpu, own, cpu = (result(f"search_laws_{name}") for name in ("gpu", "gpu_own", "cpu"))
    cores, half = own["machine"]["cores"], cpu["median_seconds_until_found"]
    yield (
        f"On one H200 {gpu['found']} of {gpu['searches']} searches of {gpu['seconds']:.0f} s found "
        f"the law, half of all within {gpu['median_seconds_until_found']:.1f} s, at "
        f"{gpu['formulas_per_second'] / 1e6:.0f} million\nformulas a second. Of eight further "
        f"laws, to which nothing was tuned, {own['found']} were found in {own['seconds']:.0f} s, "
        f"by pyoperon with the same operators,\nlength and time on {cores} cores "
        f"{own['found_by_pyoperon']}. On two cores {cpu['found']} of {cpu['searches']} searches "
        f"of {cpu['seconds']:.0f} s found the law,\nhalf of all within {half:.1f} s; pyoperon "
        f"{cpu['found_by_pyoperon']}."
    )


def laws_row(name: str, where: str, host: str = "") -> str:
    found = result(name)
    ours, theirs, count = (found[key] for key in ("found", "found_by_pyoperon", "searches"))
    what = f"laws of 4 to 7 variables among 10 found, noise of 2%, {found['seconds']:.0f} s"
    scores = f"{ours} of {count} | pyoperon{host}: {theirs} of {count}"
    return f"| {what}, {where} | {scores} | {linked(name)} |"


def three_columns() -> Iterator[str]:
    """Kernel, call in a process and call through the wire on one H200."""
    service = result("gpu_service")
    cases, rows = select(result("gpu_interpreter")["results"], mode="float32 fast"), []
    kernels = {case["rows"]: case["interpret_us"] / 1e3 for case in cases}
    for name, theirs in service["EvoGP"].items():
        programs, _, count = name.partition(" x ")
        wire = service["one client"][f"fresh {name}"]["p50_ms"]
        kernel = f"{kernels[int(count)]:.2f} ms" if programs == "300" else ""
        batch = f"{int(programs):,} x {int(count):,}"
        rows.append(f"{batch} | {kernel} | {theirs['p50_ms']:.1f} ms | {wire:.1f} ms")
    head = "expressions x rows | warpfit, kernel alone | EvoGP, a call in its process"
    yield from table(f"{head} | warpfit, a call through gRPC", rows)
    yield ""
    yield "Losses in fast mode, medians, fresh expressions; EvoGP has trees and data on the device"
    files = (linked(name, "../../../") for name in ("gpu_interpreter", "gpu_service"))
    yield f"already ({', '.join(files)})."


def srbench_2025() -> Iterator[str]:
    document, rows = result("srbench_2025"), []
    for name in dict.fromkeys(run["data"] for run in document["runs"]):
        runs = [run for run in document["runs"] if run["data"] == name]
        scores = sorted(run["r2_test"] for run in runs)
        known = document["published"].get(name)
        published = "{}: {:.2f}, {} nodes".format(*known) if known else "no numbers"
        nodes = statistics.median(run["size"] for run in runs)
        told = f"{statistics.median(scores):.2f} ({scores[0]:.2f} to {scores[-1]:.2f})"
        rows.append(f"`{name}` | {runs[0]['rows']} | {published} | {told} | {nodes:.0f}")
    head = "data set | rows | published R2 and size | R2, median (range) of "
    yield from table(f"{head}{document['seeds']} splits | nodes, median", rows)
    seconds, cores = document["seconds"], document["machine"]["cores"]
    yield f"\nEach fit had {seconds:.0f} s and one thread of {cores} shared cores"
    yield f"({linked('srbench_2025', '../../../')})."


def noisy_tables() -> Iterator[str]:
    document, rows = result("tables_two_cores"), []
    cores = document["machine"]["cores"]
    for row in document["summary"]:
        where = f"{cores} | {row['seconds_allowed']:.0f} s | {row['method']} | {row['runs']}"
        medians = f"{row['median_r2']:.3f} | {row['median_tokens']:.0f}"
        rows.append(f"{where} | {medians} | {', '.join(row['below_linear'])}")
    head = "cores | time | method | searches | median test R2 | median tokens | below linear"
    yield from table(head, rows)


def skeletons() -> Iterator[str]:
    rows, methods = [], ["warpfit", "least_squares", "bfgs", "pyoperon"]
    settings = {name: each for name, each in result("skeletons").items() if ", noise" in name}
    for name, counts in settings.items():
        row = f"{name}, {counts['skeletons']} of {counts['of']} skeletons"
        for own in map(counts.get, methods):
            row += f" | {own['recovered']:.1%} ({own['median_processor_seconds']} s)"
        rows.append(row)
    yield from table(" | ".join(["constants", *methods]), rows)


def service() -> Iterator[str]:
    cost, document = result("call_cost"), result("service")
    client, server = cost["client_us"], cost["server_us"]
    overhead = document["evaluate_300_fresh_1000_rows_loss"]["overhead_p50_ms"]
    yield f"""\
| what | measured |
|---|---|
| 300 programs with parameters, losses back: CPU time in the client | \
{client["fresh"] / 1e3:.2f} ms |
| the same programs with other parameters | {client["repeated"] / 1e3:.2f} ms |
| gRPC alone, a call of its own for {cost["request_bytes"] / 1e3:.0f} kB | \
{client["grpc_alone"] / 1e3:.2f} ms |
| the same in a call that stays open | {client["open_call_alone"] / 1e3:.2f} ms |
| CPU time to decode 300 programs, and to check their tokens | \
{server["decode"] / 1e3:.2f} + {server["tokens_compiled"] / 1e3:.2f} ms |
| 300 fresh programs, 1,000 rows: beyond the engine's own time, median | {overhead:.1f} ms |
| from command to ready, compile cache filled | {document["start_up_seconds"]:.1f} s |"""


def transport() -> Iterator[str]:
    documents, rows = [result(name) for name in ("transport", "transport_16_cores")], []
    for title, *path in (
        ("copying memory", "bounds", "memory_copy"),
        ("SHA-256", "bounds", "sha256"),
        ("120 MB of values, moved alone", "answer"),
        ("and computed by the CPU engine on the same cores", "answer_with_cpu_engine"),
        ("400 MB upload, hashed by the server", "upload"),
    ):
        found = [reduce(getitem, path, document) for document in documents]
        cells = (f" | {one['gb_s']:.2f} GB/s, best {one['best_gb_s']:.2f}" for one in found)
        rows.append(title + "".join(cells))
    ready = (f" | {document['upload']['with_ready_gb_s']:.2f} GB/s" for document in documents)
    rows.append("and transposed and hashed by the client" + "".join(ready))
    yield from table("what | 2 cores | 16 cores", rows)


def device() -> Iterator[str]:
    rows: dict[str, str] = {}
    for way, time, rate in (
        ("interpreter", "interpret_us", "tokens_per_second"),
        ("compiled", "microseconds", "token_rows_per_second"),
    ):
        for case in result(f"gpu_{way}")["results"]:
            if case["rows"] >= 10**4 and case.get("mix", "thesis mix") == "thesis mix":
                what = f"{way}, {case['mode']}"
                told = f"{case[time]:,.0f} us = {case[rate] / 1e12:.2f} Ttok/s"
                rows[what] = f"{rows.get(what, what)} | {told}"
    head = "300 expressions, losses | 10,000 rows | 100,000 rows | 1,000,000 rows"
    yield from table(head, rows.values())
    compiled = result("gpu_compiled")
    seconds, threads = compiled["compile_300_expressions_seconds"], compiled["compiler_threads"]
    lowered = {case["programs"]: case["lower_us"] for case in result("gpu_lowering")["results"]}
    yield (
        f"\nFrom text to loaded kernels 300 fresh expressions take {seconds['float32 fast']:.2f} s "
        f"on {threads} threads in fast mode,\n{seconds['float32 precise']:.2f} s in precise mode. "
        f"Lowering on the device takes {lowered[300]:.0f} us for 300 programs, "
        f"{lowered[50_000]:.0f} us for 50,000."
    )


def gpu_devices() -> Iterator[str]:
    two, shared = result("devices"), result("devices_one_gpu")
    four, encoded = result("devices_four_gpus"), result("devices_four_gpus_encoded")
    lost = four["loss of an engine"]["0,1,2,3"]
    (on_cpu,) = result("devices_cpu")["sustained"]

    def times(cases: Any, setting: str) -> str:
        return f"{cases['times_the_first'][setting]:.2f}"

    large = ("one client", "5,000 programs x 1,000,000 rows, one client")
    rows, lone = [], (large, ("fits", "3,000 searches x 10,000 rows, one client"))
    for key, title in lone:
        one_gpu = times(shared[key], "0,0") if key in shared else ""
        rows.append(f"{title} | {times(two[key], '0,1')} | {one_gpu}")
    for case in two["sustained"]:
        shape = {name: case[name] for name in ("programs", "rows", "workers")}
        other = [times(each, "0,0") for each in select(shared["sustained"], **shape)]
        title = "{programs:,} programs x {rows:,} rows, {workers} workers".format(**shape)
        rows.append(f"{title} | {times(case, '0,1')} | {''.join(other)}")
    yield from table("what | two GPUs | two engines on one GPU", rows)
    yield ""
    rows = [f"{title} | {times(four[key], '0,1,2,3')} |" for key, title in lone]
    for document, who in ((four, ""), (encoded, ", encoded before")):
        for case in document["sustained"]:
            runs = [each["calls_per_second"] for each in case["servers"]["0,1,2,3"]]
            what = "{programs} programs x {rows:,} rows, {workers} workers".format(**case)
            told = f"{times(case, '0,1,2,3')} | {statistics.median(runs):,.0f}"
            rows.append(f"{what}{who} | {told}")
    yield from table("what | four H200 | calls/s", rows)
    yield ""
    rows = []
    for name, devices in (("one_of_four", 1), ("two_of_four", 2), ("four", 4)):
        found = result(f"search_laws_{name}_gpus")
        rate, half = found["formulas_per_second"], found["median_seconds_until_found"]
        told = f"{found['found']} of {found['searches']} | {half:.1f}"
        rows.append(f"{devices} | {rate / 1e6:.1f} million | {told}")
    head = "devices of a search of 6 s | formulas a second | laws found"
    yield from table(f"{head} | median seconds until found", rows)
    calls = lost["one client"]
    both, search = (calls["large batches"], calls["fits"]), calls["search"]
    failed, differ = (sum(each[of] for each in both) for of in ("failed", "answers_that_differ"))
    yield (
        f"\nOne of four engines killed under {lost['workers']} workers: {lost['failed']} failed "
        f"calls, {lost['answers_that_differ']} answers that differ, no answers for "
        f"{1e3 * lost['longest_gap_seconds']:.0f} ms at most; under one client's large batches "
        f"and fits: {failed} failed calls, {differ} answers that differ, the longest call "
        f"{max(each['longest_call_seconds'] for each in both):.2f} s; "
        f"under a search: its reason was `{search['reason']}`, and its front has "
        f"{search['sizes of the front']} sizes. Two CPU engines of one thread against one, on two "
        f"cores: {times(on_cpu, 'cpu:2')}."
    )


def gpu_streaming() -> Iterator[str]:
    rows = {}
    names = {"compiled": "losses, compiled", "gradients": "losses and gradients"}
    for document in (result("gpu_streaming_kinds"), result("gpu_streaming")):
        for case in document["results"]:
            kernels, copies = case["kernel_seconds"], document["copy_seconds"]
            bound = f"{max(kernels, copies):.2f} s ({'kernels' if kernels > copies else 'copies'})"
            what = f"{case['programs']:,} expressions: {names.get(case['kind'], 'losses')}"
            rows[what] = f"{what} | {case['seconds']:.2f} | {bound} | {case['of_bound']:.2f}"
    yield from table("what | seconds | bound | share of the bound", rows.values())


def gpu_derivatives() -> Iterator[str]:
    rows: dict[str, str] = {}
    for case in result("gpu_derivatives_h100")["results"]:
        if case["rows"] >= 10**4:
            mode = case["mode"]
            rows[mode] = f"{rows.get(mode, mode)} | {case['gradient_us']:,.0f} us"
    head = "300 expressions, losses and gradients | 10,000 rows | 100,000 rows | 1,000,000 rows"
    yield from table(head, rows.values())


#: Calls of one client by the title of a row.
_CALLS = {
    "300 expressions, 1,000 rows": "fresh 300 x 1000",
    "300 expressions, 100,000 rows": "fresh 300 x 100000",
    "300 expressions, 1,000,000 rows": "fresh 300 x 1000000",
    "5,000 expressions, 1,000 rows": "fresh 5000 x 1000",
    "5,000 expressions, 10,000 rows": "fresh 5000 x 10000",
    "50,000 expressions, 1,000 rows": "fresh 50000 x 1000",
    "loss and gradient, 300 expressions, 100,000 rows": "fresh 300 x 100000, gradient",
    "300 expressions that repeat, 100,000 rows": "repeated auto",
}


def gpu_service(names: Sequence[str] = ("gpu_service",)) -> Iterator[str]:
    """Calls of one client through gRPC on each machine, and many clients."""
    documents, rows = [result(name) for name in names], []
    for title, case in _CALLS.items():
        row = title
        for document in documents:
            found = document["one client"][case]
            peer = document["EvoGP"].get(case.removeprefix("fresh "))
            theirs = f"{peer['p50_ms']:.1f} ms" if peer else ""
            row += f" | {found['p50_ms']:.1f} ms, {found['p99_ms']:.1f} ms | {theirs}"
        rows.append(row)
    columns = " | median, 99th percentile | EvoGP, median" * len(documents)
    yield from table(f"one client{columns}", rows)
    yield ""
    for cases in zip(*(document["sustained"] for document in documents), strict=True):
        rates = [f"{case['token_rows_per_second'] / 1e12:.2f} Ttok/s" for case in cases]
        within = [f"answers within {case['p99_ms']:.1f} ms (99th percentile)" for case in cases]
        several = " and ".join(map(", ".join, zip(rates, within, strict=True)))
        yield f"{cases[0]['workers']} workers together: {several}."


def gpu_service_h100() -> Iterator[str]:
    return gpu_service(("gpu_service_h100", "gpu_service_h100_second"))


def proposals() -> Iterator[str]:
    rows = []
    for where, name in (("two cores", "proposals"), ("H100, 16 cores", "proposals_gpu")):
        cases = result(name)["cases"].values()
        rates = (f" | {case['skeletons_per_second']:,.0f}" for case in cases)
        rows.append(where + "".join(rates))
    yield from table("skeletons a second | 1,000 rows | 100,000 rows", rows)


def overload() -> Iterator[str]:
    """Ten times the calls that a server can answer, and a greedy tenant beside a modest one."""
    rows = []
    for name, machine in (
        ("guard_present", "2 slower cores, CPU engine, the present version"),
        ("guard_loop", "2 cores, CPU engine, the present loop, an earlier version"),
        ("guard", "2 cores, CPU engine, the loop before"),
        ("guard_16_cores_loop", "16 cores, CPU engine, the present loop, an earlier version"),
        ("guard_16_cores", "16 cores, CPU engine, the loop before"),
        ("guard_cuda", "16 cores, H200, the present loop, an earlier version"),
    ):
        document = result(name)
        over = document["ten_times_overload"]
        ratios = (f"{case['p99_ratio']:.1f}" for case in document["greedy_tenant"].values())
        refused = f"{over['refused_as_one_client_saw_it']['p99_ms']:.1f} ms"
        rates = f"{over['peak_calls_per_second']:.0f} | {over['goodput_of_peak']:.2f}"
        rows.append(f"{machine} | {rates} | {refused} | {', '.join(ratios)}")
    head = "machine | answers a second at the peak | share of it at overload | refusal, p99"
    yield from table(f"{head} | the modest tenant's p99, times that alone", rows)


def faults() -> Iterator[str]:
    found = result("faults")["faults"]
    soak, fuzz = result("soak"), result("fuzz")
    kill, two, stop = (found[f"engine_sig{x}"] for x in ("kill", "kill_two_front_ends", "stop"))
    restart, term = found["server_sigkill"], found["sigterm"]
    calls = sum(soak["soak"]["calls"].values())
    grown = max(part["private_mib"] for part in fuzz["growth_after_half"].values())

    def seen(fault: Any) -> str:
        return f"{fault['wrong_answers']}, {fault['failures_after_retry']}"

    def silent(fault: Any) -> str:
        median, most = (fault[f"seconds_without_answers_{which}"] for which in ("median", "max"))
        return f"no answers for {median:.1f} s at the median, {most:.1f} s at most"

    lost, frozen = (found[f"one_of_three_servers_{name}"] for name in ("sigkill", "sigstop"))
    rolling = found["three_servers_rolling_restart"]

    def gap(fault: Any) -> str:
        return f"a client waits {fault['client_gap_seconds_max']:.1f} s at most"

    yield f"""\
| fault | wrong answers, failed calls | measured |
|---|---|---|
| engine SIGKILL, {kill["kills"]} times, 8 clients | {seen(kill)} | {silent(kill)} |
| the same with two front-end processes | {seen(two)} | {silent(two)} |
| engine SIGSTOP, {stop["stops"]} times | {seen(stop)} | \
not ready after {stop["seconds_until_unready_max"]:.1f} s at most, \
replaced after {stop["seconds_until_replaced_median"]:.1f} s |
| server SIGKILL and restart, {restart["kills"]} times | {seen(restart)} | {silent(restart)} |
| SIGTERM and restart, {term["stops"]} times | {seen(term)} | \
stopped after {term["seconds_to_stop_max"]:.1f} s at most |
| one of three servers SIGKILL, {lost["kills"]} times | {seen(lost)} | {gap(lost)} |
| one of three servers SIGSTOP, {frozen["stops"]} times | {seen(frozen)} | {gap(frozen)} |
| rolling restart of three servers, {rolling["restarts"]} restarts | {seen(rolling)} | \
the longest call takes {rolling["longest_call_seconds"]:.1f} s |
| {soak["minutes"]:.0f} minutes of mixed load, {calls:,} calls | \
{soak["soak"]["engine_restarts"]} restarts | \
memory grew by {soak["soak"]["growth"]["memory_bytes"] / 1e6:.0f} MB |
| {fuzz["requests"]:,} fuzzed requests | {fuzz["crashes"]} crashes, {fuzz["internal"]} INTERNAL | \
memory grew by {grown:.1f} MiB in the second half |"""


def faults_ray() -> Iterator[str]:
    """Faults of a Ray cluster of three nodes, and what clients of its servers see of them."""
    found = result("faults_ray")["faults"]
    rows = []
    for title, name in (
        ("a server SIGKILL", "server_sigkill"),
        ("a node SIGKILL, with all that runs on it", "node_sigkill"),
        ("`warpfit ray restart`", "rolling_restart"),
    ):
        case = found[name]
        wrong = f"{case['wrong_answers']}, {case['failures_after_retry']}"
        gap = f"{case['client_gap_seconds_max']:.2f} s"
        rows.append(f"{title}, {case['faults']} times | {wrong} | {gap}")
    head = "three nodes, 4 clients | wrong answers, failed calls | longest gap of a client"
    yield from table(head, rows)
    searched = found["search_while_a_worker_a_server_and_a_node_are_killed"]
    same = "the same formulas as" if searched["same_formulas"] else "other formulas than"
    yield (
        "\nA search by `client/examples/islands_on_ray.py` during which a worker, a server and a "
        f"node were killed found\n{same} one that nothing disturbed, after "
        f"{searched['seconds']:.0f} instead of {searched['seconds_undisturbed']:.0f} s."
    )


def attacks() -> Iterator[str]:
    """Times of an innocent tenant's calls, alone and while others attack the server."""
    found = {name: case for name, case in result("attacks")["attacks"].items() if "alone" in case}

    rows = []
    for name, case in found.items():
        times = [case[when] for when in ("alone", "under_attack")]
        each = " | ".join(f"{time['p50_ms']:.0f} / {time['p99_ms']:.0f}" for time in times)
        wrong, failed = (sum(time[what] for time in times) for what in ("wrong", "failed"))
        told = f"{each} | {times[1]['max_ms']:.0f} | {wrong}, {failed}"
        rows.append(f"{name.partition(' ')[2]} | {told}")
    head = "attack | alone, p50 / p99 in ms | attacked | longest | wrong answers, failed calls"
    yield from table(head, rows)


def page(text: str) -> str:
    """Return the text of a README with its figures: what the functions of their names yield."""
    figures = ChainMap(globals(), *map(vars, (capacity, operators, reference)))

    def block(match: re.Match[str]) -> str:
        return match[1] + "\n".join(figures[match[2]]()) + "\n" + match[3]

    return _BLOCK.sub(block, text)


def outputs() -> dict[Path, str]:
    found = {ROOT / name: page((ROOT / name).read_text()) for name in PAGES}
    found[RESULTS / "generation.svg"] = generation_plot()
    found[RESULTS / "search_course.svg"] = course_plot()
    return found


def main() -> int:
    checks, stale = "--check" in sys.argv, False
    for path, text in outputs().items():
        if not path.exists() or path.read_text() != text:
            stale = True
            print(path.relative_to(ROOT))
            if not checks:
                path.write_text(text)
    return int(stale and checks)


if __name__ == "__main__":
    sys.exit(main())
