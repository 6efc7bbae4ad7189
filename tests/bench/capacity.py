"""Where a server saturates, and what a terabyte takes: arithmetic on the measured costs of a call.

``run.py capacity`` reads other result files and writes capacity.json, of which `figures.py` makes
the tables of deploy/capacity.md. A call evaluates 300 fresh expressions on 100,000 rows in fast
mode and returns losses; costs are seconds and bytes.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from harness import SEED, arguments, save
from tables.layout import result

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
    one, few, many = (
        service["one client"][f"fresh {case}"]
        for case in ("300 x 100000", "300 x 1000", "5000 x 1000")
    )
    request = (many["copy_in_us"] - few["copy_in_us"]) / 4700 * 300
    times = {
        case["rows"]: case["interpret_us"]
        for case in result("gpu_interpreter")["results"]
        if case["mode"] == "float32 fast"
    }
    slope = (times[10**5] - times[10**4]) / 90_000
    client = cost["client_us"]["fresh"]
    front_end = one["p50_ms"] * 1e3 - client - one["copy_in_us"] - one["compute_us"]
    cores = service["machine"]["cores"] * 1e6 / service["sustained"][-1]["calls_per_second"]
    microseconds = {
        "client": client,
        "front_end": front_end,
        "step": one["copy_in_us"] - request,
        "request": request,
        "launch": one["compute_us"] - slope * 1e5,
        "device": slope * 1e5,
    }
    return {
        **{name: value / 1e6 for name, value in microseconds.items()},
        "spread": float(np.log(one["p99_ms"] / one["p50_ms"])) / 2.326,
        "request_bytes": cost["request_bytes"],
        "busy": round(cores / (client + front_end), 2),
    }


def bounds(costs: dict[str, float], cores: int = 16) -> dict[str, float]:
    """Return the least seconds a call of each resource of a server with one GPU, when it is full.

    The largest of them is what a server saturates at, however many workers there are.
    """
    return {
        "device": costs["launch"] / MERGED + costs["device"],
        "engine process": costs["busy"] * (costs["step"] / MERGED + costs["request"]),
        "cores": costs["busy"] * costs["front_end"] / cores,
        "network": costs["request_bytes"] / BANDWIDTH,
    }


def terabyte(costs: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Estimate a data set of 1 TB, float32, ten variables and a target, on so many GPUs.

    Each GPU has its share of the rows and returns partial sums; one process sends the batch to all
    and adds the sums up. The slowest share is what the answer waits for.
    """
    rows = TERABYTE / (11 * 4)
    memory = 0.9 * result("gpu_service")["device"]["memory"]
    upload = result("transport_16_cores")["upload"]["gb_s"] * 1e9
    rng = np.random.default_rng(SEED)
    for gpus in (1, 8, 64, 1_000):
        share = TERABYTE / gpus
        passing = 0.0 if share <= memory else share / PCIE
        slowest = rng.lognormal(0, costs["spread"], (200, gpus)).max(axis=1).mean()
        host = (costs["front_end"] + costs["step"] + costs["request"]) * float(slowest)
        yield {
            "gpus": gpus,
            "resident": share <= memory,
            "kernels_seconds": max(costs["device"] * rows / gpus / 1e5, passing),
            "gathering_seconds": gpus * costs["client"] + host + 2 * LATENCY,
            "bytes_for_each_gpu": share,
            "upload_by_one_client_seconds": TERABYTE / upload,
            "reload_of_one_gpu_seconds": share / BANDWIDTH,
        }


def main() -> None:
    options, costs = arguments(__doc__, "capacity"), measured()
    content = {"costs": costs, "bounds": bounds(costs), "terabyte": list(terabyte(costs))}
    save(options.name, {"seed": SEED, **content}, options.folder)


if __name__ == "__main__":
    main()
