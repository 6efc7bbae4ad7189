"""Types of public results, as a checker sees them: none of them is Any."""

import ast
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

CLIENT = Path(__file__).resolve().parents[3] / "client"
#: Expressions of a caller, and what a checker is to know of them.
REVEALED = {
    "client": "warpfit.client.Client",
    "data": "warpfit.client.UploadedDataset",
    "client.evaluate(data, texts)": "ndarray[…, dtype[floating[…]]]",
    "client.evaluate(data, texts, rows=(0, 2), tier='compiled')": "ndarray[…, dtype[floating[…]]]",
    "client.evaluate(data, texts, loss='mse')": "ndarray[…, dtype[float64]]",
    "client.evaluate(data, texts, loss=warpfit.Loss.MAE)": "ndarray[…, dtype[float64]]",
    "client.evaluate(data, texts, loss='mse', gradient=True)[1][0]": ("ndarray[…, dtype[float64]]"),
    "client.evaluate(data, texts, loss='mse', linear_scaling=True)[2]": (
        "ndarray[…, dtype[float64]]"
    ),
    "client.evaluate(data, texts, jacobian=flag)": "ndarray[…, dtype[floating[…]]] | list[",
    "client.run(data, texts, values=True)": "warpfit.calls.results.Answer",
    "client.run(data, texts).values": "ndarray[…, dtype[floating[…]]] | None",
    "client.run(data, texts).jacobians": "list[ndarray[…, dtype[floating[…]]]] | None",
    "client.run(data, texts).timings": "warpfit.request.Timings",
    "client.run(data, texts).reductions": "warpfit.calls.results.Reductions | None",
    "client.optimize(data, texts)": "warpfit.calls.results.Fit",
    "client.optimize(data, texts).parameters[0]": "ndarray[…, dtype[float64]]",
    "client.optimize(data, texts).formula()": "warpfit.ir.Program",
    "client.optimize(data, texts).band(rows)": "warpfit.calls.results.Band",
    "client.simplify(data, texts).programs[0]": "warpfit.ir.Program",
    "client.propose(data, texts).best": "warpfit.calls.proposals.Proposal | None",
    "client.search(data, seconds=1.0)": "warpfit.calls.search.SearchResult",
    "client.search(data, seconds=1.0).best": "warpfit.ir.Program",
    "client.info()": "warpfit.server_info.ServerInfo",
    "warpfit.parse('x1')": "warpfit.ir.Program",
    "warpfit.connect_async().evaluate(data, texts, loss='mse')": (
        "Coroutine[…, …, ndarray[…, dtype[float64]]]"
    ),
}
#: What a checker is to refuse.
REFUSED = {
    "client.evaluate(data, texts, losss='mse')": "call-overload",
    "client.evaluate(data, texts, tier='fast')": "call-overload",
    "client.optimize(data, texts, method='newton')": "arg-type",
    "client.optimize(data, texts, tollerance=1.0)": "call-arg",
    "client.optimize(data, texts).popt": "attr-defined",
    "client.predict(rows)": "attr-defined",
    "data.shape": "attr-defined",
}


@pytest.mark.thorough
def test_a_checker_knows_what_calls_return(tmp_path):
    pytest.importorskip("mypy")
    begin = textwrap.dedent(
        """\
        import numpy as np
        import warpfit
        client = warpfit.connect("127.0.0.1:50551")
        rows = np.ones((3, 1))
        data = client.upload(rows, np.ones(3))
        texts = ["x1", "p1*x1"]
        def some(flag: bool) -> None:
        """
    )
    lines = [f"reveal_type({one})" for one in REVEALED] + list(REFUSED)
    text = begin + "".join(f"    {line}\n" for line in lines)
    ast.parse(text)
    (tmp_path / "caller.py").write_text(text)
    (tmp_path / "mypy.ini").write_text(f"[mypy]\nmypy_path = {CLIENT}\nfollow_imports = silent\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--no-pretty", "caller.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    first = begin.count("\n") + 1
    found: dict[int, list[str]] = {}
    for number, told in re.findall(r"^caller\.py:(\d+): (.*)$", done.stdout, re.MULTILINE):
        found.setdefault(int(number) - first, []).append(told)
    assert found, done.stdout + done.stderr
    for place, (one, wanted) in enumerate(REVEALED.items()):
        told = " ".join(found.pop(place))
        shown = told.replace("numpy.", "").replace("typing.", "")
        # Shapes, precisions of NumPy's, and what is sent into a coroutine, are unknown.
        shown = shown.replace("tuple[Any, ...]", "…").replace("floating[Any]", "floating[…]")
        shown = shown.replace("Coroutine[Any, Any,", "Coroutine[…, …,")
        assert wanted in shown, (one, told)
        assert not re.search(r"\bAny\b", shown), (one, told)
    for place, (one, code) in enumerate(REFUSED.items(), len(REVEALED)):
        assert any(f"[{code}]" in told for told in found.pop(place, ())), one
    assert not found


def test_a_shell_completes_what_is_imported_at_first_use():
    from rlcompleter import Completer

    import warpfit

    shell = Completer({"warpfit": warpfit})
    assert shell.complete("warpfit.conn", 0).startswith("warpfit.connect(")
    assert shell.complete("warpfit.SearchN", 0) is None
