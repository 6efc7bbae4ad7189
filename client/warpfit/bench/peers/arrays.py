"""Peers that compute array by array: a stack machine over NumPy, CuPy, PyTorch or JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.bench.peers import Job
from warpfit.bench.work import Table, Vectors
from warpfit.ir import Program
from warpfit.ops import CONSTANT, VARIABLE, Operator

#: The thesis mix by the names that NumPy, CuPy and JAX share.
_NAMES: Final = {
    **{"add": "add", "sub": "subtract", "mul": "multiply", "div": "divide", "pow": "power"},
    **{"abs": "abs", "log": "log", "exp": "exp", "sqrt": "sqrt"},
}
Functions = Mapping[str, Callable[..., Any]]


def evaluate(
    program: Program, columns: Any, vector: NDArray[np.float64], functions: Functions, scalar: Any
) -> Any:
    """Evaluate one program on arrays of any library, one operation after the other."""

    def leaf(code: int, value: float) -> Any:
        if code == VARIABLE:
            return columns[int(value)]
        return scalar(value if code == CONSTANT else vector[int(value)])

    def operator(op: Operator, operands: list[Any]) -> Any:
        return functions[op.name](*operands)

    return program.fold(leaf, operator)


class NumpyPeer:
    """NumPy in float32, one array operation for each operator."""

    output = "losses"
    notes = "one array operation for each operator, one thread"

    def __init__(self, table: Table, threads: int) -> None:
        """Keep the columns contiguous."""
        self._columns = np.ascontiguousarray(table.X.T)
        self._y = table.y
        self._functions = {name: getattr(np, other) for name, other in _NAMES.items()}

    def prepare(self, programs: list[Program], parameters: Vectors) -> Job:
        """Nothing is translated."""
        scalar = self._columns.dtype.type

        def values(columns: NDArray[Any]) -> list[Any]:
            pairs = zip(programs, parameters, strict=True)
            with np.errstate(all="ignore"):
                return [evaluate(p, columns, v, self._functions, scalar) for p, v in pairs]

        def run() -> list[float]:
            with np.errstate(all="ignore"):
                return [
                    float(np.mean(np.square(evaluate(p, self._columns, v, functions, scalar) - y)))
                    for p, v in zip(programs, parameters, strict=True)
                ]

        functions, y = self._functions, self._y
        return Job(run, lambda rows: _stacked(values(self._columns[:, :rows]), rows))


class CupyPeer:
    """CuPy in float32, one kernel for each operator; losses stay on the device."""

    output = "losses"
    notes = "one kernel for each operator"

    def __init__(self, table: Table, threads: int) -> None:
        """Copy the columns to the device."""
        import cupy

        self._cupy = cupy
        self._columns = cupy.asarray(np.ascontiguousarray(table.X.T))
        self._y = cupy.asarray(table.y)
        self._functions = {name: getattr(cupy, other) for name, other in _NAMES.items()}

    def prepare(self, programs: list[Program], parameters: Vectors) -> Job:
        """Nothing is translated."""
        scalar = np.float32

        def values(columns: Any) -> list[Any]:
            pairs = zip(programs, parameters, strict=True)
            return [
                self._cupy.asarray(evaluate(p, columns, v, self._functions, scalar))
                for p, v in pairs
            ]

        def run() -> None:
            y = self._y
            losses = [self._cupy.square(f - y).mean() for f in values(self._columns)]
            self._cupy.stack(losses).get()

        def first(rows: int) -> NDArray[Any]:
            return _stacked([f.get() for f in values(self._columns[:, :rows])], rows)

        return Job(run, first)


class TorchPeer:
    """PyTorch in float32 on the GPU (on the CPU without one), eager."""

    output = "losses"

    def __init__(self, table: Table, threads: int) -> None:
        """Copy the columns to the device."""
        import torch

        self._torch = torch
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.notes = f"eager, one kernel for each operator, on {device}"
        self._columns = torch.from_numpy(np.ascontiguousarray(table.X.T)).to(device)
        self._y = torch.from_numpy(table.y).to(device)
        self._functions: Functions = {name: _for_torch(torch, name) for name in _NAMES}

    def prepare(self, programs: list[Program], parameters: Vectors) -> Job:
        """Nothing is translated."""
        torch = self._torch

        def values(columns: Any) -> list[Any]:
            pairs = zip(programs, parameters, strict=True)
            found = [evaluate(p, columns, v, self._functions, np.float32) for p, v in pairs]
            return [torch.as_tensor(f, dtype=columns.dtype, device=columns.device) for f in found]

        def run() -> None:
            with torch.no_grad():
                y = self._y
                losses = [torch.square(f - y).mean() for f in values(self._columns)]
                torch.stack(losses).cpu()

        def first(rows: int) -> NDArray[Any]:
            return _stacked([f.cpu().numpy() for f in values(self._columns[:, :rows])], rows)

        return Job(run, first)


class JaxPeer:
    """JAX in float32, all expressions as one compiled function of the parameters."""

    output = "losses"

    def __init__(self, table: Table, threads: int) -> None:
        """Copy the columns to JAX's default device."""
        import jax

        self._jax = jax
        backend = jax.default_backend()
        self.notes = f"jit of all expressions as one function of their parameters, on {backend}"
        self._columns = jax.device_put(np.ascontiguousarray(table.X.T))
        self._y = jax.device_put(table.y)
        self._functions = {name: getattr(jax.numpy, other) for name, other in _NAMES.items()}

    def prepare(self, programs: list[Program], parameters: Vectors) -> Job:
        """Compile by a first call."""
        jnp = self._jax.numpy

        def values(columns: Any, vectors: Any) -> Any:
            found = [
                evaluate(p, columns, v, self._functions, jnp.float32)
                for p, v in zip(programs, vectors, strict=True)
            ]
            return jnp.stack([jnp.broadcast_to(f, columns.shape[1:]) for f in found])

        def losses(columns: Any, y: Any, vectors: Any) -> Any:
            return jnp.mean(jnp.square(values(columns, vectors) - y), axis=1)

        vectors = [jnp.asarray(vector, jnp.float32) for vector in parameters]
        compiled = self._jax.jit(losses)
        np.asarray(compiled(self._columns, self._y, vectors))
        return Job(
            lambda: np.asarray(compiled(self._columns, self._y, vectors)),
            lambda rows: np.asarray(self._jax.jit(values)(self._columns[:, :rows], vectors)),
        )


def _for_torch(torch: Any, name: str) -> Callable[..., Any]:
    """Operator of PyTorch that takes numbers beside tensors, as NumPy's do."""
    binary: dict[str, Callable[..., Any]] = {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul": lambda a, b: a * b,
        "div": lambda a, b: np.divide(a, b) if _numbers(a, b) else a / b,
        "pow": lambda a, b: np.power(a, b) if _numbers(a, b) else torch.pow(_plain(a), _plain(b)),
    }
    if name in binary:
        return _quiet(binary[name])
    on_tensors, on_numbers = getattr(torch, name), getattr(np, name)
    return _quiet(lambda a: on_numbers(a) if _numbers(a) else on_tensors(a))


def _quiet(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*operands: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(*map(_plain, operands) if not _numbers(*operands) else operands)

    return call


def _numbers(*operands: Any) -> bool:
    return all(isinstance(operand, np.generic | float | int) for operand in operands)


def _plain(operand: Any) -> Any:
    return operand if not isinstance(operand, np.generic) else operand.item()


def _stacked(values: list[Any], rows: int) -> NDArray[Any]:
    """[programs, rows]; a program without variables has the same value in every row."""
    return np.stack([np.broadcast_to(np.asarray(f, np.float32), (rows,)) for f in values])
