"""Kernels of partial derivatives, generated from the operator table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from warpfit_server.engine.autodiff.rules import PartialKernel
from warpfit_server.engine.cpu.codegen.kernels import Body, Flavour, compile_kernel
from warpfit_server.engine.cpu.codegen.vector import Trace, Vector

#: Name of the kernel that multiplies slope and partial.
PRODUCT: Final = "product"


def partial_body(partial: PartialKernel, flavour: Flavour) -> Body:
    """Make the code of a partial derivative, alone or times a slope.

    It computes in the data's type even where the operator itself takes more digits: errors of
    derivatives do not build up as those of values do.
    """
    compute = compile_kernel(partial.source, flavour, widens=False)
    if not partial.scaled:
        return compute

    def scaled(trace: Trace, operands: Sequence[Vector]) -> Vector:
        return product(operands[0], compute(trace, operands[1:]))

    return scaled


def product(slope: Vector, partial: Vector) -> Vector:
    """Multiply two factors of the chain rule: 0 if one of them is."""
    passes = (slope != 0) & (partial != 0)
    return slope.trace.select(passes, slope * partial, 0.0)
