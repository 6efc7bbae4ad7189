"""Value numbering: several expressions as one list of instructions, each value computed once."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from warpfit.ops import PARAMETER, VARIABLE
from warpfit_server.engine.cuda.instructions import Instruction, Template
from warpfit_server.engine.cuda.shapes import Shape

#: Stands for the row's letter in the name of a register that each row has of its own.
ROW = "#"
#: Stands there instead in the name of a register whose value is the same for all rows.
UNIFORM = "u"


def _chain(*texts: str) -> Template:
    steps = tuple(Instruction(text, "r", (index,)) for index, text in enumerate(texts))
    return Template(1, steps, len(steps))


_EXP2: Final = "ex2.approx.ftz.f32 %s, %s;"
_LOG2: Final = "lg2.approx.ftz.f32 %s, %s;"
_SQRT: Final = "sqrt.approx.ftz.f32 %s, %s;"
_RECIPROCAL: Final = "rcp.approx.ftz.f32 %s, %s;"
_HALVE: Final = "mul.ftz.f32 %s, %s, 0f3F000000;"
#: What an approximate function of another one's result is in terms of that one's operand. Each
#: saves work of the special-function unit, which bounds fast kernels, and an intermediate result
#: that may overflow.
REWRITES: Final[Mapping[tuple[str, str], Template]] = MappingProxyType(
    {
        (_RECIPROCAL, _EXP2): _chain("neg.ftz.f32 %s, %s;", _EXP2),
        (_RECIPROCAL, _SQRT): _chain("rsqrt.approx.ftz.f32 %s, %s;"),
        (_RECIPROCAL, _RECIPROCAL): _chain(),
        (_LOG2, _SQRT): _chain(_LOG2, _HALVE),
        (_LOG2, _EXP2): _chain(),
        (_SQRT, _EXP2): _chain(_HALVE, _EXP2),
    }
)
_REWRITTEN: Final = frozenset(inner for _, inner in REWRITES)


class ExpressionGraph:
    """Instructions of a group of expressions, split into row-invariant and per-row work.

    A value is named by its register. Names with `ROW` in them are values that depend on the row;
    all operands of an instruction without it make its result row-invariant as well.

    Args:
        templates: the device library's templates.
        kind: register class of the data, "r" or "d".
        exp2: 2^x in plain arithmetic, to be used for some of the approximate exponentials.
        share: the share of the row-dependent ones that use it.

    """

    def __init__(
        self,
        templates: Mapping[tuple[int, int], Template],
        kind: str,
        exp2: Template | None = None,
        share: float = 0.0,
    ) -> None:
        self._templates = templates
        self._exp2 = exp2
        self._share = share
        self._due = 0.0
        self._origins: dict[str, tuple[str, str]] = {}
        self._kind = kind
        self._known: dict[tuple[str, ...], str] = {}
        self._applied: dict[tuple[object, ...], str] = {}
        self._counts: dict[str, int] = {}
        self.uniform: list[str] = []
        """Instructions to run once, before the rows."""
        self.body: list[str] = []
        """Instructions to run for each row; the caller takes and clears them."""
        self.variables: dict[int, str] = {}
        """Register of each variable used so far, by index."""
        self.slots: dict[int, str] = {}
        """Register of each slot used so far, by number in the group."""
        self.used: dict[str, None] = {}
        """Row-invariant values that the body reads, in order; the caller takes and clears them."""
        self.functions: set[Template] = set()
        """Templates used that call a library function."""

    def register(self, kind: str, *, uniform: bool = False) -> str:
        """Name a fresh register of a class."""
        prefix = kind + (UNIFORM if uniform else ROW)
        number = self._counts.get(prefix, 0)
        self._counts[prefix] = number + 1
        return f"%{prefix}{number}"

    def counts(self) -> Mapping[str, int]:
        """Registers named so far by prefix: class, then `ROW` or `UNIFORM`."""
        return self._counts

    def add(self, shape: Shape, first_slot: int) -> str:
        """Append one expression whose slots start at ``first_slot``; return where its value is."""
        stack: list[str] = []
        templates = self._templates
        applied = self._applied
        for code, operand in zip(shape.codes, shape.operands, strict=True):
            if code == VARIABLE:
                stack.append(self._leaf(self.variables, operand, uniform=False))
            elif code == PARAMETER:
                stack.append(self._leaf(self.slots, operand + first_slot, uniform=True))
            else:
                template = templates[code, operand]
                arity = template.arity
                operands = stack[-arity:]
                del stack[-arity:]
                key = (code, operand, *operands)
                result = applied.get(key)
                if result is None:
                    result = applied[key] = self._apply(template, operands)
                stack.append(result)
        return stack.pop()

    def _leaf(self, registers: dict[int, str], index: int, *, uniform: bool) -> str:
        if index not in registers:
            registers[index] = self.register(self._kind, uniform=uniform)
        return registers[index]

    def _apply(self, template: Template, operands: list[str]) -> str:
        if template.function:
            self.functions.add(template)
        values = list(operands)
        known = self._known
        for instruction in template.instructions:
            sources = [values[index] for index in instruction.sources]
            key = (instruction.text, *sources)
            result = known.get(key)
            if result is None:
                result = known[key] = self._emit(instruction, sources)
            values.append(result)
        return values[template.result]

    def _emit(self, instruction: Instruction, sources: list[str]) -> str:
        """Append an instruction, or what it is rewritten to; return where its result is."""
        origin = self._origins.get(sources[0]) if sources else None
        if origin and (instruction.text, origin[0]) in REWRITES:
            return self._apply(REWRITES[instruction.text, origin[0]], [origin[1]])
        if instruction.text == _EXP2 and self._exp2 and ROW in sources[0]:
            self._due += self._share
            if self._due >= 1.0:
                self._due -= 1.0
                result = self._apply(self._exp2, sources)
                self._origins[result] = (_EXP2, sources[0])
                return result
        result = self._append(instruction, sources)
        if instruction.text in _REWRITTEN:
            self._origins[result] = (instruction.text, sources[0])
        return result

    def _append(self, instruction: Instruction, sources: list[str]) -> str:
        uniform = not any(ROW in source for source in sources)
        result = self.register(instruction.kind, uniform=uniform)
        if instruction.text.startswith("{ .param"):
            line = instruction.text % (*sources, result)
        else:
            line = instruction.text % (result, *sources)
        if uniform:
            self.uniform.append(line)
        else:
            self.body.append(line)
            self.used.update((source, None) for source in sources if ROW not in source)
        return result
