"""A NumPy interpreter of the bytecode that interpreter.cu runs."""

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.emulators.device_lowering import Lowered
from warpfit.expressions.reference import evaluate_program
from warpfit.ir import Program
from warpfit.ops import OPERATORS, Operator
from warpfit_server.engine.cuda.interpreter import bytecode


@cache
def cases() -> dict[int, tuple[Operator, int]]:
    """Operator and form of each case label."""
    table = bytecode.labels()
    forms = {1: 1, 2: 6, 3: 1}
    return {
        int(table[row.code]) + form: (row, form)
        for row in OPERATORS.values()
        for form in range(forms[row.arity])
    }


class Machine:
    """Runs one program of a lowered batch on float64 columns [variables, rows]."""

    def __init__(self, lowered: Lowered, columns: NDArray[Any]) -> None:
        self._batch = lowered.batch
        self._lowered = lowered
        self._columns = columns
        self._cases = cases()
        self.highest = 0
        """Most stack levels below the top that a program has used."""

    def run(self, program: int) -> NDArray[np.float64]:
        first, count, slot, _ = self._lowered.programs[program].tolist()
        top: Any = None
        stack: list[Any] = []
        assert self._lowered.instructions[first + count, 0] == bytecode.END
        for head, word in self._lowered.instructions[first : first + count].tolist():
            index = head >> bytecode.INDEX_SHIFT
            if head & (bytecode.LOAD_VARIABLE | bytecode.LOAD_SLOT):
                if head & bytecode.PUSH:
                    stack.append(top)
                else:
                    assert top is None, "a live value was overwritten"
                is_variable = bool(head & bytecode.LOAD_VARIABLE)
                top = self._columns[index] if is_variable else self._slot(slot + index)
            self.highest = max(self.highest, len(stack))
            label = head & ((1 << bytecode.LABEL_BITS) - 1)
            if label:
                top = self._apply(*self._cases[label], top, word, stack, slot)
        assert not stack, "values are left on the stack"
        return np.broadcast_to(top, self._columns.shape[1:])

    def _apply(
        self, row: Operator, form: int, top: Any, word: int, stack: list[Any], slot: int
    ) -> Any:
        if row.arity == 1:
            return row.numpy(top)
        if row.arity == 3:
            operands = [*stack[-2:], top]
            del stack[-2:]
            return row.numpy(*(operands[word >> shift & 3] for shift in (0, 2, 4)))
        if form < bytecode.FROM_SLOT:
            other = self._columns[word]
        else:
            other = self._slot(slot + word) if form < bytecode.FROM_STACK else stack.pop()
        return row.numpy(other, top) if form & 1 else row.numpy(top, other)

    def _slot(self, index: int) -> NDArray[np.float64]:
        """One number, as in the reference: NumPy's power by an array of them may differ."""
        start, stop, parameter, count = self._lowered.slots[index].tolist()
        program = Program(self._batch.codes[start:stop], self._batch.values[start:stop])
        vector = self._batch.parameters[parameter : parameter + count]
        return np.asarray(evaluate_program(program, self._columns, vector)[0])
