"""Plots of results; each function draws one, or returns None where nothing was measured for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from warpfit.bench.answers import compact
from warpfit.bench.findings import Grid, System, comparisons, repeats, size

#: Told apart with every kind of colour vision (Okabe and Ito 2008).
COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")
#: Of plots beside each other that are still wide enough.
_MOST_COLUMNS: Final = 3
_STAGES: Final = ("rest", "decode", "queue", "copy_in", "compute", "copy_out")
_STAGE_NAMES: Final = MappingProxyType(
    {
        "rest": "client, wire, front door",
        "decode": "decode",
        "queue": "wait for the engine",
        "copy_in": "prepare and copy in",
        "compute": "kernels",
        "copy_out": "copy out",
    }
)


def speed(found: Sequence[System]) -> Any:
    """Token-rows a second against rows, end to end and in the kernels."""
    series = [(s, *way) for s in found for way in _ways(s)]
    if not any(s.select(tier=tier, reuse=reuse) for s, tier, reuse, _ in series):
        return None
    figure, axes = _figure(1, 2, sharey=True)
    for axis, measure, title in zip(
        axes, ("wall", "kernel"), ("end to end", "kernels"), strict=True
    ):
        for number, (system, tier, reuse, name) in enumerate(series):
            cells = [c for c in system.select(tier=tier, reuse=reuse) if _usual(c, system)]
            cells = [c for c in cells if measure in c["token_rows_per_second"]]
            points = sorted((size(c)[0], c["token_rows_per_second"][measure]) for c in cells)
            axis.loglog(
                *zip(*points, strict=True) if points else ([], []),
                marker="o",
                color=COLOURS[number % len(COLOURS)],
                label=name,
            )
        axis.set(title=title, xlabel="rows")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("tokens x rows a second (GP operations a second)")
    axes[1].legend(fontsize=8)
    return figure


def devices(found: Sequence[System]) -> Any:
    """How many times as fast the GPU is as the CPU, by rows and expressions."""
    pairs = comparisons(found)
    if not pairs:
        return None
    figure, axes = _figure(len(pairs), 2, height=3.6 * len(pairs))
    for row, pair in zip(np.atleast_2d(axes), pairs, strict=True):
        for axis, grid, what in zip(
            row, (pair.wall, pair.kernel), ("end to end", "kernels"), strict=True
        ):
            _map(axis, grid, lambda ratio: f"{compact(ratio)}x")
            title = f"CPU time / GPU time, {what}\n{pair.gpu.label} / {pair.cpu.label}"
            axis.set_title(title, fontsize=9)
    return figure


def tiers(found: Sequence[System]) -> Any:
    """After how many calls compiling has paid, by rows and expressions."""
    measured = [(system, repeats(system)) for system in found if repeats(system)]
    if not measured:
        return None
    figure, axes = _figure(len(measured), 2, height=3.6 * len(measured))
    for row, (system, cells) in zip(np.atleast_2d(axes), measured, strict=True):
        for axis, name, what in zip(
            row,
            ("break_even", "kernel_break_even"),
            ("end to end", "if only kernels took time"),
            strict=True,
        ):
            grid = {(r.rows, r.expressions): getattr(r, name) for r in cells}
            _map(axis, grid, _short, low_is_good=True)
            title = f"calls until compiling has paid, {what}\n{system.label}"
            axis.set_title(title, fontsize=9)
    return figure


def latency(found: Sequence[System]) -> Any:
    """Which share of a call's time each stage takes, at a few sizes."""
    bars = [
        (f"{name}\n{size(c)[1]:,} x {size(c)[0]:,} rows", c["stages"])
        for system in found
        for tier, reuse, name in _ways(system)
        for c in system.select(tier=tier, reuse=reuse)
        if _usual(c, system)
    ]
    if not bars:
        return None
    figure, axis = _figure(1, 1, height=0.45 * len(bars) + 1.5)
    totals = np.array([sum(stages[name] for name in _STAGES) for _, stages in bars])
    left = np.zeros(len(bars))
    for stage, colour in zip(_STAGES, COLOURS[::-1], strict=False):
        widths = 100 * np.array([stages[stage] for _, stages in bars]) / totals
        axis.barh(range(len(bars)), widths, left=left, color=colour, label=_STAGE_NAMES[stage])
        left += widths
    for place, total in enumerate(totals):
        axis.text(101, place, f"{1e3 * total:.3g} ms", va="center", fontsize=8)
    axis.set_yticks(range(len(bars)), [name for name, _ in bars], fontsize=7)
    axis.invert_yaxis()
    axis.set(xlim=(0, 112), xlabel="% of a call (medians of the stages)")
    axis.legend(fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return figure


def workers(found: Sequence[System]) -> Any:
    """Throughput of many workers at once."""
    lines = [
        (f"{system.label}, {rows:,} rows", points)
        for system in found
        for rows, points in _by_rows(system.select(kind="workers"))
    ]
    if not lines:
        return None
    figure, axes = _figure(1, 2)
    for number, (name, cells) in enumerate(lines):
        counts = [c["scenario"]["workers"] for c in cells]
        colour = COLOURS[number % len(COLOURS)]
        rates = [c["token_rows_per_second"]["wall"] for c in cells]
        axes[0].loglog(counts, rates, marker="o", color=colour, label=name, base=2)
        axes[1].loglog(
            counts, [1e3 * c["wall"]["median"] for c in cells], marker="o", color=colour, base=2
        )
    axes[0].set(xlabel="workers", ylabel="tokens x rows a second, together")
    axes[1].set(xlabel="workers", ylabel="median milliseconds of a call")
    for axis in axes:
        axis.set_yscale("log", base=10)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=7)
    return figure


