"""The transpiler: shapes of expressions to PTX text. Pure: the same input, the same text.

A kernel evaluates a group of expressions (one or more) in straight-line code::

    load the slots (parameters and constants) of this group and vector
    compute what depends on slots alone
    for each tile of rows of this block:
        load each variable once, several rows a thread
        for each expression: compute it for each row; store it, or add its loss, and if wanted the
            loss's derivatives, to accumulators
    reduce the accumulators over the block and store their partial sums

All numbers are read through pointers, so a kernel serves any data, parameters and row range of
its shape, and a captured launch stays valid when they change. `REQUEST` is the layout of the block
of 64-bit words that the first kernel parameter points to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from warpfit_server.engine.cuda.jit.device_library import DeviceLibrary, Mode
from warpfit_server.engine.cuda.jit.expression_graph import ROW, UNIFORM, ExpressionGraph, Node
from warpfit_server.engine.cuda.jit.instructions import CLASSES, Template
from warpfit_server.engine.cuda.jit.shapes import Shape
from warpfit_server.engine.cuda.jit.uniform_pool import UniformPool

#: Changes whenever the same input gives other code: part of the key of every kernel.
GENERATION: Final = 4
#: Most row-invariant values that stay in registers through the row loop.
UNIFORM_REGISTERS: Final = 16
#: Share of fast exponentials that are computed without the special-function unit.
EXP2_SHARE: Final = 0.5
#: Byte offset of each 64-bit word of a request.
REQUEST: Final = {
    name: 8 * index
    for index, name in enumerate(
        (
            "variables",  # address of the matrix at the first aligned row
            "stride",  # bytes from one variable to the next, below 2^32
            "target",  # address at the first aligned row
            "weights",  # likewise
            "head",  # rows between the first aligned row and the first row of the range
            "stop",  # rows from the first aligned row to the end of the range, below 2^31
            "slot_stride",  # bytes from one parameter vector's slots to the next
            "partials",  # address of float64 [sums, K, pitch of partials]
            "partial_pitch",  # partial sums that each sum and vector has room for
            "values",  # address of the values of the first row of the range
            "pitch",  # bytes from one row vector of values to the next
        )
    )
}
REQUEST_BYTES: Final = 8 * len(REQUEST)


@dataclass(frozen=True, slots=True)
class Output:
    """What a kernel hands back."""

    values: bool = False
    """Store the values of all rows."""
    loss: str = ""
    """Sum up ``"squares"`` or ``"absolute"`` deviations from the target; empty for neither."""
    weighted: bool = False
    """Multiply each deviation by the row's weight."""
    gradient: bool = False
    """Sum up the derivatives of half the squares, or of the absolute deviations, by each slot that
    a shape names as wanted, too."""
    threads: int = 128
    """Threads of a block: whole warps, at least as many as there are sums in a kernel."""
    rows: int = 4
    """Rows a thread works on at a time: 1, 2 or 4, at most 2 in float64. The address of the
    first aligned row is a multiple of this many values."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One kernel of a module."""

    name: str
    shapes: tuple[Shape, ...]


def sum_count(output: Output, shape: Shape) -> int:
    """Count what is summed up over the rows for one expression."""
    if not output.loss:
        return 0
    return 1 + len(shape.wanted) * output.gradient


