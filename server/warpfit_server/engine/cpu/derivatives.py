"""Evaluations that need derivatives, losses of one's own or statistics, on the CPU."""

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
from warpfit_server.engine.autodiff import backward_sweep
from warpfit_server.engine.autodiff import differentiate as lowering
from warpfit_server.engine.autodiff.requested_outputs import Wanted
from warpfit_server.engine.cpu import derivative_interpreter, interpreter
from warpfit_server.engine.cpu.codegen.kernel_cache import Derivatives, Kernels
from warpfit_server.engine.cpu.codegen.kernels import Flavour
from warpfit_server.engine.cpu.evaluation import (
    Work,
    cut_cells,
    cut_rows,
    fill_job,
    flavour_of,
    span_rows,
    sum_spans,
)
from warpfit_server.engine.cpu.row_loss import no_row_loss, row_loss_arrays
from warpfit_server.engine.cpu.statistics import (
    MOMENTS,
    REDUCTIONS,
    from_zero,
    merge_reductions,
)
from warpfit_server.engine.interface import Outputs
from warpfit_server.engine.lowering import lower as cpu_lower
from warpfit_server.engine.lowering.schedule import (
    INSTRUCTIONS_END,
    INSTRUCTIONS_START,
    SCALARS,
)

Floats = NDArray[np.float64]
#: Lowers a batch with a row loss, for some wishes; and lowers a batch alone.
LowerBoth = Callable[[Batch, lowering.RowLoss, int], lowering.Differentiated]
Lower = Callable[[Batch], cpu_lower.Lowered]
#: Bytes of one intermediate result. More of them are alive at a time than in plain evaluation.
_BLOCK_BYTES: Final = 4096
#: What row losses are computed with.
_WIDE: Final = Flavour(single=False, fast=False)
#: Sums of all spans together above which fewer spans are cut: 256 MiB.
_MOST_SUMS: Final = 2**25


@dataclass(frozen=True, slots=True, eq=False)
class Derivation:
    """Work that is cut into pieces, and what to do when all pieces are done."""

    work: Work
    finish: Callable[[], None]


