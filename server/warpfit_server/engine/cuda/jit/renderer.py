"""The renderer: lowered programs to PTX text. Pure: the same input gives the same text.

A kernel evaluates a group of programs in straight-line code::

    load the inputs (parameters and constants) of the group and vector
    compute the invariants, which depend on inputs alone
    for each block of rows of this block of threads:
        for each tile of the block:
            load each variable once, several rows a thread
            for each program: compute it for each row; store it, or add its loss, and if wanted the
                loss's derivatives, to accumulators
        reduce the accumulators over each warp and store their partial sums

The host has numbered the values, differentiated the programs and divided their instructions into a
prologue and a body (`engine.lowering`, `engine.autodiff`). The renderer writes the template of each
instruction, and one part of a template may be invariant where the whole is not, such as what
``pow(x, p)`` does with the exponent alone.

All numbers are read through pointers, so a kernel works for any data, parameters and row range, and
a captured graph stays valid when they change; see `ARGUMENT_OFFSETS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from warpfit.ops import OPERATORS
from warpfit_server.engine.autodiff import PRODUCT_CODE
from warpfit_server.engine.cuda.jit.templates import (
    CLASSES,
    DeviceLibrary,
    Template,
    register_class,
)
from warpfit_server.engine.lowering import (
    COPY_CODE,
    INPUT,
    INVARIANT,
    NONE,
    RESULT,
    Lowered,
)

#: Part of the key of every kernel; changes whenever the same input gives other code.
GENERATION: Final = 6
#: Most invariants that stay in registers through the row loop.
INVARIANT_REGISTERS: Final = 16
#: Share of fast exponentials that are computed without the special-function unit.
EXP2_SHARE: Final = 0.5

# ------------------------------------------------------------------ arguments and outputs

#: Byte offset of each argument, a 64-bit word, in the block that the first kernel parameter points
#: to.
ARGUMENT_OFFSETS: Final = {
    name: 8 * index
    for index, name in enumerate(
        (
            "variables",  # address of the matrix at the first row of the first block
            "stride",  # lines of `LINE_BYTES` from one variable to the next, below 2^32
            "target",  # address of the target at that row
            "weights",  # address of the weights at that row
            "head",  # rows between the first block's first row and the first row of the range
            "stop",  # rows from the first block's first row to the end of the range, below 2^31
            "block_rows",  # rows of a block, a power of two; see `block_rows`
            "first_block",  # number of the first block, counted from the data set's first row
            "block_count",  # blocks that have some of the rows
            "input_stride",  # bytes from one parameter vector's inputs to the next
            "partials",  # address of float64 [sums, K, block_count, warps]
            "values",  # address of the values of the first row of the range
            "pitch",  # bytes from the values of one program and vector to the next
        )
    )
}
#: Unit of strides, so that 32 bits suffice for columns of 512 GiB.
LINE_BYTES: Final = 128
ARGUMENT_BYTES: Final = 8 * len(ARGUMENT_OFFSETS)
#: Blocks of rows that few rows are divided into at least, and most rows of a block.
_LEAST_BLOCKS: Final = 64
MAX_BLOCK_ROWS: Final = 4096


@dataclass(frozen=True, slots=True)
class Output:
    """Outputs of a kernel for each program, and the layout of its rows."""

    values: bool = False
    """Store the values of all rows."""
    loss: str = ""
    """Sum up ``"squares"`` or ``"absolute"`` deviations from the target; empty for neither."""
    weighted: bool = False
    """Multiply each deviation by the row's weight."""
    gradient: bool = False
    """Sum up the derivatives of half the squares, or of the absolute deviations, by each parameter
    on which the program depends, in ascending order, too."""
    threads: int = 128
    """Threads of a block: warps, of which there are a power of two."""
    rows: int = 4
    """Rows a thread works on at a time: 1, 2 or 4, at most 2 in float64. The address of a block's
    first row is a multiple of this many values."""

    @property
    def tile(self) -> int:
        """Rows that a block of threads works on at a time, a power of two."""
        return self.threads * self.rows