def roofline(found: Sequence[System]) -> Any:
    """Operations a second against operations a byte, under each device's roof."""
    devices = [s for s in found if s.engine in s.document.get("peaks", {})]
    devices = [s for s in devices if _under_roof(s.cells)]
    if not devices:
        return None
    columns = min(len(devices), _MOST_COLUMNS)
    rows = math.ceil(len(devices) / columns)
    figure, axes = _figure(rows, columns, height=4.2 * rows, squeeze=False)
    for axis in axes.flat[len(devices) :]:
        axis.set_axis_off()
    for axis, system in zip(axes.flat, devices, strict=False):
        peaks = system.document["peaks"][system.engine]
        intensity = np.logspace(-1, 5, 100)
        roof = np.minimum(peaks["lanes_per_second"], intensity * peaks["bytes_per_second"])
        axis.loglog(intensity, roof, color="black", lw=1.5, label="roof: issue, memory")
        for number, (tier, reuse, name) in enumerate(_ways(system)):
            cells = _under_roof(system.select(tier=tier, reuse=reuse))
            bounds = [c["roofline"] for c in cells]
            seconds = [c["kernel"]["median"] for c in cells]
            axis.loglog(
                [bound["operations"] / bound["bytes"] for bound in bounds],
                [bound["operations"] / s for bound, s in zip(bounds, seconds, strict=True)],
                "o",
                color=COLOURS[number % len(COLOURS)],
                label=name,
                alpha=0.7,
            )
        _special_roof(axis, system)
        axis.set_title(system.label, fontsize=10)
        axis.set(xlabel="operations a byte")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    for axis in axes[:, 0]:
        axis.set_ylabel("operations a second")
    return figure


def _under_roof(cells: Iterable[Any]) -> list[Any]:
    """Cells whose share of the roofline is known."""
    return [c for c in cells if c.get("roofline", {}).get("fraction")]


def _special_roof(axis: Any, system: System) -> None:
    """Draw how fast the unit for special functions allows the thesis mix to be."""
    bounds = [c["roofline"] for c in _under_roof(system.select())]
    roofs = [b["operations"] / b["seconds"] for b in bounds if b["by"] == "special functions"]
    if roofs:
        axis.axhline(
            np.median(roofs), color="black", ls="--", lw=1, label="roof: special functions"
        )


