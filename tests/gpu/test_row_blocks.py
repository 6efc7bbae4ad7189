"""The bits of sums over rows on a device: the rows say them, and nothing else has a say."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from support.engines.gradients import derive, linearise
from support.random_programs import thesis_mix
from support.suites.derivatives import make_dataset, smooth_programs
from warpfit.dataset import Dataset
from warpfit.losses import ABSOLUTE, SQUARES
from warpfit.request import Loss, Precision, Tier
from warpfit_server.engine.cuda.interpreter import tier as interpreter
from warpfit_server.engine.cuda.interpreter.launches import Variant
from warpfit_server.engine.cuda.jit.kernel_store import KernelPlan
from warpfit_server.engine.cuda.runtime import device
from warpfit_server.engine.cuda.runtime.device import CudaDevice
from warpfit_server.engine.interface import Arithmetic
from warpfit_server.engine.sum_tree import sum_nodes

ROWS = 70_001
#: Rows of nodes of the tree of sums.
NODES = (4096, 16384)
MODES = [(np.float32, each) for each in Precision] + [(np.float64, Precision.PRECISE)]
SPANS = [None, (517, 66_000)]


def mixed_data(dtype, *, weights: bool = False) -> Dataset:
    rng = np.random.default_rng(11)
    columns, target = rng.uniform(0.5, 2, size=(ROWS, 10)), rng.normal(size=ROWS)
    return Dataset.of(columns, target, rng.uniform(size=ROWS) if weights else None, dtype=dtype)


def node_ranges(rows: tuple[int, int], length: int) -> list[tuple[int, int]]:
    start, stop = rows
    return list(pairwise([start, *range((start // length + 1) * length, stop, length), stop]))


@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize(("dtype", "precision"), MODES)
def test_interpreted_losses_do_not_depend_on_threads(
    evaluate, monkeypatch, dtype, precision, weights, span
):
    dataset, (programs, vectors) = mixed_data(dtype, weights=weights), thesis_mix(3, 40)
    options = {"precision": precision, "tier": Tier.INTERPRETER, "rows": span, "values": False}
    arithmetic, tier = Arithmetic.of(np.dtype(dtype), precision), evaluate.engine._interpreter
    layouts = [(16, 32 << 20, 2), (32, 32 << 20, 2), (16, 40_000, 1)]
    layouts += [(64, 32 << 20, 2)] if arithmetic.is_fast else []
    for loss in (Loss.SSE, Loss.MAE):
        whole = evaluate(dataset, programs, vectors, loss=loss, **options).losses
        for row_bytes, chunk_bytes, warps in layouts:
            variant = Variant.of(arithmetic, row_bytes)
            kernels = tier.prepare(variant)
            record = kernels.record.copy()
            record["max_warps"] = warps
            with monkeypatch.context() as patch:
                patch.setitem(interpreter._VARIANTS_OF, arithmetic, (variant, variant))
                patch.setattr(interpreter, "_CHUNK_BYTES", chunk_bytes)
                patch.setitem(tier._kernels, variant, replace(kernels, record=record))
                got = evaluate(dataset, programs, vectors, loss=loss, **options).losses
            np.testing.assert_array_equal(got, whole)
        with monkeypatch.context() as patch:  # piece by piece, as large work goes to the device
            few = device.LaunchWork(1_000_000, 500_000, 1_000_000)
            patch.setitem(device.LAUNCH_WORK, arithmetic, few)
            got = evaluate(dataset, programs, vectors, loss=loss, **options).losses
            np.testing.assert_array_equal(got, whole)
        alone = [
            evaluate(dataset, [program], [vector], loss=loss, **options).losses[0]
            for program, vector in zip(programs[:5], vectors[:5], strict=True)
        ]
        np.testing.assert_array_equal(alone, whole[:5])


@pytest.mark.parametrize("length", [512, *NODES])
@pytest.mark.parametrize(("dtype", "precision"), MODES)
def test_interpreted_losses_are_sums_of_nodes(evaluate, dtype, precision, length):
    dataset, batch, rows = mixed_data(dtype), thesis_mix(3, 20), (1000, 60_001)
    options = {"precision": precision, "tier": Tier.INTERPRETER, "values": False, "loss": Loss.SSE}

    def sums(part) -> np.ndarray:
        return evaluate(dataset, *batch, rows=part, **options).losses[:, 0]

    parts = np.stack([sums(part) for part in node_ranges(rows, length)])
    np.testing.assert_array_equal(sum_nodes(parts, rows[0] // length), sums(rows))


@pytest.mark.parametrize(("dtype", "precision"), MODES)
def test_compiled_losses_do_not_depend_on_blocks_or_launches(
    evaluate, monkeypatch, dtype, precision
):
    dataset, batch = mixed_data(dtype, weights=True), thesis_mix(3, 100)
    options = {"precision": precision, "loss": Loss.SSE, "tier": Tier.COMPILED, "values": False}

    def losses(rows) -> np.ndarray:
        return evaluate(dataset, *batch, rows=rows, **options).losses

    wholes = [losses(rows) for rows in SPANS]
    for blocks in (1, 3, 1000):
        monkeypatch.setattr(
            KernelPlan, "blocks",
            lambda self, _, most, __, n=blocks: (min(n, most),) * len(self.keys),
        )  # fmt: skip
        for rows, whole in zip(SPANS, wholes, strict=True):
            np.testing.assert_array_equal(losses(rows), whole)
    arithmetic = Arithmetic.of(np.dtype(dtype), precision)
    monkeypatch.setitem(device.LAUNCH_WORK, arithmetic, device.LaunchWork(1, 1, 1))
    monkeypatch.setattr("warpfit_server.engine.cuda.jit.tier._MIN_ROWS", 4096)
    for rows, whole in [*zip(SPANS, wholes, strict=True)] * 2:
        np.testing.assert_array_equal(losses(rows), whole)


def sums_of_passes(engine, dtype, precision, rows, count=None) -> np.ndarray:
    """Sums over rows of the passes of a fit, and of an evaluation for statistics."""
    data = make_dataset(ROWS, np.dtype(dtype).name, weights=True)
    batch, options = [each[:count] for each in smooth_programs()], {"rows": rows}
    options["precision"], first = precision, len(batch[1][0])
    passed = linearise(engine, data, *batch, SQUARES, **options)
    derived = derive(engine, data, *batch, row_loss=ABSOLUTE, statistics=True, **options)
    found = [passed.curvatures[: first * (first + 1) // 2]]
    for outputs in (passed, derived):
        found += [outputs.losses[:1], outputs.gradients[:first]]
    found += [derived.variable_gradients[:1], derived.reductions[:1], derived.moments[:1]]
    return np.concatenate([np.ravel(each) for each in found])


@pytest.mark.parametrize("rows", SPANS)
@pytest.mark.parametrize(("dtype", "precision"), MODES)
def test_derivatives_do_not_depend_on_shared_memory(engine, monkeypatch, dtype, precision, rows):
    whole = sums_of_passes(engine, dtype, precision, rows)
    np.testing.assert_array_equal(sums_of_passes(engine, dtype, precision, rows, 1), whole)
    monkeypatch.setattr("warpfit_server.engine.cuda.derivatives.launches._CHUNK_BYTES", 1 << 20)
    np.testing.assert_array_equal(sums_of_passes(engine, dtype, precision, rows), whole)
    given = CudaDevice.shared_bytes
    for size in (0, 30_000):
        monkeypatch.setattr(
            CudaDevice, "shared_bytes",
            lambda self, blocks, size=size: given(self, 1) if blocks == 1 else size,
        )  # fmt: skip
        np.testing.assert_array_equal(sums_of_passes(engine, dtype, precision, rows), whole)


@pytest.mark.parametrize("length", NODES)
@pytest.mark.parametrize(("dtype", "precision"), MODES)
def test_linearised_sums_are_sums_of_nodes(engine, dtype, precision, length):
    data, rows = make_dataset(ROWS, np.dtype(dtype).name, weights=True), (1000, 60_001)

    def sums(part: tuple[int, int]) -> np.ndarray:
        found = linearise(engine, data, *smooth_programs(), SQUARES, rows=part, precision=precision)
        return found.losses[:, 0]

    parts = np.stack([sums(part) for part in node_ranges(rows, length)])
    np.testing.assert_array_equal(sum_nodes(parts, rows[0] // length), sums(rows))
