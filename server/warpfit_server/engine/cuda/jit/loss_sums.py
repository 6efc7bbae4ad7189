"""PTX that sums losses and their derivatives over a block of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from warpfit_server.engine.cuda.jit.expression_graph import ExpressionGraph, Node
from warpfit_server.engine.cuda.jit.kernel_interface import (
    ARGUMENT_OFFSETS,
    Output,
    load_argument,
    sum_count,
)
from warpfit_server.engine.cuda.jit.shapes import Shape
from warpfit_server.engine.cuda.math.modes import Mode

#: Lanes of a warp, and sums that one is reduced with at a time.
_LANES: Final = 32


class LossSums:
    """Writes the code of the accumulators of one kernel.

    Args:
        graph: names the registers and takes the instructions of derivatives.
        output: of the kernel.
        mode: of arithmetic; sums are float32 in fast mode, else float64.
        guard: predicate register: whether the row is in the range.
        shapes: of the kernel's expressions.
    """

    def __init__(
        self,
        graph: ExpressionGraph,
        output: Output,
        mode: Mode,
        guard: str,
        shapes: Sequence[Shape],
    ) -> None:
        self._graph = graph
        self._output = output
        self._guard = guard
        self._is_fast = mode is Mode.FAST
        self._kind = "r" if self._is_fast else "d"
        self._suffix = "ftz.f32" if self._is_fast else "f64"
        self._is_wider = self._kind != mode.kind
        self.target = graph.register(mode.kind) if output.loss else ""
        """Register of the target; empty if there is no loss."""
        self.weight = graph.register(mode.kind) if output.loss and output.weighted else ""
        """Register of the weight; empty if there is none."""
        self._wide_inputs = [graph.register("d") for _ in self._narrow_inputs()]
        self.registers = [
            graph.register(self._kind, uniform=True)
            for shape in shapes
            for _ in range(sum_count(output, shape))
        ]
        """Accumulators of all sums."""

    def zeros(self) -> list[str]:
        """Set the accumulators to zero."""
        zero = "0f00000000" if self._is_fast else "0d0000000000000000"
        width = "f32" if self._is_fast else "f64"
        return [f"mov.{width} {total}, {zero};" for total in self.registers]

    def widen_inputs(self) -> list[str]:
        """Convert target and weight to the type of the sums, for each row."""
        pairs = zip(self._wide_inputs, self._narrow_inputs(), strict=True)
        return [f"cvt.f64.f32 {wide}, {name};" for wide, name in pairs]

    def add_loss(self, value: str, total: str) -> list[str]:
        """Add the deviation of one row to an accumulator."""
        lines, operands = self._widened(value)
        deviation = self._graph.register(self._kind)
        lines.append(f"sub.{self._suffix} {deviation}, {operands[0]}, {operands[1]};")
        if self._output.loss == "absolute":
            lines.append(f"abs.{self._suffix} {deviation}, {deviation};")
            factor = operands[2] if self._output.weighted else ""
        else:
            factor = deviation
            if self._output.weighted:
                factor = self._graph.register(self._kind)
                lines.append(f"mul.{self._suffix} {factor}, {deviation}, {operands[2]};")
        product = (factor, deviation) if factor else (deviation,)
        return [*lines, self._accumulate(total, *product)]

    def add_gradient(self, nodes: Sequence[Node], shape: Shape, totals: Sequence[str]) -> None:
        """Add the derivatives of one row's deviation to accumulators."""
        value, loss = nodes[-1].register, self._output.loss
        seed = self._graph.deviation_slope(value, self.target, loss)
        slopes = self._graph.slopes(nodes, seed, shape.wanted)
        for number, total in zip(shape.wanted, totals, strict=True):
            if number in slopes:
                lines, (slope, *inputs) = self._widened(slopes[number])
                weight = inputs[1] if self._output.weighted else ""
                self._graph.body += [*lines, self._accumulate(total, slope, weight)]

    def reduction(self) -> list[str]:
        """Sum over each warp in a fixed order and store the sums of the block of rows."""
        warps = self._output.threads // _LANES
        lines = ["mov.u32 %lane, %laneid;", "shr.u32 %warp, %thread, 5;"]
        for start in range(0, len(self.registers), _LANES):
            lines += [
                *self._sum_over_warp(self.registers[start : start + _LANES]),
                f"add.u32 %place, %place, {start};",
                "add.u32 %place, %place, %output;",
                "mad.lo.u32 %place, %place, %vectors, %vector;",
                *load_argument("block_count", "%index", "u32"),
                "mad.lo.u32 %place, %place, %index, %block;",
                f"ld.global.nc.u64 %at, [%request+{ARGUMENT_OFFSETS['partials']}];",
                "cvta.to.global.u64 %at, %at;",
                f"mad.wide.u32 %at, %place, {8 * warps}, %at;",
                "mad.wide.u32 %at, %warp, 8, %at;",
                "st.global.b64 [%at], %wide;",
            ]
        return lines

    def _sum_over_warp(self, totals: Sequence[str]) -> list[str]:
        """Sum each of up to 32 registers over the warp.

        In each step, half of the lanes go on with half of the sums and the others with the rest.
        A lane ends with one sum in %wide, and with its place among the sums in %place.
        """
        lines, steps, count = [], [], len(totals)
        for distance in (16, 8, 4, 2, 1):
            half = -(-count // 2)
            lines += [f"and.b32 %low, %lane, {distance};", "setp.ne.u32 %first, %low, 0;"]
            for index, total in enumerate(totals[:half]):
                other = totals[index + half] if index + half < count else ""
                lines += self._exchange(total, other, distance)
            steps.append((distance, half, count))
            count = half
        lines.append("mov.u32 %place, 0;")
        for distance, half, count in reversed(steps):
            if count > 1:
                lines += [
                    f"and.b32 %low, %lane, {distance};",
                    f"add.u32 %high, %place, {half};",
                    "setp.ne.u32 %first, %low, 0;",
                    f"setp.lt.and.u32 %first, %high, {count}, %first;",
                    "selp.b32 %place, %high, %place, %first;",
                ]
        widen = "cvt.f64.f32" if self._is_fast else "mov.b64"
        return [*lines, f"{widen} %wide, {totals[0]};"]

    def _accumulate(self, total: str, first: str, second: str = "") -> str:
        """Add a term, or a product of two factors, where the row is in the range."""
        if second:
            operands = f"{total}, {first}, {second}, {total}"
            return f"@{self._guard} fma.rn.{self._suffix} {operands};"
        return f"@{self._guard} add.{self._suffix} {total}, {total}, {first};"

    def _narrow_inputs(self) -> list[str]:
        """Target and weight if the sums are wider."""
        inputs = [self.target, self.weight] if self._is_wider else []
        return [name for name in inputs if name]

    def _widened(self, value: str) -> tuple[list[str], list[str]]:
        """Return code, and the registers of value, target and weight in the type of the sums."""
        if not self._is_wider:
            return [], [value, self.target, *([self.weight] if self.weight else [])]
        wide = self._graph.register("d")
        return [f"cvt.f64.f32 {wide}, {value};"], [wide, *self._wide_inputs]

    def _exchange(self, total: str, other: str, distance: int) -> list[str]:
        """Add what the lane at a distance has of the same sum; %first says who keeps ``other``."""
        sent, width = ("%other", "b32") if self._is_fast else ("%widest", "b64")
        lines = [f"mov.{width} {sent}, {total};"]
        if other:
            lines = [
                f"selp.{width} {sent}, {total}, {other}, %first;",
                f"selp.{width} {total}, {other}, {total}, %first;",
            ]
        if self._is_fast:
            lines.append(f"shfl.sync.bfly.b32 %other, %other, {distance}, 31, -1;")
        else:
            lines += [
                "mov.b64 {%low, %high}, %widest;",
                f"shfl.sync.bfly.b32 %low, %low, {distance}, 31, -1;",
                f"shfl.sync.bfly.b32 %high, %high, {distance}, 31, -1;",
                "mov.b64 %widest, {%low, %high};",
            ]
        return [*lines, f"add.{self._suffix} {total}, {total}, {sent};"]
