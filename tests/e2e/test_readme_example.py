"""The client example of the README works when it is pasted."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def test_client_example(server, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(code.strip().splitlines()) <= 12
    names: dict[str, object] = {}
    exec(code.replace("127.0.0.1:50551", server.address), names)
    assert np.asarray(names["losses"])[0] < 1e-12
    assert np.shape(names["values"]) == (1000, 3)
    assert "(1000, 3)" in capsys.readouterr().out
