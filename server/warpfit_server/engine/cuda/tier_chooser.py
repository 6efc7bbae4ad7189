"""The tier chooser: chooses the tier that evaluates a batch, by a cost model that learns.

Fresh expressions are interpreted, because an answer must not wait for a compiler. Compiled kernels
would answer a repeated batch faster, once they have been compiled. How often it will be repeated is
unknown, so the rule is that of the ski rental problem (Karlin et al. 1988, "Competitive snoopy
caching"): each interpreted repetition adds the time that compiled kernels would have saved, and
once the sum reaches the price of compiling, the batch is compiled in the background. The total cost
is then at most twice that of a chooser that knows the future. Kernels that are loaded already have
no price.

::

    seconds = launch + token_rows / rate        for each tier and each kind of work
"""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from types import MappingProxyType
from typing import Final, NamedTuple

from cachetools import LRUCache

from warpfit.request import Tier
from warpfit_server.engine.interface import Arithmetic

#: Batches whose savings are remembered.
_REMEMBERED: Final = 4096
#: Weight of a new observation.
_GAIN: Final = 0.2
#: By how much of the way the cost of a tier that is not observed returns with each observation of
#: the other one, so that a tier which looked slow during a disturbance is tried again.
_FORGETTING: Final = 0.002


class WorkKind(NamedTuple):
    """Properties of an evaluation on which the cost of a token-row depends."""

    arithmetic: Arithmetic
    gradient: bool = False
    """Whether the loss comes with its gradient."""


@dataclass(frozen=True, slots=True)
class TierCost:
    """Cost of one tier for one kind of work."""

    launch: float
    """Seconds of a minimal evaluation: of the engine's thread and of the device."""
    rate: float
    """Token-rows a second."""

    def seconds(self, token_rows: int) -> float:
        """Predict the time of an evaluation."""
        return self.launch + token_rows / self.rate

    def corrected(self, token_rows: int, surprise: float) -> TierCost:
        """Return the cost after an observation, which took ``surprise`` times the predicted time.

        Each term is corrected by its share.
        """
        share = self.launch / self.seconds(token_rows)
        return TierCost(
            launch=self.launch * surprise ** (_GAIN * share),
            rate=self.rate / surprise ** (_GAIN * (1 - share)),
        )


#: Costs at the start, by tier and arithmetic, measured on one H200 with 16 host cores.
COSTS: Final = MappingProxyType(
    {
        (Tier.INTERPRETER, Arithmetic.FAST): TierCost(0.6e-3, 6.4e12),
        (Tier.INTERPRETER, Arithmetic.PRECISE): TierCost(0.6e-3, 2.0e12),
        (Tier.INTERPRETER, Arithmetic.DOUBLE): TierCost(0.6e-3, 0.8e12),
        (Tier.COMPILED, Arithmetic.FAST): TierCost(0.4e-3, 17e12),
        (Tier.COMPILED, Arithmetic.PRECISE): TierCost(0.4e-3, 4.5e12),
        (Tier.COMPILED, Arithmetic.DOUBLE): TierCost(0.4e-3, 1.5e12),
    }
)
#: Seconds of one process to compile one expression as part of a fused group, measured there, too.
COMPILE_SECONDS: Final = MappingProxyType(
    {Arithmetic.FAST: 0.012, Arithmetic.PRECISE: 0.06, Arithmetic.DOUBLE: 0.07}
)
#: Rate, and compile time, of losses with gradients relative to losses alone: where the model
#: starts, measured on one H200.
_GRADIENT_RATE: Final = MappingProxyType({Tier.INTERPRETER: 1 / 3, Tier.COMPILED: 1 / 3})
_GRADIENT_COMPILE: Final = 4.0


class Decision(Enum):
    """The tier chooser's choice for a batch."""

    INTERPRET = auto()
    INTERPRET_AND_COMPILE = auto()
    """Interpret it, and compile its kernels in the background."""
    COMPILED = auto()


