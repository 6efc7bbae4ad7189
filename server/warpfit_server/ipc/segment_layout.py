"""Where the arrays of one evaluation lie in the segment that both processes map."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Layout
from warpfit.fitting import FitRequest
from warpfit.ir import Batch, Program
from warpfit.losses import Closing, LossFunction
from warpfit.request import Evaluation
from warpfit_server.ipc.segments import Segment

_ALIGNMENT: Final = 64
_F8, _U4, _U1 = (np.dtype(name) for name in ("<f8", "<u4", "u1"))

#: What an engine has done with a request so far; a front end reads it when the engine has died.
QUEUED, BEGUN, ALONE = 0, 1, 2
#: Indices of offsets: of the loss function's values and codes, and of the first extra.
_LOSS, _EXTRAS = 7, 9

#: Arrays of a fit's result with one number for each program and vector.
FIT_CELLS: Final[Mapping[str, str]] = MappingProxyType(
    {
        **{"losses": "<f8", "initial_losses": "<f8", "iterations": "<u4"},
        **{"evaluations": "<u4", "reasons": "u1", "starts": "<u4"},
    }
)


@dataclass(frozen=True, slots=True)
class Extra:
    """One more array of a frame."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Frame:
    """Where the arrays of one evaluation lie in its segment.

    Byte 0 is the cancellation flag, which the front door sets and the engine polls.
    """

    tokens: int
    programs: int
    parameters: int
    """Numbers in all parameter vectors."""
    vectors: int
    rows: int
    dtype: np.dtype[np.generic]
    values: bool
    losses: bool
    jacobian: bool = False
    extras: tuple[Extra, ...] = ()
    """Arrays that only some requests have, by name."""
    loss_tokens: int = 0
    """Tokens of a loss function of the caller's own; 0 if there is none."""
    _offsets: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Where each array begins, in the order of `_sizes`, and the end."""

    def __post_init__(self) -> None:
        """Lay the arrays out, once for all questions."""
        offsets, end = [0], 0
        for size in self._sizes():
            end = (end + size + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
            offsets.append(end)
        object.__setattr__(self, "_offsets", tuple(offsets))

    @classmethod
    def of_fit(cls, request: FitRequest, layout: Layout) -> Frame:
        """Lay out a fit that has been checked."""
        inputs, outputs = _fit_extras(request)
        return replace(cls.of(request.problem, layout), losses=False, extras=(*inputs, *outputs))

    @classmethod
    def of(cls, evaluation: Evaluation, layout: Layout) -> Frame:
        """Lay out an evaluation that has been checked."""
        batch, custom = evaluation.batch, evaluation.custom_loss
        programs, vectors, rows = evaluation.shape(layout)
        return cls(
            tokens=len(batch.codes),
            programs=programs,
            parameters=len(batch.parameters),
            vectors=vectors,
            rows=rows,
            dtype=layout.dtype,
            values=evaluation.values,
            losses=evaluation.loss_function is not None,
            jacobian=evaluation.jacobian,
            extras=_evaluation_extras(evaluation, layout),
            loss_tokens=0 if custom is None else len(custom.row.codes),
        )

    @property
    def value_bytes(self) -> int:
        """Size of the value matrix."""
        return self.values * self.programs * self.vectors * self.rows * self.dtype.itemsize

    @property
    def is_small(self) -> bool:
        """Whether the answer is losses alone."""
        return not (self.values or self.jacobian or self.extras)

    @property
    def program_bytes(self) -> int:
        """Size of the values of one program."""
        return self.vectors * self.rows * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Size of the whole frame."""
        return self._offsets[-1]

    @property
    def value_offset(self) -> int:
        """Where the value matrix begins."""
        return self._offsets[-3]

    @property
    def jacobian_offset(self) -> int:
        """Where the Jacobian matrix begins."""
        return self._offsets[-2]

    @property
    def jacobian_bytes(self) -> int:
        """Size of the Jacobian matrix."""
        return self.jacobian * self.parameters * self.rows * self.dtype.itemsize

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle flat."""
        return Frame.of_fields, (self.fields(),)

    def fields(self) -> tuple[Any, ...]:
        """Return what `of_fields` makes a frame of: numbers, short texts and tuples."""
        return (
            *(self.tokens, self.programs, self.parameters, self.vectors, self.rows),
            *(self.dtype.str, self.values, self.losses, self.jacobian, self.extras),
            self.loss_tokens,
        )

    @classmethod
    def of_fields(cls, fields: tuple[Any, ...]) -> Frame:
        """Make a frame of its `fields`."""
        own: tuple[Any, ...] = (*fields[:5], np.dtype(fields[5]), *fields[6:])
        return cls(*own)

    def _sizes(self) -> tuple[int, ...]:
        losses = self.losses * self.programs * self.vectors
        words = self.programs * 4
        head = (2, self.tokens * 8, self.parameters * 8, words, words, self.tokens)
        extras = [extra.nbytes for extra in self.extras]
        loss = (self.loss_tokens * 8, self.loss_tokens)
        return (*head, losses * 8, *loss, *extras, self.value_bytes, self.jacobian_bytes)

    def batch(self, segment: Segment) -> Batch:
        """View of the batch in the segment."""
        offsets = self._offsets
        return Batch(
            values=segment.array(_F8, (self.tokens,), offsets[1]),
            parameters=segment.array(_F8, (self.parameters,), offsets[2]),
            lengths=segment.array(_U4, (self.programs,), offsets[3]),
            parameter_counts=segment.array(_U4, (self.programs,), offsets[4]),
            codes=segment.array(_U1, (self.tokens,), offsets[5]),
            vectors=self.vectors,
        )

    def write(self, segment: Segment, evaluation: Evaluation) -> None:
        """Copy batch and loss function into the segment; clear flag and state."""
        self.flag(segment)[0] = 0
        self.state(segment)[0] = QUEUED
        target, batch = self.batch(segment), evaluation.batch
        for name in ("values", "parameters", "lengths", "parameter_counts", "codes"):
            getattr(target, name)[...] = getattr(batch, name)
        if evaluation.custom_loss is not None:
            row = evaluation.custom_loss.row
            values, codes = self._loss_views(segment)
            values[...], codes[...] = row.values, row.codes

    def custom_loss(self, segment: Segment, closing: Closing) -> LossFunction:
        """Copy the caller's own loss function out of the segment."""
        values, codes = self._loss_views(segment)
        return LossFunction(Program(codes, values), closing)

    def _loss_views(self, segment: Segment) -> tuple[NDArray[np.float64], NDArray[np.uint8]]:
        values, codes = self._offsets[_LOSS : _LOSS + 2]
        shape = (self.loss_tokens,)
        return segment.array(_F8, shape, values), segment.array(_U1, shape, codes)

    def flag(self, segment: Segment) -> NDArray[np.uint8]:
        """View of the cancellation flag, [1]."""
        return segment.array(_U1, (1,))

    def state(self, segment: Segment) -> NDArray[np.uint8]:
        """View of what the engine has done with the request, [1].

        `QUEUED`, `BEGUN`, or `ALONE` while nothing else runs in the engine.
        """
        return segment.array(_U1, (1,), 1)

    def losses_view(self, segment: Segment) -> NDArray[np.float64] | None:
        """View of the losses [programs, K], or None."""
        if not self.losses:
            return None
        return segment.array(_F8, (self.programs, self.vectors), self._offsets[6])

    def values_view(self, segment: Segment) -> NDArray[np.generic] | None:
        """View of the value matrix [programs, K, rows], or None."""
        if not self.values:
            return None
        shape = (self.programs, self.vectors, self.rows)
        return segment.array(self.dtype, shape, self.value_offset)

    def jacobian_view(self, segment: Segment) -> NDArray[np.generic] | None:
        """View of the Jacobian matrix [parameters, rows], or None."""
        if not self.jacobian:
            return None
        return segment.array(self.dtype, (self.parameters, self.rows), self.jacobian_offset)

    def extra(self, name: str, segment: Segment) -> NDArray[Any] | None:
        """View of one of the extras, or None if this request has none of that name."""
        for index, extra in enumerate(self.extras):
            if extra.name == name:
                offset = self._offsets[_EXTRAS + index]
                return segment.array(extra.dtype, extra.shape, offset)
        return None

    def require(self, name: str, segment: Segment) -> NDArray[Any]:
        """View of an extra that this request is known to have.

        Raises:
            KeyError: if it has not.

        """
        found = self.extra(name, segment)
        if found is None:
            raise KeyError(name)
        return found


