"""Faults in small; `tests/bench/service/faults.py` has many of each."""

import pytest

from support.load import faults
from support.load.killed_uploads import is_clean, killed_uploads
from support.load.soak import soak


def assert_unharmed(seen: dict) -> None:
    assert seen["wrong_answers"] == 0
    assert seen["failures_after_retry"] == 0, seen["first_failures"]
    assert seen["right_answers"] > 0


def test_sigstop_of_the_engine():
    assert_unharmed(faults.engine_sigstop(1, clients=2))


def test_work_that_does_not_stop():
    seen = faults.endless_work("deaf")
    assert seen["client_gave_up_after_seconds"] < seen["engine_gone_after_seconds"]


@pytest.mark.thorough
def test_sigterm_of_the_server():
    seen = faults.sigterm(1, clients=2, front_ends=2)
    assert_unharmed(seen)
    assert seen["answers_while_unready"]


def test_bad_networks():
    seen = faults.bad_network(1)
    assert_unharmed(seen["others"])
    assert all(seen["cut_answers"])
    assert all(seen["cut_uploads"])


def test_clients_that_are_killed_in_the_middle_of_an_upload():
    seen = killed_uploads(10, together=10)
    assert is_clean(seen), seen


@pytest.mark.thorough
def test_a_server_does_not_grow():
    seen = soak(1.5, clients=2, front_ends=1)
    assert seen["passed"], seen
    assert seen["in_flight_at_the_end"] == seen["engine_restarts"] == seen["internal_errors"] == 0
