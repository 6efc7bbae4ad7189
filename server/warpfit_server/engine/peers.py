"""Evaluations of sharded data sets: one engine leads, its peers sum up the nodes of their rows.

The simple form, in the engine that leads:

    send the batch to the engines that have the other rows     # ordinary requests, which they queue
    sum up the nodes of one's own rows
    wait for the sums of the others, put all in order, and make the outputs of them

A fit does so for each of its passes. Nobody blocks a thread: a request that waits for peers waits
for a future, so that engines may lead requests and answer those of each other at the same time. The
loop ends the steps of a request that is cancelled, which cancels the parts of the others.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Layout
from warpfit.errors import ResourceExhaustedError
from warpfit.ir import Program
from warpfit.losses import Closing, LossFunction
from warpfit.request import Evaluation, Tier, Timings
from warpfit_server.engine.interface import (
    Engine,
    Linearisation,
    Outputs,
    Selection,
    Steps,
)
from warpfit_server.engine.request import Request
from warpfit_server.ipc import messages
from warpfit_server.ipc.engine_connection import EngineConnection
from warpfit_server.ipc.in_flight_request import LOST, InFlightRequest, unavailable
from warpfit_server.ipc.segment_layout import ALONE, QUEUED, SegmentLayout
from warpfit_server.ipc.segments import SegmentPool
from warpfit_server.row_blocks import Shards
from warpfit_server.system.shortages import TOO_MANY_FILES

#: Most bytes of the sums of all nodes together.
_MOST_BYTES: Final = 512 << 20


class PeerLostError(Exception):
    """Another engine was lost while it computed a part of a request."""

    def __init__(self, process: int, *, alone: bool) -> None:
        super().__init__(process, alone)
        self.lost = process, alone
        """Number of the engine process, and whether nothing else ran in it."""


class Peers:
    """The other engines of the server, as one of them sees them.

    Args:
        number: of this engine.
        pool: provides the segments.
        request_connection: asks the main process for a connection to an engine by its number.

    """

    def __init__(
        self, number: int, pool: SegmentPool, request_connection: Callable[[int], None]
    ) -> None:
        self.number = number
        self.pool = pool
        self.shards: dict[bytes, Shards] = {}
        """Shards of each sharded data set, by the key of the data set."""
        self._request_connection = request_connection
        self._connections: dict[int, EngineConnection] = {}

    def connect(self, engine: int, process: int, end: socket.socket) -> None:
        """Use a connection to another engine.

        Args:
            engine: its number.
            process: number of its process.
            end: this process's end of the connection.

        Raises:
            ResourceExhaustedError: if this process can open no more files.

        """
        connection = self._connections.get(engine)
        if connection is None:
            connection = EngineConnection(self.pool, reads_alone=True)
            connection.on_loss = partial(self._request_connection, engine)
            self._connections[engine] = connection
        connection.open(end, process)

    def send(self, engine: int, part: InFlightRequest) -> None:
        """Send a part of a request to an engine.

        Raises:
            UnavailableError: if it is not there.

        """
        connection = self._connections.get(engine)
        if connection is None or not connection.is_open:
            self._request_connection(engine)  # the last one may have been lost on its way
            raise unavailable()
        connection.send(part)

    def evaluator(
        self, engine: Engine, request: Request, layout: Layout
    ) -> Engine | ShardedEvaluator:
        """Return what evaluates for a request: this engine alone, or with others as well.

        Raises:
            UnavailableError: if this engine has none of the rows.

        """
        shards = self.shards.get(request.problem.dataset_id)
        if shards is None:
            return engine
        parts = shards.parts(request.problem.rows)
        if self.number not in parts:
            raise unavailable()
        return engine if len(parts) == 1 else ShardedEvaluator(engine, self, request, layout)


class ShardedEvaluator:
    """Evaluates one request on all shards of its rows, by the methods that an engine has."""

    def __init__(self, engine: Engine, peers: Peers, request: Request, layout: Layout) -> None:
        self._engine = engine
        self._peers = peers
        self._request = request
        self._layout = layout
        self.peers_compute = 0
        """Nanoseconds that the other engines have computed."""

    def evaluate(self, evaluation: Evaluation, outputs: Outputs) -> Steps[Timings]:
        """Evaluate a batch; the time of all engines is added up."""
        with self._gather(evaluation) as gathering:
            own = gathering.evaluation_of(self._peers.number)
            dense = _dense_outputs(own, outputs, self._layout)
            inner = replace(outputs, **dense, ready=lambda programs: None, shard=gathering)
            timings = yield from self._engine.evaluate(own, inner)
            gathering.copy_dense(outputs, dense)
        self.peers_compute += gathering.compute
        return replace(timings, compute=timings.compute + gathering.compute)

    def linearise(
        self,
        evaluation: Evaluation,
        row_loss: Program,
        *,
        curvature: bool,
        cancelled: NDArray[np.uint8],
        selection: Selection | None = None,
    ) -> Steps[Linearisation]:
        """Compute a pass of a fit."""
        problem = replace(
            evaluation, values=False, loss=None, custom_loss=LossFunction(row_loss, Closing.SUM)
        )
        with self._gather(problem, curvature) as gathering:
            found = yield from self._engine.linearise(
                gathering.evaluation_of(self._peers.number),
                row_loss,
                curvature=curvature,
                cancelled=cancelled,
                shard=gathering,
                selection=selection,
            )
        self.peers_compute += gathering.compute
        return found

    def _gather(self, evaluation: Evaluation, curvature: bool | None = None) -> closing[_Gathering]:
        # Compiled kernels may differ in the last bits, and engines may choose differently.
        evaluation = replace(evaluation, tier=Tier.INTERPRETER)
        given = self._peers, self._request, evaluation, self._layout, curvature
        return closing(_Gathering(*given))


def _dense_outputs(own: Evaluation, outputs: Outputs, layout: Layout) -> dict[str, Any]:
    """Allocate this engine's part of the outputs that have a number for each row."""
    start, stop = own.row_range(layout)
    return {
        name: None if whole is None else np.empty((*whole.shape[:-1], stop - start), whole.dtype)
        for name, whole in (("values", outputs.values), ("jacobian", outputs.jacobian))
    }


