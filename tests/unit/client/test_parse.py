"""The text parser: grammar, names, errors, depth and caches."""

import math
import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.refusals import refused
from warpfit.embedded import embedded_server
from warpfit.errors import ParseError
from warpfit.frontends import deap
from warpfit.frontends.pysr import from_pysr
from warpfit.ir import Population, Program
from warpfit.ops import OPERATORS
from warpfit.parse import Parser, parse, place_in

COLUMNS = ("age", "bmi", "größe", "s 1", "a`b", "")
WORDS = ("x2", "p1", "e", "inf", "sin", "pi")
X1 = Program.variable(0)
PRECEDENCE = """
x1 ** x2 ^ x3 -> x1 ^ (x2 ^ x3); x1 / x2 / x3 * x1 -> ((x1 / x2) / x3) * x1;
x1 - x2 * x3 - x1 / -x2 -> (x1 - (x2 * x3)) - (x1 / (-x2)); -2 ^ x1 -> -(2 ^ x1);
2 ^ -x1 ^ x2 -> 2 ^ (-(x1 ^ x2)); 2 ^ -x1 * x2 -> (2 ^ (-x1)) * x2; +x1 - +x2 -> x1 - x2;
not x1 and x2 -> (not x1) and x2; x1 or x2 and x3 -> x1 or (x2 and x3);
1 + not x1 < x2 -> 1 + (not (x1 < x2)); not(x1) + 1 -> not (x1 + 1);
add(x1, x2, x3, p1) -> ((x1 + x2) + x3) + p1; min(x1, x2, x3) -> min(min(x1, x2), x3);
x1 - x2 - x3 + x1 -> ((x1 - x2) - x3) + x1; not not x1 -> not (not x1); x1 -2 -> sub(x1, 2);
x1 and x2 and x3 -> (x1 and x2) and x3; and(x1, x2) -> x1 and x2;
-(2) -> neg(2); --2 -> neg(-2); -(2)^x1 -> -(2^x1); π*x1 -> pi*x1
"""


def test_precedence():
    for row in PRECEDENCE.strip().replace("\n", " ").split("; "):
        text, explicit = row.split(" -> ")
        assert parse(text) == parse(explicit)
    assert parse("  x1\n +\tx2 ") == parse("x1+x2")


def test_numbers():
    for text, value in (
        *((".5", 0.5), ("1.5E+10", 1.5e10), ("-0", -0.0), ("e", math.e)),
        *(("0e-999", 0.0), ("1.7976931348623157e308", 1.7976931348623157e308), ("3e-324", 5e-324)),
        *(("-inf", -math.inf), ("nan", math.nan), ("pi", math.pi), ("#3ff8000000000000", 1.5)),
        ("-#3ff8000000000000", -1.5),
    ):
        assert parse(text) == Program.constant(value)


@pytest.mark.parametrize("row", OPERATORS.values(), ids=list(OPERATORS))
def test_every_operator_by_name_and_symbol(row):
    texts = ["x1", "p1", "x3"][: row.arity]
    wanted = Program.apply(row, *(X1, Program.parameter(0), Program.variable(2))[: row.arity])
    assert parse(f"{row.name}({', '.join(texts)})") == wanted
    if row.symbol:
        infix = f"{texts[0]} {row.symbol} {texts[-1]}"
        assert parse(infix if row.arity == 2 else f"{row.symbol} {texts[0]}") == wanted


def test_names_of_the_data_set():
    for names, text, wanted in (
        *((COLUMNS, "größe + x1", "x3 + x1"), (COLUMNS, "`s 1` - `a``b` + ``", "x4 - x5 + x6")),
        (COLUMNS, "`age`", "x1"),
        (WORDS, "x2 + p1", "x1 + x2"),  # a name of the data set comes first
        *((WORDS, "x02 + p01", "x2 + p1"), (WORDS, "e", "x3"), (WORDS, "sin(sin)", "sin(x5)")),
        *((["not"], "not `not`", "not x1"), (["2"], "2 - `2`", "2 - x1")),
    ):
        assert parse(text, names) == parse(wanted)


