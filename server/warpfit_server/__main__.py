"""The command ``warpfit serve``, also ``python -m warpfit_server``."""

import logging
import signal
import sys
import time
from collections.abc import Sequence
from typing import Final

from warpfit.errors import WarpfitError
from warpfit_server.config import Config
from warpfit_server.observability.logs import configure_logging
from warpfit_server.processes.engine_start import Preparation, prepare
from warpfit_server.system.address_file import address_file
from warpfit_server.system.resources import keep_freed_memory
from warpfit_server.system.worker_threads import take_short_turns

#: Seconds between two looks at the received signals.
_POLL_SECONDS: Final = 0.1


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status."""
    config = Config.from_arguments(arguments)
    configure_logging(config.log_level, config.log_format)
    take_short_turns()
    keep_freed_memory()
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, _: signals.append(got))
    try:
        with prepare(config) as prepared:
            _serve(prepared, signals)
    except WarpfitError as error:
        print(f"warpfit: {error}", file=sys.stderr)
        return 2
    return 0


def _serve(prepared: Preparation, signals: list[int]) -> None:
    """Serve until there is a signal."""
    # Imported here, because that takes a while, in which the engines start.
    from warpfit_server.server import Server

    config = prepared.config
    with (
        Server(prepared, is_stopping=lambda: bool(signals)) as server,
        address_file(config.address_file, config.host, server.port),
    ):
        if not signals:
            print(server.describe(), flush=True)
        while not signals:  # polls: a signal to another thread would not end a wait
            time.sleep(_POLL_SECONDS)
        logging.getLogger("warpfit").info("stopping")


if __name__ == "__main__":
    sys.exit(main())
