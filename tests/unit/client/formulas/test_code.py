"""Programs in other languages, each run where it can be."""

from __future__ import annotations

import subprocess
import sys
import types

import numpy as np
import pytest
import scipy.special

from warpfit import InvalidArgumentError, Program, ResourceExhaustedError, parse
from warpfit.expressions.reference import evaluate_program
from warpfit.ops import OPERATORS, VARIABLE

VALUES = [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, 0.0005, 30.0, np.inf, -np.inf, np.nan]
X = np.array([(a, b, c) for a in VALUES for b in VALUES for c in (0.5, -2.0, np.nan)])
P = np.array([1.5, -0.25])
NAMES = ("a", "for", 'x y"""\n*/')
#: Every operator over variables and over constants, and programs with parameters or without rows.
PROGRAMS = [
    *(Program.apply(row, *map(Program.variable, range(row.arity))) for row in OPERATORS.values()),
    *(
        Program.apply(
            row, *[Program.variable(0), Program.constant(0.7), Program.constant(2.0)][: row.arity]
        )
        for row in OPERATORS.values()
    ),
    parse("p1*logistic(sin(x1)*p2 + where(x2 > x1, x3, -inf)) - (x1 - (x2 - -2))/-x3/x1"),
    parse("p1 + p2"),
    parse("x1 - --(x2 - --x3)"),
    parse("2 + sin(3)"),
    parse("x1 < nan"),
    parse("erf(" * 60 + "x1" + ")" * 60),
]


def expected(program):
    return evaluate_program(program, X.T, P)


def same(found, wanted):
    return np.array_equal(np.isnan(found), np.isnan(wanted)) and np.allclose(
        found, wanted, rtol=1e-13, atol=0, equal_nan=True
    )


def check_all(function_of):
    with np.errstate(all="ignore"):
        for program in PROGRAMS:
            arguments = (X, P) if program.parameters else (X,)
            found = function_of(program)(*arguments)
            assert np.shape(found) == (len(X),), str(program)
            assert same(found, expected(program)), str(program)


def test_numpy_functions_need_numpy_alone():
    check_all(lambda program: program.to_numpy(NAMES))
    function = parse("2*a + sin(b)", ["a", "b"]).to_numpy(["a", "b"])
    assert "    return 2.0 * a + np.sin(b)\n" in function.source
    code = (
        f"import sys\nsys.modules['warpfit'] = None\n{function.source}\nprint(formula(np.eye(2)))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert printed.stdout == f"{np.array([2.0, np.sin(1.0)])}\n"


@pytest.mark.parametrize(
    "language", ["c", "jax", "torch", "fortran", "julia", "r", "rust", "javascript", "matlab"]
)
def test_sympy_writes_the_other_languages(language):
    text = parse("2.5*a^2 + exp(`b c`)", ["a", "b c"]).code(language, ["a", "b c"])
    assert "2.5" in text
    assert "x2" in text


@pytest.mark.parametrize("language", ["c", "jax", "torch"])
def test_every_operator_is_written(language):
    for row in OPERATORS.values():
        assert Program.apply(row, *map(Program.variable, range(row.arity))).code(language)


def test_jax_text_gives_the_same_values():
    program = parse("where(x1 > x2, x1*atan2(x2, x3), -1.5) + tanh(x3)*p1 + gamma(x1)*erf(x2)")
    rows = np.random.default_rng(0).normal(size=(3, 20))
    names = {f"x{i + 1}": row for i, row in enumerate(rows)}
    jax = types.SimpleNamespace(numpy=np, scipy=scipy)
    found = eval(program.code("jax"), {"jax": jax, "p1": 2.0, **names})
    np.testing.assert_allclose(found, evaluate_program(program, rows, [2.0]))


def test_other_languages_and_missing_printers_are_errors():
    with pytest.raises(InvalidArgumentError, match="no code in 'cobol'"):
        parse("x1").code("cobol")
    with pytest.raises(InvalidArgumentError, match="SymPy writes no rust"):
        parse("erf(x1) + floor(x2)").code("rust")


def test_long_and_deep_programs_are_written_up_to_a_limit():
    chain = Program([VARIABLE, *[OPERATORS["sin"].code] * 9_999], [0.0] * 10_000)
    assert np.abs(chain.to_numpy()(np.ones((1, 1)))) < 0.1
    with pytest.raises(ResourceExhaustedError, match="10001 tokens"):
        Program.apply("sin", chain).code("numpy")


def test_variables_are_named_by_what_they_are_called():
    code = parse("a + b", ["a", "b"]).code("numpy", ["t1", "np"])
    assert "x1 = X[:, 0]\n    x2 = X[:, 1]\n    return x1 + x2" in code
    assert parse("x2").to_numpy()(np.eye(2)).tolist() == [0.0, 1.0]
    assert Program([VARIABLE], [0]).latex(["speed"]) == r"\text{speed}"
    assert str(parse("a/a", ["a"]).sympy(["a"])) == "1"


def test_torch_text_writes_what_torch_has():
    """It has no gamma, and its max and min take tensors alone."""
    program = parse("gamma(x1) + clip(x1, -1.3, 0.7)")
    names = {name: getattr(np, name) for name in ("abs", "cos", "exp", "floor", "float64")}
    names |= {"max": np.maximum, "min": np.minimum, "lgamma": scipy.special.gammaln}
    torch = types.SimpleNamespace(**names, tensor=np.array)
    x = np.array([-3.5, -2.5, -0.5, 0.5, 4.0])
    code = program.code("torch")
    assert "torch.max(torch.tensor(-1.3, dtype=torch.float64), x1)" in code
    found = eval(code, {"torch": torch, "x1": x})
    np.testing.assert_allclose(found, evaluate_program(program, x[np.newaxis]))
