"""Faults, many of each, under load: what the clients saw, and whether it is what they should see.

``run.py service/faults`` starts servers with the CPU engine on loopback, takes about six minutes,
writes faults.json and ends with status 1 if an expectation is not met; with ``--ray`` it
starts Ray clusters of three nodes (`ray.cluster_utils`), each with a server of one thread, takes
about five minutes and writes faults_ray.json. With names of faults it does these alone, and
puts them beside what the file has of the others.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from harness import arguments, save

from support.load import faults

#: Seconds in which a killed CPU engine has to answer again.
BACK = 2.0
#: Seconds that a client may be without an answer when one of several servers is killed.
TAKEN_OVER = 1.0
#: Seconds in which a server whose calls are short has to end when it is told to.
DRAINED = 2.0


Fault = tuple[Callable[[], dict[str, Any]], Callable[[dict[str, Any]], bool]]


def of_servers() -> dict[str, Fault]:
    """Return what provokes each fault, and what tells whether its outcome is as expected."""
    return {
        "engine_sigkill": (lambda: faults.engine_sigkill(20), _back_in_time),
        "engine_sigkill_two_front_ends": (
            lambda: faults.engine_sigkill(20, front_ends=2),
            _back_in_time,
        ),
        "engine_sigstop": (lambda: faults.engine_sigstop(10), _noticed),
        "endless_work_that_ignores_its_end": (lambda: faults.endless_work("deaf"), bool),
        "endless_work_that_freezes_the_engine": (lambda: faults.endless_work("frozen"), bool),
        "server_sigkill": (lambda: faults.supervisor_sigkill(5), _unharmed),
        "sigterm": (lambda: faults.sigterm(5), _drained),
        "sigterm_two_front_ends": (lambda: faults.sigterm(5, front_ends=2), _drained),
        "one_of_three_servers_sigkill": (lambda: faults.lost_servers(9), _taken_over),
        "one_of_three_servers_sigstop": (lambda: faults.frozen_servers(6), _unharmed),
        "three_servers_rolling_restart": (lambda: faults.rolling_restart(2), _unharmed),
        "bad_network": (lambda: faults.bad_network(5), _shielded),
        "killed_in_mid_upload": (lambda: faults.killed_uploads(1000), faults.is_clean),
    }


def of_ray() -> dict[str, Fault]:
    """Return the same of a cluster of three nodes."""
    from support.load import ray_faults

    return {
        "server_sigkill": (lambda: ray_faults.lost_servers(6), _unharmed),
        "node_sigkill": (lambda: ray_faults.lost_nodes(3), _unharmed),
        "rolling_restart": (lambda: ray_faults.rolling_restart(2), _unharmed),
        "search_while_a_worker_a_server_and_a_node_are_killed": (
            ray_faults.lost_while_searching,
            lambda seen: seen["same_formulas"] and len(seen["killed_before_the_end"]) == 3,
        ),
    }


def main() -> int:
    options = arguments(__doc__, "", "names", ray=False)
    name, known = ("faults_ray", of_ray()) if options.ray else ("faults", of_servers())
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


def _unharmed(seen: dict[str, Any]) -> bool:
    return not seen["wrong_answers"] and not seen["failures_after_retry"]


def _back_in_time(seen: dict[str, Any]) -> bool:
    return _unharmed(seen) and seen["seconds_without_answers_max"] < BACK


def _taken_over(seen: dict[str, Any]) -> bool:
    return _unharmed(seen) and seen["client_gap_seconds_max"] < TAKEN_OVER


def _noticed(seen: dict[str, Any]) -> bool:
    """A question every 0.2 s has 0.6 s to be answered; the clock is looked at every 0.1 s."""
    return _unharmed(seen) and seen["seconds_until_unready_max"] < 0.2 + 0.6 + 0.1 + 0.2


def _drained(seen: dict[str, Any]) -> bool:
    is_quick = seen["seconds_to_stop_max"] < DRAINED
    return _unharmed(seen) and bool(seen["answers_while_unready"]) and is_quick


def _shielded(seen: dict[str, Any]) -> bool:
    return _unharmed(seen["others"]) and all(seen["cut_answers"]) and all(seen["cut_uploads"])


if __name__ == "__main__":
    sys.exit(main())
