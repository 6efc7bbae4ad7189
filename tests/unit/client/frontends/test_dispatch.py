"""Objects that are expressions, the numbers in them, and trees as lists of nodes."""

from decimal import Decimal
from fractions import Fraction
from importlib import import_module

import numpy as np
import pytest

import warpfit
from warpfit.errors import InvalidArgumentError, ParseError
from warpfit.frontends import as_population, as_program, from_prefix
from warpfit.frontends.operon import to_operon, to_operon_infix
from warpfit.frontends.pysr import from_pysr
from warpfit.ir import Program
from warpfit.losses import as_loss
from warpfit.parse import define, parse


@pytest.mark.parametrize("thing", [None, 3j, b"x1", ["x1"], {"x1"}, object()])
def test_other_things_are_refused(thing):
    with pytest.raises(InvalidArgumentError, match=type(thing).__name__) as caught:
        as_program(thing)
    assert caught.value.reason == "UNKNOWN_EXPRESSION_TYPE"
    assert "SymPy" in caught.value.remedy


@pytest.mark.parametrize("library", ["sympy", "gplearn", "pysr", "deap"])
@pytest.mark.parametrize("given", ["add(x1, x2)", None, 3])
def test_a_front_end_refuses_what_is_not_of_its_library(library, given):
    if library == "sympy":
        pytest.importorskip("sympy")
    reader = getattr(import_module(f"warpfit.frontends.{library}"), f"from_{library}")
    if library == "pysr" and isinstance(given, str):
        given = object()
    with pytest.raises(InvalidArgumentError, match=type(given).__name__) as caught:
        reader(given)
    assert caught.value.reason == "UNKNOWN_EXPRESSION_TYPE"
    assert ("warpfit.parse" in caught.value.remedy) == isinstance(given, str)


def test_lists_of_mixed_expressions():
    sympy = pytest.importorskip("sympy")
    mixed = ["x1 * b", Program.parameter(0), sympy.Symbol("b")]
    assert list(map(str, as_population(mixed, ["a", "b"]))) == ["x1 * x2", "p1", "x2"]
    assert list(as_population(iter(["x1"]))) == [Program.variable(0)]


@pytest.mark.parametrize(
    ("bad", "reason"), [("x1 +", "EXPECTED_OPERAND"), (None, "UNKNOWN_EXPRESSION_TYPE")]
)
def test_errors_name_the_expression(bad, reason):
    with pytest.raises(InvalidArgumentError, match="expression 2") as caught:
        as_population(["x1", "x2", bad])
    assert (caught.value.expression, caught.value.reason) == (2, reason)


def _sympy(number):
    sympy = pytest.importorskip("sympy")
    return as_program(sympy.Symbol("x1") * sympy.Rational(number))


def _deap(number):
    gp = pytest.importorskip("deap.gp")
    return as_program(gp.PrimitiveTree([gp.Terminal(number, False, object)]))


def _operon(number):
    pyoperon = pytest.importorskip("pyoperon")
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
    with pytest.raises(InvalidArgumentError, match=r"cannot hold|can hold") as caught:
        reader(number)
    error = caught.value
    assert error.reason == "OVERFLOW"
    assert error.remedy
    if isinstance(error, ParseError):
        assert "^" in str(error).splitlines()[-1]


@pytest.mark.parametrize("thing", ["x1", Program.variable(0), {"x1"}, {"x1": 1}])
def test_what_is_no_list_is_refused(thing):
    with pytest.raises(InvalidArgumentError) as caught:
        as_population(thing)
    assert caught.value.reason == "NOT_A_LIST"


# ---------------------------------------------------------------------------------- lists of nodes


@pytest.mark.parametrize(
    ("tree", "names", "wanted"),
    [
        (["add", "x1", "mul", 2.5, "p1"], (), "x1 + 2.5*p1"),
        (["+", "flow rate", "t"], ("flow rate", "t"), "x1 + x2"),
        (["sin", "-", "x1", 3], (), "sin(x1 - 3)"),
        (["x2"], (), "x2"),
        (["where", "lt", "x1", 0, "neg", "x1", "x1"], (), "where(x1 < 0, -x1, x1)"),
        (["mul", "pi", "sin"], ("sin",), "pi*x1"),  # a column's name comes first
    ],
)
def test_nodes_are_those_of_the_text(tree, names, wanted):
    assert list(from_prefix([tree, tree], names)) == [parse(wanted)] * 2


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        (["add", "x1"], "STACK_LEFTOVERS"),
        ([], "STACK_LEFTOVERS"),
        (["foo", "x1"], "UNKNOWN_NAME"),
        (["x1 + x2"], "UNKNOWN_NODE"),
        ([None], "MISSING_VALUE"),
        ([["x1"]], "NOT_NUMBERS"),
    ],
)
def test_other_nodes_are_refused_with_their_tree(tree, reason):
    with pytest.raises(warpfit.InvalidArgumentError) as caught:
        from_prefix([["x1"], tree])
    assert caught.value.reason == reason
    assert caught.value.expression == 1


@pytest.mark.parametrize(
    "nodes", [["add", "x1", "x2"], ["x1"], [2.5], ["sin", 1.0], [["x1"], "x2"]]
)
def test_one_tree_in_the_place_of_a_list_of_trees_is_refused(nodes):
    with pytest.raises(warpfit.InvalidArgumentError, match="Give a list of trees"):
        from_prefix(nodes)
