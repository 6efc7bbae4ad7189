"""Scenarios that `warpfit bench` measures, and profiles, which choose among them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product
from typing import Final

from warpfit.bench.batches import RECORDED, THESIS

#: Parameter vectors of a call that has several: neighbours that a local search tries at once.
VECTORS: Final = 16
#: Mean length of an expression of the random mix, for predictions.
_MEAN_TOKENS: Final = 30


class Kind(StrEnum):
    """The callers: one client that evaluates or fits, many workers, or a client and a peer."""

    EVALUATE = "evaluate"
    OPTIMIZE = "optimize"
    WORKERS = "workers"
    PEER = "peer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One thing to measure; equal scenarios are the same measurement."""

    kind: Kind = Kind.EVALUATE
    engine: str
    """``"cpu"`` or ``"cuda"``; for a peer the kind of device that it computes on."""
    tier: str = "interpreter"
    rows: int = 10_000
    expressions: int = 300
    workload: str = THESIS
    """`THESIS` or one of the `RECORDED` populations."""
    reuse: str = "fresh"
    """``"fresh"``: another batch in every call; ``"repeated"``: new parameters only."""
    output: str = "losses"
    """``"losses"``, ``"values"`` or ``"gradients"``."""
    precision: str = "fast"
    """``"fast"`` or ``"precise"`` on float32 data, or ``"float64"``."""
    vectors: int = 1
    """Parameter vectors for each expression in one call."""
    workers: int = 1
    peer: str = ""

    @property
    def token_rows(self) -> float:
        """Tokens times rows of one call, about."""
        return _MEAN_TOKENS * self.expressions * self.rows * self.vectors

    @property
    def key(self) -> str:
        """The name of the scenario in a result file and in messages."""
        parts = [self.kind, self.peer or self.engine, self.tier, self.precision, self.output]
        parts += [self.reuse, f"{self.rows}x{self.expressions}", self.workload]
        return "/".join([*parts, f"{self.vectors}v", f"{self.workers}w"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The amount of measuring, and its time."""

    name: str
    slice_seconds: float
    """Time for the calls of one scenario."""
    total_seconds: float = math.inf
    """Time for one engine; what does not fit is left out."""
    longest_call: float
    """Scenarios whose calls are predicted to take longer are left out, in seconds."""
    rows: tuple[int, ...]
    """Numbers of rows that are combined with all ``expressions``: the grid of plain evaluations."""
    expressions: tuple[int, ...]
    other_rows: tuple[int, ...]
    """Numbers of rows at which everything else is measured."""
    usual: int = 300
    """Expressions of every scenario outside the grid; fits have a third."""
    workers: tuple[int, ...]

    def scenarios(
        self, engine: str, tiers: Sequence[str], peers: Sequence[str]
    ) -> Iterator[Scenario]:
        """Yield what to measure on an engine with these tiers and peers, most important first."""
        base = Scenario(engine=engine, expressions=self.usual)
        compiles = "compiled" in tiers
        for rows, expressions in product(self.rows, self.expressions):
            yield from _ways(replace(base, rows=rows, expressions=expressions), compiles)
        for rows, workload in product(self.other_rows, RECORDED):
            yield from _ways(replace(base, rows=rows, workload=workload), compiles)
        for rows in self.other_rows:
            for precision in ("precise", "float64"):
                yield from _ways(replace(base, rows=rows, precision=precision), compiles)
            yield replace(base, rows=rows, output="values")
            yield from _ways(replace(base, rows=rows, output="gradients"), compiles)
            yield replace(base, rows=rows, vectors=VECTORS)
            fits = max(1, self.usual // 3)
            yield replace(base, kind=Kind.OPTIMIZE, rows=rows, expressions=fits)
        for workers, rows in product(self.workers, self.other_rows):
            yield replace(base, kind=Kind.WORKERS, rows=rows, workers=workers)
        for rows, peer in product(self.other_rows, peers):
            yield replace(base, kind=Kind.PEER, peer=peer, rows=rows)


def _ways(scenario: Scenario, compiles: bool) -> Iterator[Scenario]:
    """Fresh and, where an engine can compile, repeated: otherwise it makes no difference."""
    yield scenario
    if compiles:
        yield replace(scenario, reuse="repeated")
        yield replace(scenario, reuse="repeated", tier="compiled")


QUICK: Final = Profile(
    name="quick",
    slice_seconds=0.6,
    total_seconds=100.0,
    longest_call=3.0,
    rows=(1_000, 10_000, 100_000, 1_000_000),
    expressions=(10, 300, 5_000),
    other_rows=(1_000, 100_000),
    workers=(1, 4, 16),
)
FULL: Final = replace(
    QUICK,
    name="full",
    slice_seconds=3.0,
    total_seconds=math.inf,
    longest_call=60.0,
    expressions=(10, 100, 300, 1_000, 5_000),
    other_rows=(1_000, 10_000, 100_000, 1_000_000),
    workers=(1, 2, 4, 8, 16, 32, 64),
)
#: Everything once and small: for tests, and to see that a machine can be measured at all.
TINY: Final = replace(
    QUICK,
    name="tiny",
    slice_seconds=0.05,
    total_seconds=30.0,
    rows=(100, 1_000),
    expressions=(5, 20),
    other_rows=(100,),
    usual=20,
    workers=(2,),
)
PROFILES: Final = {profile.name: profile for profile in (QUICK, FULL, TINY)}
