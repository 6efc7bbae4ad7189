"""Programs in other languages and as NumPy functions: their text, and what it computes."""

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys

import mpmath
import numpy as np
import pandas as pd
import polars as pl
import pytest

from support.random_programs import random_program
from support.refusals import refused
from warpfit import InvalidArgumentError, Program, ResourceExhaustedError, parse, testing
from warpfit.expressions.reference import evaluate_program
from warpfit.formulas.languages import LANGUAGES
from warpfit.ops import OPERATORS, VARIABLE

SCRIPTS = [name for name in LANGUAGES if name not in ("c++", "cuda", "rust")]


def test_functions_need_numpy_alone_or_nothing():
    function = parse("2*a + erf(b)", ["a", "b"]).to_numpy(["a", "b"])
    assert "    return 2.0 * a + formula_erf(b)\n" in function.source
    code = f"import sys\nsys.modules['warpfit'] = None\n{function.source}\n"
    code += "print(formula([[0, 9], [1, 9]]))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert printed.stdout == f"{np.array([1.0, 3.0])}\n"
    namespace: dict = {}
    exec(parse("x1 + p1").code("python"), namespace)
    assert namespace["formula"](np.float32(1.5), True) == 2.5
    for pair in (("1", 2.0), (1.0, "2"), (None, 1.0), (1j, 1.0)):
        with pytest.raises(TypeError):
            namespace["formula"](*pair)


@pytest.mark.parametrize("text", ["inv(x1)", "-x1", "x1*x2", "x1^x2", "x1 - x2", "cube(x2)", "3"])
@pytest.mark.parametrize("dtype", ["u1", "i1", "i4", "i8", "?", "f4", "f2", object, list])
def test_numpy_functions_compute_in_float64_whatever_comes_in(text, dtype):
    rows = [[1, 0], [1, 1]] if dtype == "?" else [[2, 3], [100, 5]]
    table = rows if dtype is list else np.array(rows, dtype=dtype)
    found = parse(text).to_numpy()(table)
    assert found.dtype == np.float64
    wanted = evaluate_program(parse(text), np.array(rows, float).T)
    np.testing.assert_allclose(found, wanted, rtol=1e-15)


def test_numpy_functions_take_frames_by_name():
    columns = {"unused": [9, 9], "s 1": [5, 7], "b": np.array([1, 2], "u1")}
    function = parse("p1*b - `s 1`", ["b", "s 1"]).to_numpy(["b", "s 1"])
    for frame in (pd.DataFrame(columns), pl.DataFrame(columns)):
        assert function(frame, [10]).tolist() == [5.0, 13.0]
    assert parse("x3").to_numpy()(pd.DataFrame(columns)).tolist() == [1.0, 2.0]
    with pytest.raises(KeyError):
        function(pd.DataFrame(columns).drop(columns="b"), [10])
    masked = np.ma.array([[1.0], [2.0]], mask=[[False], [True]])
    np.testing.assert_array_equal(parse("x1 + 1").to_numpy()(masked), [2.0, np.nan])
    assert parse("2*x1").to_numpy()(np.arange(3.0)).tolist() == [0.0, 2.0, 4.0]  # one column


@pytest.mark.parametrize(
    "cells",
    [
        *(["1", "2"], np.array([1.0, "2"], object), [b"1", b"2"], [None, 1.0], np.array([1j, 2])),
        *(np.array(["2024-01-01", "2024-01-02"], "M8[D]"), [pd.Timestamp(0), 1.0]),
    ],
    ids=str,
)
def test_numpy_functions_take_numbers_alone(cells):
    """As an upload does, which refuses text also where it can be read as a number."""
    column = np.asarray(cells)[:, None]
    named = pd.DataFrame({"a": column[:, 0], "b": 2 * ["x"]})
    for call in (
        lambda: parse("x1 + 1").to_numpy()(column),
        lambda: parse("p1*p2*x1").to_numpy()([[1.0], [2.0]], cells),
        lambda: parse("a + 1", ["a"]).to_numpy(["a"])(named),
    ):
        with pytest.raises(TypeError):
            call()
    with testing.client() as client, pytest.raises(InvalidArgumentError):
        client.upload(column)


#: Names of columns that mean something in one language or the other.
USED = (
    "for end sin a A p1 t1 x2 formula X r if new function NaN Inf T value module merge e i np _b "
    "varargin float double formula_max formula_value self None unix M_PI main"
)


