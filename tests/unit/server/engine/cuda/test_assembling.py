"""All CUDA sources compile, and their machine code assembles, for every architecture."""

from __future__ import annotations

import pytest

pytest.importorskip("cuda.bindings.nvrtc")
pytest.importorskip("cuda.bindings.nvjitlink")

from warpfit_server.engine.cuda.derivatives.source import derivative_source
from warpfit_server.engine.cuda.interpreter.source import (
    Variant,
    interpreter_source,
    lowering_source,
)
from warpfit_server.engine.cuda.jit.graph import graph_source
from warpfit_server.engine.interface import Arithmetic

FAST = Variant(Arithmetic.FAST, 4)
PRECISE = Variant(Arithmetic.PRECISE, 4)
DOUBLE = Variant(Arithmetic.DOUBLE, 2)
#: Those of derivatives take fewer rows.
FAST_DERIVATIVES = Variant(Arithmetic.FAST, 2)
PRECISE_DERIVATIVES = Variant(Arithmetic.PRECISE, 2)
DOUBLE_DERIVATIVES = Variant(Arithmetic.DOUBLE, 1)
#: The interpreter's variant or that of derivatives, and whether these spill, by architecture; few
#: rows a thread assemble sooner.
INTERPRETED = {75: DOUBLE, 86: PRECISE, 89: FAST, 100: FAST}
DIFFERENTIATED = {
    **{80: (PRECISE_DERIVATIVES, True), 90: (FAST_DERIVATIVES, True)},
    **{120: (DOUBLE_DERIVATIVES, False)},
}


#: Each kind of kernel once.
USUAL = (75, 86, 90)
FURTHER = sorted({*INTERPRETED, *DIFFERENTIATED} - {*USUAL})


@pytest.mark.parametrize(
    "architecture", [*USUAL, *(pytest.param(one, marks=pytest.mark.thorough) for one in FURTHER)]
)
def test_kernels_assemble(architecture):
    sources = [
        (lowering_source(), ("lower_programs", "order_programs")),
        (graph_source(), ("sum_partials", "copy_inputs")),
    ]
    if architecture in INTERPRETED:
        kernels = ("interpret", "evaluate_slots", "sum_partials")
        sources.append((interpreter_source(INTERPRETED[architecture]), kernels))
    if architecture in DIFFERENTIATED:
        variant, spills = DIFFERENTIATED[architecture]
        kernels = ("linearise", "evaluate_invariants", "combine", "measure")
        sources.append((derivative_source(variant, spills=spills), kernels))
    for source, kernels in sources:
        cubin = source.compile(architecture)
        assert cubin.startswith(b"\x7fELF")
        assert all(kernel.encode() in cubin for kernel in kernels)
