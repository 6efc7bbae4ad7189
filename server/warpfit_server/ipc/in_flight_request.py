"""A request that a front end has sent to the engine, until it is finished."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from queue import SimpleQueue
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Layout
from warpfit.errors import CancelledError, UnavailableError, WarpfitError
from warpfit.fitting import FitProgress, FitRequest, FitSettings
from warpfit.request import OUTPUTS, Evaluation, Timings
from warpfit_server.ipc import messages
from warpfit_server.ipc.quarantine import ClearedSuspect, InterruptedBatch, digest
from warpfit_server.ipc.reply_dispatcher import ReplyDispatcher
from warpfit_server.ipc.segment_layout import (
    ALONE,
    FIT_SETTING_ARRAYS,
    QUEUED,
    SegmentLayout,
)
from warpfit_server.ipc.segments import Segment
from warpfit_server.observability.logs import LOGGED_REQUEST_ID
from warpfit_server.system.machine import TOO_MANY_FILES
from warpfit_server.tenancy.tenants import PROBE

if TYPE_CHECKING:
    from warpfit_server.ipc.engine_connection import EngineConnection

_LOG: Final = logging.getLogger("warpfit.requests")
#: What is put into a request's queue when its call has ended, and when the engine is gone.
_ENDED: Final = object()
LOST: Final = object()


class InFlightRequest:
    """A request in an engine. Used by one thread; `cancel` may come from any other.

    ``arrays`` are those of a fit's settings, ``fit_settings`` the others; None for an evaluation.
    """

    segment: Segment
    connection: EngineConnection
    """The one that has sent it."""
    replies: ReplyDispatcher | None = None
    """Dispatcher of the connection that it was sent over; None before it was sent."""
    number = -1
    process = 0
    """Number of the engine process that it was sent to."""
    device = ""
    """Label of the device that it was sent to."""
    alone = 0.0
    """Seconds for which nothing may run beside it, if it is a suspect."""
    timings: Timings | None = None
    """Timings of the engine, once it has finished without an error."""
    progress: FitProgress | None = None
    """The latest of a fit, once there is any."""

    def __init__(
        self,
        segment_layout: SegmentLayout,
        evaluation: Evaluation,
        rows: tuple[int, int],
        tenant: str,
        arrays: Mapping[str, NDArray[Any]] = MappingProxyType({}),
        fit_settings: FitSettings | None = None,
        deadline: float | None = None,
    ) -> None:
        self.segment_layout = segment_layout
        self.evaluation = evaluation
        self.tenant = tenant
        self.queue: SimpleQueue[Any] = SimpleQueue()
        """Replies of the engine, which `EngineConnection` delivers."""
        self.on_end: Callable[[], None] = lambda: None
        """Called when it is closed."""
        self._rows = rows
        self._arrays = arrays
        self._fit_settings = fit_settings
        self._deadline = deadline
        self._submitted = time.monotonic_ns()
        self._is_over = self._is_lost = self._is_cancelled = False
        self._flag: NDArray[np.uint8] | None = None
        self._lock = threading.Lock()

    @classmethod
    def of_evaluation(
        cls, evaluation: Evaluation, layout: Layout, tenant: str = ""
    ) -> InFlightRequest:
        """Make a request of a checked evaluation on a data set of a layout."""
        rows = evaluation.row_range(layout)
        return cls(SegmentLayout.of(evaluation, layout), evaluation, rows, tenant)

    @classmethod
    def of_fit(
        cls, request: FitRequest, layout: Layout, deadline: float | None, tenant: str = ""
    ) -> InFlightRequest:
        """Make a request of a checked fit.

        ``deadline`` is the ``time.monotonic()`` at which the engine stops with what there is, or
        None.
        """
        settings = request.settings
        arrays = {name: getattr(settings, name) for name in FIT_SETTING_ARRAYS}
        return cls(
            SegmentLayout.of_fit(request, layout),
            request.problem,
            request.problem.row_range(layout),
            tenant,
            {name: array for name, array in arrays.items() if array is not None},
            replace(settings, lower=None, upper=None, fixed=None),
            deadline,
        )

    @property
    def is_fit(self) -> bool:
        """Whether it is a fit."""
        return self._fit_settings is not None

    def split(self, bounds: Sequence[int]) -> list[InFlightRequest]:
        """Return requests for parts of the programs, which use this one's segment.

        Each counts as the whole request where it may have crashed an engine.

        For the bounds see `SegmentLayout.split`.
        """
        evaluation, settings = self.evaluation, (self._arrays, self._fit_settings, self._deadline)
        parts = [
            InFlightRequest(layout, evaluation, self._rows, self.tenant, *settings)
            for layout in self.segment_layout.split(evaluation.batch, bounds)
        ]
        for part in parts:
            part.attach(self.segment)
        return parts

    def digest(self) -> bytes:
        """Return a hash of all that is requested."""
        return digest(self.evaluation, self._arrays, self._fit_settings)

    def write(self, segment: Segment) -> None:
        """Copy all inputs into a segment, which is the request's from now on."""
        self.segment_layout.write(segment, self.evaluation, self._arrays)
        self.attach(segment)

    def attach(self, segment: Segment) -> None:
        """Use a segment that has all inputs."""
        self.segment = segment
        self._flag = self.segment_layout.cancelled(segment)

    def message(self) -> messages.SubmitEvaluation:
        """Make the message that submits the request."""
        evaluation, custom = self.evaluation, self.evaluation.custom_loss
        settings = self._fit_settings
        return messages.SubmitEvaluation(
            request=self.number,
            segment=self.segment.identifier,
            size=self.segment.size,
            segment_layout=self.segment_layout,
            dataset_id=evaluation.dataset_id,
            rows=self._rows,
            precision=evaluation.precision._name_,
            loss=None if evaluation.loss is None else evaluation.loss._name_,
            tier=evaluation.tier._name_,
            submitted=self._submitted,
            closing=None if custom is None else custom.closing.name,
            outputs=tuple([name for name in ("values", *OUTPUTS) if getattr(evaluation, name)]),
            tenant=self.tenant,
            request_id=LOGGED_REQUEST_ID.get(),
            alone=self.alone,
            fit=None if settings is None else (settings, self._deadline),
        )

    def array(self, name: str) -> NDArray[Any] | None:
        """View of a result, final once `next_reply` has returned RequestFinished, or None."""
        return self.segment_layout.array(name, self.segment)

    def shares(self) -> Iterator[tuple[float, Timings]]:
        """Yield 1 and the timings, if it has finished; see `SplitRequest.shares`."""
        if self.timings is not None:
            yield 1.0, self.timings

    def next_reply(self) -> messages.Reply:
        """Wait for the engine.

        Raises:
            WarpfitError: if the request failed.
            CancelledError: if it was cancelled; the engine may still be at work.
        """
        assert self.replies is not None  # it has been sent
        reply = self.replies.next_reply(self.queue)
        if reply is _ENDED:
            raise CancelledError("the call has ended", "CANCELLED")
        if reply is LOST:
            self._is_over = self._is_lost = True
            self._report_loss()
            raise unavailable()
        if isinstance(reply, messages.RequestFinished):
            self._finish(reply)
        received: messages.Reply = reply
        return received

    def _finish(self, reply: messages.RequestFinished) -> None:
        self._is_over = True
        if self.alone and not self._is_cancelled:
            dataset = self.evaluation.dataset_id
            self.connection.report(ClearedSuspect(dataset, self.digest()))
        if reply.error is not None:
            if reply.error.reason == TOO_MANY_FILES:
                self.connection.was_not_mapped(self.segment)
            raise reply.error
        self.timings = reply.timings

    def cancel(self) -> None:
        """Stop the work, because nobody waits for its result any more."""
        with self._lock:
            if self._flag is not None:
                self._flag[0] = 1
                self._is_cancelled = True
                self.notice(_ENDED)

    def take(self, entry: object) -> None:
        """Take a reply of the engine, for `next_reply`; any thread may call this."""
        if isinstance(entry, messages.FitProgressed):
            self.progress = entry.progress
        self.queue.put(entry)

    def notice(self, entry: object) -> None:
        """Queue an entry that is not the engine's, and wake the thread that waits for it."""
        self.take(entry)
        if self.replies is not None:
            self.replies.wake(self.queue)

    def close(self) -> None:
        """Wait until the engine is done, then give the segment back."""
        # An engine that is being killed may still write to it.
        self.connection.pool.release(self.segment, is_clean=self.end())

    def end(self) -> bool:
        """Wait until the engine is done; return False if the engine was lost."""
        if not self._is_over:
            self.cancel()
        while not self._is_over:
            with suppress(WarpfitError):
                self.next_reply()
        self.on_end()
        with self._lock:
            self._flag = None  # the segment may soon be another call's
        return not self._is_lost

    def _report_loss(self) -> None:
        """Report the request if the engine had begun it when it was lost."""
        state = self.segment_layout.state(self.segment)
        if state != QUEUED and self.tenant != PROBE:
            self._report(self.process, alone=state == ALONE)

    def _report(self, process: int, *, alone: bool) -> None:
        """Report that an engine process was lost which had begun the request."""
        _LOG.warning("a batch of tenant %s was in an engine that was lost", self.tenant)
        batch, dataset = self.digest(), self.evaluation.dataset_id
        self.connection.report(InterruptedBatch(process, dataset, batch, alone))


def unavailable() -> UnavailableError:
    """Return the error for calls that come while no engine is ready."""
    return UnavailableError(
        "the engine is restarting", "ENGINE_RESTARTING", "Repeat the call after a short wait"
    )
