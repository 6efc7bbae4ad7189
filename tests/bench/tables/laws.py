"""Sentences and a plot about the laws that searches find."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np
from tables.layout import result

#: Result files, and what their searches are called in the plot.
_COURSES = {
    "search_laws_gpu": ("warpfit, one H200", "#2b6cb0"),
    "search_laws_cpu": ("warpfit, two cores", "#63b3ed"),
}
_LEFT, _TOP, _WIDTH, _HEIGHT = 64, 16, 440, 220
#: Least and greatest part of the law's variance in the plot, and seconds.
_LEAST, _MOST, _SECONDS = 1e-6, 1.0, 20.0


def laws() -> Iterator[str]:
    gpu, own, cpu = (result(f"search_laws_{name}") for name in ("gpu", "gpu_own", "cpu"))
    cores, half = own["machine"]["cores"], cpu["median_seconds_until_found"]
    yield (
        f"On one H200 {gpu['found']} of {gpu['searches']} searches of {gpu['seconds']:.0f} s found "
        f"the law, half of all within {gpu['median_seconds_until_found']:.1f} s, at "
        f"{gpu['formulas_per_second'] / 1e6:.0f} million\nformulas a second. Of eight further "
        f"laws, to which nothing was tuned, {own['found']} were found in {own['seconds']:.0f} s, "
        f"by pyoperon with the same operators,\nlength and time on {cores} cores "
        f"{own['found_by_pyoperon']}. On two cores {cpu['found']} of {cpu['searches']} searches "
        f"of {cpu['seconds']:.0f} s found the law,\nhalf of all within {half:.1f} s; pyoperon "
        f"{cpu['found_by_pyoperon']}."
    )


def laws_rows() -> str:
    own, cpu = result("search_laws_gpu_own"), result("search_laws_cpu")
    what = "laws of 4 to 7 variables among 10 found, noise of 2%"
    return "\n".join(
        f"| {what}, {document['seconds']:.0f} s, {where} | {document['found']} of "
        f"{document['searches']} | pyoperon{host}: {document['found_by_pyoperon']} of "
        f"{document['searches']} | [`{document['benchmark']}.json`]"
        f"(tests/bench/results/{document['benchmark']}.json) |"
        for document, where, host in (
            (cpu, "two cores", ""),
            (own, "one H200", " on its host's cores"),
        )
    )


def course_plot() -> str:
    """Draw the median part of a law's variance that a search has not explained, by time; SVG."""
    height = _TOP + _HEIGHT + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="720" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="720" height="{height}" fill="white"/>',
    ]
    for exponent in range(-6, 1):
        y = _y(10.0**exponent)
        parts.append(f'<line x1="{_LEFT}" y1="{y}" x2="{_LEFT + _WIDTH}" y2="{y}" stroke="#ddd"/>')
        text = "1" if exponent == 0 else f"1e{exponent}"
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{text}</text>')
    below = f'y="{_TOP + _HEIGHT + 18}" text-anchor="middle"'
    parts += [f'<text x="{_x(second)}" {below}>{second} s</text>' for second in range(0, 21, 5)]
    ends = []
    for name, (label, colour) in _COURSES.items():
        points = _course(result(name))
        line = " ".join(f"{_x(seconds)},{_y(left)}" for seconds, left in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        ends.append((points[-1], label, colour))
    cpu = result("search_laws_cpu")
    peer = statistics.median(1 - row["pyoperon"]["r2"] for row in cpu["laws"])
    ends.append(((cpu["seconds"], peer), "pyoperon, two cores", "#718096"))
    for (seconds, left), label, colour in ends:
        x, y = _x(seconds), _y(left)
        parts.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{x + 10}" y="{y + 4}">{label}</text>')
    note = "part of the variance of ten laws that is not explained on new rows: median of searches"
    parts.append(f'<text x="8" y="{height - 10}" fill="#555">{note}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _x(seconds: float) -> int:
    return round(_LEFT + _WIDTH * seconds / _SECONDS)


def _y(left: float) -> int:
    place = math.log(min(max(left, _LEAST), _MOST) / _MOST) / math.log(_LEAST / _MOST)
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
