"""A machine for the PTX that sums over the warps of a block, whose threads run in step."""

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Machine:
    """Runs straight-line code in 32-bit integers, float32 and float64.

    Loads from global memory leave numbers as they are; addresses are 0. Registers are [threads];
    those that are missing are 0.
    """

    def __init__(self, threads: int, registers: dict[str, NDArray[Any]]) -> None:
        self._threads = np.arange(threads)
        self._registers = {**registers, "%thread": self._threads, "%laneid": self._threads % 32}
        self.stored: dict[int, float] = {}
        """Numbers in global memory that the code has stored, by address."""

    def run(self, lines: list[str]) -> None:
        """Run code."""
        for line in lines:
            operation, *operands = re.findall(r"[%\w.+-]+", re.sub(r"[{}]", " ", line))
            if operation.startswith(("cvta", "ld.global")):
                if operation.endswith("nc.u64"):
                    self._registers.pop(operands[0], None)
            elif operation.startswith("st."):
                pairs = zip(*map(self._get, operands), strict=True)
                self.stored.update((int(place), float(value)) for place, value in pairs)
            elif "{" in line:
                self._split_or_join(operands, joins=line.endswith("};"))
            else:
                target, *sources = operands
                self._registers[target] = self._compute(operation, [*map(self._get, sources)])

    def _compute(self, operation: str, values: list[NDArray[Any]]) -> NDArray[Any]:
        kind = operation.split(".")[0]
        if kind == "shfl":
            return values[0][self._threads ^ int(values[1][0])]
        if kind == "setp":
            holds = {"ne": np.not_equal, "lt": np.less}
            found = holds[operation.split(".")[1]](values[0], values[1])
            return found & values[2] if ".and." in operation else found
        simple = {
            "mov": lambda a: a,
            "cvt": lambda a: a.astype(np.float64),
            "add": lambda a, b: a + b,
            "and": lambda a, b: a & b,
            "shr": lambda a, b: a >> b,
            "mad": lambda a, b, c: a * b + c,
            "selp": lambda a, b, c: np.where(c, a, b),
        }
        return np.asarray(simple[kind](*values))

    def _split_or_join(self, operands: list[str], *, joins: bool) -> None:
        if joins:
            target, low, high = operands
            halves = np.stack([self._get(low), self._get(high)], axis=1).astype(np.uint32)
            self._registers[target] = halves.view(np.float64)[:, 0]
        else:
            low, high, source = operands
            halves = self._get(source).astype(np.float64)[:, np.newaxis].view(np.uint32)
            self._registers[low], self._registers[high] = halves.T

    def _get(self, operand: str) -> NDArray[Any]:
        if operand in self._registers:
            return self._registers[operand]
        is_number = re.fullmatch(r"-?\d+", operand)
        return np.full(len(self._threads), int(operand) if is_number else 0)
