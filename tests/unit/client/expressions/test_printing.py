"""Programs as text and LaTeX, exact and to be read, and the place of a token in the text."""

import struct
from string import Formatter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.engines.operators import programs
from warpfit.errors import ParseError
from warpfit.expressions.language import DIGITS, WHOLE_POWERS, locate, readable, to_latex, to_text
from warpfit.expressions.reference import evaluate_program
from warpfit.ir import Program
from warpfit.ops import BY_CODE, OPERATORS
from warpfit.parse import Parser, parse

ANY_DOUBLE = st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack(">d", bits.to_bytes(8))[0])
NAMES = st.lists(
    st.text(max_size=6)
    | st.sampled_from(["x1", "x2", "x02", "p1", "p01", "e", "inf", "nan", "not", "or", "`", "a b"]),
    unique=True,
    max_size=4,
)

COLUMNS = np.array([[0.3, -0.0, 2.0, -3.5, np.inf], [1.7, 0.0, -2.0, 1e200, np.nan]] * 2)


def same_program(read, program):
    """Tell whether a program is the same, but for sums with negative terms, of equal value."""
    if read == program:
        return True
    vector = np.linspace(-2, 2, program.parameters)
    values = [evaluate_program(each, COLUMNS, vector) for each in (read, program)]
    return np.array_equal(*values, equal_nan=True)


TERMS = programs(max_tokens=14, operators=("neg", "add", "sub", "mul", "div"))


@given(programs() | programs(max_tokens=8, constants=ANY_DOUBLE) | TERMS, st.just([]) | NAMES)
def test_text_round_trip_keeps_every_bit(program, names):
    text = to_text(program, names)
    if not names:
        assert "+ -" not in text and "- -" not in text
    read = Parser(names).parse(text)
    assert to_text(read, names) == text and same_program(read, program)


def test_negative_terms_are_written_as_they_are_read():
    for text, printed in (
        *(("x1 + -(x2*x3)", "x1 - x2 * x3"), ("x1 - -(x2 - -(x3*-x4))", "x1 + (x2 - x3 * x4)")),
        ("x1 + -(2)*x2 - -(x3^2)", "x1 - 2 * x2 + x3 ^ 2"),
        ("(x1 + -(x2*x3)) * -(x4*x5)", "(x1 - x2 * x3) * -(x4 * x5)"),
        ("-(x1*x2)*x3 < -(x4/x5)", "-(x1 * x2) * x3 < -(x4 / x5)"),
    ):
        program = parse(text)
        assert to_text(program) == to_text(parse(printed)) == printed
        columns = np.random.default_rng(0).normal(size=(5, 20))
        values = [evaluate_program(each, columns) for each in (parse(printed), program)]
        np.testing.assert_array_equal(*values)
        for token in range(len(program)):
            assert locate(program, token)[0] == printed


def without_parentheses(text):
    opened = []
    for position, character in enumerate(text):
        if character == "(":
            opened.append(position)
        elif character == ")":
            start = opened.pop()
            if start == 0 or not text[start - 1].isalnum():
                yield f"{text[:start]} {text[start + 1 : position]} {text[position + 1 :]}"


INFIX = [row.name for row in OPERATORS.values() if row.symbol and row.name not in ("neg", "not")]


@given(programs(max_tokens=14, operators=INFIX, constants=st.floats(0, 9)))
def test_no_parentheses_are_superfluous(program):
    for text in without_parentheses(to_text(program)):
        try:
            other = parse(text)
        except ParseError:
            continue
        assert other != program, text


def test_names_are_quoted_where_needed():
    names = ("age", "s 1", "not", "p1", "e")
    program = parse("x1 + x2 + x3 + x4 + x5 + x6")
    assert to_text(program, names) == "age + `s 1` + `not` + p1 + e + x6"
    assert to_text(parse("p1 + 2.718281828459045"), names) == "p01 + 2.718281828459045"


