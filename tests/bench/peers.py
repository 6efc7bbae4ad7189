"""Other libraries that evaluate expressions, each on the same batches as warpfit.

A peer takes the data, the number of threads and programs without parameters, which it turns into
whatever the library evaluates; its job is one evaluation of all programs on all rows.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit.frontends.operon import to_operon_infix
from warpfit.ir import Program
from warpfit.ops import VARIABLE, Operator

#: Share of all values that must agree with the float64 reference. The others come from expressions
#: that overflow float32 or magnify its rounding errors.
AGREEMENT = 0.95


class Table(NamedTuple):
    """Variables X [rows, variables] and target y [rows]."""

    X: NDArray[Any]
    y: NDArray[Any]


class Job(NamedTuple):
    """One evaluation of a batch by a peer.

    ``run`` evaluates once and waits for the end; ``values`` returns those of the first rows, too,
    [programs, rows].
    """

    run: Callable[[], object]
    values: Callable[[int], NDArray[Any]]


def numpy_peer(table: Table, threads: int, programs: list[Program]) -> Job:
    """NumPy in float32: the definitions of the operators, one array operation each."""
    columns = np.ascontiguousarray(table.X.T)

    def each(rows: int) -> Iterator[Any]:
        def leaf(code: int, value: float) -> Any:
            return columns[int(value), :rows] if code == VARIABLE else np.float32(value)

        return (p.fold(leaf, lambda op, operands: op.numpy(*operands)) for p in programs)

    @np.errstate(all="ignore")
    def run() -> list[Any]:
        return [np.mean(np.square(value - table.y)) for value in each(len(table.y))]

    @np.errstate(all="ignore")
    def values(rows: int) -> NDArray[Any]:
        return np.stack([np.broadcast_to(value, (rows,)) for value in each(rows)])

    return Job(run, values)


def pyoperon_peer(table: Table, threads: int, programs: list[Program]) -> Job:
    """pyoperon's ``EvaluateTrees`` in float32 on all threads."""
    import pyoperon

    array = np.asfortranarray(table.X, dtype=np.float32)
    dataset = pyoperon.Dataset(array)
    hashes = {variable.Name: variable.Hash for variable in dataset.Variables}
    parse, names = pyoperon.InfixParser.Parse, list(hashes)
    trees = [parse(to_operon_infix(program, names), hashes) for program in programs]
    out = np.zeros((len(trees), len(array)), np.float32)

    def values(first: int) -> NDArray[Any]:
        rows = pyoperon.Range(0, len(array))  # which pyoperon's data set does not keep alive
        pyoperon.EvaluateTrees(trees, dataset, rows, out, threads)
        return out[:, :first]

    return Job(lambda: values(0), values)


def operon_search(symbols: str, seconds: float, seed: int, threads: int, length: int = 40) -> Any:
    """Make pyoperon's own estimator, which searches for a time."""
    from pyoperon.sklearn import SymbolicRegressor

    return SymbolicRegressor(
        allowed_symbols=symbols, optimizer_iterations=5, max_length=length, generations=10**6,
        max_evaluations=10**9, max_time=max(1, round(seconds)), n_threads=threads,
        random_state=seed,
    )  # fmt: skip


def evogp_peer(table: Table, threads: int, programs: list[Program]) -> Job:
    """EvoGP's CUDA interpreter, mean squared errors on the device.

    Run with EvoGP (https://github.com/EMI-Group/evogp) at 6706e47. A forest is three tensors in
    prefix order (float32 values, int16 types and subtree sizes) of at most 1,024 nodes a tree.
    Operators mean what NumPy's do, but x / 0 is NaN; older versions protect division, logarithm,
    power and root, so that values disagree and nothing is timed. Codes of operators differ between
    versions and are asked of the installed one.
    """
    import torch
    from evogp.tree import Forest

    arrays = np.ascontiguousarray(table.X), table.y[:, None].copy()
    x, y = (torch.from_numpy(array).cuda() for array in arrays)
    nodes = np.zeros((3, len(programs), max(map(len, programs))))
    for row, program in enumerate(programs):
        nodes[:, row, : len(program)] = np.transpose(evogp_nodes(program))
    kinds = zip(nodes, (np.float32, np.int16, np.int16), strict=True)
    tensors = [torch.from_numpy(array.astype(kind)).cuda() for array, kind in kinds]
    forest = Forest(x.shape[1], 1, *tensors)

    def values(first: int) -> Any:
        return forest.batch_forward(x[:first])[:, :, 0].cpu().numpy()

    return Job(lambda: forest.SR_fitness(x, y).cpu(), values)


def evogp_nodes(program: Program) -> list[tuple[float, int, int]]:
    """Return EvoGP's nodes of a program in prefix order: value, type, size of the subtree."""
    from evogp.tree.utils import Func, NType

    def leaf(code: int, value: float) -> list[tuple[float, int, int]]:
        return [(value, NType.VAR if code == VARIABLE else NType.CONST, 1)]

    def operator(op: Operator, operands: list[Any]) -> list[tuple[float, int, int]]:
        below = [node for part in operands for node in part]
        kind = NType.UFUNC if op.arity == 1 else NType.BFUNC
        return [(float(getattr(Func, op.name.upper())), kind, len(below) + 1), *below]

    return program.fold(leaf, operator)


def agreement(values: NDArray[Any], expected: NDArray[np.float64]) -> float:
    """Return the share of values within 1% of the reference in their type, or special alike."""
    with np.errstate(all="ignore"):
        rounded = expected.astype(values.dtype)
        close = np.isclose(values, rounded, rtol=0.01, atol=1e-30, equal_nan=True)
    return float(close.mean())
