"""Objects that are expressions, the numbers in them, trees as lists of nodes; PySR and Operon."""

import contextlib
import inspect
import random
import time
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pyoperon
import pytest
import sympy
from deap import gp

import warpfit
from support.refusals import refused
from warpfit.errors import ParseError
from warpfit.expressions import reference
from warpfit.frontends import as_population, as_program, from_prefix
from warpfit.frontends.deap import from_deap
from warpfit.frontends.gplearn import from_gplearn
from warpfit.frontends.operon import TYPES, from_operon, to_operon, to_operon_infix
from warpfit.frontends.pysr import FUNCTIONS, from_pysr
from warpfit.frontends.sympy import from_sympy
from warpfit.ir import Program
from warpfit.losses import as_loss
from warpfit.ops import OPERATORS
from warpfit.parse import define, parse


def test_lists_of_mixed_expressions():
    mixed = ["x1 * b", Program.parameter(0), sympy.Symbol("b")]
    assert list(map(str, as_population(mixed, ["a", "b"]))) == ["x1 * x2", "p1", "x2"]
    assert list(as_population(iter(["x1"]))) == [Program.variable(0)]


def test_other_things_are_refused_with_their_place():
    for thing in (None, 3j, ["x1"]):
        refused(f"TYPE: .*{type(thing).__name__}.*SymPy", as_program, thing)
    for read in (from_sympy, from_gplearn, from_deap, from_pysr):
        for thing in (None, 3):
            refused(f"UNKNOWN_EXPRESSION_TYPE: .*{type(thing).__name__} .*Give ", read, thing)
        if read is not from_pysr:
            refused("UNKNOWN_EXPRESSION_TYPE: .*str .*warpfit.parse", read, "add(x1, x2)")
    refused("EXPECTED_OPERAND: .*expression 2", as_population, ["x1", "x2", "x1 +"])
    refused("UNKNOWN_EXPRESSION_TYPE: .*expression 2", as_population, ["x1", "x2", None])
    for thing in ("x1", Program.variable(0), {"x1"}, {"x1": 1}):
        refused("NOT_A_LIST", as_population, thing)
    for reason, tree in (
        *(("STACK_LEFTOVERS", ["add", "x1"]), ("STACK_LEFTOVERS", [])),
        *(("UNKNOWN_NAME", ["foo", "x1"]), ("UNKNOWN_NODE", ["x1 + x2"])),
        *(("MISSING_VALUE", [None]), ("NOT_NUMBERS", [["x1"]])),
    ):
        refused(f"{reason}: .*expression 1", from_prefix, [["x1"], tree])
    for nodes in (["add", "x1", "x2"], [2.5], [["x1"], "x2"]):
        refused("Give a list of trees", from_prefix, nodes)


def _sympy(number):
    return as_program(sympy.Symbol("x1") * sympy.Rational(number))


def _deap(number):
    return as_program(gp.PrimitiveTree([gp.Terminal(number, False, object)]))


def _operon(number):
    program = parse("x1 + x2 * #0000000000000001" if number < 1 else "x1 + x2 * 1e300")
    to_operon(program, pyoperon.Dataset(np.ones((2, 2), np.float32, order="F")))


def _operon_text(number):
    to_operon_infix(parse("p1 * x1"), ["a"], [1e300 if number > 1 else 1e-300])


LARGE = Fraction(10) ** 400
READERS = {
    **{"text": lambda n: parse(f"x1 + 1e{_exponent(n)}*2")},
    **{"own function": lambda n: define("too_far", f"a + 2.5e{_exponent(n)}")},
    **{"loss": lambda n: as_loss(f"abs(d)*-2.5e{_exponent(n)}")},
    **{"PySR": lambda n: from_pysr(f"sin(x0 - 1.5f{_exponent(n)})")},
    **{"digits": lambda n: parse(f"x1*{n.numerator}.0" if n > 1 else f"x1 + 0.{'0' * 400}1")},
    **{"SymPy": _sympy, "DEAP": _deap, "DEAP whole": lambda n: _deap(int(n) if n > 1 else n)},
    **{"DEAP decimal": lambda n: _deap(Decimal(f"-1e{_exponent(n)}"))},
    **{"Operon": _operon, "Operon text": _operon_text, "constant": Program.constant},
}


def _exponent(number):
    return 400 if number > 1 else -400


@pytest.mark.parametrize("number", [LARGE, 1 / LARGE], ids=["large", "small"])
@pytest.mark.parametrize("reader", READERS.values(), ids=list(READERS))
def test_numbers_that_their_type_cannot_hold_are_refused(reader, number):
    error = refused("OVERFLOW: .*(cannot hold|can hold)", reader, number)
    if isinstance(error, ParseError):
        assert "^" in str(error).splitlines()[-1]


