"""After ``warpfit precompile`` a server's start and first calls compile nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from warpfit.cli import main as cli
from warpfit_server import precompile
from warpfit_server.compile_cache import engine_environment
from warpfit_server.engine.cpu.codegen import parts
from warpfit_server.engine.native import numba_cache

#: Prints how many things an engine's start, an evaluation and a gradient compile, with which the
#: code of fits is loaded, too.
SCRIPT = """
import sys
from dataclasses import replace
from numba.core import compiler
sys.path.append(sys.argv[1])
from support.engines.gradients import ask
from support.servers.examples import DATA, an_evaluation
from warpfit.request import Loss
from warpfit_server.engine.cpu.codegen import kernels
from warpfit_server.engine.cpu.engine import CpuEngine
from warpfit_server.engine.fit import bfgs, levenberg_marquardt, linear_model
from warpfit_server.engine.native import numba_cache

count = 0

def counted(function):
    def call(*arguments, **options):
        global count
        count += 1
        return function(*arguments, **options)
    return call

compiler.compile_extra = counted(compiler.compile_extra)
kernels._compile = counted(kernels._compile)
numba_cache.python_child = counted(numba_cache.python_child)
engine = CpuEngine(1)
for gradient in (False, True):
    evaluation = an_evaluation(loss=Loss.MSE, gradient=gradient)
    # Arrays of a request can be written to, and are of another type than those that cannot.
    ask(engine, DATA, replace(evaluation, batch=evaluation.batch.copy()))
for function in (levenberg_marquardt.advance, bfgs.advance, linear_model.mark_linear):
    assert function.signatures, "fits load nothing after a pass of the engine"
print(count)
"""


@pytest.mark.timeout(600)  # where the cache is empty, as after a change of these sources
def test_a_start_and_the_first_calls_compile_nothing():
    """The cache is the one of the tests, which has most of the code already."""
    environment = engine_environment(None)
    command = [sys.executable, "-c", "from warpfit.cli.main import main; main(['precompile'])"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.count(" s\n") == 1
    command = [sys.executable, "-c", SCRIPT, Path(__file__).parents[2]]  # where it finds `support`
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"


@pytest.fixture
def started(monkeypatch):
    """Names of the parts that compile processes are started for; the processes do nothing."""
    found = []

    def child(option, module, place, *shares):
        found.extend(name for share in shares for name in share.split(":", 2)[2].split(",") if name)
        return {"args": ["true"], "env": {}}

    monkeypatch.setattr(numba_cache, "python_child", child)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return found


def test_every_part_is_compiled_once(started, tmp_path):
    assert cli.main(["precompile", "--cache-dir", str(tmp_path)]) == 0
    assert sorted(started) == sorted(parts.PARTS)
    started.clear()
    assert cli.main(["precompile", "--cache-dir", str(tmp_path)]) == 0
    assert not started


def test_each_architecture_is_compiled_without_a_gpu(started, tmp_path, capsys):
    cuda = pytest.importorskip("warpfit_server.engine.cuda.parts")
    words = ["--engine", "cuda", "--architectures", "80,90", "--cache-dir", str(tmp_path)]
    assert cli.main(["precompile", *words]) == 0
    names = [f"{group}/{part}" for group, found in cuda.GROUPS.items() for part in found]
    assert sorted(started) == sorted(f"{number}/{name}" for number in (80, 90) for name in names)
    assert "compute capability 9.0" in capsys.readouterr().out


@pytest.mark.parametrize("part", ["lowering", "graph kernels"])
def test_an_engine_finds_what_a_part_has_compiled(tmp_path, monkeypatch, part):
    cuda = pytest.importorskip("warpfit_server.engine.cuda.parts")
    from warpfit_server.engine.cuda.interpreter.launches import lowering_source
    from warpfit_server.engine.cuda.jit.tier import graph_source
    from warpfit_server.engine.cuda.runtime.compiler import CudaSource

    (tmp_path / "cubin").mkdir(mode=0o700)
    cuda._run(tmp_path, f"90/values/{part}")
    source = {"lowering": lowering_source, "graph kernels": graph_source}[part]()
    monkeypatch.setattr(CudaSource, "compile", lambda *_: pytest.fail("compiled again"))
    assert len(source.cached(90, tmp_path)) > 1000


@pytest.mark.parametrize("text", ["", "9.0", "ninety", "8", "90,", "-90", "1000"])
def test_architectures_that_do_not_exist_are_refused(text, capsys):
    with pytest.raises(SystemExit):
        precompile.main(["--engine", "cuda", f"--architectures={text}"])
    assert "--architectures" in capsys.readouterr().err
