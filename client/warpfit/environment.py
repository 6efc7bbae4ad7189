"""What must stand in the environment before gRPC is imported."""

from __future__ import annotations

import os
import sys
from typing import Final

#: gRPC's event engine keeps a thread for each core and wakes one of them at every step of a call.
#: On 16 cores a small call takes 0.4 to 0.8 ms with it, and 0.2 ms with the older poller, where the
#: waiting thread does the work itself (measured with grpcio 1.85.1).
_EXPERIMENTS: Final = "-event_engine_client,-event_engine_listener"

#: Between calls nobody waits in the older poller, and a connection that is being made makes no
#: progress until gRPC looks by itself: every 5,000 ms unless told otherwise. After a restart of the
#: server clients were cut off for 3 to 18 s; with this interval it is 0.1 to 0.9 s.
_LOOK_MILLISECONDS: Final = "100"


def prepare() -> None:
    """Choose gRPC's poller and its pace, unless the environment does or gRPC is there already."""
    if "grpc" not in sys.modules:
        os.environ.setdefault("GRPC_EXPERIMENTS", _EXPERIMENTS)
        os.environ.setdefault("GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS", _LOOK_MILLISECONDS)
