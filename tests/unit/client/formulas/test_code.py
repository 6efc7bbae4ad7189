"""Programs in other languages, each run where it can be."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import types

import numpy as np
import pytest

from warpfit import InvalidArgumentError, Program, ResourceExhaustedError, parse
from warpfit.expressions.reference import evaluate_program
from warpfit.formulas.code import LANGUAGES
from warpfit.ops import OPERATORS, VARIABLE

VALUES = [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, 0.0005, 30.0, np.inf, -np.inf, np.nan]
X = np.array([(a, b, c) for a in VALUES for b in VALUES for c in (0.5, -2.0, np.nan)])
P = np.array([1.5, -0.25])
NAMES = ("a", "for", 'x y"""\n*/')
MIXED = [Program.variable(0), Program.constant(0.7), Program.constant(2.0)]
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


def run(text):
    namespace = {}
    exec(compile(text, "formula", "exec"), namespace)
    return namespace["formula"]


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


class Tensor(np.ndarray):
    """An array with what the texts use of PyTorch's tensors."""

    def new_tensor(self, value):
        return np.asarray(value).view(Tensor)

    def new_zeros(self, count):
        return np.zeros(count).view(Tensor)


def test_pytorch_text_passes_tensors_to_functions(monkeypatch):
    """PyTorch is too large for the tests: NumPy stands in, and takes what PyTorch takes."""
    names = {
        "asin": "arcsin",
        "acos": "arccos",
        "atan": "arctan",
        "atan2": "arctan2",
        "pow": "power",
    }
    used = ["sin", "cos", "tan", "sinh", "cosh", "tanh", "exp", "expm1", "log", "log1p", "log2"]
    used += ["log10", "sqrt", "abs", "floor", "ceil", "hypot", "where", "sign", *names]

    def function(name):
        numpy = getattr(np, names.get(name, name))

        def call(*operands):
            tensors = operands[:1] if name == "pow" else operands
            assert all(isinstance(operand, np.ndarray | np.generic) for operand in tensors)
            return numpy(*operands)

        return call

    torch = types.SimpleNamespace(inf=np.inf, nan=np.nan, **{name: function(name) for name in used})
    torch.erf = OPERATORS["erf"].numpy
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(sys.modules[__name__], "X", X.view(Tensor))
    check_all(lambda program: run(program.code("torch", NAMES)))


def test_jax_text_calls_functions_that_numpy_has_too(monkeypatch):
    jax = types.ModuleType("jax")
    jax.numpy = np
    jax.scipy = types.SimpleNamespace(special=types.SimpleNamespace(erf=OPERATORS["erf"].numpy))
    monkeypatch.setitem(sys.modules, "jax", jax)
    monkeypatch.setitem(sys.modules, "jax.numpy", np)
    for name in ("jax.scipy", "jax.scipy.special"):
        monkeypatch.setitem(sys.modules, name, jax.scipy)
    check_all(lambda program: run(program.code("jax", NAMES)))


def test_c_functions_give_the_same_values(tmp_path):
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    texts = []
    for index, program in enumerate(PROGRAMS):
        code = program.code("c", NAMES)
        texts.append(
            code.replace("choose", f"choose{index}").replace("double formula", f"double f{index}")
        )
    source, library = tmp_path / "f.c", tmp_path / "f.so"
    source.write_text("".join(texts))
    flags = [
        "-shared",
        "-fPIC",
        "-Wall",
        "-Werror",
        "-ffp-contract=off",
        "-o",
        library,
        source,
        "-lm",
    ]
    subprocess.run(["cc", *flags], check=True)
    loaded = ctypes.CDLL(str(library))

    def function_of(program):
        function = loaded[f"f{PROGRAMS.index(program)}"]
        function.restype = ctypes.c_double
        vector = ctypes.c_double * 3

        def rows(_, parameters=()):
            return np.array([function(vector(*row), vector(*parameters)) for row in X])

        return rows

    check_all(function_of)


@pytest.mark.parametrize("language", ["fortran", "julia", "r", "rust", "javascript", "matlab"])
def test_sympy_writes_the_other_languages(language):
    text = parse("2.5*a^2 + exp(`b c`)", ["a", "b c"]).code(language, ["a", "b c"])
    assert "2.5" in text
    assert "x2" in text


def test_other_languages_and_missing_printers_are_errors():
    with pytest.raises(InvalidArgumentError, match="no code in 'cobol'"):
        parse("x1").code("cobol")
    with pytest.raises(InvalidArgumentError, match="SymPy writes no rust"):
        parse("erf(x1) + floor(x2)").code("rust")


def test_long_and_deep_programs_are_written_up_to_a_limit():
    chain = Program([VARIABLE, *[OPERATORS["sin"].code] * 9_999], [0.0] * 10_000)
    assert np.abs(chain.to_numpy()(np.ones((1, 1)))) < 0.1
    with pytest.raises(ResourceExhaustedError, match="10001 tokens"):
        Program.apply("sin", chain).code("c")


def test_variables_are_named_by_what_they_are_called():
    code = parse("a + b", ["a", "b"]).code("numpy", ["t1", "np"])
    assert "x1 = X[:, 0]\n    x2 = X[:, 1]\n    return x1 + x2" in code
    assert set(LANGUAGES) == {"numpy", "jax", "torch", "c"}
    assert parse("x2").to_numpy()(np.eye(2)).tolist() == [0.0, 1.0]
    assert Program([VARIABLE], [0]).latex(["speed"]) == r"\text{speed}"
    assert str(parse("a/a", ["a"]).sympy(["a"])) == "1"
