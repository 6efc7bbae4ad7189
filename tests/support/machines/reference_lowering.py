"""A plain lowering of programs to bytecode, with a stack of subtrees."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from warpfit.ir import Batch
from warpfit.ops import BY_CODE, VARIABLE
from warpfit_server.engine.cuda.interpreter.bytecode import (
    END,
    FROM_SLOT,
    FROM_STACK,
    FROM_VARIABLE,
    LOAD_SLOT,
    LOAD_VARIABLE,
    PUSH,
    SLOT_LEVELS,
    labels,
)

#: Word 0 without an index, the leaf that is loaded, and word 1 or the leaf that it names. A leaf is
#: the index of a variable, or a slot: first token, end, first parameter, parameters.
Instruction = tuple[int, Any, Any]
_LABELS = labels().tolist()


@dataclass(slots=True)
class Subtree:
    """An atom if there is no code."""

    first: int
    end: int
    variable: int = -1
    height: int = 0
    """Of the stack that computes it, if it is row-invariant."""
    need: int = 0
    code: list[Instruction] = field(default_factory=list)

    @property
    def rank(self) -> int:
        """Atoms are evaluated last."""
        return self.need if self.code else -1


class Lowering:
    """Lowers one program of a batch; ``code`` and ``need`` are what comes out."""

    def __init__(self, batch: Batch, index: int) -> None:
        start, stop = (int(place) for place in batch.starts[index : index + 2])
        self._parameters = int(batch.parameter_starts[index]), int(batch.parameter_counts[index])
        stack: list[Subtree] = []
        for token in range(start, stop):
            row = BY_CODE.get(int(batch.codes[token]))
            if row is None:
                is_variable = batch.codes[token] == VARIABLE
                index = int(batch.values[token]) if is_variable else -1
                stack.append(Subtree(token, token + 1, index, 0 if is_variable else 1))
            else:
                operands = stack[-row.arity :]
                del stack[-row.arity :]
                stack.append(self._apply(_LABELS[row.code], operands, token + 1))
        (root,) = stack
        self.need = root.need
        self.code = [*(root.code or self._loaded(root)), (END, 0, 0)]

    def _apply(self, label: int, operands: list[Subtree], end: int) -> Subtree:
        whole = Subtree(operands[0].first, end)
        heights = [operand.height + place for place, operand in enumerate(operands)]
        if all(operand.height for operand in operands) and max(heights) <= SLOT_LEVELS:
            whole.height = max(heights)
            return whole
        make = (self._unary, self._binary, self._ternary)[len(operands) - 1]
        whole.code, whole.need = make(label, *operands)
        return whole

    def _unary(self, label: int, a: Subtree) -> tuple[list[Instruction], int]:
        if a.code:
            a.code.append((label, 0, 0))
            return a.code, a.need
        return self._loaded(a, label), 0

    def _binary(self, label: int, a: Subtree, b: Subtree) -> tuple[list[Instruction], int]:
        if a.code and b.code:
            a_first = a.need >= b.need
            first, second = (a, b) if a_first else (b, a)
            code = _pushing(first.code, second.code)
            code.append((label + FROM_STACK + a_first, 0, 0))
            return code, max(first.need, second.need + 1)
        # Of two atoms a variable is loaded, and a slot is the other operand.
        a_is_other = not a.code and (bool(b.code) or a.height > 0)
        other, top = (a, b) if a_is_other else (b, a)
        source = FROM_SLOT if other.height else FROM_VARIABLE
        if top.code:
            top.code.append((label + source + a_is_other, 0, self._leaf(other)))
            return top.code, top.need
        return self._loaded(top, label + source + a_is_other, self._leaf(other)), 0

    def _ternary(self, label: int, *operands: Subtree) -> tuple[list[Instruction], int]:
        ordered = sorted(range(3), key=lambda place: -operands[place].rank)
        codes = [operands[place].code or self._loaded(operands[place]) for place in ordered]
        need = max(operands[place].need + taken for taken, place in enumerate(ordered))
        code = _pushing(_pushing(codes[0], codes[1]), codes[2])
        code.append((label, 0, sum(ordered.index(place) << 2 * place for place in range(3))))
        return code, need

    def _loaded(self, atom: Subtree, label: int = 0, other: Any = 0) -> list[Instruction]:
        source = LOAD_SLOT if atom.height else LOAD_VARIABLE
        return [(label | source, self._leaf(atom), other)]

    def _leaf(self, atom: Subtree) -> Any:
        return (atom.first, atom.end, *self._parameters) if atom.height else atom.variable


def _pushing(first: list[Instruction], second: list[Instruction]) -> list[Instruction]:
    """Put code behind other code, whose result it pushes."""
    word, loaded, other = second[0]
    first.append((word | PUSH, loaded, other))
    first.extend(second[1:])
    return first
