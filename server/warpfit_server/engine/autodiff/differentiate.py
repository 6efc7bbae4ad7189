"""Reverse-mode differentiation of programs as they are lowered, compiled by Numba.

A program has one result for each row, so one backward pass over its nodes gives the derivative of
the result by every node, its *adjoint* (Griewank and Walther, Evaluating Derivatives, 2nd edition,
chapter 3):

    adjoint[root] = 1
    for each node, from the root to the leaves:
        for each operand: adjoint[operand] += adjoint[node] * partial(node, operand)

The pass runs once, here, on the nodes, not on numbers: each product becomes a node of the same
graph, beside the program's own. So the interpreter needs to know nothing of derivatives;
subexpressions that derivatives share are computed once, products with 1 and 0 never, and slots are
assigned as for any program (`schedule`).

The pass stops at nodes that are the same for every row, such as a parameter or ``exp(p1)``: the
adjoint there is a *column*. How such a node depends on the parameters is the same for every row,
too: its derivatives are *entries*, scalars by which sums over a column are multiplied at the end.

The row loss is numbered beside the program, over the program's result; a pass of its own gives its
derivative by the result.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit.ir import Batch, Program
from warpfit.ops import CONSTANT, VARIABLE
from warpfit_server.engine.autodiff import backward_pass
from warpfit_server.engine.autodiff.rules import RULE_COLUMNS, arities, rules
from warpfit_server.engine.lowering import lowered
from warpfit_server.engine.lowering.graph import (
    PREDICTION,
    clear,
    constant_node,
    new_graph,
    number_tokens,
)
from warpfit_server.engine.lowering.lower import longest_program
from warpfit_server.engine.lowering.schedule import (
    Scratch,
    emit_copy,
    emit_prologue,
    emit_result,
    new_scratch,
    schedule,
)
from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.native.arguments import (
    FAILED,
    FINISHED,
    OWN_ARRAYS,
    RANGE,
    argument_block,
    chunk_ranges,
    floats,
    octets,
    words,
)
from warpfit_server.engine.native.intrinsics import add_atomically, inlined, uncounted

#: Nodes for each token, at most: itself; partial derivative, product and sum for the adjoint of an
#: operand, once in the pass over the program and once in that over a scalar.
_NODES_A_TOKEN: Final = 7
_MORE_NODES: Final = 16


@inlined
def node_capacity(tokens: int, programs: int, loss_tokens: int) -> int:
    """Return how many nodes, instructions or loads there are at most."""
    return _NODES_A_TOKEN * (tokens + programs * loss_tokens) + _MORE_NODES * programs


def allocate_differentiated(batch: Batch, loss: RowLossTokens) -> lowered.Lowered:
    """Allocate what a batch is lowered to with its derivatives."""
    tokens = len(batch.codes)
    capacity = node_capacity(tokens, len(batch), len(loss.codes))
    return lowered.allocate(len(batch), capacity, capacity, tokens)


def lower_batch(batch: Batch, requested: int) -> lowered.Lowered:
    """Lower checked programs with derivatives on the calling thread, without Python's lock.

    Args:
        batch: the programs; parameters are not read.
        requested: bits of `backward_pass`, none of which asks for a row loss.

    Returns:
        Programs that lie one behind the other in each array.

    Raises:
        MemoryError: if there is not enough.
    """
    out, loss = allocate_differentiated(batch, no_row_loss()), no_row_loss()
    programs = np.array([(0, len(batch))], RANGE)
    source = source_arrays(batch, loss, requested)
    arrays = (programs, np.zeros(1, RANGE), np.zeros(1, np.uint8), *source, *out)
    block = argument_block(arrays)  # it must live for as long as its address is in use
    if differentiate_chunk(block.ctypes.data, 0) != FINISHED:
        raise MemoryError
    ends = source[-1].tolist()
    return lowered.Lowered(
        out.headers, *(array[:end] for array, end in zip(out[1:], ends, strict=True))
    )


class RowLossTokens(NamedTuple):
    """Tokens of a row loss: PREDICTION is the result, variables are the data set's columns."""

    codes: NDArray[np.uint8]
    values: NDArray[np.float64]


