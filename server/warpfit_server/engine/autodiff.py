"""Reverse-mode differentiation of programs as they are lowered, compiled by Numba.

A program has one result for each row, so one backward pass over its nodes gives the derivative of
the result by every node, its *adjoint* (Griewank and Walther, Evaluating Derivatives, 2nd edition,
chapter 3):

    adjoint[root] = 1
    for each node, from the root to the leaves:
        for each operand: adjoint[operand] += adjoint[node] * partial(node, operand)

The operator table says what the partial derivative by each operand is, by a text:

* ``0``: the derivative is 0 everywhere;
* ``1`` or ``-1``: the adjoint passes, or its negative;
* the name of an operand, or ``r`` for the result: the partial derivative is there already, and one
  product is needed;
* anything else: a kernel computes the partial derivative, alone or, if it reads at most two
  operands, together with the product.

In every product a factor of 0 makes 0 of the other one, be it infinite or NaN: a branch that was
not taken must not show in derivatives.

The pass runs once, here, on the nodes, not on numbers: each product becomes a node of the same
graph, beside the program's own. So the engines need to know nothing of derivatives; subexpressions
that derivatives share are computed once, products with 1 and 0 never, and slots are assigned as for
any program (`lower`).

The pass stops at invariants, such as a parameter or ``exp(p1)``: the adjoint there is a *column*.
How an invariant depends on the parameters is the same for every row, too: its derivatives are
*entries*, invariants by which sums over a column are multiplied at the end.

The row loss is numbered beside the program, over the program's result; a pass of its own gives its
derivative by the result. `RequestedOutputs` says what an engine computes of all that.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit.ir import Batch, Program
from warpfit.losses import ABSOLUTE, LossFunction
from warpfit.ops import ARITIES as OPERATOR_ARITIES
from warpfit.ops import CONSTANT, OPERATORS, PARAMETER, VARIABLE
from warpfit.request import OUTPUTS, Evaluation
from warpfit_server.engine.interface import Linearisation, Outputs
from warpfit_server.engine.lowering import (
    INVARIANT,
    NONE,
    PREDICTION,
    SLOT,
    Graph,
    Lowered,
    Scratch,
    allocate,
    clear,
    constant_node,
    emit_copy,
    emit_prologue,
    emit_result,
    find_node,
    longest_program,
    lowered_of,
    new_graph,
    new_scratch,
    number_tokens,
    schedule,
)
from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.native.intrinsics import (
    FAILED,
    FINISHED,
    OWN_ARRAYS,
    RANGE,
    add_atomically,
    argument_block,
    chunk_ranges,
    floats,
    inlined,
    octets,
    uncounted,
    words,
)

# ------------------------------------------------------------------- rules of the operators

#: Kinds of rule.
NOTHING, PASSES, NEGATES, OPERAND_IS_PARTIAL, COMPUTES = range(5)
#: Columns of a rule: kind; code of the kernel of the partial derivative alone and of its product
#: with the adjoint (0 if there is none); how many operands it reads, and which (3 is the result).
KIND, ALONE, SCALED, READS, FIRST_READ = range(5)
RULE_COLUMNS: Final = 7
#: Operands that an instruction can have.
_MOST: Final = 3
#: Codes of instructions that are no operators.
_ALONE_CODES: Final = 256
_SCALED_CODES: Final = _ALONE_CODES + 256 * _MOST
PRODUCT_CODE: Final = _SCALED_CODES + 256 * _MOST
CODE_COUNT: Final = PRODUCT_CODE + 1
_NAMES: Final = "abcr"


@dataclass(frozen=True, slots=True)
class PartialKernel:
    """A kernel that computes a partial derivative."""

    code: int
    source: str
    """In the kernel language; a, b and c are the instruction's operands in their order."""
    arity: int
    """Operands of ``source``."""
    scaled: bool
    """Whether an adjoint comes before the operands, to multiply the result by."""

    @property
    def name(self) -> str:
        """Name in the object file."""
        return f"partial_{self.code}"