@pytest.mark.parametrize("language", SCRIPTS)
def test_names_that_a_language_uses_are_replaced_and_said(language, tmp_path):
    names = ['x y"""\n*/ ??/', "\u6e29", *USED.split()]
    terms = [f"{k + 2}*{f'`{name}`'}" for k, name in enumerate(names)]
    program = parse(" + ".join(terms) + " + sin(p01) + max(`end`, a) + gamma(`if`)", names)
    code = program.code(language, names)
    assert list(code.names) == names
    identifiers = [n.lower() if language == "fortran" else n for n in code.names.values()]
    assert len(set(identifiers)) == len(names)
    for name, identifier in code.names.items():
        said = re.sub(r"[^\w .,+\-*/^<>=!()#`]", "_", name)
        assert name == identifier or f"{identifier} is the column {said}" in code
    if available(language) and language not in ("numpy", "jax", "torch"):
        columns = np.random.default_rng(0).uniform(0.5, 2, (len(names), 5))
        code.names = {f"x{k + 1}": name for k, name in enumerate(code.names.values())}
        found = run(language, [code], [[0.3]], columns, tmp_path)
        np.testing.assert_allclose(found[0], evaluate_program(program, columns, [0.3]), rtol=1e-12)


def test_reserved_words_and_other_languages():
    names = ["h", "include", "math"]  # the name of a header is free
    assert parse("h*include*math", names).code("c", names).names == {name: name for name in names}
    words = {"c": "double linux NAN near int", "c++": "new class std this and"}
    words |= {"cuda": "threadIdx double template", "rust": "fn None let self f64"}
    for language, reserved in words.items():
        names = reserved.split()
        program = Program.apply("add", *map(Program.variable, range(len(names))))
        found = [*program.code(language, names).names.values()]
        assert found == [f"x{k + 1}" for k in range(len(names))]
    for language in ("cobol", "julia", "mathematica"):
        with pytest.raises(InvalidArgumentError, match=r"program\.sympy\(\)"):
            parse("x1").code(language)
    refused("Did you mean octave", lambda: parse("x1").code("matlab"))


@pytest.mark.parametrize(("language", "headers"), [("c", ["math.h"]), ("c++", ["cmath", "limits"])])
def test_no_macro_of_the_headers_is_a_name(language, headers):
    if not available(language):
        pytest.skip(f"nothing here runs {language}")
    source = "".join(f"#include <{header}>\n" for header in headers)
    command = ["g++", "-D_GNU_SOURCE", "-x", language, "-dM", "-E", "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=True)
    macros = re.findall(r"^#define ([A-Za-z]\w*) ", done.stdout, re.MULTILINE)
    names = [name for name in macros if "__" not in name]
    program = Program.apply("sin", Program.variable(0))
    kept = [n for n in names if program.code(language, [n]).names[n] == n]
    assert names and not kept


@pytest.mark.parametrize(
    ("language", "command", "call"),
    [
        ("python", [sys.executable], "print(formula(2**600, 2))"),
        ("r", ["Rscript"], "cat(formula(2147483647L, 2L))"),
        ("octave", ["octave", "--norc"], "printf('%g', formula(int32(2147483647), int8(2)))"),
    ],
)
def test_whole_numbers_of_a_language_become_floats(language, command, call, tmp_path):
    if not available(language):
        pytest.skip(f"nothing here runs {language}")
    script = tmp_path / "script"
    begin = "1;\n" if language == "octave" else ""
    script.write_text(f"{begin}{parse('x1*x1/p1').code(language)}\n{call}\n")
    done = subprocess.run([*command, script], capture_output=True, text=True, check=True)
    wanted = float("inf") if language == "python" else 2147483647.0**2 / 2
    assert float(done.stdout) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    "language",
    [
        pytest.param(language, marks=[pytest.mark.thorough] * (language not in ("c", "python")))
        for language in sorted(LANGUAGES.keys() - {"c++", "cuda", "jax", "torch"})
    ],
)
def test_long_and_deep_programs(language, tmp_path):
    """Nests of 10,000 tokens, long sums, and equal operands; others have nearly the same texts."""
    unary = [OPERATORS[name].code for name in ("neg", "sin", "abs", "cos", "logabs")]
    deep = Program([VARIABLE, *unary * 1_999, *unary[:4]], [0.0] * 10_000)
    left = parse("x1" + " + x2*x1" * 300)
    right = parse("x1 - " + "(x2 - " * 300 + "x1" + ")" * 300)
    shared = parse("softplus(" * 5 + "x1 + x2" + ")" * 5)
    programs = [deep, left, right, shared]
    codes = [program.code(language) for program in programs]
    assert len(codes[3]) < 4_000
    with pytest.raises(ResourceExhaustedError, match="10001 tokens"):
        Program.apply("sin", deep).code(language)
    if available(language):
        columns = np.random.default_rng(0).uniform(0.1, 1, (3, 4))
        found = run(language, codes, [[]] * len(codes), columns, tmp_path)
        for values, program in zip(found[1:], programs[1:], strict=True):
            np.testing.assert_allclose(values, evaluate_program(program, columns), rtol=1e-9)
        assert np.isfinite(found[0]).all()


