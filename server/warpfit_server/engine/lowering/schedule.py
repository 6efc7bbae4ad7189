"""Scheduling: the order of a graph's instructions and the slots of their results.

Leaves and scalars get locations of their own, and scalars are emitted in the order of their
numbers. All other nodes are emitted depth first from what is requested, the operand that needs most
slots first (Sethi and Ullman, JACM 17, 1970). A slot is free again after its last use, so few are
needed and intermediate results stay in cache. Compiled by Numba.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from warpfit.ops import CONSTANT, PARAMETER, VARIABLE
from warpfit_server.engine.lowering import lowered
from warpfit_server.engine.lowering.graph import Graph
from warpfit_server.engine.native.intrinsics import inlined, uncounted


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
def emit_prologue(graph: Graph, scratch: Scratch, out: lowered.Lowered, header: Any) -> None:
    """Begin a program: locate leaves and scalars, emit the scalars, count the uses of the others.

    ``header.start`` and ``header.first_load`` say where in ``out`` the program begins.
    """
    header.end = header.start
    header.scalars = header.slots = header.loads = 0
    scratch.free[0] = 0
    for number in range(graph.size[0]):
        node = graph.nodes[number]
        node.slots = node.uses = node.emitted = 0
        node.location = lowered.NONE
        code = node.code
        if code == VARIABLE:
            node.location = node.operands[0] << 2 | lowered.INPUT
        elif code in (PARAMETER, CONSTANT):
            load = out.loads[header.first_load + header.loads]
            load.scalar = header.scalars
            load.parameter = node.operands[0] if code == PARAMETER else lowered.NONE
            load.value = np.int64(node.operands[0]).view(np.float64)
            header.loads += 1
            _locate_scalar(node, header)
        elif _is_scalar(graph, node):
            _locate_scalar(node, header)
            _emit(graph, node, out, header)
        else:
            _count_uses(graph, scratch, node)
    header.prologue_end = header.end


@uncounted
def _locate_scalar(node: Any, header: Any) -> None:
    node.location = header.scalars << 2 | lowered.SCALAR
    header.scalars += 1


@uncounted
def _is_scalar(graph: Graph, node: Any) -> bool:
    for k in range(graph.arities[node.code]):
        location = graph.nodes[node.operands[k]].location
        if location == lowered.NONE or location & 3 != lowered.SCALAR:
            return False
    return True


@uncounted
def _count_uses(graph: Graph, scratch: Scratch, node: Any) -> None:
    """Count a node as a use of its operands, and the slots that it needs."""
    for k in range(graph.arities[node.code]):
        graph.nodes[node.operands[k]].uses += 1
    pending = _sort_operands(graph, scratch, node)
    slots = 1
    for k in range(pending):
        slots = max(slots, graph.nodes[scratch.sorted[k]].slots + pending - 1 - k)
    node.slots = slots


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
def emit_result(
    graph: Graph, scratch: Scratch, out: lowered.Lowered, header: Any, root: Any
) -> None:
    """Emit what computes the result of the program."""
    if graph.nodes[root].slots:
        schedule(graph, scratch, out, header, root, root)
    else:
        emit_copy(graph.nodes[root].location, np.int64(lowered.RESULT), out, header)


@uncounted
def schedule(
    graph: Graph, scratch: Scratch, out: lowered.Lowered, header: Any, top: Any, root: Any
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
        _release_operands(graph, scratch, node)
        node.location = (
            lowered.RESULT if number == root else _take_slot(scratch, header) << 2 | lowered.SLOT
        )
        node.emitted = 1
        _emit(graph, node, out, header)


@uncounted
def _release_operands(graph: Graph, scratch: Scratch, node: Any) -> None:
    """Free the slots of the operands that are used for the last time."""
    for k in range(graph.arities[node.code]):
        operand = graph.nodes[node.operands[k]]
        operand.uses -= 1
        if operand.uses == 0 and operand.location & 3 == lowered.SLOT:
            scratch.free[0] += 1
            scratch.free[scratch.free[0]] = operand.location >> 2


@uncounted
def _take_slot(scratch: Scratch, header: Any) -> Any:
    if scratch.free[0]:
        scratch.free[0] -= 1
        return scratch.free[scratch.free[0] + 1]
    header.slots += 1
    return header.slots - 1


@uncounted
def _emit(graph: Graph, node: Any, out: lowered.Lowered, header: Any) -> None:
    instruction = out.instructions[header.end]
    instruction.code = node.code
    instruction.target = node.location
    broadcast = 0
    for k in range(3):
        instruction.operands[k] = 0
        if k < graph.arities[node.code]:
            location = graph.nodes[node.operands[k]].location
            instruction.operands[k] = location
            if location & 3 == lowered.SCALAR:
                broadcast |= 1 << k
    instruction.broadcast = broadcast
    header.end += 1


@uncounted
def emit_copy(source: Any, target: Any, out: lowered.Lowered, header: Any) -> None:
    """Emit the copy of a leaf or a scalar to rows of its own."""
    instruction = out.instructions[header.end]
    instruction.code = lowered.COPY_CODE
    instruction.target = target
    for k in range(3):
        instruction.operands[k] = source
    instruction.broadcast = 1 if source & 3 == lowered.SCALAR else 0
    header.end += 1
