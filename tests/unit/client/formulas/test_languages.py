"""Programs in other languages, compiled and run against the reference."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest

from support.engines.languages import available, run
from support.random_programs import random_program
from warpfit import Program, parse
from warpfit.expressions.reference import evaluate_program
from warpfit.formulas.languages import LANGUAGES
from warpfit.ops import OPERATORS

VALUES = [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, 0.0005, 30.0, np.inf, -np.inf, np.nan]
COLUMNS = np.array([(a, b, c) for a in VALUES for b in VALUES for c in (0.5, -2.0, np.nan)]).T
COLUMNS = np.hstack([COLUMNS, np.random.default_rng(0).uniform(-8, 8, (3, 100))])
#: Operators that may return either of 0 and -0, as NumPy's.
MIN_MAX = [OPERATORS[name].code for name in ("min", "max")]
CONSTANTS = [0.7, -2.0, 0.0, -0.0, np.inf, -np.inf, np.nan, 2.5e-300, 1e300, 1 / 3]


def operators():
    """Return every operator over variables, and over a variable and constants."""
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


def random_programs():
    rng = np.random.default_rng(1)
    return [
        random_program(rng, int(rng.integers(4, 20)), variables=3, operators=tuple(OPERATORS))
        for _ in range(40)
    ]


@pytest.fixture(scope="module")
def cases():
    """Return programs, their parameters, their values, and how far other values may be."""
    rng = np.random.default_rng(2)
    programs = [*operators(), *random_programs()]
    vectors = [rng.uniform(-2, 2, program.parameters) for program in programs]
    wanted, allowed = [], []
    with np.errstate(all="ignore"):
        for program, vector in zip(programs, vectors, strict=True):
            values = evaluate_program(program, COLUMNS, vector)
            errors = []
            for noise in (
                np.ones,
                lambda shape: -np.ones(shape),
                *[lambda s: rng.uniform(-1, 1, s)] * 3,
            ):
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
EDGE_COLUMNS = np.hstack(
    [
        np.stack(
            [*map(np.ravel, np.meshgrid(EDGES, EDGES)), np.resize(EDGES[::-1], len(EDGES) ** 2)]
        ),
        np.stack([ODD, np.roll(ODD, 5), np.roll(ODD, 9)]),
    ]
)


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_operator_at_the_edges_of_float64(language, tmp_path):
    if not available(language) or language == "jax":
        pytest.skip(f"nothing here runs {language}, or it has no subnormal numbers")
    texts = ["fmod(x1, x2)", "hypot(x1, x2)", "sinc(x1)"]
    programs = [
        *(
            Program.apply(row, *map(Program.variable, range(row.arity)))
            for row in OPERATORS.values()
        ),
        *map(parse, texts),
    ]
    codes = [program.code(language) for program in programs]
    with np.errstate(all="ignore"):
        found = run(language, codes, [[]] * len(codes), EDGE_COLUMNS, tmp_path)
    for values, program in zip(found, programs, strict=True):
        wanted = evaluate_program(program, EDGE_COLUMNS)
        is_log = "lgamma" in str(program)  # with zeros at 1 and 2, and an absolute error there
        np.testing.assert_allclose(
            values, wanted, rtol=1e-13, atol=2e-15 if is_log else 1e-322, err_msg=str(program)
        )
        # Octave's driver adds 0 to the results.
        if language != "octave" and program.codes[-1] not in MIN_MAX:
            at = np.flatnonzero((wanted == 0) & (np.signbit(values) != np.signbit(wanted)))
            assert not len(at), (str(program), EDGE_COLUMNS[:, at[:3]].T)


@pytest.mark.parametrize("language", LANGUAGES)
def test_lgamma_keeps_its_digits_next_to_its_zeros(language, tmp_path):
    if not available(language) or language == "cuda":
        pytest.skip(f"nothing here runs {language}, or its text is that of C++ but for two words")
    steps = np.r_[0.0, 10.0 ** np.arange(-16, 0), 0.3, 0.49999, 0.5]
    x = np.unique(np.concatenate([zero + sign * steps for zero in (1, 2) for sign in (1, -1)]))
    with mpmath.workdps(40):
        wanted = np.array([float(mpmath.loggamma(float(each))) for each in x])
    (found,) = run(language, [parse("lgamma(x1)").code(language)], [[]], x[None], tmp_path)
    np.testing.assert_allclose(found, wanted, rtol=4e-15, atol=0.0)


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
        pytest.fail(
            f"{programs[index]} with {vectors[index]} at {COLUMNS[:, at].T}: {found[index, at]}, "
            f"not {wanted[index, at]}\n{codes[index]}"
        )
