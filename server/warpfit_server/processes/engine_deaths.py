"""Why an engine process has ended."""

import signal
from pathlib import Path
from typing import Final

from warpfit_server.system.lifetime import EXIT_BROKEN, EXIT_CANNOT_RUN, EXIT_STUCK

#: What exit statuses of the engine process mean.
_CAUSES: Final = {EXIT_CANNOT_RUN: "cannot_run", EXIT_BROKEN: "broken", EXIT_STUCK: "stuck"}
#: Causes of an engine's end for which what it computed is not to blame.
UNRELATED_CAUSES: Final = (
    *("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "exit 0"),
    *("cannot_run", "slow_start", "wrong_answer", "no_answer"),
)
_VM_STATISTICS: Final = Path("/proc/vmstat")


def cause_of_death(code: int) -> str:
    """Name why a process ended, from its exit status: a signal, or what it says itself."""
    if code < 0:
        return signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return _CAUSES.get(code, f"exit {code}")


def out_of_memory_kills() -> int:
    """Return how many processes the kernel has killed for want of memory; 0 if it does not say."""
    try:
        lines = _VM_STATISTICS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
