"""Values and Jacobians of formulas by NumPy and complex steps, independent of the product.

A complex step of 1e-100 gives derivatives without cancellation (Squire and Trapp, "Using complex
variables to estimate derivatives of real functions", SIAM Review 40, 1998).
"""

import re
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_STEP: Final = 1e-100


def _power(a: Any, b: Any) -> Any:
    """Return a**b; complex steps of a negative base need an exponent that is a whole number."""
    if not np.iscomplexobj(a) and not np.iscomplexobj(b):
        return np.power(np.asarray(a, float), b)
    base, exponent = np.real(a), np.real(b)
    value = np.power(np.asarray(base, float), exponent)
    slope = exponent * np.power(np.asarray(base, float), exponent - 1.0) * np.imag(a)
    moves = np.imag(b) != 0.0
    turn = np.where(moves, value * np.log(base) * np.imag(b), 0.0)
    return value + 1j * (np.where(np.imag(a) != 0.0, slope, 0.0) + turn)


def _sign(a: Any) -> Any:
    return np.sign(np.real(a))


_FUNCTIONS: Final[dict[str, Any]] = {
    "abs": lambda a: a * _sign(a),
    "sign": _sign,
    "pi": np.pi,
    "power": _power,
    "sqrt": np.sqrt,
    "atan": np.arctan,
    **{name: getattr(np, name) for name in ("exp", "log", "sin", "cos", "tanh")},
}


class Formula:
    """A formula in warpfit's text, with the operators of this module's table."""

    def __init__(self, text: str, columns: Floats) -> None:
        # Python reads `**` as warpfit reads `^`; powers become calls by way of their own class.
        self._code = compile(text.replace("^", "**"), text, "eval")
        self._columns = {f"x{i + 1}": _Number(c) for i, c in enumerate(columns.T)}
        self._rows = len(columns)
        self._names = sorted(set(re.findall(r"\bp\d+\b", text)), key=lambda name: int(name[1:]))

    def values(self, parameters: Floats) -> Floats:
        """Return the values, [rows]."""
        return np.real(self._evaluate(parameters))

    def jacobian(self, parameters: Floats, step: float = _STEP) -> Floats:
        """Return the derivatives of the values by the parameters, [rows, parameters].

        At a singular point, such as that of the square root at 0, they depend on the step.
        """
        columns = []
        for i in range(len(parameters)):
            moved = np.asarray(parameters, dtype=complex)
            moved[i] += 1j * step
            columns.append(np.imag(self._evaluate(moved)) / step)
        return np.stack(columns, axis=1)

    def _evaluate(self, parameters: NDArray[Any]) -> NDArray[Any]:
        # Real where there is no step, so that a power knows what moves.
        given = [p.real if p.imag == 0.0 else p for p in parameters]
        names = {f"p{i + 1}": _Number(p) for i, p in enumerate(given)}
        functions = {
            name: _on_numbers(f) if callable(f) else _Number(f) for name, f in _FUNCTIONS.items()
        }
        with np.errstate(all="ignore"):
            value = eval(self._code, {"__builtins__": {}}, functions | self._columns | names)
        return np.broadcast_to(_plain(value), self._rows)


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, _Number) else value


def _on_numbers(function: Any) -> Any:
    return lambda *operands: _Number(function(*map(_plain, operands)))


class _Number:
    """A real or complex array whose powers are those of `_power`."""

    def __init__(self, value: Any) -> None:
        self.value = np.asarray(value)

    def __add__(self, other: Any) -> "_Number":
        return _Number(self.value + _plain(other))

    def __sub__(self, other: Any) -> "_Number":
        return _Number(self.value - _plain(other))

    def __rsub__(self, other: Any) -> "_Number":
        return _Number(_plain(other) - self.value)

    def __mul__(self, other: Any) -> "_Number":
        return _Number(self.value * _plain(other))

    def __truediv__(self, other: Any) -> "_Number":
        return _Number(self.value / _plain(other))

    def __rtruediv__(self, other: Any) -> "_Number":
        return _Number(_plain(other) / self.value)

    def __pow__(self, other: Any) -> "_Number":
        return _Number(_power(self.value, _plain(other)))

    def __rpow__(self, other: Any) -> "_Number":
        return _Number(_power(_plain(other), self.value))

    def __neg__(self) -> "_Number":
        return _Number(-self.value)

    __radd__ = __add__
    __rmul__ = __mul__


def steepest_cosine(jacobian: Floats, residuals: Floats, free: NDArray[np.bool_]) -> float:
    """Return the largest cosine between the residuals and a column that may move.

    Args:
        jacobian: [rows, parameters].
        residuals: prediction minus target, [rows].
        free: which columns count, [parameters].
    """
    steepest = 0.0
    for column in jacobian[:, free].T:
        lengths = [np.abs(a).max(initial=0.0) for a in (column, residuals)]
        if all(lengths):
            a, b = column / lengths[0], residuals / lengths[1]
            steepest = max(steepest, float(abs(a @ b) / np.sqrt((a @ a) * (b @ b))))
    return steepest
