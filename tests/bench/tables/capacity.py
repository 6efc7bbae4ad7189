"""The tables of deploy/capacity.md, from results/capacity.json."""

from collections.abc import Callable, Iterator

from tables.layout import result, table


def capacity_check() -> Iterator[str]:
    """The model beside what was measured."""
    rows, titles = [], {"calls_per_second": "answers a second"}
    for case in result("capacity")["validation"]:
        for name, pair in case.items():
            if name != "workers":
                title = titles.get(name, f"{name[1:3]}th percentile, ms")
                cells = " | ".join(f"{pair[way]:,.1f}" for way in ("measured", "model"))
                error = pair["model"] / pair["measured"] - 1
                rows.append(f"{case['workers']} | {title} | {cells} | {error:+.0%}")
    yield from table("workers | what | measured | model | error", rows)


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
    kinds, rows = result("capacity")["clusters"], []
    for pair in zip(kinds["compiled"], kinds["deap"], strict=True):
        row = f"{pair[0]['workers']:,} | {pair[0]['gpus']:,}"
        for case in pair:
            busiest = f"{case['busiest']} {case['use'][case['busiest']]:.0%}"
            row += f" | {case['ttok_per_second']:,.1f} | {case['p99_ms']:.1f} ms | {busiest}"
        rows.append(row)
    yield from table("workers | GPUs" + " | Ttok/s | 99th percentile | busiest" * 2, rows)


def capacity_replicas() -> Iterator[str]:
    """Servers that have to hold one data set."""
    document = result("capacity")
    found = {(case["worker"], case["workers"]): case["replicas"] for case in document["replicas"]}
    workers = sorted({number for _, number in found})
    yield from table(
        "workers on one data set" + "".join(f" | {number:,}" for number in workers),
        (
            f"servers, {title}" + "".join(f" | {found[kind, number]}" for number in workers)
            for kind, title in (("compiled", "no work of their own"), ("deap", "DEAP"))
        ),
    )


def capacity_losses() -> Iterator[str]:
    """Servers that die under load."""
    rows = [
        f"{case['workers']:,}, {case['gpus']} | {case['killed']} | {case['failover']} s | "
        f"{case['repeated']} | {case['p99_ms']:.1f} ms | {case['longest_ms']:,.0f} ms"
        for case in result("capacity")["losses"]
    ]
    head = "workers, GPUs | GPUs lost | client gives up after | repeated calls | 99th percentile"
    yield from table(f"{head} | longest call", rows)


def capacity_terabyte() -> Iterator[str]:
    """A data set of a terabyte."""
    cases, rows = result("capacity")["terabyte"], []
    for case in cases:
        streamed = "" if case["resident"] else ": streamed"
        rows.append(
            f"{case['gpus']:,} | {case['bytes_for_each_gpu'] / 1e9:,.0f} GB{streamed} | "
            f"{case['kernels_seconds']:.2f} s | {case['gathering_seconds'] * 1e3:.0f} ms | "
            f"{case['reload_of_one_gpu_seconds']:.1f} s"
        )
    head = "GPUs | each holds | 300 expressions: kernels | sending and gathering"
    yield from table(f"{head} | reload of a lost share, 25 Gbit/s", rows)
    yield ""
    yield (
        f"One client uploads it in {cases[0]['upload_by_one_client_seconds'] / 60:.0f} minutes at "
        "the rate of `transport_16_cores.json`."
    )


CAPACITY: tuple[Callable[[], Iterator[str]], ...] = (
    *(capacity_check, capacity_costs, capacity_clusters, capacity_replicas),
    *(capacity_losses, capacity_terabyte),
)
