"""Value numbering: several expressions as one list of instructions, each value computed once."""

from __future__ import annotations

from collections.abc import Mapping

from warpfit.ops import PARAMETER, VARIABLE
from warpfit_server.engine.cuda.instructions import Instruction, Template
from warpfit_server.engine.cuda.shapes import Shape

#: Stands for the row's letter in the name of a register that each row has of its own.
ROW = "#"
#: Stands there instead in the name of a register whose value is the same for all rows.
UNIFORM = "u"


class ExpressionGraph:
    """Instructions of a group of expressions, split into row-invariant and per-row work.

    A value is named by its register. Names with `ROW` in them are values that depend on the row;
    all operands of an instruction without it make its result row-invariant as well.

    Args:
        templates: the device library's templates.
        kind: register class of the data, "r" or "d".

    """

    def __init__(self, templates: Mapping[tuple[int, int], Template], kind: str) -> None:
        self._templates = templates
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
        """Append one expression whose slots start at ``first_slot``; return its value's register."""
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
        values = operands
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
        uniform = not any(ROW in source for source in sources)
        result = self.register(instruction.kind, uniform=uniform)
        if instruction.text.startswith("{ .param"):
            line = instruction.text % (*sources, result)
        else:
            line = instruction.text % (result, *sources)
        (self.uniform if uniform else self.body).append(line)
        return result