VALUES = [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, 0.0005, 30.0, np.inf, -np.inf, np.nan]
COLUMNS = np.array([(a, b, c) for a in VALUES for b in VALUES for c in (0.5, -2.0, np.nan)]).T
COLUMNS = np.hstack([COLUMNS, np.random.default_rng(0).uniform(-8, 8, (3, 100))])
#: Operators that may return either of 0 and -0, as NumPy's.
MIN_MAX = [OPERATORS[name].code for name in ("min", "max")]
CONSTANTS = [0.7, -2.0, 0.0, -0.0, np.inf, -np.inf, np.nan, 2.5e-300, 1e300, 1 / 3]


def operators():
    x1, x2, x3 = map(Program.variable, range(3))
    for index, row in enumerate(OPERATORS.values()):
        yield Program.apply(row, *(x1, x2, x3)[: row.arity])
        if row.arity > 1:
            constant = Program.constant(CONSTANTS[index % 10])
            yield Program.apply(row, *(x1, constant, x3)[: row.arity])
            yield Program.apply(row, *(constant, x1, constant)[: row.arity])
    for number in CONSTANTS:
        yield Program.apply("add", Program.constant(number), x1)
        yield Program.constant(number)
    for text in (
        "(x1 > 0)/(1 + (x2 > 0))", "3/(2 + (x1 > x2))", "sign(x1)/(sign(x2) + 2)", "2*(x1 > x2)/3",
        "where(x1 > 1, x1, 2)", "p1*logistic(sin(x1)*p2 + where(x2 > x1, x3, -inf))", "p1 + p2",
        "p1*2 > 3", "x1 - (x2 - -2)/-x3/x1", "x1 - --(x2 - --x3)", "2 + sin(3)", "x1^x2^x3",
        "(x1^x2)^x3", "-x1^2", "(-x1)^2", "inv(mod(x1, x2))", "inv(round(x1))", "inv(ceil(x1))",
        "log(-1)*x1", "erf(" * 60 + "x1" + ")" * 60, "x1 + p1*x1^2" + " + x2*x3 - x1/x2" * 60,
        "-(" * 300 + "x1" + ")" * 300, "softplus(" * 4 + "x1" + ")" * 4, "log2(2)*x1",
        "atan2(x1, p1)", "min(p1, p2)", "max(p1, 0.1)",
        "where(p1 > 0, x1, p2)", "(p1 > p2) + 0.1", "fmod(x1, x2)",
    ):  # fmt: skip
        yield parse(text)


def rounded(program, vector, noise):
    """Return values where each operator has an error of some 20 units in the last place."""

    def leaf(code, value):
        return np.asarray(
            {1: COLUMNS, 2: vector, 3: {value: value}}[code][int(value) if code < 3 else value]
        )

    def operator(row, operands):
        result = np.asarray(row.numpy(*operands), dtype=np.float64)
        if row.name in ("min", "max"):  # which may return either of 0 and -0
            result = np.where(result == 0, np.copysign(result, noise(result.shape)), result)
        return result * (1 + 4e-15 * noise(result.shape))

    return np.broadcast_to(program.fold(leaf, operator), COLUMNS.shape[1:])


