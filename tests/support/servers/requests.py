"""A small data set, and an evaluation on it."""

from typing import Any

import numpy as np

from warpfit.dataset import Dataset
from warpfit.expressions.workload import thesis_mix
from warpfit.ir import Batch
from warpfit.request import Evaluation

DATA = Dataset.of(np.arange(40.0).reshape(10, 4), np.arange(10.0))


def an_evaluation(**changes: Any) -> Evaluation:
    """Seven programs on `DATA`, with some fields changed."""
    programs, parameters = thesis_mix(3, 7, variables=4)
    fields = {"dataset_id": DATA.content_id, "batch": Batch.of(programs, parameters)}
    return Evaluation(**{**fields, **changes})
