"""Load for a long time: the server's memory must not grow, and a planted leak must be found.

It ends with status 1 if the server grew by 50 MB or more after a warm-up of a quarter of the time,
or if the control, a server that keeps 32 KiB of each answered call, passed.
"""

from typing import Any

from harness import arguments, save

from support.load.soak import soak

LEAK = 32 << 10
SIZE: dict[str, Any] = {"clients": 4, "front_ends": 2, "devices": "cpu"}


def main() -> int:
    options = arguments(__doc__, "soak", minutes=30.0, control_minutes=2.0)
    control = soak(60 * options.control_minutes, leak=LEAK, **SIZE)
    result = soak(60 * options.minutes, **SIZE)
    content = {"minutes": options.minutes, **SIZE, "soak": result, "control_with_a_leak": control}
    save(options.name, content, options.folder)
    return 0 if result["passed"] and not control["passed"] else 1