@lru_cache(64)
def row_loss_tokens(row_loss: Program, variables: int, *, weighted: bool) -> RowLossTokens:
    """Bind a row loss to the columns of a data set; its weight is 1 without weights."""
    codes, values = row_loss.codes.copy(), row_loss.values.copy()
    leaf = codes == VARIABLE
    codes[leaf & (row_loss.values == 0)] = PREDICTION
    values[leaf & (row_loss.values > 0)] += variables - 1
    if not weighted:
        weight = leaf & (row_loss.values == 2)
        codes[weight], values[weight] = CONSTANT, 1.0
    return RowLossTokens(codes, values)


@cache
def no_row_loss() -> RowLossTokens:
    """Return no tokens, for when no loss is requested."""
    return RowLossTokens(np.empty(0, dtype=np.uint8), np.empty(0))


# Arrays of an argument block, in the order of `source_arrays`.
CODES, VALUES, STARTS, LOSS_CODES, LOSS_VALUES = range(OWN_ARRAYS, OWN_ARRAYS + 5)
ARITIES, RULES, REQUESTED, ENDS = range(LOSS_VALUES + 1, LOSS_VALUES + 5)
AFTER_SOURCE: Final = ENDS + 1


def source_arrays(
    batch: Batch, loss: RowLossTokens, requested: int, *options: int
) -> tuple[NDArray[Any], ...]:
    """Return arrays of an argument block for `source_of`; the last one are the ends.

    The options follow the requested bits, for the caller's own code.
    """
    tokens = np.ascontiguousarray(batch.codes), np.ascontiguousarray(batch.values), batch.starts
    flags, ends = np.array([requested, *options], np.int64), np.zeros(4, np.int64)
    return (*tokens, *loss, *tables(), flags, ends)


@cache
def tables() -> tuple[NDArray[Any], ...]:
    """Return what lowering reads of the operator table."""
    return arities().astype(np.int64), rules()


class Source(NamedTuple):
    """The programs to lower, in compiled code."""

    codes: Any
    values: Any
    starts: Any
    loss_codes: Any
    loss_values: Any
    arities: Any
    rules: Any
    requested: Any
    """Bits of `backward_pass`, and the options of `source_arrays`, int64 [1 + options]."""
    ends: Any
    """Ends of what all threads have appended: instructions, loads, columns and entries."""


class LoweringWorkspace(NamedTuple):
    """Memory of a thread to lower one program at a time, in compiled code."""

    state: backward_pass.Pass
    scratch: Scratch
    program: lowered.Lowered
    """The program that was lowered last, alone."""


@inlined
def source_of(block: int) -> Source:
    """Return the arrays of an argument block that `source_arrays` has listed."""
    return Source(
        octets(block, CODES), floats(block, VALUES), words(block, STARTS),
        octets(block, LOSS_CODES), floats(block, LOSS_VALUES), words(block, ARITIES),
        words(block, RULES).reshape((-1, RULE_COLUMNS)), words(block, REQUESTED),
        words(block, ENDS),
    )  # fmt: skip


@inlined
def new_workspace(source: Source, start: int, stop: int) -> LoweringWorkspace:
    """Allocate the memory to lower each program of a range."""
    tokens = longest_program(source.starts, start, stop) + len(source.loss_codes)
    capacity = _NODES_A_TOKEN * tokens + _MORE_NODES
    state = backward_pass.Pass(
        new_graph(capacity, tokens, source.arities), source.rules,
        np.empty(1, dtype=np.int64),
        np.empty(capacity, dtype=np.int64), np.empty(capacity, dtype=np.int64),
        np.empty(capacity, dtype=np.int64), np.empty(capacity, dtype=np.int64),
        np.empty(capacity, dtype=np.int64),
    )  # fmt: skip
    program = lowered.allocate(1, capacity, capacity, tokens)
    return LoweringWorkspace(state, new_scratch(capacity), program)


@numba_cache.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def differentiate_chunk(block: int, chunk: int) -> int:
    """Lower a range of programs with their derivatives; see `arguments`.

    Each is appended to what all threads have lowered, so that nothing lies in between.
    """
    programs, _, _ = chunk_ranges(block, chunk)
    source, out = source_of(block), lowered.lowered_of(block, AFTER_SOURCE)
    try:
        workspace = new_workspace(source, programs.start, programs.stop)
        for program in range(programs.start, programs.stop):
            differentiate_program(source, workspace, program)
            _append(source, workspace.program, out, program)
    except Exception:  # compiled code tells exceptions apart no further: memory is short
        return FAILED
    return FINISHED


