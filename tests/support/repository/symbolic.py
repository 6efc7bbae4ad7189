"""SRBench's rule for whether a search has found the formula that made the data.

La Cava et al., "Contemporary symbolic regression methods and their relative performance" (NeurIPS
Datasets and Benchmarks, 2021): a formula is a solution if, after its numbers have been rounded to
three decimals and it has been simplified, it is no constant, and its difference from the true one
is a constant or its ratio to it is a constant that is not 0.
"""

import multiprocessing as mp
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import sympy

from warpfit.frontends.sympy import to_sympy
from warpfit.parse import parse

#: Random rows on which formulas are compared first, fewest of them where both have a value, and
#: variation of what counts as constant.
_ROWS, _FEWEST_ROWS, _VARIES = 300, 20, 0.01


def is_solution(found: str, true: str, names: Sequence[str], seconds: float = 60.0) -> bool:
    """Judge a formula over x1, x2, ... or the names; ``true`` is over the names.

    One that SymPy cannot judge within ``seconds`` counts as none.
    """
    context = mp.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_judge, args=(sender, found, true, tuple(names)))
    process.start()
    sender.close()
    try:
        return bool(receiver.recv()) if receiver.poll(seconds) else False
    except EOFError:
        return False
    finally:
        process.kill()
        process.join()


def _judge(sender: Any, found: str, true: str, names: tuple[str, ...]) -> None:
    """Compare numbers as they are rounded before, and after products are multiplied out.

    Multiplied out, 0.6629870^2 * 1.1375223 is 0.5 and not 0.663^2 * 1.138; 1/3 is not 0.333.
    """
    own, law = _expression(found, names), _expression(true, names)
    is_same = False
    if _is_close(own, law):
        exact = sympy.nsimplify(law, rational=True, tolerance=1e-12)
        wanted = (_rounded(sympy.simplify(sympy.N(law))), exact)
        forms = (_rounded(shape(own)) for shape in _SHAPES)
        is_same = any(_solves(form, each) for form in forms for each in wanted)
    sender.send(is_same)


def _is_close(found: Any, true: Any) -> bool:
    """Tell whether difference or ratio hardly vary, which spares SymPy most formulas.

    Rounding changes a formula by far less.
    """
    variables = sorted(found.free_symbols | true.free_symbols, key=str)
    rows = np.random.default_rng(0).uniform(0.5, 3.0, (len(variables), _ROWS))
    with np.errstate(all="ignore"):
        values = (
            sympy.lambdify(variables, each, ["scipy", "numpy"])(*rows) for each in (found, true)
        )
        a, b = (np.broadcast_to(each, _ROWS) for each in values)
        sound = np.isfinite(a) & np.isfinite(b) & np.isreal(a) & np.isreal(b)
        a, b = a[sound].real.astype(float), b[sound].real.astype(float)
        if len(a) < _FEWEST_ROWS:
            return True
        differs = np.std(a - b) > _VARIES * np.std(b)
        return bool(not differs or np.std(a / b) <= _VARIES * np.abs(np.mean(a / b)))


def _expression(text: str, names: tuple[str, ...]) -> Any:
    # They are positive, so that sqrt(x^2) is x.
    variables = [sympy.Symbol(f"v{place}", positive=True) for place in range(len(names))]
    expression = to_sympy(parse(text, names))
    known: dict[str, Any] = {f"x{place + 1}": v for place, v in enumerate(variables)}
    known |= dict(zip(names, variables, strict=True))
    return expression.subs({s: known[s.name] for s in expression.free_symbols})


_SHAPES: Final = (
    lambda e: e,
    sympy.expand,
    sympy.simplify,
    lambda e: sympy.powsimp(sympy.powdenest(sympy.expand_log(sympy.expand(e)), force=True)),
)


def _rounded(expression: Any) -> Any:
    """Round numbers to three decimals, as rationals, and leave out those that become 0."""
    floats = expression.atoms(sympy.Float)
    numbers = {n: sympy.Rational(str(round(float(n), 3))) for n in floats}
    return expression.xreplace(numbers)


def _solves(found: Any, true: Any) -> bool:
    if not _is_close(found, true):
        return False
    found = sympy.simplify(found)
    if found.is_constant():
        return False
    difference = sympy.simplify(_rounded(sympy.N(sympy.expand(found - true))))
    if _is_constant(difference):
        return True
    ratio = sympy.simplify(found / true)
    if not ratio.is_constant() and ratio.atoms(sympy.Pow):
        # SymPy sees of few roots that they are equal, and of their squares that they are.
        ratio = sympy.simplify(ratio**2)
    return bool(_is_constant(ratio) and ratio != 0)


def _is_constant(expression: Any) -> bool:
    """Tell whether an expression is constant, of which SymPy looks at a few points between 0 and 1.

    What has a branch elsewhere is no constant.
    """
    branches = sympy.Piecewise, sympy.Min, sympy.Max
    return bool(expression.is_constant() and not expression.has(*branches))
