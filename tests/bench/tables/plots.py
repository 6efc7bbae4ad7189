"""The plots of the front page, from the result files, as SVG."""

import math
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
from tables.layout import result, select

_BLUE, _LIGHT, _GREY = "#2b6cb0", "#63b3ed", "#718096"


def _svg(height: int, parts: list[str], note: str, note_y: int) -> str:
    size = f'width="720" height="{height}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13">'
    )
    white = f'<rect {size} fill="white"/>'
    return "\n".join([head, white, *parts, _note(note_y, note), "</svg>\n"])


def _note(y: int, words: str) -> str:
    return f'<text x="8" y="{y}" fill="#555">{words}</text>'


def _text(x: float, y: float, words: str, anchor: str = "") -> str:
    placed = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{x:.0f}" y="{y:.0f}"{placed}>{words}</text>'


def _line(x: float, y: float, to_x: float, to_y: float, colour: str) -> str:
    return f'<line x1="{x:.0f}" y1="{y:.0f}" x2="{to_x:.0f}" y2="{to_y:.0f}" stroke="{colour}"/>'


def generation_times() -> list[tuple[str, float]]:
    """Seconds of one generation, 300 expressions x 100,000 rows, by who evaluates it."""
    service = result("gpu_service_h100")
    processors = service["CPU"]
    cases = {
        "NumPy, 1 CPU core": processors["NumPy, one core"],
        f"pyoperon, {processors['cores']} CPU cores": processors["pyoperon, all cores"],
        f"warpfit, {processors['cores']} CPU cores": processors["warpfit, all cores"],
        "EvoGP, H100": service["EvoGP"]["300 x 100000"],
        "warpfit, H100": service["one client"]["fresh 300 x 100000"],
    }
    return [(name, case["p50_ms"] / 1e3) for name, case in cases.items()]


def gpu_rates() -> list[tuple[str, list[float]]]:
    """Calls a second of each run that 128 workers make, by the machine and its GPUs in use."""
    found = []
    for name, total, setting in (("devices", 2, "0,1"), ("devices_four_gpus", 4, "0,1,2,3")):
        (case,) = select(result(name)["sustained"], programs=300, rows=100_000, workers=128)
        for devices, used in (("0", f"1 of {total}"), (setting, str(total))):
            runs = [each["calls_per_second"] for each in case["servers"][devices]]
            found.append((f"warpfit, {used} H200", runs))
    return found


def generation_plot() -> str:
    """Draw the times of a generation on a logarithmic axis, and the rates of GPUs below."""
    times, rates, left, step, width = generation_times(), gpu_rates(), 190, 34, 420
    below = step * len(times) + 70
    height = below + step * len(rates) + 64
    parts: list[str] = []

    def panel(
        top: int, bars: list[Any], ticks: dict[float, str], place: Callable[[float], float]
    ) -> int:
        """Draw named bars with a label each between lines of an axis; return where a note is."""
        bottom = top + step * len(bars)
        for tick, label in ticks.items():
            x = left + width * place(tick)
            parts.append(_line(x, top, x, bottom + 4, "#ccc"))
            parts.append(_text(x, bottom + 20, label, "middle"))
        for index, (name, value, label) in enumerate(bars):
            y, end = top + 4 + step * index, width * place(value)
            colour = _BLUE if name.startswith("warpfit") else "#a0aec0"
            bar = f'<rect x="{left}" y="{y}" width="{end:.0f}" height="22" fill="{colour}"/>'
            named = _text(left - 8, y + 16, name, "end")
            parts.extend([named, bar, _text(left + end + 6, y + 16, label)])
        return bottom + 40

    place = panel(
        8,
        [(name, seconds, f"{1e3 * seconds:,.1f} ms") for name, seconds in times],
        {1e-3: "1 ms", 1e-2: "10 ms", 1e-1: "100 ms", 1.0: "1 s"},
        lambda seconds: math.log(seconds / 1e-3) / math.log(1.0 / 1e-3),
    )
    note = "300 expressions, 100,000 rows, losses; the other libraries in the worker's own process"
    parts.append(_note(place, note))
    most = max(max(runs) for _, runs in rates)
    bars = []
    for name, runs in rates:
        span = f" ({min(runs):,.0f} to {max(runs):,.0f})" if len(runs) > 1 else ""
        bars.append((name, statistics.median(runs), f"{statistics.median(runs):,.0f}{span}"))
    ticks = {rate: f"{rate:,}/s" for rate in range(0, int(most), 5000)}
    place = panel(below, bars, ticks, lambda rate: 0.8 * rate / most)
    who = "128 workers on the server's 32 and 64 cores"
    note = f"such calls a second, {who}: median (range of runs)"
    return _svg(height, parts, note, place)


_LEFT, _TOP, _WIDTH, _HEIGHT = 64, 16, 440, 220


def course_plot() -> str:
    """Draw the median part of a law's variance that a search has not explained, by time."""
    height, parts = _TOP + _HEIGHT + 60, []
    for exponent in range(-6, 1):
        y = _y(10.0**exponent)
        parts.append(_line(_LEFT, y, _LEFT + _WIDTH, y, "#ddd"))
        parts.append(_text(_LEFT - 8, y + 4, "1" if exponent == 0 else f"1e{exponent}", "end"))
    below = _TOP + _HEIGHT + 18
    parts += [_text(_x(second), below, f"{second} s", "middle") for second in range(0, 21, 5)]
    gpu, cpu, ends = result("search_laws_gpu"), result("search_laws_cpu"), []
    ours = ((gpu, "warpfit, one H200", _BLUE), (cpu, "warpfit, two cores", _LIGHT))
    for found, label, colour in ours:
        points = _course(found)
        line = " ".join(f"{_x(seconds)},{_y(left)}" for seconds, left in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        ends.append((points[-1], label, colour))
    peer = statistics.median(1 - row["pyoperon"]["r2"] for row in cpu["laws"])
    ends.append(((cpu["seconds"], peer), "pyoperon, two cores", _GREY))
    for (seconds, left), label, colour in ends:
        x, y = _x(seconds), _y(left)
        parts.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}"/>')
        parts.append(_text(x + 10, y + 4, label))
    note = "part of the variance of ten laws that is not explained on new rows: median of searches"
    return _svg(height, parts, note, height - 10)


def _x(seconds: float) -> int:
    return round(_LEFT + _WIDTH * seconds / 20.0)


def _y(left: float) -> int:
    """Return the place on a logarithmic axis from 1e-6 to 1."""
    place = math.log(min(max(left, 1e-6), 1.0)) / math.log(1e-6)
    return round(_TOP + _HEIGHT * place)


def _course(document: dict[str, Any]) -> list[tuple[float, float]]:
    """Return the median of what is left over at some times, after the first report of all."""
    searches = [row["warpfit"]["course"] for row in document["laws"]]
    first = max(course[0][0] for course in searches)
    points = []
    for seconds in np.arange(first, document["seconds"] + 0.01, 0.5).tolist():
        left = [1 - max(r2 for at, r2 in course if at <= seconds) for course in searches]
        points.append((seconds, statistics.median(left)))
    return points
