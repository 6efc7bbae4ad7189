"""The tables of deploy/capacity.md, from results/capacity.json."""

from collections.abc import Callable, Iterator

from tables.layout import result, table


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


def capacity_terabyte() -> Iterator[str]:
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


CAPACITY: tuple[Callable[[], Iterator[str]], ...] = (capacity_costs, capacity_terabyte)
