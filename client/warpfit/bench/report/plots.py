"""Plots of results; each function draws one, or returns None where nothing was measured for it."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from warpfit.bench.report.answers import compact
from warpfit.bench.report.findings import Cell, Grid, System, comparisons, repeats, size

#: Different to people with every kind of colour vision (Okabe and Ito 2008).
COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")
#: Stages of a call and their names.
_STAGES: Final = (
    *(("rest", "client, wire, front end"), ("decode", "decode"), ("queue", "wait for the engine")),
    *(("copy_in", "prepare and copy in"), ("compute", "kernels"), ("copy_out", "copy out")),
)


def speed(found: Sequence[System]) -> Any:
    """Draw token-rows a second against rows, end to end and in the kernels."""
    series = [(system, way, name) for system in found for way, name in _ways(system)]
    if not any(system.select(**way) for system, way, _ in series):
        return None
    figure, axes = _figure(1, 2, sharey=True)
    titles = {"wall": "end to end", "kernel": "kernels"}
    for axis, (measure, title) in zip(axes, titles.items(), strict=True):
        for number, (system, way, name) in enumerate(series):
            rates = {size(c)[0]: c["token_rows_per_second"] for c in _usual(system, way)}
            points = {rows: rate[measure] for rows, rate in rates.items() if measure in rate}
            rows = sorted(points)
            axis.loglog(rows, [points[r] for r in rows], marker="o", **_style(number, name))
        axis.set(title=title, xlabel="rows")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("tokens x rows a second (GP operations a second)")
    axes[1].legend(fontsize=8)
    return figure


def devices(found: Sequence[System]) -> Any:
    """Draw how many times as fast the GPU is as the CPU, by rows and expressions."""
    maps = [
        (grid, f"CPU time / GPU time, {what}\n{pair.gpu.label} / {pair.cpu.label}")
        for pair in comparisons(found)
        for grid, what in ((pair.wall, "end to end"), (pair.kernel, "kernels"))
    ]
    return _maps(maps, lambda ratio: f"{compact(ratio)}x")


def tiers(found: Sequence[System]) -> Any:
    """Draw after how many calls compiling has paid, by rows and expressions."""
    names = {"break_even": "end to end", "kernel_break_even": "if only kernels took time"}
    maps = [
        (
            {(r.rows, r.expressions): getattr(r, name) for r in repeats(system)},
            f"calls until compiling has paid, {what}\n{system.label}",
        )
        for system in found
        if repeats(system)
        for name, what in names.items()
    ]
    return _maps(maps, lambda n: "never" if math.isinf(n) else compact(n), low_is_good=True)


def latency(found: Sequence[System]) -> Any:
    """Draw which share of a call's time each stage takes, at a few sizes."""
    bars = [
        (f"{name}\n{size(cell)[1]:,} x {size(cell)[0]:,} rows", cell["stages"])
        for system in found
        for way, name in _ways(system)
        for cell in _usual(system, way)
    ]
    if not bars:
        return None
    figure, axis = _bars(bars)
    totals = np.array([sum(stages[stage] for stage, _ in _STAGES) for _, stages in bars])
    left = np.zeros(len(bars))
    for number, (stage, name) in enumerate(_STAGES):
        widths = 100 * np.array([stages[stage] for _, stages in bars]) / totals
        axis.barh(range(len(bars)), widths, left=left, **_style(-1 - number, name))
        left += widths
    for place, total in enumerate(totals):
        axis.text(101, place, f"{1e3 * total:.3g} ms", va="center", fontsize=8)
    axis.set(xlim=(0, 112), xlabel="% of a call (medians of the stages)")
    axis.legend(fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return figure


def workers(found: Sequence[System]) -> Any:
    """Draw throughput and latency of many workers at once."""
    lines: dict[str, list[Cell]] = {}
    for system in found:
        for cell in system.select(kind="workers"):
            lines.setdefault(f"{system.label}, {size(cell)[0]:,} rows", []).append(cell)
    if not lines:
        return None
    figure, axes = _figure(1, 2)
    for number, (name, cells) in enumerate(lines.items()):
        cells.sort(key=lambda c: c["scenario"]["workers"])
        counts = [c["scenario"]["workers"] for c in cells]
        rates = [c["token_rows_per_second"]["wall"] for c in cells]
        medians = [1e3 * c["wall"]["median"] for c in cells]
        for axis, heights in zip(axes, (rates, medians), strict=True):
            axis.loglog(counts, heights, marker="o", base=2, **_style(number, name))
            axis.set_yscale("log", base=10)
            axis.grid(alpha=0.3)
    axes[0].set(xlabel="workers", ylabel="tokens x rows a second, together")
    axes[1].set(xlabel="workers", ylabel="median milliseconds of a call")
    axes[0].legend(fontsize=7)
    return figure


def roofline(found: Sequence[System]) -> Any:
    """Draw operations a second against operations a byte, under each device's roof."""
    under = [s for s in found if s.engine in s.document.get("peaks", {}) and _bounds(s.cells)]
    if not under:
        return None
    figure, axes = _figure(len(under), 1, height=4.2 * len(under), squeeze=False)
    for axis, system in zip(axes.flat, under, strict=True):
        _draw_roof(axis, system)
        for number, (way, name) in enumerate(_ways(system)):
            bounds = _bounds(system.select(**way))
            intensities = [bound["operations"] / bound["bytes"] for bound, _ in bounds]
            rates = [bound["operations"] / seconds for bound, seconds in bounds]
            axis.loglog(intensities, rates, "o", alpha=0.7, **_style(number, name))
        axis.set_title(system.label, fontsize=10)
        axis.set(xlabel="operations a byte", ylabel="operations a second")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    return figure


def _bounds(cells: Sequence[Cell]) -> list[tuple[Any, float]]:
    """Return the bound and the kernel seconds of the cells that have both."""
    known = [c for c in cells if c.get("roofline", {}).get("fraction")]
    return [(c["roofline"], c["kernel"]["median"]) for c in known]


def _draw_roof(axis: Any, system: System) -> None:
    peaks = system.document["peaks"][system.engine]
    intensity = np.logspace(-1, 5, 100)
    roof = np.minimum(peaks["lanes_per_second"], intensity * peaks["bytes_per_second"])
    axis.loglog(intensity, roof, color="black", lw=1.5, label="roof: issue, memory")
    bounds = [bound for bound, _ in _bounds(system.select())]
    special = [b["operations"] / b["seconds"] for b in bounds if b["by"] == "special functions"]
    if special:
        style = {"color": "black", "ls": "--", "lw": 1}
        axis.axhline(np.median(special), label="roof: special functions", **style)


def peers(found: Sequence[System]) -> Any:
    """Draw how many times as long as warpfit each peer takes."""
    bars = [
        (f"{cell['peer']}, {size(cell)[0]:,} rows\n{system.label}", cell["times_warpfit"])
        for system in found
        for cell in system.select(kind="peer")
    ]
    if not bars:
        return None
    figure, axis = _bars(bars)
    for place, (_, ratio) in enumerate(bars):
        axis.barh(place, ratio - 1, left=1, color=COLOURS[ratio < 1])
        axis.text(max(ratio, 1), place, f" {ratio:.2g}", va="center", fontsize=8)
    label = "peer's time / warpfit's time, through gRPC; above 1 it is slower"
    axis.set(xscale="log", xlabel=label)
    axis.axvline(1, color="black", lw=1)
    axis.margins(x=0.15)
    return figure


#: Title, file name and function of each plot, in the order of the page.
PLOTS: Final[tuple[tuple[str, str, Callable[[Sequence[System]], Any]], ...]] = (
    ("Speed by rows", "speed", speed),
    ("GPU against CPU", "devices", devices),
    ("Interpreter against compiled kernels", "tiers", tiers),
    ("Where the time of a call goes", "latency", latency),
    ("Many workers at once", "workers", workers),
    ("Roofline", "roofline", roofline),
    ("Peers on the same work", "peers", peers),
)


def _figure(rows: int, columns: int, *, height: float = 4.2, **options: Any) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, height), layout="constrained", dpi=120)
    return figure, figure.subplots(rows, columns, **options)


