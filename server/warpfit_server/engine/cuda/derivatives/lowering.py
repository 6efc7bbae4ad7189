"""Lowering of programs with their derivatives to the code of derivatives.cu, on a few threads.

The helpers of a `ParallelLoop` run, without Python's lock::

    while (chunk := next few programs that no thread has taken) is not None:
        for program in chunk: check it; differentiate it; append its code

A chunk is small, because programs differ in length. The calling thread helps with a small batch. A
large one is lowered in steps, and the helpers' work is waited for like that of a device, so that
the engine goes on with other requests.

The code that differentiates, schedules and allocates slots is shared with the CPU engine. The
encoding for the device adds two things to each instruction: whether an operand is the result of the
instruction before, which is still in registers, and whether its own result is read from a slot
later. Only one operand of at most two can be in registers; it becomes the first one.

The CUDA C++ source of the interpreter, which reads the code, is generated from the operator table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numba import from_dtype, types
from numpy.typing import NDArray

from warpfit.errors import ResourceExhaustedError
from warpfit.ir import INDEX_LIMIT, Batch
from warpfit.ops import OPERATORS
from warpfit_server.engine.autodiff import (
    AFTER_SOURCE,
    CODE_COUNT,
    PRODUCT_CODE,
    LoweringWorkspace,
    RowLossTokens,
    Source,
    differentiate_program,
    new_workspace,
    node_capacity,
    partial_kernels,
    reserve,
    source_arrays,
    source_of,
)
from warpfit_server.engine.cuda.interpreter.launches import (
    Variant,
    device_function,
    is_costly,
    is_direct,
    operator_functions,
    raise_invalid_program,
    variant_source,
)
from warpfit_server.engine.cuda.runtime.compiler import CudaSource
from warpfit_server.engine.cuda.runtime.device import argument_struct
from warpfit_server.engine.cuda.runtime.translation import (
    operator_source,
    precise_calls,
    render,
    translate,
)
from warpfit_server.engine.fit import levenberg_marquardt, linear_model, searches, starts
from warpfit_server.engine.interface import Arithmetic, Steps
from warpfit_server.engine.lowering import (
    COPY_CODE,
    INPUT,
    INVARIANT,
    NONE,
    RESULT,
    program_is_valid,
)
from warpfit_server.engine.native import intrinsics, numba_cache
from warpfit_server.engine.native.intrinsics import (
    FAILED,
    FINISHED,
    OWN_ARRAYS,
    ParallelLoop,
    argument_block,
    floats,
    reader,
    uncounted,
    words,
)
from warpfit_server.engine.native.numba_cache import address_of

#: Warps of a block, and the least blocks of a multiprocessor.
WARPS: Final = 8
BLOCKS: Final = 2
#: Bytes of a column in a block of rows, whose sums are partial sums.
_BLOCK_BYTES: Final = 16384
#: Bytes of an invariant on the device, as many as a pack has.
INVARIANT_BYTES: Final = 16
#: Threads of a block that combines the partial sums of a job.
COMBINE_THREADS: Final = 128
#: Labels of an instruction with two operands.
_FORMS: Final = 6
_OPERANDS: Final = ("t", "u", "v")
#: Constants of the searches that fit.cu mentions.
_NAMES_IN_FIT: Final = (
    "RUNNING",
    "REASON",
    "LEAVES_FLOAT32",
    "ITERATIONS",
    "EVALUATIONS",
    "FACTOR",
    "WANTED",
    "TRIAL",
)


#: The approximate functions that replace others in the operator table, by these.
_FAST: Final = {
    exact[1]: fast[1]
    for row in OPERATORS.values()
    if (exact := re.fullmatch(r"(\w+)\(a(?:, b)?\)", row.kernel))
    and (fast := re.fullmatch(r"(\w+)\(a(?:, b)?\)", row.cuda_fast or ""))
}
#: Structs of derivatives.cu.
_SOURCE: Final = resources.files(__package__).joinpath("derivatives.cu").read_text()
PROGRAM: Final = argument_struct(_SOURCE, "Program")
_ENTRY: Final = argument_struct(_SOURCE, "Entry")
_LOAD: Final = argument_struct(_SOURCE, "Load")
#: An instruction: case label, kinds of places, and `_STORE`; indices of the first two operands; the
#: slot to store to, and the index of the third operand from the 17th bit on.
_INSTRUCTION: Final = np.dtype([(name, np.uint32) for name in ("head", "first", "second", "last")])
#: Kinds of a place, in the two lowest bits; an operand that is nowhere is in registers.
_NOWHERE, _SLOT, _COLUMN, _INVARIANT = range(4)
_KIND_BITS: Final = 2
#: First bit of the operands' kinds in an instruction, and the bit of a result that is stored.
_KINDS: Final = 10
_STORE: Final = 1 << 16
#: Largest index in 16 bits.
_INDEX_LIMIT: Final = 1 << 16
#: Fields of `PROGRAM` that are places in an array, by the array's name.
_PLACES_IN: Final = {
    "instructions": ("first", "prologue"),
    "columns": ("column",),
    "entries": ("entry",),
    "loads": ("load",),
}
#: Programs of a chunk.
_CHUNK: Final = 5
#: Tokens for each helper, which take about as long as waking it.
_TOKENS_A_THREAD: Final = 500
#: Tokens of a batch up to which the calling thread helps and waits: 0.2 ms on 16 cores. With more
#: it serves others meanwhile.
_TOKENS_AT_ONCE: Final = 16_000
#: Tokens for each thread of a step, some 2 ms.
_TOKENS_A_STEP: Final = 20_000
# An argument block has the largest index of an operand in each chunk, or -1 - the first invalid
# program; the numbers of parameters; the case labels; the arrays of `source_of`; `EncodedArrays`.
_LARGEST, _COUNTS, _LABELS = range(OWN_ARRAYS)
_ENCODED: Final = AFTER_SOURCE
Made = TypeVar("Made")

# ----------------------------------------------------------------------------------------- sources


class _Case(NamedTuple):
    """The case, or cases, of the switch for one device function."""

    function: str
    arity: int
    macro: str
    """Kind of the macro in derivatives.cu that writes them."""

    @classmethod
    def of(cls, function: str, arity: int, expression: str, variant: Variant) -> _Case:
        """Return the case of a function that returns an expression."""
        if is_costly(expression, variant):
            return cls(function, arity, "COSTLY")
        return cls(function, arity, "DIRECT" if arity == 2 and is_direct(expression) else "CHEAP")


def derivative_source(variant: Variant, *, spills: bool = False) -> CudaSource:
    """Return the kernels of one variant.

    If it ``spills``, intermediate results are in global memory, for programs that need more than
    shared memory has.
    """
    arithmetic, table = variant.arithmetic, labels()
    functions, found = operator_functions(arithmetic), {}
    for row in OPERATORS.values():
        expression = operator_source(row, arithmetic)
        found[int(table[row.code])] = _Case.of(f"op_{row.name}", row.arity, expression, variant)
    for kernel in partial_kernels():
        label, arity = int(table[kernel.code]), kernel.arity + kernel.scaled
        if label in found:
            continue
        operands = list("abc"[: kernel.arity])
        expression = partial_source(kernel.source, arithmetic)
        found[label] = _Case.of(kernel.name, arity, expression, variant)
        if kernel.scaled:
            operands, expression = ["slope", *operands], f"product(slope, {expression})"
        functions.append(device_function(kernel.name, operands, expression))
    found[int(table[PRODUCT_CODE])] = _Case("product", 2, "DIRECT")
    cases = sorted(found.items())
    parts = {
        "OPERATORS": functions,
        "CASES": [
            f"      {case.macro}_{case.arity}({label}, {case.function})" for label, case in cases
        ],
        "INVARIANT_CASES": [
            f"      case {label}: t = {case.function}({', '.join(_OPERANDS[: case.arity])}); break;"
            for label, case in cases
        ],
    }
    definitions: dict[str, int | str] = {"FAR": int(spills), "WARPS": WARPS}
    definitions |= {"BLOCK_TILES": block_tiles(variant), "COMBINE_THREADS": COMBINE_THREADS}
    definitions |= {"BLOCKS_AT_LEAST": BLOCKS, "INVARIANT_BYTES": INVARIANT_BYTES}
    text = template("derivatives.cu")
    text = variant_source(variant, definitions, text, parts) + template("statistics.cu")
    if not spills:
        text += fit_source()
    last, case = cases[-1]
    return CudaSource(text, variant.options, last + (_FORMS if case.arity == 2 else 1))


@cache
def fit_source() -> str:
    """Return the kernel that runs small searches, with the translation of what judges a trial.

    It follows derivatives.cu.
    """
    numbers = {"FIT_VECTORS": searches.VECTORS, "FIT_NUMBERS": searches.NUMBERS}
    numbers |= {"FIT_COUNTERS": searches.COUNTERS}
    numbers |= {name: getattr(searches, name) for name in _NAMES_IN_FIT}
    defines = [f"#define {name} {number}\n" for name, number in numbers.items()]
    advance = translate(
        [levenberg_marquardt.advance_one],
        # A search with an orthogonal factor leaves the device, and one that is cancelled, too.
        never={"Model": ("factored",), "Workspace": ("cancelled",)},
        # In each place where they stand they would take longer to be compiled.
        called=[
            levenberg_marquardt.advance_one,
            *(linear_model.solve_step, linear_model.is_minimum, linear_model.is_exact),
            *(linear_model.find_roles, linear_model.promised_decrease, starts.begin_probe),
            *(linear_model.steepest_cosine, linear_model.factorise, linear_model.are_usable),
        ],
    )
    return advance + "".join(defines) + template("fit.cu")


def block_tiles(variant: Variant) -> int:
    """Return the number of tiles of a block of rows, a power of two."""
    return _BLOCK_BYTES // (variant.tile * variant.dtype.itemsize)


def template(name: str) -> str:
    """Return the text of a file of CUDA C++ of this package."""
    return resources.files(__package__).joinpath(name).read_text()


@cache
def labels() -> NDArray[np.int64]:
    """Return the case label of each instruction by code, int64 [CODE_COUNT]; 0 if it does nothing.

    Derivatives with the same text share a label. An instruction with two operands has `_FORMS`
    labels: two for each kind of place of the second one, of which the latter has the operands the
    other way round.
    """
    table = np.zeros(CODE_COUNT, dtype=np.int64)
    known: dict[object, int] = {}
    end = 1
    instructions: list[tuple[int, object, int]] = [
        *((row.code, row.name, row.arity) for row in OPERATORS.values()),
        *(
            (one.code, (one.source, one.scaled), one.arity + one.scaled)
            for one in partial_kernels()
        ),
        (PRODUCT_CODE, "product", 2),
    ]
    for code, identity, arity in instructions:
        if identity not in known:
            known[identity] = end
            end += _FORMS if arity == 2 else 1
        table[code] = known[identity]
    return table


def partial_source(source: str, arithmetic: Arithmetic) -> str:
    """Translate a derivative to CUDA C++, with approximate functions in fast arithmetic."""
    if not arithmetic.is_fast:
        return render(precise_calls(source), arithmetic.real)
    source = re.sub(r"\b(\w+)\(", lambda call: f"{_FAST.get(call[1], call[1])}(", source)
    return render(source, arithmetic.real)


# ----------------------------------------------------------------------------------------- lowering


@dataclass(frozen=True, slots=True, eq=False)
class DerivativeCode:
    """A lowered batch without its parameters, as the kernels of derivatives.cu read it.

    The code of a program is contiguous; the programs are in any order.
    """

    programs: NDArray[np.void]
    """Records of `PROGRAM`, [programs]."""
    sums: NDArray[np.int64]
    """Number of sums over the rows for each job of a program, [programs]."""
    vectors: int
    """Parameter vectors of each program."""
    arrays: Mapping[str, NDArray[Any]]
    """Arrays to upload, by fields of the struct Arguments:

    * ``programs``;
    * ``instructions``, [instructions + 1]: the kernel prefetches the last one, padding;
    * ``columns``: place of each column, uint32;
    * ``entries``: column, parameter or -1 - variable, and invariant;
    * ``loads``: invariant, and parameter or -1;
    * ``constants``: value of each load of a constant, float64.
    """
    addresses: Mapping[str, int]
    """Addresses of the other ones of these arrays, which are on the device already."""
    memory: Any = None
    """Device memory that the addresses name."""

    @classmethod
    def joining(cls, codes: Sequence[DerivativeCode]) -> DerivativeCode:
        """Return the code of several batches on the host, in turn, in memory of its own."""
        records, first = np.concatenate([code.programs for code in codes]), 0
        sums, places = np.concatenate([code.sums for code in codes]), dict.fromkeys(_PLACES_IN, 0)
        for code in codes:
            own = records[first : first + len(code.programs)]
            first += len(own)
            for name, fields in _PLACES_IN.items():
                for field in fields:
                    own[field] += np.uint32(places[name])
                places[name] += len(code.arrays[name])
        vectors = codes[0].vectors
        fill_starts(records, sums, vectors)
        arrays = {
            name: np.concatenate([code.arrays[name] for code in codes])
            for name in (*_PLACES_IN, "constants")
        }
        return cls(records, sums, vectors, {"programs": records, **arrays}, {})

    @property
    def jobs(self) -> int:
        """Programs times parameter vectors."""
        return len(self.programs) * self.vectors

    def select(self, programs: NDArray[np.int64]) -> DerivativeCode:
        """Return the code, which is on the device, of some programs with one vector each."""
        records, sums = self.programs[programs], self.sums[programs]
        fill_starts(records, sums, 1)
        arrays = {"programs": records}
        return replace(self, programs=records, sums=sums, vectors=1, arrays=arrays)


class DerivativeLowering:
    """Checks batches and lowers them with their derivatives; safe to use from several threads.

    Args:
        threads: that lower one batch, the calling one included.
    """

    def __init__(self, threads: int) -> None:
        load()
        self._address = address_of(lower_chunk)
        self._loop = ParallelLoop(threads)
        self._threads = threads

    def expect(self, batch: Batch) -> None:
        """Wake the helpers for a small batch that is about to be lowered."""
        tokens = len(batch.codes)
        if tokens <= _TOKENS_AT_ONCE:
            self._loop.expect(tokens // _TOKENS_A_THREAD)

    def lower(
        self,
        batch: Batch,
        variables: int,
        row_loss: RowLossTokens,
        requested: int,
        *,
        keeps_values: bool,
        products: bool,
        meanwhile: Callable[[], Made],
    ) -> Steps[tuple[DerivativeCode, Made]]:
        """Lower a batch, whose parameters are not read, with a row loss.

        Args:
            batch: the programs.
            variables: of the data set.
            row_loss: its tokens.
            requested: bits of `differentiate`.
            keeps_values: whether the values are read after a program has run.
            products: whether products of derivatives are summed.
            meanwhile: is called by the calling thread once it has woken the helpers.

        Returns:
            The code, and the result of ``meanwhile``.

        Raises:
            ProgramError: for the first bad token.
            MemoryError: if there is not enough.
            ResourceExhaustedError: if a program is too large to encode.
        """
        tokens, programs = len(batch.codes), len(batch)
        count = -(-programs // _CHUNK)
        largest, most = np.zeros(count, np.int64), 0
        capacity = node_capacity(tokens, programs, len(row_loss.codes))
        encoded = EncodedArrays(  # pages that are never written to take no memory
            np.empty(capacity + 1, _INSTRUCTION),
            np.empty(programs, PROGRAM),
            np.empty(tokens, np.uint32),
            np.empty(2 * tokens, _ENTRY),
            np.empty(capacity, _LOAD),
            np.empty(capacity),
        )
        options = keeps_values, min(variables, INDEX_LIMIT)
        source = source_arrays(batch, row_loss, requested, *options)
        counts = np.ascontiguousarray(batch.parameter_counts)
        arrays = largest, counts, labels(), *source, *encoded  # the block needs them alive
        block = argument_block(arrays)
        length = max(self._threads, _TOKENS_A_STEP * self._threads * count // max(1, tokens))
        helpers = tokens // _TOKENS_A_THREAD
        if tokens > _TOKENS_AT_ONCE:  # the processes that answer others need cores, too
            helpers = min(helpers, max(1, self._threads // 2))
        for first in range(0, count, length):
            if first:
                yield None
            chunks = slice(first, min(first + length, count))
            task = self._loop.begin(self._address, block, chunks.start, chunks.stop, helpers)
            try:
                if first == 0:  # the helpers need as long to wake up
                    made = meanwhile()
                    sums = np.empty(programs, np.int64)
                if tokens > _TOKENS_AT_ONCE:
                    yield task
            finally:
                task.result()  # before the arrays are freed
            for index in largest[chunks].tolist():
                if index < 0:
                    raise_invalid_program(batch, -1 - index, variables)
                most = max(most, index)
        if most >= _INDEX_LIMIT:
            raise ResourceExhaustedError(
                f"derivatives of a program need index {most}, more than the interpreter encodes",
                "PROGRAM_TOO_LONG",
                "Split the program, or ask for values and losses only",
                needed=most,
                available=_INDEX_LIMIT - 1,
            )
        instructions, loads, columns, entries = source[-1].tolist()
        encoded.instructions[instructions] = 0
        count_sums(encoded.programs, products, sums)
        fill_starts(encoded.programs, sums, batch.vectors)
        used = {
            "programs": encoded.programs,
            "instructions": encoded.instructions[: instructions + 1],
            "columns": encoded.columns[:columns],
            "entries": encoded.entries[:entries],
            "loads": encoded.loads[:loads],
            "constants": encoded.constants[:loads],
        }
        return DerivativeCode(encoded.programs, sums, batch.vectors, used, {}), made


# ------------------------------------------------------------------------------ compiled by Numba


class EncodedArrays(NamedTuple):
    """Arrays of a `DerivativeCode` with room for all programs, as compiled code takes them."""

    instructions: Any
    programs: Any
    columns: Any
    entries: Any
    loads: Any
    constants: Any


_counts_of, _columns_of, _instructions_of, _programs_of, _entries_of, _loads_of = (
    reader(kind) for kind in (types.uint32, types.uint32, _INSTRUCTION, PROGRAM, _ENTRY, _LOAD)
)


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def count_sums(records: NDArray[np.void], products: bool, sums: NDArray[np.int64]) -> None:
    """Count the sums over the rows for each job of a program."""
    for index in range(len(records)):
        columns = np.int64(records[index].columns)
        sums[index] = 1 + columns + (columns * (columns + 1) // 2 if products else 0)


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def fill_starts(records: NDArray[np.void], sums: NDArray[np.int64], vectors: int) -> None:
    """Fill in the fields that depend on the programs before each one."""
    invariant = parameter = first_sum = triangle = np.int64(0)
    for index in range(len(records)):
        record, count = records[index], np.int64(records[index].parameters)
        record.invariant, record.parameter = np.uint32(invariant), np.uint32(parameter)
        record.sum, record.triangle = np.uint64(first_sum), np.uint64(triangle)
        invariant += vectors * np.int64(record.invariants)
        parameter += vectors * count
        first_sum += vectors * sums[index]
        triangle += vectors * (count * (count + 1) // 2)


@numba_cache.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def lower_chunk(block: int, chunk: int) -> Any:
    """Lower the programs of a chunk; see `argument_block`."""
    source = source_of(block)
    out = EncodedArrays(
        _instructions_of(block, _ENCODED),
        _programs_of(block, _ENCODED + 1),
        _columns_of(block, _ENCODED + 2),
        _entries_of(block, _ENCODED + 3),
        _loads_of(block, _ENCODED + 4),
        floats(block, _ENCODED + 5),
    )
    case_labels, counts = words(block, _LABELS), _counts_of(block, _COUNTS)
    keeps_values, variables = source.requested[1] != 0, source.requested[2]
    first = chunk * _CHUNK
    stop = min(first + _CHUNK, len(source.starts) - 1)
    largest: Any = np.int64(0)
    try:
        workspace = new_workspace(source, first, stop)
        is_read = np.empty(len(workspace.state.graph.nodes) + 1, dtype=np.bool_)
        for program in range(first, stop):
            if not program_is_valid(
                source.codes, source.values, source.starts[program], source.starts[program + 1],
                counts[program], float(variables),
            ):  # fmt: skip
                largest = -1 - program
                break
            differentiate_program(source, workspace, program)
            index = encode_program(
                source, workspace, program, case_labels, keeps_values, is_read, out
            )
            out.programs[program].parameters = counts[program]
            largest = max(largest, index)
    except Exception:  # the only one that compiled code raises here is for lack of memory
        return FAILED
    words(block, _LARGEST)[chunk] = largest
    return FINISHED


@uncounted
def encode_program(
    source: Source, workspace: LoweringWorkspace, program: int, labels: Any, keeps_values: bool,
    is_read: Any, out: EncodedArrays,
) -> Any:  # fmt: skip
    """Append the code of a program that `differentiate_program` has differentiated.

    Fields of the record that depend on the programs before this one are not filled in. ``is_read``
    is scratch memory, bool [slots + 1]. Returns the largest index that has to fit in 16 bits.
    """
    record = out.programs[program]
    _copy_lists(source, workspace, record, out)
    lowered = workspace.program
    header, made = lowered.headers[0], lowered.instructions
    slots = header.slots
    for slot in range(slots):
        is_read[slot] = False
    is_read[slots] = keeps_values
    record.result = slots << _KIND_BITS | _SLOT
    first_column = np.int64(record.column)
    for k in range(header.columns):
        out.columns[first_column + k] = _read_at_end(lowered.columns[k], slots, is_read)
    record.loss = record.slope = 0
    if header.loss != NONE:
        record.loss = _read_at_end(header.loss, slots, is_read)
    if header.loss_derivative != NONE:
        record.slope = _read_at_end(header.loss_derivative, slots, is_read)
    first, prologue_end = np.int64(record.prologue), header.prologue_end
    arities = source.arities
    for number in range(prologue_end):
        instruction, encoded = made[number], out.instructions[first + number]
        arity, operands = _operands(instruction.code, arities), instruction.operands
        encoded.head, encoded.first = labels[instruction.code], operands[0] >> 2
        encoded.second = operands[1] >> 2 if arity > 1 else 0
        own_third = operands[2] >> 2 if arity > 2 else 0
        encoded.last = instruction.target >> 2 | own_third << 16
    largest: Any = header.invariants
    used: Any = np.int64(0)
    for number in range(header.end - 1, prologue_end - 1, -1):
        before: Any = np.int64(-1)
        if number > prologue_end:
            before = _slot_of(made[number - 1].target, slots)
        slot = _slot_of(made[number].target, slots)
        stores = is_read[slot]
        is_read[slot] = False
        if stores:
            used = max(used, slot + 1)
        third = _encode_rows(
            made[number], arities, labels, slot, stores, before, slots, is_read,
            out.instructions[first + number],
        )  # fmt: skip
        largest = max(largest, third)
    record.levels = used
    return max(largest, used)


@uncounted
def _copy_lists(
    source: Source, workspace: LoweringWorkspace, record: Any, out: EncodedArrays
) -> None:
    """Reserve room for a program's code, record its place, and copy lists that need no encoding."""
    lowered = workspace.program
    header = lowered.headers[0]
    first, load, column, entry = reserve(source, header)
    record.prologue, record.prologue_count = first, header.prologue_end
    record.first, record.count = first + header.prologue_end, header.end - header.prologue_end
    record.load, record.loads, record.invariants = load, header.loads, header.invariants
    record.column, record.columns = column, header.columns
    record.entry, record.entries = entry, header.entries
    for index in range(header.loads):
        made, load_out = lowered.loads[index], out.loads[load + index]
        load_out.invariant, load_out.parameter = made.invariant, made.parameter
        out.constants[load + index] = made.value
    for index in range(header.entries):
        one, target = lowered.entries[index], out.entries[entry + index]
        target.column, target.leaf, target.factor = one.column, one.leaf, one.factor


