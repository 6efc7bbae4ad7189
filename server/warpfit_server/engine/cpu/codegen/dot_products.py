"""Kernels that add up products of columns in float64: small tiles of a matrix product.

The simple form of a kernel of shape (h, v), for ``n`` rows, is

    for i in range(h):
        for j in range(v):
            sums[i * pitch + j] += sum(w[:n] * left[i][:n] * right[j][:n])

It is a C function

    void dots(double *sums, int64 pitch, void **left, void **right, const void *w, int64 n)

in which ``left`` and ``right`` are arrays of addresses of columns, and ``w`` is not read by the
form without weights. Each lane adds its own rows and the lanes are added pairwise, so that a block
of n rows has rounding errors of about n / lanes additions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from llvmlite import ir

from warpfit_server.engine.cpu.codegen.kernels import (
    DOUBLE,
    I64,
    POINTER,
    WIDTH,
    Flavour,
    RowLoop,
    integer,
    sum_lanes,
    symbol,
)
from warpfit_server.engine.cpu.codegen.vector import Vector

#: Columns of a tile, at most: 9 sums and 6 columns of 16 float64 lanes fit AVX-512's registers.
LARGEST_TILE: Final = 3


@dataclass(frozen=True, slots=True)
class DotShape:
    """Which columns a kernel multiplies."""

    height: int
    width: int
    weighted: bool

    @property
    def name(self) -> str:
        """Name in the object file."""
        return f"dots_{self.height}_{self.width}" + ("_weighted" if self.weighted else "")


_SIDES: Final = range(1, LARGEST_TILE + 1)
#: Without weights first, then by height, then by width; compiled code counts on it.
DOT_SHAPES: Final = tuple(DotShape(h, v, w) for w in (False, True) for h in _SIDES for v in _SIDES)


def dots_kernel(module: ir.Module, shape: DotShape, flavour: Flavour) -> None:
    """Add one kernel."""
    kind = ir.FunctionType(ir.VoidType(), [POINTER, I64, POINTER, POINTER, POINTER, I64])
    function = ir.Function(module, kind, symbol(shape.name))
    sums, pitch, left, right, weight, rows = function.args
    operands = shape.height + shape.width + shape.weighted
    loop = RowLoop(function, flavour, operands, has_result=False)
    builder = loop.builder
    wide = ir.VectorType(DOUBLE, loop.lanes)
    totals = [builder.alloca(wide) for _ in range(shape.height * shape.width)]
    for total in totals:
        builder.store(ir.Constant(wide, None), total)

    def body(vectors: list[Vector], _: Any) -> None:
        columns = [vector.widen() for vector in vectors]
        firsts, seconds = columns[: shape.height], columns[shape.height :][: shape.width]
        if shape.weighted:
            firsts = [first * columns[-1] for first in firsts]
        for index, total in enumerate(totals):
            first, second = firsts[index // shape.width], seconds[index % shape.width]
            added = first.fma(second, loop.trace.vector(builder.load(total, typ=wide)))
            builder.store(added.value, total)

    columns = [_column(builder, left, i) for i in range(shape.height)]
    columns += [_column(builder, right, j) for j in range(shape.width)]
    columns += [weight] if shape.weighted else []
    loop.run(columns, [integer(WIDTH)] * operands, rows, body)
    for index, total in enumerate(totals):
        offset = builder.add(
            builder.mul(pitch, integer(index // shape.width)), integer(index % shape.width)
        )
        place = builder.gep(sums, [offset], source_etype=DOUBLE)
        value = sum_lanes(builder, builder.load(total, typ=wide), loop.lanes)
        builder.store(builder.fadd(builder.load(place, typ=DOUBLE), value), place)
    builder.ret_void()


def _column(builder: ir.IRBuilder, array: Any, index: int) -> Any:
    place = builder.gep(array, [integer(index)], source_etype=POINTER)
    return builder.load(place, typ=POINTER)
