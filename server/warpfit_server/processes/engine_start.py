"""Starts engine processes, and names why they have ended.

The first engines start before the main process imports the modules of the server, which takes some
tenths of a second. So this module imports little.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from warpfit.child_processes import python_child
from warpfit.errors import WarpfitError
from warpfit_server.compile_cache import engine_environment, usable_cache_directory
from warpfit_server.config import Config
from warpfit_server.machine import (
    EXIT_BROKEN,
    EXIT_CANNOT_RUN,
    EXIT_STUCK,
    ServerDirectory,
    check_device_memory,
    raise_descriptor_limit,
    resolve_devices,
    socket_pair,
)

_LOG: Final = logging.getLogger("warpfit.supervisor")
#: What exit statuses of an engine process mean.
_CAUSES: Final = {EXIT_CANNOT_RUN: "cannot_run", EXIT_BROKEN: "broken", EXIT_STUCK: "stuck"}
#: Causes of an engine's end for which the work of the engine is not to blame.
UNRELATED_CAUSES: Final = (
    *("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "exit 0"),
    *("stopped", "cannot_run", "slow_start", "wrong_answer", "no_answer"),
)


class StartedEngine(NamedTuple):
    """An engine process, which leads a process group of its own."""

    process: subprocess.Popen[bytes]
    end: socket.socket
    """This process's end of the socket to the engine process."""
    out_of_memory: int
    """`out_of_memory_kills` before the process was started."""


class Preparation(NamedTuple):
    """The settings, the directory and the engine processes that `Server` is made of."""

    config: Config
    """With the directory of compiled code, and with the devices."""
    directory: str
    """Temporary directory that only this user can open."""
    engines: dict[int, StartedEngine]
    """The first engine processes by their numbers; their supervisors take them out."""


@contextmanager
def prepare(config: Config) -> Iterator[Preparation]:
    """Find the devices and directories of a server, and start its engines.

    At the end of the ``with`` block the engines that no supervisor has taken are killed.

    Raises:
        UnavailableError: if all GPUs are asked for and there is none.
        InvalidArgumentError: if others could have written to the compiled code, or a limit does not
            belong to the devices.
    """
    raise_descriptor_limit()
    with ExitStack() as stack:
        directory = ServerDirectory()
        stack.callback(directory.remove)
        cache = usable_cache_directory(config.cache_path, within=str(directory.path))
        place = str(stack.enter_context(cache))
        devices = resolve_devices(config.devices)
        check_device_memory(devices, config.device_memory)
        config = replace(config, cache_dir=place, devices=devices)
        engines: dict[int, StartedEngine] = {}
        try:
            for number in range(len(config.engines)):
                try:
                    engines[number] = start_engine(config, number)
                except (OSError, WarpfitError) as error:  # the engine's supervisor tries again
                    _LOG.error("an engine process was not started: %s", error)
            yield Preparation(config, str(directory.path), engines)
        finally:
            for started in engines.values():
                started.end.close()
                kill_group(started.process)
                started.process.wait()


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
            **python_child(
                *("-m", "warpfit_server.engine.loop"),
                *(str(theirs.fileno()), str(number), config.to_json()),
                environment=engine_environment(config.cache_path)
                | device.environment()
                | {"WARPFIT_ENGINE_NICE": str(config.engine_nice)},
            ),
            cwd="/",  # in the working directory Numba would look for a file of settings
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C is for the main process, which drains first
        )
        on_failure.pop_all()
    return StartedEngine(process, ours, kills)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a child process and its own children, such as compilers of an engine."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def cause_of_death(code: int) -> str:
    """Name why a process ended, from its exit status: a signal, or what the process says itself."""
    if code < 0:
        return signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return _CAUSES.get(code, f"exit {code}")


def out_of_memory_kills() -> int:
    """Return how many processes the kernel has killed for want of memory; 0 if it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
