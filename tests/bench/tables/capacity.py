"""The tables of ``deploy/capacity.md``: arithmetic on the measured costs of a call.

A call evaluates 300 fresh expressions on 100,000 rows in fast mode and returns losses; costs are
seconds and bytes.
"""

from collections.abc import Iterator

import numpy as np
from tables.layout import result, select, table

SEED = 20261121
#: Calls that are merged into one step: `warpfit_server.engine.cuda.engine` for an H200.
MERGED = int(110e6 * 132 / 8.77e8)
#: What nothing here measures: a network of a computing centre.
LATENCY, BANDWIDTH = 50e-6, 25e9 / 8
#: Bytes a second from pinned memory of the host to the device, measured beside an H200.
PCIE = 55e9
TERABYTE = 1e12


def measured() -> dict[str, float]:
    """Return the time of each process for a call, and that of a step, whatever is in it.

    ``busy`` is how much longer processor times are once every core is busy: what 64 workers beside
    the server leave of its cores for a call, over what client and front end need for it alone.
    """
    service, cost = result("gpu_service"), result("call_cost")
    shapes = ("300 x 100000", "300 x 1000", "5000 x 1000")
    one, few, many = (service["one client"][f"fresh {shape}"] for shape in shapes)
    request = (many["copy_in_us"] - few["copy_in_us"]) / 4700 * 300
    kernels = select(result("gpu_interpreter")["results"], mode="float32 fast")
    times = {case["rows"]: case["interpret_us"] for case in kernels}
    slope = (times[10**5] - times[10**4]) / 90_000
    client = cost["client_us"]["fresh"]
    front_end = one["p50_ms"] * 1e3 - client - one["copy_in_us"] - one["compute_us"]
    cores = service["machine"]["cores"] * 1e6 / service["sustained"][-1]["calls_per_second"]
    microseconds = {
        **{"client": client, "front_end": front_end, "request": request, "device": slope * 1e5},
        **{"step": one["copy_in_us"] - request, "launch": one["compute_us"] - slope * 1e5},
    }
    return {
        **{name: value / 1e6 for name, value in microseconds.items()},
        "spread": float(np.log(one["p99_ms"] / one["p50_ms"])) / 2.326,
        "request_bytes": cost["request_bytes"],
        "busy": round(cores / (client + front_end), 2),
    }


def capacity_costs() -> Iterator[str]:
    """Costs of a call, and the rate at which a server with one GPU and 16 cores saturates.

    That of its fullest resource is the most, however many workers there are.
    """
    costs = measured()
    busy, network = costs["busy"], costs["request_bytes"] / BANDWIDTH
    micro = {name: f"{value * 1e6:.0f} us" for name, value in costs.items()}
    rate = {
        "device": costs["launch"] / MERGED + costs["device"],
        "engine process": busy * (costs["step"] / MERGED + costs["request"]),
        "cores": busy * costs["front_end"] / 16,
        "network": network,
    }
    rate = {name: f"{1 / seconds:,.0f}" for name, seconds in rate.items()}
    yield f"""\
| resource | a call takes | measured in | most calls a second, all busy |
|---|---|---|---|
| worker's processor | {micro["client"]} | `call_cost.json` |  |
| 16 cores of the server | {micro["front_end"]}, {busy} times that when all are busy | \
`gpu_service.json`: what is left of the latency | {rate["cores"]} |
| engine process | {micro["step"]} a step, {micro["request"]} a call | `gpu_service.json` | \
{rate["engine process"]} |
| device | {micro["launch"]} a step, {micro["device"]} a call | \
`gpu_service.json`, `gpu_interpreter.json` | {rate["device"]} |
| network, 25 Gbit/s | {network * 1e6:.0f} us for {costs["request_bytes"] / 1e3:.0f} kB | \
`call_cost.json`; the rate is assumed | {rate["network"]} |"""


def capacity_terabyte() -> Iterator[str]:
    """A data set of 1 TB, float32, ten variables and a target, on so many GPUs.

    Each GPU has its share of the rows and returns partial sums; one process sends the batch to all
    and adds the sums up. The slowest share is what the answer waits for.
    """
    costs, lines, rng = measured(), [], np.random.default_rng(SEED)
    memory = 0.9 * result("gpu_service")["device"]["memory"]
    for gpus in (1, 8, 64, 1_000):
        share, streamed, kernels = TERABYTE / gpus, "", costs["device"] * TERABYTE / 44 / gpus / 1e5
        if share > memory:
            streamed, kernels = ": streamed", max(kernels, share / PCIE)
        slowest = float(rng.lognormal(0, costs["spread"], (200, gpus)).max(axis=1).mean())
        host = (costs["front_end"] + costs["step"] + costs["request"]) * slowest
        gathering = gpus * costs["client"] + host + 2 * LATENCY
        lines.append(
            f"{gpus:,} | {share / 1e9:,.0f} GB{streamed} | {kernels:.2f} s | "
            f"{gathering * 1e3:.0f} ms | {share / BANDWIDTH:.1f} s"
        )
    head = "GPUs | each holds | 300 expressions: kernels | sending and gathering"
    yield from table(f"{head} | reload of a lost share, 25 Gbit/s", lines)
    upload = TERABYTE / (result("transport_16_cores")["upload"]["gb_s"] * 1e9)
    told = f"One client uploads it in {upload / 60:.0f} minutes at the rate of"
    yield f"\n{told} `transport_16_cores.json`."
