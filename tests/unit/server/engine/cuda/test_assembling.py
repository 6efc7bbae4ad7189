"""All CUDA sources compile, and their machine code assembles, for every architecture."""

from __future__ import annotations

import pytest

pytest.importorskip("cuda.bindings.nvrtc")
pytest.importorskip("cuda.bindings.nvjitlink")

from warpfit_server.engine.cuda.derivatives.tier import derivative_switch
from warpfit_server.engine.cuda.interpreter import device_lowering
from warpfit_server.engine.cuda.interpreter.source import Variant
from warpfit_server.engine.cuda.interpreter.tier import interpreter_switch
from warpfit_server.engine.cuda.math.modes import Mode

FAST = Variant(Mode.FAST, 4)
PRECISE = Variant(Mode.PRECISE, 4)
DOUBLE = Variant(Mode.DOUBLE, 2)
#: The interpreter's variant, and that of derivatives and whether it spills, by architecture; few
#: rows a thread assemble sooner.
VARIANTS = {
    75: (DOUBLE, FAST, False),
    80: (FAST, PRECISE, True),
    86: (PRECISE, FAST, False),
    89: (FAST, FAST, False),
    90: (PRECISE, FAST, True),
    100: (FAST, FAST, False),
    120: (FAST, DOUBLE, False),
}


@pytest.mark.parametrize("architecture", VARIANTS)
def test_kernels_assemble(architecture):
    interpreted, differentiated, spills = VARIANTS[architecture]
    sources = [
        (interpreter_switch(interpreted), ("interpret", "evaluate_slots", "sum_partials")),
        (device_lowering.lowering_source(), ("lower_programs", "order_programs")),
    ]
    kernels = ("linearise", "evaluate_scalars", "combine", "measure")
    sources.append((derivative_switch(differentiated, spills=spills), kernels))
    for source, kernels in sources:
        cubin = source.compile(architecture)
        assert cubin.startswith(b"\x7fELF")
        assert all(kernel.encode() in cubin for kernel in kernels)
