"""A process's way into the engine: lanes, each for one evaluation at a time.

A lane is a socket pair with a thread of the engine at its other end. The thread that serves a call
talks to that thread itself: no dispatcher stands between, on either side. A lane keeps a segment of
shared memory for batch and losses; an answer with values takes its segment along, so that a client
that reads slowly holds memory, but no lane.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Layout
from warpfit.errors import CancelledError, UnavailableError, WarpfitError
from warpfit.request import Evaluation
from warpfit_server import channel as wire
from warpfit_server.channel import Channel, ChannelClosedError
from warpfit_server.frame import Frame
from warpfit_server.segments import Segment, SegmentPool

#: A lane keeps a segment up to this size for its next evaluation.
_KEPT_BYTES: Final = 4 << 20
#: A call that waits for a lane looks this often whether its client is still there, in seconds.
_LOOK_UP: Final = 0.05


class Lane:
    """One socket to a thread of the engine, and the segment that the thread has mapped."""

    def __init__(self, end: socket.socket, generation: int) -> None:
        self.channel = Channel(end)
        self.generation = generation
        """Number of the engine, from 1."""
        self.segment: Segment | None = None


class Lanes:
    """The lanes of this process; `open` whenever an engine starts, `shut` when it is gone.

    Args:
        pool: where segments come from.

    """

    def __init__(self, pool: SegmentPool) -> None:
        self.pool = pool
        self._idle: list[Lane] = []
        self._open = False
        self._generation = 0
        self._changed = threading.Condition()

    def open(self, ends: Sequence[socket.socket]) -> None:
        """Use these sockets from now on."""
        self.shut()
        with self._changed:
            self._generation += 1
            self._idle = [Lane(end, self._generation) for end in ends]
            self._open = True
            self._changed.notify_all()

    def shut(self) -> None:
        """Refuse evaluations until the next `open`."""
        with self._changed:
            dropped, self._idle = self._idle, []
            self._open = False
            self._changed.notify_all()
        for lane in dropped:
            self._drop(lane)

    def start(self, evaluation: Evaluation, layout: Layout, is_wanted: Callable[[], bool]) -> Run:
        """Hand a checked evaluation to the engine; the caller must `Run.close` in the end.

        The caller holds a lease on the data set.

        Args:
            evaluation: what to evaluate.
            layout: layout of its data set.
            is_wanted: asked now and then while all lanes are busy.

        Raises:
            UnavailableError: if there is no engine.
            CancelledError: if the evaluation was no longer wanted.
            ResourceExhaustedError: if there is no memory for batch and answer.

        """
        submitted = time.monotonic_ns()
        frame = Frame.of(evaluation, layout)
        lane = self._take(is_wanted)
        try:
            fresh = self._provide(lane, frame.nbytes)
            segment = lane.segment
            assert segment is not None  # provided
            frame.write(segment, evaluation.batch)
            message = wire.Evaluate(
                size=segment.size if fresh else 0,
                keep=not frame.values and segment.size <= _KEPT_BYTES,
                frame=frame,
                dataset_id=evaluation.dataset_id,
                rows=evaluation.row_range(layout),
                precision=evaluation.precision,
                loss=evaluation.loss,
                tier=evaluation.tier,
                submitted=submitted,
            )
            lane.channel.send(message, [segment.descriptor] if fresh else [])
        except ChannelClosedError as error:
            self.lost(lane)
            raise unavailable() from error
        except BaseException:
            self.put_back(lane)  # nothing was sent
            raise
        return Run(self, lane, segment, frame, keep=message.keep)

    def put_back(self, lane: Lane) -> None:
        """Take a lane back whose evaluation has ended."""
        with self._changed:
            if self._open and lane.generation == self._generation:
                self._idle.append(lane)
                self._changed.notify()
                return
        self._drop(lane)

    def lost(self, lane: Lane) -> None:
        """Close a lane whose engine is gone, and with it all others to that engine."""
        self._drop(lane)
        if lane.generation == self._generation:
            self.shut()

    def _take(self, is_wanted: Callable[[], bool]) -> Lane:
        with self._changed:
            while self._open and not self._idle:
                if not self._changed.wait(_LOOK_UP) and not is_wanted():
                    raise CancelledError("the call has ended", "CANCELLED")
            if not self._open:
                raise unavailable()
            return self._idle.pop()  # the one used last: its memory is in the caches

    def _provide(self, lane: Lane, size: int) -> bool:
        """Give a lane a segment that is large enough; tell whether it is another one."""
        if lane.segment is not None and lane.segment.size >= size:
            return False
        if lane.segment is not None:
            self.pool.release(lane.segment)
            lane.segment = None
        lane.segment = self.pool.acquire(size)
        return True

    def _drop(self, lane: Lane) -> None:
        lane.channel.close()
        if lane.segment is not None:
            lane.segment.close()
            lane.segment = None


class Run:
    """One evaluation in the engine. Used by one thread; `cancel` may come from any other."""

    def __init__(
        self, lanes: Lanes, lane: Lane, segment: Segment, frame: Frame, *, keep: bool
    ) -> None:
        self.segment = segment
        self.frame = frame
        self.losses: NDArray[np.float64] | None = None
        """[programs, K], once `next_event` has returned Finished."""
        self._lanes = lanes
        self._lane = lane
        self._keep = keep
        self._running = True
        self._lock = threading.Lock()

    def next_event(self) -> wire.Progress | wire.Finished:
        """Wait for the engine.

        Raises:
            WarpfitError: if the evaluation failed.

        """
        try:
            event, _ = self._lane.channel.receive()
        except ChannelClosedError as error:
            self._finish(lost=True)
            raise unavailable() from error
        if isinstance(event, wire.Finished):
            self._finish(lost=False)
            if event.error is not None:
                raise event.error
        assert isinstance(event, wire.Progress | wire.Finished)  # nothing else is sent on a lane
        return event

    def cancel(self) -> None:
        """Stop the evaluation, because nobody waits for its answer any more."""
        with self._lock:
            if self._running:
                self.frame.flag(self.segment)[0] = 1

    def close(self) -> None:
        """Wait until the engine is done, then give the segment back."""
        self.cancel()
        while self._running:
            with contextlib.suppress(WarpfitError):
                self.next_event()
        if not self._keep:
            self._lanes.pool.release(self.segment)

    def _finish(self, *, lost: bool) -> None:
        losses = self.frame.losses_view(self.segment)
        with self._lock:
            self._running = False
            self.losses = None if losses is None else losses.copy()
        if not self._keep:
            self._lane.segment = None
        if lost:
            self._lanes.lost(self._lane)
        else:
            self._lanes.put_back(self._lane)


def unavailable() -> UnavailableError:
    """Explain that no engine is ready."""
    return UnavailableError(
        "the engine is restarting", "ENGINE_RESTARTING", "Repeat the call after a short wait"
    )