@uncounted
def differentiate_program(source: Source, workspace: LoweringWorkspace, program: int) -> None:
    """Lower one program into ``workspace.program``, from the beginning of each of its arrays."""
    state, out = workspace.state, workspace.program
    graph, requested = state.graph, source.requested[0]
    start, stop = source.starts[program], source.starts[program + 1]
    clear(graph, _NODES_A_TOKEN * (stop - start + len(source.loss_codes)) + _MORE_NODES)
    root = number_tokens(
        graph, source.codes[start:stop], source.values[start:stop], np.int64(lowered.NONE)
    )
    loss = derivative = np.int64(lowered.NONE)
    if requested & (backward_pass.LOSS | backward_pass.LOSS_DERIVATIVE):
        loss = number_tokens(graph, source.loss_codes, source.loss_values, root)
    state.one[0] = constant_node(graph, 1.0)
    forward = graph.size[0]
    header = out.headers[0]
    header.start = header.first_load = header.first_column = header.first_entry = 0
    header.columns = header.entries = 0
    if requested & backward_pass.LOSS_DERIVATIVE:
        derivative = (
            loss
            if requested & backward_pass.SQUARES
            else backward_pass.differentiate_loss(state, loss, root)
        )
    if requested & (backward_pass.BY_PARAMETERS | backward_pass.BY_VARIABLES):
        backward_pass.mark_nodes(state, forward, requested)
        backward_pass.run_backward(state, root, out, header)
    loss = loss if requested & backward_pass.LOSS else np.int64(lowered.NONE)
    _emit_program(workspace, header, root, loss, derivative)


@uncounted
def _emit_program(
    workspace: LoweringWorkspace, header: Any, root: Any, loss: Any, derivative: Any
) -> None:
    """Schedule and emit all nodes; turn the nodes of columns, entries and losses to locations."""
    graph, scratch, out = workspace.state.graph, workspace.scratch, workspace.program
    columns = out.columns[: header.columns]
    emit_prologue(graph, scratch, out, header)
    for node in columns:
        graph.nodes[node].uses += 1
    for node in (loss, derivative):
        if node != lowered.NONE:
            graph.nodes[node].uses += 1
    emit_result(graph, scratch, out, header, root)
    for node in (loss, derivative):
        if node != lowered.NONE and graph.nodes[node].slots:
            schedule(graph, scratch, out, header, node, root)
    for node in columns:
        if graph.nodes[node].slots:
            schedule(graph, scratch, out, header, node, root)
    for index in range(len(columns)):
        columns[index] = _as_rows(graph, out, header, columns[index])
    header.loss = _as_rows(graph, out, header, loss)
    header.loss_derivative = _as_rows(graph, out, header, derivative)
    for index in range(header.entries):
        entry = out.entries[index]
        is_one = entry.factor == workspace.state.one[0]
        entry.factor = lowered.NONE if is_one else graph.nodes[entry.factor].location >> 2


@uncounted
def _as_rows(graph: Any, out: lowered.Lowered, header: Any, node: Any) -> Any:
    """Return the location of a node's rows; a scalar is copied to rows, for sums that read them."""
    if node == lowered.NONE:
        return np.int64(lowered.NONE)
    location = graph.nodes[node].location
    if location & 3 != lowered.SCALAR:
        return location
    target = header.slots << 2 | lowered.SLOT
    header.slots += 1
    emit_copy(location, target, out, header)
    return target


@uncounted
def reserve(source: Source, header: Any) -> Any:
    """Reserve room for a program behind what all threads have appended.

    Returns:
        The first instruction, load, column and entry.
    """
    first = np.int64(source.ends.ctypes.data)
    return (
        add_atomically(first, header.end),
        add_atomically(first + 8, header.loads),
        add_atomically(first + 16, header.columns),
        add_atomically(first + 24, header.entries),
    )


@uncounted
def _append(source: Source, made: lowered.Lowered, out: lowered.Lowered, program: int) -> None:
    """Append a program to what all threads have lowered."""
    header = made.headers[0]
    start, load, column, entry = reserve(source, header)
    for index in range(header.end):
        out.instructions[start + index] = made.instructions[index]
    for index in range(header.loads):
        out.loads[load + index] = made.loads[index]
    for index in range(header.columns):
        out.columns[column + index] = made.columns[index]
    for index in range(header.entries):
        out.entries[entry + index] = made.entries[index]
    header.start, header.first_load = start, load
    header.first_column, header.first_entry = column, entry
    header.prologue_end += start
    header.end += start
    out.headers[program] = header
