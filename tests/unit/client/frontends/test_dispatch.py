"""What counts as an expression, and what it costs to import."""

import pytest

from warpfit.errors import InvalidArgumentError
from warpfit.frontends import as_population, as_program
from warpfit.ir import Program


def test_programs_and_texts():
    program = Program.variable(1)
    assert as_program(program) is program
    assert as_program("x2") == program
    assert as_program("bmi", ["age", "bmi"]) == program


@pytest.mark.parametrize("thing", [None, 3j, b"x1", ["x1"], {"x1"}, object()])
def test_other_things_are_refused(thing):
    with pytest.raises(InvalidArgumentError, match=type(thing).__name__) as caught:
        as_program(thing)
    assert caught.value.reason == "UNKNOWN_EXPRESSION_TYPE"
    assert "SymPy" in caught.value.remedy


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


@pytest.mark.parametrize("thing", ["x1", Program.variable(0)])
def test_one_expression_is_no_list(thing):
    with pytest.raises(InvalidArgumentError) as caught:
        as_population(thing)
    assert caught.value.reason == "NOT_A_LIST"