def test_errors_name_place_and_remedy():
    for text, reason, position in (
        *(("", "EXPECTED_OPERAND", 0), ("sin()", "EXPECTED_OPERAND", 4)),
        *(("add(x1,)", "EXPECTED_OPERAND", 7), ("2 x1", "EXPECTED_OPERATOR", 2)),
        *(("x1 not x2", "EXPECTED_OPERATOR", 3), ("1 + sin(x1", "UNBALANCED", 4)),
        *(("x1 + 2)", "UNBALANCED", 6), ("sin((1,5))", "UNEXPECTED_COMMA", 6)),
        *(("1 + sin(x1, x2)", "WRONG_ARITY", 4), ("x1 < x2 < x3", "CHAINED_COMPARISON", 8)),
        *(("x1 = x2", "UNEXPECTED_CHARACTER", 3), ("x[1]", "UNKNOWN_NAME", 0)),
        *(("x1 + [1]", "UNEXPECTED_CHARACTER", 5), ("x1 + `age", "UNEXPECTED_CHARACTER", 5)),
        *(("x1 + p0", "UNKNOWN_NAME", 5), ("x9999999999", "UNKNOWN_NAME", 0)),
        *(("1 + foo(x1)", "UNKNOWN_FUNCTION", 4), ("`age`", "UNKNOWN_VARIABLE", 0)),
        *(("max(x1)", "WRONG_ARITY", 0), ("x1 < x2 + 1 == x3", "CHAINED_COMPARISON", 12)),
    ):
        error = refused("", parse, text)
        assert (error.reason, error.position, error.text) == (reason, position, text)
        first, *_, line, caret = str(error).split("\n")
        assert error.message in first and error.remedy in first and error.remedy
        assert (line, caret) == (f"    {text}", " " * (4 + position) + "^")


def test_errors_say_what_could_be_meant():
    for text, names, suggestion in (
        *(("sqr1(x1)", (), "sqrt"), ("weigth + 1", ("height", "weight"), "weight")),
        ("sin weight", ("height", "weight"), "in parentheses: sin(...)"),
        *(
            ("`weigth` + 1", ("weight",), "weight"),
            ("flow rate*p1", ["flow", "flow rate"], "`flow rate`"),
        ),
        ("ABS(t)", ["t"], "mean abs"),
        ("nosuch", ("height", "weight"), "height, weight"),  # not cosh or csch
        # What people and models write.
        *(("p1\u00d7x1", (), "Write *"), ("p1 \u00b7 x1", (), "Write *")),
        *(("\u221ax1", (), "sqrt(x)"), ("x1!", (), "gamma")),
        ("height\u00b9\u2070", ("height",), "height^10"),
        *(("protected_division(x1, x2)", (), "zdiv"), ("y = p1*t", ["t"], "p1*t")),
        *((r"p1*\cos(t)", ["t"], "without a backslash"), ("p1*|t|", ["t"], "abs(x)")),
        *(("p0*t", ["t"], "p1, p2"), ("p1*flow rate", ["flow rate"], "`flow rate`")),
        *(("p1*a-b", ["a-b"], "`a-b`"), ("p1*x_{1}", ["x_"], "parentheses")),
        *(("log(t, 10)", ["t"], "log10(a)"), ("round(t, 2)", ["t"], "/100")),
        *(("cosine(t)", ["t"], "mean cos?"), ("t // 2", ["t"], "floor(a/b)")),
        *(("t && p1", ["t"], "(a and b)"), ("t ? 1 : 2", ["t"], "where(a, b, c)")),
        ("zz", ["a" * 90, "b" * 90, "zz_top"], "Variables are zz_top, "),
    ):
        assert suggestion in refused("", parse, text, names).remedy


