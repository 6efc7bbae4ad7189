"""What is done to one formula is what plain Python does, on the CPU and as CUDA C++."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from support.engines import plain_search as plain
from support.engines.plain_search import Tree, constant, simplified, structure, tokens, trees
from support.refusals import refused
from warpfit import searching
from warpfit.ir import Population
from warpfit.ops import CONSTANT, OPERATORS, VARIABLE
from warpfit.parse import Parser, Placeholder, parse
from warpfit.searching import Form, Rules, SearchRequest, Units
from warpfit_server.engine.search import genome
from warpfit_server.engine.search.colony import Genomes
from warpfit_server.engine.search.composition import Composer

COLUMNS = (0, 2, 5)
#: Operators whose results are exact, and those of whose simplification there are rules.
SCALE = ("add", "mul")
EXACT = ("add", "sub", "mul", "div", "neg", "inv", "log", "exp", "abs", "min", "where", "fma")
X, Y, Z = (Tree(VARIABLE, float(column)) for column in COLUMNS)


class OwnGenes(plain.Genes):
    asked = None

    def tables(self, request):
        if self.asked is not request:
            self.asked, self.made = request, (grammar_of(request), genome.new_units(request, 6))
        return self.made

    def keeps(self, request, tree):
        return self.is_allowed(*self.tables(request), [tree])

    def simplified(self, request, tree):
        found = self.simplify(self.tables(request)[0], [tree])
        return found[0] if found else None


@pytest.fixture(scope="module")
def both():
    return OwnGenes(cuda=False), OwnGenes(cuda=True)


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def genes(request, both):
    return both[request.param == "cuda"]


def asked(operators=EXACT, form=Form.PLAIN, units=None, **rules) -> SearchRequest:
    given = {"operators": dict.fromkeys(operators, 1.0), "form": form, "units": units}
    return SearchRequest(b"", rules=Rules(**rules), max_generations=1, **given)


def grammar_of(request: SearchRequest, functions: int = 1):
    return genome.new_grammar(request, [COLUMNS] * functions)


def of(name: str, *operands: Tree) -> Tree:
    return Tree(OPERATORS[name].code, 0.0, operands)


def close(found: Tree | None, expected: Tree | None) -> bool:
    if found is None or expected is None:
        return found is expected
    codes, values = plain.flat([found])
    others, numbers = plain.flat([expected])
    return codes == others and np.allclose(values, numbers, rtol=1e-5, atol=1e-30)


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=60), st.permutations([*OPERATORS]))
def test_every_operator_is_drawn_about_as_often_as_its_weight_says(weights, order):
    given = dict(zip(order, weights, strict=False))
    request = SearchRequest(b"", operators=given, max_generations=1)
    table = grammar_of(request)[genome.ANY_OPERATOR :][:256]
    counts = np.array([np.count_nonzero(table == OPERATORS[name].code) for name in given])
    wanted = 256 * np.array([*given.values()]) / sum(given.values())
    assert counts.min() >= 1
    assert counts.sum() == 256
    few = wanted < 1
    assert (np.abs(counts - wanted)[~few] <= 1 + few.sum()).all()


def test_formulas_that_no_genome_holds_are_refused():
    refused("FORMULAS_TOO_LARGE", grammar_of, asked(max_size=genome.MOST_TOKENS + 1))


#: Numbers of all operands by arity.
NUMBERS = {1: (-2.5, -1, -0.25, 0, 0.5, 1, 3, 40), 2: (-2.5, -1, 0, 0.5, 40), 3: (-1, 0, 40)}


def test_constants_are_folded_as_numpy_computes_them(genes):
    request = asked(OPERATORS)
    for name, operator in OPERATORS.items():
        for numbers in product(NUMBERS[operator.arity], repeat=operator.arity):
            tree = of(name, *map(constant, numbers))
            # The same inside a formula, which has no value if a constant has none.
            for one in (tree, of("sub" if name == "mul" else "mul", X, tree)):
                expected, found = simplified(one, set(OPERATORS)), genes.simplified(request, one)
                assert close(found, expected), (name, numbers, found, expected)


@given(
    tree=trees(EXACT, COLUMNS), form=st.sampled_from(Form), without=st.sets(st.sampled_from(SCALE))
)
def test_formulas_are_simplified_as_in_plain_python(both, tree, form, without):
    names = {node.name for node in tokens(tree)} - {""}
    operators = [name for name in EXACT if name in names or name not in without]
    request = asked(operators, form)
    expected = simplified(tree, set(operators))
    if expected is not None and form is Form.SCALED:
        expected = plain.without_scale(expected, 2)
    results = [own.simplified(request, tree) for own in both]
    assert all(close(found, expected) for found in results)
    if expected is not None:
        again = both[0].simplified(request, results[0])
        assert len(list(tokens(again))) <= len(list(tokens(expected)))


SIMPLIFIED = [
    *("x1 + 2 - (x1 + 2)", "exp(x1) / exp(x1)", "2 + x1 + -2", "x1 * 4 * 0.25", "x1 - 3", "x1 / 4"),
    *("x1 / 0", "log(exp(x1)) * 0", "neg(neg(x1)) + 0", "x1 * 1e16", "x1 + 1 / 0", "x1 + log(-1)"),
]


def test_each_rule_of_simplification(genes):
    written = [parse(text) for text in SIMPLIFIED]
    made = [plain.trees_of(one.codes.tolist(), one.values.tolist())[0] for one in written]
    for tree in (*made, constant(math.inf), constant(math.nan)):
        assert close(genes.simplified(asked(), tree), simplified(tree, set(EXACT))), tree


@given(parts=st.lists(trees(EXACT, COLUMNS, most=5), min_size=2, max_size=4))
def test_functions_of_a_template_are_simplified_each_by_itself(both, parts):
    grammar = grammar_of(asked(), len(parts))
    expected = [simplified(part, set(EXACT)) for part in parts]
    for own in both:
        found = own.simplify(grammar, parts)
        if None in expected:
            assert found is None
        else:
            assert found is not None
            assert all(map(close, found, expected))


@pytest.mark.parametrize(
    ("tree", "both_fitted", "slope_fitted"),
    [
        (of("sub", constant(2), of("mul", of("exp", X), constant(3))), of("exp", X), None),
        (of("neg", of("mul", of("exp", X), constant(3))), of("exp", X), of("exp", X)),
        (of("div", constant(3), X), of("div", constant(3), X), of("div", constant(3), X)),
    ],
    ids=str,
)
def test_slope_and_intercept_are_taken_off(genes, tree, both_fitted, slope_fitted):
    metre = np.eye(7)[0]
    numbers = Units(np.tile(metre, (6, 1)), metre, dimensionless_constants=True)
    for units, expected in ((None, both_fitted), (numbers, slope_fitted)):
        found = genes.simplified(asked(form=Form.SCALED, units=units), tree)
        assert found == (expected or plain.without_scale(simplified(tree, set(EXACT)), 1))


RULED = ("add", "div", "exp", "sin", "where", "fma")
_NAMES = st.sampled_from(RULED)


@st.composite
def some_rules(draw):
    arguments = {
        name: tuple(draw(st.sampled_from([-1, 1, 2, 4])) for _ in OPERATORS[name].operands)
        for name in draw(st.sets(_NAMES, max_size=2))
    }
    return Rules(
        max_size=draw(st.integers(1, 30)),
        max_depth=draw(st.sampled_from([0, 0, 2, 3, 5])),
        complexities=draw(st.dictionaries(_NAMES, st.integers(1, 4), max_size=2)),
        counts=draw(st.dictionaries(_NAMES, st.integers(0, 2), max_size=2)),
        nesting=draw(st.dictionaries(st.tuples(_NAMES, _NAMES), st.integers(0, 1), max_size=3)),
        arguments=arguments,
    )


@given(tree=trees(RULED, COLUMNS), rules=some_rules())
def test_rules_are_those_of_plain_python(both, tree, rules):
    request = replace(asked(RULED), rules=rules)
    rules.check()
    assert [own.keeps(request, tree) for own in both] == [plain.keeps_rules(tree, request)] * 2


@pytest.mark.parametrize(
    ("rules", "good", "bad"),
    [
        ({"max_size": 3}, of("add", X, Y), of("add", X, of("exp", Y))),
        ({"max_depth": 2}, of("where", X, Y, Z), of("exp", of("exp", X))),
        ({"complexities": {"exp": 9}, "max_size": 9}, of("add", X, Y), of("exp", X)),
        ({"counts": {"exp": 1}}, of("exp", X), of("add", of("exp", X), of("exp", Y))),
        ({"counts": {"exp": 0}}, X, of("exp", X)),
        ({"nesting": {("exp", "exp"): 0}}, of("add", of("exp", X), of("exp", Y)),
         of("exp", of("add", X, of("exp", Y)))),
        ({"nesting": {("exp", "log"): 1}}, of("exp", of("add", of("log", X), of("log", Y))),
         of("exp", of("log", of("log", X)))),
        ({"arguments": {"where": (1, -1, 3)}}, of("where", X, of("exp", of("exp", X)), Y),
         of("where", of("exp", X), X, Y)),
        ({"arguments": {"div": (-1, 1)}}, of("div", of("exp", X), Y), of("div", Y, of("exp", X))),
    ],
    ids=str,
)  # fmt: skip
def test_each_rule_forbids_something(genes, rules, good, bad):
    request = asked(**rules)
    assert genes.keeps(request, good)
    assert not genes.keeps(request, bad)


@st.composite
def some_units(draw):
    one = st.sampled_from([0.0, 0.0, 0.0, 1.0, -1.0, 2.0, 0.5, -1.5, 1 / 3])
    exponents = draw(st.lists(one, min_size=21, max_size=21))
    used = np.zeros((6, 7))
    used[list(COLUMNS)] = np.reshape(exponents, (3, 7))
    target = None
    if draw(st.booleans()):
        target = draw(st.integers(-1, 2)) * used[0] + draw(st.integers(-1, 1)) * used[2]
    return Units(used, target, draw(st.booleans()))


def test_units_of_each_operator(genes):
    exponents = np.zeros((6, 7))
    exponents[0, 0] = exponents[2, 0] = exponents[5, 2] = 1.0
    choices = [X, Z, of("div", X, Y), constant(2.0)]
    for units in (Units(exponents), Units(exponents, exponents[0], dimensionless_constants=True)):
        request = asked(tuple(OPERATORS), units=units, max_size=200)
        for name, operator in OPERATORS.items():
            for operands in product(choices, repeat=operator.arity):
                tree = of(name, *operands)
                assert genes.keeps(request, tree) == plain.keeps_units(tree, request), tree


@pytest.mark.parametrize("inner", ["sqrt", "cbrt", "square", "cube", "inv"])
def test_units_of_long_chains_are_exact(genes, inner):
    """12 roots or powers, and their opposites, give a metre again."""
    opposite = {"sqrt": "square", "cbrt": "cube", "square": "sqrt", "cube": "cbrt"}
    request = asked(tuple(OPERATORS), units=Units(np.eye(7)[[0] * 6]), max_size=200)
    chain = X
    for name in [inner] * 12 + [opposite.get(inner, inner)] * 12:
        chain = of(name, chain)
    assert genes.keeps(request, of("add", chain, Y))
    assert inner in ("sqrt", "cbrt") or not genes.keeps(request, of("add", of("sqrt", chain), Y))


def test_units_that_nearly_agree_differ(genes):
    """The units whose exponents, times roots of primes, have the sums that are closest to 0."""
    roots = np.sqrt([2.0, 3.0, 5.0, 7.0, 11.0])
    grid = np.stack(np.meshgrid(*[np.arange(-4, 5)] * 5), axis=-1).reshape(-1, 5)
    sums = np.abs(grid @ roots)
    sums[np.abs(grid).sum(axis=1) == 0] = np.inf
    assert sums.min() < 2e-3
    for exponents in grid[np.argsort(sums)[:20]]:
        units = Units(np.vstack([np.zeros((5, 7)), [*exponents, 0, 0]]))
        assert not genes.keeps(asked(units=units), of("add", X, Z))


def test_constants_that_are_numbers_are_so_without_a_unit_of_the_target(genes):
    request = asked(units=Units(np.eye(7)[[0] * 6], None, dimensionless_constants=True))
    assert not genes.keeps(request, of("add", X, constant(2.0)))
    assert genes.keeps(request, of("mul", X, constant(2.0)))


def shuffled(tree: Tree, draw) -> Tree:
    if tree.is_constant:
        return constant(draw(st.floats(-9, 9, width=32)))
    operands = [shuffled(operand, draw) for operand in tree.operands]
    if tree.name in ("add", "mul") and draw(st.booleans()):
        operands.reverse()
    return tree._replace(operands=tuple(operands))


@given(tree=trees(EXACT, COLUMNS), data=st.data())
def test_constants_and_order_of_sums_and_products_do_not_count(both, tree, data):
    grammar, other = grammar_of(asked()), shuffled(tree, data.draw)
    assert structure(other) == structure(tree)
    assert len({own.structure_hash(grammar, [one]) for own in both for one in (tree, other)}) == 1


@given(a=trees(EXACT, COLUMNS, most=5), b=trees(EXACT, COLUMNS, most=5))
def test_structures_that_differ_have_different_hashes(both, a, b):
    grammar, alone = grammar_of(asked()), [a, b, of("neg", a), of("exp", a)]
    alone += [of(name, *pair) for name in ("add", "sub", "div") for pair in ((a, b), (b, a))]
    found = {both[0].structure_hash(grammar, [tree]) for tree in alone}
    assert len(found) == len({structure(tree) for tree in alone})
    assume(structure(a) != structure(b))
    pairs = [[a, b], [b, a]]
    hashes = [[own.structure_hash(grammar_of(asked(), 2), pair) for own in both] for pair in pairs]
    assert hashes[0][0] == hashes[0][1] != hashes[1][0] == hashes[1][1]


def assert_formulas(codes, values, grammar, operators, functions=1, columns=COLUMNS):
    assert len(codes) <= grammar[genome.WIDTH]
    made = plain.trees_of(codes.tolist(), values.tolist())
    assert len(made) == functions
    for tree in made:
        for node in tokens(tree):
            assert node.name in operators or node.code in (VARIABLE, CONSTANT)
            assert node.code != VARIABLE or node.value in columns
            assert node.code != CONSTANT or abs(node.value) <= 1e15
    return made


@given(rules=some_rules(), units=st.none() | some_units(), form=st.sampled_from(Form),
       functions=st.sampled_from([1, 1, 2, 3]), ternary=st.booleans(),
       seed=st.integers(0, 2**64 - 1), tries=st.sampled_from([1, 3]))  # fmt: skip
def test_children_are_allowed(both, rules, units, form, functions, ternary, seed, tries):
    """A population of one island and a small one beside it, bred for some generations.

    What is bred as CUDA C++ has the same tokens, and constants that differ by rounding.
    """
    assume(functions == 1 or functions <= rules.max_size)
    operators = ("where", "fma") if ternary else (*RULED, "mul")
    form, units = (form, units) if functions == 1 else (Form.PLAIN, None)
    request = replace(asked(operators, form, units), rules=rules)
    grammar, own_units = grammar_of(request, functions), genome.new_units(request, 6)
    formulas, width = 12, int(grammar[genome.WIDTH])
    results = []
    for own in both:
        parents, children = plain.rows_of(grammar, formulas), plain.rows_of(grammar, formulas)
        codes, values, lengths = parents
        tried, work = np.zeros(1 << 10, np.uint64), np.zeros(width, np.int32)
        words, hashes, made = np.zeros(width, np.uint64), np.zeros(formulas, np.uint64), []
        for formula in range(formulas):
            lengths[formula] = own.call(
                "first_formula", grammar, own_units, own.random(seed, 0, formula),
                codes.reshape(-1), values.reshape(-1), formula * width, work,
            )  # fmt: skip
        scores = np.arange(formulas, dtype=np.float32)
        for generation in range(1, 4):
            before = [array.copy() for array in parents]
            for formula in range(formulas):
                children[2][formula] = own.call(
                    "breed", grammar, own_units, own.random(seed, generation, formula),
                    parents[0].reshape(-1), parents[1].reshape(-1), parents[2], scores, formulas,
                    4, formula, children[0].reshape(-1), children[1].reshape(-1), hashes, tried,
                    np.uint64(len(tried) - 1), tries, work, words,
                )  # fmt: skip
            for array, expected in zip(parents, before, strict=True):
                np.testing.assert_array_equal(array, expected)
            marks = []
            for row, length in enumerate(children[2].tolist()):
                if not length:
                    continue
                tokens_of = children[0][row, :length], children[1][row, :length]
                found = assert_formulas(*tokens_of, grammar, operators, functions)
                assert all(plain.keeps_rules(tree, request) for tree in found)
                assert all(plain.keeps_units(tree, request) for tree in found)
                word = own.structure_hash(grammar, found)
                assert hashes[row] == word
                if tries == 1 or CONSTANT not in tokens_of[0]:
                    assert tried[word & len(tried) - 1] & np.uint64((1 << 44) - 1) != word >> 20
                marks.append(word)
            for word in marks:
                place = word & len(tried) - 1
                mark = own.call("tried_mark", np.uint64(word), np.uint64(generation))
                tried[place] = max(int(tried[place]), mark)
            parents = [array.copy() for array in children]
            used = np.arange(width) < parents[2][:, None]
            made.append((parents[2], *(np.where(used, array, 0) for array in parents[:2])))
        results.append(made)
    for (lengths, codes, values), (others, other_codes, numbers) in zip(*results, strict=True):
        differ = (lengths != others) | (codes != other_codes).any(axis=1)
        close = np.isclose(values, numbers, rtol=1e-4, atol=1e-5)[~differ]
        # Rounding errors decide now and then whether a constant is 1, and taken off, or 1e-16: in
        # one formula, of which other constants follow.
        assert np.count_nonzero(differ) <= 1
        assert np.count_nonzero(~close.all(axis=1)) <= 1
        if differ.any() or not close.all():
            break


def test_parents_are_the_best_of_one_to_four():
    own, scores = plain.Genes(cuda=False), np.random.default_rng(0).permutation(1000) / 1000
    state = own.random(1)
    chosen = np.array([own.call("tournament", state, scores, 500, 400) for _ in range(2000)])
    assert ((chosen >= 500) & (chosen < 900)).all()
    # Of k formulas the best one is better than the part k / (k + 1) of all.
    ranks = np.searchsorted(np.sort(scores[500:900]), scores[chosen]) / 400
    assert abs(ranks.mean() - np.mean([1 / 2, 1 / 3, 1 / 4, 1 / 5])) < 0.03


def test_later_marks_of_structures_stay(genes):
    """The last generation that has a number of its own is that of all later ones."""
    generations = (0, 1, 5, (1 << 20) - 1, 1 << 20, 1 << 40)
    own = np.uint64(7 << 30)
    marks = [genes.call("tried_mark", own, np.uint64(generation)) for generation in generations]
    assert marks == sorted(marks)
    assert len(set(marks)) == 4
    assert {mark & (1 << 44) - 1 for mark in marks} == {7 << 10}


#: A function of one's own of two operands, which it uses three times.
OWN = parse("x2 + x1*x1")
ARITIES = (2, 1)


@pytest.mark.parametrize(
    ("form", "functions", "wanted"),
    [
        # f has two operands, g has one; the genome holds f, g and a number for each parameter.
        ("f(x1, x2) + g(x1)", ("x1*x2", "sin(x1)"), "x1*x2 + sin(x1)"),
        ("f(x2, x1) * f(x1, x1)", ("x1 - x2*x1", "x1"), "(x2 - x1*x2) * (x1 - x1*x1)"),
        ("g(f(x1, g(x3))) * p1", ("x2 + x1", "sin(x1) + x1"),
         "(sin(sin(x3) + x3 + x1) + (sin(x3) + x3 + x1)) * 7.5"),
        ("twice(f(x1, x1), p1) + g(0.3)", ("sin(x1)", "x1"),
         "7.5 + sin(x1)*sin(x1) + 0.3"),
        ("g(x1)", ("x1", "twice(x1, sin(x1))"), "sin(x1) + x1*x1"),
        (None, ("twice(x3, twice(x1, x2))",), "x2 + x1*x1 + x3*x3"),
        # A formula that would be too long has one token.
        ("g(g(g(g(g(g(g(g(g(x1)))))))))", ("x1", "x1*x1*x1"), None),
    ],
)  # fmt: skip
def test_calls_are_written_out(form, functions, wanted):
    rows = {
        "f": (2, searching.FIRST_CALL),
        "g": (1, searching.FIRST_CALL + 1),
        "twice": (2, searching.FIRST_DEFINITION),
    }
    names = {name: Placeholder(name, *row) for name, row in rows.items()}
    template = None
    if form is not None:
        codes, values = Parser((), names).tokens(form)
        template = searching.Template(np.array(codes, np.uint8), np.array(values), ARITIES)
    request = SearchRequest(
        bytes(32), operators={"add": 1.0, "twice": 1.0}, rules=Rules(max_size=40),
        definitions={"twice": OWN}, template=template,
    )  # fmt: skip
    parts = [Parser((), names).tokens(text) for text in functions]
    parts += [([CONSTANT], [7.5])] * (template.parameters if template else 0)
    columns = [[0, 1], [0], []][: len(parts)] if template else [[0, 1, 2]]
    grammar = genome.new_grammar(request, columns)
    codes, values = ([token for part in parts for token in part[k]] for k in range(2))
    assert genome.part_lengths(grammar, np.array(codes)) == [len(part[0]) for part in parts]
    population = Population(
        np.array(codes, np.uint8), np.array(values), np.array([len(codes)], np.uint32)
    )
    composer = Composer(request, grammar)
    found = composer.composed(Genomes.of(population, max(len(codes), 3)))
    if wanted is None:
        assert len(found.codes) == 1
        return
    assert found.codes.tolist() == parse(wanted).codes.tolist()
    np.testing.assert_allclose(found.values, parse(wanted).values)


def test_a_grammar_holds_as_many_rules_of_nesting_as_a_request():
    request = asked(nesting=dict.fromkeys([*product(EXACT, EXACT)][: searching.MOST_NESTINGS], 1))
    request.rules.check()
    assert grammar_of(request)[genome.NESTINGS] == searching.MOST_NESTINGS