@cache
def partial_kernels() -> tuple[PartialKernel, ...]:
    """Return all kernels that the rules need."""
    kernels = []
    for row in OPERATORS.values():
        for index, text in enumerate(row.derivative):
            reads = _reads(text)
            if _kind(text) != COMPUTES:
                continue
            tree = ast.parse(text, mode="eval")
            for node in ast.walk(tree):
                if isinstance(node, ast.Name) and node.id in reads:
                    node.id = _NAMES[reads.index(node.id)]  # the kernel's operands are a, b, c
            source = ast.unparse(tree)
            place = row.code * _MOST + index
            kernels.append(PartialKernel(_ALONE_CODES + place, source, len(reads), False))
            if len(reads) < _MOST:
                kernels.append(PartialKernel(_SCALED_CODES + place, source, len(reads), True))
    return tuple(kernels)


def rules() -> NDArray[np.int64]:
    """Return the rule of operand k of an operator in row 3 * code + k, [256 * 3, RULE_COLUMNS]."""
    table = np.zeros((256 * _MOST, RULE_COLUMNS), dtype=np.int64)
    for row in OPERATORS.values():
        for index, text in enumerate(row.derivative):
            reads = _reads(text)
            place = row.code * _MOST + index
            rule = table[place]
            rule[KIND] = _kind(text)
            rule[READS] = len(reads)
            rule[FIRST_READ : FIRST_READ + len(reads)] = [_NAMES.index(name) for name in reads]
            if rule[KIND] == COMPUTES:
                rule[ALONE] = _ALONE_CODES + place
                rule[SCALED] = _SCALED_CODES + place if len(reads) < _MOST else 0
    return table


def arities() -> NDArray[np.int8]:
    """Return the number of operands of every instruction by code, int8 [CODE_COUNT]."""
    table = np.zeros(CODE_COUNT, dtype=np.int8)
    table[: len(OPERATOR_ARITIES)] = OPERATOR_ARITIES
    for kernel in partial_kernels():
        table[kernel.code] = kernel.arity + kernel.scaled
    table[PRODUCT_CODE] = 2
    return table


def _kind(text: str) -> int:
    fixed = {"0": NOTHING, "1": PASSES, "-1": NEGATES}
    return fixed.get(text, OPERAND_IS_PARTIAL if text in _NAMES else COMPUTES)


def _reads(text: str) -> list[str]:
    """Return the operands that a derivative reads, and r if it reads the result."""
    names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    found = [name for name in _NAMES if name in names]
    if len(found) > _MOST:
        raise ValueError(f"the derivative {text} reads more than {_MOST} operands")
    return found


# ------------------------------------------------------------------------------ the backward pass

#: Bits of what is requested: derivatives by parameters, and by variables; the row loss, in the
#: data's type; the derivative of the row loss by the result. SQUARES says that the row loss given
#: is f - y, and that what is summed is its square.
BY_PARAMETERS, BY_VARIABLES, LOSS, LOSS_DERIVATIVE, SQUARES = 1, 2, 4, 8, 16
_ADD: Final = OPERATORS["add"].code
_NEGATE: Final = OPERATORS["neg"].code


class Pass(NamedTuple):
    """A graph with what backward passes note for each of its nodes, int64 [nodes]."""

    graph: Graph
    rules: Any
    """See `rules`."""
    one: Any
    """The node of the constant 1, int64 [1]."""
    invariant: Any
    """Whether the node is an invariant."""
    active: Any
    """Whether derivatives by the node are needed."""
    adjoints: Any
    """Node of the derivative of the result by the node; NONE where nothing has come yet."""
    inner: Any
    """The same in the passes over the row loss, and over invariants."""
    waiting: Any
    """Nodes that wait in the latter pass, in ascending order."""


@uncounted
def differentiate_loss(state: Pass, loss: Any, root: Any) -> Any:
    """Return the node of the derivative of the row loss by the program's result.

    A loss that is a part of the program, such as a constant, comes before the result.
    """
    graph = state.graph
    for number in range(max(loss, root) + 1):
        depends = number == root or _has_active_operand(state, number)
        state.active[number] = 1 if depends and number >= root else 0
        state.inner[number] = NONE
    state.inner[loss] = state.one[0]
    for number in range(loss, root, -1):
        if state.inner[number] != NONE and state.active[number]:
            _propagate(state, state.inner, number)
    if state.inner[root] == NONE:
        return constant_node(graph, 0.0)
    return state.inner[root]


