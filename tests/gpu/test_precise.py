"""Errors on a device: of every operator at hard operands, and of the functions of precise
arithmetic at all float32 operands, or very many pairs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from support.engines.accuracy import BOUNDS, Bound, error_limit, excess, rounded_threshold
from support.engines.hard_cases import SLOW, exact_values, hard_operands, near_multiples_of_half_pi
from warpfit.dataset import Dataset
from warpfit.ir import Program
from warpfit.ops import OPERATORS
from warpfit.request import Precision, Tier
from warpfit_server.engine.cuda.runtime import compiler
from warpfit_server.engine.cuda.runtime.translation import compiler_options, prelude
from warpfit_server.engine.interface import Arithmetic

#: Function, the same in float64, whether of pairs, and the largest error in ulp.
FUNCTIONS = {
    "log": ("logarithm(a)", "log((double)a)", False, 2.0),
    "exp": ("exponential(a)", "exp((double)a)", False, 2.0),
    "sqrt": ("root(a)", "sqrt((double)a)", False, 1.0),
    "inv": ("quotient(1.0f, a)", "1.0 / (double)a", False, 0.501),
    "div": ("quotient(a, b)", "(double)a / (double)b", True, 0.501),
    "pow": ("power(a, b)", "pow((double)a, (double)b)", True, 4.0),
}


def largest_share(evaluate, name: str, operands, bound: Bound, **options) -> float:
    """Largest error of an operator on the device as a share of its bound; printed."""
    operator = OPERATORS[name]
    if name in SLOW:  # whose truth takes long
        operands = operands[:, ::20]
    if name in ("pdiv", "plog", "pinv"):
        operands = operands[:, ~rounded_threshold(list(operands), operands.dtype)]
    program = Program.apply(name, *(Program.variable(k) for k in range(operator.arity)))
    exact = exact_values(operator, operands)
    if options["precision"] is Precision.FAST:
        kept = _has_fast_bound(operands, exact)
        operands, exact = operands[:, kept], exact[kept]
    data = Dataset.of(operands.T, dtype=operands.dtype)
    got = evaluate(data, [program], **options).values[0, 0]
    share = excess(bound, list(operands), got, exact)
    worst = int(share.argmax())
    with np.errstate(all="ignore"):
        limit = error_limit(bound, list(operands), exact.astype(got.dtype))[worst]
    print(
        f"{name}: {share[worst]:.3f} of the bound {limit:.3g} ({bound}) at "
        f"{operands[:, worst].tolist()}: got {got[worst]!r}, exact {exact[worst]!r}"
    )
    return float(share[worst])


def _has_fast_bound(operands, exact):
    """Rows without subnormal or infinite numbers, for which fast arithmetic promises nothing."""
    with np.errstate(all="ignore"):
        columns = np.concatenate([operands, exact[np.newaxis].astype(np.float32)])
        vanishes = (columns[-1] == 0) & (exact != 0)
    tiny = (columns != 0) & (np.abs(columns) < 2 * np.finfo(np.float32).tiny)
    return ~(tiny | np.isinf(columns)).any(axis=0) & ~vanishes & ~np.isnan(operands).any(axis=0)


MODES = [("float32", each) for each in Precision] + [("float64", Precision.PRECISE)]


@pytest.mark.parametrize("tier", [Tier.INTERPRETER, Tier.COMPILED])
@pytest.mark.parametrize(("dtype", "precision"), MODES)
@pytest.mark.parametrize("name", OPERATORS)
def test_bounds_hold_at_hard_operands(evaluate, name, dtype, precision, tier):
    """Run it with ``-s`` to see how much of each bound is used."""
    operands = hard_operands(OPERATORS[name], dtype)
    bound = getattr(BOUNDS[name], f"{precision}_cuda")
    assert largest_share(evaluate, name, operands, bound, precision=precision, tier=tier) <= 1


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["sin", "cos", "tan"])
def test_circular_functions_next_to_all_multiples_of_half_pi(evaluate, name, dtype):
    options = {"precision": Precision.PRECISE, "tier": Tier.INTERPRETER}
    operands = near_multiples_of_half_pi(dtype, 1_000_000)[np.newaxis]
    assert largest_share(evaluate, name, operands, BOUNDS[name].precise_cuda, **options) <= 1


@pytest.mark.parametrize("name", FUNCTIONS)
def test_errors_stay_within_their_bounds(engine, name):
    cupy = pytest.importorskip("cupy")
    function, exact, pairs, bound = FUNCTIONS[name]
    source = f"#define FUNCTION {function}\n#define EXACT {exact}\n" + prelude(Arithmetic.PRECISE)
    source += Path(__file__).with_name("precise_errors.cu").read_text()
    capability = int(cupy.cuda.Device().compute_capability)
    options = ("--std=c++17", *compiler_options(Arithmetic.PRECISE))
    module = cupy.cuda.function.Module()
    module.load(compiler.to_cubin(source, capability, options))
    worst, wrong = (cupy.zeros(1, dtype=np.uint64) for _ in range(2))
    count = 1 << (30 if pairs else 32)
    arguments = (np.uint64(count), np.int32(pairs), worst, wrong)
    module.get_function("errors")((1024, 1, 1), (256, 1, 1), arguments)
    assert int(wrong[0]) == 0
    assert 0 < float(worst.view(np.float64)[0]) <= bound
