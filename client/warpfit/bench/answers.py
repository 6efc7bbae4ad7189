"""The three questions of the literature, answered in sentences computed from results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from warpfit.bench.findings import Comparison, Repeats, System, comparisons, repeats, size
from warpfit.bench.scenarios import VECTORS

_SEARCHES = (10, 100, 1_000, 10_000)


@dataclass(frozen=True, slots=True)
class Answer:
    """A question, and what the results say to it."""

    question: str
    sentences: tuple[str, ...]


def answers(found: Sequence[System]) -> list[Answer]:
    """Answer every question, or say what is missing for it."""
    return [
        Answer(
            "When is a GPU faster than a CPU for expressions generated at run time?",
            tuple(_devices(found)),
        ),
        Answer("When is interpreting better than compiling?", tuple(_tiers(found))),
        Answer(
            "How much does it matter for local search, where expressions come again with new "
            "parameters?",
            tuple(_searches(found)),
        ),
    ]


def _devices(found: Sequence[System]) -> list[str]:
    pairs = comparisons(found)
    if not pairs:
        missing = "GPU" if all(system.engine == "cpu" for system in found) else "CPU"
        return [
            f"Not answered: these results hold no {missing}. Add those of a machine with one to "
            "the same report."
        ]
    return [sentence for pair in pairs for sentence in _device_sentences(pair)]


def _device_sentences(pair: Comparison) -> list[str]:
    sentences = [
        f"{pair.gpu.label} beside {pair.cpu.label}, fresh expressions, fast float32, losses, each "
        "through gRPC:"
    ]
    for count in pair.expressions():
        sizes = sorted(rows for rows, e in pair.wall if e == count)
        key = sizes[-1], count
        sentences.append(
            f"With {count:,} expressions a call the GPU answers sooner "
            f"{_from(pair.crossover(count), sizes)}; its kernels alone are faster "
            f"{_from(pair.crossover(count, 'kernel'), sizes)}. At {sizes[-1]:,} rows it "
            f"{_times(pair.wall[key])} end to end, and {_times(pair.kernel[key])} in the kernels."
        )
    return [*sentences, *_peer_sentences(pair)]


def _peer_sentences(pair: Comparison) -> list[str]:
    """What a worker gains that now evaluates in its own process, with another library."""
    remote = pair.gpu.grid("wall", tier="interpreter", reuse="fresh")
    parts = [
        f"{cell['peer']} at {cell['scenario']['rows']:,} rows "
        f"{compact(cell['wall']['median'] / remote[size(cell)])} times"
        for cell in pair.cpu.select(kind="peer")
        if size(cell) in remote
    ]
    if not parts:
        return []
    return [
        "Without a service, in the worker's own process on that CPU, the same batch takes so many "
        f"times as long as on the GPU through gRPC: {', '.join(parts)}."
    ]


def _from(rows: float | None, sizes: Sequence[int]) -> str:
    if rows is None:
        return f"at no size measured (up to {sizes[-1]:,} rows)"
    if rows <= sizes[0]:
        return f"at every size measured ({sizes[0]:,} rows and more)"
    return f"from about {_about(rows)} rows on"


def _times(ratio: float) -> str:
    if ratio >= 1:
        return f"is {compact(ratio)} times as fast"
    return f"takes {compact(1 / ratio)} times as long"


def _tiers(found: Sequence[System]) -> list[str]:
    sentences = []
    for system in found:
        measured = repeats(system)
        if measured:
            sentences += [f"{system.label}, fast float32, losses:", *_tier_sentences(measured)]
    if not sentences:
        return [
            "Not answered: these results hold no engine that can do both. The CPU engine only "
            "interprets; add results of a machine with a GPU."
        ]
    return sentences


def _tier_sentences(measured: list[Repeats]) -> list[str]:
    sooner = [r for r in measured if r.fresh < r.first]
    ratios = sorted(r.first / r.fresh for r in measured)
    least, most = compact(ratios[0]), compact(ratios[-1])
    sentences = [
        f"Expressions that are evaluated once: interpreting was faster at {len(sooner)} of "
        f"{len(measured)} sizes; compiling first took {least} to {most} times as long."
    ]
    for count in sorted({r.expressions for r in measured}):
        of_count = [r for r in measured if r.expressions == count]
        compiling = sorted(r.compiling for r in of_count)
        parts = [f"{_calls(r.break_even)} at {r.rows:,} rows" for r in of_count]
        kernels = [f"{_calls(r.kernel_break_even)} at {r.rows:,}" for r in of_count]
        sentences.append(
            f"{count:,} expressions that come again: compiling takes "
            f"{_duration(compiling[len(compiling) // 2])} and has paid, end to end, "
            f"{', '.join(parts)}. If only kernels took time: {', '.join(kernels)}."
        )
    return sentences


def _searches(found: Sequence[System]) -> list[str]:
    sentences = []
    for system in found:
        measured = repeats(system)
        if measured:
            gains = [f"{_best(measured, calls)} with {calls:,}" for calls in _SEARCHES]
            sentences.append(
                f"{system.label}: beside interpreting always, the better of the two ways is at "
                f"most so many times as fast for so many evaluations of the same expressions: "
                f"{'; '.join(gains)}."
            )
        sentences += [*_vector_sentences(system), *_fit_sentences(system)]
    return sentences or ["Not answered: neither repeated batches nor fits were measured."]


def _best(measured: list[Repeats], calls: int) -> str:
    best = max(measured, key=lambda r: r.gain(calls))
    gain = best.gain(calls)
    if gain < 1.005:
        return "no difference"
    return f"{compact(gain)} times ({best.expressions:,} expressions, {best.rows:,} rows)"


def _vector_sentences(system: System) -> list[str]:
    """What it saves to send several parameter vectors in one call."""
    single = system.grid("wall", tier="interpreter", reuse="fresh")
    return [
        f"{system.label}: one call with {VECTORS} parameter vectors for each of {size(cell)[1]:,} "
        f"expressions on {size(cell)[0]:,} rows takes {_duration(cell['wall']['median'])}; "
        f"{VECTORS} calls with one vector each take "
        f"{compact(VECTORS * single[size(cell)] / cell['wall']['median'])} times as long."
        for cell in system.select(vectors=VECTORS)
        if size(cell) in single
    ]


def _fit_sentences(system: System) -> list[str]:
    sentences = []
    for cell in system.select(kind="optimize"):
        rows, count = cell["scenario"]["rows"], cell["scenario"]["expressions"]
        per_call = cell["wall"]["median"]
        sentences.append(
            f"{system.label}: one call of Optimize with {count:,} expressions and 10 iterations on "
            f"{rows:,} rows takes {_duration(per_call)}, {cell['fits_per_second']:,.0f} fits a "
            "second."
        )
    return sentences


def compact(number: float) -> str:
    """A number for people: two digits, or three where that is no longer."""
    if number >= 100_000:
        return f"{number:.1e}"
    return (
        f"{number:,.0f}" if number >= 100 else f"{number:.3g}" if number > 10 else f"{number:.2g}"
    )


def _calls(number: float) -> str:
    if math.isinf(number):
        return "never"
    return f"after {_about(math.ceil(number))} calls"


def _about(number: float) -> str:
    digits = 2 - len(str(int(number)))
    return f"{round(number, digits):,.0f}"


def _duration(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"
