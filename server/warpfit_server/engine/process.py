"""The engine process: takes messages from the front door, evaluates, answers.

The main thread reads messages about data sets. Each lane (see `warpfit_server.lanes`) has a thread
that reads its evaluations, runs them and answers, at most ``engine.concurrency`` at a time. When
the front door is gone, the process ends at once.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from warpfit.dataset import Dataset
from warpfit.errors import CancelledError, InternalError, WarpfitError
from warpfit.request import Evaluation, Timings
from warpfit_server import channel as wire
from warpfit_server.channel import Channel, ChannelClosedError
from warpfit_server.config import Config
from warpfit_server.engine import create_engine
from warpfit_server.engine.base import Engine, EngineBrokenError, Outputs
from warpfit_server.logs import configure_logging
from warpfit_server.segments import Segment

_LOG: Final = logging.getLogger("warpfit.engine")


class EngineProcess:
    """State of the engine process: the engine and the threads of its lanes."""

    def __init__(self, engine: Engine, channel: Channel, chunk_bytes: int) -> None:
        self._engine = engine
        self._channel = channel
        self._chunk_bytes = chunk_bytes
        self._places = threading.Semaphore(engine.concurrency)

    def run(self) -> None:
        """Serve until Stop or the end of the channel."""
        devices = tuple(self._engine.devices())
        self._channel.send(wire.Ready(self._engine.name, devices, self._engine.concurrency))
        while True:
            message, descriptors = self._channel.receive()
            match message:
                case wire.Stop():
                    return
                case wire.OpenLanes():
                    for descriptor in descriptors:
                        lane = Channel(socket.socket(fileno=descriptor))
                        threading.Thread(target=self._serve, args=(lane,), daemon=True).start()
                case wire.Load():
                    self._load(message, descriptors)
                case wire.Unload():
                    self._engine.unload(message.content_id)
                case _:
                    raise InternalError(f"unexpected message {message}", "BAD_MESSAGE")

    def _serve(self, lane: Channel) -> None:
        """Run the evaluations of one lane until its other end is closed."""
        segment: Segment | None = None
        try:
            while True:
                message, descriptors = lane.receive()
                if not isinstance(message, wire.Evaluate):
                    raise InternalError(f"unexpected message {message}", "BAD_MESSAGE")
                if descriptors:
                    segment = Segment(0, descriptors[0], message.size)
                if segment is None:
                    raise InternalError("an evaluation without a segment", "BAD_MESSAGE")
                with self._places:
                    finished = self._evaluate(message, segment, lane)
                if not message.keep:
                    segment.close()
                    segment = None
                lane.send(finished)
        except ChannelClosedError:
            _LOG.debug("a lane was closed")
        except Exception:
            _LOG.exception("a lane is broken; the front door starts a new process")
            os._exit(4)

    def _load(self, message: wire.Load, descriptors: Sequence[int]) -> None:
        segment = Segment(message.segment, descriptors[0], message.size)
        layout = message.layout
        matrix = segment.array(layout.dtype, (layout.columns, layout.rows))
        dataset = Dataset.resident(layout, matrix, message.content_id)
        segment.close()  # the matrix keeps the mapping
        error = None
        try:
            self._engine.load(dataset)
        except WarpfitError as refused:
            error = refused
        self._channel.send(wire.Loaded(message.content_id, error))

    def _evaluate(self, message: wire.Evaluate, segment: Segment, lane: Channel) -> wire.Finished:
        started = time.monotonic_ns()
        try:
            timings = self._run(message, segment, lane)
        except WarpfitError as error:
            return wire.Finished(error=error)
        except EngineBrokenError:
            _LOG.exception("the engine is broken; the front door starts a new process")
            os._exit(4)
        except ChannelClosedError:
            raise
        except Exception:
            _LOG.exception("evaluation failed")
            return wire.Finished(
                error=InternalError("the engine failed on this batch", "ENGINE_FAILURE")
            )
        return wire.Finished(replace(timings, queue=started - message.submitted))

    def _run(self, message: wire.Evaluate, segment: Segment, lane: Channel) -> Timings:
        frame = message.frame
        outputs = Outputs(
            values=frame.values_view(segment),
            losses=frame.losses_view(segment),
            cancelled=frame.flag(segment),
            ready=self._progress(message, lane),
        )
        if outputs.cancelled[0]:
            raise CancelledError("cancelled before it ran", "CANCELLED")
        evaluation = Evaluation(
            dataset_id=message.dataset_id,
            batch=frame.batch(segment),
            rows=message.rows,
            precision=message.precision,
            loss=message.loss,
            values=frame.values,
            tier=message.tier,
        )
        return self._engine.evaluate(evaluation, outputs)

    def _progress(self, message: wire.Evaluate, lane: Channel) -> Callable[[int], None]:
        """Report progress when it frees at least one chunk of values for sending."""
        step = max(1, self._chunk_bytes // max(1, message.frame.program_bytes))
        reported = 0

        def ready(programs: int) -> None:
            nonlocal reported
            if message.frame.values and programs - reported >= step:
                reported = programs
                lane.send(wire.Progress(programs))

        return ready


def main(arguments: Sequence[str]) -> None:
    """Run an engine: ``process.py DESCRIPTOR CONFIG``; the supervisor starts it like this."""
    descriptor, text = arguments
    config = Config.from_json(text)
    configure_logging(config.log_level, config.log_format)
    channel = Channel(socket.socket(fileno=int(descriptor)))
    try:
        engine = create_engine(
            config.engine,
            threads=config.threads,
            device=config.device,
            cache_directory=config.cache_path,
        )
        EngineProcess(engine, channel, config.chunk_bytes).run()
    except ChannelClosedError:
        _LOG.info("the front door is gone")
    except WarpfitError as error:
        _LOG.error("the engine cannot run: %s", error)
        os._exit(3)
    logging.shutdown()
    os._exit(0)  # a running evaluation must not hold the process


if __name__ == "__main__":
    main(sys.argv[1:])
