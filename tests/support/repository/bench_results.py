"""Made-up results of `warpfit bench`: times from a simple model, for tests of the report."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from warpfit.bench.results import BENCHMARK, SCHEMA
from warpfit.bench.scenarios import QUICK, Kind, Scenario

#: Seconds of a call with next to no work, token-rows a second of the kernels, by engine and tier.
MODEL = {
    ("cpu", "interpreter"): (0.0012, 8e9),
    ("cuda", "interpreter"): (0.002, 5e12),
    ("cuda", "compiled"): (0.0018, 15e12),
}
COMPILE_SECONDS = 0.0006


def summary(median: float) -> dict[str, Any]:
    around = {"low": 0.99 * median, "high": 1.01 * median, "p90": 1.1 * median}
    return {"n": 50, "median": median, **around, "p99": None, "spread": 0.05}


def cell(scenario: Scenario) -> dict[str, Any]:
    """What a scenario takes by the model."""
    launch, rate = MODEL[scenario.engine, scenario.tier]
    tokens = 30 * scenario.expressions
    kernel = tokens * scenario.rows * scenario.vectors / rate + 1e-5
    wall = launch + kernel
    compiling = COMPILE_SECONDS * scenario.expressions if scenario.tier == "compiled" else 0.0
    stages = {"decode": 1e-4, "queue": 1e-4, "copy_in": 0.0, "compute": kernel, "copy_out": 1e-4}
    content: dict[str, Any] = {
        "key": scenario.key,
        "scenario": asdict(scenario),
        "tokens": tokens,
        "operators": tokens // 2,
        "executed": tokens // 3,
        "wall": summary(wall),
        "token_rows_per_second": {
            name: tokens * scenario.rows * scenario.vectors / seconds
            for name, seconds in (("wall", wall), ("kernel", kernel), ("engine", wall))
        },
    }
    if scenario.kind is Kind.WORKERS:
        return content
    measured = {"kernel": summary(kernel), "engine": summary(wall)}
    stages = {"wall": wall, **stages, "rest": launch - 3e-4}
    if scenario.kind is Kind.PEER:
        return {
            **content,
            "peer": scenario.peer,
            "output": "losses",
            "notes": "made up",
            "threads": 2,
            "agreement": {"peer": 0.99, "warpfit": 1.0},
            "prepare": 0.1,
            "wall": summary(4 * wall),
            "warpfit": {**measured, "first": {"wall": wall}, "wall": summary(wall)},
            "times_warpfit": 4.0,
        }
    first = {**stages, "wall": wall + compiling}
    content = {**content, **measured, "stages": stages, "first": first}
    if scenario.kind is Kind.OPTIMIZE:
        del content["token_rows_per_second"]
        return {**content, "searches": 90, "fits_per_second": 90 / wall}
    bound = {"operations": 15 * tokens * scenario.rows, "bytes": 44 * scenario.rows}
    return {**content, "roofline": {**bound, "seconds": 1e-6, "by": "issue", "fraction": 0.4}}


def document(*engines: str) -> dict[str, Any]:
    """A whole file of the quick profile."""
    cells = []
    for engine in engines:
        tiers = ["interpreter", "compiled"] if engine == "cuda" else ["interpreter"]
        peers = ["EvoGP" if engine == "cuda" else "NumPy"]
        cells += [cell(scenario) for scenario in QUICK.scenarios(engine, tiers, peers)]
    devices = {"cpu": {"name": "made-up CPU", "threads": 2}, "cuda": {"name": "made-up GPU"}}
    peaks = {"lanes_per_second": 2e11, "special_per_second": 0.0, "bytes_per_second": 3e10}
    return {
        "benchmark": BENCHMARK,
        "schema": SCHEMA,
        "date": "2026-01-01",
        "profile": "quick",
        "seed": 1,
        "machine": {"cpu": "made-up CPU", "cores": 2, "memory_gib": 8.0, "system": "Linux x86_64"},
        "versions": {"python": "3.11", "warpfit": "0.1.0"},
        "servers": {e: {"device": devices[e], "start_seconds": 1.0} for e in engines},
        "peaks": dict.fromkeys(engines, peaks),
        "notes": ["made up <by a model>"],
        "complete": True,
        "seconds": 60.0,
        "load_average": {"start": 0.1, "end": 1.5},
        "address": None,
        "skipped": [{"key": "peer/gplearn", "why": "it is not installed"}],
        "cells": cells,
    }


def write(path: Path, *engines: str) -> Path:
    path.write_text(json.dumps(document(*engines)))
    return path