@uncounted
def mark_nodes(state: Pass, count: int, requested: int) -> None:
    """Mark invariants, and the nodes that derivatives pass through.

    ``count`` nodes come before those of derivatives.
    """
    graph = state.graph
    for number in range(count):
        node = graph.nodes[number]
        invariant = node.code != VARIABLE
        for k in range(graph.arities[node.code]):
            invariant = invariant and state.invariant[node.operands[k]] == 1
        is_leaf = (node.code == PARAMETER and requested & BY_PARAMETERS != 0) or (
            node.code == VARIABLE and requested & BY_VARIABLES != 0
        )
        state.invariant[number] = 1 if invariant else 0
        state.active[number] = 1 if is_leaf or _has_active_operand(state, number) else 0
        state.adjoints[number] = state.inner[number] = NONE


@uncounted
def _has_active_operand(state: Pass, number: int) -> bool:
    found = False
    node = state.graph.nodes[number]
    for k in range(state.graph.arities[node.code]):
        found = found or state.active[node.operands[k]] == 1
    return found


@uncounted
def run_backward(state: Pass, root: Any, out: Lowered, header: Any) -> None:
    """Run the backward pass from the result; list columns, as nodes, and entries."""
    graph = state.graph
    state.adjoints[root] = state.one[0]
    for number in range(root, -1, -1):
        adjoint = state.adjoints[number]
        if adjoint == NONE or not state.active[number]:
            continue
        node = graph.nodes[number]
        if not state.invariant[number] and node.code != VARIABLE:
            _propagate(state, state.adjoints, number)
            continue
        out.columns[header.first_column + header.columns] = adjoint
        header.columns += 1
        if node.code == VARIABLE:
            _add_entry(out, header, -1 - node.operands[0], state.one[0])
        else:
            _differentiate_invariant(state, number, out, header)


@uncounted
def _differentiate_invariant(state: Pass, top: Any, out: Lowered, header: Any) -> None:
    """List the derivatives of an invariant as entries of the last column.

    ``inner`` ends as it was.
    """
    graph, waiting = state.graph, state.waiting
    state.inner[top] = state.one[0]
    waiting[0] = top
    count = 1
    while count:
        count -= 1
        number = waiting[count]
        node = graph.nodes[number]
        if node.code == PARAMETER:
            _add_entry(out, header, node.operands[0], state.inner[number])
        for k in range(graph.arities[node.code]):
            operand = node.operands[k]
            if state.active[operand]:
                is_new = state.inner[operand] == NONE
                _propagate_to(state, state.inner, number, k)
                if is_new and state.inner[operand] != NONE:
                    position = count  # in ascending order
                    while position > 0 and waiting[position - 1] > operand:
                        waiting[position] = waiting[position - 1]
                        position -= 1
                    waiting[position] = operand
                    count += 1
        state.inner[number] = NONE


@uncounted
def _add_entry(out: Lowered, header: Any, leaf: int, factor: Any) -> None:
    """Add an entry of the last column."""
    entry = out.entries[header.first_entry + header.entries]
    entry.column, entry.leaf, entry.factor = header.columns - 1, leaf, factor
    header.entries += 1


@uncounted
def _propagate(state: Pass, adjoints: Any, number: int) -> None:
    """Propagate the adjoint of a node to all its active operands."""
    node = state.graph.nodes[number]
    for k in range(state.graph.arities[node.code]):
        if state.active[node.operands[k]]:
            _propagate_to(state, adjoints, number, k)


@uncounted
def _propagate_to(state: Pass, adjoints: Any, number: int, k: int) -> None:
    """Add adjoint times partial derivative to the adjoint of operand k."""
    graph, none, one = state.graph, np.int64(NONE), state.one[0]
    node = graph.nodes[number]
    rule = state.rules[3 * node.code + k]
    if rule[KIND] == NOTHING:
        return
    term = adjoints[number]
    if rule[KIND] == NEGATES:
        term = find_node(graph, np.int64(_NEGATE), term, none, none)
    elif rule[KIND] != PASSES:
        first, second = _read(graph, number, rule, 0), _read(graph, number, rule, 1)
        if rule[KIND] == COMPUTES and term != one and rule[SCALED]:
            term = find_node(graph, rule[SCALED], term, first, second)
        else:
            partial = first
            if rule[KIND] == COMPUTES:
                third = _read(graph, number, rule, 2)
                partial = find_node(graph, rule[ALONE], first, second, third)
            is_one = term == one
            term = (
                partial if is_one else find_node(graph, np.int64(PRODUCT_CODE), term, partial, none)
            )
    operand = node.operands[k]
    if adjoints[operand] != NONE:
        term = find_node(graph, np.int64(_ADD), adjoints[operand], term, none)
    adjoints[operand] = term


