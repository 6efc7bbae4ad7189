"""A machine for the PTX that sums over a block of threads, all of which run in step."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Machine:
    """Runs straight-line code in 32-bit integers, float32 and float64.

    Args:
        threads: of the block.
        registers: of all threads, [threads]; those that are missing are 0.

    """

    def __init__(self, threads: int, registers: dict[str, NDArray[Any]]) -> None:
        self._threads = np.arange(threads)
        self._registers = {**registers, "%thread": self._threads, "%laneid": self._threads % 32}
        self._shared: dict[int, float] = {}
        self.stored: dict[int, float] = {}
        """What each thread has stored in global memory."""

    def run(self, lines: list[str]) -> None:
        """Run code; a branch leaves out threads until its label."""
        active = np.ones(len(self._threads), dtype=bool)
        for line in lines:
            if line.endswith(":"):
                active[:] = True
            elif branch := re.fullmatch(r"@(%\w+) bra \w+;", line):
                active &= ~self._get(branch[1])
            else:
                operation, *operands = re.findall(r"[%\w.+-]+", re.sub(r"[{}]", " ", line))
                self._step(operation, operands, line, active)

    def _step(
        self, operation: str, operands: list[str], line: str, active: NDArray[np.bool_]
    ) -> None:
        kind = operation.split(".")[0]
        if kind == "bar" or operation.startswith(("cvta", "ld.global")):
            return
        if kind == "st":
            self._store(operation, *operands, active)
        elif kind == "mov" and "{" in line:
            self._split_or_join(operands, joins="= {" in line or line.rstrip(";").endswith("}"))
        else:
            target, *sources = operands
            values = [self._get(source) for source in sources]
            self._registers[target] = self._compute(operation, values)

    def _compute(self, operation: str, values: list[NDArray[Any]]) -> NDArray[Any]:
        kind = operation.split(".")[0]
        if operation == "ld.shared.b64":
            return np.array([self._shared.get(int(place), np.nan) for place in values[0]])
        if kind == "shfl":
            return values[0][self._threads ^ int(values[1][0])]
        if kind == "selp":
            return np.where(values[2], values[0], values[1])
        if kind == "setp":
            holds = {"ne": np.not_equal, "ge": np.greater_equal, "lt": np.less}
            found = holds[operation.split(".")[1]](values[0], values[1])
            return found & values[2] if ".and." in operation else found
        simple = {
            "mov": lambda a: a,
            "cvt": lambda a: a.astype(np.float64),
            "add": lambda a, b: a + b,
            "and": lambda a, b: a & b,
            "shr": lambda a, b: a >> b,
            "mad": lambda a, b, c: a * b + c,
        }
        return np.asarray(simple[kind](*values))

    def _store(self, operation: str, place: str, value: str, active: NDArray[np.bool_]) -> None:
        places, values = self._get(place), self._get(value)
        for thread in self._threads[active].tolist():
            if "shared" in operation:
                self._shared[int(places[thread])] = float(values[thread])
            else:
                self.stored[thread] = float(values[thread])

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
        name, _, offset = operand.partition("+")
        if name in self._registers:
            return self._registers[name] + int(offset) if offset else self._registers[name]
        number = int(name) if re.fullmatch(r"-?\d+", name) else 0
        return np.full(len(self._threads), number + int(offset or 0))
