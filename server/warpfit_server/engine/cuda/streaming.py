"""Losses, gradients and values of data sets that pass through the device in windows of rows.

The tiers evaluate each window like a data set of its own; see `runtime.streamed_data`. Sums of
which more than sums is made, such as derivatives, are put together by `derivatives.tier` itself.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any, Final

import numpy as np

from warpfit.request import Evaluation, Timings
from warpfit_server.engine.cuda.runtime.resident_data import (
    ResidentDataset,
    check_cancelled,
    cut_rows,
)
from warpfit_server.engine.cuda.runtime.streamed_data import ALIGNED_ROWS
from warpfit_server.engine.interface import Outputs, Steps
from warpfit_server.engine.sum_tree import sum_nodes

#: Outputs that are sums over rows.
_SUMS: Final = ("losses", "gradients")


def evaluate_on(
    tier: Any,
    resident: ResidentDataset,
    evaluation: Evaluation,
    outputs: Outputs,
    value_bytes: int,
    *plan: Any,
) -> Steps[Timings]:
    """Evaluate by a tier, by windows if the rows or their values do not fit on the device.

    Args:
        tier: the interpreter or the compiled tier.
        resident: the data set.
        evaluation: what is wanted.
        outputs: to fill.
        value_bytes: most bytes of values, unless those of fewer rows than a block has are more.
        plan: more arguments of the tier.

    """
    start, stop = evaluation.row_range(resident.dataset.layout)
    jobs = len(evaluation.batch) * evaluation.batch.vectors
    # A tier takes the jobs of a resident data set one after the other if it must.
    if not resident.is_streamed and stop - start <= _most_rows(resident, outputs, value_bytes, 1):
        timings: Timings = yield from tier.evaluate(resident, evaluation, outputs, *plan)
        return timings
    length = _most_rows(resident, outputs, value_bytes, jobs)
    spans, timings, parts = cut_rows((start, stop), length), Timings(), []
    with (yield from resident.turn(outputs.cancelled)), closing(resident.windows(spans)) as windows:
        for window, span in windows:
            check_cancelled(outputs.cancelled)
            part = _outputs_of_window(outputs, span[1] - span[0])
            own = replace(evaluation, rows=span)
            timings = _add(timings, (yield from tier.evaluate(window, own, part, *plan)))
            if outputs.values is not None:
                outputs.values[..., span[0] - start : span[1] - start] = part.values
            parts.append(part)
            yield None
    for name in _SUMS:
        if (whole := getattr(outputs, name)) is not None:
            nodes = np.stack([getattr(part, name).reshape(-1) for part in parts])
            whole[...] = sum_nodes(nodes, start // length).reshape(whole.shape)
    outputs.ready(len(evaluation.batch))
    return timings


def _most_rows(resident: ResidentDataset, outputs: Outputs, value_bytes: int, jobs: int) -> int:
    """Return the most rows of a window, a power of two, if it has the values of so many jobs."""
    if outputs.values is None:
        return resident.window_rows
    most = max(value_bytes // (jobs * outputs.values.itemsize), ALIGNED_ROWS)
    return int(min(resident.window_rows, 1 << (most.bit_length() - 1)))


def _outputs_of_window(outputs: Outputs, rows: int) -> Outputs:
    """Allocate outputs for a window, without values if none are wanted."""
    values = outputs.values
    return replace(
        outputs,
        values=None if values is None else np.empty((*values.shape[:2], rows), values.dtype),
        losses=None if outputs.losses is None else np.empty_like(outputs.losses),
        gradients=None if outputs.gradients is None else np.empty_like(outputs.gradients),
        ready=lambda programs: None,
    )


def _add(one: Timings, other: Timings) -> Timings:
    stages = ("copy_in", "compute", "copy_out")
    return replace(other, **{name: getattr(one, name) + getattr(other, name) for name in stages})
