"""The file of results: written after every measurement, continued after an interruption."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from warpfit.errors import InvalidArgumentError

SCHEMA: Final = 1
BENCHMARK: Final = "warpfit bench"
#: What must agree for two runs to be one.
_IDENTITY: Final = ("schema", "profile", "seed", "machine", "versions", "address")


@dataclass
class Results:
    """Measurements by the key of their scenario, and the file that holds them."""

    path: Path
    head: dict[str, Any]
    """Everything that is not a measurement: profile, seed, machine, versions, servers, notes."""
    cells: dict[str, dict[str, Any]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    """Why a scenario was left out, by key."""

    @classmethod
    def begin(cls, path: Path, head: Mapping[str, Any], *, afresh: bool = False) -> Results:
        """Start a file, or continue the one that an earlier run of the same kind left.

        Raises:
            InvalidArgumentError: if the file is of another machine, version, profile or seed, or
                no result at all.

        """
        fresh = cls(path, {**head, "complete": False, "seconds": 0.0, "runs": 1})
        if afresh or not path.exists():
            return fresh
        known = read(path)
        different = [n for n in _IDENTITY if _plain(known.get(n)) != _plain(head.get(n))]
        if different:
            raise InvalidArgumentError(
                f"{path} holds results with another {' and '.join(different)}",
                "OTHER_RESULTS",
                "Name another file with --out, or replace it with --afresh",
                "--out",
            )
        kept = {name: known[name] for name in ("seconds", "servers", "date")}
        kept["runs"] = known["runs"] + 1
        notes = [*known.get("notes", []), *head.get("notes", [])]
        merged = {**head, **kept, "complete": False, "notes": list(dict.fromkeys(notes))}
        return cls(path, merged, {cell["key"]: cell for cell in known["cells"]})

    def add(self, key: str, cell: Mapping[str, Any]) -> None:
        """Keep a measurement, and write the file."""
        self.cells[key] = {"key": key, **cell}
        self.skipped.pop(key, None)
        self.write()

    def skip(self, key: str, why: str) -> None:
        """Say why something was not measured."""
        self.skipped[key] = why

    def write(self) -> None:
        """Write the whole file, so that a reader never sees half of it."""
        document = {
            **self.head,
            "skipped": [{"key": key, "why": why} for key, why in self.skipped.items()],
            "cells": list(self.cells.values()),
        }
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        beside.write_text(json.dumps(document, indent=1) + "\n")
        beside.replace(self.path)


def head(profile: str, seed: int, **others: Any) -> dict[str, Any]:
    """What stands at the top of a new file."""
    from warpfit.bench import hardware

    return {
        "benchmark": BENCHMARK,
        "schema": SCHEMA,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "profile": profile,
        "seed": seed,
        "machine": hardware.machine(),
        "versions": hardware.versions(),
        "servers": {},
        **others,
    }


def read(path: Path) -> dict[str, Any]:
    """Read a file of results.

    Raises:
        InvalidArgumentError: if it is missing or something else.

    """
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(
            f"{path} cannot be read: {error}", "BAD_RESULTS", "Name a file of `warpfit bench`"
        ) from error
    if not isinstance(document, dict) or document.get("benchmark") != BENCHMARK:
        raise InvalidArgumentError(
            f"{path} is no result of `warpfit bench`", "BAD_RESULTS", "Name such a file"
        )
    if document.get("schema") != SCHEMA:
        raise InvalidArgumentError(
            f"{path} has schema {document.get('schema')}, not {SCHEMA}",
            "BAD_RESULTS",
            "Measure again with this version",
        )
    return document


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))
