"""A plain encoder of instructions for derivatives.cu, from those of the CPU engine."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpfit_server.engine.autodiff.rules import arities
from warpfit_server.engine.cuda.derivatives.encoding import DerivativeCode
from warpfit_server.engine.cuda.derivatives.source import labels
from warpfit_server.engine.lowering.lowered import (
    COPY_CODE,
    INPUT,
    NONE,
    RESULT,
    SCALAR,
    Lowered,
)

LEVEL, COLUMN, UNIFORM, BEFORE = 1, 2, 3, 4
STORE = 1 << 19
Parts = dict[str, Any]


def parts_of(code: DerivativeCode, program: int) -> Parts:
    """What `DerivativeCode` holds of a program, wherever it lies."""
    record = code.programs[program]

    def part(array: NDArray[Any], first: str, count: str) -> list[Any]:
        start = int(record[first])
        return array[start : start + int(record[count])].tolist()

    constants = code.constants.view(np.uint64)  # the bits, whatever the number
    names = ("scalars", "levels", "loss", "slope", "result")
    return {
        "prologue": part(code.instructions, "prologue", "prologue_count"),
        "rows": part(code.instructions, "first", "count"),
        "columns": part(code.columns, "column", "columns"),
        "entries": part(code.entries, "entry", "entries"),
        "loads": part(code.loads, "load", "loads"),
        "constants": part(constants, "load", "loads"),
        **{name: int(record[name]) for name in names},
    }


def reference_parts(lowered: Lowered, program: int, *, keeps_values: bool) -> Parts:
    """Encode one program."""
    header = lowered.headers[program]

    def part(array: NDArray[Any], first: str, count: str) -> NDArray[Any]:
        return array[header[first] : header[first] + header[count]]

    loads = part(lowered.loads, "first_load", "loads")
    entries = part(lowered.entries, "first_entry", "entries").tolist()
    encoder = _Encoder(int(header["slots"]), keeps_values=keeps_values)
    columns = part(lowered.columns, "first_column", "columns").tolist()
    locations = {
        "columns": [encoder.awaits(column) for column in columns],
        "loss": encoder.awaits(int(header["loss"])),
        "slope": encoder.awaits(int(header["loss_derivative"])),
        "result": int(header["slots"]) << 3 | LEVEL,
    }
    start, middle, end = (int(header[name]) for name in ("start", "prologue_end", "end"))
    return {
        **locations,
        "prologue": [_scalar_words(line) for line in lowered.instructions[start:middle].tolist()],
        "rows": encoder.rows(lowered.instructions[middle:end].tolist()),
        "levels": encoder.used,
        "scalars": int(header["scalars"]),
        "entries": [list(entry) for entry in entries],
        "loads": np.stack([loads["scalar"], loads["parameter"]], axis=1).tolist(),
        "constants": np.ascontiguousarray(loads["value"]).view(np.uint64).tolist(),
    }


class _Encoder:
    """Goes through the instructions on rows from the last one to the first."""

    def __init__(self, slots: int, *, keeps_values: bool) -> None:
        self._slots = slots
        self._awaited = {slots} if keeps_values else set()
        self.used = 0

    def awaits(self, place: int) -> int:
        """Translate a place that is looked at when the program has run."""
        if place == NONE:
            return 0
        if place & 3 == INPUT:
            return place >> 2 << 3 | COLUMN
        self._awaited.add(self._level(place))
        return self._level(place) << 3 | LEVEL

    def rows(self, lines: list[Any]) -> list[list[int]]:
        targets = [-1, *(self._level(line[1]) for line in lines)]
        numbers = range(len(lines) - 1, -1, -1)
        words = [self._words(lines[n], targets[n + 1], targets[n]) for n in numbers]
        return words[::-1]

    def _level(self, place: int) -> int:
        return self._slots if place & 3 == RESULT else place >> 2

    def _words(self, line: Any, level: int, before: int) -> list[int]:
        word, indices = int(labels()[line[0]]), [0, 0, 0]
        if level in self._awaited:
            self._awaited.remove(level)
            self.used = max(self.used, level + 1)
            word |= STORE
        for k in range(_operands(line[0])):
            source, indices[k] = self._operand(line[2][k], before)
            word |= source << (10 + 3 * k)
        return [word, indices[0], indices[1], level | indices[2] << 16]

    def _operand(self, place: int, before: int) -> tuple[int, int]:
        kind = place & 3
        if kind in (SCALAR, INPUT):
            return (UNIFORM if kind == SCALAR else COLUMN), place >> 2
        level = self._level(place)
        if level == before:
            return BEFORE, 0
        self._awaited.add(level)
        return LEVEL, level


def _scalar_words(line: Any) -> list[int]:
    operands = [place >> 2 for place in line[2][: _operands(line[0])]]
    a, b, c = [*operands, 0, 0][:3]
    return [int(labels()[line[0]]), a, b, line[1] >> 2 | c << 16]


def _operands(code: int) -> int:
    return 1 if code == COPY_CODE else int(arities()[code])