def module(library: DeviceLibrary, output: Output, entries: Sequence[Entry]) -> str:
    """Write the PTX text of a module that holds one kernel for each entry."""
    kernels = [_Kernel(library, output, entry) for entry in entries]
    texts = [kernel.text for kernel in kernels]
    called = {template.function: template for kernel in kernels for template in kernel.functions}
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
    """Writes one kernel; ``text`` is the result."""

    def __init__(self, library: DeviceLibrary, output: Output, entry: Entry) -> None:
        self.output = output
        self.mode = library.mode
        self.kind = library.mode.kind
        self.word = library.mode.dtype.itemsize
        self.letters = "abcd"[: output.rows]
        self.fast = library.mode is Mode.FAST
        self.sum_kind = "r" if self.fast else "d"
        self.graph = ExpressionGraph(
            library.templates, self.kind, library.exp2_polynomial, EXP2_SHARE
        )
        self.guard = self.graph.register("p")
        self.target, self.weight = self._row_inputs()
        self.wide_inputs = [self.graph.register("d") for _ in self._narrow_inputs()]
        self.pool = UniformPool()
        self.sums = [
            self.graph.register(self.sum_kind, uniform=True)
            for shape in entry.shapes
            for _ in range(sum_count(output, shape))
        ]
        expressions = self._expressions(entry.shapes)
        self.functions = self.graph.functions
        self.text = self._assemble(entry, expressions)

    def _row_inputs(self) -> tuple[str, str]:
        if not self.output.loss:
            return "", ""
        target = self.graph.register(self.kind)
        return target, self.graph.register(self.kind) if self.output.weighted else ""

    def _narrow_inputs(self) -> list[str]:
        """Target and weight where losses are summed in a wider type than theirs."""
        inputs = [self.target, self.weight] if self.sum_kind != self.kind else []
        return [name for name in inputs if name]

    def _expressions(self, shapes: tuple[Shape, ...]) -> list[str]:
        """Code of each expression for all rows of a thread."""
        pieces: list[tuple[dict[str, None], list[str]]] = []
        slot, sums = 0, iter(self.sums)
        for shape in shapes:
            nodes = self.graph.trace(shape, slot)
            value = nodes[-1].register
            slot += shape.slots
            self._use(value)
            if self.output.loss:
                self.graph.body += self._add_loss(value, next(sums))
            if self.output.gradient:
                self._add_gradient(nodes, shape, [next(sums) for _ in shape.wanted])
            lines = self._each_row(self.graph.body)
            if self.output.values:
                lines += self._store(value)
            pieces.append((self.graph.used, lines))
            self.graph.body, self.graph.used = [], {}
        return self._with_uniforms(pieces)

    def _with_uniforms(self, pieces: list[tuple[dict[str, None], list[str]]]) -> list[str]:
        """Join the expressions, each after loads of its row-invariant values if those are many."""
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

    # Losses

    def _add_loss(self, value: str, total: str) -> list[str]:
        """Add the deviation of one row to the accumulator, where the row is in the range."""
        kind, suffix = self.sum_kind, "ftz.f32" if self.fast else "f64"
        lines, operands = self._widened(value)
        deviation = self.graph.register(kind)
        lines.append(f"sub.{suffix} {deviation}, {operands[0]}, {operands[1]};")
        if self.output.loss == "absolute":
            lines.append(f"abs.{suffix} {deviation}, {deviation};")
            other = operands[2] if self.output.weighted else ""
        else:
            other = deviation
            if self.output.weighted:
                other = self.graph.register(kind)
                lines.append(f"mul.{suffix} {other}, {deviation}, {operands[2]};")
        if other:
            lines.append(f"@{self.guard} fma.rn.{suffix} {total}, {other}, {deviation}, {total};")
        else:
            lines.append(f"@{self.guard} add.{suffix} {total}, {total}, {deviation};")
        return lines

    def _add_gradient(self, nodes: Sequence[Node], shape: Shape, totals: Sequence[str]) -> None:
        """Add the derivatives of one row's deviation to the accumulators."""
        seed = self.graph.deviation_slope(nodes[-1].register, self.target, self.output.loss)
        slopes = self.graph.slopes(nodes, seed, shape.wanted)
        for slot, total in zip(shape.wanted, totals, strict=True):
            if slot in slopes:
                self.graph.body += self._add_slope(slopes[slot], total)

    def _add_slope(self, slope: str, total: str) -> list[str]:
        suffix = "ftz.f32" if self.fast else "f64"
        lines, (wide, *inputs) = self._widened(slope)
        weight = inputs[1] if self.output.weighted else ""
        if weight:
            return [*lines, f"@{self.guard} fma.rn.{suffix} {total}, {wide}, {weight}, {total};"]
        return [*lines, f"@{self.guard} add.{suffix} {total}, {total}, {wide};"]

    def _widened(self, value: str) -> tuple[list[str], list[str]]:
        """Value, target and weight in the type of the sum."""
        inputs = [self.target, *([self.weight] if self.weight else [])]
        if self.sum_kind == self.kind:
            return [], [value, *inputs]
        wide = self.graph.register("d")
        return [f"cvt.f64.f32 {wide}, {value};"], [wide, *self.wide_inputs]

    def _reduction(self, count: int) -> list[str]:
        """Sum over the block in a fixed order; thread e stores sum e."""
        lines = ["mov.u32 %lane, %laneid;", "shr.u32 %warp, %thread, 5;"]
        lines += ["mov.u32 %pool, sums;", f"mad.lo.u32 %pool, %warp, {8 * count}, %pool;"]
        lines += ["setp.eq.u32 %first, %lane, 0;"]
        for index, total in enumerate(self.sums):
            for distance in (16, 8, 4, 2, 1):
                lines += self._add_from_lane(total, distance)
            if self.fast:
                lines.append(f"cvt.f64.f32 %wide, {total};")
                total = "%wide"
            lines.append(f"@%first st.shared.b64 [%pool+{8 * index}], {total};")
        return [*lines, "bar.sync 0;", *self._store_partial(count)]

    def _add_from_lane(self, total: str, distance: int) -> list[str]:
        if self.fast:
            return [
                f"shfl.sync.down.b32 %other, {total}, {distance}, 31, -1;",
                f"add.ftz.f32 {total}, {total}, %other;",
            ]
        return [
            f"mov.b64 {{%low, %high}}, {total};",
            f"shfl.sync.down.b32 %low, %low, {distance}, 31, -1;",
            f"shfl.sync.down.b32 %high, %high, {distance}, 31, -1;",
            "mov.b64 %wide, {%low, %high};",
            f"add.f64 {total}, {total}, %wide;",
        ]

    def _store_partial(self, count: int) -> list[str]:
        lines = [
            f"setp.ge.u32 %first, %thread, {count};",
            "@%first ret;",
            "mov.u32 %pool, sums;",
            "mad.lo.u32 %pool, %thread, 8, %pool;",
            "ld.shared.b64 %wide, [%pool];",
        ]
        for warp in range(1, self.output.threads // 32):
            lines += [
                f"ld.shared.b64 %widest, [%pool+{8 * count * warp}];",
                "add.f64 %wide, %wide, %widest;",
            ]
        return [
            *lines,
            "add.u32 %place, %output, %thread;",
            "mad.lo.u32 %place, %place, %vectors, %vector;",
            *self._request_word("partial_pitch", "%index", "u32"),
            "mad.lo.u32 %place, %place, %index, %block;",
            f"ld.global.nc.u64 %at, [%request+{REQUEST['partials']}];",
            "cvta.to.global.u64 %at, %at;",
            "mad.wide.u32 %at, %place, 8, %at;",
            "st.global.b64 [%at], %wide;",
        ]

    # Values

    def _store(self, value: str) -> list[str]:
        """Store one expression's values: at once where whole, aligned and in range, else singly."""
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

    def _assemble(self, entry: Entry, expressions: list[str]) -> str:
        count = len(self.sums)
        lines = [
            f".visible .entry {entry.name}(.param .u64 a, .param .u64 b, .param .u32 c)",
            f".maxntid {self.output.threads}, 1, 1",
            "{",
            *self._registers(count),
            *self._prologue(),
            *self.pool.filled([*self._slot_loads(), *self.graph.uniform]),
            *self._loop_start(),
            *self._guards(),
            *self._loads(),
            *(self._value_address() if self.output.values else []),
            *expressions,
            "add.u32 %tile, %tile, %tiles;",
            "setp.lt.u32 %more, %tile, %stop;",
            "@%more bra.uni LOOP;",
            "DONE:",
            *(self._reduction(count) if self.output.loss else []),
            "ret;",
            "}",
        ]
        return "\n".join(lines)

    def _registers(self, sums: int) -> list[str]:
        declared = [
            ".reg .b64 %request, %slots, %variables, %target, %weights, %at, %from, %to, %step;",
            ".reg .b64 %pitch, %origin, %wide, %widest;",
            ".reg .b32 %thread, %lane, %warp, %block, %blocks, %vector, %vectors, %output, %tile;",
            ".reg .b32 %tiles, %row, %last, %head, %stop, %stride, %place, %pool, %other, %low;",
            ".reg .b32 %high, %index;",
            ".reg .pred %more, %first, %whole, %aligned, "
            + ", ".join(f"%single{letter}" for letter in self.letters)
            + ";",
        ]
        if self.pool.flags:
            declared.append(f".reg .b32 {', '.join(self.pool.flags)};")
        if self.pool.size:
            declared.append(f".shared .align 16 .b8 uniforms[{self.pool.size}];")
        if self.output.loss:
            size = 8 * sums * (self.output.threads // 32)
            declared.append(f".shared .align 8 .b8 sums[{size}];")
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
            *self._request_word("stride", "%stride", "u32"),
            *self._request_word("head", "%head", "u32"),
            *self._request_word("stop", "%stop", "u32"),
            *self._request_word("slot_stride", "%place", "u32"),
            "mad.wide.u32 %slots, %vector, %place, %slots;",
            *self._request_address("variables", "%variables"),
        ]
        if self.output.loss:
            lines += self._request_address("target", "%target")
        if self.output.weighted:
            lines += self._request_address("weights", "%weights")
        return lines

    def _slot_loads(self) -> list[str]:
        width = CLASSES[self.kind]
        return [
            f"ld.global.nc.{width} {name}, [%slots+{self.word * slot}];"
            for slot, name in self.graph.slots.items()
        ]

    def _request_word(self, name: str, register: str, width: str) -> list[str]:
        return [f"ld.global.nc.{width} {register}, [%request+{REQUEST[name]}];"]

    def _request_address(self, name: str, register: str) -> list[str]:
        load = self._request_word(name, register, "u64")
        return [*load, f"cvta.to.global.u64 {register}, {register};"]

    def _loop_start(self) -> list[str]:
        """All threads of a block make the same number of turns; rows past the end repeat some."""
        tile = self.output.threads * self.output.rows
        zero = "0f00000000" if self.sum_kind == "r" else "0d0000000000000000"
        width = "f32" if self.sum_kind == "r" else "f64"
        return [
            *(f"mov.{width} {total}, {zero};" for total in self.sums),
            *(self._value_prologue() if self.output.values else []),
            "sub.u32 %last, %stop, 1;",
            f"and.b32 %last, %last, {-self.output.rows};",
            f"mul.lo.u32 %tile, %block, {tile};",
            f"mul.lo.u32 %tiles, %blocks, {tile};",
            "setp.ge.u32 %more, %tile, %stop;",
            "@%more bra.uni DONE;",
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
            lines.append(f"mad.wide.u32 %at, %stride, {variable}, %from;")
            lines.append(self._load("%at", variables[variable]))
        for name, register in (("target", self.target), ("weights", self.weight)):
            if register:
                lines.append(f"mad.wide.u32 %at, %index, {self.word}, %{name};")
                lines.append(self._load("%at", register))
        pairs = zip(self.wide_inputs, self._narrow_inputs(), strict=True)
        return lines + self._each_row([f"cvt.f64.f32 {wide}, {name};" for wide, name in pairs])

    def _load(self, address: str, register: str) -> str:
        names = [register.replace(ROW, letter) for letter in self.letters]
        width = CLASSES[self.kind]
        if len(names) == 1:
            return f"ld.global.nc.{width} {names[0]}, [{address}];"
        return f"ld.global.nc.v{len(names)}.{width} {{{', '.join(names)}}}, [{address}];"

    def _value_prologue(self) -> list[str]:
        """Address of the first expression's values, the step to the next, and their alignment."""
        return [
            *self._request_word("pitch", "%pitch", "u64"),
            *self._request_address("values", "%origin"),
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
