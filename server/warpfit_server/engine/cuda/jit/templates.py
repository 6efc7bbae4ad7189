"""Templates: operators as straight-line PTX instructions, converted from compiled functions.

NVRTC compiles each row of the operator table, and each derivative, to a small PTX function; all of
them are the device library of an arithmetic. Copying a function's instructions into a kernel,
instead of calling it, lets the renderer move a part that depends on inputs alone out of the row
loop, and compute a part that functions share once. Branches become selections, since arithmetic
has no side effects. Constants and tables of the module may be read. A function with a loop or with
memory of its own cannot be inlined and is called.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Final, NamedTuple

from warpfit.ops import OPERATORS
from warpfit_server.engine.autodiff import PRODUCT_CODE, partial_kernels
from warpfit_server.engine.cuda.derivatives.lowering import partial_source
from warpfit_server.engine.cuda.runtime import compiler
from warpfit_server.engine.cuda.runtime.translation import (
    compiler_options,
    operator_source,
    prelude,
    render,
)
from warpfit_server.engine.interface import Arithmetic

#: Register class of each type width: predicate, 16, 32 and 64 bits. Registers are untyped.
CLASSES: Final = {"p": "pred", "h": "b16", "r": "b32", "d": "b64"}
_CLASS_OF_PREFIX: Final = {"p": "p", "rs": "h", "h": "h", "r": "r", "f": "r", "rd": "d", "fd": "d"}
#: A function with more instructions than this is called instead.
LONGEST_INLINE: Final = 160

_REGISTER: Final = re.compile(r"%[a-z]+\d+")
_FUNCTION: Final = re.compile(
    r"\.func\s+\(\.param \.b\d+ func_retval0\) (\w+)\((.*?)\)\s*\{(.*?)\n\}", re.DOTALL
)
_SCOPE: Final = re.compile(r"\{\s*\.reg \.b32 %temp;\s*(mov\.b64[^;]*;)\s*\}", re.DOTALL)
_LOAD: Final = re.compile(r"ld\.param\.\w+ (%\w+), \[\w+_param_(\d+)\]$")
_TABLE_PLACE: Final = re.compile(r"\[(%rd\d+)(\+-?\d+)?\]$")
_NAME: Final = re.compile(r"[a-z]\w*$")
_BRANCH: Final = re.compile(r"(?:@(!?)(%p\d+) )?bra(?:\.uni)? (\$\w+)$")

#: When a basic block runs: a disjunction of conjunctions of predicates, each given by its number
#: and whether it holds.
Condition = frozenset[frozenset[tuple[int, bool]]]
ALWAYS: Final[Condition] = frozenset({frozenset()})
Operand = int | str


class NotInlinableError(Exception):
    """The function has a loop, memory or an instruction that cannot be inlined."""


class Instruction(NamedTuple):
    """An instruction with placeholders for its registers."""

    text: str
    """Format: ``%s`` for the result, then one ``%s`` for each of ``sources``."""
    kind: str
    """Register class of the result, a key of `CLASSES`."""
    sources: tuple[int, ...]
    """Indices of values: the operands of the operator, then the results of earlier instructions."""


@dataclass(frozen=True, slots=True)
class Template:
    """Instructions of one operator; value ``i < arity`` is operand ``i``."""

    arity: int
    instructions: tuple[Instruction, ...]
    result: int
    function: str = ""
    """Name of the library function that the template calls, empty if it is inline."""


def register_class(arithmetic: Arithmetic) -> str:
    """Return the register class of a value."""
    return "r" if arithmetic.is_single else "d"


def inline(arity: int, body: str) -> Template:
    """Build the straight-line template of a function body.

    Raises:
        NotInlinableError: if the body loops, uses memory, or is longer than `LONGEST_INLINE`.
    """
    template = _Converter(arity).convert(_blocks(body))
    if len(template.instructions) > LONGEST_INLINE:
        raise NotInlinableError(f"{len(template.instructions)} instructions")
    return template


def call(arity: int, name: str, kind: str) -> Template:
    """Build the template that calls a library function on registers of class ``kind``."""
    width = CLASSES[kind]
    places = [f"p{i}" for i in range(arity)]
    lines = [
        f"{{ .param .{width} q; ",
        *(f".param .{width} {place}; " for place in places),
        *(f"st.param.{width} [{place}], %s; " for place in places),
        f"call.uni (q), {name}, ({', '.join(places)}); ",
        f"ld.param.{width} %s, [q]; }}",
    ]
    return Template(
        arity, (Instruction("".join(lines), kind, tuple(range(arity))),), arity, function=name
    )


@dataclass(slots=True)
class _Block:
    label: str
    lines: list[str] = field(default_factory=list)
    jumps: list[tuple[str, str, bool]] = field(default_factory=list)
    """(target, predicate register or empty, polarity)"""


def _blocks(body: str) -> list[_Block]:
    """Split into basic blocks; a block falls through to the next unless it always jumps."""
    blocks = [_Block("")]
    body = re.sub(r"//[^\n]*", "", body)
    body = _SCOPE.sub(lambda match: match[1].replace("%temp", "_"), body)
    for raw in body.replace(":\n", ":;\n").split(";"):
        line = " ".join(raw.split())
        if not line or line.startswith(".reg"):
            continue
        if line.startswith("."):
            raise NotInlinableError(line)
        jump = _BRANCH.match(line)
        if line.endswith(":"):
            blocks.append(_Block(line[:-1]))
        elif jump:
            negated, predicate, target = jump.groups()
            blocks[-1].jumps.append((target, predicate or "", not negated))
            blocks.append(_Block(""))
        elif line != "ret":
            blocks[-1].lines.append(line)
        else:
            blocks[-1].jumps.append(("", "", True))
            blocks.append(_Block(""))
    named = [replace(block, label=block.label or f"#{index}") for index, block in enumerate(blocks)]
    for block, following in pairwise(named):
        if not block.jumps or block.jumps[-1][1]:
            block.jumps.append((following.label, "", True))
    return named


class _Converter:
    """Converts blocks by symbolic execution, in an order in which every jump goes forward."""

    def __init__(self, arity: int) -> None:
        self.arity = arity
        self.instructions: list[Instruction] = []
        self.known: dict[tuple[str, tuple[int, ...]], int] = {}

    def convert(self, blocks: list[_Block]) -> Template:
        by_label = {block.label: block for block in blocks}
        order: list[_Block] = []  # of the blocks that can be reached, last one first
        is_done: dict[str, bool] = {}

        def visit(label: str) -> None:
            if label in is_done:
                if not is_done[label]:
                    raise NotInlinableError("a loop")
                return
            is_done[label] = False
            for target, _, _ in by_label[label].jumps:
                if target:
                    visit(target)
            is_done[label] = True
            order.append(by_label[label])

        visit(blocks[0].label)
        arriving: dict[str, list[tuple[Condition, dict[str, Operand]]]] = {
            blocks[0].label: [(ALWAYS, {})]
        }
        results: list[tuple[Condition, dict[str, Operand]]] = []
        for block in reversed(order):
            condition, values = self._merge(arriving.pop(block.label))
            for line in block.lines:
                self._execute(line, values)
            for target, predicate, polarity in block.jumps:
                taken = condition
                if predicate:
                    value = values[predicate]
                    if isinstance(value, str):
                        raise NotInlinableError("constant branch")
                    taken = _both(condition, value, polarity)
                    condition = _both(condition, value, not polarity)
                waiting = results if not target else arriving.setdefault(target, [])
                waiting.append((taken, dict(values)))
        _, values = self._merge(results)
        result = values["result"]
        if isinstance(result, str):
            kind = "d" if result.startswith("0d") else "r"
            result = self._emit(f"mov.{CLASSES[kind]}", kind, [result])
        # Instructions that the result does not need are dropped, and the values renumbered.
        needed = {result}
        for index in range(len(self.instructions) - 1, -1, -1):
            if index + self.arity in needed:
                needed.update(self.instructions[index].sources)
        kept = [i for i in range(len(self.instructions)) if i + self.arity in needed]
        number = {i: i for i in range(self.arity)}
        number |= {old + self.arity: new + self.arity for new, old in enumerate(kept)}
        instructions = tuple(
            self.instructions[i]._replace(
                sources=tuple(number[source] for source in self.instructions[i].sources)
            )
            for i in kept
        )
        return Template(self.arity, instructions, number[result])

    def _merge(
        self, edges: list[tuple[Condition, dict[str, Operand]]]
    ) -> tuple[Condition, dict[str, Operand]]:
        """Join the paths to a block: values that differ are selected by how it was reached."""

        def joined(opcode: str, operands: list[int]) -> int:
            return functools.reduce(lambda a, b: self._emit(opcode, "p", [a, b]), operands)

        condition, values = edges[0]
        for other_condition, other in edges[1:]:
            merged = other | values
            for name, value in values.items():
                if name not in other or other[name] == value:
                    continue
                terms = []
                for term in sorted(condition, key=sorted):
                    literals = [
                        literal if polarity else self._emit("not.pred", "p", [literal])
                        for literal, polarity in sorted(term)
                    ]
                    terms.append(joined("and.pred", literals))
                predicate, pair = joined("or.pred", terms), (value, other[name])
                made = [v - self.arity for v in pair if isinstance(v, int) and v >= self.arity]
                kind = self.instructions[made[0]].kind if made else _class_of(name)
                if kind == "p":
                    raise NotInlinableError("a predicate that depends on the path")
                opcode = f"selp.{CLASSES[kind]}"
                merged[name] = self._emit(opcode, kind, [*map(_bits, pair), predicate])
            condition, values = _either(condition, other_condition), merged
        return condition, values

    def _execute(self, line: str, values: dict[str, Operand]) -> None:
        load = _LOAD.match(line)
        if load:
            values[load[1]] = int(load[2])
            return
        opcode, _, rest = line.partition(" ")
        if opcode.startswith("st.param"):
            values["result"] = self._operand(rest.split(", ")[1], values)
            return
        if opcode.startswith(("ld.const.", "ld.global.nc.")):
            # A constant is read where it is used, a table by an instruction.
            result, place = rest.split(", ")
            table = _TABLE_PLACE.match(place)
            if opcode.startswith("ld.const.") and not table:
                values[result] = place
            elif not table or table[1] not in values:
                raise NotInlinableError(place)
            else:
                text = f"{opcode} %s, [%s{table[2] or ''}];"
                values[result] = self._emit(opcode, _class_of(result), [values[table[1]]], text)
        elif opcode.startswith(("ld.", "st.", "call", "@", "{")) or "|" in rest:
            raise NotInlinableError(line)
        elif opcode == "mov.b64" and rest.startswith("{"):
            pair, source = rest[1:].split("}, ")
            wide = self._operand(source, values)
            for half, name in enumerate(pair.split(", ")):
                if isinstance(wide, str):
                    values[name] = str(int(str(_bits(wide)), 0) >> 32 * half & 0xFFFFFFFF)
                elif name != "_":
                    holes = "{%s, _}" if half == 0 else "{_, %s}"
                    values[name] = self._emit(opcode, "r", [wide], f"mov.b64 {holes}, %s;")
        elif opcode == "mov.b64" and "{" in rest:
            result, pair = rest.rstrip("}").split(", {")
            low, high = parts = [_bits(self._operand(part, values)) for part in pair.split(", ")]
            if isinstance(low, str) and isinstance(high, str):
                values[result] = f"0d{int(high, 0) % 2**32:08X}{int(low, 0) % 2**32:08X}"
            else:
                values[result] = self._emit(opcode, "d", parts, "mov.b64 %s, {%s, %s};")
        else:
            result, *sources = rest.split(", ")
            operands = [self._operand(source, values) for source in sources]
            if opcode.startswith("mov."):
                operand = _bits(operands[0]) if ".b" in opcode else operands[0]
                if isinstance(operand, str) and re.match(r"%f\d", result):
                    operand = f"0f{int(str(_bits(operand)), 0) % 2**32:08X}"
                values[result] = operand
            elif opcode == "div.approx.ftz.f32":
                reciprocal = self._emit("rcp.approx.ftz.f32", "r", [operands[1]])
                values[result] = self._emit("mul.ftz.f32", "r", [operands[0], reciprocal])
            else:
                values[result] = self._emit(opcode, _class_of(result), operands)

    def _operand(self, text: str, values: dict[str, Operand]) -> Operand:
        if text in values:
            return values[text]
        if _REGISTER.fullmatch(text) or text.startswith(("%", "__", "[")):
            raise NotInlinableError(f"undefined operand {text}")
        return text

    def _emit(self, opcode: str, kind: str, operands: list[Operand], text: str = "") -> int:
        """Append an instruction, with literals in its text, unless an equal one is there.

        Constants in memory and addresses of tables are read into registers of a scope of its own.
        """
        text = text or f"{opcode} %s, {', '.join(['%s'] * len(operands))};"
        operands, fills = list(operands), dict[str, str]()
        for index, operand in enumerate(operands):
            if isinstance(operand, str) and operand[0] == "[":
                fills[f"c{index}"] = f"ld.const.b64 c{index}, {operand};"
                operands[index] = f"c{index}"
            elif isinstance(operand, str) and _NAME.match(operand):
                fills[f"c{index}"] = f"mov.b64 c{index}, {operand};"
                operands[index] = f"c{index}"
        head, *tails = text.split("%s")
        pieces = [head, "%s", tails[0]]
        sources = []
        if text.startswith("mov.b64 {"):
            pieces, sources = [text], [operand for operand in operands if isinstance(operand, int)]
        else:
            for operand, tail in zip(operands, tails[1:], strict=True):
                pieces += ["%s" if isinstance(operand, int) else operand, tail]
                sources += [operand] if isinstance(operand, int) else []
        whole = "".join(pieces)
        if fills:
            scope = f".reg .b64 {', '.join(fills)}; {' '.join(fills.values())}"
            whole = f"{{ {scope} {whole} }}"
        key = (whole, tuple(sources))
        if key not in self.known:
            self.known[key] = self.arity + len(self.instructions)
            self.instructions.append(Instruction(key[0], kind, key[1]))
        return self.known[key]


def _class_of(register: str) -> str:
    match = re.match(r"%([a-z]+)\d", register)
    if not match or match[1] not in _CLASS_OF_PREFIX:
        raise NotInlinableError(f"register {register}")
    return _CLASS_OF_PREFIX[match[1]]


def _bits(operand: Operand) -> Operand:
    """Return a floating-point literal as the integer of its bits, for untyped instructions."""
    if isinstance(operand, str) and operand[:2] in ("0f", "0d"):
        return "0x" + operand[2:]
    return operand


def _both(condition: Condition, predicate: int, polarity: bool) -> Condition:
    """Return the conjunction with one more predicate."""
    return frozenset(
        term | {(predicate, polarity)}
        for term in condition
        if (predicate, not polarity) not in term
    )


def _either(first: Condition, second: Condition) -> Condition:
    """Return the disjunction, with ``x and p or x and not p`` simplified to ``x``."""
    terms = set(first | second)
    for term in list(terms):
        for predicate, polarity in term:
            twin = term - {(predicate, polarity)} | {(predicate, not polarity)}
            if term in terms and twin in terms:
                merged = frozenset({term - {(predicate, polarity)}})
                return _either(frozenset(terms - {term, twin}), merged)
    return frozenset(term for term in terms if not any(other < term for other in terms))


# ----------------------------------------------------------------------- the device library

#: Functions of fast arithmetic that only compiled kernels use.
#:
#: ``pow_by_masks`` has the bounds of the prelude's ``fast_pow``. Everything but two bitwise
#: instructions, the logarithm, the product and the exponential depends on the exponent alone.
#: For a whole exponent the sign of ``a`` is masked out of the logarithm and, if it is odd, into the
#: result; for another one it stays, and the logarithm of a negative number is NaN. A zero exponent
#: takes the logarithm of 1.
#:
#: ``exp2_polynomial`` needs no special-function unit (16 results a clock and multiprocessor; other
#: arithmetic has 128): a kernel that computes some exponentials by the polynomial and the others by
#: the unit is faster than one that uses either alone (an idea of FlashAttention-4). It rounds to a
#: whole number plus a remainder in [-1/2, 1/2], for which it has a minimax polynomial; the relative
#: error is below 1.7e-7, and 0, inf and NaN are as the unit gives them.
_HELPERS: Final = r"""
__device__ __forceinline__ float pow_by_masks(float a, float b) {
  float shifted = __fadd_rn(b, 12582912.0f);
  bool whole = __fsub_rn(shifted, 12582912.0f) == b;
  unsigned keep = b == 0.0f ? 0u : whole ? 0x7fffffffu : 0xffffffffu;
  unsigned one = b == 0.0f ? 0x3f800000u : 0u;
  unsigned sign = whole ? (unsigned)__float_as_int(shifted) << 31 : 0u;
  unsigned bits = (unsigned)__float_as_int(a);
  float magnitude = fast_exp2(b * fast_log2(__int_as_float((int)((bits & keep) | one))));
  return __int_as_float((int)((unsigned)__float_as_int(magnitude) | (bits & sign)));
}

