"""Peers on the GPU with kernels of their own: CuPy with fused kernels, and EvoGP."""

from __future__ import annotations

from typing import Any, Final
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from warpfit.bench.peers import Job
from warpfit.bench.work import Table, Vectors
from warpfit.ir import Program
from warpfit.ops import CONSTANT, VARIABLE, Operator

_THREADS: Final = 256
_KERNEL: Final = """
extern "C" __global__ void f{number}(
    const float* x, const float* y, const float* p, long long rows, float* out, double* sums)
{{
    double sum = 0.0;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < rows;
         i += (long long)gridDim.x * blockDim.x) {{
        float f = {expression};
        if (out) out[i] = f;
        float d = f - y[i];
        sum += (double)d * d;
    }}
    for (int step = 16; step; step >>= 1) sum += __shfl_down_sync(0xffffffffu, sum, step);
    if (threadIdx.x % 32 == 0) atomicAdd(sums + {number}, sum);
}}
"""
_FUNCTIONS: Final = {"abs": "fabsf", "log": "logf", "exp": "expf", "sqrt": "sqrtf", "pow": "powf"}


class CupyKernelsPeer:
    """One CUDA kernel for each expression, written as text and compiled by CuPy."""

    output = "losses"
    notes = "one compiled kernel for each expression, launched one by one; --use_fast_math"

    def __init__(self, table: Table, threads: int) -> None:
        """Copy the data to the device."""
        import cupy

        self._cupy = cupy
        self._rows = len(table.y)
        self._x = cupy.asarray(np.ascontiguousarray(table.X.T))
        self._y = cupy.asarray(table.y)

    def prepare(self, programs: list[Program], parameters: Vectors) -> Job:
        """Compile all kernels; CuPy's cache on disk does not know their text."""
        cupy = self._cupy
        source = [f"// {uuid4()}"]  # makes the text new, so that compiling is what is timed
        source += [
            _KERNEL.format(number=number, expression=cuda_text(program, self._rows))
            for number, program in enumerate(programs)
        ]
        module = cupy.RawModule(code="\n".join(source), options=("--use_fast_math",))
        kernels = [module.get_function(f"f{number}") for number in range(len(programs))]
        vectors = [cupy.asarray(v, dtype=np.float32) for v in parameters]
        sums = cupy.zeros(len(programs))
        blocks = min(max(1, -(-self._rows // _THREADS)), 1024)

        def launch(number: int, out: Any) -> None:
            arguments = (self._x, self._y, vectors[number], np.int64(self._rows), out, sums)
            kernels[number]((blocks,), (_THREADS,), arguments)

        def run() -> None:
            sums.fill(0)
            for number in range(len(programs)):
                launch(number, np.intp(0))
            sums.get()

        def values(first: int) -> NDArray[Any]:
            out = cupy.empty((len(programs), self._rows), dtype=np.float32)
            for number in range(len(programs)):
                launch(number, out[number])
            found: NDArray[Any] = out[:, :first].get()
            return found

        return Job(run, values)


def cuda_text(program: Program, rows: int) -> str:
    """Write a program as a CUDA C expression over columns ``x`` and parameters ``p``, at row i."""

    def leaf(code: int, value: float) -> str:
        if code == VARIABLE:
            return f"x[{int(value) * rows}LL + i]"
        return f"({float(value)!r}f)" if code == CONSTANT else f"p[{int(value)}]"

    def operator(op: Operator, operands: list[str]) -> str:
        if op.name in _FUNCTIONS:
            return f"{_FUNCTIONS[op.name]}({', '.join(operands)})"
        return f"({operands[0]} {op.symbol} {operands[1]})"

    return program.fold(leaf, operator)


class EvogpPeer:
    """EvoGP's CUDA interpreter, mean squared errors on the device.

    Written from EvoGP's source and not run beside it yet: pip has no package of it and builds it
    from https://github.com/EMI-Group/evogp, with nvcc and PyTorch in place. At commits 42a6e6f
    (``tree/forest.py``) and 0d2e571 (``cuda/forward.cu``) a forest is three tensors in prefix order
    (float32 values, int16 types and subtree sizes) of at most 1,024 nodes a tree, and
    ``SR_fitness`` takes rows [rows, variables] and targets [rows, 1]. Operators have the meaning of
    NumPy's but that x / 0 is NaN; in older versions division, logarithm, power and root are
    protected, so that values disagree and nothing is timed. Codes of operators differ between the
    versions and are asked of the installed one.
    """

    output = "losses"
    notes = "SR_fitness with its automatic choice of mode"

    def __init__(self, table: Table, threads: int) -> None:
        """Copy the data to the device."""
        import torch

        self._torch = torch
        self._x = torch.from_numpy(np.ascontiguousarray(table.X)).cuda()
        self._y = torch.from_numpy(table.y[:, None].copy()).cuda()

    def prepare(self, programs: list[Program], parameters: Vectors) -> Job:
        """Translate to its three tensors."""
        from evogp.tree import Forest

        torch = self._torch
        longest = max(map(len, programs))
        arrays = [
            np.zeros((len(programs), longest), kind) for kind in (np.float32, np.int16, np.int16)
        ]
        for row, (program, vector) in enumerate(zip(programs, parameters, strict=True)):
            for array, numbers in zip(
                arrays, zip(*nodes(program, vector), strict=True), strict=True
            ):
                array[row, : len(program)] = numbers
        tensors = [torch.from_numpy(array).cuda() for array in arrays]
        forest = Forest(self._x.shape[1], 1, *tensors)

        def values(first: int) -> NDArray[Any]:
            found: NDArray[Any] = forest.batch_forward(self._x[:first])[:, :, 0].cpu().numpy()
            return found

        return Job(lambda: forest.SR_fitness(self._x, self._y).cpu(), values)


def nodes(program: Program, vector: NDArray[np.float64]) -> list[tuple[float, int, int]]:
    """EvoGP's nodes of a program in prefix order: value, type, size of the subtree."""
    from evogp.tree.utils import Func, NType

    def leaf(code: int, value: float) -> list[tuple[float, int, int]]:
        if code == VARIABLE:
            return [(value, NType.VAR, 1)]
        number = value if code == CONSTANT else float(vector[int(value)])
        return [(number, NType.CONST, 1)]

    def operator(op: Operator, operands: list[Any]) -> list[tuple[float, int, int]]:
        below = [node for part in operands for node in part]
        kind = NType.UFUNC if op.arity == 1 else NType.BFUNC
        return [(float(getattr(Func, op.name.upper())), kind, len(below) + 1), *below]

    return program.fold(leaf, operator)
