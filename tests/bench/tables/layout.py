"""Result files of benchmarks as tables of Markdown."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"


def result(name: str) -> Any:
    """Read a result file."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(*rows: tuple[Any, ...]) -> Iterator[str]:
    """Format rows, of which the first is the head, as lines of a table."""
    head, *body = ([str(cell) for cell in row] for row in rows)
    yield from (f"| {' | '.join(head)} |", "|---" * len(head) + "|")
    yield from (f"| {' | '.join(row)} |" for row in body)


def select(cases: list[Any], **fields: Any) -> list[Any]:
    """Return the cases that have these fields."""
    return [case for case in cases if all(case[name] == value for name, value in fields.items())]
