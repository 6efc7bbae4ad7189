"""``warpfit bench report``: one page that stands by itself, and its plots as files."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

from warpfit.bench import plots, results
from warpfit.bench.answers import answers
from warpfit.bench.findings import Document, System, systems
from warpfit.errors import InvalidArgumentError

_STYLE: Final = """
body{font:16px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;
color:#1a1a1a;background:#fff}
h1{font-size:1.7rem}h2{font-size:1.25rem;margin-top:2.2rem;border-bottom:1px solid #ddd}
img{max-width:100%;height:auto}figure{margin:1rem 0}figcaption,.small{font-size:.85rem;color:#555}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.8rem;margin:1rem 0}
th,td{padding:.2rem .5rem;border-bottom:1px solid #ddd;text-align:right;white-space:nowrap}
th:first-child,td:first-child,td.text{text-align:left}td.text{white-space:normal;min-width:16rem}
section.answer{background:#f4f7fa;border-left:4px solid #0072b2;padding:.4rem 1rem;margin:1rem 0}
section.answer h3{margin:.4rem 0;font-size:1.05rem}
"""
_METHOD: Final = """
Every call goes through gRPC from a client process on the server's machine, unless the results say
otherwise. Expressions have 10 to 50 tokens over 10 variables (a token is an operator or an operand;
a token evaluated for one row is one of the field's GP operations). Fresh means that no call has an
expression that the server has seen; repeated means the same expressions with new parameters. Times
are medians of calls after a warm-up; the first call, which pays for compiling, is told apart.
Intervals are 95% confidence intervals of the median, spread is the interquartile range divided by
the median. Kernel time is what the engine reports, end to end what the client sees. Peers are
checked against the float64 reference before they are timed, and take turns with warpfit on the same
expressions and data; peers that leave values in memory are not charged for reducing them to losses,
warpfit is, and for the wire too."""


def write_report(paths: Sequence[Path], directory: Path) -> list[Path]:
    """Write ``report.html`` and the plots; return their paths.

    Raises:
        InvalidArgumentError: if a file is no result, or matplotlib is missing.

    """
    documents = [results.read(path) for path in paths]
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InvalidArgumentError(
            "reports need matplotlib, which is not installed",
            "MISSING_PACKAGE",
            "Install it (pip install 'warpfit[bench]')",
        ) from error
    found = systems(documents)
    directory.mkdir(parents=True, exist_ok=True)
    pictures = _pictures(found)
    written = [directory / "report.html"]
    for name, (_, picture) in pictures.items():
        written.append(directory / f"{name}.png")
        written[-1].write_bytes(picture)
    written[0].write_text(page(documents, found, pictures), encoding="utf-8")
    return written


def page(
    documents: Sequence[Document],
    found: Sequence[System],
    pictures: dict[str, tuple[str, bytes]],
) -> str:
    """Make the page; ``pictures`` holds a title and a PNG by name."""
    parts = [
        "<!doctype html><html lang=en><head><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width,initial-scale=1'>",
        f"<title>warpfit bench</title><style>{_STYLE}</style></head><body>",
        "<h1>warpfit bench</h1>",
        f"<p class=small>{escape(_subtitle(documents))}</p>",
        *_answer_sections(found),
        *(_figure(title, picture) for title, picture in pictures.values()),
        "<h2>Peers</h2>",
        _peer_table(found),
        "<h2>Everything that was measured</h2>",
        *_cell_tables(found),
        "<h2>What was left out</h2>",
        _skipped(documents),
        f"<h2>Method</h2><p>{escape(_METHOD)}</p>",
        "<h2>Machines</h2>",
        _machines(documents),
        "</body></html>",
    ]
    return "\n".join(parts)


def _pictures(found: Sequence[System]) -> dict[str, tuple[str, bytes]]:
    drawn = {}
    for title, name, draw in plots.PLOTS:
        figure = draw(found)
        if figure is not None:
            target = io.BytesIO()
            figure.savefig(target, format="png")
            drawn[name] = title, target.getvalue()
    return drawn


def _subtitle(documents: Sequence[Document]) -> str:
    told = []
    for document in documents:
        state = "" if document["complete"] else ", not finished"
        told.append(f"{document['profile']} profile of {document['date']}{state}")
    return f"{len(documents)} file{'s' if len(documents) > 1 else ''}: {'; '.join(told)}"


def _answer_sections(found: Sequence[System]) -> Iterable[str]:
    for answer in answers(found):
        body = "".join(_paragraph(sentence) for sentence in answer.sentences)
        yield f"<section class=answer><h3>{escape(answer.question)}</h3>{body}</section>"


def _paragraph(sentence: str) -> str:
    """One sentence; those that end with a colon head the ones that follow."""
    text = escape(sentence)
    return f"<p><b>{text}</b></p>" if sentence.endswith(":") else f"<p>{text}</p>"


def _figure(title: str, picture: bytes) -> str:
    data = base64.b64encode(picture).decode()
    return (
        f"<h2>{escape(title)}</h2><figure>"
        f"<img alt='{escape(title)}' src='data:image/png;base64,{data}'></figure>"
    )


def _peer_table(found: Sequence[System]) -> str:
    rows = [
        [
            cell["peer"],
            system.label,
            f"{cell['scenario']['rows']:,}",
            f"{cell['scenario']['expressions']:,}",
            _seconds(cell["prepare"]),
            _seconds(cell["wall"]["median"]),
            _seconds(cell["warpfit"]["first"]["wall"]),
            _seconds(cell["warpfit"]["wall"]["median"]),
            _seconds(cell["warpfit"]["kernel"]["median"]),
            f"{cell['times_warpfit']:.2f}",
            f"{cell['agreement']['peer']:.1%} / {cell['agreement']['warpfit']:.1%}",
            f"{cell['output']}; {cell['notes']}; beside the {cell['scenario']['tier']} tier",
        ]
        for system in found
        for cell in system.select(kind="peer")
    ]
    titles = ["peer", "machine", "rows", "expressions", "prepare", "evaluate"]
    ours = ["warpfit, first", "warpfit", "its kernels", "ratio", "right (peer / warpfit)"]
    return _table([*titles, *ours, "how"], rows)


def _cell_tables(found: Sequence[System]) -> Iterable[str]:
    titles = ["what", "rows", "expressions", "first call", "median", "95% of median", "p90", "p99"]
    more = ["spread", "n", "engine", "kernels", "Gtok/s", "of the roof"]
    for system in found:
        rows = [_cells(cell) for cell in system.cells if "peer" not in cell]
        table = _table([*titles, *more], rows)
        yield f"<details><summary>{escape(system.label)}: {len(rows)}</summary>{table}</details>"


def _cells(cell: Any) -> list[str]:
    scenario, wall = cell["scenario"], cell["wall"]
    workers = f", {scenario['workers']} workers" if scenario["kind"] == "workers" else ""
    vectors = f", {scenario['vectors']} vectors" if scenario["vectors"] > 1 else ""
    length = "" if scenario["tokens"] == [10, 50] else f", {scenario['tokens'][0]} tokens"
    what = "fits" if scenario["kind"] == "optimize" else scenario["output"]
    mode = f"{scenario['tier']}, {scenario['reuse']}, {scenario['precision']}"
    rates = cell.get("token_rows_per_second", {})
    fraction = cell.get("roofline", {}).get("fraction")
    return [
        f"{what}: {mode}{vectors}{workers}{length}",
        f"{scenario['rows']:,}",
        f"{scenario['expressions']:,}",
        _seconds(cell["first"]["wall"]) if "first" in cell else "",
        _seconds(wall["median"]),
        f"{_seconds(wall['low'])} to {_seconds(wall['high'])}",
        _seconds(wall["p90"]),
        "" if wall["p99"] is None else _seconds(wall["p99"]),
        f"{wall['spread']:.0%}",
        f"{wall['n']}",
        *(_seconds(cell[n]["median"]) if n in cell else "" for n in ("engine", "kernel")),
        f"{rates['wall'] / 1e9:.4g}" if rates else f"{cell.get('fits_per_second', 0):.4g} fits/s",
        "" if fraction is None else f"{fraction:.1%}",
    ]


def _skipped(documents: Sequence[Document]) -> str:
    rows = [[entry["key"], entry["why"]] for d in documents for entry in d["skipped"]]
    return _table(["what", "why"], rows) if rows else "<p>Nothing.</p>"


def _machines(documents: Sequence[Document]) -> str:
    rows = []
    for document in documents:
        machine = document["machine"]
        gpus = ", ".join(gpu["name"] for gpu in machine.get("gpus", [])) or "none"
        versions = ", ".join(f"{name} {v}" for name, v in document["versions"].items())
        starts = [
            f"{engine} {server['start_seconds']} s"
            for engine, server in document["servers"].items()
            if server["start_seconds"] is not None
        ]
        rows.append(
            [
                machine["cpu"],
                f"{machine['cores']}",
                f"{machine['memory_gib']} GiB",
                gpus,
                ", ".join(starts),
                "{start} to {end}".format(**{"start": "?", "end": "?", **document["load_average"]}),
                versions,
                "; ".join(document["notes"]),
            ]
        )
    titles = ["processor", "cores", "memory", "GPU", "server start", "load average"]
    titles += ["versions", "notes"]
    return _table(titles, rows)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Make a table; each row has a cell for each title."""
    if not rows:
        return "<p>Nothing was measured.</p>"
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join("<tr>" + "".join(_cell(text) for text in row) + "</tr>" for row in rows)
    return f"<div class=scroll><table><tr>{head}</tr>{body}</table></div>"


def _cell(text: str) -> str:
    kind = " class=text" if len(text) > 50 else ""
    return f"<td{kind}>{escape(text)}</td>"


def _seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} us"