@given(st.text(alphabet="x1p2.e+-*/^()<=!,`# \nandsin", max_size=30))
def test_any_text_parses_or_is_refused(text):
    try:
        program = parse(text)
    except ParseError as error:
        assert error.position is not None and 0 <= error.position <= len(text)
    else:
        assert Program(program.codes, program.values) == program


def test_long_and_deep_texts():
    for text, tokens in (
        *(("(" * 50_000 + "x1" + ")" * 50_000, 1), ("sin(" * 50_000 + "x1" + ")" * 50_000, 50_001)),
        *(("-" * 50_000 + "x1", 50_001), ("+".join(["x1"] * 10_000), 19_999)),
        *(("^".join(["x1"] * 10_000), 19_999), ("(x1+" * 10_000 + "x1" + ")" * 10_000, 20_001)),
        ("add(" + ",".join(["x1"] * 10_000) + ")", 19_999),
    ):
        program = Parser().parse(text)
        assert len(Program(program.codes, program.values)) == tokens


def test_long_and_deep_nonsense_is_refused_and_shown_around_the_place():
    assert refused("", parse, "(" * 50_000).reason == "EXPECTED_OPERAND"
    assert refused("", parse, "(" * 50_000 + "x1").reason == "UNBALANCED"
    *_, line, caret = str(refused("", parse, "x1 + " * 1000 + "?" + " + x1" * 1000)).split("\n")
    assert len(line) < 100 and line[caret.index("^")] == "?"


#: Runs of every kind of character, and what nests or chains.
RUNS = {
    **{repr(each): each for each in " \n\t\u00a0\u3000().,+-*/^<=!#`_1aEe\u00e9\u0301$\0"},
    **{f"{start!r} first": lambda n, start=start: f"x1{start * n}" for start in " \n\u2003\x1c"},
    **{f"{start!r} between": lambda n, start=start: f"x1{start * n}+x1" for start in " \n\u2003"},
    **{each: each for each in ("not ", "sin(", "add(x1,", "x1+", "x1^-", "x1<", "1e", "#01")},
    **{"pairs": lambda n: "(" * n + "x1" + ")" * n, "quote": lambda n: "`" + "``a" * n},
    **{"zeros": lambda n: "x" + "0" * n + "1", "calls": lambda n: "sin(" * n + "x1" + ")" * n},
    "unknown": lambda n: "+".join(f"y{k}" for k in range(n)),
    **{"digits": lambda n: "0." + "1" * n, "exponent": lambda n: "1e" + "9" * n},
}


@pytest.mark.parametrize("run", RUNS)
def test_time_grows_as_the_text_does(run):
    def seconds(count):
        text = RUNS[run](count) if callable(RUNS[run]) else RUNS[run] * count
        began = time.thread_time()  # other work on the machine does not count
        with suppress(ParseError):
            Parser().parse(text)
        return time.thread_time() - began

    # It is 8 times as long; 64 if it were quadratic.
    assert any(seconds(16_000) < 24 * seconds(2000) + 0.01 for _ in range(3))


def test_one_text_in_the_place_of_several_is_refused():
    """Its letters would be taken for them."""
    for take in (
        *(lambda names: parse("x1", names), X1.latex, X1.sympy, X1.to_numpy),
        *(lambda names: X1.code("c", names), lambda names: Population.of([X1]).texts(names)),
        *(lambda names: from_pysr("x1", names), lambda names: deap.population([], names=names)),
        lambda arguments: embedded_server(arguments).__enter__(),
    ):
        refused(r"is 'cpu'.*Give a list, such as \['cpu'\]", take, "cpu")


def test_places_are_those_of_the_text_that_was_given():
    for text, printed, position, wanted in (
        ("p1*sin(m)", "p1 * sin(m)", 5, ("p1*sin(m)", 3)),
        ("sin(a)+sin(m)", "sin(a) + sin(m)", 9, ("sin(a)+sin(m)", 7)),
        ("a**2", "a ^ 2", 2, ("a ^ 2", 2)),  # what stands there is written differently
        ("a", "a", 9, ("a", 9)),
    ):
        assert place_in(text, printed, position) == wanted
