"""Write ``conformance.json``: requests byte for byte, and the answers that they must get.

``python proto/make_conformance.py`` writes it beside this file; run it after a change of the
contract or the operator table. The expected numbers are those of the NumPy float64 reference on the
data rounded to their dtype. A test fails when the committed file is not what this program writes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import json_format

from warpfit import codec, parse
from warpfit.dataset import Dataset
from warpfit.errors import WarpfitError
from warpfit.expressions import reference
from warpfit.ir import Batch, Program
from warpfit.ops import CONSTANT, OPERATORS, PARAMETER, VARIABLE
from warpfit.request import Evaluation, FitRequest, FitSettings, Loss, Method, Missing, Precision
from warpfit.v1 import evaluator_pb2 as pb

ROOT = Path(__file__).resolve().parent
ABOUT = (
    "Test vectors for clients of evaluator.proto. Numbers that JSON cannot write are the strings "
    "nan, inf and -inf. Bytes are hexadecimal. upload is the whole stream of UploadVariables, "
    "request one serialized message with its fields in ascending order and without those that have "
    "their default; maps are in the order of their keys. settings are the JSON form of a message. "
    "The best formula of a search has at most the loss that is given. tokens are [code, value]; "
    "expected.values is [programs][K][rows], "
    "expected.losses [programs][K]; a finite number must be met within tolerance "
    "times the larger of 1 and its size, the others exactly."
)
#: Settings of searches, in the JSON form of the message.
_SEARCHES: dict[str, dict[str, Any]] = {
    "a data set and a budget": {"max_generations": 5},
    "operators, rules, a loss and a seed": {
        "operators": {"add": 1.0, "mul": 2.0, "sin": 0.5},
        "variables": [0, 1],
        "rules": {
            "max_size": 12,
            "max_depth": 6,
            "complexities": {"sin": 2},
            "counts": {"mul": 3},
            "nesting": [{"outer": "sin", "inner": "sin", "most": 0}],
            "arguments": {"sin": {"sizes": [3]}},
        },
        "loss": "LOSS_RMSE",
        "islands": 2,
        "population": "512",
        "no_pairs": True,
        "fit_iterations": 10,
        "seed": "7",
        "max_generations": "20",
    },
}
#: Tolerances of the values of single operators and short formulas.
TOLERANCES = {"float32": 4e-6, "float64": 1e-12}


@dataclass(frozen=True)
class Case:
    """One call of Evaluate."""

    name: str
    dataset: str
    texts: Sequence[str]
    parameters: Sequence[Any] | None = None
    loss: Loss | None = None
    values: bool = True
    rows: tuple[int, int] | None = None
    precision: Precision = Precision.PRECISE


def datasets() -> dict[str, Dataset]:
    """Return data sets by name: ordinary numbers, and special values of the operators."""
    rng = np.random.default_rng(2024)
    X = rng.uniform(0.5, 2.0, (8, 3)).round(3)
    y = (2.5 * X[:, 0] + np.sin(X[:, 1])).round(3)
    edges = [0.0, -0.0, 1.0, -1.0, 0.5, -2.0, 3.0, np.inf, -np.inf, np.nan]
    pairs = np.array([(a, b, c) for a in edges for b in edges[::3] for c in edges[1::4]])
    return {
        "ordinary32": Dataset.of(X, y, names=("a", "b", "größe")),
        "ordinary64": Dataset.of(X, y, rng.integers(0, 3, 8) + 0.5, dtype="float64"),
        "edges32": Dataset.of(pairs),
        "edges64": Dataset.of(pairs, dtype="float64"),
    }


def cases() -> list[Case]:
    """Return all evaluations."""
    formulas = ["p1*x1 + sin(x2)", "x1 - p1 - x2", "where(x3 > 1, x1/x2, -x3)", "x1^-2", "2.5"]
    vectors = [[2.5], [0.125], [], [], []]
    several = [[[1.5], [2.5], [-1e-3]], [[0.0], [1.0], [2.0]], *[np.empty((3, 0))] * 3]
    operands = ("x1", "x2", "x3")
    operators = [f"{op.name}({', '.join(operands[: op.arity])})" for op in OPERATORS.values()]
    return [
        Case("values and losses", "ordinary32", formulas, vectors, Loss.MSE),
        Case("several parameter vectors", "ordinary32", formulas, several, Loss.RMSE),
        Case("losses of some rows", "ordinary64", formulas, vectors, Loss.MAE, False, (2, 7)),
        Case("fast", "ordinary32", formulas, vectors, Loss.NMSE, False, None, Precision.FAST),
        Case("every operator at its edges, float32", "edges32", operators),
        Case("every operator at its edges, float64", "edges64", operators),
    ]  # fmt: skip


def document() -> dict[str, Any]:
    """Return the content of the file."""
    data = datasets()
    return {
        "format": "warpfit.conformance.v1",
        "about": ABOUT,
        "operators": [
            {"code": op.code, "name": op.name, "arity": op.arity} for op in OPERATORS.values()
        ],
        "datasets": [_dataset(name, dataset) for name, dataset in data.items()],
        "evaluations": [_evaluation(case, data[case.dataset]) for case in cases()],
        "fits": _fits(data["ordinary64"]),
        "searches": [_search(name, data["ordinary64"], given) for name, given in _SEARCHES.items()],
        "failures": _failures(data["ordinary32"]),
    }


def _dataset(name: str, dataset: Dataset) -> dict[str, Any]:
    layout = dataset.layout
    return {
        "name": name,
        "dtype": layout.dtype.name,
        "names": list(layout.names),
        "variables": plain(dataset.matrix[: layout.variables]),
        "target": plain(dataset.target) if layout.has_target else None,
        "weights": plain(dataset.weights) if layout.has_weights else None,
        "content_id": dataset.content_id.hex(),
        "upload": [bytes(message).hex() for message in codec.upload_messages(dataset, 1 << 20)],
    }


def _evaluation(case: Case, dataset: Dataset) -> dict[str, Any]:
    batch = Batch.of([parse(text) for text in case.texts], case.parameters)
    evaluation = Evaluation(
        dataset.content_id, batch, case.rows, case.precision, case.loss, case.values
    )
    evaluation.check(dataset.layout)
    with np.errstate(all="ignore"):
        result = reference.evaluate(evaluation, dataset)
    tolerance = 1e-4 if case.precision is Precision.FAST else TOLERANCES[dataset.layout.dtype.name]
    return {
        "name": case.name,
        "dataset": case.dataset,
        "rows": case.rows,
        "precision": str(case.precision),
        "loss": None if case.loss is None else str(case.loss),
        "values": case.values,
        "programs": [
            _program(text, batch.program(index), batch.program_parameters(index))
            for index, text in enumerate(case.texts)
        ],
        "vectors": batch.vectors,
        "request": _hex(codec.evaluation_to_message(evaluation)),
        "expected": {
            "values": None if result.values is None else plain(result.values),
            "losses": None if result.losses is None else plain(result.losses),
        },
        "tolerance": tolerance,
    }


def _program(text: str, program: Program, parameters: Any) -> dict[str, Any]:
    tokens = zip(program.codes.tolist(), plain(program.values), strict=True)
    listed = [list(token) for token in tokens]
    return {"text": text, "tokens": listed, "parameters": plain(parameters)}


def _fits(dataset: Dataset) -> list[dict[str, Any]]:
    drawn = FitSettings(Method.AUTO, 50, restarts=6, seed=7, missing=Missing.DROP, curvature=True)
    return [
        _fit(
            *("Levenberg-Marquardt from one start", dataset, "p1*x1 + sin(p2*x2)"),
            *([1.0, 0.8], FitSettings(Method.LM, max_iterations=50), [2.5, 1.0]),
        ),
        _fit(
            *("drawn starts, rows without a value left out", dataset, "p1*x1 + p2*sin(x2)"),
            *([-3.0, 40.0], drawn, [2.5, 1.0]),
        ),
    ]


def _fit(
    name: str,
    dataset: Dataset,
    text: str,
    start: list[float],
    settings: FitSettings,
    expected: list[float],
) -> dict[str, Any]:
    program = parse(text)
    problem = Evaluation(
        dataset.content_id, Batch.of([program], [start]), loss=Loss.MSE, values=False
    )
    return {
        "name": name,
        "dataset": "ordinary64",
        "programs": [_program(text, program, np.array([start]))],
        "request": _hex(codec.fit_to_message(FitRequest(problem, settings))),
        "expected": {"parameters": [expected]},
        "tolerance": 2e-3,
    }


def _search(name: str, dataset: Dataset, settings: dict[str, Any]) -> dict[str, Any]:
    """Describe a search, whose best formula has at most the loss that is expected."""
    message = pb.SearchRequest(content_id=dataset.content_id)
    json_format.ParseDict(settings, message)
    assert dataset.target is not None
    return {
        "name": name,
        "dataset": "ordinary64",
        "settings": settings,
        "request": _hex(message),
        "end": "END_GENERATIONS",
        "loss": float(f"{dataset.target.var() / 2:.6g}"),
    }


def _failures(dataset: Dataset) -> list[dict[str, Any]]:
    def request(tokens: Sequence[tuple[int, float]], content_id: bytes = b"") -> Evaluation:
        codes, values = (np.array(column) for column in zip(*tokens, strict=True))
        empty = np.zeros(1, np.uint32)
        lengths = np.array([len(tokens)], np.uint32)
        batch = Batch(codes.astype(np.uint8), values.astype(float), lengths, empty, np.empty(0))
        return Evaluation(content_id or dataset.content_id, batch)

    add = OPERATORS["add"].code
    wrong = {
        "an operator without operands": request([(VARIABLE, 0.0), (add, 0.0)]),
        "two values are left": request([(VARIABLE, 0.0), (CONSTANT, 1.0)]),
        "a code that is no operator": request([(VARIABLE, 0.0), (15, 0.0)]),
        "a variable that the data set has not": request([(VARIABLE, 3.0)]),
        "a parameter without a value": request([(PARAMETER, 0.0)]),
    }
    failures = [
        {"name": name, "dataset": "ordinary32", **_failure(evaluation, dataset)}
        for name, evaluation in wrong.items()
    ]
    unknown = request([(VARIABLE, 0.0)], bytes(32))
    return [
        *failures,
        {
            "name": "a data set that is not resident",
            "dataset": None,
            "request": _hex(codec.evaluation_to_message(unknown)),
            "status": "NOT_FOUND",
            "reason": "DATASET_NOT_FOUND",
            "expression": None,
            "token": None,
        },
    ]


def _failure(evaluation: Evaluation, dataset: Dataset) -> dict[str, Any]:
    try:
        evaluation.check(dataset.layout)
    except WarpfitError as error:
        return {
            "request": _hex(codec.evaluation_to_message(evaluation)),
            "status": error.status,
            "reason": error.reason,
            "expression": error.expression,
            "token": error.token,
        }
    raise AssertionError("the request was meant to be wrong")


def _hex(message: Any) -> str:
    return str(message.SerializeToString(deterministic=True).hex())


def plain(array: Any) -> Any:
    """Return nested lists of numbers, with strings for NaN and infinities."""
    if isinstance(array, list):
        return [plain(entry) for entry in array]
    if isinstance(array, np.ndarray):
        return plain(array.tolist())
    return array if np.isfinite(array) else str(array)


def render(content: dict[str, Any]) -> str:
    """Return the file's text with one line for each case, so that changes are readable."""
    lines = []
    for key, value in content.items():
        if isinstance(value, list):
            entries = ",\n".join(f"  {json.dumps(entry)}" for entry in value)
            lines.append(f"{json.dumps(key)}: [\n{entries}\n ]")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{\n " + ",\n ".join(lines) + "\n}\n"


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "conformance.json"
    path.write_text(render(document()))
