"""Data, expressions and requests of tests, and the values of the expressions."""

from typing import Any

import numpy as np

import warpfit
from support.random_programs import thesis_mix
from warpfit.dataset import Dataset
from warpfit.expressions import reference
from warpfit.ir import Batch
from warpfit.request import Evaluation
from warpfit.transport.connection import RetryPolicy

_rng = np.random.default_rng(5)
X = _rng.normal(size=(60, 3)).astype(np.float32)
Y = _rng.normal(size=60).astype(np.float32)
WEIGHTS = _rng.uniform(size=60).astype(np.float32)
EXPRESSIONS = ["x1 + p1*x2", "sin(x3) - 2", "p2/(p1 + x1^2)"]
PARAMETERS = [[0.5], [], [1.5, -2.0]]
QUICK = RetryPolicy(total_seconds=10, initial_backoff=0.001, maximum_backoff=0.01)
#: A small data set.
DATA = Dataset.of(np.arange(40.0).reshape(10, 4), np.arange(10.0))


def expected_values(dtype: Any = np.float32, expressions=EXPRESSIONS, parameters=PARAMETERS):
    """Values of the reference, [rows, expressions]."""
    programs = [warpfit.parse(text) for text in expressions]
    return reference.evaluate_programs(programs, X.T, parameters).T.astype(dtype)


def an_evaluation(**changes: Any) -> Evaluation:
    """Seven programs on `DATA`, with some fields changed."""
    programs, parameters = thesis_mix(3, 7, variables=4)
    fields = {"dataset_id": DATA.content_id, "batch": Batch.of(programs, parameters)}
    return Evaluation(**{**fields, **changes})