@pytest.fixture(scope="module")
def cases():
    """Return programs, their parameters, their values, and how far other values may be."""
    rng = np.random.default_rng(2)
    sizes, names = rng.integers(4, 20, 40).tolist(), tuple(OPERATORS)
    drawn = [random_program(rng, size, variables=3, operators=names) for size in sizes]
    programs = [*operators(), *drawn]
    vectors = [rng.uniform(-2, 2, program.parameters) for program in programs]
    wanted, allowed = [], []
    with np.errstate(all="ignore"):
        for program, vector in zip(programs, vectors, strict=True):
            values = evaluate_program(program, COLUMNS, vector)
            errors = []
            for noise in (np.ones, lambda s: -np.ones(s), *[lambda s: rng.uniform(-1, 1, s)] * 3):
                noisy = rounded(program, vector, noise)
                same = (noisy == values) | (np.isnan(noisy) & np.isnan(values))
                errors.append(np.where(same, 0.0, np.abs(noisy - values)))
            error = np.max(errors, axis=0)
            # A number that rounding makes infinite, or a step that it moves, may be any other.
            size = np.where(np.isfinite(values), np.abs(values), 0.0)
            is_firm = error <= 1e-9 * size
            wanted.append(values)
            near = 2e-14 if OPERATORS["lgamma"].code in program.codes else 0.0
            allowed.append(np.where(is_firm, 10 * error + 1e-13 * size + near, np.inf))
    return programs, vectors, np.array(wanted), np.array(allowed)


SMALL_EDGES = [0.0, 5e-324, 2.2250738585072014e-308, 1e-160, 0.001, 0.5, 1.0, 2.5, 3.0, 710.0]
LARGE_EDGES = [2.0**53 + 2, 1e160, 1e308, np.inf]
EDGES = [sign * edge for edge in SMALL_EDGES + LARGE_EDGES for sign in (1.0, -1.0)] + [np.nan]
#: Where single functions overflow, underflow, have poles, or round to another whole number.
ODD = [
    *(1e-310, 1 - 1e-7, 0.49999999999999994, 170.5, 171.5, 172.0, 709.9, 746.0, 29.5),
    *(-171.5, -177.3, -180.5, -184.3, -1.0000000001, -29.5, 4503599627370497.5, 1e16, 1e22),
]
#: Next to the zeros of lgamma at 1 and 2, where its digits are lost first.
STEPS = np.r_[0.0, 10.0 ** np.arange(-16, 0), 0.3, 0.49999, 0.5]
NEAR_ZEROS = np.unique([zero + sign * STEPS for zero in (1, 2) for sign in (1, -1)])
PAIRS = [*map(np.ravel, np.meshgrid(EDGES, EDGES)), np.resize(EDGES[::-1], len(EDGES) ** 2)]
ROTATED = np.stack([ODD, np.roll(ODD, 5), np.roll(ODD, 9)])
EDGE_COLUMNS = np.hstack([np.stack(PAIRS), ROTATED, np.tile(NEAR_ZEROS, (3, 1))])
#: They have to be read back to the last bit.
NUMBERS = [0.30000000000000004, 1.0000000000000002, 1.7976931348623157e308, 123456.7, 5e-324, 1e22]
NUMBERS += np.frombuffer(np.random.default_rng(5).bytes(160)).tolist()


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_operator_at_the_edges_of_float64(language, tmp_path):
    if not available(language) or language == "jax":
        pytest.skip(f"nothing here runs {language}, or it has no subnormal numbers")
    x1, x2, x3 = map(Program.variable, range(3))
    programs = [Program.apply(row, *(x1, x2, x3)[: row.arity]) for row in OPERATORS.values()]
    programs += map(parse, ["fmod(x1, x2)", "hypot(x1, x2)", "sinc(x1)"])
    numbers = [Program.apply("mul", x1, Program.constant(number)) for number in NUMBERS]
    codes = [program.code(language) for program in [*programs, *numbers]]
    with np.errstate(all="ignore"):
        found = run(language, codes, [[]] * len(codes), EDGE_COLUMNS, tmp_path)
    at_one = np.flatnonzero(EDGE_COLUMNS[0] == 1.0)[0]
    assert found[len(programs) :, at_one].tolist() == NUMBERS
    for values, program in zip(found[: len(programs)], programs, strict=True):
        wanted = evaluate_program(program, EDGE_COLUMNS)
        is_log = "lgamma" in str(program)  # with zeros at 1 and 2, and an absolute error there
        np.testing.assert_allclose(
            values, wanted, rtol=1e-13, atol=2e-15 if is_log else 1e-322, err_msg=str(program)
        )
        if is_log:
            with mpmath.workdps(40):
                exact = [float(mpmath.loggamma(x)) for x in NEAR_ZEROS.tolist()]
            np.testing.assert_allclose(values[-len(exact) :], exact, rtol=4e-15, atol=0.0)
        # Octave's driver adds 0 to the results.
        if language != "octave" and program.codes[-1] not in MIN_MAX:
            at = np.flatnonzero((wanted == 0) & (np.signbit(values) != np.signbit(wanted)))
            assert not len(at), (str(program), EDGE_COLUMNS[:, at[:3]].T)


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_language_computes_what_the_reference_computes(language, cases, tmp_path):
    if not available(language) or language == "cuda":
        pytest.skip(f"nothing here runs {language}, or its text is that of C++ but for two words")
    programs, vectors, wanted, allowed = cases
    codes = [program.code(language) for program in programs]
    with np.errstate(all="ignore"):
        found = run(language, codes, [v.tolist() for v in vectors], COLUMNS, tmp_path)
        same = (found == wanted) | (np.isnan(found) & np.isnan(wanted)) | (allowed == np.inf)
        same |= np.isfinite(wanted) & (np.abs(found - wanted) <= allowed)
    assert np.mean(allowed < np.inf) > 0.9
    for index in np.flatnonzero(~same.all(axis=1))[:1]:
        at = np.flatnonzero(~same[index])[:4]
        told = vectors[index], COLUMNS[:, at].T, found[index, at], wanted[index, at]
        pytest.fail(f"{programs[index]} with {told[0]} at {told[1:]}\n{codes[index]}")


