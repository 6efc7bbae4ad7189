"""Requests in memory of their own, which a `RequestRunner` computes step by step."""

import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from warpfit.request import FitRequest, Timings
from warpfit_server.engine.evaluation import LoadedDatasets
from warpfit_server.engine.interface import Steps
from warpfit_server.engine.runner import RequestRunner
from warpfit_server.ipc.engine_connection import InFlightRequest
from warpfit_server.ipc.segments import FIT_SETTING_ARRAYS, SegmentLayout, SegmentPool


class Pause(NamedTuple):
    """What an engine's thread did until it looked at its queue again."""

    seconds: float
    """Processor time of the thread: other work on the machine does not count."""
    waits: bool
    """Whether it then waited for a device, or for other threads."""
    process: float = 0.0
    """Processor time of all threads of the process meanwhile: these may work for the engine's."""
    wall: float = 0.0
    """Seconds, which other work on the machine makes longer."""


def run_steps(steps: Steps[Any], look: Callable[[Pause], None] = lambda pause: None) -> Any:
    """Run all steps, and return their result.

    ``look`` is called whenever the engine's thread would look at its queue.
    """
    clocks = time.thread_time, time.process_time, time.monotonic
    while True:
        thread, process, wall = (clock() for clock in clocks)
        try:
            waits_for, result, is_over = next(steps), None, False
        except StopIteration as end:
            waits_for, result, is_over = None, end.value, True
        spent = time.thread_time() - thread, time.process_time() - process
        look(Pause(spent[0], waits_for is not None, spent[1], time.monotonic() - wall))
        if is_over:
            return result
        if waits_for is not None:
            waits_for.result()


class EngineRequest:
    """A request in memory of its own, its steps, and what was sent about it.

    The engine has loaded the data; ``fit`` has the settings if the evaluation is a fit's problem.
    """

    def __init__(self, engine, data, evaluation, fit=None, runner=None):
        arrays: dict[str, Any] = {}
        if fit is None:
            self.layout = SegmentLayout.of(evaluation, data.layout)
        else:
            self.layout = SegmentLayout.of_fit(FitRequest(evaluation, fit), data.layout)
            given = {name: getattr(fit, name) for name in FIT_SETTING_ARRAYS}
            arrays = {name: array for name, array in given.items() if array is not None}
            fit = replace(fit, **dict.fromkeys(FIT_SETTING_ARRAYS))
        self.segment = SegmentPool(1 << 24).acquire(self.layout.nbytes)
        self.layout.write(self.segment, evaluation, arrays)
        self.sent: list[Any] = []
        described = SimpleNamespace(
            segment_layout=self.layout,
            dataset_id=data.content_id,
            fit=None if fit is None else (fit, None),
            search=None,
        )
        self.request: Any = SimpleNamespace(
            evaluation=replace(evaluation, batch=self.layout.batch(self.segment)),
            problem=described,
            segment=self.segment,
            number=1,
            cancelled=np.zeros(1, np.uint8),
            connection=SimpleNamespace(send=self.sent.append),
        )
        runner = runner or RequestRunner(engine, LoadedDatasets(engine, {data.content_id: data}), 1)
        self.steps: Steps[Timings] = runner.begin(self.request)

    def run(self, look: Callable[[Pause], None] = lambda pause: None) -> None:
        """Run all steps as `run_steps` does."""
        run_steps(self.steps, look)

    def results(self) -> dict[str, bytes]:
        """Run all steps; return the results by name."""
        self.run()
        found = self.layout.results(self.segment)
        return {name: array.tobytes() for name, array in found.items()}


def written(evaluation, layout, pool=None):
    """Write a request into a segment full of other things, as a front end does."""
    request = InFlightRequest.of_evaluation(evaluation, layout, "me")
    pool = pool or SegmentPool(1 << 24)
    segment = pool.acquire(request.segment_layout.nbytes, "me")
    segment.view()[:] = np.random.default_rng(1).bytes(segment.size)
    request.write(segment)
    return request