@uncounted
def _slot_of(place: int, slots: int) -> Any:
    """Return the slot of a place with a value a row; the result's slot is the last one."""
    return slots if place & 3 == RESULT else place >> 2


@uncounted
def _read_at_end(place: int, slots: int, is_read: Any) -> Any:
    """Translate a place that is read after the program has run, and note that its slot is read."""
    found = _place(place, slots)
    if found & 3 == _SLOT:
        is_read[found >> _KIND_BITS] = True
    return found


@uncounted
def _operands(code: int, arities: Any) -> Any:
    return 1 if code == COPY_CODE else arities[code]


@uncounted
def _encode_rows(
    instruction: Any, arities: Any, labels: Any, slot: int, stores: bool, before: int,
    slots: int, is_read: Any, out: Any,
) -> Any:  # fmt: skip
    """Encode an instruction on rows; return the index of a third operand."""
    arity, operands = _operands(instruction.code, arities), instruction.operands
    label = labels[instruction.code]
    first, second = _place(operands[0], slots), np.int64(0)
    third = _place(operands[2], slots) if arity > 2 else np.int64(0)
    if arity > 1:
        second = _place(operands[1], slots)
    in_registers = before << _KIND_BITS | _SLOT
    if arity == 2:
        if second == in_registers != first:
            label, first, second = label + 1, second, first
        label += 2 * ((second & 3) - _SLOT)
    if first == in_registers:
        first = np.int64(_NOWHERE)
    head = label | (_STORE if stores else 0)
    for k, place in enumerate((first, second, third)):
        kind = place & 3
        head |= kind << (_KINDS + _KIND_BITS * k)
        if kind == _SLOT:
            is_read[place >> _KIND_BITS] = True
    out.head, out.first, out.second = head, first >> _KIND_BITS, second >> _KIND_BITS
    out.last = slot | third >> _KIND_BITS << 16
    return third >> _KIND_BITS


@uncounted
def _place(operand: int, slots: int) -> Any:
    """Return the place of an operand of an instruction on rows."""
    kind, index = operand & 3, operand >> 2
    if kind == INVARIANT:
        return index << _KIND_BITS | _INVARIANT
    if kind == INPUT:
        return index << _KIND_BITS | _COLUMN
    return _slot_of(operand, slots) << _KIND_BITS | _SLOT


def load() -> None:
    """Load the compiled functions above, or compile them (about 15 s) and store them."""
    records, numbers = types.Array(from_dtype(PROGRAM), 1, "C"), types.int64[::1]
    count_sums.compile((records, types.boolean, numbers))
    fill_starts.compile((records, numbers, types.int64))
    intrinsics.load()
    numba_cache.load_chunk_function(lower_chunk)
