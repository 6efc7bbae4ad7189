"""Precise mode's float32 functions on a device: all operands, or very many pairs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from warpfit.request import Precision
from warpfit_server.engine.cuda import nvrtc
from warpfit_server.engine.cuda.prelude import compiler_options, prelude

#: Function, the same in float64, whether of pairs, and the largest error in ulp.
FUNCTIONS = {
    "log": ("logarithm(a)", "log((double)a)", False, 2.0),
    "exp": ("exponential(a)", "exp((double)a)", False, 2.0),
    "sqrt": ("root(a)", "sqrt((double)a)", False, 1.0),
    "inv": ("quotient(1.0f, a)", "1.0 / (double)a", False, 0.501),
    "div": ("quotient(a, b)", "(double)a / (double)b", True, 0.501),
    "pow": ("power(a, b)", "pow((double)a, (double)b)", True, 4.0),
}
BLOCKS, THREADS = 1024, 256


@pytest.mark.parametrize("name", FUNCTIONS)
def test_errors_stay_within_their_bounds(engine, name):
    cupy = pytest.importorskip("cupy")
    function, exact, pairs, bound = FUNCTIONS[name]
    precision = (np.float32, Precision.PRECISE)
    source = (
        f"#define FUNCTION {function}\n#define EXACT {exact}\n"
        + prelude(*precision)
        + (Path(__file__).parent / "precise_errors.cu").read_text()
    )
    capability = int(cupy.cuda.Device().compute_capability)
    options = ("--std=c++17", *compiler_options(*precision))
    module = cupy.cuda.function.Module()
    module.load(nvrtc.to_cubin(source, capability, options))
    worst, wrong = (cupy.zeros(1, dtype=np.uint64) for _ in range(2))
    count = 1 << (30 if pairs else 32)
    arguments = (np.uint64(count), np.int32(pairs), worst, wrong)
    module.get_function("errors")((BLOCKS, 1, 1), (THREADS, 1, 1), arguments)
    assert int(wrong[0]) == 0
    assert 0 < float(worst.view(np.float64)[0]) <= bound
