"""Functions that are written with operators: the standard ones and a user's own."""

import mpmath
import numpy as np
import pytest
import scipy.special
import sympy
from deap import gp

import warpfit
from support.refusals import refused
from warpfit.errors import InvalidArgumentError
from warpfit.expressions import reference
from warpfit.frontends import as_population, as_program
from warpfit.ops import CONSTANT, VARIABLE
from warpfit.parse import MACROS, STANDARD

OF_NUMPY = ("fmod", "trunc", "copysign", "hypot", "deg2rad", "rad2deg", "clip", "exp2")
MEANINGS = {
    **{name: getattr(np, name) for name in OF_NUMPY},
    # Of the limits at infinity; NumPy's own has NaN there.
    "sinc": lambda a: np.where(a == 0, 1, np.where(np.isinf(a), 0, np.sin(a) / a)),
    "sinpi": np.vectorize(lambda a: float(mpmath.sinpi(a)) if np.isfinite(a) else np.nan),
    "cospi": np.vectorize(lambda a: float(mpmath.cospi(a)) if np.isfinite(a) else np.nan),
    **{"heaviside": lambda a: np.heaviside(a, 0.5), "exp10": lambda a: 10.0**a},
    "softplus": lambda a: np.logaddexp(a, 0),
    "softsign": lambda a: np.where(np.isinf(a), np.sign(a), a / (1 + np.abs(a))),
    "swish": lambda a: np.maximum(a, -1e3) * scipy.special.expit(a),
    "gelu": lambda a: np.maximum(a, -1e3) * scipy.special.ndtr(a),
    **{"elu": lambda a: np.where(a > 0, a, np.expm1(a)), "gaussian": lambda a: np.exp(-(a**2))},
    "factorial": lambda a: scipy.special.gamma(a + 1),
}
for of, name in (("sin", "csc"), ("cos", "sec"), ("tan", "cot")):
    MEANINGS[f"a{of}h"] = getattr(np, f"arc{of}h")
    for h in ("", "h"):
        own, inverse = getattr(np, of + h), getattr(np, f"arc{of}{h}")
        MEANINGS[name + h] = lambda a, f=own: 1 / f(a)
        MEANINGS[f"a{name}{h}"] = lambda a, f=inverse: f(1 / a)
#: Beside ordinary numbers those where a formula overflows, underflows, cancels or has a limit.
FAR = np.array(
    [5e-324, 1e-310, 1e-160, 1e-9, 1e-5, 0.4999, 30, 700, 1e9, 1e10, 1e155, 1.7e308, np.inf]
)
A = np.concatenate(
    [[0.0, 1e-9, -1e-9, 1e-3, 1.0, 300.0, -300.0], np.linspace(-5, 5, 33) + 0.01, FAR, -FAR]
)
EDGES = [0.0, -0.0, 1.0, -2.5, 5e-324, -1e-310, 1.7e308, -1.7e308, np.inf, -np.inf, np.nan]
ROWS = np.hstack(
    [
        np.stack([A, np.roll(A, 3) + 0.5, np.abs(A) + 1.0]),
        np.stack([*map(np.ravel, np.meshgrid(EDGES, EDGES)), np.full(len(EDGES) ** 2, 2.0)]),
    ]
)
#: Functions whose zeros have the sign that C and NumPy give them.
SIGNED_ZEROS = ("asinh", "atanh", "fmod", "trunc", "copysign", "hypot", "deg2rad", "rad2deg")


@pytest.fixture
def own():
    """Names of functions that the test defines, and that are forgotten after it."""
    kept = [(each, dict(each)) for each in (MACROS._by_name, MACROS._by_code)]
    yield
    for each, before in kept:
        each.clear()
        each.update(before)
    warpfit.parse.__globals__["parser"].cache_clear()


@pytest.mark.parametrize("name", STANDARD)
def test_standard_functions_are_what_numpy_and_scipy_compute(name):
    operands = {"fmod": 2, "copysign": 2, "hypot": 2, "clip": 3}.get(name, 1)
    program = warpfit.parse(f"{name}({', '.join(['x1', 'x2', 'x3'][:operands])})")
    with np.errstate(all="ignore"):
        wanted = MEANINGS[name](*ROWS[:operands])
        got = reference.evaluate_program(program, ROWS)
    np.testing.assert_allclose(got, wanted, rtol=1e-13, atol=1e-300 if name == "gelu" else 0)
    if name in SIGNED_ZEROS:
        zeros = wanted == 0
        np.testing.assert_array_equal(np.signbit(got[zeros]), np.signbit(wanted[zeros]))


