"""The tables of deploy/capacity.md, from results/capacity.json."""

from collections.abc import Callable, Iterator
from typing import Any

from tables.layout import result, table


def capacity_check() -> Iterator[str]:
    """The model beside what was measured."""
    rows: list[tuple[Any, ...]] = [("workers", "what", "measured", "model", "error")]
    titles = {"calls_per_second": "answers a second"}
    for case in result("capacity")["validation"]:
        for name, pair in case.items():
            if name != "workers":
                title = titles.get(name, f"{name[1:3]}th percentile, ms")
                cells = (f"{pair[way]:,.1f}" for way in ("measured", "model"))
                error = pair["model"] / pair["measured"] - 1
                rows.append((case["workers"], title, *cells, f"{error:+.0%}"))
    yield from table(*rows)


def capacity_costs() -> Iterator[str]:
    """Costs of a call, and the rate at which a server with one GPU saturates."""
    document = result("capacity")
    costs, most = document["costs"], document["bounds"]
    micro = {
        name: f"{value * 1e6:.0f} us"
        for name, value in (costs | {"network": most["network"]}).items()
    }
    rate = {name: f"{1 / seconds:,.0f}" for name, seconds in most.items()}
    yield f"""\
| resource | a call takes | measured in | most calls a second, all busy |
|---|---|---|---|
| worker's processor | {micro["client"]} | `call_cost.json` |  |
| 16 cores of the server | {micro["front_end"]}, {costs["busy"]} times that when all are busy | \
`gpu_service.json`: what is left of the latency | {rate["cores"]} |
| engine process | {micro["step"]} a step, {micro["request"]} a call | `gpu_service.json` | \
{rate["engine process"]} |
| device | {micro["launch"]} a step, {micro["device"]} a call | \
`gpu_service.json`, `gpu_interpreter.json` | {rate["device"]} |
| network, 25 Gbit/s | {micro["network"]} for {costs["request_bytes"] / 1e3:.0f} kB | \
`call_cost.json`; the rate is assumed | {rate["network"]} |"""


def capacity_clusters() -> Iterator[str]:
    """Throughput and latency by workers and GPUs, of both kinds of workers."""
    document = result("capacity")
    rows: list[tuple[Any, ...]] = [
        ("workers", "GPUs", *("Ttok/s", "99th percentile", "busiest") * 2)
    ]
    for pair in zip(*(document["clusters"][kind] for kind in ("compiled", "deap")), strict=True):
        cells: list[str] = []
        for case in pair:
            busiest = case["busiest"]
            cells += (
                f"{case['ttok_per_second']:,.1f}",
                f"{case['p99_ms']:.1f} ms",
                f"{busiest} {case['use'][busiest]:.0%}",
            )
        rows.append((f"{pair[0]['workers']:,}", f"{pair[0]['gpus']:,}", *cells))
    yield from table(*rows)


def capacity_replicas() -> Iterator[str]:
    """Servers that have to hold one data set."""
    document = result("capacity")
    found = {(case["worker"], case["workers"]): case["replicas"] for case in document["replicas"]}
    workers = sorted({number for _, number in found})
    yield from table(
        ("workers on one data set", *(f"{number:,}" for number in workers)),
        *(
            (f"servers, {title}", *(found[kind, number] for number in workers))
            for kind, title in (("compiled", "no work of their own"), ("deap", "DEAP"))
        ),
    )


def capacity_losses() -> Iterator[str]:
    """Servers that die under load."""
    rows: list[tuple[Any, ...]] = [
        (
            "workers, GPUs",
            "GPUs lost",
            "client gives up after",
            "repeated calls",
            "99th percentile",
            "longest call",
        )
    ]
    for case in result("capacity")["losses"]:
        size = f"{case['workers']:,}, {case['gpus']}"
        latency = (f"{case['p99_ms']:.1f} ms", f"{case['longest_ms']:,.0f} ms")
        rows.append((size, case["killed"], f"{case['failover']} s", case["repeated"], *latency))
    yield from table(*rows)


def capacity_terabyte() -> Iterator[str]:
    """A data set of a terabyte."""
    cases = result("capacity")["terabyte"]
    rows: list[tuple[Any, ...]] = [
        (
            "GPUs",
            "each holds",
            "300 expressions: kernels",
            "sending and gathering",
            "reload of a lost share, 25 Gbit/s",
        )
    ]
    for case in cases:
        held = f"{case['bytes_for_each_gpu'] / 1e9:,.0f} GB"
        rows.append(
            (
                f"{case['gpus']:,}",
                held if case["resident"] else f"{held}: streamed",
                f"{case['kernels_seconds']:.2f} s",
                f"{case['gathering_seconds'] * 1e3:.0f} ms",
                f"{case['reload_of_one_gpu_seconds']:.1f} s",
            )
        )
    yield from table(*rows)
    yield ""
    yield (
        f"One client uploads it in {cases[0]['upload_by_one_client_seconds'] / 60:.0f} minutes at "
        "the rate of `transport_16_cores.json`."
    )


CAPACITY: tuple[Callable[[], Iterator[str]], ...] = (
    *(capacity_check, capacity_costs, capacity_clusters, capacity_replicas),
    *(capacity_losses, capacity_terabyte),
)