def _style(number: int, name: str) -> dict[str, str]:
    return {"color": COLOURS[number % len(COLOURS)], "label": name}


def _bars(bars: Sequence[tuple[str, Any]]) -> tuple[Any, Any]:
    """Make a figure for horizontal bars with these names, from the top down."""
    figure, axis = _figure(1, 1, height=0.44 * len(bars) + 1.5)
    axis.set_yticks(range(len(bars)), [name for name, _ in bars], fontsize=7)
    axis.invert_yaxis()
    return figure, axis


def _ways(system: System) -> list[tuple[dict[str, str], str]]:
    """Return tier and reuse of what is drawn of a system, and its name."""
    fresh = {"tier": "interpreter", "reuse": "fresh"}
    if not system.select(tier="compiled"):
        return [(fresh, f"{system.label}: fresh")]
    compiled = {"tier": "compiled", "reuse": "repeated"}
    return [
        (fresh, f"{system.label}: interpreter, fresh"),
        (compiled, f"{system.label}: compiled, repeated"),
    ]


def _usual(system: System, way: dict[str, str]) -> list[Cell]:
    """Return cells with as many expressions as every other scenario has."""
    counts = sorted({size(cell)[1] for cell in system.select()})
    usual = 300 if 300 in counts else max(counts, default=0)
    return [cell for cell in system.select(**way) if size(cell)[1] == usual]


def _maps(
    maps: Sequence[tuple[Grid, str]], text: Callable[[float], str], *, low_is_good: bool = False
) -> Any:
    """Draw maps with their titles, two beside each other."""
    if not maps:
        return None
    lines = len(maps) // 2
    figure, axes = _figure(lines, 2, height=3.6 * lines, squeeze=False)
    for axis, (grid, title) in zip(axes.flat, maps, strict=True):
        _map(axis, grid, text, low_is_good)
        axis.set_title(title, fontsize=9)
    return figure


def _map(axis: Any, grid: Grid, text: Callable[[float], str], low_is_good: bool) -> None:
    """Draw numbers by rows and expressions, in colours by their logarithms."""
    rows, counts = (sorted({key[i] for key in grid}) for i in (0, 1))
    numbers = np.full((len(counts), len(rows)), np.nan)
    for (r, e), value in grid.items():
        numbers[counts.index(e), rows.index(r)] = value
    with np.errstate(divide="ignore"):
        heights = np.log10(np.where(np.isinf(numbers), 1e6, numbers))
    limits = (0, 6) if low_is_good else (-2, 2)
    style = {"cmap": "viridis_r" if low_is_good else "RdBu", "aspect": "auto", "origin": "lower"}
    axis.imshow(heights, vmin=limits[0], vmax=limits[1], **style)
    for (line, column), value in np.ndenumerate(numbers):
        known = not math.isnan(value)
        shown = text(value) if known else "not\nmeasured"
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.6, "pad": 1.5}
        axis.text(column, line, shown, ha="center", va="center", fontsize=8, bbox=box)
    axis.set_xticks(range(len(rows)), [f"{r:,}" for r in rows], fontsize=8)
    axis.set_yticks(range(len(counts)), [f"{e:,}" for e in counts], fontsize=8)
    axis.set(xlabel="rows", ylabel="expressions")
