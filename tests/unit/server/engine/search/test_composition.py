"""Whole formulas of genomes that call functions, against substitution in trees."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from support.engines.plain_search import Tree, flat, trees, trees_of
from warpfit.ir import Population
from warpfit.ops import CONSTANT, OPERATORS, PARAMETER, VARIABLE
from warpfit.parse import parse
from warpfit.searching import FIRST_CALL, FIRST_DEFINITION, Rules, SearchRequest, Template
from warpfit_server.engine.search.colony import Genomes
from warpfit_server.engine.search.composition import Composer
from warpfit_server.engine.search.genome import new_grammar, part_lengths

NAMES = ("add", "mul", "sin")
#: A function of one's own of two operands, which it uses three times.
OWN = parse("x2 + x1*x1")
ARITIES = (2, 1)


def calls(most: int = 6) -> st.SearchStrategy[Tree]:
    """Draw templates, which call two functions, a parameter and a defined function anywhere."""
    leaves = st.sampled_from([0.0, 1.0, 2.0]).map(lambda column: Tree(VARIABLE, column))
    leaves |= st.just(Tree(PARAMETER, 0.0)) | st.just(Tree(CONSTANT, 0.3))
    rows = [(FIRST_CALL, 2), (FIRST_CALL + 1, 1), (FIRST_DEFINITION, 2)]
    rows += [(OPERATORS[name].code, OPERATORS[name].arity) for name in NAMES]

    def above(inner):
        return st.one_of(
            st.tuples(*[inner] * arity).map(lambda own, code=code: Tree(code, 0.0, own))
            for code, arity in rows
        )

    drawn = st.recursive(leaves, above, max_leaves=most)
    both = (Tree(FIRST_CALL, 0.0, (drawn_leaf,) * 2) for drawn_leaf in [Tree(VARIABLE, 0.0)])
    (first,) = both
    second = Tree(FIRST_CALL + 1, 0.0, (first,))
    return drawn.map(lambda tree: Tree(OPERATORS["add"].code, 0.0, (tree, second)))


def written(tree: Tree, functions: list[Tree], arguments: tuple[Tree, ...] | None = None) -> Tree:
    """Write a tree with the calls in it replaced; variables are arguments if there are some."""
    if tree.code == VARIABLE and arguments is not None:
        return arguments[int(tree.value)]
    if tree.code == PARAMETER:
        return functions[2]
    operands = tuple(written(operand, functions, arguments) for operand in tree.operands)
    if tree.code == FIRST_DEFINITION:
        (body,) = trees_of(OWN.codes.tolist(), OWN.values.tolist())
        return written(body, functions, operands)
    if tree.code >= FIRST_CALL:
        return written(functions[tree.code - FIRST_CALL], functions, operands)
    return Tree(tree.code, tree.value, operands)


def own_functions(columns: int) -> st.SearchStrategy[Tree]:
    return trees(NAMES, range(columns), most=4)


@given(calls(), own_functions(2), own_functions(1), st.booleans())
def test_calls_are_written_out(form, first, second, has_template):
    codes, values = map(np.array, flat([form]))
    template = Template(codes.astype(np.uint8), values, ARITIES) if has_template else None
    request = SearchRequest(
        bytes(32), operators={"add": 1.0, "twice": 1.0}, rules=Rules(max_size=40),
        definitions={"twice": OWN}, template=template,
    )  # fmt: skip
    number = Tree(CONSTANT, 7.5)
    parts = [first, second, number] if has_template else [first]
    if has_template and not template.parameters:
        parts.pop()
    columns = [[0, 1], [0], []][: len(parts)] if has_template else [[0, 1, 2]]
    grammar = new_grammar(request, columns)
    own = Tree(FIRST_DEFINITION, 0.0, (first, Tree(VARIABLE, 0.0)))
    parts[0] = own if len(flat([own])[0]) < 20 else first
    codes, values = flat(parts)
    assert part_lengths(grammar, np.array(codes)) == [len(flat([part])[0]) for part in parts]
    population = Population(
        np.array(codes, np.uint8), np.array(values), np.array([len(codes)], np.uint32)
    )
    composer = Composer(request, grammar)
    found = composer.composed(Genomes.of(population, max(len(codes), 3)))
    wanted = written(form if has_template else parts[0], [*parts, number])
    wanted_codes, wanted_values = flat([wanted])
    if len(wanted_codes) <= composer.most:
        assert found.codes.tolist() == wanted_codes
        assert found.values.tolist() == wanted_values
    else:
        assert len(found.codes) == 1


def test_without_calls_genomes_are_whole_formulas():
    request = SearchRequest(bytes(32))
    assert not Composer(request, new_grammar(request, [[0]])).is_needed
    assert Composer(replace(request, definitions={"f": OWN}), new_grammar(request, [[0]])).most > 0
