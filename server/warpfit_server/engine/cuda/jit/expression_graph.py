"""Value numbering: a group of expressions as one list of instructions, each value computed once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from warpfit.ops import OPERATORS, PARAMETER, VARIABLE
from warpfit_server.engine.autodiff.rules import (
    ALONE,
    FIRST_READ,
    KIND,
    NEGATES,
    NOTHING,
    OPERAND_IS_PARTIAL,
    PASSES,
    PRODUCT_CODE,
    READS,
    SCALED,
    rules,
)
from warpfit_server.engine.cuda.jit.device_library import POWER_DERIVATIVE
from warpfit_server.engine.cuda.jit.instructions import Instruction, Template
from warpfit_server.engine.cuda.jit.shapes import Shape

#: In the name of a register: placeholder for the letter of the row that the value belongs to.
ROW = "#"
#: In the name of a register: the value is the same for all rows (uniform).
UNIFORM = "u"


def _chain(*texts: str) -> Template:
    steps = tuple(Instruction(text, "r", (index,)) for index, text in enumerate(texts))
    return Template(1, steps, len(steps))


_EXP2: Final = "ex2.approx.ftz.f32 %s, %s;"
_LOG2: Final = "lg2.approx.ftz.f32 %s, %s;"
_SQRT: Final = "sqrt.approx.ftz.f32 %s, %s;"
_RECIPROCAL: Final = "rcp.approx.ftz.f32 %s, %s;"
_HALVE: Final = "mul.ftz.f32 %s, %s, 0f3F000000;"
#: An approximate function of another one's result, in terms of the other one's operand. Each saves
#: work of the special-function unit, which bounds fast kernels, and an intermediate result that may
#: overflow.
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
_RULES: Final = rules().tolist()
#: Operand number that means the result in a rule.
_RESULT: Final = 3
_ADD: Final = OPERATORS["add"].code
_SUBTRACT: Final = OPERATORS["sub"].code
_NEGATE: Final = OPERATORS["neg"].code
_ABSOLUTE: Final = OPERATORS["abs"].code
_REWRITTEN: Final = frozenset(inner for _, inner in REWRITES)


@dataclass(frozen=True, slots=True)
class Node:
    """The value of one token."""

    code: int
    operand: int
    """See `Shape`."""
    children: tuple[int, ...]
    """Indices of the operands' nodes."""
    register: str


