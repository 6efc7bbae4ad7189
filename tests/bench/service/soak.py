"""Load for a long time: the server's memory must not grow, and a planted leak must be found.

``run.py service/soak --minutes 30`` writes results/soak.json and ends with status 1 if the
server grew by 50 MB or more after a warm-up of a quarter of the time, or if the control, a server
that keeps 32 KiB of each answered call, passed.
"""

import argparse
import sys

from harness import save

from support.load.soak import soak

LEAK = 32 << 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--control-minutes", type=float, default=2.0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--front-ends", type=int, default=2)
    parser.add_argument("--devices", default="cpu")
    options = parser.parse_args()
    size = {
        "clients": options.clients,
        "front_ends": options.front_ends,
        "devices": options.devices,
    }
    control = soak(60 * options.control_minutes, leak=LEAK, **size)
    result = soak(60 * options.minutes, **size)
    content = {"minutes": options.minutes, **size, "soak": result, "control_with_a_leak": control}
    save("soak", content)
    return 0 if result["passed"] and not control["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
