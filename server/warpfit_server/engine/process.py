"""The engine process: data sets, the loop, and the messages of the supervisor.

The main thread handles the supervisor's messages; `warpfit_server.engine.loop` serves the front
ends. The process ends at once when the supervisor is gone.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Sequence
from typing import Final

from warpfit.dataset import Dataset
from warpfit.errors import InternalError, WarpfitError
from warpfit_server.config import Config
from warpfit_server.engine import create_engine
from warpfit_server.engine.interface import Engine
from warpfit_server.engine.loaded_datasets import LoadedDatasets
from warpfit_server.engine.loop import Loop
from warpfit_server.engine.request import FrontEndConnection
from warpfit_server.engine.runner import RequestRunner
from warpfit_server.ipc import messages
from warpfit_server.ipc.channel import Channel, ChannelClosedError
from warpfit_server.ipc.segments import Segment
from warpfit_server.observability.logs import configure_logging
from warpfit_server.system.lifetime import EXIT_CANNOT_RUN, StuckDetector
from warpfit_server.system.machine import keep_freed_memory, shorten_gil_switch_interval
from warpfit_server.system.shortages import shortage

_LOG: Final = logging.getLogger("warpfit.engine")


class EngineProcess:
    """An engine, its data sets and its loop, driven by the supervisor.

    Args:
        engine: that computes.
        channel: to the supervisor.
        number: of the engine in ``config.engines``.
        config: the server's configuration.
    """

    def __init__(self, engine: Engine, channel: Channel, number: int, config: Config) -> None:
        self._engine = engine
        self._channel = channel
        self._datasets = LoadedDatasets(engine)
        runner = RequestRunner(engine, self._datasets, config.chunk_bytes)
        self._loop = Loop(engine, runner)
        self._stuck_detector = StuckDetector(config.stuck_seconds, self._loop.flags)

    def run(self) -> None:
        """Serve until the supervisor says `messages.Stop`.

        Raises:
            ChannelClosedError: if the supervisor is gone.
        """
        self._loop.start()
        self._stuck_detector.start()
        self._channel.send(messages.EngineReady(self._engine.device()))
        while True:
            message, descriptor = self._channel.receive()
            match message:
                case messages.Stop():
                    return
                case messages.ConnectFrontEnd() if descriptor is not None:
                    channel = Channel(socket.socket(fileno=descriptor))
                    self._loop.add(FrontEndConnection(channel))
                case messages.ConnectFrontEnd():  # the front end notices, and asks again
                    _LOG.error("a connection was lost: too many open files")
                case messages.LoadDataset():
                    self._load(message, descriptor)
                case messages.UnloadDataset():
                    self._datasets.unload(message.key)
                case messages.RequestCounters():
                    self._channel.send(messages.EngineCounters(self._engine.counters()))
                case _:
                    raise InternalError(f"unexpected message {message}", "BAD_MESSAGE")

    def _load(self, message: messages.LoadDataset, descriptor: int | None) -> None:
        error: WarpfitError | None = None
        try:
            segment = Segment.received(message.segment, descriptor, message.size)
            layout = message.layout
            matrix = segment.array(layout.dtype, (layout.columns, layout.rows))
            segment.close()  # the matrix keeps the mapping
            self._datasets.load(Dataset.resident(layout, matrix, message.key))
        except WarpfitError as refused:
            error = refused
        except (OSError, MemoryError) as failed:
            error = shortage(failed)
            if error is None:
                raise
        self._channel.send(messages.DatasetLoaded(message.key, error))


def main(arguments: Sequence[str]) -> None:
    """Run an engine process; `EngineSupervisor` starts it.

    Args:
        arguments: number of a socket, number of the engine in ``Config.engines``, and a `Config`.
    """
    descriptor, number, text = arguments
    config = Config.from_json(text)
    configure_logging(config.log_level, config.log_format)
    shorten_gil_switch_interval()
    keep_freed_memory()
    channel = Channel(socket.socket(fileno=int(descriptor)))
    device = config.engines[int(number)]
    try:
        engine = create_engine(
            device.kind,
            threads=config.engine_threads(int(number)),
            memory_share=device.share,
            device_memory=config.device_memory,
            cache_directory=config.cache_path,
        )
        EngineProcess(engine, channel, int(number), config).run()
    except ChannelClosedError:
        _LOG.info("the supervisor is gone")
    except WarpfitError as error:
        _LOG.error("the engine %s cannot run: %s", device.label, error)
        os._exit(EXIT_CANNOT_RUN)
    logging.shutdown()
    os._exit(0)  # without waiting for a running step


if __name__ == "__main__":
    main(sys.argv[1:])
