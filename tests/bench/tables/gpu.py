"""Tables of GPU engines from the result files: gradients, calls through gRPC, fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from tables.layout import result, table


def gpu_derivatives() -> Iterator[str]:
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


def gpu_service(*names: str) -> Iterator[str]:
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
        several = " and ".join(
            f"{case['token_rows_per_second'] / 1e12:.2f} Ttok/s, answers within "
            f"{case['p99_ms']:.1f} ms (99th percentile)"
            for case in cases
        )
        yield f"{cases[0]['workers']} workers together: {several}."


def proposals() -> Iterator[str]:
    rows = []
    for where, name in (("two cores", "proposals"), ("H100, 16 cores", "proposals_gpu")):
        cases = result(name)["cases"].values()
        rates = (f" | {case['skeletons_per_second']:,.0f}" for case in cases)
        rows.append(where + "".join(rates))
    yield from table("skeletons a second | 1,000 rows | 100,000 rows", rows)


GPU: Mapping[str, Callable[[], Iterator[str]]] = {
    "gpu_derivatives": gpu_derivatives,
    "gpu_service": partial(gpu_service, "gpu_service"),
    "gpu_service_h100": partial(gpu_service, "gpu_service_h100", "gpu_service_h100_second"),
    "proposals": proposals,
}
