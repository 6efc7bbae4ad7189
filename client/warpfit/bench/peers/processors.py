"""Peers on the CPU beside NumPy: numexpr, pyoperon, gplearn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpfit.bench.peers import Job
from warpfit.bench.work import Table, Vectors
from warpfit.ir import Program
from warpfit.ops import CONSTANT, PARAMETER, VARIABLE, Operator


class NumexprPeer:
    """numexpr in float32 on all threads."""

    output = "values"
    notes = "compiled to its virtual machine before timing; float32 constants; all threads"

    def __init__(self, table: Table, threads: int) -> None:
        """Keep the columns contiguous."""
        import numexpr

        numexpr.set_num_threads(min(threads, numexpr.MAX_THREADS))
        self._numexpr = numexpr
        self._columns = np.ascontiguousarray(table.X.T)

    def prepare(self, programs: list[Program], parameters: Vectors) -> Job:
        """Compile every expression; constants are arguments, for numexpr's own are float64."""
        compiled = [self._compile(p, v) for p, v in zip(programs, parameters, strict=True)]
        rows = self._columns.shape[1]
        out = np.empty((len(programs), rows), np.float32)

        def run() -> None:
            for row, (evaluator, names, constants) in zip(out, compiled, strict=True):
                columns = [self._columns[int(name[1:])] for name in names if name[0] == "x"]
                row[...] = evaluator(*columns, *constants)

        def values(first: int) -> NDArray[Any]:
            run()
            return out[:, :first]

        return Job(run, values)

    def _compile(self, program: Program, vector: NDArray[np.float64]) -> Any:
        constants: list[np.float32] = []

        def leaf(code: int, value: float) -> str:
            if code == VARIABLE:
                return f"x{int(value)}"
            constants.append(np.float32(value if code == CONSTANT else vector[int(value)]))
            return f"c{len(constants) - 1}"

        def operator(op: Operator, operands: list[str]) -> str:
            if op.arity == 2:
                symbol = "**" if op.name == "pow" else op.symbol
                return f"({operands[0]} {symbol} {operands[1]})"
            return f"{op.name}({operands[0]})"

        text = program.fold(leaf, operator)
        used = sorted({int(v) for v in program.values[program.codes == VARIABLE]})
        names = [f"x{index}" for index in used] + [f"c{i}" for i in range(len(constants))]
        signature = [(name, float) for name in names]  # its name for float32
        return self._numexpr.NumExpr(text, signature), names, constants


class PyoperonPeer:
    """pyoperon's ``EvaluateTrees`` in float32 on all threads."""

    output = "values"
    notes = "EvaluateTrees into a preallocated matrix; all threads"

    def __init__(self, table: Table, threads: int) -> None:
        """Keep the array alive, which `pyoperon.Dataset` does not."""
        import pyoperon

        self._pyoperon = pyoperon
        self._threads = threads
        self._array = np.asfortranarray(table.X, dtype=np.float32)
        self._dataset = pyoperon.Dataset(self._array)
        self._names = {v.Name: v.Hash for v in self._dataset.Variables}

    def prepare(self, programs: list[Program], parameters: Vectors) -> Job:
        """Build trees with its own parser."""
        parse = self._pyoperon.InfixParser.Parse
        trees = [
            parse(infix(program, vector), self._names)
            for program, vector in zip(programs, parameters, strict=True)
        ]
        rows = self._pyoperon.Range(0, len(self._array))
        out = np.zeros((len(trees), len(self._array)), np.float32)

        def run() -> None:
            self._pyoperon.EvaluateTrees(trees, self._dataset, rows, out, self._threads)

        def values(first: int) -> NDArray[Any]:
            run()
            return out[:, :first]

        return Job(run, values)


class GplearnPeer:
    """gplearn's own programs, with functions that protect nothing."""

    output = "values"
    notes = "its programs with unprotected NumPy functions, one thread; float64 from constants on"

    def __init__(self, table: Table, threads: int) -> None:
        """Make the functions."""
        from gplearn._program import _Program
        from gplearn.functions import _Function

        self._program = _Program
        self._X = np.asfortranarray(table.X)
        plain: dict[str, Any] = {
            "sub": np.subtract,
            "mul": np.multiply,
            "div": np.divide,
            "pow": np.power,
        }
        plain |= {"add": np.add, "abs": np.abs, "log": np.log, "exp": np.exp, "sqrt": np.sqrt}
        arity = {"abs": 1, "log": 1, "exp": 1, "sqrt": 1}
        self._functions = {
            name: _Function(function, name, arity.get(name, 2)) for name, function in plain.items()
        }

    def prepare(self, programs: list[Program], parameters: Vectors) -> Job:
        """Translate to its prefix lists."""
        made = [self._translate(p, v) for p, v in zip(programs, parameters, strict=True)]

        def evaluate(X: NDArray[Any]) -> list[NDArray[Any]]:
            with np.errstate(all="ignore"):
                return [np.asarray(program.execute(X)) for program in made]

        def values(first: int) -> NDArray[Any]:
            found = np.stack(evaluate(self._X[:first]))
            with np.errstate(over="ignore"):
                return found.astype(np.float32)

        return Job(lambda: evaluate(self._X), values)

    def _translate(self, program: Program, vector: NDArray[np.float64]) -> Any:
        def leaf(code: int, value: float) -> list[Any]:
            if code == VARIABLE:
                return [int(value)]
            return [float(value if code == CONSTANT else vector[int(value)])]

        def operator(op: Operator, operands: list[list[Any]]) -> list[Any]:
            return [self._functions[op.name], *(node for nodes in operands for node in nodes)]

        return self._program(
            function_set=list(self._functions.values()),
            arities={},
            init_depth=(2, 6),
            init_method="half and half",
            n_features=self._X.shape[1],
            const_range=(-5.0, 5.0),
            metric=None,
            p_point_replace=0.05,
            parsimony_coefficient=0.0,
            random_state=None,
            program=program.fold(leaf, operator),
        )


def infix(program: Program, parameters: Sequence[float] | NDArray[np.float64]) -> str:
    """Write a program in pyoperon's language, with numbers for parameters."""

    def leaf(code: int, value: float) -> str:
        if code == VARIABLE:
            return f"X{int(value) + 1}"
        return f"({float(parameters[int(value)] if code == PARAMETER else value)!r})"

    def operator(op: Operator, operands: list[str]) -> str:
        if op.arity == 2:
            return f"({operands[0]} {op.symbol} {operands[1]})"
        return f"{op.name}({operands[0]})"

    return program.fold(leaf, operator)