def test_latex():
    for text, latex in (
        ("x1 - (x2 - x3)", r"x_{1} - \left(x_{2} - x_{3}\right)"),
        ("x1 ^ x2 ^ x3", r"{x_{1}}^{{x_{2}}^{x_{3}}}"),
        ("x1 * -x2", r"x_{1} \cdot \left(-x_{2}\right)"),
        ("(x1 + p1) / (x2 - 1)", r"\frac{x_{1} + p_{1}}{x_{2} - 1}"),
        ("exp(x1) ^ 2", r"{\left(e^{x_{1}}\right)}^2"),
        ("log1p(x1 - x2)", r"\ln\left(1 + \left(x_{1} - x_{2}\right)\right)"),
        ("(x1 ^ x2) ^ x3", r"{\left({x_{1}}^{x_{2}}\right)}^{x_{3}}"),
        ("x1 + -2 / x2 - -(x1 + x2)", r"x_{1} - \frac{2}{x_{2}} + \left(x_{1} + x_{2}\right)"),
        ("fma(x1, x2, -3) + log1p(-x1)", r"x_{1} \cdot x_{2} - 3 + \ln\left(1 - x_{1}\right)"),
        ("square(-x1) + cube(-2)", r"{\left(-x_{1}\right)}^2 + {\left(-2\right)}^3"),
        ("aq(x1, x2 + 1)", r"\frac{x_{1}}{\sqrt{1 + {\left(x_{2} + 1\right)}^2}}"),
        ("(x1 < x2) * 2", r"\left[x_{1} < x_{2}\right] \cdot 2"),
        ("(x1 or x2) and x3", r"\left(x_{1} \vee x_{2}\right) \wedge x_{3}"),
        ("1e-5 ^ x1", r"{\left(1 \times 10^{-5}\right)}^{x_{1}}"),
        ("-inf + nan", r"-\infty + \mathrm{NaN}"),
        ("x1 - mod(2*x1, x2)", r"x_{1} - \left(\left(2 \cdot x_{1}\right) \bmod x_{2}\right)"),
    ):
        assert to_latex(parse(text)) == latex


def test_latex_tells_all_columns_and_parameters_apart():
    for names, text, latex in (
        (["x2"], "x2 - x02", "x_{2} - x_{02}"),
        (["a_1", "a1", "e"], "a_1 + a1 + exp(e)", r"a_{1} + \text{a1} + e^{\text{e}}"),
        (["b3", "body_mass"], "x1 + x2 + x6", r"b_{3} + \text{body\_mass} + x_{6}"),
        (["50%", "a^b"], "x1 + x2", r"\text{50\%} + \text{a\textasciicircum{}b}"),
        (["alpha", "v_max", "Omega2"], "x1 + x2 + x3", r"\alpha + v_{\text{max}} + \Omega_{2}"),
        (["pi", "omega_0", "mass"], "x1 + x2 + x3", r"\text{pi} + \omega_{0} + \text{mass}"),
    ):
        assert to_latex(parse(text, names), names) == latex


@pytest.mark.parametrize("row", OPERATORS.values(), ids=list(OPERATORS))
def test_latex_shows_each_operand_of_each_operator(row):
    operands = [Program.variable(70 + index) for index in range(row.arity)]
    text = to_latex(Program.apply(row, *operands))
    used = [name for _, name, _, _ in Formatter().parse(row.latex) if name]
    for name, index in zip(row.operands, range(71, 74), strict=False):
        assert text.count(f"x_{{{index}}}") == used.count(name) >= 1


@pytest.mark.parametrize(
    "text", ["x1" + " + x2" * 5_000, "x1 ^ " * 5_000 + "x2", "sin(" * 5_000 + "x2" + ")" * 5_000]
)
def test_deep_programs(text):
    program = Parser().parse(text)
    assert len(to_latex(program)) >= 25_000
    assert Parser().parse(to_text(program)) == program and readable(program) is program


