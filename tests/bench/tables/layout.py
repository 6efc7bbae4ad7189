"""Result files of benchmarks as tables of Markdown."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"


def result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(head: str, rows: Iterable[str]) -> Iterator[str]:
    """Format rows, whose cells stand between bars, as lines of a table."""
    yield from (f"| {head} |", "|---" * (head.count("|") + 1) + "|")
    yield from (f"| {row} |" for row in rows)


def escaped(cells: Iterable[str]) -> str:
    """Put cells between bars, whatever bars they have."""
    return " | ".join(cell.replace("|", "\\|") for cell in cells)


def select(cases: list[Any], **fields: Any) -> list[Any]:
    return [case for case in cases if all(case[name] == value for name, value in fields.items())]