@uncounted
def _read(graph: Graph, number: int, rule: Any, index: int) -> Any:
    """Return the node that a partial derivative reads as its operand ``index``, or NONE."""
    if index >= rule[READS]:
        return np.int64(NONE)
    which = rule[FIRST_READ + index]
    return np.int64(number) if which == 3 else graph.nodes[number].operands[which]


# ------------------------------------------------------------------ programs with derivatives

#: Nodes for each token, at most: itself; partial derivative, product and sum for the adjoint of an
#: operand, once in the pass over the program and once in that over an invariant.
_NODES_A_TOKEN: Final = 7
_MORE_NODES: Final = 16


@inlined
def node_capacity(tokens: int, programs: int, loss_tokens: int) -> int:
    """Return how many nodes, instructions or loads there are at most."""
    return _NODES_A_TOKEN * (tokens + programs * loss_tokens) + _MORE_NODES * programs


def allocate_differentiated(batch: Batch, loss: RowLossTokens) -> Lowered:
    """Allocate what a batch is lowered to with its derivatives."""
    tokens = len(batch.codes)
    capacity = node_capacity(tokens, len(batch), len(loss.codes))
    return allocate(len(batch), capacity, capacity, tokens)


def lower_batch(batch: Batch, requested: int) -> Lowered:
    """Lower checked programs with derivatives on the calling thread, without Python's lock.

    Args:
        batch: the programs; parameters are not read.
        requested: bits such as `BY_PARAMETERS`, none of which asks for a row loss.

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
    return Lowered(out.headers, *(array[:end] for array, end in zip(out[1:], ends, strict=True)))


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
    """Return the operator table as the arrays that lowering reads."""
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
    """Bits such as `BY_PARAMETERS`, and the options of `source_arrays`, int64 [1 + options]."""
    ends: Any
    """Ends of what all threads have appended: instructions, loads, columns and entries."""


class LoweringWorkspace(NamedTuple):
    """Memory of a thread to lower one program at a time, in compiled code."""

    state: Pass
    scratch: Scratch
    program: Lowered
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
    state = Pass(
        new_graph(capacity, tokens, source.arities), source.rules,
        np.empty(1, dtype=np.int64),
        np.empty(capacity, dtype=np.int64), np.empty(capacity, dtype=np.int64),
        np.empty(capacity, dtype=np.int64), np.empty(capacity, dtype=np.int64),
        np.empty(capacity, dtype=np.int64),
    )  # fmt: skip
    program = allocate(1, capacity, capacity, tokens)
    return LoweringWorkspace(state, new_scratch(capacity), program)


@numba_cache.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def differentiate_chunk(block: int, chunk: int) -> int:
    """Lower a range of programs with their derivatives; see `argument_block`.

    Each is appended to what all threads have lowered, so that nothing lies in between.
    """
    programs, _, _ = chunk_ranges(block, chunk)
    source, out = source_of(block), lowered_of(block, AFTER_SOURCE)
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
    root = number_tokens(graph, source.codes[start:stop], source.values[start:stop], np.int64(NONE))
    loss = derivative = np.int64(NONE)
    if requested & (LOSS | LOSS_DERIVATIVE):
        loss = number_tokens(graph, source.loss_codes, source.loss_values, root)
    state.one[0] = constant_node(graph, 1.0)
    forward = graph.size[0]
    header = out.headers[0]
    header.start = header.first_load = header.first_column = header.first_entry = 0
    header.columns = header.entries = 0
    if requested & LOSS_DERIVATIVE:
        derivative = loss if requested & SQUARES else differentiate_loss(state, loss, root)
    if requested & (BY_PARAMETERS | BY_VARIABLES):
        mark_nodes(state, forward, requested)
        run_backward(state, root, out, header)
    loss = loss if requested & LOSS else np.int64(NONE)
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
        if node != NONE:
            graph.nodes[node].uses += 1
    emit_result(graph, scratch, out, header, root)
    for node in (loss, derivative):
        if node != NONE and graph.nodes[node].slots:
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
        entry.factor = NONE if is_one else graph.nodes[entry.factor].location >> 2


@uncounted
def _as_rows(graph: Any, out: Lowered, header: Any, node: Any) -> Any:
    """Return the location of a node's rows; an invariant is copied to rows, for sums."""
    if node == NONE:
        return np.int64(NONE)
    location = graph.nodes[node].location
    if location & 3 != INVARIANT:
        return location
    target = header.slots << 2 | SLOT
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
def _append(source: Source, made: Lowered, out: Lowered, program: int) -> None:
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