def peers(found: Sequence[System]) -> Any:
    """How many times as long as warpfit each peer takes."""
    bars = [
        (f"{c['peer']}, {c['scenario']['rows']:,} rows\n{system.label}", c["times_warpfit"])
        for system in found
        for c in system.select(kind="peer")
    ]
    if not bars:
        return None
    figure, axis = _figure(1, 1, height=0.42 * len(bars) + 1.5)
    values = [ratio for _, ratio in bars]
    colours = [COLOURS[0] if ratio >= 1 else COLOURS[1] for ratio in values]
    axis.barh(range(len(bars)), [v - 1 for v in values], left=1, color=colours)
    for place, value in enumerate(values):
        axis.text(max(value, 1), place, f" {value:.2g}", va="center", fontsize=8)
    axis.set_yticks(range(len(bars)), [name for name, _ in bars], fontsize=7)
    axis.set(
        xscale="log", xlabel="peer's time / warpfit's time, through gRPC; above 1 it is slower"
    )
    axis.axvline(1, color="black", lw=1)
    axis.margins(x=0.15)
    axis.invert_yaxis()
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


def _ways(system: System) -> list[tuple[str, str, str]]:
    """Tier, reuse and name of what is drawn of a system."""
    ways = [("interpreter", "fresh", f"{system.label}: fresh")]
    if system.compiles:
        ways[0] = ("interpreter", "fresh", f"{system.label}: interpreter, fresh")
        ways.append(("compiled", "repeated", f"{system.label}: compiled, repeated"))
    return ways


def _usual(cell: Any, system: System) -> bool:
    """Whether the batch is of the size that every other scenario has."""
    counts = sorted({size(c)[1] for c in system.select()})
    return bool(size(cell)[1] == (300 if 300 in counts else counts[-1]))


def _by_rows(cells: Sequence[Any]) -> list[tuple[int, list[Any]]]:
    sizes = sorted({size(c)[0] for c in cells})
    ordered = sorted(cells, key=lambda c: c["scenario"]["workers"])
    return [(rows, [c for c in ordered if size(c)[0] == rows]) for rows in sizes]


def _map(axis: Any, grid: Grid, text: Callable[[float], str], *, low_is_good: bool = False) -> None:
    """Draw numbers by rows and expressions; blue where the first of the two is better."""
    rows, counts = (sorted({key[i] for key in grid}) for i in (0, 1))
    numbers = np.full((len(counts), len(rows)), np.nan)
    for (r, e), value in grid.items():
        numbers[counts.index(e), rows.index(r)] = value
    with np.errstate(divide="ignore"):
        heights = np.log10(np.where(np.isinf(numbers), 1e6, numbers))
    limits = (0, 6) if low_is_good else (-2, 2)
    colours = "viridis_r" if low_is_good else "RdBu"
    axis.imshow(
        heights, cmap=colours, vmin=limits[0], vmax=limits[1], aspect="auto", origin="lower"
    )
    for place, value in np.ndenumerate(numbers):
        known = not math.isnan(value)
        strong = known and abs(heights[place] - np.mean(limits)) > 0.3 * (limits[1] - limits[0])
        bright = strong and not (low_is_good and heights[place] < 2)
        axis.text(
            place[1],
            place[0],
            text(value) if known else "not\nmeasured",
            ha="center",
            va="center",
            color="white" if bright else "black",
            fontsize=9 if known else 7,
        )
    axis.set_xticks(range(len(rows)), [f"{r:,}" for r in rows], fontsize=8)
    axis.set_yticks(range(len(counts)), [f"{e:,}" for e in counts], fontsize=8)
    axis.set(xlabel="rows", ylabel="expressions")


def _short(number: float) -> str:
    return "never" if math.isinf(number) else compact(number)