#: The commands that a language needs, the first of which is looked for.
COMMANDS = {
    **{"c": "gcc", "c++": "g++", "cuda": "g++", "fortran": "gfortran", "rust": "rustc"},
    **{"javascript": "node", "r": "Rscript", "octave": "octave"},
}
_LIBRARY = {
    "c": "gcc -x c -O0 -shared -fPIC -Wall -Wno-unused -lm",
    "c++": "g++ -x c++ -O0 -shared -fPIC -Wall",
    # Text of CUDA is C++ but for these words.
    "cuda": "g++ -x c++ -O0 -shared -fPIC -D__host__= -D__device__= -include cmath",
    "fortran": "gfortran -x f95 -O0 -shared -fPIC",
    "rust": "rustc --crate-type cdylib --edition 2021 -A warnings",
}


def run(language, codes, parameters, columns, folder):
    """Return the values of functions of x1, x2, ... on columns [variables, rows]; [codes, rows]."""
    texts, calls = [], []
    for index, (code, vector) in enumerate(zip(codes, parameters, strict=True)):
        texts.append(re.sub(r"\bformula(?=\b|_)", f"f{index}", code))
        indices = [int(name[1:]) - 1 for name in code.names]
        calls.append((f"f{index}", indices, list(vector)))
    if language in ("numpy", "jax", "torch", "python"):
        return _in_python(language, texts, calls, columns)
    values = np.empty((len(codes), columns.shape[1]))
    if language in _LIBRARY:
        source, library = folder / f"source_{language}", folder / f"lib_{language}.so"
        source.write_text("\n".join(texts) + _driver(language, calls))
        command = [*_LIBRARY[language].split(), "-o", str(library), str(source)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:3000]
        rows, given = ctypes.c_long(columns.shape[1]), np.ascontiguousarray(columns)
        ctypes.CDLL(str(library)).run(given.ctypes, rows, values.ctypes)
        return values
    np.ascontiguousarray(columns).tofile(folder / "in.bin")
    script = folder / f"script_{language}"
    script.write_text(_script(language, texts, calls, columns.shape))
    arguments = ["--norc", "--quiet"] if language == "octave" else []
    command = [COMMANDS[language], *arguments, str(script)]
    settings = {**os.environ, "R_ENABLE_JIT": "0"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=settings)
    assert done.returncode == 0, (done.stderr + done.stdout)[-3000:]
    return np.fromfile(folder / "out.bin").reshape(values.shape)


def _in_python(language, texts, calls, columns):
    values = []
    for text, (name, indices, vector) in zip(texts, calls, strict=True):
        namespace: dict = {}
        exec(compile(text, language, "exec"), namespace)
        function = namespace[name]
        if language == "python":
            rows = (columns[index].tolist() for index in indices)
            each = zip(*rows, strict=True) if indices else [()] * columns.shape[1]
            found = [function(*row, *vector) for row in each]
            assert all(type(number) is float for number in found), text
        else:
            table = columns.T
            if language == "torch":
                table = importlib.import_module("torch").from_numpy(table.copy())
            found = np.asarray(function(table, vector) if vector else function(table))
            assert (found.dtype, found.shape) == (np.float64, columns[0].shape), text
        values.append(found)
    return np.array(values)


