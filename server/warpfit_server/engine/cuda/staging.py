"""Lowered batches on their way to the device, one behind the other in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.ir import Batch
from warpfit_server.engine.cuda.device import StreamContext
from warpfit_server.engine.cuda.lower import Lowered

_ALIGNMENT: Final = 256


def stage(
    context: StreamContext, batches: Sequence[Batch], lowered: Sequence[Lowered], chunk: int
) -> dict[str, int]:
    """Copy lowered batches to the device; return the address of each part.

    Each launch takes ``chunk`` jobs in turn.

    The parts are those that the kernels know: ``instructions``, ``programs``, ``order`` (job
    numbers), and ``slot_slots``, ``slot_codes``, ``slot_values``, ``slot_parameters``. Indices into
    them count from the start of the first batch.
    """
    parts: dict[str, list[NDArray[Any]]] = {
        "instructions": [one.instructions for one in lowered],
        "programs": [one.programs for one in lowered],
        "order": [_order(lowered, batches[0].vectors, chunk)],
        "slot_slots": [one.slots for one in lowered],
        "slot_codes": [batch.codes for batch in batches],
        "slot_values": [batch.values for batch in batches],
        "slot_parameters": [batch.parameters for batch in batches],
    }
    offsets = [0]
    for pieces in parts.values():
        size = sum(piece.nbytes for piece in pieces)
        offsets.append(offsets[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
    staging = context.pinned("batch", offsets[-1])
    for pieces, offset in zip(parts.values(), offsets, strict=False):
        _copy(pieces, staging[offset:])
    places = dict(zip(parts, offsets, strict=False))
    if len(batches) > 1:
        _relocate(batches, lowered, staging[places["programs"] :], staging[places["slot_slots"] :])
    base = context.buffer("batch", offsets[-1])
    context.upload(base, staging)
    return {name: base + offset for name, offset in places.items()}


def _copy(pieces: Sequence[NDArray[Any]], target: NDArray[np.uint8]) -> None:
    place = 0
    for piece in pieces:
        target[place : place + piece.nbytes] = piece.reshape(-1).view(np.uint8)
        place += piece.nbytes


def _relocate(
    batches: Sequence[Batch],
    lowered: Sequence[Lowered],
    programs: NDArray[np.uint8],
    slots: NDArray[np.uint8],
) -> None:
    """Shift the indices of each batch by what lies in front of it, in the staged copies."""
    shift = np.zeros(4, dtype=np.uint32)  # instructions, slots, tokens, parameters
    for batch, one in zip(batches, lowered, strict=True):
        own_programs = programs[: one.programs.nbytes].view(np.uint32).reshape(-1, 4)
        own_slots = slots[: one.slots.nbytes].view(np.uint32).reshape(-1, 4)
        programs, slots = programs[one.programs.nbytes :], slots[one.slots.nbytes :]
        own_programs[:, [0, 2]] += shift[:2]
        own_slots[:, :3] += shift[[2, 2, 3]]
        own = (len(one.instructions), len(one.slots), len(batch.codes), len(batch.parameters))
        shift += np.array(own, dtype=np.uint32)


def _order(lowered: Sequence[Lowered], vectors: int, chunk: int) -> NDArray[np.uint32]:
    """Job numbers, the longest first within each chunk: the short ones fill the gaps."""
    cost = np.concatenate([one.programs[:, 1] for one in lowered]).repeat(vectors).astype(np.int64)
    if chunk >= len(cost):
        return np.argsort(-cost, kind="stable").astype(np.uint32)
    return np.lexsort((-cost, np.arange(len(cost)) // chunk)).astype(np.uint32)
