"""The three questions of the literature, answered in sentences computed from results."""

import math
from collections.abc import Iterator, Sequence

from warpfit.bench.report.findings import Comparison, Repeats, System, comparisons, repeats, size
from warpfit.bench.scenarios import VECTORS


def answers(found: Sequence[System]) -> dict[str, list[str]]:
    """Return what the results say to each question, or what is missing for it."""
    return {
        "When is a GPU faster than a CPU for expressions generated at run time?": _devices(found),
        "When is interpreting better than compiling?": _tiers(found),
        "How much does it matter for local search, where expressions come again with new "
        "parameters?": list(_searches(found))
        or ["Not answered: neither repeated batches nor fits were measured."],
    }


def _devices(found: Sequence[System]) -> list[str]:
    pairs = comparisons(found)
    if pairs:
        return [sentence for pair in pairs for sentence in _device_sentences(pair)]
    missing = "GPU" if all(system.engine == "cpu" for system in found) else "CPU"
    return [
        f"Not answered: these results hold no {missing}. Add those of a machine with one to the "
        "same report."
    ]


def _device_sentences(pair: Comparison) -> Iterator[str]:
    yield (
        f"{pair.gpu.label} beside {pair.cpu.label}, fresh expressions, fast float32, losses, each "
        "through gRPC:"
    )
    for count in pair.expressions():
        sizes = sorted(rows for rows, e in pair.wall if e == count)
        key = sizes[-1], count
        wall, kernel = (_from(pair.crossover(count, g), sizes) for g in (pair.wall, pair.kernel))
        yield (
            f"With {count:,} expressions a call the GPU answers sooner {wall}; its kernels alone "
            f"are faster {kernel}. At {sizes[-1]:,} rows it {_times(pair.wall[key])} end to end, "
            f"and {_times(pair.kernel[key])} in the kernels."
        )
    # What a worker gains that now evaluates in its own process, with another library.
    remote = pair.gpu.grid("wall", tier="interpreter", reuse="fresh")
    parts = [
        f"{cell['peer']} at {cell['scenario']['rows']:,} rows "
        f"{compact(cell['wall']['median'] / remote[size(cell)])} times"
        for cell in pair.cpu.select(kind="peer")
        if size(cell) in remote
    ]
    if parts:
        yield (
            "Without a service, in the worker's own process on that CPU, the same batch takes so "
            f"many times as long as on the GPU through gRPC: {', '.join(parts)}."
        )


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
    measured = [(system, repeats(system)) for system in found if repeats(system)]
    if not measured:
        return [
            "Not answered: these results hold no engine that can do both. The CPU engine only "
            "interprets; add results of a machine with a GPU."
        ]
    return [
        sentence
        for system, cases in measured
        for sentence in (f"{system.label}, fast float32, losses:", *_tier_sentences(cases))
    ]


def _tier_sentences(measured: list[Repeats]) -> Iterator[str]:
    sooner = sum(r.fresh < r.first for r in measured)
    ratios = sorted(r.first / r.fresh for r in measured)
    yield (
        f"Expressions that are evaluated once: interpreting was faster at {sooner} of "
        f"{len(measured)} sizes; compiling first took {compact(ratios[0])} to "
        f"{compact(ratios[-1])} times as long."
    )
    for count in sorted({r.expressions for r in measured}):
        of_count = [r for r in measured if r.expressions == count]
        compiling = sorted(r.compiling for r in of_count)[len(of_count) // 2]
        calls = ", ".join(f"{_calls(r.break_even)} at {r.rows:,} rows" for r in of_count)
        kernels = ", ".join(f"{_calls(r.kernel_break_even)} at {r.rows:,}" for r in of_count)
        yield (
            f"{count:,} expressions that come again: compiling takes {duration(compiling)} and "
            f"has paid, end to end, {calls}. If only kernels took time: {kernels}."
        )


def _searches(found: Sequence[System]) -> Iterator[str]:
    for system in found:
        measured = repeats(system)
        if measured:
            gains = [
                f"{_best(measured, calls)} with {calls:,}" for calls in (10, 100, 1_000, 10_000)
            ]
            yield (
                f"{system.label}: beside interpreting always, the better of the two ways is at "
                f"most so many times as fast for so many evaluations of the same expressions: "
                f"{'; '.join(gains)}."
            )
        single = system.grid("wall", tier="interpreter", reuse="fresh")
        for cell in system.select(vectors=VECTORS):
            seconds = cell["wall"]["median"]
            if size(cell) in single:
                yield (
                    f"{system.label}: one call with {VECTORS} parameter vectors for each of "
                    f"{size(cell)[1]:,} expressions on {size(cell)[0]:,} rows takes "
                    f"{duration(seconds)}; {VECTORS} calls with one vector each take "
                    f"{compact(VECTORS * single[size(cell)] / seconds)} times as long."
                )
        for cell in system.select(kind="optimize"):
            yield (
                f"{system.label}: one call of Optimize with {size(cell)[1]:,} expressions and 10 "
                f"iterations on {size(cell)[0]:,} rows takes {duration(cell['wall']['median'])}, "
                f"{cell['fits_per_second']:,.0f} fits a second."
            )


def _best(measured: list[Repeats], calls: int) -> str:
    best = max(measured, key=lambda r: r.gain(calls))
    gain = best.gain(calls)
    if gain < 1.005:
        return "no difference"
    return f"{compact(gain)} times ({best.expressions:,} expressions, {best.rows:,} rows)"


def compact(number: float) -> str:
    """Write a number with two digits, or three where that is no longer."""
    if number >= 100_000:
        return f"{number:.1e}"
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.3g}" if number > 10 else f"{number:.2g}"


def _calls(number: float) -> str:
    return "never" if math.isinf(number) else f"after {_about(math.ceil(number))} calls"


def _about(number: float) -> str:
    digits = 2 - len(str(int(number)))
    return f"{round(number, digits):,.0f}"


def duration(seconds: float) -> str:
    """Write a time with the unit that suits it."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} us"