class _Gathering:
    """One evaluation on several engines; implements `interface.RowShard`.

    Args:
        peers: the other engines.
        request: that it is a part of.
        evaluation: over all rows.
        layout: of its data set.
        curvature: whether a pass of a fit needs curvatures; None if it is an evaluation.

    """

    def __init__(
        self,
        peers: Peers,
        request: Request,
        evaluation: Evaluation,
        layout: Layout,
        curvature: bool | None,
    ) -> None:
        self.rows = evaluation.row_range(layout)
        shards = peers.shards[request.problem.dataset_id]
        self.level = shards.level
        self.compute = 0
        """Nanoseconds that the other engines have computed."""
        self._peers = peers
        self._request = request
        self._evaluation = evaluation
        self._layout = layout
        self._part = messages.Part(self.rows, self.level, curvature)
        self._shards = shards
        self._rows_of = shards.parts(self.rows)
        self._sent: dict[int, _PartRequest] = {}
        self._missing = len(self._rows_of) - 1
        self._done: Future[None] = Future()
        self._lock = threading.Lock()
        self._is_closed = self._is_done = False

    def evaluation_of(self, engine: int) -> Evaluation:
        """Return the evaluation over the rows of one engine."""
        return replace(self._evaluation, rows=self._rows_of[engine])

    def begin(self, width: int) -> None:
        """Send their parts to the other engines."""
        needed = 8 * width * self._shards.nodes(self.rows, self._layout)
        if needed > _MOST_BYTES:
            raise ResourceExhaustedError(
                f"{needed} bytes of sums of the shards' rows, the limit is {_MOST_BYTES}",
                "RESULT_TOO_LARGE",
                "Send smaller batches, or upload the data set with shards=1",
                needed=needed,
                available=_MOST_BYTES,
            )
        for engine in self._rows_of:
            if engine != self._peers.number:
                self._send(engine, width)

    def _send(self, engine: int, width: int) -> None:
        evaluation, pool = self.evaluation_of(engine), self._peers.pool
        rows = evaluation.row_range(self._layout)
        layout = SegmentLayout.of(evaluation, self._layout)
        layout = layout.with_nodes(self._shards.nodes(rows, self._layout), width)
        part = _PartRequest(layout, evaluation, self._request, self._part, self._ended)
        segment = pool.acquire(layout.nbytes, self._request.tenant)
        try:
            part.write(segment)
            self._sent[engine] = part
            self._peers.send(engine, part)
        except BaseException:  # nothing was sent
            self._sent.pop(engine, None)
            pool.release(segment)
            raise

    def join(self, nodes: NDArray[np.float64]) -> Steps[NDArray[np.float64] | None]:
        """Wait for the sums of the other engines and put all in order."""
        if not self._done.done():
            yield self._done
        for part in self._sent.values():
            if part.outcome is not None:  # after a failure others may be at work
                self.compute += part.timings_of_engine().compute
        sent = {engine: part.nodes for engine, part in self._sent.items()}
        return np.concatenate([sent.get(engine, nodes) for engine in self._rows_of])

    def copy_dense(self, outputs: Outputs, own: dict[str, NDArray[Any] | None]) -> None:
        """Copy values and Jacobians of all rows to the outputs."""
        for name, mine in own.items():
            whole = getattr(outputs, name)
            if whole is None:
                continue
            for engine, (start, stop) in self._rows_of.items():
                part = self._sent.get(engine)
                rows = mine if part is None else part.array(name)
                whole[..., start - self.rows[0] : stop - self.rows[0]] = rows
        outputs.ready(len(self._evaluation.batch))

    def close(self) -> None:
        """Give the segments back, now or when the engines are done with them."""
        with self._lock:
            self._is_closed = True
            running = [part for part in self._sent.values() if part.outcome is None]
            ended = [part for part in self._sent.values() if part.outcome is not None]
        for part in running:
            part.cancel()
        for part in ended:
            part.give_back()

    def _ended(self, part: _PartRequest, outcome: object) -> None:
        """Take note of a part's outcome, on the thread that has received it."""
        with self._lock:  # so that one of `close` and this method gives the segment back
            part.outcome = outcome
            is_closed = self._is_closed
            self._missing -= 1
            is_done = not self._is_done and (not self._missing or part.has_failed)
            self._is_done |= is_done
        if is_closed:
            part.give_back()
        elif is_done:
            self._done.set_result(None)


