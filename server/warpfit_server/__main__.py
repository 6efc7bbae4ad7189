"""The command ``warpfit serve``, also ``python -m warpfit_server``."""

import logging
import signal
import sys
import time
from collections.abc import Sequence
from typing import Final

from warpfit.cli.shared import discard_output, open_standard_streams, tell
from warpfit.errors import WarpfitError
from warpfit_server.config import Config
from warpfit_server.logs import configure_logging, json_line
from warpfit_server.machine import (
    Parent,
    address_file,
    keep_freed_memory,
    shorten_gil_switch_interval,
)
from warpfit_server.processes.engine_start import prepare

#: Seconds between two looks at the received signals and the parent.
_POLL_SECONDS: Final = 0.1


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM, SIGINT or SIGHUP, or the parent's end; return the exit status."""
    open_standard_streams()
    config = Config.from_arguments(arguments)
    configure_logging(config.log_level, config.log_format)
    shorten_gil_switch_interval()
    keep_freed_memory()
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number is not signal.SIGHUP or signal.getsignal(number) is signal.SIG_DFL:  # nohup
            signal.signal(number, lambda got, _: signals.append(got))
    parent = Parent(config.parent)

    def is_stopping() -> bool:
        return bool(signals) or parent.is_gone()

    try:
        with prepare(config) as prepared:
            # Imported here, because that takes a while, in which the engines start.
            from warpfit_server.server import Server

            with (
                Server(prepared, is_stopping, lambda: len(signals) > 1) as server,
                address_file(config.address_file, config.host, server.port),
            ):
                if not is_stopping():
                    try:
                        line = server.describe()
                        print(json_line(line) if config.log_format == "json" else line, flush=True)
                    except OSError:  # a full disk is no reason not to serve
                        discard_output()
                while not is_stopping():  # polls: a signal to another thread would not end a wait
                    time.sleep(_POLL_SECONDS)
                logging.getLogger("warpfit").info("stopping")
    except (WarpfitError, OSError) as error:  # such as no room for files, by `ulimit -f`
        reason = error.reason if isinstance(error, WarpfitError) else "SYSTEM_LIMIT"
        is_json = config.log_format == "json"
        tell(json_line(str(error), "error", reason=reason) if is_json else f"warpfit: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
