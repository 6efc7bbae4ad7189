"""The lowering kernels, compiled for this machine or run on a device, and their output."""

import ctypes
import functools
from dataclasses import dataclass, replace
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from support.emulators.cuda_on_host import compile_for_host, launch_on_host
from warpfit.ir import Batch, Program
from warpfit.ops import OPERATORS
from warpfit_server.engine.cuda.interpreter import launches
from warpfit_server.engine.cuda.interpreter.tier import load_lowering
from warpfit_server.engine.cuda.runtime.device import as_record
from warpfit_server.shared_batch import SharedBatch

#: Word 0 without an index, the leaf that is loaded, and word 1 or the leaf that it names. A leaf is
#: the index of a variable, or a slot: first token, end, first parameter, parameters.
Instruction = tuple[int, Any, Any]
#: Labels of instructions whose word 1 is a slot.
_SLOT_LABELS = {
    int(launches.labels()[row.code]) + launches.FROM_SLOT + odd
    for row in OPERATORS.values()
    for odd in (0, 1)
    if row.arity == 2
}
_compiled = functools.cache(compile_for_host)
#: Bytes on both sides of the memory that nobody may write to.
GUARD = 256
GARBAGE = 0xA5


@dataclass(frozen=True, eq=False)
class Lowered:
    """A lowered batch in memory laid out as ``layout``."""

    batch: Batch
    memory: NDArray[np.uint8]
    layout: launches.BatchLayout
    first_invalid: NDArray[np.uint32]
    """First invalid program of each group."""

    @property
    def programs(self) -> NDArray[np.uint32]:
        """First instruction, number of instructions, first slot, traits; [programs, 4]."""
        return self._part(self.layout.programs, 4 * len(self.batch)).reshape(-1, 4)

    @property
    def order(self) -> NDArray[np.uint32]:
        """Programs, with `launches.DEEP`; [programs]."""
        return self._part(self.layout.order, len(self.batch))

    @property
    def instructions(self) -> NDArray[np.uint32]:
        """[places, 2], not all of which are used."""
        size = 2 * (len(self.batch.codes) + len(self.batch))
        return self._part(self.layout.instructions, size).reshape(-1, 2)

    @property
    def slots(self) -> NDArray[np.uint32]:
        """First token, end token, first parameter value, parameters of the program; [places, 4]."""
        size = self.layout.instructions - self.layout.slots
        return self._part(self.layout.slots, size // 4).reshape(-1, 4)

    def needs(self) -> NDArray[np.uint32]:
        """Stack levels that each program needs below the top."""
        return self.programs[:, 3] >> launches.NEED_SHIFT & launches.NEED_MASK

    def are_invalid(self) -> NDArray[np.bool_]:
        """Return whether the lowering found each program invalid."""
        return (self.programs[:, 3] & launches.INVALID) != 0

    def slot_counts(self) -> NDArray[np.uint32]:
        """Slots of each program."""
        return self.programs[:, 3] & launches.SLOTS_MASK

    def code(self, index: int) -> list[Instruction]:
        """A program's instructions, with what a slot holds in place of its number."""
        first, count, slot, traits = self.programs[index].tolist()
        slots = [*map(tuple, self.slots[slot:][: traits & launches.SLOTS_MASK].tolist())]
        code: list[Instruction] = []
        for head, word in self.instructions[first : first + count + 1].tolist():
            low, leaf = head & (1 << launches.INDEX_SHIFT) - 1, head >> launches.INDEX_SHIFT
            loaded = slots[leaf] if low & launches.LOAD_SLOT else leaf
            takes_slot = low & launches.LABEL_MASK in _SLOT_LABELS
            code.append((low, loaded, slots[word] if takes_slot else word))
        return code

    def _part(self, start: int, count: int) -> NDArray[np.uint32]:
        return self.memory[start : start + 4 * count].view(np.uint32)


def _layout_of(batch: Batch) -> launches.BatchLayout:
    return launches.lay_out(len(batch.codes), len(batch), len(batch.parameters))


def lower_on_host(
    batch, variables=1 << 18, *, share=4, room=launches.MAX_SHARED_TOKENS, group=None, levels=3
):
    """Lower a batch by the device's source, compiled for this machine, in memory full of garbage.

    Args:
        batch: to lower.
        variables: of the data set.
        share: programs of a block.
        room: tokens that a block has room for in shared memory.
        group: programs that are sorted together; None for all.
        levels: stack levels of a warp.
    """
    library, layout = _compiled(launches.lowering_source().source), _layout_of(batch)
    guarded = np.full(layout.end + 2 * GUARD, GARBAGE, dtype=np.uint8)
    start = GUARD // 2 + -(guarded.ctypes.data + GUARD // 2) % 64
    memory = guarded[start : start + layout.end]
    address = memory.ctypes.data
    group = len(batch) if group is None else group
    first_invalid = np.zeros(-(-len(batch) // group), dtype=np.uint32)
    _write(batch, memory)
    before = memory[: layout.uploaded].copy()
    record = _record(batch, address, first_invalid, variables, group, levels)
    record["share"], record["room"] = share, room
    for kernel, count, threads in (
        ("lower_programs", -(-len(batch) // share), max(share, 4)),
        ("order_programs", len(first_invalid), 4),
    ):
        sizes = (count, 1, 1), (threads, 1, 1)
        assert launch_on_host(library, kernel, *sizes, [record.ctypes.data], 8 * room + (1 << 15))
    np.testing.assert_array_equal(memory[: layout.uploaded], before)
    assert np.all(guarded[:start] == GARBAGE)
    assert np.all(guarded[start + layout.end :] == GARBAGE)
    return Lowered(batch, memory, layout, first_invalid)


def _write(batch: Batch, memory: NDArray[np.uint8]) -> None:
    """Write a batch as it is uploaded."""
    shared = SharedBatch.viewing(batch)
    places = shared.places[0].tolist()
    for start, (address, size) in zip(_layout_of(batch)[:5], places, strict=True):
        ctypes.memmove(memory.ctypes.data + start, address, size)


def _record(batch, address, first_invalid, variables, group, levels):
    counts = len(batch.codes), len(batch), len(batch.parameters), batch.vectors
    record = launches.new_batch(counts, variables, address, 0, first_invalid.ctypes.data)
    record["longest"], record["group"] = batch.lengths.max(), group
    record["warps"], record["levels"] = 1, levels
    return record


def lower_on_device(device, batch, variables=1 << 18, *, group=None, levels=3):
    """Lower a batch on a `CudaDevice`; see `lower_on_host`."""
    layout = _layout_of(batch)
    kernels = load_lowering(device)
    with device.stream() as context:
        staging = context.pinned("batch", layout.end)
        staging[:] = GARBAGE
        address = context.buffer("batch", layout.end)
        context.upload(address, staging)
        context.stream.synchronize()
        _write(batch, staging)
        context.upload(address, staging[: layout.uploaded])
        group = group or len(batch)
        first_invalid = context.pinned("first invalid", 4 * -(-len(batch) // group))
        first_invalid = first_invalid.view(np.uint32)
        record = _record(batch, address, first_invalid, variables, group, levels)
        warps = 32 * device.multiprocessors
        handles = {name: kernel.ptr for name, kernel in kernels.items()}
        others = dict.fromkeys(launches.LaunchLimits._fields, 0)
        limits = as_record(launches.LaunchLimits(**others | handles | {"resident_warps": warps}))
        context.check_executed(_lower(context.functions, context.handle, limits, record))
        context.download_rows(staging[np.newaxis], address, len(staging))
        context.stream.synchronize()
        return Lowered(batch, staging.copy(), layout, first_invalid.copy())


@numba.njit
def _lower(driver: Any, stream: int, limits: Any, record: Any) -> int:
    status = launches.launch_lowering(driver, stream, limits[0], record)
    return status or launches.launch_order(driver, stream, limits[0], record)


def check_order(found: Lowered, group: int, levels: int) -> None:
    """Deep programs come first, marked; then by falling number of instructions; in each group."""
    programs = (found.order & ~np.uint32(launches.DEEP)).astype(int)
    deep = (found.order & launches.DEEP) != 0
    np.testing.assert_array_equal(deep, found.needs()[programs] > levels)
    for first in range(0, len(found.batch), group):
        part = slice(first, first + group)
        members = range(first, min(first + group, len(found.batch)))
        assert sorted(programs[part].tolist()) == list(members)
        assert (np.diff(deep[part].astype(int)) <= 0).all()
        lengths = found.programs[programs[part], 1].astype(int)[~deep[part]]
        assert (np.diff(lengths) <= 0).all()


def chains(name: str, length: int) -> list[Program]:
    """Return chains of an operator, one for each of its operands that the chain goes on in."""
    programs = []
    for place in range(OPERATORS[name].arity):
        program = Program.variable(0)
        for _ in range(length):
            operands = [Program.variable(1)] * OPERATORS[name].arity
            operands[place] = program
            program = Program.apply(name, *operands)
        programs.append(program)
    return programs


def spoilt(batch: Batch, seed: int, places: int) -> Batch:
    """Replace so many codes and values by some that are invalid, or valid elsewhere."""
    rng = np.random.default_rng(seed)
    codes, values = batch.codes.copy(), batch.values.copy()
    wrong = [-1.0, 0.5, 2, 3, 9, 10, 2.0**31, 2.0**32, 2.0**52, 1e300, np.nan, np.inf]
    others = [0, 1, 2, 3, 4, 16, 17, 30, 45, 200, 255]
    codes[rng.integers(len(codes), size=places)] = rng.choice(others, size=places)
    values[rng.integers(len(codes), size=places)] = rng.choice(wrong, size=places)
    return replace(batch, codes=codes, values=values)