def _evaluation_extras(evaluation: Evaluation, layout: Layout) -> tuple[Extra, ...]:
    batch = evaluation.batch
    cells = len(batch), batch.vectors
    wishes = (
        (evaluation.gradient, "gradients", (len(batch.parameters),)),
        (evaluation.variable_gradient, "variable_gradients", (*cells, layout.variables)),
        (evaluation.reductions, "reductions", (*cells, 5)),
        (evaluation.linear_scaling, "scaling", (*cells, 2)),
        (evaluation.correlation, "correlations", cells),
    )
    return tuple(Extra(name, "<f8", shape) for wanted, name, shape in wishes if wanted)


def _fit_extras(request: FitRequest) -> tuple[list[Extra], list[Extra]]:
    """Arrays that a fit takes beside its batch, and those that it returns."""
    settings, counts = request.settings, request.problem.batch.parameter_counts.astype(np.int64)
    total, vectors = int(counts.sum()), request.vectors
    cells = len(counts), vectors
    given = (("lower", "<f8"), ("upper", "<f8"), ("fixed", "u1"))
    inputs = [
        Extra(name, dtype, (total,)) for name, dtype in given if getattr(settings, name) is not None
    ]
    outputs = [Extra("parameters", "<f8", (vectors * total,))]
    for name, dtype in FIT_CELLS.items():
        outputs.append(Extra(name, dtype, cells))
    if settings.standard_errors:
        outputs.append(Extra("standard_errors", "<f8", (vectors * total,)))
    if settings.covariance:
        squares = vectors * int(np.square(counts).sum())
        outputs.append(Extra("covariances", "<f8", (squares,)))
    return inputs, outputs
