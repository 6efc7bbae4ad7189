"""The colony of a search on the CPU: compiled loops over its formulas, on all threads.

The simple form of what happens to the children of a generation (`screen_chunk`):

    for each child:
        evaluate it on the first quarter of the screening rows, and find its loss there
        if it is better there than the formula whose place it wants, or the best of its size:
            evaluate it on the other rows, too, and find its loss on all of them

Most children are worse than what there is, and the first rows, which are in random order, say
so. Formulas are run token by token by the kernels of the engine (`codegen.parts`), a block of
rows at a time. Lowering them first, as batches of requests are, takes longer than it saves for
formulas that are evaluated once.

Children that came close to their places are fitted quickly (`fit_chunk`), because a right structure
with wrong constants is no better than any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numba import carray, types
from numba.extending import register_jitable
from numpy.typing import NDArray

from warpfit.ops import CONSTANT, VARIABLE
from warpfit.searching import SearchRequest
from warpfit_server.engine.cpu.interpreter import INVARIANT_WIDTH, ONE_SPAN, ChunkedWork, Cut
from warpfit_server.engine.interface import Steps
from warpfit_server.engine.lowering import COPY_CODE
from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.native.intrinsics import (
    FAILED,
    FINISHED,
    OWN_ARRAYS,
    RANGE,
    aligned,
    call_kernel,
    chunk_ranges,
    floats,
    inlined,
    octets,
    pointer32,
    pointer64,
    reader,
    words,
)
from warpfit_server.engine.native.numba_cache import address_of
from warpfit_server.engine.search.colony import (
    CLOSE,
    DIFFERENCE,
    FIRST_DAMPING,
    FIT_ITERATIONS,
    FIT_TRIALS,
    LEAST_SIZE,
    LEAST_SPREAD,
    LOSS_FLOOR,
    MOST_CONSTANTS,
    REGISTERS,
    ROUNDING,
    SPREADS,
    ColonySettings,
    Genomes,
    Scored,
    Screening,
    estimate_distinct,
    moved,
)
from warpfit_server.engine.search.composition import Composer, compose, work_size
from warpfit_server.engine.search.genome import (
    ARITY,
    HAS_UNITS,
    LARGEST,
    MAX_SIZE,
    WIDTH,
    breed,
    copy_tokens,
    first_formula,
    keeps_units,
    size_of,
    start_random,
    structure_hash,
    tried_mark,
)

#: Formulas of a colony and of an island, where a request does not say.
_FORMULAS: Final = 2048
_ISLAND: Final = 256
#: Times that a structure with constants is tried, because few can be fitted; generations between
#: two rounds of fits, formulas of an island that are fitted then, generations between two rounds of
#: all else, pairs for each formula, and pairs that take as long as what else a step for pairs does:
#: generations, fits and pairs take about a third of the time each.
_SCHEDULE: Final = (3, 4, 100, 4, 150, 3_000_000)
#: Formulas that compete, or are ranked, in a step; and rows of a chunk, unless a formula has more.
_AT_ONCE: Final = 1 << 15
_ROWS_IN_CHUNK: Final = 1 << 17
#: Formulas of a chunk, at most; those of one that fits them; and token-rows that take about as long
#: as breeding or screening one.
_IN_CHUNK: Final = 64
_FITS_IN_CHUNK: Final = 8
_COST_OF_A_FORMULA: Final = 4_000
#: Rows of a block, whose values stay in the first-level cache.
_BLOCK: Final = 512
#: Places of the table of structures that were tried; a power of 2.
_TABLE: Final = 1 << 20
#: Rows that a quick fit looks at, at most.
_MOST_FITTED_ROWS: Final = 4_096
#: Numbers that composing a formula takes, beside one for each token.
_CALLS: Final = work_size(0)
#: What does not vary between the formulas of a generation.
_STATE: Final = np.dtype(
    [
        ("seed", np.uint64),
        ("generation", np.uint64),
        ("formulas", np.int64),
        ("island", np.int64),  # formulas of an island
        ("rows", np.int64),
        ("first_rows", np.int64),  # 0 if all children are evaluated on all rows
        ("close", np.float64),  # `CLOSE`, or infinity for children that are evaluated anyway
        ("pitch", np.int64),  # bytes from one variable to the next
        ("floor", np.float64),
        ("least_spread", np.float64),
        ("spread", np.float64),  # variance of the target
        ("mean", np.float64),  # mean of the target
        ("fitted", np.int64),  # numbers around f: 2 for slope and intercept, 1 for a slope
        ("itemsize", np.int64),  # bytes of a value
        ("iterations", np.int64),  # of a quick fit
        ("tries", np.int64),  # of a structure with constants
        ("most", np.int64),  # tokens of a formula at most
        ("is_composed", np.int64),  # 1 if genomes call functions
        ("rounding", np.float64),  # part of a value below which its changes are rounding
    ],
    align=True,
)
#: Arrays of the argument blocks: grammar and state; the population; children, whose places in the
#: population ``_PLACES`` has; what was tried; the best of each size; and the screening rows with
#: the addresses of the kernels. Early losses are those on the first rows.
(
    _GRAMMAR, _UNITS, _OWN_STATE, _CODES, _VALUES, _LENGTHS, _LOSSES, _EARLY_LOSSES, _SCORES,
    _CHILD_CODES, _CHILD_VALUES, _CHILD_LENGTHS, _CHILD_LOSSES, _CHILD_EARLY_LOSSES,
    _RATIOS, _HASHES, _PLACES, _TRIED, _REGISTERS, _BEST_CODES, _BEST_VALUES, _BEST_LENGTHS,
    _BEST_LOSSES, _BEST_EARLY_LOSSES, _PARSIMONY, _MATRIX, _KERNELS, _TARGET, _WEIGHTS,
    _FORM, _BODIES, _NUMBERS, _SIGNS,
) = range(OWN_ARRAYS, OWN_ARRAYS + 33)  # fmt: skip
_states = reader(_STATE)
_singles = reader(types.float32)
_integers = reader(types.int32)
_unsigned = reader(types.uint64)
#: Improvement of a loss in float32 that is more than rounding.
_BETTER: Final = 1.0 - 1e-6
_compiled = numba_cache.njit(nogil=True, error_model="numpy")


@_compiled  # type: ignore[untyped-decorator]
def populate_chunk(block: int, chunk: int) -> int:
    """Write random formulas as the children of a range of formulas."""
    formulas, _, _ = chunk_ranges(block, chunk)
    grammar, state = _integers(block, _GRAMMAR), _states(block, _OWN_STATE)[0]
    units = _integers(block, _UNITS)
    codes, values = octets(block, _CHILD_CODES), _singles(block, _CHILD_VALUES)
    lengths, hashes = _integers(block, _CHILD_LENGTHS), _unsigned(block, _HASHES)
    width = np.int64(grammar[WIDTH])
    random, work = np.zeros(1, np.uint64), np.zeros(width, np.int32)
    scratch, room = np.zeros(width, np.uint64), _room(state)
    for formula in range(formulas.start, formulas.stop):
        start_random(random, state.seed, state.generation, np.uint64(formula))
        place = formula * width
        length = first_formula(grammar, units, random, codes, values, place, work)
        if length > 0 and not _whole_keeps_units(block, codes, values, place, length, room):
            length = 0
        lengths[formula] = length
        if length > 0:
            hashes[formula] = structure_hash(grammar, codes, values, place, length, scratch)
    return FINISHED if len(scratch) > 0 else FAILED


@_compiled  # type: ignore[untyped-decorator]
def breed_chunk(block: int, chunk: int) -> int:
    """Breed the children of a range of formulas."""
    formulas, _, _ = chunk_ranges(block, chunk)
    grammar, state = _integers(block, _GRAMMAR), _states(block, _OWN_STATE)[0]
    codes, values = octets(block, _CODES), _singles(block, _VALUES)
    lengths, scores = _integers(block, _LENGTHS), _singles(block, _SCORES)
    child_codes, child_values = octets(block, _CHILD_CODES), _singles(block, _CHILD_VALUES)
    child_lengths, hashes = _integers(block, _CHILD_LENGTHS), _unsigned(block, _HASHES)
    tried, units = _unsigned(block, _TRIED), _integers(block, _UNITS)
    width = np.int64(grammar[WIDTH])
    random, work = np.zeros(1, np.uint64), np.zeros(width, np.int32)
    scratch, room = np.zeros(width, np.uint64), _room(state)
    for formula in range(formulas.start, formulas.stop):
        start_random(random, state.seed, state.generation, np.uint64(formula))
        child_lengths[formula] = breed(
            grammar, units, random, codes, values, lengths, scores, state.formulas,
            state.island, formula, child_codes, child_values, hashes, tried,
            np.uint64(len(tried) - 1), state.tries, work, scratch,
        )  # fmt: skip
        if child_lengths[formula] > 0 and not _whole_keeps_units(
            block, child_codes, child_values, formula * width, child_lengths[formula], room
        ):
            child_lengths[formula] = 0
    return FINISHED if len(scratch) > 0 else FAILED


@_compiled  # type: ignore[untyped-decorator]
def screen_chunk(block: int, chunk: int) -> int:
    """Find the losses of a range of children, relative to that of the best constant.

    The loss is infinite of a child that is better on the first rows neither than the formula in its
    place nor than the best of its size.
    """
    children, _, _ = chunk_ranges(block, chunk)
    grammar, state = _integers(block, _GRAMMAR), _states(block, _OWN_STATE)[0]
    codes, values = octets(block, _CHILD_CODES), _singles(block, _CHILD_VALUES)
    lengths, places = _integers(block, _CHILD_LENGTHS), words(block, _PLACES)
    losses, early = _singles(block, _CHILD_LOSSES), _singles(block, _CHILD_EARLY_LOSSES)
    ratios, best_early = _singles(block, _RATIOS), _singles(block, _BEST_EARLY_LOSSES)
    known_lengths, known_early = _integers(block, _LENGTHS), _singles(block, _EARLY_LOSSES)
    known_codes, parsimony = octets(block, _CODES), _singles(block, _PARSIMONY)
    width = np.int64(grammar[WIDTH])
    numbers = np.empty(state.most * (_BLOCK + INVARIANT_WIDTH // 8 + 1) + state.rows + 8)
    stack, room = np.empty((2, state.most), np.int64), _room(state)
    columns = np.empty((2, state.rows if len(floats(block, _SIGNS)) > 0 else 0))
    for child in range(children.start, children.stop):
        length, first, place = np.int64(lengths[child]), child * width, places[child]
        losses[child] = early[child] = np.inf
        ratios[child] = 0.0
        if length == 0:
            continue
        own_codes, own_values = _whole(block, state, codes, values, first, length, room)
        if len(own_codes) == 0:
            continue
        rows = state.first_rows if state.first_rows > 0 else state.rows
        _run(block, own_codes, own_values, 0, rows, numbers, stack)
        early[child] = _screened(block, state, numbers, rows)
        size = size_of(grammar, codes, first, first + length)
        is_close = early[child] < state.close * best_early[min(size, len(best_early) - 1)]
        if known_lengths[place] > 0:
            start, weight = place * width, parsimony[place // state.island]
            known_size = size_of(grammar, known_codes, start, start + known_lengths[place])
            score = max(early[child], state.floor) * (1.0 + weight * size)
            bound = max(known_early[place], state.floor) * (1.0 + weight * known_size)
            ratios[child] = score / bound
        if state.first_rows > 0 and not (is_close or ratios[child] < state.close):
            continue
        _run(block, own_codes, own_values, rows, state.rows, numbers, stack)
        losses[child] = _screened(block, state, numbers, state.rows)
        if columns.shape[1] > 0 and losses[child] < np.inf:
            losses[child] += _violations(block, own_codes, own_values, numbers, stack, columns)
    return FINISHED if len(numbers) > 0 else FAILED


@register_jitable  # type: ignore[untyped-decorator]  # `inlined` functions allocate nothing
def _room(state: Any) -> Any:
    """Return memory for what `_whole` writes."""
    most = 2 * state.most * state.is_composed
    return (
        np.empty(most, np.uint8),
        np.empty(most, np.float32),
        np.empty(most, np.uint8),
        np.empty(most, np.float32),
        np.empty(_CALLS + most, np.int32),
    )


@register_jitable(error_model="numpy")  # type: ignore[untyped-decorator]
def _whole(
    block: int, state: Any, codes: Any, values: Any, first: int, length: int, room: Any
) -> Any:
    """Return codes and values of the whole formula of a genome, none if it is too long."""
    if state.is_composed == 0:
        return codes[first : first + length], values[first : first + length]
    grammar, form = _integers(block, _GRAMMAR), _integers(block, _FORM)
    bodies, numbers = octets(block, _BODIES), _singles(block, _NUMBERS)
    count = compose(
        grammar, form, bodies, numbers, codes, values, first, length, room[0], room[1], room[2],
        room[3], room[4],
    )  # fmt: skip
    return room[0][:count], room[1][:count]


@register_jitable(error_model="numpy")  # type: ignore[untyped-decorator]
def _whole_keeps_units(
    block: int, codes: Any, values: Any, place: int, length: int, room: Any
) -> bool:
    """Return whether the formula of a genome that calls functions has consistent units."""
    grammar, units = _integers(block, _GRAMMAR), _integers(block, _UNITS)
    if grammar[HAS_UNITS] <= 2:
        return True
    state = _states(block, _OWN_STATE)[0]
    whole = _whole(block, state, codes, values, place, np.int64(length), room)
    count = len(whole[0])
    return count > 0 and keeps_units(grammar, units, whole[0], whole[1], 0, count, room[4])


@inlined
def _run(
    block: int,
    codes: Any,
    values: Any,
    start: int,
    stop: int,
    numbers: Any,
    stack: Any,
    table: int = 0,
) -> None:
    """Evaluate a formula on a range of rows.

    Args:
        block: the argument block.
        codes: of the formula.
        values: likewise.
        start: the first row.
        stop: behind the last row.
        numbers: memory: the values of all rows, then the constants, then the stack's values.
        stack: memory for the operands that wait for an operator: address, and whether it is that of
            a constant; [2, width].
        table: 0 for the rows; others are the same with one variable moved.
    """
    grammar, state = _integers(block, _GRAMMAR), _states(block, _OWN_STATE)[0]
    kernels, matrix = words(block, _KERNELS), words(block, _MATRIX)[table]
    result = numbers.ctypes.data
    constants = result + aligned(state.rows * state.itemsize, INVARIANT_WIDTH)
    slots = constants + stack.shape[1] * INVARIANT_WIDTH
    for token in range(len(codes)):
        if codes[token] == CONSTANT:
            address = constants + token * INVARIANT_WIDTH
            if state.itemsize == 4:
                carray(pointer32(address), INVARIANT_WIDTH // 4)[:] = values[token]
            else:
                carray(pointer64(address), INVARIANT_WIDTH // 8)[:] = values[token]
    for row in range(start, stop, _BLOCK):
        count, height = min(_BLOCK, stop - row), 0
        target = result + row * state.itemsize
        for token in range(len(codes)):
            code = np.int64(codes[token])
            if code == CONSTANT:
                stack[0, height], stack[1, height] = constants + token * INVARIANT_WIDTH, 1
            elif code == VARIABLE:
                column = matrix + np.int64(values[token]) * state.pitch
                stack[0, height], stack[1, height] = column + row * state.itemsize, 0
            else:
                arity, broadcast = int(grammar[ARITY + code]), 0
                height -= arity
                for operand in range(arity):
                    broadcast |= stack[1, height + operand] << operand
                is_last = token == len(codes) - 1
                own = target if is_last else slots + height * _BLOCK * state.itemsize
                second = stack[0, height + 1] if arity > 1 else 0
                third = stack[0, height + 2] if arity > 2 else 0
                call_kernel(kernels[code], (own, stack[0, height], second, third, broadcast, count))
                stack[0, height], stack[1, height] = own, 0
            height += 1
        if len(codes) == 1:
            call_kernel(kernels[COPY_CODE], (target, stack[0, 0], 0, 0, stack[1, 0], count))


@register_jitable(error_model="numpy")  # type: ignore[untyped-decorator]
def _violations(block: int, codes: Any, values: Any, numbers: Any, stack: Any, columns: Any) -> Any:
    """Return the part of the rows where a formula violates a direction, for all directions.

    ``numbers`` has the values of the formula, ``columns`` is memory for two numbers of each row.
    """
    state, signs = _states(block, _OWN_STATE)[0], floats(block, _SIGNS)
    target, weights = floats(block, _TARGET), floats(block, _WEIGHTS)
    _read(state, numbers, columns[0])
    mean, products, found = 0.0, 0.0, 0.0
    for row in range(state.rows):
        mean += weights[row] * columns[0, row]
    for row in range(state.rows):
        products += weights[row] * (columns[0, row] - mean) * (target[row] - state.mean)
    rises = -1.0 if state.fitted > 0 and products < 0.0 else 1.0
    for table in range(len(signs)):
        _run(block, codes, values, 0, state.rows, numbers, stack, table + 1)
        _read(state, numbers, columns[1])
        wrong = 0
        for row in range(state.rows):
            step = rises * signs[table] * (columns[1, row] - columns[0, row])
            if not step >= -state.rounding * abs(columns[0, row]):
                wrong += 1
        found += wrong / state.rows
    return found


@inlined
def _screened(block: int, state: Any, numbers: Any, rows: int) -> Any:
    """Return the loss of values on the first rows, relative to that of the best constant."""
    target, weights = floats(block, _TARGET)[:rows], floats(block, _WEIGHTS)[:rows]
    address = numbers.ctypes.data
    if state.itemsize == 4:
        return _loss(carray(pointer32(address), rows), target, weights, state)
    return _loss(carray(pointer64(address), rows), target, weights, state)


@register_jitable(error_model="numpy", fastmath={"reassoc", "contract"})  # type: ignore[untyped-decorator]
def _loss(values: Any, target: Any, weights: Any, state: Any) -> Any:
    """Return the loss of values, relative to that of the best constant; infinity if they have none.

    Values that hardly vary, or are so large or small that their squares are no numbers, have none:
    their slope would be made of rounding errors.
    """
    fitted, total, own_mean, mean = state.fitted, 0.0, 0.0, 0.0
    for row in range(len(target)):
        total += weights[row]
    if fitted == 2:
        for row in range(len(target)):
            own_mean += weights[row] * values[row]
            mean += weights[row] * (target[row] - state.mean)
        own_mean, mean = own_mean / total, state.mean + mean / total
    squares, products, errors, slope = 0.0, 0.0, 0.0, 1.0
    if fitted > 0:
        for row in range(len(target)):
            d, y = values[row] - own_mean, target[row] - mean
            squares += weights[row] * d * d
            products += weights[row] * d * y
        deviation = np.sqrt(squares / total)
        if not (SPREADS[0] < deviation < SPREADS[1]):
            return np.inf
        if not deviation > state.least_spread * abs(own_mean):
            return np.inf
        slope = products / squares
    for row in range(len(target)):
        error = target[row] - mean - slope * (values[row] - own_mean)
        errors += weights[row] * error * error
    return errors / (total * state.spread) if errors >= 0.0 else np.inf


@_compiled  # type: ignore[untyped-decorator]
def fit_chunk(block: int, chunk: int) -> int:
    """Fit the constants of a range of children to the first rows, by least squares.

    The method is that of Levenberg and Marquardt, with few iterations and derivatives by
    differences: a fit says whether a structure is worth its place, and no more.
    """
    children, _, _ = chunk_ranges(block, chunk)
    grammar, state = _integers(block, _GRAMMAR), _states(block, _OWN_STATE)[0]
    codes, values = octets(block, _CHILD_CODES), _singles(block, _CHILD_VALUES)
    lengths, width = _integers(block, _CHILD_LENGTHS), np.int64(grammar[WIDTH])
    rows = state.first_rows if state.first_rows > 0 else min(state.rows, _MOST_FITTED_ROWS)
    numbers = np.empty(state.most * (_BLOCK + INVARIANT_WIDTH // 8 + 1) + state.rows + 8)
    stack, tokens = np.empty((2, state.most), np.int64), np.empty(MOST_CONSTANTS, np.int64)
    room = _room(state)
    columns = np.empty((MOST_CONSTANTS + 1, rows))
    normal = np.empty((MOST_CONSTANTS + 2, MOST_CONSTANTS + 2))
    factor, step = np.empty_like(normal), np.empty(MOST_CONSTANTS + 1)
    for child in range(children.start, children.stop):
        first, length, count = child * width, np.int64(lengths[child]), 0
        own_codes, own_values = codes[first : first + length], values[first : first + length]
        for token in range(length):
            if own_codes[token] == CONSTANT and count < MOST_CONSTANTS:
                tokens[count] = token
                count += 1
        whole = _whole(block, state, codes, values, first, length, room)
        if len(whole[0]) == 0:
            continue
        _run(block, whole[0], whole[1], 0, rows, numbers, stack)
        loss, damping = _screened(block, state, numbers, rows), FIRST_DAMPING
        for _ in range(state.iterations):
            if not loss < np.inf:
                break
            _read(state, numbers, columns[count])
            for place in range(count):
                token = tokens[place]
                old = own_values[token]
                own_values[token] += DIFFERENCE * (abs(old) + LEAST_SIZE)
                difference = np.float64(own_values[token]) - np.float64(old)
                whole = _whole(block, state, codes, values, first, length, room)
                _run(block, whole[0], whole[1], 0, rows, numbers, stack)
                own_values[token] = old
                _read(state, numbers, columns[place])
                for row in range(rows):
                    columns[place, row] = (columns[place, row] - columns[count, row]) / difference
            size = _normal_equations(block, state, columns[: count + 1], normal)
            better = False
            for _ in range(FIT_TRIALS):
                if not _solve(normal, size, damping, factor, step):
                    break
                for place in range(count):
                    token = tokens[place]
                    columns[place, 0] = own_values[token]
                    moved = own_values[token] + step[place]
                    own_values[token] = max(-LARGEST, min(LARGEST, moved))
                whole = _whole(block, state, codes, values, first, length, room)
                _run(block, whole[0], whole[1], 0, rows, numbers, stack)
                trial = _screened(block, state, numbers, rows)
                if trial < loss * _BETTER:
                    loss, damping, better = trial, damping * 0.2, True
                    break
                damping *= 8.0
                for place in range(count):
                    own_values[tokens[place]] = columns[place, 0]
            if not better:
                break
    return FINISHED if len(numbers) > 0 else FAILED


@inlined
def _read(state: Any, numbers: Any, column: Any) -> None:
    """Copy the values of a formula on the first rows into a column."""
    if state.itemsize == 4:
        singles = carray(pointer32(numbers.ctypes.data), len(column))
        for row in range(len(column)):
            column[row] = singles[row]
    else:
        for row in range(len(column)):
            column[row] = numbers[row]


@register_jitable(error_model="numpy", fastmath={"reassoc", "contract"})  # type: ignore[untyped-decorator]
def _normal_equations(block: int, state: Any, columns: Any, normal: Any) -> int:
    """Fill in the normal equations of a step of the constants, and of the slope if it is fitted.

    Args:
        block: the argument block.
        state: ``_STATE``.
        columns: derivatives of f by each constant, then f; [constants + 1, rows]. They are centred
            if an intercept is fitted.
        normal: gets the products of the derivatives of a + b f, and in its last column those with
            the residuals; [unknowns + 1, unknowns + 1].

    Returns:
        Number of unknowns.
    """
    count, rows = len(columns) - 1, columns.shape[1]
    target, weights = floats(block, _TARGET)[:rows], floats(block, _WEIGHTS)[:rows]
    total, mean = 0.0, 0.0
    for row in range(rows):
        total += weights[row]
    if state.fitted == 2:
        for row in range(rows):
            mean += weights[row] * target[row]
        mean /= total
        for place in range(count + 1):
            own = 0.0
            for row in range(rows):
                own += weights[row] * columns[place, row]
            own /= total
            for row in range(rows):
                columns[place, row] -= own
    slope = 1.0
    if state.fitted > 0:
        squares, products = 0.0, 0.0
        for row in range(rows):
            squares += weights[row] * columns[count, row] * columns[count, row]
            products += weights[row] * columns[count, row] * (target[row] - mean)
        slope = products / squares
    unknowns = count + 1 if state.fitted > 0 else count
    for i in range(unknowns):
        scale = slope if i < count else 1.0
        right = 0.0
        for row in range(rows):
            residual = target[row] - mean - slope * columns[count, row]
            right += weights[row] * columns[i, row] * residual
        normal[i, unknowns] = scale * right
        for j in range(i + 1):
            product = 0.0
            for row in range(rows):
                product += weights[row] * columns[i, row] * columns[j, row]
            normal[i, j] = product * scale * (slope if j < count else 1.0)
    return unknowns


@inlined
def _solve(normal: Any, size: int, damping: float, factor: Any, step: Any) -> bool:
    """Solve damped normal equations by Cholesky's method; return whether they have a solution."""
    for i in range(size):
        for j in range(i + 1):
            value = normal[i, j]
            if i == j:
                value *= 1.0 + damping
            for k in range(j):
                value -= factor[i, k] * factor[j, k]
            if i > j:
                factor[i, j] = value / factor[j, j]
            elif value > 1e-14 * normal[i, i]:
                factor[i, i] = np.sqrt(value)
            else:
                return False
    for i in range(size):
        value = normal[i, size]
        for k in range(i):
            value -= factor[i, k] * step[k]
        step[i] = value / factor[i, i]
    for i in range(size - 1, -1, -1):
        value = step[i]
        for k in range(i + 1, size):
            value -= factor[k, i] * step[k]
        step[i] = value / factor[i, i]
        if not abs(step[i]) < np.inf:
            return False
    return True


