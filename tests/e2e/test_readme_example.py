"""The client example of the README works when it is pasted."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

import warpfit

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def test_client_example(server, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(code.strip().splitlines()) <= 12
    names: dict[str, object] = {}
    exec(code.replace("127.0.0.1:50551", server.address), names)
    assert np.asarray(names["losses"])[0] < 1e-12
    assert np.shape(names["values"]) == (1000, 3)
    assert "(1000, 3)" in capsys.readouterr().out


def test_fit_example(client: warpfit.Client):
    (code,) = re.findall(r"```py\n(.*?)```", README, re.DOTALL)
    X = np.random.default_rng(0).normal(size=(1000, 3))
    y = 2.5 * X[:, 0] + np.sin(X[:, 1])
    names = {"client": client, "data": client.upload(X, y)}
    exec(code, names)
    fit = names["fit"]
    np.testing.assert_allclose(fit.parameters[0], [2.5, 1.0], rtol=1e-3)
    assert (fit.loss <= fit.initial_loss).all()
