"""How the whole formula of a genome is written where it calls functions.

The functions of a template are searched, and stand one after the other in a genome, its numbers
behind them as functions without arguments. The whole formula is the template with a function in the
place of each call, and in that the arguments of the call in the place of its variables. Functions
that a caller has defined are operators of a genome; they are written out in the same way.

The simple form, of the tokens of a formula in postfix:

    for each token:
        if it calls a function: take its operands off the end of what is written, and
            write the function's tokens, an operand for each variable
        else: write it

A `Composer` has the tokens of the template and of the definitions. `compose` is portable, so that
a colony composes its formulas where they are; the driver composes those of the archive.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import types
from numpy.typing import NDArray

from warpfit.ir import Population
from warpfit.ops import PARAMETER, VARIABLE
from warpfit.searching import FIRST_CALL, FIRST_DEFINITION, SearchRequest
from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.search.colony import Genomes
from warpfit_server.engine.search.genome import (
    ARITY,
    FUNCTIONS,
    WIDTH,
    copy_tokens,
    subtree_start,
)
from warpfit_server.engine.search.kernel_language import Bytes, Int, Integers, Reals, portable

#: Most tokens of a whole formula.
_MOST_WHOLE: Final = 2_048
_CODES: Final = 256
#: Fields of the places, int32: most tokens of a whole formula, 0 if genomes are whole formulas; the
#: template's tokens, 0 without a template; 1 if there are definitions; and for each code the first
#: token and the number of tokens of a definition.
MOST_WHOLE, TEMPLATE_TOKENS, HAS_DEFINITIONS, PLACES = range(4)
_PLACES_SIZE: Final = PLACES + 2 * _CODES


@portable
def write_calls(
    grammar: Integers,
    first: Int,
    stop: Int,
    codes: Bytes,
    values: Reals,
    start: Int,
    end: Int,
    bodies: Bytes,
    numbers: Reals,
    places: Integers,
    table: Int,
    to_codes: Bytes,
    to_values: Reals,
    most: Int,
    work: Integers,
    offset: Int,
) -> Int:
    """Write a formula with the calls of some functions written out; return 0 if it is too long.

    Args:
        grammar: from `genome.new_grammar`.
        first: the least code of a call.
        stop: behind the greatest one.
        codes: of the formula.
        values: likewise.
        start: its first token.
        end: behind its last token.
        bodies: codes of the functions.
        numbers: their values.
        places: where each function's tokens are, and how many, by code.
        table: first of the places.
        to_codes: gets the codes, from 0 on; room for twice ``most`` tokens.
        to_values: likewise.
        most: most tokens of the result.
        work: memory for as many numbers as tokens, from ``offset`` on.
        offset: first number of that.
    """
    at: Int = 0
    height: Int = offset
    for token in range(start, end):
        code: Int = codes[token]
        arity: Int = grammar[ARITY + code]
        begin: Int = at
        if arity > 0:
            begin = work[height - arity]
        if code < first or code >= stop:
            if at >= most:
                return 0
            to_codes[at] = code
            to_values[at] = values[token]
            at += 1
        else:
            operands: Int = at - begin
            copy_tokens(to_codes, to_values, begin, at, to_codes, to_values, most)
            at = begin
            body: Int = places[table + 2 * code]
            for own in range(body, body + places[table + 2 * code + 1]):
                if bodies[own] == VARIABLE:
                    operand: Int = np.int64(numbers[own])
                    low: Int = work[height - arity + operand] - begin
                    high: Int = operands
                    if operand + 1 < arity:
                        high = work[height - arity + operand + 1] - begin
                    if at + high - low > most:
                        return 0
                    at = copy_tokens(
                        to_codes, to_values, most + low, most + high, to_codes, to_values, at
                    )
                else:
                    if at >= most:
                        return 0
                    to_codes[at] = bodies[own]
                    to_values[at] = numbers[own]
                    at += 1
        height += 1 - arity
        work[height - 1] = begin
    return at


@portable
def compose(
    grammar: Integers,
    places: Integers,
    bodies: Bytes,
    numbers: Reals,
    codes: Bytes,
    values: Reals,
    place: Int,
    length: Int,
    to_codes: Bytes,
    to_values: Reals,
    spare_codes: Bytes,
    spare_values: Reals,
    work: Integers,
) -> Int:
    """Write the whole formula of a genome; return its length, or 0 if it is too long.

    Args:
        grammar: from `genome.new_grammar`.
        places: of a `Composer`.
        bodies: likewise.
        numbers: likewise.
        codes: of the genome, from ``place`` on.
        values: likewise.
        place: its first token.
        length: number of its tokens.
        to_codes: gets the codes, from 0 on; room for twice ``places[MOST_WHOLE]`` tokens.
        to_values: likewise.
        spare_codes: as much memory.
        spare_values: likewise.
        work: memory for `work_size` numbers.
    """
    most: Int = places[MOST_WHOLE]
    tokens: Int = places[TEMPLATE_TOKENS]
    if tokens == 0:
        return write_calls(
            grammar, FIRST_DEFINITION, _CODES, codes, values, place, place + length, bodies,
            numbers, places, PLACES, to_codes, to_values, most, work, 0,
        )  # fmt: skip
    end: Int = place + length - 1
    for behind in range(grammar[FUNCTIONS]):
        function: Int = FIRST_CALL + grammar[FUNCTIONS] - 1 - behind
        start: Int = subtree_start(grammar, codes, end)
        work[2 * function] = start
        work[2 * function + 1] = end + 1 - start
        end = start - 1
    if places[HAS_DEFINITIONS] == 0:
        return write_calls(
            grammar, FIRST_CALL, FIRST_DEFINITION, bodies, numbers, 0, tokens, codes, values, work,
            0, to_codes, to_values, most, work, 2 * _CODES,
        )  # fmt: skip
    written: Int = write_calls(
        grammar, FIRST_CALL, FIRST_DEFINITION, bodies, numbers, 0, tokens, codes, values, work, 0,
        spare_codes, spare_values, most, work, 2 * _CODES,
    )  # fmt: skip
    return write_calls(
        grammar, FIRST_DEFINITION, _CODES, spare_codes, spare_values, 0, written, bodies, numbers,
        places, PLACES, to_codes, to_values, most, work, 0,
    )  # fmt: skip


def work_size(most: int) -> int:
    """Return how many numbers `compose` works with, for whole formulas of so many tokens."""
    return 2 * _CODES + most


@numba_cache.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def compose_all(
    grammar: Integers,
    places: Integers,
    bodies: Bytes,
    numbers: Reals,
    codes: Bytes,
    values: Reals,
    lengths: Integers,
    whole_codes: Bytes,
    whole_values: Reals,
    whole_lengths: Integers,
) -> None:
    """Compose genomes in rows of equal width, into rows of twice the most tokens."""
    width, most = codes.size // max(1, lengths.size), places[MOST_WHOLE]
    spare_codes, spare_values = np.empty(2 * most, np.uint8), np.empty(2 * most)
    work = np.empty(2 * _CODES + most, np.int32)
    for row in range(lengths.size):
        own = slice(row * 2 * most, (row + 1) * 2 * most)
        whole_lengths[row] = compose(
            grammar, places, bodies, numbers, codes, values, row * width, np.int64(lengths[row]),
            whole_codes[own], whole_values[own], spare_codes, spare_values, work,
        )  # fmt: skip


class Composer:
    """Tokens of a template and of definitions, and what `compose` has to know of them.

    Args:
        request: a checked request.
        grammar: its grammar.
    """

    def __init__(self, request: SearchRequest, grammar: NDArray[np.int32]) -> None:
        self._grammar = grammar
        template, definitions = request.template, [*request.definitions.values()]
        codes, values = np.empty(0, np.uint8), np.empty(0)
        if template is not None:
            codes, values = template.codes.copy(), template.values.copy()
            is_number = codes == PARAMETER
            codes[is_number] = FIRST_CALL + len(template.arities) + values[is_number]
        self.places = np.zeros(_PLACES_SIZE, np.int32)
        self.places[TEMPLATE_TOKENS] = len(codes)
        self.places[HAS_DEFINITIONS] = bool(definitions)
        start = len(codes)
        for place, program in enumerate(definitions):
            first = PLACES + 2 * (FIRST_DEFINITION + place)
            self.places[first : first + 2] = start, len(program)
            start += len(program)
        self.bodies = np.concatenate([codes, *(program.codes for program in definitions)])
        self.numbers = np.concatenate([values, *(program.values for program in definitions)])
        if self.is_needed:
            calls = int(np.count_nonzero(codes >= FIRST_CALL)) or 1
            longest = max([1, *map(len, definitions)])
            most = (len(codes) + calls * int(grammar[WIDTH])) * longest
            self.places[MOST_WHOLE] = min(_MOST_WHOLE, most)

    @property
    def is_needed(self) -> bool:
        """Whether genomes are not whole formulas already."""
        return bool(self.places[TEMPLATE_TOKENS] or self.places[HAS_DEFINITIONS])

    @property
    def most(self) -> int:
        """Most tokens of a whole formula; 0 if genomes are whole formulas."""
        return int(self.places[MOST_WHOLE])

    def composed(self, genomes: Genomes) -> Population:
        """Return the whole formulas of genomes; those that are too long are one token."""
        count, most = len(genomes), self.most
        codes, values = np.zeros((count, 2 * most), np.uint8), np.zeros((count, 2 * most))
        lengths = np.zeros(count, np.int32)
        compose_all(
            self._grammar, self.places, self.bodies, self.numbers,
            np.ascontiguousarray(genomes.codes).reshape(-1),
            genomes.values.astype(np.float64).reshape(-1),
            genomes.lengths, codes.reshape(-1), values.reshape(-1), lengths,
        )  # fmt: skip
        codes[lengths == 0, 0] = VARIABLE
        lengths = np.maximum(lengths, 1)
        inside = np.arange(2 * most) < lengths[:, None]
        return Population(codes[inside], values[inside], lengths.astype(np.uint32))


def load() -> None:
    """Load the compiled function, or compile it."""
    numbers, octets, reals = types.int32[::1], types.uint8[::1], types.float64[::1]
    numba_cache.load(
        compose_all,
        types.void(numbers, numbers, octets, reals, octets, reals, numbers, octets, reals, numbers),
    )