def needs_derivatives(evaluation: Evaluation, outputs: Outputs) -> bool:
    """Whether an evaluation asks for more than values and one of the six losses."""
    derivatives = (outputs.gradients, outputs.jacobian, outputs.variable_gradients)
    statistics = (outputs.reductions, outputs.moments)
    own_loss = outputs.losses is not None and evaluation.loss is None
    return own_loss or any(wish is not None for wish in (*derivatives, *statistics))


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What does not depend on the parameters."""

    lowered: lowering.Differentiated
    row_loss: cpu_lower.Lowered
    """Instructions of the row loss, for losses that have no kernel of their own."""
    spans: NDArray[np.int64]
    """See `Work`, likewise the next."""
    cells: NDArray[np.int64]
    cost: int
    sizes: NDArray[np.int64]
    """Sums of each cell."""
    weighs_loss: bool
    """Whether each row loss counts w times."""


def make_plan(
    lower_both: LowerBoth, lower: Lower, dataset: Dataset, evaluation: Evaluation, wanted: Wanted
) -> Plan:
    """Lower a batch with its derivatives and cut the work."""
    batch, layout = evaluation.batch, dataset.layout
    wishes = wanted.wishes & ~backward_sweep.LOSS  # losses are computed apart, in float64
    lowered = lower_both(batch, _row_loss(layout, wanted), wishes)
    rows = evaluation.row_range(layout)
    sizes = _sum_sizes(lowered, batch, products=wanted.curvatures is not None)
    block = _BLOCK_BYTES // layout.dtype.itemsize
    spans = cut_rows(rows, block, max(1, _MOST_SUMS // max(1, int(sizes.sum()))))
    summaries = lowered.summaries
    lengths = summaries[:, INSTRUCTIONS_END] - summaries[:, INSTRUCTIONS_START]
    scalars = summaries[:, SCALARS]
    cells, cost = cut_cells(lengths, scalars, batch.vectors, rows, spans)
    loss = wanted.row_loss
    row_loss = no_row_loss()
    if loss is not None and not wanted.deviation:
        row_loss = lower(Batch.of([loss]))
    weighs_loss = loss is not None and not mentions_weight(loss)
    return Plan(lowered, row_loss, spans, cells, cost, sizes, weighs_loss)


def plan_needs(dataset: Dataset, evaluation: Evaluation, wanted: Wanted) -> tuple[Hashable, ...]:
    """What a plan depends on beside the programs."""
    wishes = (wanted.row_loss, wanted.wishes, wanted.curvatures is not None)
    return (evaluation.batch.vectors, evaluation.rows, dataset.layout, *wishes)


def prepare(
    compiled: Derivatives,
    plan: Plan,
    dataset: Dataset,
    evaluation: Evaluation,
    wanted: Wanted,
    cancelled: NDArray[np.uint8],
) -> Derivation:
    """Prepare the work of a plan for the parameters of an evaluation."""
    batch, layout, lowered, spans = evaluation.batch, dataset.layout, plan.lowered, plan.spans
    kernels = compiled.kernels[flavour_of(layout, evaluation.precision)]
    rows = evaluation.row_range(layout)
    block = _BLOCK_BYTES // layout.dtype.itemsize
    job = _job(dataset, evaluation, wanted, block)
    job[derivative_interpreter.WEIGHS_LOSS] = plan.weighs_loss
    job[derivative_interpreter.LOSS_SPAN], job[derivative_interpreter.LOSS_CELLS] = (
        span_rows(rows, block),
        len(plan.sizes),
    )
    is_weighted = layout.has_weights and plan.weighs_loss
    if wanted.deviation:
        job[interpreter.LOSS_KERNEL] = _loss_kernel(kernels, wanted.deviation, is_weighted)
    loss_spans = -(-(rows[1] - rows[0]) // span_rows(rows, block))
    sums = _Sums.of(plan.sizes, len(spans), loss_spans, wanted)
    parameters, starts = np.ascontiguousarray(batch.parameters), batch.parameter_starts

    given = (job, kernels.addresses, plan.cells, spans, parameters, starts, cancelled)
    results = (kernels.dots, sums.starts, sums.sums, sums.reductions, sums.moments)
    wide = compiled.kernels[_WIDE]
    has_program = len(plan.row_loss.summaries) > 0
    adds_losses = _loss_kernel(wide, "given", is_weighted) if has_program else 0
    row_loss = row_loss_arrays(wide.addresses, adds_losses, plan.row_loss)
    arrays: tuple[NDArray[Any], ...] = (*given, *lowered, *results, *row_loss, sums.losses)

    def finish() -> None:
        with np.errstate(all="ignore"):
            total = sums.sums.sum(axis=0) if len(sums.sums) > 1 else sums.sums[0]
        combine = (job, kernels.addresses, lowered, parameters, starts, sums.starts, total)
        _finish(compiled, combine, wanted, sums, rows[1] - rows[0])

    work = Work(compiled.linearise, arrays, plan.cells, spans, batch.vectors, plan.cost, cancelled)
    return Derivation(work, finish)


def _loss_kernel(kernels: Kernels, term: str, weighted: bool) -> int:
    return kernels.losses[f"{term}_weighted" if weighted else term]


def _row_loss(layout: Layout, wanted: Wanted) -> lowering.RowLoss:
    if wanted.row_loss is None or not wanted.wants_slopes:
        return lowering.no_row_loss()
    program = DIFFERENCE if wanted.is_squares else wanted.row_loss
    return lowering.row_loss_tokens(program, layout.variables, weighted=layout.has_weights)


def _job(dataset: Dataset, evaluation: Evaluation, wanted: Wanted, block: int) -> NDArray[np.int64]:
    job = np.zeros(derivative_interpreter.LONG_JOB_ENTRIES, dtype=np.int64)
    fill_job(job, dataset, evaluation, wanted.values, block)
    job[derivative_interpreter.WANTS_LOSS] = wanted.row_loss is not None
    job[derivative_interpreter.WANTS_SLOPES] = wanted.wants_slopes
    job[derivative_interpreter.WANTS_PRODUCTS] = wanted.curvatures is not None
    job[derivative_interpreter.IS_SQUARES] = wanted.is_squares
    job[derivative_interpreter.WANTS_REDUCTIONS] = wanted.reductions is not None
    job[derivative_interpreter.WANTS_MOMENTS] = wanted.moments is not None
    if wanted.jacobian is not None:
        job[derivative_interpreter.JACOBIAN] = wanted.jacobian.ctypes.data
    return job


@dataclass(frozen=True, slots=True, eq=False)
class _Sums:
    """What pieces add up, by span."""

    starts: NDArray[np.int64]
    """First sum of each cell, [cells + 1]."""
    sums: Floats
    """[spans, sums]."""
    reductions: Floats
    """[spans, cells, REDUCTIONS], or no cells."""
    moments: Floats
    """[spans, cells, MOMENTS], or no cells."""
    losses: Floats
    """[spans of the loss, cells], or no cells."""

    @classmethod
    def of(cls, sizes: NDArray[np.int64], spans: int, loss_spans: int, wanted: Wanted) -> _Sums:
        starts = np.concatenate([[0], np.cumsum(sizes)])
        cells = len(sizes)
        return cls(
            starts,
            np.zeros((spans, int(starts[-1]))),
            np.zeros((spans, cells if wanted.reductions is not None else 0, REDUCTIONS)),
            np.zeros((spans, cells if wanted.moments is not None else 0, MOMENTS)),
            np.zeros((loss_spans, cells if wanted.row_loss is not None else 0)),
        )


def _sum_sizes(
    lowered: lowering.Differentiated, batch: Batch, *, products: bool
) -> NDArray[np.int64]:
    """Count the sums of each cell."""
    summaries = lowered.summaries
    columns = summaries[:, lowering.COLUMNS_END] - summaries[:, backward_sweep.COLUMNS_START]
    return np.repeat(columns + columns * columns * products, batch.vectors)


def _finish(
    compiled: Derivatives, combine: tuple[Any, ...], wanted: Wanted, sums: _Sums, rows: int
) -> None:
    """Turn sums into what is wanted."""
    cells = len(sums.starts) - 1
    nothing, no_rows = np.empty(0), np.empty((0, 0))
    variables = wanted.variable_gradients
    for array in (wanted.gradients, variables, wanted.curvatures):
        if array is not None:
            array.fill(0.0)
    compiled.combine(
        *combine,
        nothing if wanted.gradients is None else wanted.gradients,
        no_rows if variables is None else variables.reshape(cells, -1),
        nothing if wanted.curvatures is None else wanted.curvatures,
        sums.moments,
    )
    if wanted.losses is not None:
        wanted.losses.reshape(-1)[:] = sum_spans(sums.losses)
    if wanted.reductions is not None:
        wanted.reductions.reshape(cells, -1)[:] = merge_reductions(sums.reductions, rows)
    if wanted.moments is not None:
        wanted.moments.reshape(cells, -1)[:] = from_zero(sums.moments[0])
