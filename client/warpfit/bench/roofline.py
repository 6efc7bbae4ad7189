"""The least time that the hardware allows for a scenario, and what sets it.

Counted is what a row cannot do without: an instruction for each operator, a special function where
one is, variables and target read once, values written once. An evaluator that shares work between
expressions, or does what is the same for all rows once, may beat these counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from warpfit.bench.hardware import Peaks
from warpfit.bench.scenarios import Scenario
from warpfit.bench.work import VARIABLES
from warpfit.ir import Program
from warpfit.ops import BY_CODE, OPERATORS

#: Special functions of each operator: a power is a logarithm and an exponential.
_SPECIAL: Final = {"div": 1, "pow": 2, "log": 1, "exp": 1, "sqrt": 1}
#: Vector instructions of one special function on a device without a unit for them: a polynomial of
#: degree 6, and bringing its argument into range and back.
_INSTRUCTIONS: Final = 10


def bound(scenario: Scenario, programs: Sequence[Program], peaks: Peaks) -> dict[str, Any]:
    """Count the work of one call.

    Returns:
        ``operations`` and ``bytes`` of one call, ``seconds`` (the least time), ``by`` (what sets
        it: "issue", "special functions" or "memory").

    """
    word = 8 if scenario.precision == "float64" else 4
    times = scenario.rows * scenario.vectors
    counts = np.bincount(np.concatenate([p.codes for p in programs]), minlength=256)
    operators = times * int(sum(counts[code] for code in BY_CODE))
    special = times * sum(n * int(counts[OPERATORS[name].code]) for name, n in _SPECIAL.items())
    written = scenario.expressions if scenario.output == "values" else 0
    traffic = (VARIABLES + 1 + written) * scenario.rows * word
    own_unit = peaks.special_per_second > 0
    issued = operators + (0 if own_unit else (_INSTRUCTIONS - 1) * special)
    seconds = {
        "issue": issued * (word / 4) / peaks.lanes_per_second,
        "memory": traffic / peaks.bytes_per_second,
    }
    if own_unit and scenario.precision == "fast":
        seconds["special functions"] = special / peaks.special_per_second
    by = max(seconds, key=lambda name: seconds[name])
    return {"operations": issued, "bytes": traffic, "seconds": seconds[by], "by": by}
