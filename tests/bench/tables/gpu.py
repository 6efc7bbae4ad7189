"""Tables of GPU engines from the result files: gradients, calls through gRPC, fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from tables.layout import result, table


def gpu_derivatives() -> Iterator[str]:
    """Device time of losses with their gradients."""
    times = {
        (case["mode"], case["rows"]): case["gradient_us"]
        for case in result("gpu_derivatives_h100")["results"]
    }
    rows = [
        mode + "".join(f" | {times[mode, rows]:,.0f} us" for rows in (10**4, 10**5, 10**6))
        for mode in dict.fromkeys(mode for mode, _ in times)
    ]
    header = "300 expressions, losses and gradients | 10,000 rows | 100,000 rows | 1,000,000 rows"
    yield from table(header, rows)


def gpu_service(name: str = "gpu_service") -> Iterator[str]:
    """Calls of one client through gRPC, and many clients."""
    document, rows = result(name), []
    for title, case in (
        ("300 expressions, 1,000 rows", "fresh 300 x 1000"),
        ("300 expressions, 100,000 rows", "fresh 300 x 100000"),
        ("300 expressions, 1,000,000 rows", "fresh 300 x 1000000"),
        ("5,000 expressions, 1,000 rows", "fresh 5000 x 1000"),
        ("5,000 expressions, 10,000 rows", "fresh 5000 x 10000"),
        ("50,000 expressions, 1,000 rows", "fresh 50000 x 1000"),
        ("loss and gradient, 300 expressions, 100,000 rows", "fresh 300 x 100000, gradient"),
        ("300 expressions that repeat, 100,000 rows", "repeated auto"),
    ):
        found = document["one client"][case]
        peer = document["EvoGP"].get(case.removeprefix("fresh "))
        theirs = f"{peer['p50_ms']:.1f} ms" if peer else ""
        rows.append(f"{title} | {found['p50_ms']:.1f} ms | {found['p99_ms']:.1f} ms | {theirs}")
    yield from table("one client | median | 99th percentile | EvoGP, median", rows)
    yield ""
    for case in document["sustained"]:
        yield (
            f"{case['workers']} workers together: {case['token_rows_per_second'] / 1e12:.2f} "
            f"Ttok/s, answers within {case['p99_ms']:.1f} ms (99th percentile)."
        )


def gpu_fits(name: str = "gpu_fit") -> Iterator[str]:
    """Fits through gRPC."""
    document, rows = result(name), []
    for title, case in (
        ("`Optimize`, 300 expressions, 50 iterations at most", "default_tolerances"),
        ("the same without tolerances", "no_tolerances"),
    ):
        both = (document["wire"][mode]["optimize_viable"] for mode in ("precise", "fast"))
        rows.append(title + "".join(f" | {fit[case]['ms']:.0f} ms" for fit in both))
    run = document["run_viable"]
    generations = f"{run['generations']} generations of 300 such fits, one worker"
    rows.append(f"{generations} | {run['seconds']:.1f} s | ")
    yield from table("what | float32 precise | fast", rows)


GPU: Mapping[str, Callable[[], Iterator[str]]] = {
    "gpu_derivatives": gpu_derivatives,
    "gpu_service": gpu_service,
    "gpu_service_h100": partial(gpu_service, "gpu_service_h100"),
    "gpu_fits": gpu_fits,
    "gpu_fits_h100": partial(gpu_fits, "gpu_fit_h100"),
}
