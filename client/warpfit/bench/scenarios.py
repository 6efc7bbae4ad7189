"""What is measured: scenarios, and the profiles that choose among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import product
from typing import Any, Final

#: Parameter vectors of a call that has several: neighbours that a local search tries at once.
VECTORS: Final = 16


class Kind(StrEnum):
    """How a scenario is measured."""

    EVALUATE = "evaluate"
    """One client, one call after the other."""
    OPTIMIZE = "optimize"
    """One client; every call fits the parameters of all expressions."""
    WORKERS = "workers"
    """Several clients at once, each with calls of its own."""
    PEER = "peer"
    """Another library on the same work, alternating with calls of one client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One thing to measure; equal scenarios are the same measurement."""

    kind: Kind = Kind.EVALUATE
    engine: str
    """``"cpu"`` or ``"cuda"``; for a peer the kind of device that it computes on."""
    tier: str = "interpreter"
    rows: int = 10_000
    expressions: int = 300
    tokens: tuple[int, int] = (10, 50)
    """Least and most tokens of an expression."""
    reuse: str = "fresh"
    """``"fresh"``: other expressions in every call; ``"repeated"``: new parameters only."""
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
        """Tokens evaluated for one row in one call, by the mean length: the work."""
        return sum(self.tokens) / 2 * self.expressions * self.rows * self.vectors

    @property
    def key(self) -> str:
        """What identifies the scenario in a result file."""
        parts = [self.kind, self.peer or self.engine, self.tier, self.precision, self.output]
        size = f"{self.rows}x{self.expressions}x{self.tokens[0]}-{self.tokens[1]}"
        return "/".join([*parts, self.reuse, size, f"{self.vectors}v", f"{self.workers}w"])

    @property
    def title(self) -> str:
        """A short name for people."""
        who = self.peer or (self.engine if self.engine == "cpu" else f"{self.engine} {self.tier}")
        workers = f", {self.workers} at once" if self.kind is Kind.WORKERS else ""
        what = "fits" if self.kind is Kind.OPTIMIZE else self.output
        mode = "" if self.precision == "fast" else f", {self.precision}"
        size = f"{self.expressions:,} x {self.rows:,} rows"
        vectors = f", {self.vectors} vectors" if self.vectors > 1 else ""
        return f"{who}: {size}, {self.reuse} {what}{mode}{vectors}{workers}"

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON knows them."""
        return {**asdict(self), "tokens": list(self.tokens)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """How much to measure, and for how long."""

    name: str
    slice_seconds: float
    """Time for one scenario. At least three calls are timed within twice this time."""
    least_calls: int
    """How many are timed at least, whatever they take."""
    total_seconds: float | None
    """Time for everything: where it is short, slices get shorter, scenarios that take more than
    their share come last, and what does not fit then is left out. None for no limit."""
    longest_call: float
    """Scenarios whose calls are predicted to take longer are left out, in seconds."""
    rows: tuple[int, ...]
    expressions: tuple[int, ...]
    usual: int = 300
    """Expressions of every scenario outside the grid of rows and expressions; fits have a third."""
    mode_rows: tuple[int, ...]
    """Where precise mode and float64 are measured beside fast mode."""
    output_rows: tuple[int, ...]
    """Where values, gradients, several parameter vectors and fits are measured."""
    lengths: tuple[int, ...]
    """Lengths, in tokens, that all expressions of a batch have in turn."""
    workers: tuple[int, ...]
    worker_rows: tuple[int, ...]
    peer_rows: tuple[int, ...]
    slow_peers: bool = False
    """Whether there is time to prepare all expressions for peers that take long over each."""

    def scenarios(self, engine: str, tiers: Iterable[str]) -> Iterator[Scenario]:
        """Yield what to measure on one engine, the most important first."""
        base = Scenario(engine=engine, expressions=self.usual)
        compiles = "compiled" in tiers
        for rows, expressions in product(self.rows, self.expressions):
            yield from _ways(replace(base, rows=rows, expressions=expressions), compiles)
        for precision, rows in product(("precise", "float64"), self.mode_rows):
            yield from _ways(replace(base, rows=rows, precision=precision), compiles)
        for rows in self.output_rows:
            yield replace(base, rows=rows, output="values")
            yield from _ways(replace(base, rows=rows, output="gradients"), compiles)
            yield replace(base, rows=rows, vectors=VECTORS)
            fits = max(1, self.usual // 3)
            yield replace(base, kind=Kind.OPTIMIZE, rows=rows, expressions=fits)
        for length, rows in product(self.lengths, self.mode_rows):
            yield from _ways(replace(base, rows=rows, tokens=(length, length)), compiles)
        for workers, rows in product(self.workers, self.worker_rows):
            yield replace(base, kind=Kind.WORKERS, rows=rows, workers=workers)

    def peers(self, engine: str, offers: Mapping[str, tuple[int, str]]) -> Iterator[Scenario]:
        """Yield the peers of an engine.

        Args:
            engine: what they compute on.
            offers: by name the most expressions in a quick profile, and warpfit's tier beside it.

        """
        for rows, (name, (most, tier)) in product(reversed(self.peer_rows), offers.items()):
            yield Scenario(
                kind=Kind.PEER,
                engine=engine,
                peer=name,
                tier=tier,
                rows=rows,
                expressions=self.usual if self.slow_peers else min(self.usual, most),
            )


def _ways(scenario: Scenario, compiles: bool) -> Iterator[Scenario]:
    """Fresh and, where an engine can compile, repeated: otherwise it makes no difference."""
    yield scenario
    if compiles:
        yield replace(scenario, reuse="repeated")
        yield replace(scenario, reuse="repeated", tier="compiled")


QUICK: Final = Profile(
    name="quick",
    slice_seconds=0.6,
    least_calls=1,
    total_seconds=100.0,
    longest_call=3.0,
    rows=(1_000, 10_000, 100_000, 1_000_000),
    expressions=(10, 300, 5_000),
    mode_rows=(100_000,),
    output_rows=(10_000,),
    lengths=(),
    workers=(1, 4, 16),
    worker_rows=(100_000,),
    peer_rows=(1_000, 100_000),
)
FULL: Final = replace(
    QUICK,
    name="full",
    slice_seconds=3.0,
    least_calls=2,
    total_seconds=None,
    longest_call=60.0,
    expressions=(10, 100, 300, 1_000, 5_000),
    mode_rows=(10_000, 100_000, 1_000_000),
    output_rows=(1_000, 10_000, 100_000),
    lengths=(10, 25, 50),
    workers=(1, 2, 4, 8, 16, 32, 64),
    worker_rows=(1_000, 100_000),
    peer_rows=(1_000, 10_000, 100_000, 1_000_000),
    slow_peers=True,
)
#: Everything once and small: for tests, and to see that a machine can be measured at all.
TINY: Final = replace(
    QUICK,
    name="tiny",
    slice_seconds=0.05,
    total_seconds=30.0,
    rows=(100, 1_000),
    expressions=(5, 20),
    usual=12,
    mode_rows=(100,),
    output_rows=(100,),
    workers=(2,),
    worker_rows=(100,),
    peer_rows=(200,),
)
PROFILES: Final = {profile.name: profile for profile in (QUICK, FULL, TINY)}
