"""Derivatives by an engine, without a server, and by complex steps, independent of the product.

A complex step of 1e-100 gives derivatives without cancellation (Squire and Trapp, "Using complex
variables to estimate derivatives of real functions", SIAM Review 40, 1998).
"""

import re
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from support.engines.references import POISON
from warpfit.dataset import Dataset, Layout
from warpfit.ir import Batch, Program
from warpfit.losses import LossFunction
from warpfit.request import Evaluation, Precision
from warpfit_server.engine.interface import MOMENTS, Engine, Linearisation, Outputs, run_to_end

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


def derive(
    engine: Engine,
    dataset: Dataset,
    programs: Sequence[Program],
    parameters: Sequence[Any] | None = None,
    *,
    row_loss: Program | None = None,
    cancelled: bool = False,
    statistics: bool = False,
    **options: Any,
) -> Outputs:
    """Evaluate with all derivatives (those of the loss if there is one)."""
    batch = Batch.of(programs, parameters)
    loss = None if row_loss is None else LossFunction(row_loss, "sum")
    evaluation = Evaluation(
        dataset.content_id, batch, custom_loss=loss, gradient=loss is not None, jacobian=True,
        variable_gradient=loss is not None, reductions=statistics, **options,
    )  # fmt: skip
    return ask(engine, dataset, evaluation, cancelled=cancelled, moments=statistics)


def ask(engine: Engine, dataset: Dataset, evaluation: Evaluation, **options: Any) -> Outputs:
    """Evaluate into outputs as `outputs_for` allocates them."""
    evaluation.check(dataset.layout)
    outputs = outputs_for(evaluation, dataset.layout, **options)
    engine.load(dataset)
    run_to_end(engine.evaluate(evaluation, outputs))
    return outputs


def outputs_for(
    evaluation: Evaluation, layout: Layout, *, cancelled: bool = False, moments: bool | None = None
) -> Outputs:
    """Allocate what an evaluation requests, full of `POISON`; by default with needed moments."""
    shape = evaluation.shape(layout)
    cells, parameters = shape[:2], len(evaluation.batch.parameters)
    moments = evaluation.needs_moments if moments is None else moments

    def array(is_wanted: bool, *shape: int, dtype: Any = np.float64) -> Any:
        return np.full(shape, POISON, dtype) if is_wanted else None

    return Outputs(
        values=array(evaluation.values, *shape, dtype=layout.dtype),
        losses=array(evaluation.loss_function is not None, *cells),
        cancelled=np.full(1, cancelled, dtype=np.uint8),
        ready=lambda programs: None,
        gradients=array(evaluation.gradient, parameters),
        jacobian=array(evaluation.jacobian, parameters, shape[2], dtype=layout.dtype),
        variable_gradients=array(evaluation.variable_gradient, *cells, layout.variables),
        reductions=array(evaluation.reductions, *cells, 5),
        moments=array(moments, *cells, MOMENTS),
    )


def linearise(
    engine: Engine,
    dataset: Dataset,
    programs: Sequence[Program],
    parameters: Sequence[Any],
    row_loss: Program,
    *,
    rows: tuple[int, int] | None = None,
    precision: Precision = Precision.PRECISE,
    curvature: bool = True,
) -> Linearisation:
    """Linearise without a server."""
    engine.load(dataset)
    evaluation = Evaluation(
        dataset.content_id, Batch.of(programs, parameters), rows=rows, precision=precision
    )
    flag = np.zeros(1, dtype=np.uint8)
    return run_to_end(engine.linearise(evaluation, row_loss, curvature=curvature, cancelled=flag))
