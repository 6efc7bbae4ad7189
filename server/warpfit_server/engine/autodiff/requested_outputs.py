"""What an evaluation with derivatives, a loss of one's own or statistics is to fill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpfit.ir import Batch, Program
from warpfit.losses import ABSOLUTE, LossFunction
from warpfit.request import Evaluation
from warpfit_server.engine.autodiff import backward_sweep
from warpfit_server.engine.interface import Outputs

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """Arrays to fill; None is not wanted. See `Outputs` and `Linearisation`."""

    row_loss: Program | None = None
    values: NDArray[Any] | None = None
    losses: Floats | None = None
    gradients: Floats | None = None
    curvatures: Floats | None = None
    jacobian: NDArray[Any] | None = None
    variable_gradients: Floats | None = None
    reductions: Floats | None = None
    moments: Floats | None = None

    @property
    def wishes(self) -> int:
        """What lowering has to provide."""
        parameters = any(x is not None for x in (self.gradients, self.curvatures, self.jacobian))
        variables = self.variable_gradients is not None
        return (
            backward_sweep.BY_PARAMETERS * parameters
            | backward_sweep.BY_VARIABLES * variables
            | backward_sweep.LOSS * (self.row_loss is not None and not self.deviation)
            | backward_sweep.SLOPE * self.wants_slopes
            | backward_sweep.SQUARES * self.is_squares
        )

    @property
    def wants_slopes(self) -> bool:
        """Whether the derivative of the loss is wanted."""
        return self.gradients is not None or self.variable_gradients is not None

    @property
    def is_squares(self) -> bool:
        """Whether the row loss is (f - y)^2."""
        return self.row_loss is not None and LossFunction(self.row_loss).is_squares

    @property
    def deviation(self) -> str:
        """``"squared"`` for (f - y)^2, ``"absolute"`` for |f - y|, else empty.

        Engines compute these two of values and target by themselves, in float64 for each row.
        """
        if self.is_squares:
            return "squared"
        return "absolute" if self.row_loss == ABSOLUTE else ""


def wanted_by(evaluation: Evaluation, outputs: Outputs) -> Wanted:
    """List what an evaluation asks for."""
    loss = evaluation.loss_function
    sums = (outputs.losses, outputs.gradients, outputs.variable_gradients)
    needs_loss = any(array is not None for array in sums)
    return Wanted(
        row_loss=loss.row if loss is not None and needs_loss else None,
        values=outputs.values,
        losses=outputs.losses,
        gradients=outputs.gradients,
        jacobian=outputs.jacobian,
        variable_gradients=outputs.variable_gradients,
        reductions=outputs.reductions,
        moments=outputs.moments,
    )


def room_for_curvatures(batch: Batch) -> Floats:
    """Make room for the packed triangles of a batch."""
    counts = batch.parameter_counts.astype(np.int64)
    return np.empty(int((counts * (counts + 1) // 2).sum()) * batch.vectors)
