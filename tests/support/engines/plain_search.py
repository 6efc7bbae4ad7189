"""What a search does to one formula, in plain Python: simplification, rules, units and structure.

A formula is a tree: a code, the value of a leaf, and operands. `Genes` has the same functions on
flat arrays, as Numba compiles them for the CPU, and as CUDA C++ that is compiled for this machine.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from support.emulators.cuda_on_host import compile_for_host
from warpfit.errors import ProgramError
from warpfit.formulas.units import check_units, dimensions
from warpfit.ir import Program
from warpfit.ops import BY_CODE, CONSTANT, OPERATORS, VARIABLE
from warpfit.searching import SearchRequest
from warpfit_server.engine.interface import Arithmetic
from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.search import genome
from warpfit_server.engine.search.genome import WIDTH

ADD, SUB, MUL, DIV = (OPERATORS[name].code for name in ("add", "sub", "mul", "div"))
NEG, INV, EXP, LOG = (OPERATORS[name].code for name in ("neg", "inv", "exp", "log"))
LARGEST = 1e15


class Tree(NamedTuple):
    """A formula."""

    code: int
    value: float = 0.0
    operands: tuple[Tree, ...] = ()

    @property
    def is_constant(self) -> bool:
        return self.code == CONSTANT

    @property
    def name(self) -> str:
        return BY_CODE[self.code].name if self.code in BY_CODE else ""


def constant(number: float) -> Tree:
    return Tree(CONSTANT, float(np.float32(number)))


def tokens(tree: Tree) -> Iterator[Tree]:
    """Yield the nodes of a tree in postfix order."""
    for operand in tree.operands:
        yield from tokens(operand)
    yield tree


def flat(trees: Sequence[Tree]) -> tuple[list[int], list[float]]:
    """Return codes and values of formulas that follow one another."""
    nodes = [node for tree in trees for node in tokens(tree)]
    return [node.code for node in nodes], [node.value for node in nodes]


def trees_of(codes: Sequence[int], values: Sequence[float]) -> list[Tree]:
    """Return the trees of postfix tokens.

    Raises:
        AssertionError: if they are not well-formed.
    """
    stack: list[Tree] = []
    for code, value in zip(codes, values, strict=True):
        arity = BY_CODE[code].arity if code in BY_CODE else 0
        assert code in (VARIABLE, CONSTANT) or arity > 0, code
        assert len(stack) >= arity
        operands = tuple(stack[len(stack) - arity :])
        del stack[len(stack) - arity :]
        stack.append(Tree(code, float(value), operands))
    return stack


def simplified(tree: Tree, allowed: set[str]) -> Tree | None:
    """Simplify a formula of allowed operators; None if a constant is no number."""
    operands = [simplified(operand, allowed) for operand in tree.operands]
    if not operands:
        return None if tree.is_constant and not abs(tree.value) <= LARGEST else tree
    if any(operand is None for operand in operands):
        return None
    code, known = tree.code, tuple(operand for operand in operands if operand is not None)
    if all(operand.is_constant for operand in known):
        with np.errstate(all="ignore"):
            value = BY_CODE[code].numpy(*(np.float64(operand.value) for operand in known))
        return constant(float(value)) if abs(value) <= LARGEST else None
    if len(known) == 1:
        (a,) = known
        if (code in (NEG, INV) and a.code == code) or (code == LOG and a.code == EXP):
            return a.operands[0]
    if len(known) != 2:
        return Tree(code, 0.0, known)
    a, b = known
    if code in (ADD, MUL) and a.is_constant:
        a, b = b, a
    if not b.is_constant:
        if code in (SUB, DIV) and a == b:
            return constant(1.0 if code == DIV else 0.0)
        return Tree(code, 0.0, (a, b))
    number = b.value
    if code == SUB and "add" in allowed:
        code, number = ADD, -number
    elif code == DIV and "mul" in allowed and abs(number) > 1 / LARGEST:
        code, number = MUL, 1 / number
    if code in (ADD, MUL) and a.code == code and a.operands[1].is_constant:
        other = a.operands[1].value
        a, number = a.operands[0], other + number if code == ADD else other * number
    if not abs(number) <= LARGEST:
        return None
    if (code, number) in ((ADD, 0.0), (MUL, 1.0)):
        return a
    if (code, number) == (MUL, 0.0):
        return constant(0.0)
    return Tree(code, 0.0, (a, constant(number)))


def without_scale(tree: Tree, fitted: int) -> Tree:
    """Take off what the fitted numbers make up for: slope and intercept (2), or a slope (1)."""
    while fitted and tree.operands:
        a, last = tree.operands[0], tree.operands[-1]
        if (
            tree.code == NEG
            or (tree.code in (MUL, DIV) and last.is_constant)
            or (fitted == 2 and tree.code in (ADD, SUB) and last.is_constant)
        ):
            tree = a
        elif fitted == 2 and tree.code == SUB and a.is_constant:
            tree = last
        else:
            break
    return tree


def structure(tree: Tree) -> Any:
    """Return what tells structures apart: no numbers, and no order in sums and products."""
    operands = [structure(operand) for operand in tree.operands]
    if tree.code in (ADD, MUL):
        operands.sort(key=repr)
    return (tree.code, tree.value if tree.code == VARIABLE else 0.0, tuple(operands))


def keeps_rules(tree: Tree, request: SearchRequest) -> bool:
    """Return whether a formula keeps to the rules of a request."""
    rules = request.rules

    def size(node: Tree) -> int:
        own: int = rules.complexities.get(node.name, 1)
        return own + sum(map(size, node.operands))

    def depth(node: Tree) -> int:
        return 1 + max(map(depth, node.operands), default=0)

    def nested(node: Tree, name: str) -> int:
        """Most uses of an operator on a path from this node to a leaf."""
        below = max((nested(operand, name) for operand in node.operands), default=0)
        return below + (node.name == name)

    nodes = list(tokens(tree))
    if size(tree) > rules.max_size or (rules.max_depth and depth(tree) > rules.max_depth):
        return False
    names = [node.name for node in nodes]
    if any(names.count(name) > most for name, most in rules.counts.items()):
        return False
    for node in nodes:
        for operand, most in zip(node.operands, rules.arguments.get(node.name, ()), strict=False):
            if 0 <= most < size(operand):
                return False
        for (outer, inner), most in rules.nesting.items():
            below = (nested(operand, inner) for operand in node.operands)
            if node.name == outer and max(below) > most:
                return False
    return True


def keeps_units(tree: Tree, request: SearchRequest) -> bool:
    """Return whether the units of a formula are consistent, by `warpfit.formulas.units`."""
    units = request.units
    if units is None:
        return True
    roots = dimensions(["m", "kg", "s", "A", "K", "mol", "cd"], [], 7)
    known = [*(units.variables @ roots), 0.0]
    codes, values = map(np.array, flat([tree]))
    if units.dimensionless_constants:  # a variable that is a number takes the place of each
        values[codes == CONSTANT], codes[codes == CONSTANT] = len(known) - 1, VARIABLE
    target = None
    if units.target is not None and (units.dimensionless_constants or request.form == "plain"):
        target = float(units.target @ roots)
    try:
        check_units(Program(codes.astype(np.uint8), values), np.array(known), target)
    except ProgramError:
        return False
    return True


def trees(operators, columns=(0, 1, 2), constants=(0.0, 1.0, -1.0, 2.0, 0.5, -3.0), most=12):
    """Draw formulas of operators, with about so many leaves at most."""
    leaves = st.sampled_from([Tree(VARIABLE, float(column)) for column in columns])
    leaves |= st.sampled_from(constants).map(constant)

    def above(inner: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
        return st.one_of(
            st.tuples(*[inner] * OPERATORS[name].arity).map(
                lambda operands, code=OPERATORS[name].code: Tree(code, 0.0, operands)
            )
            for name in operators
        )

    return st.recursive(leaves, above, max_leaves=most)


_ON_CPU = {
    name: numba_cache.njit(error_model="numpy")(getattr(genome, name).py_func)
    for name in (
        *("simplify", "is_allowed", "structure_hash", "first_formula", "breed"),
        *("start_random", "tournament", "tried_mark"),
    )
}


class Genes:
    """The engine's functions of a formula, on the CPU or as they are on a GPU."""

    def __init__(self, *, cuda: bool) -> None:
        self._library: ctypes.CDLL | None = None
        if cuda:
            from warpfit_server.engine.cuda.colony import colony_source
            from warpfit_server.engine.cuda.interpreter.launches import Variant

            source = colony_source(Variant(Arithmetic.PRECISE, 4), genome.MOST_TOKENS).source
            # Operators cast what is no number to integers, which is defined on a device.
            self._library = compile_for_host(source + _entries(), wraps=True)

    def call(self, name: str, *given: Any) -> int:
        """Call a function with arrays and whole numbers; return its result, a whole number."""
        if self._library is None:
            return int(_ON_CPU[name](*given) or 0)
        function = getattr(self._library, f"call_{name}")
        is_word = name in ("structure_hash", "tried_mark")
        function.restype = ctypes.c_uint64 if is_word else ctypes.c_int
        kinds = {
            np.ndarray: lambda one: ctypes.c_void_p(one.ctypes.data),
            np.uint64: ctypes.c_uint64,
        }
        return int(function(*(kinds.get(type(one), ctypes.c_int)(one) for one in given)))

    def random(self, seed: int, generation: int = 1, formula: int = 0) -> np.ndarray:
        """Return a state of random numbers."""
        state = np.zeros(1, np.uint64)
        self.call("start_random", state, *map(np.uint64, (seed, generation, formula)))
        return state

    def simplify(self, grammar: np.ndarray, given: Sequence[Tree]) -> list[Tree] | None:
        """Simplify a genome, between tokens that are not its own."""
        own, values = flat(given)
        place, work = 3, np.zeros(len(own), np.int32)
        codes, numbers = _room(own, values, place)
        before = codes.copy()
        length = self.call("simplify", grammar, codes, numbers, place, len(own), work)
        assert 0 <= length <= len(own)
        outside = np.r_[:place, place + len(own) : len(codes)]
        np.testing.assert_array_equal(codes[outside], before[outside])
        part = slice(place, place + length)
        return trees_of(codes[part].tolist(), numbers[part].tolist()) if length else None

    def is_allowed(self, grammar: np.ndarray, units: np.ndarray, given: Sequence[Tree]) -> bool:
        """Return whether a genome keeps rules and units."""
        own, values = flat(given)
        codes, numbers = _room(own, values, 5)
        work = np.zeros(len(own), np.int32)
        return bool(self.call("is_allowed", grammar, units, codes, numbers, 5, len(own), work))

    def structure_hash(self, grammar: np.ndarray, given: Sequence[Tree]) -> int:
        """Return the hash of a genome's structure."""
        own, values = flat(given)
        codes, numbers = _room(own, values, 2)
        words = np.zeros(len(own), np.uint64)
        return self.call("structure_hash", grammar, codes, numbers, 2, len(own), words)


