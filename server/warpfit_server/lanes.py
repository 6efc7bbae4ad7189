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
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Layout
from warpfit.errors import CancelledError, UnavailableError, WarpfitError
from warpfit.fitting import FitRequest, FitSettings
from warpfit.request import Evaluation, Timings
from warpfit_server import channel as wire
from warpfit_server.channel import Channel, ChannelClosedError
from warpfit_server.frame import Frame
from warpfit_server.logs import current_id
from warpfit_server.orders import WISHES, Evaluate, Optimize, Order
from warpfit_server.quarantine import Casualty, Survivor, Suspects, digest
from warpfit_server.segments import Segment, SegmentPool
from warpfit_server.shortages import TOO_MANY_FILES

#: The engine keeps a lane's segment mapped up to this size: mapping a large one again costs as much
#: as filling it.
_KEPT_BYTES: Final = 256 << 20
#: A call that waits for the engine notices after this many microseconds that it has ended.
_NOTICE: Final = 20_000
#: A call that waits for a lane looks this often whether its client is still there, in seconds.
_LOOK_UP: Final = 0.05
#: Lanes that fits leave to evaluations.
_FOR_EVALUATIONS: Final = 2
#: A lane's segment above this size is not wiped for another tenant but exchanged.
_WIPED_BYTES: Final = 1 << 20
#: Lanes used last that new kinds of work take turns on, so that the engine finds on each what it
#: knows, and no more of them hold memory.
_WARM: Final = 4


class Use(NamedTuple):
    """What a lane is used for."""

    tenant: str
    """On whose behalf."""
    kind: Hashable = None
    """What evaluations share that the engine answers best on the same lane; None: nothing."""
    fit: bool = False
    """Whether it is used for long."""
    probe: bool = False
    """Whether it may be the spare lane."""


class Lane:
    """One socket to a thread of the engine, and the segment that the thread has mapped."""

    def __init__(
        self, end: socket.socket, generation: int, engine: int, *, is_spare: bool = False
    ) -> None:
        self.channel = Channel(end)
        self.channel.wake_every(_NOTICE)
        self.generation = generation
        """Number of the `Lanes.open` that it is from."""
        self.engine = engine
        """Number of the engine, from 1."""
        self.is_spare = is_spare
        """Whether it is for probes alone."""
        self.segment: Segment | None = None
        self.mapped: Segment | None = None
        """The segment that the engine has mapped for this lane, whoever holds it now."""
        self.use = Use("")
        """What it is used for, or was last."""


