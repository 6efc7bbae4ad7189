"""The transpiler: shapes of expressions to PTX text. Pure: the same input gives the same text.

A kernel evaluates a group of expressions in straight-line code::

    load the inputs (parameters and constants) of this group and vector
    compute what depends on inputs alone
    for each block of rows of this block of threads:
        for each tile of the block:
            load each variable once, several rows a thread
            for each expression: compute it for each row; store it, or add its loss, and if wanted
                the loss's derivatives, to accumulators
        reduce the accumulators over each warp and store their partial sums

All numbers are read through pointers, so a kernel works for any data, parameters and row range, and
a captured graph stays valid when they change; see `kernel_interface.ARGUMENT_OFFSETS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from warpfit_server.engine.cuda.jit.device_library import DeviceLibrary
from warpfit_server.engine.cuda.jit.expression_graph import ROW, UNIFORM, ExpressionGraph
from warpfit_server.engine.cuda.jit.instructions import CLASSES, Template
from warpfit_server.engine.cuda.jit.invariant_pool import InvariantPool
from warpfit_server.engine.cuda.jit.kernel_interface import (
    LINE_BYTES,
    Output,
    load_address,
    load_argument,
)
from warpfit_server.engine.cuda.jit.loss_sums import LossSums
from warpfit_server.engine.cuda.jit.shapes import Shape
from warpfit_server.engine.cuda.math.modes import Mode

#: Part of the key of every kernel; changes whenever the same input gives other code.
GENERATION: Final = 5
#: Most row-invariant values that stay in registers through the row loop.
UNIFORM_REGISTERS: Final = 16
#: Share of fast exponentials that are computed without the special-function unit.
EXP2_SHARE: Final = 0.5


def module(library: DeviceLibrary, output: Output, kernels: Mapping[str, tuple[Shape, ...]]) -> str:
    """Write the PTX text of a module of kernels, given as the expressions of each by its name."""
    written = [_Kernel(library, output, name, shapes) for name, shapes in kernels.items()]
    texts = [kernel.text for kernel in written]
    called = {template.function: template for kernel in written for template in kernel.functions}
    return "\n".join(
        [
            library.version_line,
            f".target sm_{library.architecture}",
            ".address_size 64",
            *(_declaration(called[name], library.mode) for name in sorted(called)),
            *(data for name, data in library.data.items() if any(name in t for t in texts)),
            *texts,
        ]
    )


def _declaration(template: Template, mode: Mode) -> str:
    width = CLASSES[mode.kind]
    parameters = ", ".join(f".param .{width} p{i}" for i in range(template.arity))
    return f".extern .func (.param .{width} q) {template.function} ({parameters});"


class _Kernel:
    """Writer of one kernel; ``text`` is the result."""

    def __init__(
        self, library: DeviceLibrary, output: Output, name: str, shapes: tuple[Shape, ...]
    ) -> None:
        self.output = output
        self.mode = library.mode
        self.kind = library.mode.kind
        self.word = library.mode.dtype.itemsize
        self.letters = "abcd"[: output.rows]
        self.graph = ExpressionGraph(
            library.templates, self.kind, library.exp2_polynomial, EXP2_SHARE
        )
        self.guard = self.graph.register("p")
        self.sums = LossSums(self.graph, output, self.mode, self.guard, shapes)
        self.pool = InvariantPool()
        expressions = self._expressions(shapes)
        self.functions = self.graph.functions
        self.text = self._assemble(name, expressions)

    def _expressions(self, shapes: tuple[Shape, ...]) -> list[str]:
        """Write the code of each expression for all rows of a thread."""
        pieces: list[tuple[dict[str, None], list[str]]] = []
        first_input, sums = 0, iter(self.sums.registers)
        for shape in shapes:
            nodes = self.graph.trace(shape, first_input)
            value = nodes[-1].register
            first_input += shape.inputs
            self._use(value)
            if self.output.loss:
                self.graph.body += self.sums.add_loss(value, next(sums))
            if self.output.gradient:
                self.sums.add_gradient(nodes, shape, [next(sums) for _ in shape.wanted])
            lines = self._each_row(self.graph.body)
            if self.output.values:
                lines += self._store(value)
            pieces.append((self.graph.used, lines))
            self.graph.body, self.graph.used = [], {}
        return self._with_uniforms(pieces)

    def _with_uniforms(self, pieces: list[tuple[dict[str, None], list[str]]]) -> list[str]:
        """Join the expressions; many row-invariant values are loaded from the pool before each."""
        pooled = len({name for used, _ in pieces for name in used}) > UNIFORM_REGISTERS
        joined: list[str] = []
        for used, lines in pieces:
            joined += self.pool.loads(used) if pooled else []
            joined += lines
        return joined

    def _use(self, value: str) -> None:
        if ROW not in value:
            self.graph.used[value] = None

    def _each_row(self, lines: Sequence[str]) -> list[str]:
        text = "\n".join(lines)
        return [text.replace(ROW, letter) for letter in self.letters] if text else []

    # Values

    def _store(self, value: str) -> list[str]:
        """Store the values of all rows at once where aligned and in range, else one by one."""
        names = [value.replace(ROW, letter) for letter in self.letters]
        width = CLASSES[self.kind]
        lines = []
        if len(names) > 1:
            joined = ", ".join(names)
            lines = [f"@%whole st.global.v{len(names)}.{width} [%to], {{{joined}}};"]
        for index, (name, letter) in enumerate(zip(names, self.letters, strict=True)):
            guard = self._single_guard(letter)
            lines.append(f"@{guard} st.global.{width} [%to+{index * self.word}], {name};")
        return [*lines, "add.s64 %to, %to, %step;"]

    def _single_guard(self, letter: str) -> str:
        return f"%single{letter}" if len(self.letters) > 1 else self.guard.replace(ROW, letter)

    # Frame

    def _assemble(self, name: str, expressions: list[str]) -> str:
        lines = [
            f".visible .entry {name}(.param .u64 a, .param .u64 b, .param .u32 c)",
            f".maxntid {self.output.threads}, 1, 1",
            "{",
            *self._registers(),
            *self._prologue(),
            *self.pool.filled([*self._input_loads(), *self.graph.uniform]),
            *self._loop_start(),
            *self._guards(),
            *self._loads(),
            *(self._value_address() if self.output.values else []),
            *expressions,
            f"add.u32 %tile, %tile, {self.output.tile};",
            "setp.lt.u32 %more, %tile, %end;",
            "@%more bra.uni LOOP;",
            *(self.sums.reduction() if self.output.loss else []),
            "add.u32 %block, %block, %blocks;",
            "mul.lo.u32 %tile, %block, %rows;",
            "setp.lt.u32 %more, %tile, %stop;",
            "@%more bra.uni BLOCK;",
            "DONE:",
            "ret;",
            "}",
        ]
        return "\n".join(lines)

    def _registers(self) -> list[str]:
        declared = [
            ".reg .b64 %request, %slots, %variables, %target, %weights, %at, %from, %to, %step;",
            ".reg .b64 %pitch, %origin, %wide, %widest;",
            ".reg .b32 %thread, %lane, %warp, %block, %blocks, %vector, %vectors, %output, %tile;",
            ".reg .b32 %rows, %end, %row, %last, %head, %stop, %stride, %place, %other, %low;",
            ".reg .b32 %high, %index;",
            ".reg .pred %more, %first, %whole, %aligned, "
            + ", ".join(f"%single{letter}" for letter in self.letters)
            + ";",
        ]
        if self.pool.flags:
            declared.append(f".reg .b32 {', '.join(self.pool.flags)};")
        if self.pool.size:
            declared.append(f".shared .align 16 .b8 uniforms[{self.pool.size}];")
        for prefix, count in self.graph.counts().items():
            letters = self.letters if prefix[1] == ROW else UNIFORM
            declared += [
                f".reg .{CLASSES[prefix[0]]} %{prefix[0]}{letter}<{count}>;" for letter in letters
            ]
        return declared

    def _prologue(self) -> list[str]:
        lines = [
            "ld.param.u64 %request, [a];",
            "ld.param.u64 %slots, [b];",
            "ld.param.u32 %output, [c];",
            "cvta.to.global.u64 %request, %request;",
            "cvta.to.global.u64 %slots, %slots;",
            "mov.u32 %thread, %tid.x;",
            "mov.u32 %block, %ctaid.x;",
            "mov.u32 %blocks, %nctaid.x;",
            "mov.u32 %vector, %ctaid.y;",
            "mov.u32 %vectors, %nctaid.y;",
            *load_argument("stride", "%stride", "u32"),
            *load_argument("head", "%head", "u32"),
            *load_argument("stop", "%stop", "u32"),
            *load_argument("block_rows", "%rows", "u32"),
            *load_argument("input_stride", "%place", "u32"),
            "mad.wide.u32 %slots, %vector, %place, %slots;",
            *load_address("variables", "%variables"),
        ]
        if self.output.loss:
            lines += load_address("target", "%target")
        if self.output.weighted:
            lines += load_address("weights", "%weights")
        return lines

    def _input_loads(self) -> list[str]:
        width = CLASSES[self.kind]
        return [
            f"ld.global.nc.{width} {name}, [%slots+{self.word * number}];"
            for number, name in self.graph.inputs.items()
        ]

    def _loop_start(self) -> list[str]:
        """Start the loops, with equally many turns for all threads; extra rows repeat others."""
        return [
            *(self._value_prologue() if self.output.values else []),
            "sub.u32 %last, %stop, 1;",
            f"and.b32 %last, %last, {-self.output.rows};",
            "mul.lo.u32 %tile, %block, %rows;",
            "setp.ge.u32 %more, %tile, %stop;",
            "@%more bra.uni DONE;",
            "BLOCK:",
            *self.sums.zeros(),
            "add.u32 %end, %tile, %rows;",
            "min.u32 %end, %end, %stop;",
            "LOOP:",
            f"mad.lo.u32 %row, %thread, {self.output.rows}, %tile;",
        ]

    def _guards(self) -> list[str]:
        lines = []
        for index, letter in enumerate(self.letters):
            guard = self.guard.replace(ROW, letter)
            lines += [
                f"add.u32 %index, %row, {index};",
                f"setp.ge.u32 {guard}, %index, %head;",
                f"setp.lt.and.u32 {guard}, %index, %stop, {guard};",
            ]
        return lines

    def _loads(self) -> list[str]:
        lines = ["min.u32 %index, %row, %last;"]
        variables = self.graph.variables
        if variables:
            lines.append(f"mad.wide.u32 %from, %index, {self.word}, %variables;")
        for variable in sorted(variables):
            lines.append(f"mad.wide.u32 %at, %stride, {variable * LINE_BYTES}, %from;")
            lines.append(self._load("%at", variables[variable]))
        for name, register in (("target", self.sums.target), ("weights", self.sums.weight)):
            if register:
                lines.append(f"mad.wide.u32 %at, %index, {self.word}, %{name};")
                lines.append(self._load("%at", register))
        return lines + self._each_row(self.sums.widen_inputs())

    def _load(self, address: str, register: str) -> str:
        names = [register.replace(ROW, letter) for letter in self.letters]
        width = CLASSES[self.kind]
        if len(names) == 1:
            return f"ld.global.nc.{width} {names[0]}, [{address}];"
        return f"ld.global.nc.v{len(names)}.{width} {{{', '.join(names)}}}, [{address}];"

    def _value_prologue(self) -> list[str]:
        """Compute the address of the first values, the step to the next ones, and alignment."""
        return [
            *load_argument("pitch", "%pitch", "u64"),
            *load_address("values", "%origin"),
            "cvt.u64.u32 %at, %vectors;",
            "mul.lo.u64 %step, %pitch, %at;",
            "mad.lo.u32 %place, %output, %vectors, %vector;",
            "cvt.u64.u32 %at, %place;",
            "mad.lo.u64 %origin, %pitch, %at, %origin;",
            f"mul.wide.u32 %at, %head, {self.word};",
            "sub.u64 %origin, %origin, %at;",
            "or.b64 %at, %origin, %step;",
            f"and.b64 %at, %at, {self.word * self.output.rows - 1};",
            "setp.eq.u64 %aligned, %at, 0;",
        ]

    def _value_address(self) -> list[str]:
        lines = [f"mad.wide.u32 %to, %row, {self.word}, %origin;"]
        if len(self.letters) == 1:
            return lines
        guards = [self.guard.replace(ROW, letter) for letter in self.letters]
        lines.append(f"and.pred %whole, %aligned, {guards[0]};")
        lines += [f"and.pred %whole, %whole, {guard};" for guard in guards[1:]]
        lines.append("not.pred %first, %whole;")
        return lines + [
            f"and.pred %single{letter}, {guard}, %first;"
            for letter, guard in zip(self.letters, guards, strict=True)
        ]
