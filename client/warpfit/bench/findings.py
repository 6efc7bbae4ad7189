"""What results say: break-evens, gains and comparisons, from one file or several together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from warpfit.bench.statistics import crossover

Document = Mapping[str, Any]
Cell = Mapping[str, Any]
#: Seconds by rows and expressions.
Grid = dict[tuple[int, int], float]


@dataclass(frozen=True, slots=True, eq=False)
class System:
    """One engine of one machine, with everything that was measured on it."""

    label: str
    engine: str
    document: Document
    cells: tuple[Cell, ...]

    def select(self, **wanted: Any) -> list[Cell]:
        """Cells whose scenario has these fields; plain evaluations of losses unless they say so."""
        usual: dict[str, Any] = {
            "kind": "evaluate",
            "output": "losses",
            "precision": "fast",
            "tokens": [10, 50],
        }
        usual |= {"vectors": 1}
        fields = {**usual, **wanted}
        return [
            cell
            for cell in self.cells
            if all(cell["scenario"][name] == value for name, value in fields.items())
        ]

    def grid(self, measure: str, **wanted: Any) -> Grid:
        """Median seconds of ``"wall"``, ``"kernel"`` or ``"engine"`` by rows and expressions."""
        return {size(cell): cell[measure]["median"] for cell in self.select(**wanted)}

    @property
    def compiles(self) -> bool:
        """Whether there are compiled kernels beside the interpreter."""
        return bool(self.select(tier="compiled"))


@dataclass(frozen=True, slots=True)
class Repeats:
    """Interpreter and compiled kernels on one batch that comes again with new parameters."""

    rows: int
    expressions: int
    first: float
    """Seconds of the first compiled call, compiling included."""
    fresh: float
    """Seconds of an interpreted call with other expressions."""
    interpreted: float
    """Seconds of an interpreted call that repeats."""
    compiled: float
    """Seconds of a compiled call that repeats."""
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
        saved = self.interpreted - self.compiled
        return self.compiling / saved + 1 if saved > 0 and self.certain else math.inf

    @property
    def kernel_break_even(self) -> float:
        """The same if only kernels took time, as in a search on the server."""
        saved = self.interpreted_kernel - self.compiled_kernel
        return self.compiling / saved + 1 if saved > 0 else math.inf

    def gain(self, calls: int) -> float:
        """How many times as fast the better choice is than interpreting every one of ``calls``."""
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
        """Sizes of batches that both have measured at two sizes of data or more."""
        counts = {e for _, e in self.wall}
        return sorted(e for e in counts if sum(key[1] == e for key in self.wall) > 1)

    def crossover(self, expressions: int, measure: str = "wall") -> float | None:
        """Rows from which on the GPU is faster; None if it is not at the most rows measured."""
        grid: Grid = getattr(self, measure)
        points = sorted((rows, ratio) for (rows, e), ratio in grid.items() if e == expressions)
        return crossover([rows for rows, _ in points], [ratio for _, ratio in points])


def systems(documents: Sequence[Document]) -> list[System]:
    """Engines of all documents, those with a GPU first."""
    found = []
    for document in documents:
        engines = sorted({cell["scenario"]["engine"] for cell in document["cells"]}, reverse=True)
        for engine in engines:
            cells = tuple(c for c in document["cells"] if c["scenario"]["engine"] == engine)
            found.append(System(_label(document, engine), engine, document, cells))
    return _distinct(sorted(found, key=lambda system: system.engine == "cpu"))


def comparisons(found: Iterable[System]) -> list[Comparison]:
    """Every GPU beside every CPU, where they have measured the same."""
    everything = list(found)
    pairs = [
        (gpu, cpu)
        for gpu in everything
        if gpu.engine == "cuda"
        for cpu in everything
        if cpu.engine == "cpu"
    ]
    made = []
    for gpu, cpu in pairs:
        ratios = [
            _ratios(cpu.grid(measure, **_FRESH), gpu.grid(measure, **_FRESH))
            for measure in ("wall", "kernel")
        ]
        if ratios[0]:
            made.append(Comparison(gpu, cpu, *ratios))
    return made


def repeats(system: System) -> list[Repeats]:
    """Interpreter and compiled kernels, wherever both were measured on fast float32."""
    compiled = {size(c): c for c in system.select(tier="compiled", reuse="repeated")}
    repeated = {size(c): c for c in system.select(tier="interpreter", reuse="repeated")}
    fresh = {size(c): c for c in system.select(**_FRESH)}
    return [
        Repeats(
            rows=key[0],
            expressions=key[1],
            first=compiled[key]["first"]["wall"],
            fresh=fresh[key]["wall"]["median"],
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
    """Rows and expressions of a cell."""
    return cell["scenario"]["rows"], cell["scenario"]["expressions"]


_FRESH = {"tier": "interpreter", "reuse": "fresh"}


def _ratios(above: Grid, below: Grid) -> Grid:
    return {key: above[key] / below[key] for key in sorted(above) if below.get(key)}


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
    named = []
    for place, system in enumerate(found):
        if labels.count(system.label) > 1:
            number = labels[: place + 1].count(system.label)
            label = f"{system.label} ({number})"
            system = System(label, system.engine, system.document, system.cells)
        named.append(system)
    return named