@dataclass(slots=True, eq=False)
class _Waiter:
    """A call that waits for a lane."""

    use: Use
    lane: Lane | None = None
    served: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """What to send once a lane and its segment are known."""

    frame: Frame
    evaluation: Evaluation
    layout: Layout
    tenant: str
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Of a fit, by name."""
    fit: tuple[FitSettings, float | None] | None = None
    """Settings of a fit, without arrays, and when it must stop."""
    urgent: bool = False
    """Whether the engine runs it at once, beside everything else: a probe."""
    submitted: int = field(default_factory=time.monotonic_ns)

    def digest(self) -> bytes:
        """Return a name of all that is asked for."""
        return digest(self.evaluation, self.arrays, self.fit and self.fit[0])

    @property
    def use(self) -> Use:
        """What its lane is used for."""
        asked = self.evaluation
        if self.urgent:
            return Use(self.tenant, probe=True)
        if self.fit is not None or not self.frame.is_small:
            return Use(self.tenant, fit=self.fit is not None)
        return Use(self.tenant, (asked.dataset_id, asked.precision, asked.loss, asked.tier))

    def order(self, size: int, keep: bool, alone: float) -> Order:
        """Make the message.

        Args:
            size: bytes of the segment that comes along, or 0.
            keep: whether the engine keeps it mapped.
            alone: seconds for which nothing may run beside it.

        """
        asked = self.evaluation
        problem = Evaluate(
            size=size,
            keep=keep,
            frame=self.frame,
            dataset_id=asked.dataset_id,
            rows=asked.row_range(self.layout),
            precision=asked.precision,
            loss=asked.loss,
            tier=asked.tier,
            submitted=self.submitted,
            closing=None if asked.custom_loss is None else asked.custom_loss.closing,
            wishes=tuple([wish for wish in WISHES if getattr(asked, wish)]),
            tenant=self.tenant,
            request_id=current_id(),
            urgent=self.urgent,
            alone=alone,
        )
        return problem if self.fit is None else Optimize(problem, *self.fit)


class Lanes:
    """The lanes of this process; `open` whenever an engine starts, `shut` when it is gone.

    A lane goes to the call whose tenant has fewest, and the last one only to a tenant that has
    none: whoever floods the engine does not keep others from reaching it. A tenant's further fits
    leave two lanes to evaluations, which are over sooner. Probes take the lane that has been idle
    for longest, and a spare one when calls have all the others.

    If a lane is lost, calls are refused until there are new ones: the engine may be gone, and if
    it is not, nothing of what it was told is certain.

    Args:
        pool: where segments come from.
        suspects: what may have crashed an engine.

    """

    def __init__(self, pool: SegmentPool, suspects: Suspects | None = None) -> None:
        self.pool = pool
        self.report: Callable[[Casualty | Survivor], None] = lambda outcome: None
        """Told what became of evaluations whose lane was lost, and of suspects."""
        self.on_lost: Callable[[], None] = lambda: None
        """Called when a lane is lost, and whenever `renew` finds that there are none."""
        self._suspects = suspects or Suspects()
        self._spare: Lane | None = None
        self._idle: list[Lane] = []
        self._open = False
        self._generation = 0
        self._used: Counter[str] = Counter()
        self._fits: Counter[str] = Counter()
        self._most_fits = 0
        self._waiters: list[_Waiter] = []
        self._changed = threading.Lock()

    def open(
        self, ends: Sequence[socket.socket], spare: socket.socket | None = None, engine: int = 0
    ) -> None:
        """Use these sockets from now on.

        Args:
            ends: of ordinary lanes.
            spare: of one more, for probes.
            engine: number of the engine at the other ends.

        """
        self.shut()
        with self._changed:
            self._generation += 1
            self._idle = [Lane(end, self._generation, engine) for end in ends]
            self._spare = None
            if spare is not None:
                self._spare = Lane(spare, self._generation, engine, is_spare=True)
            self._used.clear()
            self._fits.clear()
            self._most_fits = len(ends) - _FOR_EVALUATIONS
            self._open = True
            self._serve()

    def shut(self) -> bool:
        """Refuse evaluations until the next `open`; return whether they were taken before."""
        with self._changed:
            was_open = self._open
            dropped, self._idle = self._idle, []
            if self._spare is not None:
                dropped.append(self._spare)
                self._spare = None
            self._open = False
            for waiter in self._waiters:
                waiter.served.set()
        for lane in dropped:
            self._drop(lane)
        return was_open

    def start(
        self,
        evaluation: Evaluation,
        layout: Layout,
        is_wanted: Callable[[], bool],
        tenant: str = "",
        *,
        urgent: bool = False,
    ) -> Run:
        """Hand a checked evaluation to the engine; the caller must `Run.close` in the end.

        The caller holds a lease on the data set.

        Args:
            evaluation: what to evaluate.
            layout: layout of its data set.
            is_wanted: asked now and then while all lanes are busy.
            tenant: on whose behalf.
            urgent: whether the engine runs it at once, beside everything else: a probe.

        Raises:
            UnavailableError: if there is no engine.
            FailedPreconditionError: if engines have died of it.
            CancelledError: if the evaluation was no longer wanted.
            ResourceExhaustedError: if there is no memory for batch and answer.

        """
        frame = Frame.of(evaluation, layout)
        return self._send(_Work(frame, evaluation, layout, tenant, urgent=urgent), is_wanted)

    def start_fit(
        self,
        request: FitRequest,
        layout: Layout,
        deadline: float | None,
        is_wanted: Callable[[], bool],
        tenant: str = "",
    ) -> Run:
        """Hand a checked fit to the engine, as `start` does.

        Args:
            request: the fit.
            layout: layout of its data set.
            deadline: ``time.monotonic()`` at which the engine stops with what there is, or None.
            is_wanted: asked now and then while all lanes are busy.
            tenant: on whose behalf.

        """
        frame = Frame.of_fit(request, layout)
        settings = request.settings
        arrays = {name: getattr(settings, name) for name in ("lower", "upper", "fixed")}
        scalars = replace(settings, lower=None, upper=None, fixed=None)
        given = {name: array for name, array in arrays.items() if array is not None}
        work = _Work(frame, request.problem, layout, tenant, given, (scalars, deadline))
        return self._send(work, is_wanted)

    def _send(self, work: _Work, is_wanted: Callable[[], bool]) -> Run:
        frame = work.frame
        dataset = work.evaluation.dataset_id
        alone = 0.0 if work.urgent else self._suspects.check(dataset, work.digest)
        lane = self._take(is_wanted, work.use)
        try:
            segment = self._provide(lane, frame.nbytes, work.tenant)
            frame.write(segment, work.evaluation)
            for name, array in work.arrays.items():
                np.copyto(frame.require(name, segment), array)
            keep = segment.size <= _KEPT_BYTES
            fresh = lane.mapped is not segment
            order = work.order(segment.size if fresh else 0, keep, alone)
            lane.channel.send(order, [segment.descriptor] if fresh else [])
            lane.mapped = segment if keep else None
        except ChannelClosedError as error:
            self.lost(lane)
            raise unavailable() from error
        except BaseException:
            self.put_back(lane)  # nothing was sent
            raise
        return Run(self, lane, segment, work, is_suspect=alone > 0)

    def put_back(self, lane: Lane) -> None:
        """Take a lane back whose evaluation has ended."""
        with self._changed:
            if self._open and lane.generation == self._generation:
                self._used[lane.use.tenant] -= 1
                self._fits[lane.use.tenant] -= lane.use.fit
                if lane.is_spare:
                    self._spare = lane
                else:  # the probe's at the other end, so that no other lane needs memory for it
                    self._idle.insert(0 if lane.use.probe else len(self._idle), lane)
                self._serve()
                return
        self._drop(lane)

    def return_segment(self, lane: Lane, segment: Segment) -> None:
        """Take the segment of an answer back: for the lane that has it mapped, or for the pool."""
        with self._changed:
            held = sum(idle.segment.size for idle in self._idle if idle.segment)
            is_free = lane in self._idle and lane.segment is None and lane.mapped is segment
            if is_free and held + segment.size <= self.pool.idle_bytes:
                lane.segment = segment
                return
            if is_free:
                lane.mapped = None
                with contextlib.suppress(ChannelClosedError):  # the next user finds that out
                    lane.channel.send(wire.Unmap())
        self.pool.release(segment)

    def lost(self, lane: Lane) -> None:
        """Close a lane whose engine is gone, or has lost it, and with it all others to it."""
        self._drop(lane)
        if lane.generation == self._generation and self.shut():
            self.on_lost()

    def renew(self) -> None:
        """Ask for new lanes if there are none."""
        if not self._open:
            self.on_lost()

    def _take(self, is_wanted: Callable[[], bool], use: Use) -> Lane:
        with self._changed:
            if self._open and not self._waiters and self._may_have(use):
                return self._hand_out(use)
            waiter = _Waiter(use)
            self._waiters.append(waiter)
            self._serve()
        wanted = True
        while True:
            with self._changed:
                if waiter.lane is not None:
                    return waiter.lane
                if not (self._open and wanted):
                    self._waiters.remove(waiter)
                    raise _ended() if self._open else unavailable()
                waiter.served.clear()
            wanted = waiter.served.wait(_LOOK_UP) or is_wanted()

    def _serve(self) -> None:
        """Give idle lanes to those who wait; the lock is held."""
        while self._open and (able := [w for w in self._waiters if self._may_have(w.use)]):
            waiter = min(able, key=lambda w: self._used[w.use.tenant])
            self._waiters.remove(waiter)
            waiter.lane = self._hand_out(waiter.use)
            waiter.served.set()

    def _may_have(self, use: Use) -> bool:
        """Whether a lane is idle, and not the last one, or a fit too many, for who has others."""
        if use.probe:
            return bool(self._idle) or self._spare is not None
        if use.fit and self._fits[use.tenant] and self._fits.total() >= self._most_fits:
            return False
        return len(self._idle) > 1 or (bool(self._idle) and not self._used[use.tenant])

    def _hand_out(self, use: Use) -> Lane:
        self._used[use.tenant] += 1
        self._fits[use.tenant] += use.fit
        lane = self._pick(use)
        lane.use = use
        return lane

    def _pick(self, use: Use) -> Lane:
        """Take the idle lane last used for the same, else one that has waited for a new kind."""
        if use.probe:
            return self._idle.pop(0) if len(self._idle) > 1 else self._take_spare()
        for index in range(len(self._idle) - 1, -1, -1):
            if self._idle[index].use == use:
                return self._idle.pop(index)
        return self._idle.pop(-1 if use.kind is None else max(0, len(self._idle) - _WARM))

    def _take_spare(self) -> Lane:
        spare, self._spare = self._spare, None
        return spare or self._idle.pop(0)

    def _provide(self, lane: Lane, size: int, tenant: str) -> Segment:
        """Give a lane a segment that is large enough, unless it has one."""
        segment = lane.segment
        if segment is not None:
            is_foreign = segment.owner != tenant and segment.size > _WIPED_BYTES
            if segment.size < size or is_foreign:
                self.pool.release(segment)
                lane.segment = None
        if lane.segment is None:
            lane.segment = self.pool.acquire(size, tenant)
        lane.segment.give_to(tenant)
        return lane.segment

    def _drop(self, lane: Lane) -> None:
        lane.channel.close()
        if lane.segment is not None:
            lane.segment.close()
            lane.segment = None


class Run:
    """One evaluation in the engine. Used by one thread; `cancel` may come from any other."""

    def __init__(
        self, lanes: Lanes, lane: Lane, segment: Segment, work: _Work, *, is_suspect: bool
    ) -> None:
        self.segment = segment
        self.frame = frame = work.frame
        self._work = work
        self._is_suspect = is_suspect
        self._alone = False  # nothing else runs in the engine
        self.losses: NDArray[np.float64] | None = None
        """[programs, K], once `next_event` has returned Finished."""
        self.timings: Timings | None = None
        """Of the engine, once it has finished without an error."""
        self._lanes = lanes
        self._lane = lane
        # An answer takes its segment along, unless it is small and the engine keeps it mapped.
        self._takes_segment = not frame.is_small or lane.mapped is not segment
        self._running = True
        self._cancelled = False
        self._lock = threading.Lock()

    def next_event(self) -> wire.Event:
        """Wait for the engine.

        Raises:
            WarpfitError: if the evaluation failed.
            CancelledError: if it was cancelled; the engine may still be at work.

        """
        while True:
            try:
                event, _ = self._lane.channel.receive()
                if not isinstance(event, wire.Alone):
                    break
                self._alone = event.alone
            except BlockingIOError:
                if self._cancelled:
                    raise _ended() from None
            except ChannelClosedError as error:
                self._finish(lost=True)
                raise unavailable() from error
        if isinstance(event, wire.Finished):
            if event.error is not None and event.error.reason == TOO_MANY_FILES:
                self._lane.mapped = None  # the engine could not take the segment
            self._finish(lost=False)
            if event.error is not None:
                raise event.error
            self.timings = event.timings
        assert isinstance(event, wire.Event)  # nothing else is sent on a lane
        return event

    def cancel(self) -> None:
        """Stop the evaluation, because nobody waits for its answer any more."""
        with self._lock:
            if self._running:
                self._cancelled = True
                self.frame.flag(self.segment)[0] = 1

    def close(self) -> None:
        """Wait until the engine is done, then give the segment back."""
        self.cancel()
        while self._running:
            with contextlib.suppress(WarpfitError):
                self.next_event()
        if self._takes_segment:
            self._lanes.return_segment(self._lane, self.segment)

    def _finish(self, *, lost: bool) -> None:
        losses = self.frame.losses_view(self.segment)
        with self._lock:
            self._running = False
            self.losses = None if losses is None else losses.copy()
        if self._takes_segment:
            self._lane.segment = None
        if not self._work.urgent:
            self._report(lost=lost)
        if lost:
            self._lanes.lost(self._lane)
        else:
            self._lanes.put_back(self._lane)

    def _report(self, *, lost: bool) -> None:
        dataset = self._work.evaluation.dataset_id
        if lost:
            batch = self._work.digest()
            self._lanes.report(Casualty(self._lane.engine, dataset, batch, self._alone))
        elif self._is_suspect and not self._cancelled:
            self._lanes.report(Survivor(dataset, self._work.digest()))


def _ended() -> CancelledError:
    return CancelledError("the call has ended", "CANCELLED")


def unavailable() -> UnavailableError:
    """Explain that no engine is ready."""
    return UnavailableError(
        "the engine is restarting", "ENGINE_RESTARTING", "Repeat the call after a short wait"
    )
