"""pyoperon trees against pyoperon's own evaluator, which computes in float32."""

import random
from types import SimpleNamespace

import numpy as np
import pytest

import warpfit
from support.refusals import refused
from warpfit.expressions import reference
from warpfit.frontends.operon import TYPES, from_operon, to_operon, to_operon_infix
from warpfit.ops import OPERATORS

pyoperon = pytest.importorskip("pyoperon")

#: pyoperon's dataset does not keep its array alive.
ARRAY = np.asfortranarray(np.random.default_rng(0).uniform(0.2, 2.0, (40, 3)).astype(np.float32))
DATASET = pyoperon.Dataset(ARRAY)
NAMES = ("X1", "X2", "X3")
COLUMNS = ARRAY.T.astype(np.float64)
#: Poles and steps would amplify float32's rounding; Operon's lesser of NaN and 1 is 1.
SMOOTH = [kind for kind in TYPES if kind not in ("Floor", "Ceil", "Tan", "Fmin", "Fmax")]
EVERYWHERE = [*("Add", "Sub", "Mul", "Sin", "Cos", "Tanh", "Square", "Abs"), *["Fmin", "Fmax"] * 3]
WRITTEN = [*("Add", "Sub", "Mul", "Div", "Pow"), *("Sin", "Cos", "Exp", "Abs", "Sqrt", "Tanh")]
HASHES = {variable.Name: variable.Hash for variable in DATASET.Variables}


def values(tree):
    return np.asarray(pyoperon.Evaluate(tree, DATASET, pyoperon.Range(0, len(ARRAY))))


def random_tree(rng, kinds, depth=3):
    """A tree with weights on every variable and factors on some functions."""

    def build(depth):
        if depth == 0 or rng.random() < 0.25:
            if rng.random() < 0.3:
                node = pyoperon.Node.Constant(rng.uniform(0.5, 2.0))
            else:
                node = pyoperon.Node.Variable(rng.choice([1.0, rng.uniform(-2.0, 2.0)]))
                hashed = rng.choice(list(HASHES.values()))
                node.HashValue = node.CalculatedHashValue = hashed
            node.Optimize = rng.random() < 0.6
            return [node]
        kind = rng.choice(kinds)
        node = pyoperon.Node(getattr(pyoperon.NodeType, kind))
        if kind in ("Add", "Mul"):
            node.Arity = rng.choice([2, 3])
        if kind in ("Sub", "Div"):
            node.Arity = rng.choice([1, 2, 3])
        # pyoperon 0.6.2 applies the factors of some nodes with several operands more than once.
        if rng.random() < 0.2 and node.Arity == 1:
            node.Value = rng.uniform(-1.5, 1.5)
            node.Optimize = rng.random() < 0.5
        return [*(part for _ in range(node.Arity) for part in build(depth - 1)), node]

    return pyoperon.Tree(build(depth)).UpdateNodes()


def assert_close(got, wanted):
    """Equal to float32 accuracy on rows where both are numbers; rounding decides about the rest."""
    with np.errstate(all="ignore"):
        both = np.isfinite(got) & np.isfinite(wanted) & (np.abs(wanted) < 1e6)
    np.testing.assert_allclose(got[both], wanted[both], rtol=2e-2, atol=2e-3)
    if both.any():
        error = np.abs(got[both] - wanted[both]) / (1e-3 + np.abs(wanted[both]))
        assert np.median(error) < 1e-3


@pytest.mark.parametrize("seed", range(120))
def test_random_trees_there_and_back(seed):
    """As trees, and as the texts that both packages write and read."""
    kinds = (SMOOTH, EVERYWHERE, WRITTEN)[seed % 3]
    tree = random_tree(random.Random(seed), kinds)
    program, parameters = from_operon(tree, DATASET)
    np.testing.assert_array_equal(parameters, tree.GetCoefficients())
    assert_close(reference.evaluate_program(program, COLUMNS, parameters), values(tree))
    back = to_operon(program, DATASET, parameters)
    # A coefficient stands before its node in a program; in a tree the last operand comes first.
    assert sorted(back.GetCoefficients()) == sorted(tree.GetCoefficients())
    assert_close(values(back), values(tree))
    if kinds is WRITTEN:
        read = warpfit.parse(pyoperon.InfixFormatter.Format(tree, DATASET, 9), NAMES)
        assert_close(reference.evaluate_program(read, COLUMNS), values(tree))
        text = to_operon_infix(program, NAMES, parameters)
        parsed = pyoperon.InfixParser.Parse(text, HASHES)
        assert_close(reference.evaluate_program(program, COLUMNS, parameters), values(parsed))