def block_rows(output: Output, rows: int) -> int:
    """Return the rows of a block, whose sums are partial sums; at least those of a tile.

    A kernel has at most one block of threads for each block of rows, so that few rows need short
    ones; each takes a reduction, which costs as much as a few rows for each thread.

    Args:
        output: of the kernel.
        rows: of the evaluation, on however many launches and devices they are.
    """
    wanted = 1 << (-(-rows // _LEAST_BLOCKS) - 1).bit_length()
    return max(output.tile, min(wanted, MAX_BLOCK_ROWS))


# ------------------------------------------------------------------------------- modules

#: In the name of a register: placeholder for the letter of the row that the value belongs to.
_ROW: Final = "#"
#: In the name of a register: the value is an invariant.
_INVARIANT: Final = "i"
_EXP2: Final = "ex2.approx.ftz.f32 %s, %s;"
_LOG2: Final = "lg2.approx.ftz.f32 %s, %s;"
_SQRT: Final = "sqrt.approx.ftz.f32 %s, %s;"
_RECIPROCAL: Final = "rcp.approx.ftz.f32 %s, %s;"
_HALVE: Final = "mul.ftz.f32 %s, %s, 0f3F000000;"
#: Instructions that replace a pair of approximate functions, by the outer and the inner one; they
#: take the inner function's operand. Each saves work of the special-function unit, which bounds
#: fast kernels, and an intermediate result that may overflow.
_REWRITES: Final[Mapping[tuple[str, str], tuple[str, ...]]] = MappingProxyType(
    {
        (_RECIPROCAL, _EXP2): ("neg.ftz.f32 %s, %s;", _EXP2),
        (_RECIPROCAL, _SQRT): ("rsqrt.approx.ftz.f32 %s, %s;",),
        (_RECIPROCAL, _RECIPROCAL): (),
        (_LOG2, _SQRT): (_LOG2, _HALVE),
        (_LOG2, _EXP2): (),
        (_SQRT, _EXP2): (_HALVE, _EXP2),
    }
)
_REWRITTEN: Final = frozenset(inner for _, inner in _REWRITES)
_ADD: Final = OPERATORS["add"].code
#: Bytes of a register of each class in shared memory, and PTX's type of so many bytes.
_WORDS: Final = {"p": 4, "h": 2, "r": 4, "d": 8}
_WIDTHS: Final = {2: "b16", 4: "b32", 8: "b64"}
_VECTOR_BYTES: Final = 16
#: Lanes of a warp, and sums that one is reduced with at a time.
_LANES: Final = 32


def module(library: DeviceLibrary, output: Output, kernels: Mapping[str, Lowered]) -> str:
    """Write the PTX text of a module of kernels, given as the programs of each by its name.

    The programs are lowered with derivatives by parameters if the output has a gradient.
    """
    written = [_Kernel(library, output, programs) for programs in kernels.values()]
    texts = [kernel.text(name) for name, kernel in zip(kernels, written, strict=True)]
    called = {template.function: template for one in written for template in one.called}
    width = CLASSES[register_class(library.arithmetic)]
    declared = []
    for name in sorted(called):
        parameters = ", ".join(f".param .{width} p{i}" for i in range(called[name].arity))
        declared.append(f".extern .func (.param .{width} q) {name} ({parameters});")
    return "\n".join(
        [
            library.version_line,
            f".target sm_{library.architecture}",
            ".address_size 64",
            *declared,
            *(data for name, data in library.data.items() if any(name in t for t in texts)),
            *texts,
        ]
    )


class _Kernel:
    """Writer of one kernel.

    A value is named by its register. Names with `_ROW` in them are values that depend on the row;
    an instruction none of whose operands has it gives an invariant.
    """

    def __init__(self, library: DeviceLibrary, output: Output, programs: Lowered) -> None:
        self.library, self.output, self.programs = library, output, programs
        self.called: set[Template] = set()
        """Templates in use that call a library function."""
        arithmetic = library.arithmetic
        self.kind, self.word = register_class(arithmetic), arithmetic.dtype.itemsize
        self.letters = "abcd"[: output.rows]
        self.counts: dict[str, int] = {}
        """Number of registers by prefix: class, then `_ROW` or `_INVARIANT`."""
        self.known: dict[tuple[str, ...], str] = {}
        """Results of the instructions so far: parts that templates share are computed once."""
        self.origins: dict[str, tuple[str, str]] = {}
        """Function and operand of the results that `_REWRITES` knows."""
        self.due = 0.0
        self.inputs: list[str] = []
        self.variables: dict[int, str] = {}
        self.prologue: list[str] = []
        """Instructions that compute invariants."""
        self.body: list[str] = []
        """Instructions of one program for a row."""
        self.used: dict[str, None] = {}
        """Invariants that the body reads, in order."""
        self.pool_bytes = 0
        self.pool_flags: list[str] = []
        """Registers of class "r" through which predicates are loaded."""
        self.pool_stores: list[str] = []
        # Sums are float32 in fast arithmetic, else float64.
        self.sum_kind = "r" if arithmetic.is_fast else "d"
        self.suffix = "ftz.f32" if arithmetic.is_fast else "f64"
        self.totals: list[str] = []
        """Accumulators of all sums."""
        self.guard = self._register("p")
        """Whether the row is in the range."""
        self.target = self._register(self.kind) if output.loss else ""
        self.weight = self._register(self.kind) if output.loss and output.weighted else ""
        self.code = self._all_programs()

    # Programs

    def _all_programs(self) -> list[str]:
        """Write all programs; many invariants are loaded from the pool before each."""
        pieces, width = [], CLASSES[self.kind]
        guards = [f"%single{letter}" for letter in self.letters]
        if len(guards) == 1:
            guards = [self.guard.replace(_ROW, self.letters)]
        for header in self.programs.headers:
            self.body, self.used = [], {}
            value = self._program(header)
            text = "\n".join(self.body)
            lines = [text.replace(_ROW, letter) for letter in self.letters] if text else []
            if self.output.values:  # all rows at once where aligned and in range, else one by one
                self._use(value)
                names = [value.replace(_ROW, letter) for letter in self.letters]
                if len(names) > 1:
                    joined = ", ".join(names)
                    lines.append(f"@%whole st.global.v{len(names)}.{width} [%to], {{{joined}}};")
                for index, (name, guard) in enumerate(zip(names, guards, strict=True)):
                    address = f"[%to+{index * self.word}]"
                    lines.append(f"@{guard} st.global.{width} {address}, {name};")
                lines.append("add.s64 %to, %to, %step;")
            pieces.append((self.used, lines))
        pooled = len({name for used, _ in pieces for name in used}) > INVARIANT_REGISTERS
        code: list[str] = []
        for used, lines in pieces:
            code += self._pool_loads(used) if pooled else []
            code += lines
        return code

    def _program(self, header: Any) -> str:
        """Write the instructions of a program and its sums; return the register of its result."""
        programs, registers = self.programs, dict[int, str]()
        first = int(header["first_load"])
        for load in programs.loads["invariant"][first : first + int(header["loads"])].tolist():
            name = registers[load << 2 | INVARIANT] = self._register(self.kind, invariant=True)
            self.inputs.append(name)

        def read(location: int) -> str:
            if location & 3 != INPUT:
                return registers[location]
            if location >> 2 not in self.variables:
                self.variables[location >> 2] = self._register(self.kind)
            return self.variables[location >> 2]

        instructions = programs.instructions[int(header["start"]) : int(header["end"])]
        for code, target, operands, _ in instructions.tolist():
            if code == COPY_CODE:
                registers[target] = read(operands[0])
            else:
                arity = self.library.templates[code].arity
                registers[target] = self._apply(code, [read(one) for one in operands[:arity]])
        value = registers[RESULT]
        if self.output.loss:
            factor = self._add_loss(value)
        if self.output.gradient:
            first = int(header["first_column"])
            columns = programs.columns[first : first + int(header["columns"])].tolist()
            first = int(header["first_entry"])
            entries = programs.entries[first : first + int(header["entries"])]
            slopes: dict[int, str] = {}
            for column, parameter, invariant in entries.tolist():
                slope = read(columns[column])
                if invariant != NONE:
                    slope = self._apply(PRODUCT_CODE, [slope, read(invariant << 2 | INVARIANT)])
                known = slopes.get(parameter)
                slopes[parameter] = slope if known is None else self._apply(_ADD, [known, slope])
            for parameter in sorted(slopes):
                self._accumulate(factor, self._widened(slopes[parameter]))
        return value

    def _register(self, kind: str, *, invariant: bool = False) -> str:
        """Return the name of a new register of a class."""
        prefix = kind + (_INVARIANT if invariant else _ROW)
        number = self.counts.get(prefix, 0)
        self.counts[prefix] = number + 1
        return f"%{prefix}{number}"

    def _use(self, *names: str) -> None:
        self.used.update((name, None) for name in names if _ROW not in name)

    # Instructions

    def _apply(self, code: int, operands: Sequence[str]) -> str:
        """Append the template of an instruction; return the register of its result."""
        template = self.library.templates[code]
        if template.function:
            self.called.add(template)
        return self._expand(template, operands)

    def _expand(self, template: Template, operands: Sequence[str]) -> str:
        values = list(operands)
        for text, kind, sources in template.instructions:
            values.append(self._instruction(text, kind, *(values[source] for source in sources)))
        return values[template.result]

    def _instruction(self, text: str, kind: str, *sources: str) -> str:
        """Append an instruction, or what replaces it; return the register of its result."""
        key = (text, *sources)
        if key in self.known:
            return self.known[key]
        is_invariant = not any(_ROW in source for source in sources)
        origin = self.origins.get(sources[0]) if sources else None
        polynomial = self.library.exp2_polynomial if text == _EXP2 and not is_invariant else None
        self.due += EXP2_SHARE if polynomial else 0.0
        if origin and (text, origin[0]) in _REWRITES:
            result = origin[1]
            for step in _REWRITES[text, origin[0]]:
                result = self._instruction(step, "r", result)
        elif polynomial and self.due >= 1.0:
            self.due -= 1.0
            result = self._expand(polynomial, sources)
            self.origins[result] = (_EXP2, sources[0])
        else:
            result = self._register(kind, invariant=is_invariant)
            # A call has the result behind the operands.
            names = (*sources, result) if text.startswith("{ .param") else (result, *sources)
            (self.prologue if is_invariant else self.body).append(text % names)
            if not is_invariant:
                self._use(*sources)
            if text in _REWRITTEN:
                self.origins[result] = (text, sources[0])
        self.known[key] = result
        return result

    # Sums over rows

    def _sum(self, opcode: str, *sources: str) -> str:
        """Append arithmetic in the type of the sums; return the register of its result."""
        text = f"{opcode}.{self.suffix} %s, {', '.join(['%s'] * len(sources))};"
        return self._instruction(text, self.sum_kind, *sources)

    def _widened(self, value: str) -> str:
        """Convert a value to the type of the sums."""
        if self.sum_kind == self.kind:
            return value
        return self._instruction("cvt.f64.f32 %s, %s;", "d", value)

    def _add_loss(self, value: str) -> str:
        """Add the deviation of a row to an accumulator.

        Returns:
            Register of the weighted derivative of half the square, or of the absolute deviation.
        """
        deviation = self._sum("sub", self._widened(value), self._widened(self.target))
        weight = self._widened(self.weight) if self.weight else ""
        if self.output.loss == "squares":
            factor = self._sum("mul", deviation, weight) if weight else deviation
            self._accumulate(factor, deviation)
            return factor
        self._accumulate(self._sum("abs", deviation), weight)
        if not self.output.gradient:
            return ""
        width, digits = ("f32", 8) if self.sum_kind == "r" else ("f64", 16)
        prefix = "0f" if width == "f32" else "0d"
        zero, one, minus = (
            prefix + bits.ljust(digits, "0")
            for bits in (("0", "3F8", "BF8") if width == "f32" else ("0", "3FF", "BFF"))
        )
        above = self._instruction(f"setp.gt.{width} %s, %s, {zero};", "p", deviation)
        below = self._instruction(f"setp.lt.{width} %s, %s, {zero};", "p", deviation)
        sign = self._instruction(f"selp.{width} %s, {one}, {zero}, %s;", self.sum_kind, above)
        text = f"selp.{width} %s, {minus}, %s, %s;"
        sign = self._instruction(text, self.sum_kind, sign, below)
        return self._sum("mul", sign, weight) if weight else sign

    def _accumulate(self, first: str, second: str = "") -> None:
        """Add a term, or a product of two factors, to a new accumulator, for rows in the range."""
        total = self._register(self.sum_kind, invariant=True)
        self.totals.append(total)
        self._use(first, *([second] if second else []))
        if second:
            operands = f"{total}, {first}, {second}, {total}"
            self.body.append(f"@{self.guard} fma.rn.{self.suffix} {operands};")
        else:
            self.body.append(f"@{self.guard} add.{self.suffix} {total}, {total}, {first};")

    def _reduction(self) -> list[str]:
        """Sum over each warp in a fixed order and store the sums of the block of rows."""
        warps = self.output.threads // _LANES
        lines = ["mov.u32 %lane, %laneid;", "shr.u32 %warp, %thread, 5;"]
        for start in range(0, len(self.totals), _LANES):
            lines += [
                *self._sum_over_warp(self.totals[start : start + _LANES]),
                f"add.u32 %place, %place, {start};",
                "add.u32 %place, %place, %output;",
                "mad.lo.u32 %place, %place, %vectors, %vector;",
                *_load_argument("block_count", "%index", "u32"),
                "mad.lo.u32 %place, %place, %index, %block;",
                *_load_address("partials", "%at"),
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
        sent, width = ("%other", "b32") if self.sum_kind == "r" else ("%widest", "b64")
        for distance in (16, 8, 4, 2, 1):
            half = -(-count // 2)
            lines += [f"and.b32 %low, %lane, {distance};", "setp.ne.u32 %first, %low, 0;"]
            exchange = [f"shfl.sync.bfly.b32 %other, %other, {distance}, 31, -1;"]
            if self.sum_kind != "r":
                exchange = [
                    "mov.b64 {%low, %high}, %widest;",
                    f"shfl.sync.bfly.b32 %low, %low, {distance}, 31, -1;",
                    f"shfl.sync.bfly.b32 %high, %high, {distance}, 31, -1;",
                    "mov.b64 %widest, {%low, %high};",
                ]
            # A lane adds what the one at the distance has of the same sum; %first says which.
            for index, total in enumerate(totals[:half]):
                lines.append(f"mov.{width} {sent}, {total};")
                if index + half < count:
                    other = totals[index + half]
                    lines[-1:] = [
                        f"selp.{width} {sent}, {total}, {other}, %first;",
                        f"selp.{width} {total}, {other}, {total}, %first;",
                    ]
                lines += [*exchange, f"add.{self.suffix} {total}, {total}, {sent};"]
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
        widen = "cvt.f64.f32" if self.sum_kind == "r" else "mov.b64"
        return [*lines, f"{widen} %wide, {totals[0]};"]

    # The pool of invariants
    #
    # A group of ten programs has about sixty invariants. Kept in registers through the row loop,
    # they would halve the threads of a multiprocessor. From a pool in shared memory each program
    # loads its own at its beginning, 16 bytes at a time.

    def _pool_loads(self, names: Iterable[str]) -> list[str]:
        """Allocate the invariants of one program in the pool; return the code that loads them."""
        by_size: dict[int, list[str]] = {}
        for name in names:
            by_size.setdefault(_WORDS[name[1]], []).append(name)
        lines: list[str] = []
        for word, members in sorted(by_size.items()):
            lanes, width = min(4, _VECTOR_BYTES // word), _WIDTHS[word]
            for start in range(0, len(members), lanes):
                place, self.pool_bytes = self.pool_bytes, self.pool_bytes + _VECTOR_BYTES
                loaded, tests = [], []
                for at, name in enumerate(members[start : start + lanes]):
                    address, stored = f"[invariants+{place + at * word}]", name
                    if name[1] == "p":
                        cell = f"%flag{place + at * word}"
                        self.pool_flags.append(cell)
                        self.pool_stores.append(f"selp.b32 %other, 1, 0, {name};")
                        tests.append(f"setp.ne.b32 {name}, {cell}, 0;")
                        name, stored = cell, "%other"
                    loaded.append(name)
                    self.pool_stores.append(f"@%first st.shared.{width} {address}, {stored};")
                kind, vector = width, loaded[0]
                if len(loaded) > 1:
                    kind = f"v{lanes}.{width}"
                    vector = f"{{{', '.join(loaded + ['_'] * (lanes - len(loaded)))}}}"
                load = f"ld.volatile.shared.{kind} {vector}, [invariants+{place}];"
                lines += [load, *tests]
        return lines

    def _invariants(self) -> list[str]:
        """Return the code that computes all invariants and stores those of the pool.

        With a pool, one warp computes them while the others wait.
        """
        width = CLASSES[self.kind]
        computed = [
            *(
                f"ld.global.nc.{width} {name}, [%slots+{self.word * number}];"
                for number, name in enumerate(self.inputs)
            ),
            *self.prologue,
        ]
        if not self.pool_stores:
            return computed
        return [
            "setp.ge.u32 %first, %thread, 32;",
            "@%first bra.uni FILLED;",
            "setp.eq.u32 %first, %thread, 0;",
            *computed,
            *self.pool_stores,
            "FILLED:",
            "bar.sync 0;",
        ]

    # Values

    def _value_addresses(self) -> tuple[list[str], list[str]]:
        """Return the code for the addresses of values before the row loop, and for each tile.

        Before the loop these are the address of the first values, the step to the next ones, and
        whether they are aligned.
        """
        before = [
            *_load_argument("pitch", "%pitch", "u64"),
            *_load_address("values", "%origin"),
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
        each = [f"mad.wide.u32 %to, %row, {self.word}, %origin;"]
        guards = [self.guard.replace(_ROW, letter) for letter in self.letters]
        if len(guards) > 1:
            each.append(f"and.pred %whole, %aligned, {guards[0]};")
            each += [f"and.pred %whole, %whole, {guard};" for guard in guards[1:]]
            each.append("not.pred %first, %whole;")
            each += [
                f"and.pred %single{letter}, {guard}, %first;"
                for letter, guard in zip(self.letters, guards, strict=True)
            ]
        return before, each

    # The frame

    def text(self, name: str) -> str:
        """Return the whole kernel."""
        output = self.output
        addresses = [_load_address("variables", "%variables")]
        addresses += [_load_address("target", "%target")] if output.loss else []
        addresses += [_load_address("weights", "%weights")] if self.weight else []
        zero = "0f00000000" if self.sum_kind == "r" else "0d0000000000000000"
        width = "f32" if self.sum_kind == "r" else "f64"
        places, places_of_tile = self._value_addresses() if output.values else ([], [])
        lines = [
            f".visible .entry {name}(.param .u64 a, .param .u64 b, .param .u32 c)",
            f".maxntid {output.threads}, 1, 1",
            "{",
            *self._declarations(),
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
            *_load_argument("stride", "%stride", "u32"),
            *_load_argument("head", "%head", "u32"),
            *_load_argument("stop", "%stop", "u32"),
            *_load_argument("block_rows", "%rows", "u32"),
            *_load_argument("input_stride", "%place", "u32"),
            "mad.wide.u32 %slots, %vector, %place, %slots;",
            *(line for load in addresses for line in load),
            *self._invariants(),
            *places,
            # All threads take equally many turns; rows beyond the last ones repeat those.
            "sub.u32 %last, %stop, 1;",
            f"and.b32 %last, %last, {-output.rows};",
            "mul.lo.u32 %tile, %block, %rows;",
            "setp.ge.u32 %more, %tile, %stop;",
            "@%more bra.uni DONE;",
            "BLOCK:",
            *(f"mov.{width} {total}, {zero};" for total in self.totals),
            "add.u32 %end, %tile, %rows;",
            "min.u32 %end, %end, %stop;",
            "LOOP:",
            f"mad.lo.u32 %row, %thread, {output.rows}, %tile;",
            *self._loads(),
            *places_of_tile,
            *self.code,
            f"add.u32 %tile, %tile, {output.tile};",
            "setp.lt.u32 %more, %tile, %end;",
            "@%more bra.uni LOOP;",
            *(self._reduction() if output.loss else []),
            "add.u32 %block, %block, %blocks;",
            "mul.lo.u32 %tile, %block, %rows;",
            "setp.lt.u32 %more, %tile, %stop;",
            "@%more bra.uni BLOCK;",
            "DONE:",
            "ret;",
            "}",
        ]
        return "\n".join(lines)

    def _declarations(self) -> list[str]:
        singles = ", ".join(f"%single{letter}" for letter in self.letters)
        declared = [
            ".reg .b64 %request, %slots, %variables, %target, %weights, %at, %from, %to, %step;",
            ".reg .b64 %pitch, %origin, %wide, %widest;",
            ".reg .b32 %thread, %lane, %warp, %block, %blocks, %vector, %vectors, %output, %tile;",
            ".reg .b32 %rows, %end, %row, %last, %head, %stop, %stride, %place, %other, %low;",
            ".reg .b32 %high, %index;",
            f".reg .pred %more, %first, %whole, %aligned, {singles};",
        ]
        if self.pool_flags:
            declared.append(f".reg .b32 {', '.join(self.pool_flags)};")
        if self.pool_bytes:
            declared.append(f".shared .align 16 .b8 invariants[{self.pool_bytes}];")
        for prefix, count in self.counts.items():
            letters = self.letters if prefix[1] == _ROW else _INVARIANT
            declared += [
                f".reg .{CLASSES[prefix[0]]} %{prefix[0]}{letter}<{count}>;" for letter in letters
            ]
        return declared

    def _loads(self) -> list[str]:
        """Load the variables, the target and the weights of all rows of a thread.

        Before that the guards are set, which say whether each row is in the range.
        """
        lines = []
        for index, letter in enumerate(self.letters):
            guard = self.guard.replace(_ROW, letter)
            lines += [
                f"add.u32 %index, %row, {index};",
                f"setp.ge.u32 {guard}, %index, %head;",
                f"setp.lt.and.u32 {guard}, %index, %stop, {guard};",
            ]
        lines.append("min.u32 %index, %row, %last;")
        if self.variables:
            lines.append(f"mad.wide.u32 %from, %index, {self.word}, %variables;")
        places = [
            (f"mad.wide.u32 %at, %stride, {variable * LINE_BYTES}, %from;", register)
            for variable, register in sorted(self.variables.items())
        ]
        places += [
            (f"mad.wide.u32 %at, %index, {self.word}, %{name};", register)
            for name, register in (("target", self.target), ("weights", self.weight))
            if register
        ]
        width = CLASSES[self.kind]
        for address, register in places:
            names = [register.replace(_ROW, letter) for letter in self.letters]
            vector = f"v{len(names)}." if len(names) > 1 else ""
            joined = f"{{{', '.join(names)}}}" if len(names) > 1 else names[0]
            lines += [address, f"ld.global.nc.{vector}{width} {joined}, [%at];"]
        return lines


def _load_argument(name: str, register: str, width: str) -> list[str]:
    return [f"ld.global.nc.{width} {register}, [%request+{ARGUMENT_OFFSETS[name]}];"]


def _load_address(name: str, register: str) -> list[str]:
    return [*_load_argument(name, register, "u64"), f"cvta.to.global.u64 {register}, {register};"]
