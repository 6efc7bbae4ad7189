"""A batch as compiled code takes it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit.ir import Batch


class Tokens(NamedTuple):
    """A batch for compiled code; see `Batch`."""

    codes: NDArray[np.uint8]
    values: NDArray[np.float64]
    lengths: NDArray[np.uint32]
    parameter_counts: NDArray[np.uint32]
    parameters: NDArray[np.float64]
    vectors: int

    @classmethod
    def of(cls, batch: Batch) -> Tokens:
        """View a batch, always as read-only, so that compiled code is made for one kind of it."""
        return cls(
            codes=_read_only(batch.codes),
            values=_read_only(batch.values),
            lengths=_read_only(batch.lengths),
            parameter_counts=_read_only(batch.parameter_counts),
            parameters=_read_only(batch.parameters),
            vectors=batch.vectors,
        )


def _read_only(array: Any) -> Any:
    view = array.view()
    view.flags.writeable = False
    return view
