"""Tables of overload and faults from the result files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tables.layout import result, table


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
        refused = over["refused_as_one_client_saw_it"]["p99_ms"]
        rows.append(
            f"{machine} | {over['peak_calls_per_second']:.0f} | {over['goodput_of_peak']:.2f} | "
            f"{refused:.1f} ms | {', '.join(ratios)}"
        )
    head = "machine | answers a second at the peak | share of it at overload | refusal, p99"
    yield from table(f"{head} | the modest tenant's p99, times that alone", rows)


def faults() -> Iterator[str]:
    found = result("faults")["faults"]
    soak, fuzz = result("soak"), result("fuzz")
    kill, two, stop = (
        found[f"engine_{name}"] for name in ("sigkill", "sigkill_two_front_ends", "sigstop")
    )
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
    yield ""
    yield (
        "A search by `client/examples/islands_on_ray.py` during which a worker, a server and a "
        f"node were killed found\n{same} one that nothing disturbed, after "
        f"{searched['seconds']:.0f} instead of {searched['seconds_undisturbed']:.0f} s."
    )


def attacks() -> Iterator[str]:
    """Times of an innocent tenant's calls, alone and while others attack the server."""
    found = {name: case for name, case in result("attacks")["attacks"].items() if "alone" in case}

    def row(name: str, case: Any) -> str:
        times = [case[when] for when in ("alone", "under_attack")]
        each = [f"{time['p50_ms']:.0f} / {time['p99_ms']:.0f}" for time in times]
        wrong, failed = (sum(time[what] for time in times) for what in ("wrong", "failed"))
        return f"{name} | {' | '.join(each)} | {times[1]['max_ms']:.0f} | {wrong}, {failed}"

    head = "attack | alone, p50 / p99 in ms | attacked | longest | wrong answers, failed calls"
    yield from table(head, (row(name.split(" ", 1)[1], case) for name, case in found.items()))


FAULTS: tuple[Callable[[], Iterator[str]], ...] = (overload, faults, faults_ray, attacks)
