"""Which tier evaluates a batch: a small cost model, corrected by what is observed.

Fresh expressions are interpreted: the answer must not wait for a compiler. A batch that comes
again could be answered faster by compiled kernels, at the price of compiling them once. Whether it
will come often enough nobody knows, so the rule is that of the ski rental problem (Karlin et al.
1988, "Competitive snoopy caching"): each interpreted repetition adds the time that compiled kernels
would have saved, and once the sum reaches the price, the batch is compiled in the background. The
total is then never more than twice that of a planner that knows the future. Kernels that are
loaded already, whoever had them made, have no price.

::

    seconds = launch + token_rows / rate        for each tier and each mode of arithmetic
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from types import MappingProxyType
from typing import Final

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from warpfit.ir import Batch
from warpfit.request import Tier
from warpfit_server.engine.native import numba_cache

#: Batches whose repetitions are counted.
_REMEMBERED: Final = 4096
#: What the name of a mode ends in when a loss comes with its gradient.
GRADIENT: Final = " gradient"
#: Weight of a new observation.
_GAIN: Final = 0.2


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one tier in one mode of arithmetic."""

    launch: float
    """Seconds of an evaluation of next to nothing, work on the host included."""
    rate: float
    """Token-rows a second."""

    def seconds(self, token_rows: int) -> float:
        """Predict the time of an evaluation."""
        return self.launch + token_rows / self.rate

    def corrected(self, token_rows: int, seconds: float) -> Cost:
        """Take an observation in: each term answers for its share of the prediction."""
        predicted = self.seconds(token_rows)
        share = self.launch / predicted
        surprise = seconds / predicted
        return Cost(
            launch=self.launch * surprise ** (_GAIN * share),
            rate=self.rate / surprise ** (_GAIN * (1 - share)),
        )


@dataclass(frozen=True, slots=True)
class Costs:
    """What everything costs.

    The modes of arithmetic are "fast", "precise" and "float64", and the same with " gradient".
    """

    tiers: Mapping[tuple[Tier, str], Cost]
    """By tier and mode."""
    compile_seconds: Mapping[str, float]
    """Seconds of one thread to compile one expression as part of a fused group, by mode."""


#: Measured on one H200 with 16 host cores; where the device cannot be calibrated.
STARTING_COSTS: Final = Costs(
    {
        (Tier.INTERPRETER, "fast"): Cost(0.6e-3, 6.4e12),
        (Tier.INTERPRETER, "precise"): Cost(0.6e-3, 2.0e12),
        (Tier.INTERPRETER, "float64"): Cost(0.6e-3, 0.8e12),
        (Tier.COMPILED, "fast"): Cost(0.4e-3, 17e12),
        (Tier.COMPILED, "precise"): Cost(0.4e-3, 4.5e12),
        (Tier.COMPILED, "float64"): Cost(0.4e-3, 1.5e12),
    },
    {"fast": 0.012, "precise": 0.06, "float64": 0.07},
)
#: What gradients cost, relative to losses alone: where the model starts, measured on one H200.
_GRADIENT_RATE: Final = MappingProxyType({Tier.INTERPRETER: 1 / 3, Tier.COMPILED: 1 / 3})
_GRADIENT_COMPILE: Final = 4.0


class Advice(Enum):
    """What to do with a batch."""

    INTERPRET = auto()
    INTERPRET_AND_COMPILE = auto()
    """Interpret now, and have kernels made for the next time."""
    COMPILED = auto()


@dataclass
class Planner:
    """Chooses tiers; safe to use from several threads.

    Args:
        compiler_threads: threads that compile in the background at the same time.
        start: where the model starts; what is observed corrects it.

    """

    compiler_threads: int
    start: Costs = STARTING_COSTS
    costs: dict[tuple[Tier, str], Cost] = field(init=False)
    _forgone: LRUCache[Hashable, float] = field(default_factory=lambda: LRUCache(_REMEMBERED))
    """Seconds that compiled kernels would have saved each batch since they were last ordered."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        """Start from what was calibrated."""
        self.costs = dict(self.start.tiers)
        for (tier, mode), cost in self.start.tiers.items():
            rate = cost.rate * _GRADIENT_RATE[tier]
            self.costs[tier, mode + GRADIENT] = replace(cost, rate=rate)

    def advise(
        self, batch: Hashable, mode: str, token_rows: int, programs: int, *, loaded: bool
    ) -> Advice:
        """Choose for one evaluation.

        Args:
            batch: identifies the batch and everything else that its kernels depend on.
            mode: a mode of arithmetic.
            token_rows: tokens x parameter vectors x rows.
            programs: expressions of the batch.
            loaded: whether its kernels are there.

        """
        with self._lock:
            interpreted = self.costs[Tier.INTERPRETER, mode].seconds(token_rows)
            compiled = self.costs[Tier.COMPILED, mode].seconds(token_rows)
            if compiled >= interpreted:
                return Advice.INTERPRET
            if loaded:
                return Advice.COMPILED
            compiling = self.start.compile_seconds[mode.removesuffix(GRADIENT)]
            compiling *= _GRADIENT_COMPILE if mode.endswith(GRADIENT) else 1.0
            forgone = self._forgone.get(batch, 0.0) + interpreted - compiled
            pays = forgone >= programs * compiling / self.compiler_threads
            # Kernels that are pushed out before they are used have to pay again.
            self._forgone[batch] = 0.0 if pays else forgone
            return Advice.INTERPRET_AND_COMPILE if pays else Advice.INTERPRET

    def observe(self, tier: Tier, mode: str, token_rows: int, seconds: float) -> None:
        """Learn from a finished evaluation."""
        with self._lock:
            cost = self.costs[tier, mode]
            self.costs[tier, mode] = cost.corrected(token_rows, seconds)


def fingerprint(batch: Batch) -> int:
    """Number that tells batches of other tokens apart; other parameters make no difference.

    It says whether a batch has probably been seen before, which is all that a plan needs: who needs
    to know compares.
    """
    return int(mixed_tokens(batch.codes, batch.values.view(np.uint64)) >> np.uint64(1))


@numba_cache.njit()  # type: ignore[untyped-decorator]
def mixed_tokens(codes: NDArray[np.uint8], words: NDArray[np.uint64]) -> np.uint64:
    """Add a number for each token, which depends on its place too.

    The numbers are mixed by multiplication with odd constants (the first is that of Steele et al.
    2014, "Fast splittable pseudorandom number generators"). No step waits for the one before, so
    that 10,000 tokens take 3 microseconds: not worth giving the interpreter lock up, which may take
    longer to get back.

    Args:
        codes: of all tokens.
        words: the bits of their values.

    """
    total = np.uint64(0)
    for index in range(len(codes)):
        token = np.uint64(index) * np.uint64(256) + np.uint64(codes[index])
        word = words[index] + token * np.uint64(0x9E3779B97F4A7C15)
        word = (word ^ (word >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
        total += word ^ (word >> np.uint64(32))
    return total