@_compiled  # type: ignore[untyped-decorator]
def keep_chunk(block: int, chunk: int) -> int:
    """Let children take the places of worse formulas; note their structures, and the best by size.

    It is one chunk, so that the order of the children decides what is noted.
    """
    grammar, state = _integers(block, _GRAMMAR), _states(block, _OWN_STATE)[0]
    codes, values = octets(block, _CHILD_CODES), _singles(block, _CHILD_VALUES)
    lengths, losses = _integers(block, _CHILD_LENGTHS), _singles(block, _CHILD_LOSSES)
    hashes, places = _unsigned(block, _HASHES), words(block, _PLACES)
    own_lengths, own_losses = _integers(block, _LENGTHS), _singles(block, _LOSSES)
    early, own_early = _singles(block, _CHILD_EARLY_LOSSES), _singles(block, _EARLY_LOSSES)
    own_codes, own_values = octets(block, _CODES), _singles(block, _VALUES)
    scores = _singles(block, _SCORES)
    tried, registers = _unsigned(block, _TRIED), _integers(block, _REGISTERS)
    best_codes, best_values = octets(block, _BEST_CODES), _singles(block, _BEST_VALUES)
    best_lengths, best_losses = _integers(block, _BEST_LENGTHS), _singles(block, _BEST_LOSSES)
    best_early = _singles(block, _BEST_EARLY_LOSSES)
    parsimony, width = _singles(block, _PARSIMONY), np.int64(grammar[WIDTH])
    for child in range(len(lengths)):
        length, first = np.int64(lengths[child]), child * width
        if length == 0:
            continue
        word = hashes[child]
        slot = np.int64(word & np.uint64(len(tried) - 1))
        tried[slot] = max(tried[slot], tried_mark(word, state.generation))
        register = np.int64(word >> np.uint64(52))
        registers[register] = max(registers[register], rank_of(word))
        size, loss, place = (
            size_of(grammar, codes, first, first + length),
            losses[child],
            places[child],
        )
        score = max(loss, state.floor) * (1.0 + parsimony[place // state.island] * size)
        if score < scores[place] * _BETTER or own_lengths[place] == 0:
            copy_tokens(codes, values, first, first + length, own_codes, own_values, place * width)
            own_lengths[place], own_losses[place] = length, loss
            own_early[place] = early[child]
            scores[place] = score
        if size < len(best_losses) and loss < best_losses[size] * _BETTER:
            copy_tokens(codes, values, first, first + length, best_codes, best_values, size * width)
            best_lengths[size], best_losses[size] = length, loss
            best_early[size] = early[child]
    return FINISHED if width > 0 else FAILED


@inlined
def rank_of(word: Any) -> int:
    """Return the leading zeros of the last 52 bits of a hash, and 1."""
    zeros, rest = 1, word << np.uint64(12)
    while zeros < 52 and rest >> np.uint64(63) == 0:
        zeros, rest = zeros + 1, rest << np.uint64(1)
    return zeros


def load() -> None:
    """Load the compiled functions, or compile them."""
    for function in (populate_chunk, breed_chunk, screen_chunk, fit_chunk, keep_chunk):
        numba_cache.load_chunk_function(function)


def colony_settings(request: SearchRequest) -> ColonySettings:
    """Return the size of the colony that a request asks for, or that suits a CPU."""
    formulas = request.population or _FORMULAS
    islands = min(request.islands or max(1, formulas // _ISLAND), formulas)
    iterations = request.fit_iterations
    return ColonySettings(islands, formulas // islands, request.seed, iterations, *_SCHEDULE)


class Children(NamedTuple):
    """Formulas that compete for places of the population."""

    codes: NDArray[np.uint8]
    values: NDArray[np.float32]
    lengths: NDArray[np.int32]
    losses: NDArray[np.float32]
    early_losses: NDArray[np.float32]
    """On the first rows."""
    ratios: NDArray[np.float32]
    """Score on the first rows over that of the formula in the place; 0 where there is none."""
    hashes: NDArray[np.uint64]
    """Of their structures."""
    places: NDArray[np.int64]

    @classmethod
    def of(cls, genomes: Genomes, places: NDArray[np.int64]) -> Children:
        """Return formulas for some places, without losses."""
        losses, early, ratios = np.full((3, len(places)), np.inf, np.float32)
        return cls(*genomes, losses, early, ratios, np.zeros(len(places), np.uint64), places)

    def some(self, index: Any) -> Children:
        """Return some of them; a slice shares their memory."""
        return Children._make(array[index] for array in self)


class CpuColony:
    """The colony of a CPU engine; implements `warpfit_server.engine.search.colony.Colony`.

    Args:
        matrix: the columns of the screening rows, [columns, rows], variables first.
        kernels: addresses by code of instruction, int64.
        run: runs the chunks of work in steps.
        cancelled: as in `interface.Outputs`.
        grammar: from `genome.new_grammar`.
        units: from `genome.new_units`.
        screening: the rows.
        settings: islands and seed.
        composer: writes out what genomes call.
        signs: for columns 1 if no formula may fall with them, -1 if none may rise.
    """

    def __init__(
        self,
        matrix: NDArray[np.floating],
        kernels: NDArray[np.int64],
        run: Callable[[ChunkedWork], Steps[None]],
        cancelled: NDArray[np.uint8],
        grammar: NDArray[np.int32],
        units: NDArray[np.int32],
        screening: Screening,
        settings: ColonySettings,
        composer: Composer,
        signs: Mapping[int, int],
    ) -> None:
        self._run, self._matrix, self._kernels = run, matrix, kernels
        self._grammar, self._units = grammar, units
        self._screening, self._settings = screening, settings
        self._cancelled = cancelled
        self.width, count = int(grammar[WIDTH]), settings.formulas
        self.formulas = self.fits = 0
        self.island_scores = np.full(settings.islands, np.inf, np.float32)
        sizes = int(grammar[MAX_SIZE]) + 1

        def genomes(number: int) -> Genomes:
            codes = np.zeros((number, self.width), np.uint8)
            return Genomes(codes, np.zeros(codes.shape, np.float32), np.zeros(number, np.int32))

        self._own, self._best = genomes(count), genomes(sizes)
        self._losses, self._early_losses, self._scores = np.full((3, count), np.inf, np.float32)
        self._best_losses, self._best_early_losses = np.full((2, sizes), np.inf, np.float32)
        self.children = Children.of(genomes(count), np.arange(count))
        """Those of the last generation."""
        self._closest = Children.of(genomes(count), np.arange(count))
        """The children that came closest to each place since `champions` was called last."""
        self._tried, self._registers = np.zeros(_TABLE, np.uint64), np.zeros(REGISTERS, np.int32)
        self._returned = np.zeros(_TABLE, np.uint64)
        self._parsimony = settings.parsimony()
        rows = len(screening.target)
        self._moved = [moved(matrix, column, screening.itemsize) for column in signs]
        self._address = np.array([each.ctypes.data for each in (matrix, *self._moved)])
        self._signs = np.array([*signs.values()], np.float64)
        self._state = np.zeros(1, _STATE)
        one = self._state[0]
        one["seed"], one["formulas"], one["island"] = settings.seed, count, settings.island
        one["rows"], one["itemsize"] = rows, screening.itemsize
        one["first_rows"] = screening.first_rows % rows
        one["pitch"] = matrix.strides[0]
        one["fitted"] = screening.fitted
        one["floor"] = LOSS_FLOOR[screening.itemsize]
        one["least_spread"] = LEAST_SPREAD[screening.itemsize]
        one["spread"], one["mean"] = screening.spread, screening.mean
        one["iterations"] = min(FIT_ITERATIONS, settings.iterations)
        one["tries"] = settings.tries
        one["rounding"] = ROUNDING[screening.itemsize]
        one["most"], one["is_composed"] = composer.most or self.width, composer.is_needed
        self._form = composer.places, composer.bodies, composer.numbers.astype(np.float32)

    def populate(self) -> Steps[None]:
        """Fill all islands with random formulas."""
        yield from self._renew(slice(0, self._settings.formulas))

    def restart(self, island: int) -> Steps[None]:
        """Fill an island with random formulas."""
        own = slice(island * self._settings.island, (island + 1) * self._settings.island)
        self._own.lengths[own] = 0
        yield from self._renew(own)

    def advance(self) -> Steps[None]:
        """Run a generation."""
        self._state["generation"] += np.uint64(1)
        yield from self._run(self._work(breed_chunk, self.children))
        yield from self._compete(self.children)
        # Those that came closest to each place are kept, as far as a fit may help them.
        for first in range(0, len(self._scores), _AT_ONCE):
            some = slice(first, first + _AT_ONCE)
            children, known = self.children.some(some), self._closest.some(some)
            inside = np.arange(self.width) < children.lengths[:, None]
            has_numbers = ((children.codes == CONSTANT) & inside).any(axis=1)
            is_new = self._returned[self._slots(children)] != children.hashes
            closer = np.flatnonzero(has_numbers & is_new & (children.ratios < known.ratios))
            pairs: Any = zip(known, children, strict=True)
            for array, fresh in pairs:
                array[closer] = fresh[closer]
            yield None

    def _slots(self, children: Children) -> NDArray[np.int64]:
        """Return the places of structures in the table of those that `champions` returned."""
        return (children.hashes & np.uint64(len(self._returned) - 1)).astype(np.int64)

    def insert(self, genomes: Genomes, places: NDArray[np.int64]) -> Steps[NDArray[np.float32]]:
        """Score formulas, which take the given places where they are better; return losses."""
        own = Genomes(genomes.codes, genomes.values.astype(np.float32), genomes.lengths)
        children = Children.of(own.widened(self.width), places)
        yield from self._compete(children, math.inf)
        return children.losses

    def champions(self, count: int) -> Steps[Scored]:
        """Return children since the last call that may become better by a fit.

        They are those whose structure has not been returned, and whose scores on the first rows are
        best beside those of the formulas in their places.
        """
        island, closest = self._settings.island, self._closest
        found = list[NDArray[np.int64]]()
        for start in range(0, len(self._scores), step := island * max(1, _AT_ONCE // island)):
            hashes, own = closest.hashes[start : start + step], closest.ratios[start : start + step]
            ratios = np.full(len(own), np.inf)
            first = np.unique(hashes, return_index=True)[1]
            ratios[first] = own[first]
            chosen = np.argsort(ratios.reshape(-1, island), axis=1, kind="stable")[:, :count]
            places = (chosen + np.arange(len(chosen))[:, None] * island).reshape(-1)
            found.append(start + places[np.isfinite(ratios[places])])
            yield None
        places = np.concatenate(found)
        self._returned[self._slots(closest)[places]] = closest.hashes[places]
        self.island_scores = self._scores.reshape(-1, island).min(axis=1)
        genomes = Genomes(*closest[:3]).take(places)
        closest.ratios[:] = np.inf
        return Scored(genomes, closest.losses[places], places)

    def improve(self, count: int) -> Steps[None]:
        """Fit children since the last call that came close to their places; see `Colony`."""
        found = yield from self.champions(count)
        if len(found.places) and self._state["iterations"][0]:
            fitted = yield from self.fitted(found.genomes)
            self.fits += len(fitted)
            yield from self.insert(fitted, found.places)

    def fitted(self, genomes: Genomes) -> Steps[Genomes]:
        """Return formulas with their constants fitted quickly, in float32."""
        own = Genomes(genomes.codes, genomes.values.astype(np.float32), genomes.lengths)
        children = Children.of(own.widened(self.width), np.zeros(len(own), np.int64))
        yield from self._run(self._work(fit_chunk, children))
        return Genomes(*children[:3])

    def best(self) -> Steps[Scored]:
        """Return the best formula of each size."""
        yield None
        sizes = np.flatnonzero(np.isfinite(self._best_losses))
        losses = self._best_losses[sizes]
        return Scored(self._best.take(sizes), losses, np.full(len(sizes), -1))

    def distinct(self) -> int:
        """Estimate how many different structures have been tried."""
        return estimate_distinct(self._registers)

    def close(self) -> None:
        """Do nothing: memory goes with the arrays."""

    def _renew(self, some: slice) -> Steps[None]:
        self._state["generation"] += np.uint64(1)
        yield from self._run(self._work(populate_chunk, self.children, some))
        yield from self._compete(self.children.some(some), math.inf)

    def _compete(self, children: Children, close: float = CLOSE) -> Steps[None]:
        """Score children, which take their places where they are better."""
        self._state["close"] = close
        yield from self._run(self._work(screen_chunk, children))
        for first in range(0, len(children.places), _AT_ONCE):
            some = children.some(slice(first, first + _AT_ONCE))
            yield from self._run(self._work(keep_chunk, some, slice(0, 1)))
            yield None
        self.formulas += int(np.count_nonzero(children.lengths))

    def _work(self, function: Any, children: Children, some: slice | None = None) -> ChunkedWork:
        """Return the work of a function on children, or on some of them."""
        first, stop = (0, len(children.places)) if some is None else (some.start, some.stop)
        most = _FITS_IN_CHUNK if function is fit_chunk else _IN_CHUNK
        in_chunk = max(1, min(most, _ROWS_IN_CHUNK // len(self._screening.target)))
        edges = np.append(np.arange(first, stop, in_chunk), stop)
        ranges = np.zeros(len(edges) - 1, RANGE)
        ranges["start"], ranges["stop"] = edges[:-1], edges[1:]
        cut = Cut(ranges, ONE_SPAN, len(children.places) * _COST_OF_A_FORMULA)
        arrays = (
            self._grammar, self._units, self._state, *self._own, self._losses,
            self._early_losses, self._scores, *children, self._tried, self._registers, *self._best,
            self._best_losses, self._best_early_losses, self._parsimony, self._address,
            self._kernels, self._screening.target, self._screening.weights, *self._form,
            self._signs,
        )  # fmt: skip
        return ChunkedWork(address_of(function), arrays, cut, self._cancelled)
