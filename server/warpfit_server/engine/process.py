"""The engine process: its data sets, its loop, and the supervisor's messages.

The main thread reads the supervisor's messages; `warpfit_server.engine.loop` serves the front ends.
When the supervisor is gone, the process ends at once.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from warpfit.dataset import Dataset
from warpfit.errors import InternalError, WarpfitError
from warpfit_server.config import Config
from warpfit_server.engine import create_engine
from warpfit_server.engine.hang_detector import EXIT_CANNOT_RUN, Overseer
from warpfit_server.engine.interface import Engine
from warpfit_server.engine.loop import Loop
from warpfit_server.engine.native.compile_processes import BACKGROUND
from warpfit_server.engine.request import Connection
from warpfit_server.engine.request_steps import Worker
from warpfit_server.ipc import messages
from warpfit_server.ipc.channel import Channel, ChannelClosedError
from warpfit_server.ipc.segments import Segment
from warpfit_server.observability.logs import configure_logging
from warpfit_server.system.shortages import shortage
from warpfit_server.system.worker_threads import take_short_turns

_LOG: Final = logging.getLogger("warpfit.engine")


class EngineProcess:
    """State of the engine process."""

    def __init__(
        self,
        engine: Engine,
        channel: Channel,
        chunk_bytes: int,
        cache_directory: Path | None = None,
        stuck_seconds: float = 30.0,
    ) -> None:
        self._engine = engine
        self._channel = channel
        self._datasets: dict[bytes, Dataset] = {}
        self._cache_directory = cache_directory
        worker = Worker(engine, self._datasets, chunk_bytes, cache_directory)
        self._loop = Loop(engine, worker.begin)
        self._overseer = Overseer(stuck_seconds, self._loop.flags)

    def run(self) -> None:
        """Serve until Stop or the end of the channel."""
        self._loop.start()
        self._overseer.start()
        self._channel.send(messages.EngineReady(self._engine.name, tuple(self._engine.devices())))
        BACKGROUND.submit(_prepare_fits, self._cache_directory)
        while True:
            message, descriptors = self._channel.receive()
            match message:
                case messages.Stop():
                    return
                case messages.ConnectFrontEnd() if descriptors:
                    self._loop.add(Connection(Channel(socket.socket(fileno=descriptors[0]))))
                case messages.ConnectFrontEnd():  # the front end's end closes; it asks again
                    _LOG.error("a connection was lost: too many open files")
                case messages.LoadDataset():
                    self._load(message, descriptors)
                case messages.UnloadDataset():
                    self._engine.unload(message.content_id)
                    self._datasets.pop(message.content_id, None)
                case messages.RequestCounters():
                    self._channel.send(messages.EngineCounters(self._engine.counters()))
                case _:
                    raise InternalError(f"unexpected message {message}", "BAD_MESSAGE")

    def _load(self, message: messages.LoadDataset, descriptors: Sequence[int]) -> None:
        error: WarpfitError | None = None
        try:
            segment = Segment.received(message.segment, descriptors, message.size)
            layout = message.layout
            matrix = segment.array(layout.dtype, (layout.columns, layout.rows))
            segment.close()  # the matrix keeps the mapping
            dataset = Dataset.resident(layout, matrix, message.content_id)
            self._engine.load(dataset)
            self._datasets[dataset.content_id] = dataset
        except WarpfitError as refused:
            error = refused
        except (OSError, MemoryError) as failed:
            error = shortage(failed)
            if error is None:
                raise
        self._channel.send(messages.DatasetLoaded(message.content_id, error))


def _prepare_fits(cache_directory: Path | None) -> None:
    """Have what fits need before somebody asks for the first one."""
    # Imported here, because importing it costs a start of the server some time.
    from warpfit_server.engine.fit import compiled

    try:
        for method in compiled.METHODS:
            compiled.load(method, cache_directory)
    except Exception:  # the first fit tries again, and tells its caller
        _LOG.exception("the code of fits was not loaded")


def main(arguments: Sequence[str]) -> None:
    """Run an engine: ``process.py DESCRIPTOR CONFIG``; the supervisor starts it like this."""
    descriptor, text = arguments
    config = Config.from_json(text)
    configure_logging(config.log_level, config.log_format)
    take_short_turns()
    channel = Channel(socket.socket(fileno=int(descriptor)))
    try:
        engine = create_engine(
            config.engine,
            threads=config.threads,
            device=config.device,
            cache_directory=config.cache_path,
        )
        EngineProcess(
            engine, channel, config.chunk_bytes, config.cache_path, config.stuck_seconds
        ).run()
    except ChannelClosedError:
        _LOG.info("the supervisor is gone")
    except WarpfitError as error:
        _LOG.error("the engine cannot run: %s", error)
        os._exit(EXIT_CANNOT_RUN)
    logging.shutdown()
    os._exit(0)  # a running step must not hold the process


if __name__ == "__main__":
    main(sys.argv[1:])