def test_derivatives_keep_their_digits_near_zero_and_far_from_it():
    for name, slope in (
        # Of quotients that cancel: digits by Taylor's series, and by 1 / (1 + |a|)^2.
        ("sinc", lambda a: -a / 3 + a**3 / 30 - a**5 / 840),
        *(("softsign", lambda a: 1 / (1 + abs(a)) ** 2), ("asinh", lambda a: 1 / np.hypot(1, a))),
    ):
        a = np.array([1e-12, -1e-8, 1e-6, 1e-4, -0.01])
        if name != "sinc":
            a = np.concatenate([a, [1e3, -1e6, 1e8, -2e9, 1e15]])
        program = warpfit.parse(f"{name}(x1)")
        got = reference.differentiate(program, a[np.newaxis], by=VARIABLE)[1][0]
        np.testing.assert_allclose(got, slope(a), rtol=1e-13)


def test_derivatives_have_their_limits_at_zero():
    limits = dict.fromkeys(("asinh", "atanh", "softsign"), 1.0)
    limits |= {"sinc": 0.0, "gaussian": 0.0, "softplus": 0.5, "swish": 0.5, "gelu": 0.5}
    for name, slope in limits.items():
        program = warpfit.parse(f"{name}(x1 + p1)")
        found = reference.differentiate(program, [[0.0]], [0.0])[1]
        np.testing.assert_allclose(found, [[slope]], atol=1e-15, err_msg=name)


def test_a_function_of_ones_own_is_known_everywhere_until_it_is_replaced(own):
    warpfit.define("ratio", "where(b == 0, 1, sin(a)/b)")
    wanted = warpfit.parse("where(x2 + 1 == 0, 1, sin(x1)/(x2 + 1))")
    assert warpfit.parse("ratio(x1, x2 + 1)") == wanted
    assert warpfit.parse("2*ratio(x1, x2 + 1)") == warpfit.parse(f"2*{wanted}")
    x1, x2 = sympy.symbols("x1 x2")
    assert as_program(sympy.Function("ratio")(x1, x2)) == warpfit.parse("ratio(x1, x2)")
    pset = gp.PrimitiveSet("MAIN", 2)
    pset.addPrimitive(lambda a, b: a, 2, name="ratio")
    pset.addPrimitive(max, 3, name="max")
    tree = gp.PrimitiveTree.from_string("max(ARG0, ratio(ARG0, ARG1), 2.0)", pset)
    assert as_population([tree]) == as_population(["max(x1, ratio(x1, x2), 2.0)"])
    warpfit.define("twice", "a + a")
    warpfit.define("fourfold", "twice(twice(a))")
    warpfit.define("twice", "2*a")
    assert warpfit.parse("twice(x1)") == warpfit.parse("2*x1")
    assert warpfit.parse("fourfold(x1)") == warpfit.parse("x1 + x1 + (x1 + x1)")


def test_names_of_the_standard_functions_in_sympy():
    x1, x2 = sympy.symbols("x1 x2", real=True)
    for expression in (
        *(f(x1 / 7) for f in (sympy.asinh, sympy.atanh, sympy.sec, sympy.csc, sympy.cot)),
        *(f(x1) for f in (sympy.sinc, sympy.erfc, sympy.sech, sympy.Heaviside)),
        *(sympy.Mod(x1, x2), sympy.acosh(x1**2 + 1), sympy.Heaviside(x1, 1)),
    ):
        columns = np.array([[0.5, -1.25, 2.0, 0.0], [2.0, 1.5, -0.75, 3.0]])
        with np.errstate(all="ignore"):
            wanted = [
                complex(expression.subs({x1: a, x2: b}).evalf()) for a, b in columns.T.tolist()
            ]
            got = reference.evaluate_program(as_program(expression), columns)
        both = np.isfinite(wanted) & np.isfinite(got)
        assert both.sum() >= 3, expression
        np.testing.assert_allclose(got[both], np.real(wanted)[both], rtol=1e-12, atol=1e-15)


def test_definitions_that_are_refused(own):
    for name, text, reason in (
        *(("sin", "cos(a)", "BAD_NAME"), ("not", "1 - a", "BAD_NAME")),
        *(("loop", "1 + loop(a)", "RECURSION"), ("none", "2 + 3", "BAD_OPERANDS")),
        *(("gap", "a + c", "BAD_OPERANDS"), ("fitted", "p1*a", "UNKNOWN_NAME")),
        ("later", "not_yet(a)", "UNKNOWN_FUNCTION"),
        ("long", "+".join(["a"] * 600), "MACRO_TOO_LONG"),
    ):
        refused(reason, warpfit.define, name, text)


def test_calls_are_written_out_and_definitions_are_taken_up_to_a_limit(own):
    warpfit.define("many", "+".join(["a"] * 100))
    assert (warpfit.parse("many(many(2))").codes == CONSTANT).sum() == 10_000
    error = refused("MACRO_TOO_LONG", as_population, ["x1", "many(many(many(x1)))"])
    assert error.expression == 1
    with pytest.raises(InvalidArgumentError, match="no room for another function"):
        for number in range(200):
            warpfit.define(f"function{number}", "a + 1")
    refused("unknown function", warpfit.parse, "function199(x1)")
