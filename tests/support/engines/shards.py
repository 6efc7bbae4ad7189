"""Evaluations of which several engines have some rows each, without servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.engines.derivatives import outputs_for
from warpfit.dataset import Dataset
from warpfit.losses import SQUARES, LossFunction, huber
from warpfit.request import Evaluation, Loss
from warpfit_server.engine.interface import Engine, run_to_end
from warpfit_server.row_blocks import Shards

#: What evaluations ask for: every way in which engines compute outputs.
REQUESTS: dict[str, dict[str, Any]] = {
    "values": {"values": True},
    "loss": {"loss": Loss.MAE},
    "loss and values": {"loss": Loss.MSE, "values": True},
    "gradient": {"loss": Loss.MSE, "gradient": True},
    "jacobian": {"jacobian": True},
    "sums": {
        **{"custom_loss": LossFunction(huber(0.5).row, "sum"), "gradient": True},
        **{"variable_gradient": True, "reductions": True, "correlation": True},
    },
}
REQUESTS["all"] = REQUESTS["sums"] | {"values": True, "jacobian": True}


class _Shard:
    """Keeps the nodes of a part, or adds them to those of the other parts."""

    def __init__(self, shards: Shards, rows: tuple[int, int], others: list[Any] | None) -> None:
        self.rows, self.level = rows, shards.level
        self._others = others
        self._width: int | None = None
        self.nodes: Any = None

    def begin(self, width: int) -> None:
        assert self._width is None
        self._width = width

    def join(self, nodes: Any) -> Any:
        assert nodes.shape[1] == self._width
        self.nodes = nodes.copy()
        yield None
        return None if self._others is None else np.concatenate([nodes, *self._others])


def joined(
    engines: Sequence[Engine],
    dataset: Dataset,
    shards: Shards,
    rows: tuple[int, int],
    run: Callable[[Engine, tuple[int, int], Any], Any],
) -> dict[tuple[int, int], Any]:
    """Have each engine run its part with a shard, the one that leads last; return the results."""
    parts = list(shards.parts(rows).items())
    found: dict[tuple[int, int], Any] = {}
    nodes: list[Any] = []
    for place, (number, part) in reversed(list(enumerate(parts))):
        engine = engines[number]
        engine.load(dataset, shards.parts((0, dataset.layout.rows))[number])
        shard = _Shard(shards, rows, None if place else nodes)
        found[part] = run(engine, part, shard)
        engine.unload(dataset.content_id)
        nodes.insert(0, shard.nodes)
    return dict(sorted(found.items()))


def bits(array: NDArray[Any]) -> NDArray[Any]:
    """The bits of an array, in which one NaN differs from another."""
    return np.ascontiguousarray(array).view(f"u{array.itemsize}")


def check_evaluation(
    engines: Sequence[Engine], dataset: Dataset, shards: Shards, evaluation: Evaluation
) -> None:
    """Check that all outputs have the bits of those of the first engine alone."""
    rows = evaluation.row_range(dataset.layout)
    engines[0].load(dataset)
    whole = outputs_for(evaluation, dataset.layout)
    run_to_end(engines[0].evaluate(evaluation, whole))
    engines[0].unload(dataset.content_id)

    def run(engine: Engine, part: tuple[int, int], shard: Any) -> Any:
        own = replace(evaluation, rows=part)
        outputs = replace(outputs_for(own, dataset.layout), shard=shard)
        run_to_end(engine.evaluate(own, outputs))
        return outputs

    found = list(joined(engines, dataset, shards, rows, run).values())
    for field in fields(whole):
        expected = getattr(whole, field.name)
        if isinstance(expected, np.ndarray):
            got = getattr(found[0], field.name)
            if field.name in ("values", "jacobian"):
                got = np.concatenate([getattr(each, field.name) for each in found], axis=-1)
            np.testing.assert_array_equal(bits(got), bits(expected), err_msg=field.name)


def check_pass(
    engines: Sequence[Engine], dataset: Dataset, shards: Shards, evaluation: Evaluation
) -> None:
    """Check that a pass of a fit has the bits of one by the first engine alone."""
    rows, flag = evaluation.row_range(dataset.layout), np.zeros(1, np.uint8)

    def run(engine: Engine, part: tuple[int, int], shard: Any) -> Any:
        own = replace(evaluation, rows=part)
        return run_to_end(
            engine.linearise(own, SQUARES, curvature=True, cancelled=flag, shard=shard)
        )

    engines[0].load(dataset)
    whole = run(engines[0], rows, None)
    engines[0].unload(dataset.content_id)
    found = next(iter(joined(engines, dataset, shards, rows, run).values()))
    for field in fields(whole):
        got, expected = getattr(found, field.name), getattr(whole, field.name)
        np.testing.assert_array_equal(bits(got), bits(expected), err_msg=field.name)
