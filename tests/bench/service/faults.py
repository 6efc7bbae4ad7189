"""Faults, many of each, under load: what the clients saw, and whether it is what they should see.

Starts servers with the CPU engine on loopback, takes about six minutes, and ends with status 1 if
an expectation is not met; with ``--ray`` it starts Ray clusters of three nodes
(`ray.cluster_utils`), each with a server of one thread, and takes about five minutes. With names of
faults it does these alone, and puts them beside what the file has of the others.
"""

import json
import os
from collections.abc import Callable
from typing import Any

from harness import arguments, save

from support.load import faults

Seen = dict[str, Any]
#: What provokes a fault, and what tells whether its outcome is as expected.
Fault = tuple[Callable[[], Seen], Callable[[Seen], bool]]


def unharmed(seen: Seen, name: str = "", seconds: float = 0.0) -> bool:
    """Tell whether no answer was wrong, no call failed, and something took less than a time."""
    is_quick = not name or seen[name] < seconds
    return not seen["wrong_answers"] and not seen["failures_after_retry"] and is_quick


def back_in_time(seen: Seen) -> bool:
    return unharmed(seen, "seconds_without_answers_max", 2.0)


def drained(seen: Seen) -> bool:
    return unharmed(seen, "seconds_to_stop_max", 2.0) and bool(seen["answers_while_unready"])


def shielded(seen: Seen) -> bool:
    return unharmed(seen["others"]) and all(seen["cut_answers"]) and all(seen["cut_uploads"])


#: A question every 0.2 s has 0.6 s to be answered; the clock is looked at every 0.1 s.
UNREADY = ("seconds_until_unready_max", 0.2 + 0.6 + 0.1 + 0.2)
OF_SERVERS: dict[str, Fault] = {
    "engine_sigkill": (lambda: faults.engine_sigkill(20), back_in_time),
    "engine_sigkill_two_front_ends": (lambda: faults.engine_sigkill(20, 8, 2), back_in_time),
    "engine_sigstop": (lambda: faults.engine_sigstop(10), lambda seen: unharmed(seen, *UNREADY)),
    "endless_work_that_ignores_its_end": (lambda: faults.endless_work("deaf"), bool),
    "endless_work_that_freezes_the_engine": (lambda: faults.endless_work("frozen"), bool),
    "server_sigkill": (lambda: faults.supervisor_sigkill(5), unharmed),
    "sigterm": (lambda: faults.sigterm(5), drained),
    "sigterm_two_front_ends": (lambda: faults.sigterm(5, front_ends=2), drained),
    "one_of_three_servers_sigkill": (
        lambda: faults.lost_servers(9),
        lambda seen: unharmed(seen, "client_gap_seconds_max", 1.0),
    ),
    "one_of_three_servers_sigstop": (lambda: faults.frozen_servers(6), unharmed),
    "three_servers_rolling_restart": (lambda: faults.rolling_restart(2), unharmed),
    "bad_network": (lambda: faults.bad_network(5), shielded),
    "killed_in_mid_upload": (lambda: faults.killed_uploads(1000), faults.is_clean),
}


def of_ray() -> dict[str, Fault]:
    """Return the faults of a cluster of three nodes."""
    from support.load import ray_faults

    return {
        "server_sigkill": (lambda: ray_faults.lost_servers(6), unharmed),
        "node_sigkill": (lambda: ray_faults.lost_nodes(3), unharmed),
        "rolling_restart": (lambda: ray_faults.rolling_restart(2), unharmed),
        "search_while_a_worker_a_server_and_a_node_are_killed": (
            ray_faults.lost_while_searching,
            lambda seen: seen["same_formulas"] and len(seen["killed_before_the_end"]) == 3,
        ),
    }


def main() -> int:
    options = arguments(__doc__, "", "names", ray=False)
    name, known = ("faults_ray", of_ray()) if options.ray else ("faults", OF_SERVERS)
    name = options.name or name
    chosen, path = options.names or list(known), options.folder / f"{name}.json"
    known_before = options.names and path.exists()
    results = json.loads(path.read_text())["faults"] if known_before else {}
    for fault in chosen:
        provoke, expected = known[fault]
        busy = round(os.getloadavg()[0], 1)  # other programs of the machine slow everything down
        seen = provoke()
        results[fault] = {"as_expected": expected(seen), "load_average_before": busy, **seen}
    save(name, {"faults": results}, options.folder)
    return 0 if all(results[fault]["as_expected"] for fault in chosen) else 1
