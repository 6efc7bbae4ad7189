"""A NumPy interpreter of the instructions that derivatives.cu runs."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpfit.expressions.reference import FUNCTIONS
from warpfit.ir import Batch
from warpfit.ops import OPERATORS
from warpfit_server.engine.autodiff.rules import PRODUCT_CODE, partial_kernels
from warpfit_server.engine.cuda.derivatives.encoding import DerivativeCode
from warpfit_server.engine.cuda.derivatives.source import labels
from warpfit_server.engine.lowering.lowered import COPY_CODE

LEVEL, COLUMN, SCALAR, BEFORE = 1, 2, 3, 4
#: Operators of programs whose values and derivatives stay finite.
ROBUST = ("add", "sub", "mul", "neg", "abs", "aq", "sin", "tanh", "min", "where", "fma", "logistic")


def product(slope: Any, partial: Any) -> Any:
    return np.where((slope != 0) & (partial != 0), slope * partial, 0.0)


@cache
def functions() -> dict[int, tuple[int, Callable[..., Any]]]:
    """Number of operands and meaning of each case label."""
    table = labels()
    found: dict[int, tuple[int, Callable[..., Any]]] = {
        int(table[row.code]): (row.arity, row.numpy) for row in OPERATORS.values()
    }
    for kernel in partial_kernels():
        found[int(table[kernel.code])] = (kernel.arity + kernel.scaled, _partial(kernel))
    found[int(table[PRODUCT_CODE])] = (2, product)
    found[int(table[COPY_CODE])] = (1, lambda a: a)
    return found


def _partial(kernel: Any) -> Callable[..., Any]:
    code = compile(kernel.source, "<partial>", "eval")

    def compute(*operands: Any) -> Any:
        reads = operands[1:] if kernel.scaled else operands
        names = dict(zip("abc", reads, strict=False))
        partial = eval(code, {"__builtins__": {}, **FUNCTIONS}, names)
        return product(operands[0], partial) if kernel.scaled else partial

    return compute


class Machine:
    """Runs one job on float64 columns [columns of the data set, rows]."""

    def __init__(self, batch: Batch, code: DerivativeCode, columns: NDArray[Any]) -> None:
        self._batch = batch
        self._code = code
        self._columns = columns
        self._functions = functions()

    def run(self, program: int, vector: int = 0) -> None:
        record = self._code.programs[program]
        self.record = record
        first = int(record["parameter"]) + vector * int(record["parameters"])
        self._parameters = self._batch.parameters[first:]
        self._scalars: dict[int, Any] = {}
        self._levels: dict[int, Any] = {}
        self._set_scalars()
        before: Any = None
        start = int(record["first"])
        for word, a, b, rest in self._code.instructions[start:][: record["count"]].tolist():
            arity, function = self._functions[word & 1023]
            indices = (a, b, rest >> 16)
            sources = [word >> (10 + 3 * k) & 7 for k in range(arity)]
            operands = [
                before if source == BEFORE else self.place(index << 3 | source)
                for source, index in zip(sources, indices, strict=False)
            ]
            with np.errstate(all="ignore"):
                before = function(*operands)
            if word >> 19 & 1:
                assert (rest & 0xFFFF) < record["levels"]
                self._levels[rest & 0xFFFF] = before

    def _set_scalars(self) -> None:
        record, code = self.record, self._code
        first = int(record["load"])
        for k in range(first, first + int(record["loads"])):
            scalar, parameter = code.loads[k].tolist()
            value = code.constants[k] if parameter < 0 else self._parameters[parameter]
            self._scalars[scalar] = value
        start = int(record["prologue"])
        for word, a, b, rest in code.instructions[start:][: record["prologue_count"]].tolist():
            arity, function = self._functions[word & 1023]
            operands = [self._scalars[index] for index in (a, b, rest >> 16)[:arity]]
            with np.errstate(all="ignore"):
                self._scalars[rest & 0xFFFF] = function(*map(np.float64, operands))

    def place(self, place: int) -> Any:
        """What lies at a place when the program has run."""
        index, kind = place >> 3, place & 7
        if kind == SCALAR:
            return self._scalars[index]
        return self._levels[index] if kind == LEVEL else self._columns[index]

    def gradient(self, size: int) -> NDArray[np.float64]:
        """Derivatives of the values by each parameter, [size, rows]."""
        record = self.record
        rows = np.zeros((size, self._columns.shape[1]))
        first, column = int(record["entry"]), int(record["column"])
        for entry in self._code.entries[first:][: record["entries"]].tolist():
            factor = 1.0 if entry[2] < 0 else self._scalars[entry[2]]
            place = int(self._code.columns[column + entry[0]])
            rows[entry[1]] += product(np.float64(factor), self.place(place))
        return rows
