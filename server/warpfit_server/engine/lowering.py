"""Lowering: postfix tokens are checked, and become the instructions that the engines run.

Front ends pass tokens on unseen, because looking at each one takes time of Python's, of which they
have least. Engines check them in compiled code without Python's lock; only for a bad token the
client's own check runs, which names it.

The simple form turns each operator token into one instruction that pops its operands from a stack
and pushes its result. What is clever happens in one pass over the tokens and one over the nodes:

* A subexpression that occurs again is the same node of a graph and is computed once.
* A power with the constant exponent -2, -1, 1, 2, 3 or 4 becomes products or a quotient.
* An operation on parameters and constants alone is an invariant, computed in the prologue: once for
  each parameter vector instead of once for each block of rows.
* Variables, invariants and results are operands in place; there are no loads and no stores.
* Instructions are ordered so that few slots are needed.

Each program has its own part of the results, so threads lower ranges of programs. All of it is
compiled by Numba.

With few rows, lowering programs takes longer than running them. The driver of fits selects programs
of the same batch with every pass; clients with a search of their own send the same programs again,
each time in other memory. So a `LoweringCache` keeps the lowered programs of batches that come
again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
from cachetools import LRUCache
from numba import types
from numpy.typing import NDArray

from warpfit.errors import InternalError
from warpfit.ir import INDEX_LIMIT, Batch
from warpfit.ops import ARITIES, CONSTANT, OPERATORS, PARAMETER, VARIABLE
from warpfit_server.engine.interface import Steps
from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.native.intrinsics import (
    FAILED,
    FINISHED,
    OWN_ARRAYS,
    chunk_ranges,
    floats,
    inlined,
    octets,
    reader,
    uncounted,
    words,
)
from warpfit_server.shared_batch import BatchSummary, contents

# ---------------------------------------------------------------------------- the check of tokens


def check_tokens(batch: Batch, variables: int) -> None:
    """Check every token against the operator table and the data set.

    Args:
        batch: whose arrays fit together, see `Batch.check_shapes`.
        variables: of the data set.

    Raises:
        ProgramError: for the first bad token.
    """
    if are_valid(batch, variables):
        return
    batch.check(variables)
    raise InternalError("two checks of a batch disagree", "ENGINE_FAILURE", "Report it as a bug")


def are_valid(batch: Batch, variables: int) -> bool:
    """Return whether `Batch.check` would pass, for a batch whose arrays fit together."""
    return bool(
        tokens_are_valid(
            batch.codes,
            batch.values,
            batch.lengths,
            batch.parameter_counts,
            float(min(variables, INDEX_LIMIT)),
        )
    )


def load_check() -> None:
    """Load the compiled check, or compile it, for the arrays of requests."""
    counts = types.Array(types.uint32, 1, "C")
    codes, values = types.Array(types.uint8, 1, "C"), types.Array(types.float64, 1, "C")
    tokens_are_valid.compile((codes, values, counts, counts, types.float64))


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def tokens_are_valid(
    codes: NDArray[np.uint8],
    values: NDArray[np.float64],
    lengths: NDArray[np.uint32],
    counts: NDArray[np.uint32],
    variables: float,
) -> bool:
    """Do the work of `are_valid` in compiled code."""
    start = 0
    for program in range(len(lengths)):
        stop = start + int(lengths[program])
        if not program_is_valid(codes, values, start, stop, counts[program], variables):
            return False
        start = stop
    return True


@inlined
def program_is_valid(
    codes: NDArray[np.uint8],
    values: NDArray[np.float64],
    start: int,
    stop: int,
    count: np.uint32,
    variables: float,
) -> bool:
    """Check the tokens of one program with ``count`` parameters, in compiled code."""
    parameters = min(float(count), float(INDEX_LIMIT))
    height, lowest, valid, needed = 0, 1, True, 0.0
    for token in range(start, stop):  # without branches, which are slow on random tokens
        code, value = codes[token], values[token]
        arity = ARITIES[code]
        height += 1 - arity
        lowest = min(lowest, height)
        is_variable, is_parameter = code == VARIABLE, code == PARAMETER
        bound = variables if is_variable else parameters
        fits = (value >= 0.0) & (value < bound) & (np.floor(value) == value)
        valid &= (arity >= 0) & (fits | ~(is_variable | is_parameter))
        needed = max(needed, value + 1.0 if is_parameter else 0.0)
    valid &= needed == count
    return not (stop == start or height != 1 or lowest < 1 or not valid)


# ------------------------------------------------------------------- the form of lowered programs
#
# A *location* says where a value lives: ``index << 2 | kind``, a kind being one of
#
# * INPUT: the rows of a variable, in the data set;
# * SLOT: the rows of an intermediate result; slots are reused as registers are;
# * INVARIANT: a number that no row changes;
# * RESULT: the rows of the program's result.
#
# The instructions of a program are its *prologue*, on invariants, which runs once for each
# parameter vector, and its body, which runs on each block of rows.

INPUT, SLOT, INVARIANT, RESULT = range(4)
NONE: Final = -1
#: Code of the instruction that copies its operand; no operator has a leaf's code.
COPY_CODE: Final = VARIABLE


def _words(*names: str) -> list[tuple[str, type[np.int64]]]:
    return [(name, np.int64) for name in names]


#: Code; locations of the result and of the operands; a bit set of the operands that are invariants.
INSTRUCTION: Final = np.dtype(
    [("code", np.int64), ("target", np.int64), ("operands", np.int64, 3), ("broadcast", np.int64)]
)
#: What there is of a program. ``loss`` and ``loss_derivative`` are the locations of the row loss
#: and of its derivative by the result, NONE for what was not requested.
HEADER: Final = np.dtype(
    _words(
        *("start", "prologue_end", "end", "invariants", "slots", "first_load", "loads"),
        *("first_column", "columns", "first_entry", "entries", "loss", "loss_derivative"),
    )
)
#: An invariant to fill before the prologue runs, with a parameter or, if that is NONE, a value.
LOAD: Final = np.dtype([("invariant", np.int64), ("parameter", np.int64), ("value", np.float64)])
#: A column; a parameter, or -1 - a variable; an invariant, or NONE for 1. See `differentiate`.
ENTRY: Final = np.dtype(_words("column", "leaf", "factor"))


class Lowered(NamedTuple):
    """Programs of a batch; compiled code reads the fields by the same names."""

    headers: Any
    """HEADER of each program."""
    instructions: Any
    """INSTRUCTION records."""
    loads: Any
    """LOAD records."""
    columns: Any
    """Locations, int64; empty without derivatives, like the next."""
    entries: Any
    """ENTRY records."""

    def part(self, first: int, stop: int) -> Lowered:
        """Return a range of programs that lie one behind the other, without their numbers.

        Parts are equal to the byte if programs differ only in constants, or in which parameter is
        where.
        """
        headers = self.headers[first:stop].copy()
        last = headers[-1]
        begins = ("start", "first_load", "first_column", "first_entry")
        counts = (last["end"] - last["start"], *(last[n] for n in ("loads", "columns", "entries")))
        arrays = []
        for array, begin, count in zip(self[1:], begins, counts, strict=True):
            start = int(headers[begin][0])
            arrays.append(array[start : int(last[begin] + count)].copy())
            moved = ("start", "prologue_end", "end") if begin == "start" else (begin,)
            for name in moved:
                headers[name] -= start
        loads = arrays[1]
        loads["parameter"], loads["value"] = NONE, 0.0
        return Lowered(headers, *arrays)


@inlined
def allocate(programs: int, instructions: int, loads: int, tokens: int = 0) -> Lowered:
    """Allocate arrays for lowered programs: their headers, instructions, loads and derivatives."""
    return Lowered(
        np.empty(programs, dtype=HEADER),
        np.empty(instructions, dtype=INSTRUCTION),
        np.empty(loads, dtype=LOAD),
        np.empty(tokens, dtype=np.int64),
        np.empty(2 * tokens, dtype=ENTRY),
    )


_headers, _instructions, _loads, _entries = (
    reader(kind) for kind in (HEADER, INSTRUCTION, LOAD, ENTRY)
)


@inlined
def lowered_of(block: int, index: int) -> Any:
    """Return the arrays of `Lowered` in an argument block, from number ``index``."""
    return Lowered(
        _headers(block, index),
        _instructions(block, index + 1),
        _loads(block, index + 2),
        words(block, index + 3),
        _entries(block, index + 4),
    )


# ------------------------------------------------------------------------- the numbering of values
#
# Nodes are numbered in the order in which they are made, operands before what uses them. What is
# computed twice is one node: nodes are found by code and operands in a hash table.

#: Code of a token in a row loss that is the result of the program before it.
PREDICTION: Final = 0
_POWER_CODE, _SQUARE_CODE, _CUBE_CODE, _INVERSE_CODE = (
    OPERATORS[name].code for name in ("pow", "square", "cube", "inv")
)
#: Code; numbers of the operands (of a leaf, the index, or the bits of the constant, comes first);
#: slots that the node needs (0 for leaves and invariants); uses that are left; location; whether
#: the instruction is there.
NODE: Final = np.dtype(
    [
        ("code", np.int64),
        ("operands", np.int64, 3),
        *((name, np.int64) for name in ("slots", "uses", "location", "emitted")),
    ]
)


class Graph(NamedTuple):
    """Nodes of one program at a time, in compiled code."""

    nodes: Any
    size: Any
    """Number of nodes, int64 [1]."""
    table: Any
    """Numbers of nodes by the hash of what they are; NONE where there is none."""
    mask: Any
    """Entries of the table that are used, less 1, int64 [1]."""
    stack: Any
    arities: Any
    """Number of operands by code, int64."""


@inlined
def new_graph(nodes: int, tokens: int, arities: Any) -> Graph:
    """Allocate a graph for programs of so many nodes and tokens at most."""
    return Graph(
        np.empty(nodes, dtype=NODE),
        np.zeros(1, dtype=np.int64),
        np.empty(_table_size(nodes), dtype=np.int64),
        np.zeros(1, dtype=np.int64),
        np.empty(tokens, dtype=np.int64),
        arities,
    )


@uncounted
def clear(graph: Graph, nodes: int) -> None:
    """Empty a graph for a program of at most so many nodes."""
    size = _table_size(nodes)
    for index in range(size):
        graph.table[index] = NONE
    graph.mask[0] = size - 1
    graph.size[0] = 0


@uncounted
def _table_size(nodes: int) -> int:
    size = 4
    while size < 2 * nodes:
        size *= 2
    return size


@uncounted
def number_tokens(graph: Graph, codes: Any, values: Any, prediction: Any) -> Any:
    """Add the nodes of postfix tokens; return the root.

    A token PREDICTION stands for the node ``prediction``.
    """
    stack, height = graph.stack, 0
    for token in range(len(codes)):
        code = np.int64(codes[token])
        if code == PREDICTION:
            stack[height] = prediction
            height += 1
            continue
        arity = graph.arities[code]
        first, second, third = np.int64(NONE), np.int64(NONE), np.int64(NONE)
        if arity > 0:
            height -= arity
            first = stack[height]
            second = stack[height + 1] if arity > 1 else second
            third = stack[height + 2] if arity > 2 else third
        else:
            value = values[token]
            first = np.float64(value).view(np.int64) if code == CONSTANT else np.int64(value)
        if code == _POWER_CODE:
            stack[height] = _power_node(graph, first, second)
        else:
            stack[height] = find_node(graph, code, first, second, third)
        height += 1
    return stack[0]


@uncounted
def _power_node(graph: Graph, base: Any, exponent: Any) -> Any:
    """Return the node of a power, or of products or a quotient that equal it."""
    none = np.int64(NONE)
    if graph.nodes[exponent].code == CONSTANT:
        value = np.int64(graph.nodes[exponent].operands[0]).view(np.float64)
        if value == 1.0:
            return base
        if value == 3.0:
            return find_node(graph, np.int64(_CUBE_CODE), base, none, none)
        if value in (-1.0, -2.0):
            base = find_node(graph, np.int64(_INVERSE_CODE), base, none, none)
        if value == 4.0:
            base = find_node(graph, np.int64(_SQUARE_CODE), base, none, none)
        if value in (2.0, -2.0, 4.0):
            return find_node(graph, np.int64(_SQUARE_CODE), base, none, none)
        if value == -1.0:
            return base
    return find_node(graph, np.int64(_POWER_CODE), base, exponent, none)


@uncounted
def constant_node(graph: Graph, value: float) -> Any:
    """Return the node of a constant."""
    bits, none = np.float64(value).view(np.int64), np.int64(NONE)
    return find_node(graph, np.int64(CONSTANT), bits, none, none)


@uncounted
def find_node(graph: Graph, code: Any, a: Any, b: Any, c: Any) -> Any:
    """Return the node with this code and these operands, which is made if it is new."""
    key = np.uint64(code) * np.uint64(0x9E3779B97F4A7C15)
    for operand in (a, b, c):
        key = (key ^ np.uint64(operand)) * np.uint64(0xFF51AFD7ED558CCD)
        key ^= key >> np.uint64(32)
    index = np.int64(key & np.uint64(graph.mask[0]))
    while graph.table[index] >= 0:
        known = graph.nodes[graph.table[index]]
        if (
            known.code == code
            and known.operands[0] == a
            and known.operands[1] == b
            and known.operands[2] == c
        ):
            return graph.table[index]
        index = (index + 1) & graph.mask[0]
    number = graph.size[0]
    graph.size[0] = number + 1
    graph.table[index] = number
    node = graph.nodes[number]
    node.code = code
    node.operands[0], node.operands[1], node.operands[2] = a, b, c
    return number


# ------------------------------------------------------------- the order of instructions, and slots
#
# Leaves and invariants get locations of their own, and invariants are emitted in the order of their
# numbers. All other nodes are emitted depth first from what is requested, the operand that needs
# most slots first (Sethi and Ullman, JACM 17, 1970). A slot is free again after its last use, so
# few are needed and intermediate results stay in cache.


class Scratch(NamedTuple):
    """Memory to schedule one program at a time, int64."""

    free: Any
    """Number of free slots, then the slots, [nodes + 1]."""
    agenda: Any
    """Nodes to visit; each waits at most once for each of its uses."""
    sorted: Any
    """Operands of a node, [3]."""


@inlined
def new_scratch(nodes: int) -> Scratch:
    """Allocate the memory for programs of so many nodes."""
    return Scratch(
        np.empty(nodes + 1, dtype=np.int64),
        np.empty(5 * nodes + 8, dtype=np.int64),
        np.empty(3, dtype=np.int64),
    )


@uncounted
def emit_prologue(graph: Graph, scratch: Scratch, out: Lowered, header: Any) -> None:
    """Begin a program: locate leaves, emit the invariants, count the uses of the other nodes.

    ``header.start`` and ``header.first_load`` say where in ``out`` the program begins.
    """
    header.end = header.start
    header.invariants = header.slots = header.loads = 0
    scratch.free[0] = 0
    for number in range(graph.size[0]):
        node = graph.nodes[number]
        node.slots = node.uses = node.emitted = 0
        node.location = NONE
        code = node.code
        if code == VARIABLE:
            node.location = node.operands[0] << 2 | INPUT
        elif code in (PARAMETER, CONSTANT):
            load = out.loads[header.first_load + header.loads]
            load.invariant = header.invariants
            load.parameter = node.operands[0] if code == PARAMETER else NONE
            load.value = np.int64(node.operands[0]).view(np.float64)
            header.loads += 1
            _locate_invariant(node, header)
        else:
            is_invariant = True
            for k in range(graph.arities[code]):
                location = graph.nodes[node.operands[k]].location
                if location == NONE or location & 3 != INVARIANT:
                    is_invariant = False
            if is_invariant:
                _locate_invariant(node, header)
                _emit(graph, node, out, header)
                continue
            for k in range(graph.arities[code]):
                graph.nodes[node.operands[k]].uses += 1
            pending = _sort_operands(graph, scratch, node)
            slots = 1
            for k in range(pending):
                slots = max(slots, graph.nodes[scratch.sorted[k]].slots + pending - 1 - k)
            node.slots = slots
    header.prologue_end = header.end


@uncounted
def _locate_invariant(node: Any, header: Any) -> None:
    node.location = header.invariants << 2 | INVARIANT
    header.invariants += 1


@uncounted
def _sort_operands(graph: Graph, scratch: Scratch, node: Any) -> int:
    """List the operands that need slots, the one that needs fewest first; return their number."""
    count = 0
    for k in range(graph.arities[node.code]):
        operand = node.operands[k]
        slots = graph.nodes[operand].slots
        if slots == 0:
            continue
        position = count
        while position > 0 and graph.nodes[scratch.sorted[position - 1]].slots > slots:
            scratch.sorted[position] = scratch.sorted[position - 1]
            position -= 1
        scratch.sorted[position] = operand
        count += 1
    return count


@uncounted
def emit_result(graph: Graph, scratch: Scratch, out: Lowered, header: Any, root: Any) -> None:
    """Emit what computes the result of the program."""
    if graph.nodes[root].slots:
        schedule(graph, scratch, out, header, root, root)
    else:
        emit_copy(graph.nodes[root].location, np.int64(RESULT), out, header)


@uncounted
def schedule(
    graph: Graph, scratch: Scratch, out: Lowered, header: Any, top: Any, root: Any
) -> None:
    """Emit what is missing of the node ``top``, which needs slots, and of all that it depends on.

    The prologue has been emitted; the rows of the node ``root`` are the result.
    """
    # A node is visited twice: even entries of the agenda ask for its operands, odd ones emit it.
    agenda = scratch.agenda
    agenda[0] = top << 1
    pending = 1
    while pending:
        pending -= 1
        number, is_ready = agenda[pending] >> 1, agenda[pending] & 1
        node = graph.nodes[number]
        if node.emitted:
            continue
        if not is_ready:
            agenda[pending] = number << 1 | 1
            pending += 1
            for k in range(_sort_operands(graph, scratch, node)):
                agenda[pending] = scratch.sorted[k] << 1
                pending += 1
            continue
        for k in range(graph.arities[node.code]):  # slots that are read for the last time
            operand = graph.nodes[node.operands[k]]
            operand.uses -= 1
            if operand.uses == 0 and operand.location & 3 == SLOT:
                scratch.free[0] += 1
                scratch.free[scratch.free[0]] = operand.location >> 2
        if number == root:
            node.location = RESULT
        elif scratch.free[0]:
            scratch.free[0] -= 1
            node.location = scratch.free[scratch.free[0] + 1] << 2 | SLOT
        else:
            node.location = header.slots << 2 | SLOT
            header.slots += 1
        node.emitted = 1
        _emit(graph, node, out, header)


@uncounted
def _emit(graph: Graph, node: Any, out: Lowered, header: Any) -> None:
    instruction = out.instructions[header.end]
    instruction.code = node.code
    instruction.target = node.location
    broadcast = 0
    for k in range(3):
        instruction.operands[k] = 0
        if k < graph.arities[node.code]:
            location = graph.nodes[node.operands[k]].location
            instruction.operands[k] = location
            if location & 3 == INVARIANT:
                broadcast |= 1 << k
    instruction.broadcast = broadcast
    header.end += 1


@uncounted
def emit_copy(source: Any, target: Any, out: Lowered, header: Any) -> None:
    """Emit the copy of a leaf or an invariant to rows of its own."""
    instruction = out.instructions[header.end]
    instruction.code = COPY_CODE
    instruction.target = target
    for k in range(3):
        instruction.operands[k] = source
    instruction.broadcast = 1 if source & 3 == INVARIANT else 0
    header.end += 1


# --------------------------------------------------------------------- programs without derivatives

_WIDE_ARITIES: Final = ARITIES.astype(np.int64)
#: Arrays of an argument block, in the order of `lowering_arrays`.
_CODES, _VALUES, _STARTS, _ARITIES, _LOWERED = range(OWN_ARRAYS, OWN_ARRAYS + 5)


def lowering_arrays(batch: Batch, out: Lowered) -> tuple[NDArray[Any], ...]:
    """Return the own arrays of an argument block for `lower_chunk`.

    Args:
        batch: checked programs.
        out: is filled; with room for an instruction for each token and each program, and for a
            load for each token.
    """
    tokens = np.ascontiguousarray(batch.codes), np.ascontiguousarray(batch.values)
    return (*tokens, batch.starts, _WIDE_ARITIES, *out)


@numba_cache.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def lower_chunk(block: int, chunk: int) -> int:
    """Lower a range of programs; see `argument_block`."""
    programs, _, _ = chunk_ranges(block, chunk)
    try:
        _lower(
            octets(block, _CODES), floats(block, _VALUES), words(block, _STARTS),
            words(block, _ARITIES), lowered_of(block, _LOWERED), programs,
        )  # fmt: skip
    except Exception:  # compiled code tells exceptions apart no further: memory is short
        return FAILED
    return FINISHED


@inlined
def _lower(codes: Any, values: Any, starts: Any, arities: Any, out: Lowered, programs: Any) -> None:
    longest = longest_program(starts, programs.start, programs.stop)
    graph, scratch = new_graph(_nodes(longest), longest, arities), new_scratch(_nodes(longest))
    for program in range(programs.start, programs.stop):
        start, stop = starts[program], starts[program + 1]
        clear(graph, _nodes(stop - start))
        root = number_tokens(graph, codes[start:stop], values[start:stop], np.int64(NONE))
        header = out.headers[program]
        header.start, header.first_load = start + program, start
        emit_prologue(graph, scratch, out, header)
        emit_result(graph, scratch, out, header, root)


@inlined
def _nodes(tokens: int) -> int:
    """Return how many nodes tokens have at most: those of a power and its exponent have three."""
    return tokens + tokens // 2


@inlined
def longest_program(starts: Any, start: int, stop: int) -> int:
    """Return the tokens of the longest of a range of programs."""
    longest = 1
    for program in range(start, stop):
        longest = max(longest, starts[program + 1] - starts[program])
    return longest


# -------------------------------------------------------------------- the cache of lowered programs

Made = TypeVar("Made")
#: Tokens of all cached batches, some 30 MB with their derivatives.
_MOST_TOKENS: Final = 400_000
#: Tokens that a batch counts for at least, because small ones take memory, too.
_LEAST_TOKENS: Final = 2_000
#: Batches that are remembered, so that a batch that comes again is cached.
_REMEMBERED: Final = 256


class LoweringCache(Generic[Made]):
    """Keeps the lowered form of batches, most recently used ones longest; safe for threads.

    Args:
        most_tokens: of all cached batches; None for `_MOST_TOKENS`.
    """

    def __init__(self, most_tokens: int | None = None) -> None:
        self._most = most_tokens or _MOST_TOKENS
        self._kept: LRUCache[Hashable, tuple[int, tuple[bytes, ...], Made]] = LRUCache(
            self._most, lambda entry: max(_LEAST_TOKENS, entry[0])
        )
        """Tokens, contents where they are compared, and what was made."""
        self._seen: LRUCache[Hashable, bool] = LRUCache(_REMEMBERED)
        # Reentrant: allocating while a thread holds it may collect a batch, and so call `_forget`.
        self._lock = threading.RLock()

    def by_batch(
        self, batch: Batch, needs: tuple[Hashable, ...], make: Callable[[Batch], Steps[Made]]
    ) -> Steps[Made]:
        """Return the cached value for this batch, computing it once; dropped with the batch.

        A batch that exceeds the limit is cached, too, and alone: every pass of a fit needs it, and
        the limit on the memory of fits allows for it.

        Args:
            batch: in memory of its own; its parameters do not matter.
            needs: what the result depends on beside the programs.
            make: makes it in steps; the result must not refer to the batch.
        """
        key = ("batch", id(batch), *needs)
        with self._lock:
            known = self._kept.get(key)
        if known is not None:
            return known[2]
        made = yield from make(batch)
        with self._lock:
            self._kept[key] = min(len(batch.codes), self._most), (), made
        weakref.finalize(batch, self._forget, key).atexit = False
        return made

    def by_programs(
        self, batch: Batch, needs: tuple[Hashable, ...], make: Callable[[Batch], Steps[Made]]
    ) -> Steps[Made]:
        """Return the cached value for these programs, or compute it.

        It is cached from the second time on, unless the batch exceeds the limit.

        Args:
            batch: in memory that other batches will use later; its parameters do not matter.
            needs: what the result depends on beside the programs.
            make: makes it in steps.
        """
        if self.has_come(batch, needs):
            return (yield from self.keep(batch, needs, make))
        return (yield from make(batch))

    def has_come(self, batch: Batch, needs: tuple[Hashable, ...]) -> bool:
        """Note the programs of a batch; return whether the same have come before, and are kept."""
        if batch.token_count > self._most:
            return False
        key = ("programs", BatchSummary.of(batch).identity, *needs)
        with self._lock:
            has_come = key in self._seen
            self._seen[key] = True
        return has_come

    def keep(
        self, batch: Batch, needs: tuple[Hashable, ...], make: Callable[[Batch], Steps[Made]]
    ) -> Steps[Made]:
        """Return the cached value for these programs, or compute and keep it; see `by_programs`."""
        key, content = ("programs", BatchSummary.of(batch).identity, *needs), contents(batch)
        with self._lock:
            known = self._kept.get(key)
        if known is not None and known[1] == content:
            return known[2]
        made = yield from make(batch.without_parameters())
        with self._lock:
            self._kept[key] = len(batch.codes), content, made
        return made

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._kept.clear()
            self._seen.clear()

    def __len__(self) -> int:
        """Count the cached batches."""
        return len(self._kept)

    def _forget(self, key: Hashable) -> None:
        with self._lock:
            self._kept.pop(key, None)
