"""Faults of a Ray cluster under load: what the clients of its servers saw.

``python tests/bench/faults_ray.py`` starts clusters of three nodes (`ray.cluster_utils`, loopback),
each with a server with the CPU engine and one thread, takes about five minutes, writes
results/faults_ray.json and ends with status 1 if an expectation is not met. With names of faults it
does these alone, and puts them beside what the file has of the others.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from harness import RESULTS, save

from support.load import ray_faults

FAULTS: dict[str, Callable[[], dict[str, Any]]] = {
    "server_sigkill": lambda: ray_faults.lost_servers(6),
    "node_sigkill": lambda: ray_faults.lost_nodes(3),
    "rolling_restart": lambda: ray_faults.rolling_restart(2),
    "search_while_a_worker_a_server_and_a_node_are_killed": ray_faults.lost_while_searching,
}


def main() -> int:
    known = RESULTS / "faults_ray.json"
    results = json.loads(known.read_text())["faults"] if known.exists() else {}
    for name in sys.argv[1:] or FAULTS:
        busy = round(os.getloadavg()[0], 1)
        seen = FAULTS[name]()
        results[name] = {"as_expected": is_right(seen), "load_average_before": busy, **seen}
    save("faults_ray", {"ray": ray_faults.ray.__version__, "faults": results})
    return 0 if all(result["as_expected"] for result in results.values()) else 1


def is_right(seen: dict[str, Any]) -> bool:
    """Whether no answer was wrong and no call failed."""
    if "same_formulas" in seen:
        return bool(seen["same_formulas"]) and len(seen["killed_before_the_end"]) == 3
    return not seen["wrong_answers"] and not seen["failures_after_retry"]


if __name__ == "__main__":
    sys.exit(main())
