"""Starts engine processes, the first ones before the modules of the server are imported.

Importing those takes some tenths of a second, in which the engines start. So this module imports
little.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Final, NamedTuple

from warpfit.errors import WarpfitError
from warpfit_server.config import Config
from warpfit_server.processes.engine_deaths import out_of_memory_kills
from warpfit_server.system.compile_cache import engine_environment, usable_cache_directory
from warpfit_server.system.lifetime import ServerDirectory
from warpfit_server.system.machine import (
    check_device_memory,
    raise_descriptor_limit,
    resolve_devices,
)
from warpfit_server.system.sockets import socket_pair

_LOG: Final = logging.getLogger("warpfit.supervisor")


class StartedEngine(NamedTuple):
    """An engine process, which leads a process group of its own."""

    process: subprocess.Popen[bytes]
    end: socket.socket
    """This process's end of the socket to it."""
    out_of_memory: int
    """`out_of_memory_kills` before it was started."""


class Preparation(NamedTuple):
    """The settings, the directory and the engine processes that `Server` is made of."""

    config: Config
    """With the directory of compiled code, and with the devices."""
    directory: str
    """Temporary directory that only this user can open."""
    engines: dict[int, StartedEngine]
    """The first engine processes by their numbers; their supervisors take them out."""


def start_engine(config: Config, number: int) -> StartedEngine:
    """Start an engine process, by its number in ``config.engines``.

    Raises:
        OSError: if there is no process or no memory left for it.
        ResourceExhaustedError: if this process can open no more files.
    """
    device, kills = config.engines[number], out_of_memory_kills()
    ours, theirs = socket_pair()
    with ExitStack() as on_failure, theirs:
        on_failure.callback(ours.close)
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "warpfit_server.engine.process"),
                *(str(theirs.fileno()), str(number), config.to_json()),
            ],
            env=engine_environment(config.cache_path)
            | device.environment()
            | {"WARPFIT_ENGINE_NICE": str(config.engine_nice)},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C is for the main process, which drains first
        )
        on_failure.pop_all()
    return StartedEngine(process, ours, kills)


@contextmanager
def prepare(config: Config) -> Iterator[Preparation]:
    """Find the devices and directories of a server, and start its engines.

    Raises:
        UnavailableError: if all GPUs are asked for and there is none.
        InvalidArgumentError: if others could have written to the compiled code, or a limit does not
            belong to the devices.
    """
    raise_descriptor_limit()
    engines: dict[int, StartedEngine] = {}
    with ExitStack() as stack:
        directory = ServerDirectory()
        stack.callback(directory.remove)
        cache = usable_cache_directory(config.cache_path, within=str(directory.path))
        place = str(stack.enter_context(cache))
        devices = resolve_devices(config.devices)
        check_device_memory(devices, config.device_memory)
        config = replace(config, cache_dir=place, devices=devices)
        stack.callback(_stop, engines)
        for number in range(len(config.engines)):
            try:
                engines[number] = start_engine(config, number)
            except (OSError, WarpfitError) as error:
                _LOG.error("an engine process was not started: %s", error)  # its supervisor tries
        yield Preparation(config, str(directory.path), engines)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a child process and its own children, such as those that compile for an engine."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _stop(engines: dict[int, StartedEngine]) -> None:
    """End the engine processes that no supervisor has taken."""
    for started in engines.values():
        started.end.close()
        kill_group(started.process)
        started.process.wait()
