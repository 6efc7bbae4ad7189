"""Fault injection for tests: PYTHONPATH names this folder, TEST_WARPFIT_FAULT the fault.

``deaf=FILE``    while the file exists, evaluations of many programs go on though cancelled;
``frozen=FILE``  while it exists, such an evaluation lets no other thread of the engine run;
``compiling=FILE``  processes that compile wait while the file exists;
``idle=1``       evaluations of many programs compute nothing, their values are those before;
``leak=BYTES``   each answered call of a front end keeps that many bytes for ever;
``harm=NUMBER``  the engine dies of batches with that constant, and of data sets of 13 variables; an
                 evaluation with the next whole number loses its connection, and the engine lives.
"""

import ctypes
import os
import signal
import sys
import time
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from pathlib import Path

KIND, _, VALUE = os.environ.get("TEST_WARPFIT_FAULT", "").partition("=")
#: Programs of a batch from which on it is spoilt, and variables of a data set that engines die of.
MANY, FATAL_VARIABLES = 7, 13


def _hang(module) -> None:
    evaluate = module.CpuEngine.evaluate

    def faulty(self, evaluation, outputs):
        while len(evaluation.batch) >= MANY and Path(VALUE).exists():
            if KIND == "frozen":
                ctypes.PyDLL(None).usleep(10_000_000)  # keeps the interpreter's lock
            time.sleep(0.01)
        return evaluate(self, evaluation, outputs)

    module.CpuEngine.evaluate = faulty


def _idle(module) -> None:
    evaluate = module.CpuEngine.evaluate

    def faulty(self, evaluation, outputs):
        if len(evaluation.batch) < MANY:
            return (yield from evaluate(self, evaluation, outputs))
        return module.Timings()

    module.CpuEngine.evaluate = faulty


def _leak(module) -> None:
    servicer, kept = module.Servicer, []
    record_answer = servicer._record_answer

    def faulty(*arguments):
        kept.append(b"\1" * int(VALUE))
        return record_answer(*arguments)

    servicer._record_answer = faulty


def _die() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(60)  # any thread of the process may get it, a moment later


def _kill(module) -> None:
    evaluate, load = module.CpuEngine.evaluate, module.CpuEngine.load

    def fatal_batch(self, evaluation, outputs):
        if float(VALUE) in evaluation.batch.values:
            time.sleep(0.05)  # others are under way beside it
            _die()
        return evaluate(self, evaluation, outputs)

    def fatal_dataset(self, dataset, *arguments, **named):
        if dataset.layout.variables == FATAL_VARIABLES:
            _die()
        load(self, dataset, *arguments, **named)

    module.CpuEngine.evaluate, module.CpuEngine.load = fatal_batch, fatal_dataset


def _cut(module) -> None:
    runner, merger = module.RequestRunner, module.Merger
    begin, begin_merged = runner.begin, merger.begin

    def cut(requests):
        for request in requests:
            if float(VALUE) + 1 in request.evaluation.batch.values:
                request.connection.channel.shut()
        return requests

    runner.begin = lambda self, request: begin(self, *cut([request]))
    merger.begin = lambda self, requests: begin_merged(self, cut(requests))


def _compiling(module) -> None:
    run_parts = module.run_parts

    def faulty(parts, arguments):
        while Path(VALUE).exists():
            time.sleep(0.01)
        run_parts(parts, arguments)

    module.run_parts = faulty


_ENGINE = "warpfit_server.engine.cpu.engine"
#: For each fault the modules that are patched.
_FAULTS = {
    "compiling": {"warpfit_server.engine.native.numba_cache": _compiling},
    "harm": {_ENGINE: _kill, "warpfit_server.engine.runner": _cut},
    "deaf": {_ENGINE: _hang},
    "frozen": {_ENGINE: _hang},
    "idle": {_ENGINE: _idle},
    "leak": {"warpfit_server.rpc.servicer": _leak},
}


class _Finder(MetaPathFinder):
    """Patches modules as they are imported."""

    def find_spec(self, name, path, target=None):
        patch = _FAULTS[KIND].pop(name, None)
        if patch is None:
            return None
        spec = find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_patch(module):
            execute(module)
            patch(module)

        spec.loader.exec_module = execute_and_patch
        return spec


if KIND:
    sys.meta_path.insert(0, _Finder())
