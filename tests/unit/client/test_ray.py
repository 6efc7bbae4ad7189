"""Servers on Ray where Ray is not: what callers are told. The rest is in tests/e2e/test_ray.py."""

import sys

import pytest

import warpfit
import warpfit.ray
from warpfit.cli.main import main
from warpfit.errors import InvalidArgumentError


def test_the_extra_is_named_where_ray_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InvalidArgumentError, match=r"pip install 'warpfit\[ray\]'"):
        warpfit.connect("ray://science")
    assert main(["ray", "list"]) == 2
    assert "'warpfit[ray]'" in capsys.readouterr().err


def test_the_command_hands_over_what_it_is_told(monkeypatch, capsys):
    told = []
    monkeypatch.setattr(warpfit.ray, "start", lambda *args, **more: told.append((args, more)) or [])
    words = ["up", "science", "--devices", "cpu", "--cpus", "0.5", "--", "--threads", "2"]
    assert main(["ray", *words]) == 0
    flags = ["--threads", "2"]
    assert told == [(("science",), {"devices": "cpu", "cpus": 0.5, "flags": flags})]
    assert main(["ray", "up"]) == 0
    assert told[1] == (("warpfit",), {"devices": "all", "cpus": 1.0, "flags": []})


@pytest.mark.parametrize("name", ["", "a/b", "localhost:10001", "x" * 64])
def test_what_is_no_namespace_is_refused(name):
    with pytest.raises(InvalidArgumentError, match="is no namespace"):
        warpfit.connect(f"ray://{name}")