class ExpressionGraph:
    """Instructions of a group of expressions, split into row-invariant and per-row work.

    A value is named by its register. Names with `ROW` in them are values that depend on the row;
    all operands of an instruction without it make its result row-invariant as well.

    Args:
        templates: the device library's templates.
        kind: register class of the data, "r" or "d".
        exp2: 2^x in plain arithmetic, for some of the approximate exponentials.
        share: share of the row-dependent exponentials that use it.
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
        """Instructions to run once, before the row loop."""
        self.body: list[str] = []
        """Instructions to run for each row; the caller takes and clears them."""
        self.variables: dict[int, str] = {}
        """Register of each variable used so far, by index."""
        self.inputs: dict[int, str] = {}
        """Register of each input used so far, by number in the group."""
        self.used: dict[str, None] = {}
        """Row-invariant values that the body reads, in order; the caller clears them too."""
        self.functions: set[Template] = set()
        """Templates in use that call a library function."""

    def register(self, kind: str, *, uniform: bool = False) -> str:
        """Return the name of a new register of a class."""
        prefix = kind + (UNIFORM if uniform else ROW)
        number = self._counts.get(prefix, 0)
        self._counts[prefix] = number + 1
        return f"%{prefix}{number}"

    def counts(self) -> Mapping[str, int]:
        """Return the number of registers by prefix: class, then `ROW` or `UNIFORM`."""
        return self._counts

    def trace(self, shape: Shape, first_input: int) -> list[Node]:
        """Append one expression; return its nodes in the order of its tokens, the result last.

        ``first_input`` is the number of its first input in the group.
        """
        stack: list[int] = []
        nodes: list[Node] = []
        applied = self._applied
        for code, operand in zip(shape.codes, shape.operands, strict=True):
            if code == VARIABLE:
                register = self._leaf(self.variables, operand, uniform=False)
                node = Node(code, operand, (), register)
            elif code == PARAMETER:
                register = self._leaf(self.inputs, operand + first_input, uniform=True)
                node = Node(code, operand, (), register)
            else:
                template = self._templates[code, operand]
                children = tuple(stack[-template.arity :])
                del stack[-template.arity :]
                operands = [nodes[child].register for child in children]
                key = (code, operand, *operands)
                result = applied.get(key)
                if result is None:
                    result = applied[key] = self._apply(template, operands)
                node = Node(code, operand, children, result)
            stack.append(len(nodes))
            nodes.append(node)
        return nodes

    def deviation_slope(self, value: str, target: str, loss: str) -> str:
        """Append the derivative of half a squared, or of an absolute, deviation by the value.

        Value, target and result are registers; the loss is ``"squares"`` or ``"absolute"``.
        """
        deviation = self._apply(self._templates[_SUBTRACT, 0], [value, target])
        if loss == "squares":
            return deviation
        return self._apply(self._templates[_RULES[3 * _ABSOLUTE][ALONE], 0], [deviation])

    def slopes(self, nodes: Sequence[Node], seed: str, wanted: Collection[int]) -> dict[int, str]:
        """Append the derivatives by inputs of the nodes of one expression: one backward sweep.

        ``seed`` is the register of the derivative by the value. Returns the register of the
        derivative by each wanted input, without those that are always 0.
        """
        leads = self._leads_to(nodes, wanted)
        slopes = {len(nodes) - 1: seed}
        found: dict[int, str] = {}
        for number in range(len(nodes) - 1, -1, -1):
            node, slope = nodes[number], slopes.get(number)
            if slope is None or not leads[number]:
                continue
            if node.code == PARAMETER:
                known = found.get(node.operand)
                found[node.operand] = slope if known is None else self._sum(known, slope)
            for index, child in enumerate(node.children):
                term = self._chain(nodes, node, index, slope) if leads[child] else None
                if term is not None:
                    slopes[child] = term
        return found

    def _leads_to(self, nodes: Sequence[Node], wanted: Collection[int]) -> list[bool]:
        """Return whether each node depends on a wanted input."""
        leads: list[bool] = []
        for node in nodes:
            own = node.code == PARAMETER and node.operand in wanted
            leads.append(own or any(leads[child] for child in node.children))
        return leads

    def _chain(self, nodes: Sequence[Node], node: Node, index: int, slope: str) -> str | None:
        """Multiply a slope by the derivative by one operand; None if that is always 0."""
        if node.operand:  # a literal power
            operand = nodes[node.children[0]].register
            partial = self._apply(self._templates[POWER_DERIVATIVE, node.operand], [operand])
            return self._apply(self._templates[PRODUCT_CODE, 0], [slope, partial])
        rule = _RULES[3 * node.code + index]
        kind = rule[KIND]
        if kind == NOTHING:
            return None
        if kind == PASSES:
            return slope
        if kind == NEGATES:
            return self._apply(self._templates[_NEGATE, 0], [slope])
        places = rule[FIRST_READ : FIRST_READ + rule[READS]]
        registers = [*(nodes[child].register for child in node.children), node.register]
        reads = [registers[-1 if place == _RESULT else place] for place in places]
        if kind == OPERAND_IS_PARTIAL:
            return self._apply(self._templates[PRODUCT_CODE, 0], [slope, reads[0]])
        if rule[SCALED]:
            return self._apply(self._templates[rule[SCALED], 0], [slope, *reads])
        partial = self._apply(self._templates[rule[ALONE], 0], reads)
        return self._apply(self._templates[PRODUCT_CODE, 0], [slope, partial])

    def _sum(self, first: str, second: str) -> str:
        return self._apply(self._templates[_ADD, 0], [first, second])

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
        """Append an instruction, or what replaces it; return the register of its result."""
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