@given(program=programs(), pick=st.integers(0, 10**6), named=st.booleans())
def test_every_token_is_found_in_the_text(program, pick, named):
    names = ("a b", "not", "c") if named else ()
    token = pick % len(program)
    text, position = locate(program, token, names)
    assert text == to_text(program, names)
    row, rest = BY_CODE.get(int(program.codes[token])), text[position:]
    if row is None:
        value = program.values[token : token + 1]
        leaf = to_text(Program(program.codes[token : token + 1], value), names)
        assert rest.startswith((leaf, leaf.removeprefix("-")))
    elif row.name in ("add", "sub", "neg"):  # the sign of a term changes that of a sum
        assert rest.startswith(("+", "-")) or row.name == "neg"
    else:
        symbol = "^" if row.name in WHOLE_POWERS else row.symbol
        assert rest.startswith(symbol or f"{row.name}(")


@pytest.mark.parametrize(
    "odd", ["\u202e", "\n", "\r", "\u2028", "\x1b", "\u200b", "\x00", "<", ">"]
)
def test_names_in_latex_hold_nothing_that_acts_elsewhere(odd):
    """A page may show the formula: no markup, no line ends, no characters that turn text around."""
    shown = parse("x1 + x2").latex([f"a{odd}b", "a b"])
    assert odd not in shown and shown.isprintable() and len({*shown.split(" + ")}) == 2


THREE = ("R", "T", "x1")


def test_odd_forms_are_written_as_a_person_would():
    for text, wanted in (
        *(("inv(R)*T", "1 / R * T"), ("exp(T / -3)", "exp(-T / 3)")),
        ("3 + R*sin(-2*T)", "3 - R * sin(2 * T)"),
        ("cos(-2*T) + abs(T/-3)", "cos(2 * T) + abs(T / 3)"),
        *(("(-2*T)^3 + (-2*T)^2", "-(2 * T) ^ 3 + (2 * T) ^ 2"), ("T ^ 2 * exp(-(0))", "T ^ 2")),
        ("0.399 / sqrt(exp(x1 ^ 2))", "0.399 * exp(-x1 ^ 2 / 2)"),
        *(("T / exp(R + 1)", "T * exp(-(R + 1))"), ("sqrt(exp(-T / 3))", "exp(-T / 3 / 2)")),
        ("tanh(-T) / -erf(R)", "tanh(T) / erf(R)"),
        *(("-2 / -T", "2 / T"), ("1 / exp(-T)", "exp(T)"), ("inv(R)", "1 / R")),
    ):
        program = parse(text, THREE)
        assert to_text(program, THREE, DIGITS) == wanted
        shown = readable(program)
        assert readable(shown) == shown
        assert to_text(parse(to_text(shown, THREE), THREE), THREE) == to_text(shown, THREE)
        exact = to_text(program, THREE)  # which is the program's own with all digits
        assert to_text(parse(exact, THREE), THREE) == exact
        assert "{inv}" not in to_latex(program, THREE, DIGITS)
        if "-3" in text and wanted.count("-") == 0:
            assert "-" not in to_latex(program, THREE, DIGITS)


@given(programs())
def test_values_are_those_of_the_program(program):
    rows = np.random.default_rng(0).normal(size=(max(1, program.variables), 50))
    program = program.bind(np.full(program.parameters, 1.5))
    wanted, found = (evaluate_program(each, rows) for each in (program, readable(program)))
    close = np.isclose(found, wanted, rtol=1e-9, atol=1e-300, equal_nan=True)
    assert (close | ~np.isfinite(wanted) | is_ill_conditioned(program, rows)).all(), str(program)


def is_ill_conditioned(program: Program, rows) -> np.ndarray:
    """Tell where a relative change of 1e-12 of the rows changes values, as in sin(1e20*x)."""
    values = [evaluate_program(program, rows * (1.0 + e)) for e in (0.0, 1e-12, -1e-12, 3e-13)]
    return ~np.isclose(values[1:], values[0], rtol=1e-10, atol=0.0).all(axis=0)