# -------------------------------------------------------------------------------- requested outputs

_OUTPUTS: Final = tuple(each.name for each in fields(Outputs))


@dataclass(frozen=True, slots=True, eq=False)
class RequestedOutputs(Outputs):
    """Arrays to fill, None for what is not requested; see `Outputs` and `Linearisation`."""

    row_loss: Program | None = None
    curvatures: NDArray[np.float64] | None = None

    @property
    def lowering_flags(self) -> int:
        """Flags of the outputs that lowering has to provide, bits of `autodiff`."""
        parameters = any(x is not None for x in (self.gradients, self.curvatures, self.jacobian))
        variables = self.variable_gradients is not None
        return (
            BY_PARAMETERS * parameters
            | BY_VARIABLES * variables
            | LOSS * (self.row_loss is not None and not self.deviation)
            | LOSS_DERIVATIVE * self.needs_loss_derivative
            | SQUARES * self.is_squares
        )

    def of_programs(self, programs: slice, parameter_starts: NDArray[np.int64]) -> RequestedOutputs:
        """Return the outputs of a range of programs; `Batch.parameter_starts` are of all."""
        start, stop = parameter_starts[programs.start], parameter_starts[programs.stop]
        of_parameters = {
            output.name: slice(start, stop) for output in OUTPUTS if output.axes[0] == "parameters"
        }
        arrays: dict[str, Any] = {
            each.name: array[of_parameters.get(each.name, programs)]
            for each in fields(self)
            if isinstance(array := getattr(self, each.name), np.ndarray)
        }
        arrays["cancelled"] = self.cancelled
        first = int(programs.start)
        return replace(self, **arrays, ready=lambda count: self.ready(first + count))

    @property
    def needs_loss_derivative(self) -> bool:
        """Whether derivatives of the loss are requested."""
        return self.gradients is not None or self.variable_gradients is not None

    @property
    def is_squares(self) -> bool:
        """Whether the row loss is (f - y)^2."""
        return self.row_loss is not None and _is_squares(self.row_loss)

    @property
    def deviation(self) -> str:
        """``"squared"`` for (f - y)^2, ``"absolute"`` for |f - y|, else empty.

        Engines compute these two from values and target themselves, in float64 for each row.
        """
        if self.is_squares:
            return "squared"
        return "absolute" if self.row_loss == ABSOLUTE else ""


@lru_cache(64)
def _is_squares(row_loss: Program) -> bool:
    return LossFunction(row_loss).is_squares


def requested_outputs(evaluation: Evaluation, outputs: Outputs) -> RequestedOutputs:
    """Return the outputs that an evaluation requests."""
    loss = evaluation.loss_function
    sums = (outputs.losses, outputs.gradients, outputs.variable_gradients)
    needs_loss = any(array is not None for array in sums)
    return RequestedOutputs(
        row_loss=loss.row if loss is not None and needs_loss else None,
        **{name: getattr(outputs, name) for name in _OUTPUTS},
    )


def linearisation_outputs(
    batch: Batch, row_loss: Program, *, curvature: bool, cancelled: NDArray[np.uint8]
) -> tuple[Linearisation, RequestedOutputs]:
    """Allocate the results of a linearisation; return them, and the request to fill them.

    ``cancelled`` as in `Outputs`.
    """
    counts = batch.parameter_counts.astype(np.int64)
    triangles = int((counts * (counts + 1) // 2).sum()) * batch.vectors
    found = Linearisation(
        losses=np.empty((len(batch), batch.vectors)),
        gradients=np.empty(len(batch.parameters)),
        curvatures=np.empty(triangles) if curvature else None,
    )
    arrays = {each.name: getattr(found, each.name) for each in fields(found)}
    return found, RequestedOutputs(
        values=None, ready=lambda programs: None, row_loss=row_loss, cancelled=cancelled, **arrays
    )