@pytest.mark.parametrize("kind", sorted(TYPES))
def test_every_type_of_node(kind):
    operator = OPERATORS[TYPES[kind]]
    operands = [warpfit.Program.variable(index) for index in range(operator.arity)]
    program = warpfit.Program.apply(operator, *operands)
    tree = to_operon(program, DATASET)
    assert [node.Type.name for node in tree.Nodes][-1] == kind
    np.testing.assert_allclose(
        values(tree), reference.evaluate_program(program, COLUMNS), rtol=1e-4, atol=1e-5
    )
    again, parameters = from_operon(tree, DATASET.Variables)
    assert (again, len(parameters)) == (program, 0)


@pytest.mark.parametrize(
    "text", [*("-x1", "inv(x2)", "x1 - (x2 - x3)", "x1 / x2 / x3", "2.5"), "square(x1)", "cbrt(x1)"]
)
def test_forms_that_operon_writes_in_another_way(text):
    program = warpfit.parse(text)
    tree = to_operon(program, DATASET)
    assert from_operon(tree, DATASET)[0] == program
    parsed = pyoperon.InfixParser.Parse(to_operon_infix(program, NAMES), HASHES)
    for made in (tree, parsed):
        np.testing.assert_allclose(
            values(made), reference.evaluate_program(program, COLUMNS), rtol=1e-5
        )


def test_parameters_are_the_coefficients_that_operon_optimises():
    program = warpfit.parse("p2*x1 + exp(p1*x2) + 3*p2")
    tree = to_operon(program, DATASET, [0.25, 1.5])
    assert sorted(tree.GetCoefficients()) == [0.25, 1.5, 1.5]
    again, parameters = from_operon(tree, DATASET)
    np.testing.assert_allclose(
        reference.evaluate_program(again, COLUMNS, parameters),
        reference.evaluate_program(program, COLUMNS, [0.25, 1.5]),
    )
    tree.SetCoefficients((parameters * 2).astype(np.float32))
    np.testing.assert_array_equal(from_operon(tree, DATASET)[1], parameters * 2)


@pytest.mark.parametrize(
    ("text", "reason", "how"),
    [
        *((text, "UNKNOWN_FUNCTION", "tree") for text in ("log2(x1)", "x1 < x2", "cube(x1)")),
        ("logabs(x1)", "logabs", "text"),
        *(("x4", "LENGTH_MISMATCH: .*variables", how) for how in ("tree", "text")),
        *(("p1", "LENGTH_MISMATCH: .*parameters", how) for how in ("tree", "text")),
    ],
)
def test_what_operon_has_not(text, reason, how):
    convert, of = (to_operon, DATASET) if how == "tree" else (to_operon_infix, NAMES)
    refused(reason, convert, warpfit.parse(text), of)


def test_a_tree_of_the_estimator_is_converted_with_its_variables():
    from pyoperon.sklearn import SymbolicRegressor

    X = np.random.default_rng(0).uniform(0.5, 2.0, (60, 3))
    theirs = SymbolicRegressor(
        allowed_symbols="add,mul,constant,variable", max_length=10, population_size=40,
        generations=3, max_evaluations=1000, n_threads=1, random_state=1,
    )  # fmt: skip
    theirs.fit(X, 2.0 * X[:, 2] + X[:, 0] * X[:, 1])
    program, start = from_operon(theirs.model_, theirs.variables_)
    ours = program.bind(start).to_numpy()(X)
    np.testing.assert_allclose(ours, theirs.evaluate_model(theirs.model_, X), rtol=1e-4)


def test_what_warpfit_has_not():
    tree = to_operon(warpfit.parse("x1"), DATASET)
    refused("UNKNOWN_NAME: .*variable", from_operon, tree, [SimpleNamespace(Hash=1, Index=0)])
    node = SimpleNamespace(
        Optimize=False, IsConstant=False, IsVariable=False, Value=1.0, Arity=0,
        Type=SimpleNamespace(name="Dyn"),
    )  # fmt: skip
    refused("Dyn", from_operon, SimpleNamespace(Nodes=[node]), DATASET)
    for variables in (None, 3, ["x1"]):
        refused("variables_ of pyoperon's estimator", from_operon, tree, variables)
