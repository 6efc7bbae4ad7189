"""``warpfit bench report``: one page that stands by itself, and its plots as files."""

import base64
import io
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

from warpfit.bench import results
from warpfit.bench.batches import THESIS
from warpfit.bench.report import plots
from warpfit.bench.report.answers import answers, duration
from warpfit.bench.report.findings import Cell, Document, System, size, systems
from warpfit.errors import require

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
otherwise. Expressions of the random mix have 10 to 50 tokens over 10 variables; a token is an
operator or an operand. Rates are nominal: tokens times rows, as the field counts its GP operations,
whatever an engine executes. Fresh means that no call has an expression that the server has seen (of
a recorded population: another sample of it); repeated means the same expressions with new
parameters. Times are medians of calls after a warm-up, with 95% confidence intervals; spread is the
interquartile range divided by the median. Kernel time is what the engine reports, end to end what
the client sees. Peers are checked against the float64 reference before they are timed, and take
turns with warpfit on the same batch; peers that leave values in memory are not charged for reducing
them to losses, warpfit is, and for the wire too."""
_WORKLOADS: Final = """
Bred programs differ from random ones in length and in what they share, so populations of DEAP and
pyoperon (same operators and variables, samples of 1,000 expressions) stand beside the random mix.
What is the same for all rows is computed once, before them: operators a token are those that depend
on a row, which an interpreter executes. Different a token are those among them that compiled code
executes at least, because it computes a value that occurs again once. Gop/s counts the first for an
interpreter and the second for compiled code, by kernel time."""


def write_report(paths: Sequence[Path], directory: Path) -> list[Path]:
    """Write ``report.html`` and the plots; return their paths."""
    documents = [results.read(path) for path in paths]
    require("matplotlib", "warpfit[bench]")
    found = systems(documents)
    directory.mkdir(parents=True, exist_ok=True)
    page = directory / "report.html"
    written = [page]
    figures = []
    for title, name, draw in plots.PLOTS:
        figure = draw(found)
        if figure is not None:
            target = io.BytesIO()
            figure.savefig(target, format="png")
            written.append(directory / f"{name}.png")
            written[-1].write_bytes(target.getvalue())
            figures.append(_figure(title, target.getvalue()))
    page.write_text("\n".join(_page(documents, found, figures)), encoding="utf-8")
    return written


def _page(
    documents: Sequence[Document], found: Sequence[System], figures: Sequence[str]
) -> Iterator[str]:
    subtitle = "; ".join(f"{d['profile']} profile of {d['date']}" for d in documents)
    if not all(document["complete"] for document in documents):
        subtitle += ", not finished"
    yield "<!doctype html><html lang=en><head><meta charset=utf-8>"
    yield "<meta name=viewport content='width=device-width,initial-scale=1'>"
    yield f"<title>warpfit bench</title><style>{_STYLE}</style></head><body>"
    yield f"<h1>warpfit bench</h1><p class=small>{escape(subtitle)}</p>"
    for question, sentences in answers(found).items():
        # Those that end with a colon head the ones that follow.
        marks = ["<p><b>{}</b></p>" if one.endswith(":") else "<p>{}</p>" for one in sentences]
        texts = zip(marks, map(escape, sentences), strict=True)
        body = "".join(mark.format(text) for mark, text in texts)
        yield f"<section class=answer><h3>{escape(question)}</h3>{body}</section>"
    yield from figures
    yield f"<h2>Random and bred expressions</h2><p>{escape(_WORKLOADS)}</p>"
    yield _table(_WORKLOAD_TITLES, [row for system in found for row in _workload_rows(system)])
    peers = [_peer_row(s, cell) for s in found for cell in s.select(kind="peer")]
    yield f"<h2>Peers</h2>{_table(_PEER_TITLES, peers)}<h2>Everything that was measured</h2>"
    for system in found:
        rows = [_cell_row(cell) for cell in system.cells if "peer" not in cell]
        summary = f"<summary>{escape(system.label)}: {len(rows)}</summary>"
        yield f"<details>{summary}{_table(_CELL_TITLES, rows)}</details>"
    skipped = [[entry["key"], entry["why"]] for d in documents for entry in d["skipped"]]
    yield "<h2>What was left out</h2>"
    yield _table(["what", "why"], skipped) if skipped else "<p>Nothing.</p>"
    yield f"<h2>Method</h2><p>{escape(_METHOD)}</p>"
    yield f"<h2>Machines</h2>{_table(_MACHINE_TITLES, [_machine_row(d) for d in documents])}"
    yield "</body></html>"


def _figure(title: str, picture: bytes) -> str:
    image = f"<img alt='{title}' src='data:image/png;base64,{base64.b64encode(picture).decode()}'>"
    return f"<h2>{title}</h2><figure>{image}</figure>"


_WORKLOAD_TITLES: Final = (
    *("expressions", "machine", "tier", "rows", "mean tokens", "operators a token"),
    *("different a token", "kernels", "Gtok/s", "Gop/s"),
)


def _workload_rows(system: System) -> Iterator[list[str]]:
    """Rows of the random mix where recorded populations were measured, and of these."""
    ways = {("interpreter", "fresh"), ("compiled", "repeated")}
    plain = [
        cell
        for workload in dict.fromkeys(cell["scenario"]["workload"] for cell in system.cells)
        for cell in system.select(workload=workload)
        if "executed" in cell and (cell["scenario"]["tier"], cell["scenario"]["reuse"]) in ways
    ]
    sizes = {size(cell) for cell in plain if "generation" in cell["scenario"]["workload"]}
    for cell in plain:
        if size(cell) in sizes:
            tokens, tier = cell["tokens"], cell["scenario"]["tier"]
            rate = cell["token_rows_per_second"].get("kernel", 0.0)
            share = cell["operators" if tier == "interpreter" else "executed"] / tokens
            yield [
                cell["scenario"]["workload"],
                system.label,
                tier,
                f"{size(cell)[0]:,}",
                f"{tokens / size(cell)[1]:.1f}",
                f"{cell['operators'] / tokens:.2f}",
                f"{cell['executed'] / tokens:.2f}",
                duration(cell["kernel"]["median"]),
                f"{rate / 1e9:.4g}",
                f"{share * rate / 1e9:.4g}",
            ]


_PEER_TITLES: Final = (
    *("peer", "machine", "rows", "expressions", "prepare", "evaluate", "warpfit, first"),
    *("warpfit", "its kernels", "ratio", "right (peer / warpfit)", "how"),
)


def _peer_row(system: System, cell: Cell) -> list[str]:
    ours = cell["warpfit"]
    return [
        cell["peer"],
        system.label,
        *(f"{number:,}" for number in size(cell)),
        duration(cell["prepare"]),
        duration(cell["wall"]["median"]),
        duration(ours["first"]["wall"]),
        duration(ours["wall"]["median"]),
        duration(ours["kernel"]["median"]),
        f"{cell['times_warpfit']:.2f}",
        f"{cell['agreement']['peer']:.1%} / {cell['agreement']['warpfit']:.1%}",
        f"{cell['output']}; {cell['notes']}; beside the {cell['scenario']['tier']} tier",
    ]


_CELL_TITLES: Final = (
    *("what", "rows", "expressions", "first call", "median", "95% of median", "p90", "p99"),
    *("spread", "n", "engine", "kernels", "Gtok/s", "of the roof"),
)


def _cell_row(cell: Cell) -> list[str]:
    scenario, wall = cell["scenario"], cell["wall"]
    what = "fits" if scenario["kind"] == "optimize" else scenario["output"]
    mode = f"{scenario['tier']}, {scenario['reuse']}, {scenario['precision']}"
    numbers = [f", {scenario[n]} {n}" for n in ("vectors", "workers") if scenario[n] > 1]
    workload = "" if scenario["workload"] == THESIS else f", {scenario['workload']}"
    rates = cell.get("token_rows_per_second", {})
    fraction = cell.get("roofline", {}).get("fraction")
    return [
        f"{what}: {mode}{''.join(numbers)}{workload}",
        *(f"{number:,}" for number in size(cell)),
        duration(cell["first"]["wall"]) if "first" in cell else "",
        duration(wall["median"]),
        f"{duration(wall['low'])} to {duration(wall['high'])}",
        duration(wall["p90"]),
        "" if wall["p99"] is None else duration(wall["p99"]),
        f"{wall['spread']:.0%}",
        f"{wall['n']}",
        *(duration(cell[n]["median"]) if n in cell else "" for n in ("engine", "kernel")),
        f"{rates['wall'] / 1e9:.4g}" if rates else f"{cell.get('fits_per_second', 0):.4g} fits/s",
        "" if fraction is None else f"{fraction:.1%}",
    ]


_MACHINE_TITLES: Final = (
    *("processor", "cores", "memory", "GPU", "server start", "load average", "versions", "notes"),
)


def _machine_row(document: Document) -> list[str]:
    machine = document["machine"]
    starts = {e: server["start_seconds"] for e, server in document["servers"].items()}
    return [
        machine["cpu"],
        f"{machine['cores']}",
        f"{machine['memory_gib']} GiB",
        ", ".join(gpu["name"] for gpu in machine.get("gpus", [])) or "none",
        ", ".join(f"{engine} {seconds} s" for engine, seconds in starts.items() if seconds),
        "{start} to {end}".format(**{"start": "?", "end": "?", **document["load_average"]}),
        ", ".join(f"{name} {version}" for name, version in document["versions"].items()),
        "; ".join(document["notes"]),
    ]


def _table(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Make a table; each row has a cell for each title."""
    if not rows:
        return "<p>Nothing was measured.</p>"
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    cells = (
        "".join(f"<td{' class=text' if len(t) > 50 else ''}>{escape(t)}</td>" for t in row)
        for row in rows
    )
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f"<div class=scroll><table><tr>{head}</tr>{body}</table></div>"