#if __CUDA_ARCH__ >= 800
extern "C" __device__ __noinline__ float wf_exp2_polynomial(float a) {
  float x;
  asm("max.NaN.ftz.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(-127.0f));
  asm("min.NaN.ftz.f32 %0, %1, %2;" : "=f"(x) : "f"(x), "f"(128.0f));
  float shifted = __fadd_rn(x, 12582912.0f);
  float rest = __fsub_rn(x, __fsub_rn(shifted, 12582912.0f));
  float p = __fmaf_rn(0.00132647f, rest, 0.00967151f);
  p = __fmaf_rn(p, rest, 0.05550734f);
  p = __fmaf_rn(p, rest, 0.24022242f);
  p = __fmaf_rn(p, rest, 0.69314698f);
  p = __fmaf_rn(p, rest, 1.0f);
  return p * __int_as_float((__float_as_int(shifted) << 23) + 0x3f800000);
}
#endif
"""
#: Most registers of a called function, by type: those of a thread in the largest blocks, of 1024
#: threads in float32 and 512 in float64.
_REGISTERS: Final = MappingProxyType({"f32": 64, "f64": 128})
_EXP2_POLYNOMIAL: Final = "wf_exp2_polynomial"
_DATA: Final = re.compile(
    r"^(?:\.visible )?(\.(?:const|global) \.align \d+ \.b8 (wf_\w+)\[\d+\] = \{[^}]*\};)",
    re.MULTILINE,
)
_VERSION: Final = re.compile(r"^\.version .*$", re.MULTILINE)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceLibrary:
    """Operators as PTX for one arithmetic and architecture, for the renderer and the linker."""

    arithmetic: Arithmetic
    architecture: int
    """Compute capability, 90 for 9.0."""
    version_line: str
    """PTX ``.version`` directive of the compiler that made the templates."""
    templates: Mapping[int, Template]
    """Templates by code of instruction."""
    exp2_polynomial: Template | None
    """2^x without the special-function unit, for fast arithmetic, where there is one."""
    data: Mapping[str, str]
    """Declarations of the constants and tables that templates read, by name."""
    functions: bytes
    """Relocatable machine code of the functions that templates call; empty if none does."""
    key: bytes
    """Hash of the above, part of the key of every kernel."""


@functools.cache
def build(arithmetic: Arithmetic, architecture: int, *, derivatives: bool) -> DeviceLibrary:
    """Compile the operator table, optionally with the derivatives of operators; takes 0.3 s.

    It is compiled once, or once by each of several threads that begin at the same time.
    """
    named: dict[int, tuple[str, str, str]] = {}  # name, operands and body of a function
    for op in OPERATORS.values():
        body = operator_source(op, arithmetic)
        if arithmetic is Arithmetic.FAST and op.cuda_fast_compiled:
            body = render(op.cuda_fast_compiled, "float")
        named[op.code] = (f"wf_{op.name}", op.operands, body)
    if derivatives:
        named[PRODUCT_CODE] = ("wf_product", "ab", "product(a, b)")
        for kernel in partial_kernels():
            body, operands = partial_source(kernel.source, arithmetic), "abc"[: kernel.arity]
            if kernel.scaled:
                body, operands = f"product(s, {body})", "s" + operands
            named[kernel.code] = (f"wf_{kernel.name}", operands, body)
    real = arithmetic.real
    sources = {
        name: f'extern "C" __device__ __noinline__ {real} {name}'
        f"({', '.join(f'{real} {operand}' for operand in operands)}) {{ return {body}; }}"
        for name, operands, body in named.values()
    }
    options = ("-rdc=true", *compiler_options(arithmetic))
    start = prelude(arithmetic)
    helpers = _HELPERS if arithmetic is Arithmetic.FAST else ""
    ptx = compiler.to_ptx("\n".join([start, helpers, *sources.values()]), architecture, options)
    found = {
        name: (parameters.count(".param"), body)
        for name, parameters, body in _FUNCTION.findall(ptx)
    }
    templates, called = {}, []
    for code, (name, _, _) in named.items():
        arity, body = found[name]
        try:
            templates[code] = inline(arity, body)
        except NotInlinableError:
            templates[code] = call(arity, name, register_class(arithmetic))
            called.append(sources[name])
    version = _VERSION.search(ptx)
    bound = f"--maxrregcount={_REGISTERS[arithmetic.type_name]}"
    return DeviceLibrary(
        arithmetic=arithmetic,
        architecture=architecture,
        version_line=version[0] if version else "",
        templates=templates,
        exp2_polynomial=(inline(*found[_EXP2_POLYNOMIAL]) if _EXP2_POLYNOMIAL in found else None),
        data={name: text for text, name in _DATA.findall(ptx)},
        functions=(
            compiler.to_cubin("\n".join([start, *called]), architecture, (*options, bound))
            if called
            else b""
        ),
        key=hashlib.blake2b(
            f"{arithmetic} {architecture}\n{ptx}".encode(), digest_size=16
        ).digest(),
    )