@dataclass
class TierChooser:
    """Chooses tiers; safe to use from several threads.

    Args:
        compilers: processes that compile at the same time.
        start: costs of losses at the start, by tier and arithmetic; the costs of losses with
            gradients are derived.
    """

    compilers: int
    start: Mapping[tuple[Tier, Arithmetic], TierCost] = field(default_factory=lambda: COSTS)
    costs: dict[tuple[Tier, WorkKind], TierCost] = field(init=False)
    """As observations have corrected them."""
    _start: dict[tuple[Tier, WorkKind], TierCost] = field(init=False)
    _compiled: set[WorkKind] = field(default_factory=set)
    """Kinds of work for which compiled kernels have been observed."""
    _forgone: LRUCache[Hashable, float] = field(default_factory=lambda: LRUCache(_REMEMBERED))
    """Seconds that compiled kernels would have saved each batch, since they were last requested."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        """Derive the costs of gradients."""
        self._start = {}
        for (tier, arithmetic), cost in self.start.items():
            self._start[tier, WorkKind(arithmetic)] = cost
            with_gradient = replace(cost, rate=cost.rate * _GRADIENT_RATE[tier])
            self._start[tier, WorkKind(arithmetic, gradient=True)] = with_gradient
        self.costs = dict(self._start)

    def choose(
        self, batch: Hashable, kind: WorkKind, token_rows: int, programs: int, *, loaded: bool
    ) -> Decision:
        """Choose for one evaluation.

        Args:
            batch: identifies the batch and everything else that its kernels depend on.
            kind: of its work.
            token_rows: tokens x parameter vectors x rows.
            programs: expressions of the batch.
            loaded: whether its kernels are there.
        """
        with self._lock:
            interpreted = self.costs[Tier.INTERPRETER, kind].seconds(token_rows)
            compiled = self.costs[Tier.COMPILED, kind].seconds(token_rows)
            if compiled >= interpreted:
                return Decision.INTERPRET
            if loaded:
                return Decision.COMPILED
            compiling = COMPILE_SECONDS[kind.arithmetic]
            compiling *= _GRADIENT_COMPILE if kind.gradient else 1.0
            forgone = self._forgone.get(batch, 0.0) + interpreted - compiled
            pays = forgone >= programs * compiling / self.compilers
            # Kernels that are evicted before they are used have to pay again.
            self._forgone[batch] = 0.0 if pays else forgone
            return Decision.INTERPRET_AND_COMPILE if pays else Decision.INTERPRET

    def merge_from(self, kind: WorkKind, token_rows: int) -> int:
        """Return with how many requests merging them costs each less than compiled kernels do.

        Of n requests that are interpreted as one, each pays one n-th of the fixed cost of an
        evaluation.

        Returns:
            1 if compiled kernels do not even pay for a lone request; 0 if they pay whatever the
            number.
        """
        with self._lock:
            interpreted = self.costs[Tier.INTERPRETER, kind]
            compiled = self.costs[Tier.COMPILED, kind].seconds(token_rows)
        launch = compiled - token_rows / interpreted.rate
        return 0 if launch <= 0.0 else math.ceil(interpreted.launch / launch)

    def observe(self, tier: Tier, kind: WorkKind, token_rows: int, seconds: float) -> None:
        """Correct the cost of a tier by a finished evaluation.

        ``seconds`` is the time of the engine's thread plus that of the device, without waiting.
        """
        with self._lock:
            if tier is Tier.COMPILED:
                self._compiled.add(kind)
            surprise = seconds / self.costs[tier, kind].seconds(token_rows)
            # A device that interprets more slowly runs compiled kernels more slowly, too.
            for one in {tier} if kind in self._compiled else {tier, Tier.COMPILED}:
                self.costs[one, kind] = self.costs[one, kind].corrected(token_rows, surprise)
            if kind not in self._compiled:
                return
            # The other tier's cost returns a little to its ratio to this one's at the start.
            other = Tier.INTERPRETER if tier is Tier.COMPILED else Tier.COMPILED
            cost, known = self.costs[other, kind], self.costs[tier, kind]
            start, start_known = self._start[other, kind], self._start[tier, kind]
            launch = start.launch * known.launch / start_known.launch
            rate = start.rate * known.rate / start_known.rate
            self.costs[other, kind] = TierCost(
                launch=cost.launch * (launch / cost.launch) ** _FORGETTING,
                rate=cost.rate * (rate / cost.rate) ** _FORGETTING,
            )
