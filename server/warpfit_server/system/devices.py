"""The devices that a server computes on: what ``--devices`` names, and how many GPUs there are.

Counting GPUs initialises CUDA, so a process of its own does it, which runs this module.
"""

import ctypes
import logging
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

from warpfit.errors import InvalidArgumentError, UnavailableError

_LOG: Final = logging.getLogger("warpfit.devices")
#: Most engines of a server.
MOST_ENGINES: Final = 64
#: Seconds that the driver may take to count the GPUs.
_COUNT_SECONDS: Final = 120.0
_SYNTAX: Final = re.compile(r"auto|all|cpu(:[1-9]\d?)?|\d{1,3}(,\d{1,3})*")


@dataclass(frozen=True, slots=True)
class EngineDevice:
    """Device that one engine process computes on."""

    kind: str
    """``"cpu"`` or ``"cuda"``."""
    ordinal: int
    """CUDA's number of the GPU; for CPU engines 0, 1, ..."""
    label: str
    """Names the engine in metrics, timings and logs: ``"cuda:0"``, ``"cpu:1"``; the second engine
    on the same GPU is ``"cuda:0#1"``."""
    share: float = 1.0
    """Part of the device's memory that is for this engine."""

    def environment(self, given: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return the variables that let an engine process see its own GPU and no other."""
        if self.kind == "cpu":
            return {}
        visible = given.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            return {"CUDA_VISIBLE_DEVICES": str(self.ordinal)}
        names = [name.strip() for name in visible.split(",")]
        name = names[self.ordinal] if self.ordinal < len(names) else ""
        return {"CUDA_VISIBLE_DEVICES": name}


def check_devices(text: str) -> str:
    """Return the setting ``--devices`` in lower case; raise ValueError if it means nothing."""
    text = re.sub(r"\s", "", text.lower())
    if _SYNTAX.fullmatch(text) is None or len(engine_devices(text)) > MOST_ENGINES:
        raise ValueError(
            f"{text!r} names no devices; write auto, all, numbers like 0,1,3, cpu, or cpu:2 for "
            f"two CPU engines; there are at most {MOST_ENGINES} engines"
        )
    return text


def engine_devices(text: str) -> tuple[EngineDevice, ...]:
    """Return the device of each engine that a resolved setting names; none for auto and all."""
    if text in ("auto", "all"):
        return ()
    kind, _, count = text.partition(":")
    if kind == "cpu":
        return tuple(EngineDevice("cpu", n, f"cpu:{n}") for n in range(int(count or 1)))
    ordinals = [int(ordinal) for ordinal in text.split(",")]
    counts, seen, found = Counter(ordinals), Counter[int](), []
    for ordinal in ordinals:
        again = f"#{seen[ordinal]}" if seen[ordinal] else ""
        label = f"cuda:{ordinal}{again}"
        found.append(EngineDevice("cuda", ordinal, label, 1.0 / counts[ordinal]))
        seen[ordinal] += 1
    return tuple(found)


def resolve_devices(text: str) -> str:
    """Return the setting with the numbers of the GPUs for ``all``, and for ``auto`` if there are.

    Without a GPU ``auto`` means ``cpu``.

    Raises:
        UnavailableError: if all GPUs are asked for and there is none.
    """
    if text not in ("auto", "all"):
        return text
    try:
        count = min(MOST_ENGINES, _count_gpus())
    except UnavailableError as error:
        if text == "all":
            raise
        _LOG.info("%s; the CPU engine serves", error)
        return "cpu"
    return ",".join(map(str, range(count)))


def check_device_memory(devices: str, memory: int | None) -> None:
    """Check that resolved devices are GPUs if their memory is limited.

    Raises:
        InvalidArgumentError: if they are not.
    """
    if memory is not None and any(device.kind == "cpu" for device in engine_devices(devices)):
        raise InvalidArgumentError(
            "--device-memory limits the memory of GPUs, and the CPU engine serves",
            "BAD_OPTION",
            "Leave it out, or limit data sets by --max-resident-bytes",
            "device_memory",
        )


def _count_gpus() -> int:
    """Return the number of GPUs, at least 1, without initialising CUDA in this process."""
    reason = "CuPy is not installed (pip install 'warpfit[cuda13]' or '[cuda12]')"
    if find_spec("cupy") is not None:
        command = [sys.executable, "-m", __name__]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=_COUNT_SECONDS)
        except subprocess.TimeoutExpired:
            reason = f"the CUDA driver has not answered for {_COUNT_SECONDS:g} s"
        else:
            if run.returncode == 0 and int(run.stdout) > 0:
                return int(run.stdout)
            reason = (run.stderr.strip().splitlines() or ["the driver reports none"])[-1]
    raise UnavailableError(
        f"no CUDA device: {reason}", "NO_CUDA_DEVICE", "Check nvidia-smi, or run with --devices cpu"
    )


def _ask_driver() -> int:
    """Return the number of GPUs that the driver shows this process."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise SystemExit(str(error)) from error
    count = ctypes.c_int(0)
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if status:
        raise SystemExit(f"the CUDA driver reports error {status}")
    return count.value


if __name__ == "__main__":
    print(_ask_driver())
