"""The engine process: its engine, its data sets, its loop, and the messages of the supervisor.

The main thread handles the supervisor's messages; `warpfit_server.engine.loop` serves the front
ends. The process ends at once when the supervisor is gone.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from warpfit.dataset import Dataset
from warpfit.errors import InternalError, UnavailableError, WarpfitError
from warpfit_server.config import Config
from warpfit_server.engine.evaluation import LoadedDatasets
from warpfit_server.engine.interface import Engine
from warpfit_server.engine.loop import Loop
from warpfit_server.engine.request import FrontEndConnection
from warpfit_server.engine.runner import RequestRunner
from warpfit_server.ipc import messages
from warpfit_server.ipc.messages import Channel, ChannelClosedError
from warpfit_server.ipc.segments import Segment
from warpfit_server.observability.logs import configure_logging
from warpfit_server.system.lifetime import EXIT_CANNOT_RUN, StuckDetector
from warpfit_server.system.machine import keep_freed_memory, shortage, shorten_gil_switch_interval

_LOG: Final = logging.getLogger("warpfit.engine")


class EngineProcess:
    """An engine, its data sets and its loop, driven by the supervisor.

    Args:
        engine: the engine, which computes.
        channel: channel to the supervisor.
        number: number of the engine in ``config.engines``.
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
                case messages.LoadDataset(key, layout):
                    error: WarpfitError | None = None
                    try:
                        segment = Segment.received(message.segment, descriptor, message.size)
                        matrix = segment.array(layout.dtype, (layout.columns, layout.rows))
                        segment.close()  # the matrix keeps the mapping
                        self._datasets.load(Dataset.resident(layout, matrix, key))
                    except WarpfitError as refused:
                        error = refused
                    except (OSError, MemoryError) as failed:
                        error = shortage(failed)
                        if error is None:
                            raise
                    self._channel.send(messages.DatasetLoaded(key, error))
                case messages.UnloadDataset():
                    self._datasets.unload(message.key)
                case messages.RequestCounters():
                    self._channel.send(messages.EngineCounters(self._engine.counters()))
                case _:
                    raise InternalError(f"unexpected message {message}", "BAD_MESSAGE")


def create_engine(
    kind: str,
    *,
    threads: int | None = None,
    memory_share: float = 1.0,
    device_memory: int | None = None,
    cache_directory: Path | None = None,
) -> Engine:
    """Create an engine of a kind, ``"cpu"`` or ``"cuda"``; the latter on the first visible GPU.

    Args:
        kind: kind of the engine.
        threads: threads of the CPU engine, or threads that lower and compile for the CUDA engine;
            None for all cores.
        memory_share: part of the GPU's memory that is for this engine.
        device_memory: bytes of the GPU's memory to use; None for most of it.
        cache_directory: where code for GPUs is kept; None for the user's cache directory. What
            Numba compiles is kept where `compile_cache.engine_environment` says.

    Raises:
        WarpfitError: if the engine cannot run on this machine.
    """
    if kind == "cpu":
        from warpfit_server.engine.cpu.engine import CpuEngine

        return CpuEngine(threads=threads)

    def make_context() -> None:
        """Make the context of the first visible GPU for CuPy, which says what is wrong, if any."""
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError:
            return
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)

    # The driver takes a third of a second for it, in which the modules below are imported.
    threading.Thread(target=make_context, name="context", daemon=True).start()
    try:
        from warpfit_server.engine.cuda.engine import CudaEngine
    except ImportError as error:
        raise UnavailableError(
            f"the CUDA libraries are not installed: {error}",
            "NO_CUDA",
            "Install them (pip install 'warpfit[cuda13]', or cuda12), or run with --devices cpu",
        ) from error
    limit = None if device_memory is None else int(device_memory * memory_share)
    return CudaEngine(
        memory_limit=limit,
        memory_share=memory_share,
        cache_directory=cache_directory,
        threads=threads,
    )


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
