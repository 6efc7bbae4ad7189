"""Requested outputs of evaluations with derivatives, a custom loss or statistics."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.ir import Batch, Program
from warpfit.losses import ABSOLUTE, LossFunction
from warpfit.request import OUTPUTS, Evaluation
from warpfit_server.engine import autodiff
from warpfit_server.engine.interface import Linearisation, Outputs

_OUTPUTS: Final = tuple(each.name for each in fields(Outputs))


@dataclass(frozen=True, slots=True, eq=False)
class RequestedOutputs(Outputs):
    """Arrays to fill, None for what is not requested; see `Outputs` and `Linearisation`."""

    row_loss: Program | None = None
    curvatures: NDArray[np.float64] | None = None

    @property
    def lowering_flags(self) -> int:
        """Flags of the outputs that lowering has to provide, bits of `autodiff`."""
        parameters = any(x is not None for x in (self.gradients, self.curvatures, self.jacobian))
        variables = self.variable_gradients is not None
        return (
            autodiff.BY_PARAMETERS * parameters
            | autodiff.BY_VARIABLES * variables
            | autodiff.LOSS * (self.row_loss is not None and not self.deviation)
            | autodiff.LOSS_DERIVATIVE * self.needs_loss_derivative
            | autodiff.SQUARES * self.is_squares
        )

    def of_programs(self, programs: slice, parameter_starts: NDArray[np.int64]) -> RequestedOutputs:
        """Return the outputs of a range of programs; `Batch.parameter_starts` are of all."""
        start, stop = parameter_starts[programs.start], parameter_starts[programs.stop]
        of_parameters = {
            output.name: slice(start, stop) for output in OUTPUTS if output.axes[0] == "parameters"
        }
        arrays: dict[str, Any] = {
            each.name: array[of_parameters.get(each.name, programs)]
            for each in fields(self)
            if isinstance(array := getattr(self, each.name), np.ndarray)
        }
        arrays["cancelled"] = self.cancelled
        first = int(programs.start)
        return replace(self, **arrays, ready=lambda count: self.ready(first + count))

    @property
    def needs_loss_derivative(self) -> bool:
        """Whether derivatives of the loss are requested."""
        return self.gradients is not None or self.variable_gradients is not None

    @property
    def is_squares(self) -> bool:
        """Whether the row loss is (f - y)^2."""
        return self.row_loss is not None and _is_squares(self.row_loss)

    @property
    def deviation(self) -> str:
        """``"squared"`` for (f - y)^2, ``"absolute"`` for |f - y|, else empty.

        Engines compute these two from values and target themselves, in float64 for each row.
        """
        if self.is_squares:
            return "squared"
        return "absolute" if self.row_loss == ABSOLUTE else ""


@lru_cache(64)
def _is_squares(row_loss: Program) -> bool:
    return LossFunction(row_loss).is_squares


def requested_outputs(evaluation: Evaluation, outputs: Outputs) -> RequestedOutputs:
    """Return the outputs that an evaluation requests."""
    loss = evaluation.loss_function
    sums = (outputs.losses, outputs.gradients, outputs.variable_gradients)
    needs_loss = any(array is not None for array in sums)
    return RequestedOutputs(
        row_loss=loss.row if loss is not None and needs_loss else None,
        **{name: getattr(outputs, name) for name in _OUTPUTS},
    )


def linearisation_outputs(
    batch: Batch, row_loss: Program, *, curvature: bool, cancelled: NDArray[np.uint8]
) -> tuple[Linearisation, RequestedOutputs]:
    """Allocate the results of a linearisation; return them, and the request to fill them.

    ``cancelled`` as in `Outputs`.
    """
    counts = batch.parameter_counts.astype(np.int64)
    triangles = int((counts * (counts + 1) // 2).sum()) * batch.vectors
    found = Linearisation(
        losses=np.empty((len(batch), batch.vectors)),
        gradients=np.empty(len(batch.parameters)),
        curvatures=np.empty(triangles) if curvature else None,
    )
    arrays = {each.name: getattr(found, each.name) for each in fields(found)}
    return found, RequestedOutputs(
        values=None, ready=lambda programs: None, row_loss=row_loss, cancelled=cancelled, **arrays
    )
