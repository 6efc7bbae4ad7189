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
#: rows a thread assemble sooner. Each variant is compiled, and each architecture has each source.
VARIANTS = {
    75: (DOUBLE, FAST, False),
    80: (FAST, PRECISE, True),
    86: (PRECISE, FAST, True),
    89: (FAST, FAST, False),
    90: (PRECISE, PRECISE, False),
    100: (FAST, FAST, True),
    120: (FAST, DOUBLE, False),
}


@pytest.mark.parametrize("architecture", VARIANTS)
def test_kernels_assemble(architecture):
    interpreted, differentiated, spills = VARIANTS[architecture]
    cubins = {
        interpreter_switch(interpreted).compile(architecture): (
            *("interpret", "evaluate_slots", "sum_partials"),
        ),
        derivative_switch(differentiated, spills=spills).compile(architecture): (
            *("linearise", "evaluate_scalars", "combine", "measure"),
        ),
        device_lowering.lowering_source().compile(architecture): (
            "lower_programs",
            "order_programs",
        ),
    }
    for cubin, kernels in cubins.items():
        assert cubin.startswith(b"\x7fELF")
        assert all(kernel.encode() in cubin for kernel in kernels)