def _room(own: list[int], values: list[float], place: int) -> tuple[np.ndarray, np.ndarray]:
    """Lay a genome out from a place on; what is around it means nothing."""
    codes = np.full(len(own) + 2 * place, ADD, np.uint8)
    numbers = np.full(len(codes), 7.0, np.float32)
    codes[place : place + len(own)], numbers[place : place + len(own)] = own, values
    return codes, numbers


def _entries() -> str:
    """Write a C function for each of the functions that are called here."""
    i, u, b, f, w = "int*", "unsigned char*", "int", "float*", "unsigned long long*"
    one = "unsigned long long"
    kinds = {
        "simplify": (b, (i, u, f, b, b, i)),
        "is_allowed": (b, (i, i, u, f, b, b, i)),
        "structure_hash": (one, (i, u, f, b, b, w)),
        "first_formula": (b, (i, i, w, u, f, b, i)),
        "breed": (b, (i, i, w, u, f, i, f, b, b, b, u, f, w, w, one, b, i, w)),
        "start_random": (b, (w, one, one, one)),
        "tried_mark": (one, (one, one)),
    }
    text = ""
    for name, (result, parameters) in kinds.items():
        declared = ", ".join(f"{kind} a{k}" for k, kind in enumerate(parameters))
        given = ", ".join(f"a{k}" for k in range(len(parameters)))
        body = (
            f"{name}({given}); return 0;" if name == "start_random" else f"return {name}({given});"
        )
        text += f'\nextern "C" {result} call_{name}({declared}) {{ {body} }}'
    return text


def rows_of(grammar: np.ndarray, formulas: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return codes, values and lengths for so many genomes."""
    shape = formulas, int(grammar[WIDTH])
    return np.zeros(shape, np.uint8), np.zeros(shape, np.float32), np.zeros(formulas, np.int32)
