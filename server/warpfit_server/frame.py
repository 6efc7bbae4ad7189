"""Where the arrays of one evaluation lie in the segment that both processes map."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Layout
from warpfit.ir import Batch
from warpfit.request import Evaluation
from warpfit_server.segments import Segment

_ALIGNMENT: Final = 64


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

    @classmethod
    def of(cls, evaluation: Evaluation, layout: Layout) -> Frame:
        """Lay out an evaluation that has been checked."""
        batch = evaluation.batch
        programs, vectors, rows = evaluation.shape(layout)
        return cls(
            tokens=len(batch.codes),
            programs=programs,
            parameters=len(batch.parameters),
            vectors=vectors,
            rows=rows,
            dtype=layout.dtype,
            values=evaluation.values,
            losses=evaluation.loss is not None,
        )

    @property
    def value_bytes(self) -> int:
        """Size of the value matrix."""
        return self.values * self.programs * self.vectors * self.rows * self.dtype.itemsize

    @property
    def program_bytes(self) -> int:
        """Size of the values of one program."""
        return self.vectors * self.rows * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Size of the whole frame."""
        return self._offsets()[-1]

    @property
    def value_offset(self) -> int:
        """Where the value matrix begins."""
        return self._offsets()[-2]

    def _sizes(self) -> tuple[int, ...]:
        losses = self.losses * self.programs * self.vectors
        words = self.programs * 4
        head = (1, self.tokens * 8, self.parameters * 8, words, words, self.tokens)
        return (*head, losses * 8, self.value_bytes)

    def _offsets(self) -> list[int]:
        offsets = [0]
        for size in self._sizes():
            offsets.append(-(-(offsets[-1] + size) // _ALIGNMENT) * _ALIGNMENT)
        return offsets

    def batch(self, segment: Segment) -> Batch:
        """View of the batch in the segment."""
        offsets = self._offsets()
        return Batch(
            values=segment.array("<f8", (self.tokens,), offsets[1]),
            parameters=segment.array("<f8", (self.parameters,), offsets[2]),
            lengths=segment.array("<u4", (self.programs,), offsets[3]),
            parameter_counts=segment.array("<u4", (self.programs,), offsets[4]),
            codes=segment.array("u1", (self.tokens,), offsets[5]),
            vectors=self.vectors,
        )

    def write(self, segment: Segment, batch: Batch) -> None:
        """Copy a batch into the segment and clear the cancellation flag."""
        self.flag(segment)[0] = 0
        target = self.batch(segment)
        for name in ("values", "parameters", "lengths", "parameter_counts", "codes"):
            getattr(target, name)[...] = getattr(batch, name)

    def flag(self, segment: Segment) -> NDArray[np.uint8]:
        """View of the cancellation flag, [1]."""
        return segment.array("u1", (1,))

    def losses_view(self, segment: Segment) -> NDArray[np.float64] | None:
        """View of the losses [programs, K], or None."""
        if not self.losses:
            return None
        return segment.array("<f8", (self.programs, self.vectors), self._offsets()[6])

    def values_view(self, segment: Segment) -> NDArray[np.generic] | None:
        """View of the value matrix [programs, K, rows], or None."""
        if not self.values:
            return None
        shape = (self.programs, self.vectors, self.rows)
        return segment.array(self.dtype, shape, self.value_offset)
