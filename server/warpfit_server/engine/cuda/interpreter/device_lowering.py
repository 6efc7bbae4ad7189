"""Lowering of a batch on the device: the source, arguments and launches of its kernels.

`join_parts` copies the programs of several requests together. `lower_programs` checks raw postfix
tokens and writes the interpreter's instructions; `order_programs` sorts the programs for the
launches of the interpreter, and reports the first invalid program. The interpreter is launched at
once after them: what its launch depends on is bounded by `batch_layout.BatchBounds`, so that the
host does not wait in between.
"""

from __future__ import annotations

from importlib import resources
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.errors import InternalError, ProgramError, ResourceExhaustedError
from warpfit.ir import Batch
from warpfit.ops import ARITIES, PARAMETER, VARIABLE
from warpfit_server.engine.cuda.interpreter.bytecode import INDEX_LIMIT, header, labels
from warpfit_server.engine.cuda.interpreter.compile import CudaSource
from warpfit_server.engine.cuda.runtime.device import CudaDevice
from warpfit_server.engine.cuda.runtime.driver_calls import launch
from warpfit_server.engine.native.intrinsics import inlined

#: Most tokens of a program. A longer one may need more stack levels than fit the shared memory
#: that every device grants.
MAX_PROGRAM_TOKENS: Final = 1 << 18
#: What ``order_programs`` reports for a group without an invalid program.
ALL_VALID: Final = 0xFFFFFFFF
_SOURCE: Final = resources.files(__package__).joinpath("lowering.cu").read_text()
_KERNELS: Final = ("join_parts", "lower_programs", "order_programs")
#: Threads of a block of each kernel.
JOIN_THREADS: Final = 256
_LOWER_THREADS: Final = 32
_ORDER_THREADS: Final = 1024
#: Shared memory of a block of ``order_programs``, in bytes.
_ORDER_BYTES: Final = 8 * 1024 + 8
#: Most tokens that a block of ``lower_programs`` keeps in shared memory, and the bytes of each.
MAX_SHARED_TOKENS: Final = 4096
_NODE_BYTES: Final = 8
#: Resident warps for each block of ``lower_programs`` among which a small batch is divided: the
#: fewer programs a block has, the fewer different branches its warp takes.
_WARPS_A_BLOCK: Final = 4
#: Bits of a row of the operator table, next to the label.
_ARITY_SHIFT: Final = 10
_IS_KNOWN, _IS_VARIABLE, _IS_PARAMETER = 1 << 12, 1 << 13, 1 << 14
#: Most operands whose code is still to be written: one for each stack level.
_MOST_PENDING: Final = 32


def lowering_source() -> CudaSource:
    """Return the source of the lowering kernels."""
    numbers = {"ARITY_SHIFT": _ARITY_SHIFT, "IS_KNOWN": _IS_KNOWN}
    numbers |= {"IS_VARIABLE": _IS_VARIABLE, "IS_PARAMETER": _IS_PARAMETER, "NONE": ALL_VALID}
    numbers |= {"LOWER_THREADS": _LOWER_THREADS, "ORDER_THREADS": _ORDER_THREADS}
    numbers |= {"MOST_PENDING": _MOST_PENDING, "JOIN_THREADS": JOIN_THREADS}
    defines = [f"#define {name} {number}u\n" for name, number in numbers.items()]
    rows = ", ".join(f"{row}u" for row in _operator_table().tolist())
    table = f"__device__ const unsigned OPERATOR_TABLE[256] = {{{rows}}};\n"
    text = "".join([header(), *defines, table, _SOURCE])
    return CudaSource(text, ("--std=c++17",))


def _operator_table() -> NDArray[np.uint32]:
    """Return label, arity and flags by token code; uint32 [256], 0 for other codes."""
    table = np.zeros(256, dtype=np.uint32)
    known = ARITIES >= 0
    table[known] = _IS_KNOWN | ARITIES[known].astype(np.uint32) << _ARITY_SHIFT
    table |= labels().astype(np.uint32)
    table[VARIABLE] |= _IS_VARIABLE
    table[PARAMETER] |= _IS_PARAMETER
    return table


def check_length(longest: int) -> None:
    """Check the length of the longest program.

    Raises:
        ResourceExhaustedError: if it is too long for the interpreter.
    """
    if longest > MAX_PROGRAM_TOKENS:
        raise ResourceExhaustedError(
            f"a program of {longest} tokens is longer than the interpreter can encode",
            "PROGRAM_TOO_LONG",
            "Split the program",
            needed=longest,
            available=MAX_PROGRAM_TOKENS,
        )


def raise_invalid_program(batch: Batch, program: int, variables: int) -> None:
    """Raise the error of a program that the device found invalid.

    Raises:
        ProgramError: for the first bad token.
        ResourceExhaustedError: if a variable's index is too large.
    """
    one = batch[program : program + 1]
    try:
        one.check(variables)
    except ProgramError as error:
        error.expression = program
        raise
    if one.values[one.codes == VARIABLE].max(initial=0) >= INDEX_LIMIT:
        raise ResourceExhaustedError(
            "a variable's index is larger than the interpreter can encode",
            "VARIABLE_TOO_FAR",
            f"Use the first {INDEX_LIMIT} variables",
            available=INDEX_LIMIT,
        )
    raise InternalError(
        "host and device disagree on whether a program is valid",
        "ENGINE_FAILURE",
        "Report it as a bug",
    )


def load_lowering(device: CudaDevice) -> dict[str, Any]:
    """Load the kernels by their names; the first start on a machine compiles them."""
    module = lowering_source().load(device)
    return {name: module.get_function(name) for name in _KERNELS}


@inlined
def launch_lowering(driver: Any, stream: int, kernels: Any, batch: Any) -> int:
    """Launch the lowering of a batch that has been uploaded; return the driver's status.

    A small batch is divided among more blocks than it needs. ``batch`` is a record of
    `launches.BATCH`.
    """
    one, blocks = batch[0], kernels.resident_warps // _WARPS_A_BLOCK
    share = min(_LOWER_THREADS, -(-one.count // blocks))
    room = min(MAX_SHARED_TOKENS, share * one.longest)
    one.share, one.room = share, room
    grid, threads = (-(-one.count // share), 1), (_LOWER_THREADS, 1)
    kernel, shared = kernels.lower_programs, _NODE_BYTES * room
    return launch(driver, stream, kernel, grid, threads, shared, batch)


@inlined
def launch_order(driver: Any, stream: int, kernels: Any, batch: Any) -> int:
    """Launch the sorting of the programs of a lowered batch in groups; return the status.

    It writes the first invalid program of each group, or `ALL_VALID`, to page-locked memory.
    """
    one, kernel = batch[0], kernels.order_programs
    grid, threads = (-(-one.count // one.group), 1), (_ORDER_THREADS, 1)
    return launch(driver, stream, kernel, grid, threads, _ORDER_BYTES, batch)
