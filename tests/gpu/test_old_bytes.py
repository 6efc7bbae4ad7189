"""What device and pinned memory held before does not show in any answer.

The same work is done on fresh engines whose memory is filled with one pattern, then with another,
before anything is computed. Whatever reads a byte that it has not written gives another answer.
"""

from __future__ import annotations

import gc
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from support.engines.fits import fit
from support.engines.gradients import ask, derive, linearise
from support.engines.references import Evaluate
from support.random_programs import thesis_mix
from support.suites.derivatives import make_dataset, smooth_programs
from warpfit.ir import Batch
from warpfit.losses import SQUARES
from warpfit.request import Evaluation, Loss, Precision, Tier
from warpfit_server.engine.cuda.engine import CudaEngine

#: As float32 1.5e16 and as float64 1.8e127, which no sum of an answer hides; and NaN.
PATTERNS = (0x5A, 0xFF)
#: Rows that fill no tile, one of them more than a tile of every kernel.
ROWS = (1, 33, 6145)
#: Bytes of device memory that each stream finds filled.
_DEVICE_BYTES = 256 << 20


def fill(engine: CudaEngine, pattern: int) -> None:
    """Fill with a pattern the memory that the engine's next streams will be given."""
    device = engine._device
    for loading in (engine._warming, engine._derivatives):  # they would use the memory meanwhile
        loading.result()
    gc.collect()
    device.trim()
    device._idle.clear()  # new streams find nothing that these have kept
    device.cupy.get_default_pinned_memory_pool().free_all_blocks()
    runtime, pinned = device.cupy.cuda.runtime, device.cupy.cuda.alloc_pinned_memory
    held = [pinned(1 << power) for power in range(9, 25) for _ in range(3)]
    for block in held:
        np.frombuffer(block, np.uint8)[:] = pattern
    del block, held
    pieces = []  # of device memory that warming up has left
    for size in (1 << power for power in range(21, 8, -1) for _ in range(16)):
        pieces.append(device.allocate(size))
        runtime.memset(pieces[-1].ptr, pattern, size)
    del pieces
    with ExitStack() as streams:
        for _ in range(4):  # work that comes one after the other takes fewer
            context = streams.enter_context(device.stream())
            memory = device.allocate(_DEVICE_BYTES)
            runtime.memsetAsync(memory.ptr, pattern, _DEVICE_BYTES, context.stream.ptr)
            context.stream.synchronize()
            del memory


def check(engine: CudaEngine, pattern: int, size: int = 1 << 20) -> None:
    """Check what newly allocated memory holds, else the tests would prove nothing."""
    device = engine._device
    with device.stream() as context:
        target = context.pinned("target of a test", size)
        assert (target == pattern).all(), "pinned memory"
        context.download_rows(target[np.newaxis], device.allocate(size).ptr, size)
        context.stream.synchronize()
        assert (target == pattern).all(), "device memory"


def plain(engine: CudaEngine, rows: int, dtype: str) -> dict[str, Any]:
    """Values and losses of both tiers, of a whole data set and of a part of its rows."""
    data = make_dataset(rows, dtype, weights=True)
    batch = thesis_mix(5, 40, variables=data.layout.variables)
    evaluate, answers = Evaluate(engine), {}
    for tier in (Tier.INTERPRETER, Tier.COMPILED):
        for precision in Precision:
            options = {"tier": tier, "precision": precision, "rows": (rows // 3, rows)}
            name = f"{tier.name} {precision.name}"
            for values, loss in ((True, None), (False, Loss.MSE), (True, Loss.R2)):
                got = evaluate(data, *batch, values=values, loss=loss, **options)
                answers[f"{name} values, {values} {loss}"] = got.values
                answers[f"{name} losses, {values} {loss}"] = got.losses
            options |= {"loss": Loss.MSE, "gradient": True, "values": False}
            asked = Evaluation(data.content_id, Batch.of(*batch), **options)
            answers[f"{name} gradient"] = ask(engine, data, asked).gradients
    evaluate.unload()
    return answers


def derived(engine: CudaEngine, rows: int, dtype: str) -> dict[str, Any]:
    """Derivatives, statistics, normal matrices and fits."""
    data = make_dataset(rows, dtype, weights=True)
    got = derive(engine, data, *smooth_programs(), row_loss=SQUARES, statistics=True)
    names = "values losses gradients jacobian variable_gradients reductions moments"
    answers = {name: getattr(got, name) for name in names.split()}
    system = linearise(engine, data, *smooth_programs(), SQUARES)
    answers |= {f"linearise {x}": getattr(system, x) for x in ("losses", "gradients", "curvatures")}
    texts, starts = ["p1 * exp(-p2 * x1) + p3", "p1 * x2 + p2"], [[0.7, 1.3, -0.4], [0.5, 0.1]]
    for method in ("lm", "bfgs"):
        fitted = fit(data, texts, starts, engine=engine, method=method, max_iterations=8)
        answers[f"{method} loss"] = fitted.loss
        answers[f"{method} parameters"] = np.concatenate(fitted.parameters)
    engine.unload(data.content_id)
    return answers


@pytest.fixture(scope="module")
def answers(engine):
    """By pattern, what a fresh engine whose memory was full of it has answered."""
    found = {}
    for pattern in PATTERNS:
        fresh = CudaEngine()
        fill(fresh, pattern)
        check(fresh, pattern)
        fill(fresh, pattern)
        found[pattern] = {
            f"{rows} {dtype} {name}": answer
            for rows in ROWS
            for dtype in ("float32", "float64")
            for work in (plain, derived)
            for name, answer in work(fresh, rows, dtype).items()
            if answer is not None
        }
        fresh.close()
    return found


def test_answers_do_not_depend_on_it(answers):
    one, other = answers.values()
    assert len(one) > 100
    different = [name for name, answer in one.items() if answer.tobytes() != other[name].tobytes()]
    assert not different


def test_no_answer_contains_it(answers):
    for name, answer in answers[PATTERNS[0]].items():
        word = np.frombuffer(bytes([PATTERNS[0]]) * answer.itemsize, answer.dtype)[0]
        assert not (answer == word).any(), name
