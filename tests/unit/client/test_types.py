"""Types of public results, as a checker sees them: none of them is Any."""

import ast
import inspect
import pydoc
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from rlcompleter import Completer

import pytest

import warpfit

CLIENT = Path(__file__).resolve().parents[3] / "client"
#: Expressions of a caller, and what a checker is to know of them.
REVEALED = {
    "client.evaluate(data, texts)": "ndarray[…, dtype[floating[…]]]",
    "client.evaluate(data, texts, rows=(0, 2), tier='compiled')": "ndarray[…, dtype[floating[…]]]",
    "client.evaluate(data, texts, loss='mse')": "ndarray[…, dtype[float64]]",
    "client.evaluate(data, texts, loss='mse', gradient=True)[1][0]": ("ndarray[…, dtype[float64]]"),
    "client.evaluate(data, texts, loss='mse', linear_scaling=True)[2]": (
        "ndarray[…, dtype[float64]]"
    ),
    "client.evaluate(data, texts, jacobian=flag)": "ndarray[…, dtype[floating[…]]] | list[",
    "client.optimize(data, texts)": "warpfit.calls.results.Fit",
    "client.propose(data, texts).best": "warpfit.calls.proposals.Proposal | None",
    "client.search(data, seconds=1.0).best": "warpfit.ir.Program",
    "warpfit.connect_async().evaluate(data, texts, loss='mse')": (
        "Coroutine[…, …, ndarray[…, dtype[float64]]]"
    ),
}
#: What a checker is to refuse.
REFUSED = {
    "client.evaluate(data, texts, losss='mse')": "call-overload",
    "client.evaluate(data, texts, tier='fast')": "call-overload",
    "client.optimize(data, texts, method='newton')": "arg-type",
    "client.optimize(data, texts).popt": "attr-defined",
    "data.shape": "attr-defined",
    "SymbolicRegressor(model_selection='bestest')": "arg-type",
    "ParameterOptimizer(method='newton')": "arg-type",
}


@pytest.mark.thorough
def test_a_checker_knows_what_calls_return(tmp_path):
    pytest.importorskip("mypy")
    begin = textwrap.dedent(
        """\
        import numpy as np
        import warpfit
        from warpfit.sklearn import ParameterOptimizer, SymbolicRegressor
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


def test_a_shell_completes_and_lists_public_names_alone():
    """Also what is imported at first use."""
    shell = Completer({"warpfit": warpfit})
    assert shell.complete("warpfit.conn", 0).startswith("warpfit.connect(")
    assert shell.complete("warpfit.SearchN", 0) is None
    shown = dir(warpfit)
    assert {"connect", "local", "Client", "testing", "__version__"} <= {*shown}
    assert not {"Any", "Final", "TYPE_CHECKING", "import_module"} & {*shown}
    assert all(getattr(warpfit, name) is not None for name in shown)


def test_methods_show_their_keywords_in_a_few_lines():
    for kind in (warpfit.Client, warpfit.AsyncClient):
        for name in ("upload", "open", "evaluate", "run", "optimize", "simplify", "propose"):
            assert "options" not in inspect.signature(getattr(kind, name)).parameters, name
            head = pydoc.render_doc(getattr(kind, name), renderer=pydoc.plaintext)
            assert len(head.splitlines()[2]) < 1600, name
            assert "_SupportsArray" not in head
            assert "ForwardRef" not in head