class _PartRequest(InFlightRequest):
    """The part of a request that another engine computes.

    Args:
        layout: of its segment.
        evaluation: over the rows of that engine.
        request: that it is a part of.
        part: what the other engine is told of that.
        on_end: called with this part and its outcome when it has ended or the engine is lost.

    """

    outcome: object = None
    """`messages.RequestFinished` or `LOST`; None while the engine is at work."""

    def __init__(
        self,
        layout: SegmentLayout,
        evaluation: Evaluation,
        request: Request,
        part: messages.Part,
        on_end: Callable[[_PartRequest, object], None],
    ) -> None:
        assert evaluation.rows is not None  # those of one engine
        super().__init__(layout, evaluation, evaluation.rows, request.tenant)
        self.alone = request.alone
        self.part = part
        self._on_end = on_end

    def take(self, entry: object) -> None:
        """Take what the engine has sent, or its loss."""
        if isinstance(entry, messages.RequestFinished) or entry is LOST:
            self._on_end(self, entry)

    @property
    def has_failed(self) -> bool:
        """Whether it has ended without a result."""
        outcome = self.outcome
        return not isinstance(outcome, messages.RequestFinished) or outcome.error is not None

    @property
    def nodes(self) -> NDArray[np.float64]:
        """View of the sums of its nodes, [nodes, width]."""
        return self.segment_layout.require("nodes", self.segment)

    def timings_of_engine(self) -> Timings:
        """Return the timings of a part that has ended.

        Raises:
            PeerLostError: if the engine was lost while it computed it.
            WarpfitError: if it failed otherwise.

        """
        outcome = self.outcome
        if not isinstance(outcome, messages.RequestFinished):
            state = self.segment_layout.state(self.segment)
            if state == QUEUED:
                raise unavailable()
            raise PeerLostError(self.process, alone=state == ALONE)
        if outcome.error is not None:
            if outcome.error.reason == TOO_MANY_FILES:
                self.connection.was_not_mapped(self.segment)
            raise outcome.error
        return outcome.timings

    def give_back(self) -> None:
        """Give the segment back, once the part has ended."""
        with self._lock:
            self._flag = None  # the segment may soon be another request's
        self.connection.pool.release(self.segment, is_clean=self.outcome is not LOST)
