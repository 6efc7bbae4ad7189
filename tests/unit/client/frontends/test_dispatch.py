"""Objects that are expressions, the numbers in them, and trees as lists of nodes."""

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pyoperon
import pytest
import sympy
from deap import gp

from support.refusals import refused
from warpfit.errors import ParseError
from warpfit.frontends import as_population, as_program, from_prefix
from warpfit.frontends.operon import to_operon, to_operon_infix
from warpfit.frontends.pysr import from_pysr
from warpfit.ir import Program
from warpfit.losses import as_loss
from warpfit.parse import define, parse


def test_lists_of_mixed_expressions():
    mixed = ["x1 * b", Program.parameter(0), sympy.Symbol("b")]
    assert list(map(str, as_population(mixed, ["a", "b"]))) == ["x1 * x2", "p1", "x2"]
    assert list(as_population(iter(["x1"]))) == [Program.variable(0)]


@pytest.mark.parametrize(
    ("why", "read", "given"),
    [
        *(
            (f"UNKNOWN_EXPRESSION_TYPE: .*{type(thing).__name__}.*SymPy", as_program, thing)
            for thing in (None, 3j, b"x1", ["x1"], {"x1"}, object())
        ),
        ("EXPECTED_OPERAND: .*expression 2", as_population, ["x1", "x2", "x1 +"]),
        ("UNKNOWN_EXPRESSION_TYPE: .*expression 2", as_population, ["x1", "x2", None]),
        *(
            ("NOT_A_LIST", as_population, thing)
            for thing in ("x1", Program.variable(0), {"x1"}, {"x1": 1})
        ),
        *(
            (f"{reason}: .*expression 1", from_prefix, [["x1"], tree])
            for reason, tree in (
                ("STACK_LEFTOVERS", ["add", "x1"]),
                ("STACK_LEFTOVERS", []),
                ("UNKNOWN_NAME", ["foo", "x1"]),
                ("UNKNOWN_NODE", ["x1 + x2"]),
                ("MISSING_VALUE", [None]),
                ("NOT_NUMBERS", [["x1"]]),
            )
        ),
        *(
            ("Give a list of trees", from_prefix, nodes)
            for nodes in (["add", "x1", "x2"], ["x1"], [2.5], ["sin", 1.0], [["x1"], "x2"])
        ),
    ],
)
def test_other_things_are_refused_with_their_place(why, read, given):
    refused(why, read, given)


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
