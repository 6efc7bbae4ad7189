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
from warpfit_server.engine.cpu.sum_tree import sum_nodes
from warpfit_server.engine.cuda.runtime.resident_data import (
    ResidentDataset,
    check_cancelled,
    cut_rows,
)
from warpfit_server.engine.cuda.runtime.streamed_data import ALIGNED_ROWS, StreamedDataset
from warpfit_server.engine.interface import Outputs, Steps

#: Part of the device's memory that the values of a window may take, and their most bytes.
_VALUES_SHARE: Final = 1 / 8
_MOST_VALUE_BYTES: Final = 64 << 20
#: Outputs that are sums over rows.
_SUMS: Final = ("losses", "gradients")


def evaluate_on(
    tier: Any, resident: ResidentDataset, evaluation: Evaluation, outputs: Outputs, *plan: Any
) -> Steps[Timings]:
    """Evaluate by a tier, window by window if the data set is streamed.

    Args:
        tier: the interpreter or the compiled tier.
        resident: the data set.
        evaluation: what is wanted.
        outputs: to fill.
        plan: more arguments of the tier.

    """
    if not isinstance(resident, StreamedDataset):
        timings: Timings = yield from tier.evaluate(resident, evaluation, outputs, *plan)
        return timings
    start, stop = evaluation.row_range(resident.dataset.layout)
    length = _rows_of_window(resident, outputs)
    spans, timings, parts = cut_rows((start, stop), length), Timings(), []
    with (yield from resident.turn()), closing(resident.windows(spans)) as windows:
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


def _rows_of_window(streamed: StreamedDataset, outputs: Outputs) -> int:
    """Return the most rows of a window; fewer than it has room for if there are many values."""
    if outputs.values is None:
        return streamed.window_rows
    programs, vectors, _ = outputs.values.shape
    memory = min(_MOST_VALUE_BYTES, int(streamed.memory * _VALUES_SHARE))
    most = memory // (programs * vectors * outputs.values.itemsize)
    return int(min(streamed.window_rows, 1 << (max(most, ALIGNED_ROWS).bit_length() - 1)))


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
