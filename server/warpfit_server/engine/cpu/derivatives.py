"""Evaluations that need derivatives, custom losses or statistics, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Dataset, Layout
from warpfit.ir import Batch
from warpfit.losses import DIFFERENCE, mentions_weight
from warpfit.request import Evaluation
from warpfit_server.engine.autodiff.differentiate import (
    LOSS,
    differentiate_chunk,
    no_row_loss,
    row_loss_tokens,
)
from warpfit_server.engine.autodiff.requested_outputs import RequestedOutputs
from warpfit_server.engine.cpu import chunked_work
from warpfit_server.engine.cpu.codegen.parts import Kernels
from warpfit_server.engine.cpu.derivative_interpreter import (
    COLUMN_SUMS,
    LOSS_SUM,
    VALUE_SUM,
    combine_chunk,
    linearise_chunk,
)
from warpfit_server.engine.cpu.interpreter import Inputs
from warpfit_server.engine.cpu.row_loss import row_loss_inputs
from warpfit_server.engine.cpu.statistics import MOMENTS, REDUCTIONS, from_zero, merge_reductions
from warpfit_server.engine.interface import Arithmetic, Outputs, Steps
from warpfit_server.engine.lowering.lower import lower_chunk
from warpfit_server.engine.lowering.lowered import Lowered, allocate
from warpfit_server.engine.native.numba_cache import address_of
from warpfit_server.engine.sum_tree import sum_nodes

#: What row losses are computed with.
_WIDE: Final = Arithmetic.DOUBLE


def needs_derivatives(evaluation: Evaluation, outputs: Outputs) -> bool:
    """Whether an evaluation asks for more than values and one of the six losses."""
    derivatives = (outputs.gradients, outputs.jacobian, outputs.variable_gradients)
    statistics = (outputs.reductions, outputs.moments)
    custom_loss = outputs.losses is not None and evaluation.loss is None
    return custom_loss or any(array is not None for array in (*derivatives, *statistics))


@dataclass(frozen=True, slots=True, eq=False)
class DerivativePlan:
    """The part of an evaluation that does not depend on the parameters."""

    lowered: Lowered
    row_loss: Lowered
    """Instructions of the row loss; no program for losses that have kernels of their own."""
    cut: chunked_work.Cut
    sizes: NDArray[np.int64]
    """Sums of each instance."""
    weighs_loss: bool
    """Whether each row loss counts w times."""


class LoweredDerivatives:
    """Programs lowered with their derivatives, and the plan of the last selection of them."""

    def __init__(self, lowered: Lowered, row_loss: Lowered) -> None:
        self._lowered = lowered
        self._row_loss = row_loss
        self._last: tuple[NDArray[np.int64] | None, DerivativePlan] | None = None

    def plan(
        self,
        dataset: Dataset,
        evaluation: Evaluation,
        requested: RequestedOutputs,
        programs: NDArray[np.int64] | None,
    ) -> DerivativePlan:
        """Cut the work of an evaluation of all programs, or of those with some indices."""
        last = self._last  # another thread may replace it
        if last is not None and last[0] is programs:
            return last[1]
        lowered, layout = self._lowered, dataset.layout
        if programs is not None:
            lowered = lowered._replace(headers=lowered.headers[programs])
        headers, vectors = lowered.headers, evaluation.batch.vectors
        columns = headers["columns"]
        products = columns * columns * (requested.curvatures is not None)
        sizes = np.repeat(COLUMN_SUMS + columns + products, vectors)
        rows = evaluation.row_range(layout)
        reductions = REDUCTIONS * (requested.reductions is not None)
        moments = MOMENTS * (requested.moments is not None)
        sums = int(sizes.sum()) + len(sizes) * (reductions + moments)
        # The product of two columns costs about as much as an instruction.
        costs = headers["end"] - headers["start"] + products // 2
        level = chunked_work.span_level(rows, layout, sums, int(costs.max()))
        cut = chunked_work.cut_instances(costs, headers["invariants"], vectors, rows, layout, level)
        loss = requested.row_loss
        weighs_loss = loss is not None and not mentions_weight(loss)
        plan = DerivativePlan(lowered, self._row_loss, cut, sizes, weighs_loss)
        self._last = programs, plan
        return plan


def lower_derivatives(
    run: Callable[[chunked_work.ChunkedWork], Steps[None]],
    layout: Layout,
    batch: Batch,
    requested: RequestedOutputs,
) -> Steps[LoweredDerivatives]:
    """Lower checked programs with their derivatives; ``run`` runs all chunks of such work."""
    tokens, loss = no_row_loss(), requested.row_loss
    if loss is not None and requested.needs_loss_derivative:
        program = DIFFERENCE if requested.is_squares else loss
        tokens = row_loss_tokens(program, layout.variables, weighted=layout.has_weights)
    # The losses themselves are computed apart, in float64.
    flags = requested.lowering_flags & ~LOSS
    work, lowered = chunked_work.differentiation_work(
        address_of(differentiate_chunk), batch, tokens, flags, requested.cancelled
    )
    yield from run(work)
    row_loss = allocate(0, 0, 0)
    if loss is not None and not requested.deviation:
        work, row_loss = chunked_work.lowering_work(
            address_of(lower_chunk), Batch.of([loss]), requested.cancelled
        )
        yield from run(work)
    return LoweredDerivatives(lowered, row_loss)


def lowering_key(
    dataset: Dataset, evaluation: Evaluation, requested: RequestedOutputs
) -> tuple[Hashable, ...]:
    """Return what lowered derivatives and their plans depend on beside the programs."""
    arrays = requested.curvatures, requested.reductions, requested.moments
    flags = requested.row_loss, requested.lowering_flags, *(array is not None for array in arrays)
    return (evaluation.batch.vectors, evaluation.rows, dataset.layout, *flags)


class DerivativeRun:
    """One evaluation by a plan: its work, what that adds up, and how outputs are made of it."""

    def __init__(
        self,
        kernels: Kernels,
        plan: DerivativePlan,
        dataset: Dataset,
        evaluation: Evaluation,
        requested: RequestedOutputs,
    ) -> None:
        batch, layout, spans = evaluation.batch, dataset.layout, len(plan.cut.spans)
        self._requested = requested
        self._cut, self._layout = plan.cut, layout
        self._rows = evaluation.row_range(layout)
        starts = np.concatenate([[0], np.cumsum(plan.sizes)])
        self._starts, self._totals = starts[:-1], np.empty(int(starts[-1]))
        reductions = len(plan.sizes) * REDUCTIONS * (requested.reductions is not None)
        moments = len(plan.sizes) * MOMENTS * (requested.moments is not None)
        self._first_moment = len(self._totals) + reductions
        self.nodes = np.zeros((spans, self._first_moment + moments))
        """What has been summed up of each node of the rows: sums, reductions and moments."""

        own, wide = kernels[Arithmetic.of(layout.dtype, evaluation.precision)], kernels[_WIDE]
        self._triangles = _triangle_starts(batch)
        suffix = "_weighted" if layout.has_weights and plan.weighs_loss else ""
        context = _context(dataset, evaluation, requested, plan.cut.level)
        context["weighs_loss"] = plan.weighs_loss
        if requested.deviation:
            context["loss_kernel"] = own.losses[requested.deviation + suffix]
        parameters = np.ascontiguousarray(batch.parameters), batch.parameter_starts
        inputs = Inputs(context, own.addresses, *parameters, plan.lowered)
        sum_kernel = wide.losses["given" + suffix] if len(plan.row_loss.headers) else 0
        row_loss = row_loss_inputs(wide.addresses, sum_kernel, plan.row_loss)
        self._inputs = (*inputs.arrays(), *row_loss.arrays(), own.dots, starts)

    def summing(self) -> chunked_work.ChunkedWork:
        """Return the work that runs the programs over the rows and adds up."""
        return self._work(address_of(linearise_chunk), self._cut)

    def combining(self) -> chunked_work.ChunkedWork:
        """Return the work that makes derivatives and moments of the sums over all rows."""
        self._totals[:] = sum_nodes(self.nodes[:, : len(self._totals)], self._first_node)
        for array in self._gradients:
            array.fill(0.0)
        return self._work(address_of(combine_chunk), self._cut.without_rows(len(self._totals)))

    def _work(self, function: int, cut: chunked_work.Cut) -> chunked_work.ChunkedWork:
        node_range = np.array([self._first_node, len(self.nodes)])
        sums = self.nodes, node_range, self._totals
        arguments = (*self._inputs, *sums, *self._gradients, self._triangles)
        return chunked_work.ChunkedWork(function, arguments, cut, self._requested.cancelled)

    @property
    def _gradients(self) -> list[NDArray[np.float64]]:
        requested = self._requested
        arrays = requested.gradients, requested.variable_gradients, requested.curvatures
        return [np.empty(0) if array is None else array for array in arrays]

    @property
    def _first_node(self) -> int:
        return chunked_work.first_node(self._rows, self._layout, self._cut.level)

    def finish(self) -> None:
        """Fill the other outputs, once `combining` has run."""
        requested, (start, stop) = self._requested, self._rows
        if requested.losses is not None:
            requested.losses.reshape(-1)[:] = self._totals[self._starts + LOSS_SUM]
        if requested.reductions is not None:
            totals = self._totals[self._starts + VALUE_SUM]
            parts = self.nodes[:, len(self._totals) : self._first_moment]
            parts = parts.reshape(len(parts), -1, REDUCTIONS)
            found: NDArray[Any] = merge_reductions(totals, parts, stop - start)
            requested.reductions.reshape(found.shape)[:] = found
        if requested.moments is not None:
            found = from_zero(self.nodes[0, self._first_moment :].reshape(-1, MOMENTS))
            requested.moments.reshape(found.shape)[:] = found


def _triangle_starts(batch: Batch) -> NDArray[np.int64]:
    """Return the index of each instance's first number in `Linearisation.curvatures`."""
    counts = np.repeat(batch.parameter_counts.astype(np.int64), batch.vectors)
    sizes = counts * (counts + 1) // 2
    found: NDArray[np.int64] = np.cumsum(sizes) - sizes
    return found


def _context(
    dataset: Dataset, evaluation: Evaluation, requested: RequestedOutputs, level: int
) -> NDArray[np.void]:
    context = chunked_work.new_context(dataset, evaluation, requested.values, level)
    context["wants_losses"] = requested.row_loss is not None
    context["wants_gradients"] = requested.needs_loss_derivative
    context["wants_curvatures"] = requested.curvatures is not None
    context["is_squares"] = requested.is_squares
    context["wants_reductions"] = requested.reductions is not None
    context["wants_moments"] = requested.moments is not None
    if requested.jacobian is not None:
        context["jacobian"] = requested.jacobian.ctypes.data
    return context