def test_nodes_are_those_of_the_text():
    for tree, names, wanted in (
        (["add", "x1", "mul", 2.5, "p1"], (), "x1 + 2.5*p1"),
        (["+", "flow rate", "t"], ("flow rate", "t"), "x1 + x2"),
        (["sin", "-", "x1", 3], (), "sin(x1 - 3)"),
        (["where", "lt", "x1", 0, "neg", "x1", "x1"], (), "where(x1 < 0, -x1, x1)"),
        (["mul", "pi", "sin"], ("sin",), "pi*x1"),  # a column's name comes first
    ):
        assert list(from_prefix([tree, tree], names)) == [parse(wanted)] * 2


def test_names_numbers_and_dialects():
    assert str(from_pysr("x0 - x2")) == "x1 - x3"
    assert str(from_pysr("x₁ * x₃", first=1)) == "x1 * x3"
    assert str(from_pysr("cos(age) + x0", ("x0", "age"))) == "cos(x2) + x1"
    assert str(from_pysr("2.5f-1 * x0 + 1.0f0")) == "0.25 * x1 + 1"
    assert str(from_pysr("-x0 ^ 2.0 + -0.5")) == "-x1 ^ 2.0 - 0.5"
    assert str(from_pysr("cond(cond(x0, x1), x2)")) == ("where(where(x1 > 0, x2, 0) > 0, x3, 0)")


OF_SIZES = (np.sqrt, np.log, np.log2, np.log10, np.log1p)
ARCS = (np.arcsin, np.arccos, np.arctan)
#: What the functions compute that mean something else here, or are called otherwise.
PRINTED = {
    **{"cond": lambda a, b: np.where(a > 0, b, 0), "logical_or": lambda a, b: (a > 0) | (b > 0)},
    **{"logical_and": lambda a, b: (a > 0) & (b > 0), "sinc": np.sinc},
    **{"atanh_clip": lambda a: np.arctanh(np.mod(a + 1, 2) - 1), "mult": np.multiply},
    **{name: getattr(np, name) for name in ("less", "greater", "greater_equal", "less_equal")},
    **{"plus": np.add, "muladd": lambda a, b, c: a * b + c, "abs2": np.square},
    # Base.clamp, also where the lower bound is above the upper one.
    "clamp": lambda a, b, c: np.where(a > c, c, np.where(a < b, b, a)),
    **{f"{f.__name__}_abs": lambda a, f=f: f(np.abs(a)) for f in OF_SIZES},
    **{"pow_abs": lambda a, b: np.abs(a) ** b, "acosh_abs": lambda a: np.arccosh(np.abs(a) + 1)},
    **{"safe_pow": np.power, "safe_log": np.log, "safe_sqrt": np.sqrt, "safe_acosh": np.arccosh},
    "mod1": lambda a, b: np.where(np.mod(a, b) == 0, b, np.mod(a, b)),
    **{"fld": np.floor_divide, "cld": lambda a, b: -np.floor_divide(-a, b), "rem": np.fmod},
    **{"flipsign": lambda a, b: np.where(np.signbit(b), -a, a), "identity": lambda a: a},
    **{"fourthroot": lambda a: a**0.25, "tanpi": lambda a: np.tan(np.pi * np.fmod(a, 1))},
    **{f"{f.__name__}d": lambda a, f=f: f(np.deg2rad(a)) for f in (np.sin, np.cos, np.tan)},
    **{f"a{f.__name__[3:]}d": lambda a, f=f: np.rad2deg(f(a)) for f in ARCS},
}


@pytest.mark.parametrize("name", sorted({*FUNCTIONS, *PRINTED}))
def test_printed_functions_are_what_julia_computes(name):
    function = PRINTED[name]
    names = {} if hasattr(function, "nin") else inspect.signature(function).parameters
    operands = getattr(function, "nin", 0) or len(names.keys() - {"f"})
    rng = np.random.default_rng(operands)
    ordinary = rng.uniform(-3, 3, (operands, 400))
    edges = rng.choice([0.5, 1.0, -1.5, 2.5, -2.0, 0.1, -0.3, 7.0, 1e9, 123.456], (operands, 400))
    columns = np.concatenate([ordinary, edges], axis=1)
    text = f"{name}({', '.join(f'x{k}' for k in range(operands))})"
    with np.errstate(all="ignore"):
        wanted = np.asarray(function(*columns), dtype=float)
    got = reference.evaluate_program(from_pysr(text), columns)
    kept = np.abs(wanted) < 1e12  # but at poles that rounded multiples of pi miss
    assert kept.mean() > 0.1
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
    far = {"sind": 1e-6, "cosd": 1e-6, "tand": 1e-6, "tanpi": 1e-12}.get(name, 1e-13)
    np.testing.assert_allclose(got[kept], wanted[kept], rtol=far, atol=max(far, 1e-14))