def _number(value, language):
    text = repr(value)
    if language == "fortran":
        return text.replace("e", "d") if "e" in text else f"{text}d0"
    return text


def _driver(language, calls):
    lines = []
    for position, (name, indices, vector) in enumerate(calls):
        numbers = [_number(value, language) for value in vector]
        if language == "fortran":
            arguments = ", &\n".join([*(f"x(:, {i + 1})" for i in indices), *numbers])
            lines.append(f"  out(:, {position + 1}) = {name}({arguments})")
        else:
            cell = "*x.add({} * rows + r)" if language == "rust" else "x[{} * rows + r]"
            arguments = ", ".join([*(cell.format(i) for i in indices), *numbers])
            target = cell.format(position).replace("x", "out", 1)
            lines.append(f"{target} = {name}({arguments});")
    body = "\n".join(lines)
    if language == "rust":
        head = 'pub unsafe extern "C" fn run(x: *const f64, rows: usize, out: *mut f64) {'
        return f"\n#[no_mangle]\n{head}\nfor r in 0..rows {{\n{body}\n}}\n}}\n"
    if language == "fortran":
        uses = "\n".join(f"  use {name}_module" for name, _, _ in calls)
        return (
            f"\nsubroutine run(x, rows, out) bind(c)\n  use, intrinsic :: iso_c_binding\n{uses}\n"
            "  integer(c_long), value :: rows\n  real(c_double) :: x(rows, *)\n"
            f"  real(c_double) :: out(rows, {len(calls)})\n{body}\nend subroutine\n"
        )
    linkage = 'extern "C" ' if language != "c" else ""
    head = f"\n{linkage}void run(const double *x, long rows, double *out) {{"
    return f"{head}\nfor (long r = 0; r < rows; r++) {{\n{body}\n}}\n}}\n"


def _script(language, texts, calls, shape):
    variables, rows = shape
    begin = {"javascript": 0, "r": 1, "octave": 1}[language]
    column = {"javascript": "x[{}][r]", "r": "x[, {}]", "octave": "x(:, {})"}[language]
    lines = []
    for name, indices, vector in calls:
        arguments = ", ".join([*(column.format(i + begin) for i in indices), *map(repr, vector)])
        lines.append(
            {
                "javascript": f"for (let r = 0; r < {rows}; r++) out.push({name}({arguments}));",
                "r": f"out[[{len(lines) + 1}]] <- rep_len({name}({arguments}), {rows})",
                "octave": f"out = [out; zeros({rows}, 1) + {name}({arguments})];",
            }[language]
        )
    whole, body = "\n".join(texts), "\n".join(lines)
    if language == "javascript":
        return (
            "'use strict';\nconst fs = require('fs');\nconst bytes = fs.readFileSync('in.bin');\n"
            "const all = new Float64Array(bytes.buffer, bytes.byteOffset, bytes.length / 8);\n"
            f"const x = [...Array({variables}).keys()]"
            f".map(i => all.subarray(i * {rows}, (i + 1) * {rows}));\n"
            f"const out = [];\n{whole}\n{body}\n"
            "fs.writeFileSync('out.bin', Buffer.from(new Float64Array(out).buffer));\n"
        )
    if language == "r":
        return (
            f"options(warn = -1)\n{whole}\n"
            f"x <- matrix(readBin('in.bin', 'double', {variables * rows}), ncol = {variables})\n"
            f"out <- list()\n{body}\nwriteBin(as.double(unlist(out)), 'out.bin')\n"
        )
    return (
        f"1;\n{whole}\nfile = fopen('in.bin');\n"
        f"x = reshape(fread(file, {variables * rows}, 'double'), {rows}, {variables});\n"
        f"out = [];\n{body}\n"
        "file = fopen('out.bin', 'w');\nfwrite(file, out, 'double');\nfclose(file);\n"
    )


def available(language):
    if language in ("jax", "torch"):
        return importlib.util.find_spec(language) is not None
    return language in ("numpy", "python") or shutil.which(COMMANDS[language]) is not None
