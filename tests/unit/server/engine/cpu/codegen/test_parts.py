"""The CPU engine's compiled code, which is loaded in the background but for values."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from warpfit.dataset import Dataset
from warpfit.errors import ResourceExhaustedError
from warpfit.ir import Batch, Program
from warpfit.request import Evaluation, Loss
from warpfit_server.engine.cpu.codegen import parts
from warpfit_server.engine.cpu.engine import CpuEngine
from warpfit_server.engine.interface import Outputs, run_to_end

X1, P1 = Program.variable(0), Program.parameter(0)
DATA = Dataset.of(np.linspace(0.1, 3, 100)[:, None], np.ones(100), dtype="float64")
BATCH = Batch.of([Program.apply("mul", X1, P1)], [np.array([2.0])])
EVALUATION = Evaluation(DATA.content_id, BATCH, loss=Loss.MSE, values=False, gradient=True)


def outputs():
    """Arrays for the loss and its gradient."""
    loss, gradient = np.empty((1, 1)), np.empty(1)
    return Outputs(None, loss, np.zeros(1, np.uint8), lambda _: None, gradients=gradient)


def test_values_do_not_wait_for_the_code_of_derivatives(monkeypatch):
    """At a first start it is compiled when the engine serves already."""
    load, is_compiled = parts.load_derivatives, threading.Event()

    def load_later(*arguments):
        assert is_compiled.wait(60)
        return load(*arguments)

    monkeypatch.setattr(parts, "load_derivatives", load_later)
    engine = CpuEngine(1)
    engine.load(DATA)
    derived, plain = outputs(), replace(outputs(), gradients=None)
    steps = engine.evaluate(EVALUATION, derived)
    waits_for = next(steps)
    assert not waits_for.done()
    run_to_end(engine.evaluate(replace(EVALUATION, gradient=False), plain))
    is_compiled.set()
    waits_for.result(60)
    run_to_end(steps)
    np.testing.assert_allclose(derived.losses, plain.losses, rtol=1e-12)
    x = DATA.variables[0]
    np.testing.assert_allclose(derived.gradients, [np.sum(2 * (2 * x - 1) * x)], rtol=1e-12)
    engine.close()


def test_code_of_derivatives_that_failed_to_load_is_loaded_again(monkeypatch):
    """A short lack of memory does not end all gradients and fits of the engine."""
    load, failures = parts.load_derivatives, [MemoryError()]
    somebody_waits = threading.Event()

    def fails_once(*arguments):
        if failures:
            assert somebody_waits.wait(30)
            raise failures.pop()
        return load(*arguments)

    monkeypatch.setattr(parts, "load_derivatives", fails_once)
    engine = CpuEngine(1)
    engine.load(DATA)
    waiting = engine.evaluate(EVALUATION, outputs())
    next(waiting)
    somebody_waits.set()
    with pytest.raises(ResourceExhaustedError):
        run_to_end(waiting)
    run_to_end(engine.evaluate(EVALUATION, outputs()))
    engine.close()