def test_multiples_of_pi_and_conditions_are_exact():
    whole = np.array([[1.0, -2.0, 12345.0, 1e15]])
    for text in ("sinpi(x0)", "cospi(x0 + 0.5)", "tanpi(x0)", "sinc(x0)"):
        np.testing.assert_array_equal(reference.evaluate_program(from_pysr(text), whole), 0.0)
    rows = np.array([[1.0, -1.0, 0.0], [-1.0] * 3])
    got = reference.evaluate_program(from_pysr("cond(x0, log(x1))"), rows)
    assert np.isnan(got).tolist() == [True, False, False]


def test_errors_point_into_the_text():
    for text, reason in (
        *(("cond(x0)", "WRONG_ARITY"), ("cond(x0, x1", "UNBALANCED")),
        ("besselj(x0)", "UNKNOWN_FUNCTION"),
    ):
        assert "^" in str(refused(reason, from_pysr, text))


@pytest.mark.parametrize("text", ["1" * 100_000, "1." + "1" * 100_000, "x" + "1" * 100_000])
def test_long_runs_of_digits_take_no_time_and_end_in_no_error_of_python(text):
    began = time.monotonic()
    with contextlib.suppress(ParseError):
        from_pysr(text)
    assert time.monotonic() - began < 5


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
    wanted = reference.evaluate_program(program, COLUMNS)
    np.testing.assert_allclose(values(tree), wanted, rtol=1e-4, atol=1e-5)
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
    wanted = reference.evaluate_program(program, COLUMNS)
    for made in (tree, parsed):
        np.testing.assert_allclose(values(made), wanted, rtol=1e-5)


def test_parameters_are_the_coefficients_that_operon_optimises():
    program = warpfit.parse("p2*x1 + exp(p1*x2) + 3*p2")
    tree = to_operon(program, DATASET, [0.25, 1.5])
    assert sorted(tree.GetCoefficients()) == [0.25, 1.5, 1.5]
    again, parameters = from_operon(tree, DATASET)
    pairs = (again, parameters), (program, [0.25, 1.5])
    computed = (reference.evaluate_program(one, COLUMNS, vector) for one, vector in pairs)
    np.testing.assert_allclose(*computed)
    tree.SetCoefficients((parameters * 2).astype(np.float32))
    np.testing.assert_array_equal(from_operon(tree, DATASET)[1], parameters * 2)


def test_what_operon_has_not():
    for text, reason, how in (
        *((text, "UNKNOWN_FUNCTION", "tree") for text in ("log2(x1)", "x1 < x2", "cube(x1)")),
        ("logabs(x1)", "logabs", "text"),
        *(("x4", "LENGTH_MISMATCH: .*variables", how) for how in ("tree", "text")),
        *(("p1", "LENGTH_MISMATCH: .*parameters", how) for how in ("tree", "text")),
    ):
        convert, of = (to_operon, DATASET) if how == "tree" else (to_operon_infix, NAMES)
        refused(reason, convert, warpfit.parse(text), of)


def test_a_tree_of_the_estimator_is_converted_with_its_variables():
    from pyoperon.sklearn import SymbolicRegressor

    X = np.random.default_rng(0).uniform(0.5, 2.0, (60, 3))
    few = {"population_size": 40, "generations": 3, "n_threads": 1, "random_state": 1}
    theirs = SymbolicRegressor(allowed_symbols="add,mul,constant,variable", max_length=10, **few)
    theirs.fit(X, 2.0 * X[:, 2] + X[:, 0] * X[:, 1])
    program, start = from_operon(theirs.model_, theirs.variables_)
    ours = program.bind(start).to_numpy()(X)
    np.testing.assert_allclose(ours, theirs.evaluate_model(theirs.model_, X), rtol=1e-4)


def test_what_warpfit_has_not():
    tree = to_operon(warpfit.parse("x1"), DATASET)
    refused("UNKNOWN_NAME: .*variable", from_operon, tree, [SimpleNamespace(Hash=1, Index=0)])
    no = dict.fromkeys(("Optimize", "IsConstant", "IsVariable"), False)
    node = SimpleNamespace(**no, Value=1.0, Arity=0, Type=SimpleNamespace(name="Dyn"))
    refused("Dyn", from_operon, SimpleNamespace(Nodes=[node]), DATASET)
    for variables in (None, 3, ["x1"]):
        refused("variables_ of pyoperon's estimator", from_operon, tree, variables)
