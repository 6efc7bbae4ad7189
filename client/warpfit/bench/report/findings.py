"""Findings: break-even points, gains and comparisons, from one result file or several together."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from warpfit.bench.batches import THESIS
from warpfit.bench.statistics import crossover

Document = Mapping[str, Any]
Cell = Mapping[str, Any]
#: Seconds by rows and expressions.
Grid = dict[tuple[int, int], float]
_LOSSES = {"kind": "evaluate", "output": "losses", "vectors": 1}
_USUAL = {**_LOSSES, "workload": THESIS, "precision": "fast"}
_FRESH = {"tier": "interpreter", "reuse": "fresh"}


@dataclass(frozen=True, slots=True, eq=False)
class System:
    """One engine of one machine, with everything that was measured on it."""

    label: str
    engine: str
    document: Document
    cells: tuple[Cell, ...]

    def select(self, **wanted: Any) -> list[Cell]:
        """Return cells whose scenario has these fields; by default plain evaluations of losses."""
        fields = {**_USUAL, **wanted}
        return [
            cell
            for cell in self.cells
            if all(cell["scenario"][name] == value for name, value in fields.items())
        ]

    def grid(self, measure: str, **wanted: Any) -> Grid:
        """Return median seconds of ``"wall"``, ``"kernel"`` or ``"engine"``."""
        return {size(cell): cell[measure]["median"] for cell in self.select(**wanted)}


@dataclass(frozen=True, slots=True)
class Repeats:
    """Interpreter and compiled kernels on one batch that comes again with new parameters.

    Seconds of calls: the first compiled one, compiling included; an interpreted one with other
    expressions; an interpreted and a compiled one that repeats; the kernels of the last two.
    """

    rows: int
    expressions: int
    first: float
    fresh: float
    interpreted: float
    compiled: float
    interpreted_kernel: float
    compiled_kernel: float
    certain: bool
    """Whether the intervals of the two medians lie apart, end to end."""

    @property
    def compiling(self) -> float:
        """Seconds that compiling takes."""
        return max(0.0, self.first - self.compiled)

    @property
    def break_even(self) -> float:
        """Calls after which compiling has paid, end to end; infinite if it never does."""
        return self._after(self.interpreted - self.compiled) if self.certain else math.inf

    @property
    def kernel_break_even(self) -> float:
        """The same if only kernels took time, as in a search on the server."""
        return self._after(self.interpreted_kernel - self.compiled_kernel)

    def _after(self, saved: float) -> float:
        return self.compiling / saved + 1 if saved > 0 else math.inf

    def gain(self, calls: int) -> float:
        """Return how many times as fast the better way is as interpreting all ``calls``."""
        interpreted = calls * self.interpreted
        return interpreted / min(interpreted, self.first + (calls - 1) * self.compiled)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A GPU beside a CPU on fresh expressions; ratios are CPU time over GPU time."""

    gpu: System
    cpu: System
    wall: Grid
    kernel: Grid

    def expressions(self) -> list[int]:
        """Return the sizes of batches that both have measured at two sizes of data or more."""
        counts = [e for _, e in self.wall]
        return sorted({e for e in counts if counts.count(e) > 1})

    def crossover(self, expressions: int, grid: Grid) -> float | None:
        """Return the rows from which on the GPU is faster; None if it is not at the most rows."""
        points = sorted((rows, ratio) for (rows, e), ratio in grid.items() if e == expressions)
        return crossover([rows for rows, _ in points], [ratio for _, ratio in points])


def systems(documents: Sequence[Document]) -> list[System]:
    """Return the engines of all documents, those with a GPU first."""
    found = []
    for document in documents:
        engines = sorted({cell["scenario"]["engine"] for cell in document["cells"]})
        for engine in engines:
            cells = tuple(c for c in document["cells"] if c["scenario"]["engine"] == engine)
            found.append(System(_label(document, engine), engine, document, cells))
    return _distinct(sorted(found, key=lambda system: system.engine == "cpu"))


def comparisons(found: Iterable[System]) -> list[Comparison]:
    """Compare every GPU with every CPU, where they have measured the same."""
    engines = list(found)
    gpus, cpus = ([s for s in engines if s.engine == name] for name in ("cuda", "cpu"))
    made = [
        Comparison(gpu, cpu, *(_ratios(cpu, gpu, measure) for measure in ("wall", "kernel")))
        for gpu, cpu in product(gpus, cpus)
    ]
    return [comparison for comparison in made if comparison.wall]


def repeats(system: System) -> list[Repeats]:
    """Compare interpreter and compiled kernels, wherever both were measured."""
    compiled = {size(c): c for c in system.select(tier="compiled", reuse="repeated")}
    repeated = {size(c): c for c in system.select(tier="interpreter", reuse="repeated")}
    fresh = system.grid("wall", **_FRESH)
    return [
        Repeats(
            rows=key[0],
            expressions=key[1],
            first=compiled[key]["first"]["wall"],
            fresh=fresh[key],
            interpreted=repeated[key]["wall"]["median"],
            compiled=compiled[key]["wall"]["median"],
            interpreted_kernel=repeated[key]["kernel"]["median"],
            compiled_kernel=compiled[key]["kernel"]["median"],
            certain=compiled[key]["wall"]["high"] < repeated[key]["wall"]["low"],
        )
        for key in sorted(compiled)
        if key in repeated and key in fresh
    ]


def size(cell: Cell) -> tuple[int, int]:
    """Return the rows and expressions of a cell."""
    return cell["scenario"]["rows"], cell["scenario"]["expressions"]


def _ratios(above: System, below: System, measure: str) -> Grid:
    numerators, denominators = (s.grid(measure, **_FRESH) for s in (above, below))
    common = [key for key in sorted(numerators) if denominators.get(key)]
    return {key: numerators[key] / denominators[key] for key in common}


def _label(document: Document, engine: str) -> str:
    server = document["servers"].get(engine)
    machine = document["machine"]
    if engine == "cuda":
        return str(server["device"]["name"]) if server else "GPU"
    if document.get("address") and server:
        return f"{server['device']['threads']} threads of {server['device']['name']}"
    return f"{machine['cores']} cores, {machine['cpu']}"


def _distinct(found: list[System]) -> list[System]:
    """Number labels that occur more than once."""
    labels = [system.label for system in found]
    return [
        replace(system, label=f"{system.label} ({labels[: place + 1].count(system.label)})")
        if labels.count(system.label) > 1
        else system
        for place, system in enumerate(found)
    ]
