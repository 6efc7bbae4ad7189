"""Which evaluations the stuck detector takes for stuck."""

from __future__ import annotations

import numpy as np

from warpfit_server.system.lifetime import StuckDetector


def test_only_an_evaluation_that_ignores_its_cancellation_is_stuck():
    flag, other = np.zeros(1, np.uint8), np.zeros(1, np.uint8)
    flags = {1: flag, 2: other}
    detector = StuckDetector(30.0, flags.items)
    assert not detector.is_stuck(1e9)
    flag[0] = 1
    assert not detector.is_stuck(1e9 + 1)
    assert not detector.is_stuck(1e9 + 31)
    assert detector.is_stuck(1e9 + 32)
    del flags[1]
    assert not detector.is_stuck(1e9 + 100)


def test_the_next_request_in_the_same_segment_has_its_own_time():
    flag = np.ones(1, np.uint8)  # of the segment, and so of both requests
    flags = {1: flag}
    detector = StuckDetector(30.0, flags.items)
    assert not detector.is_stuck(1e9)
    flags.clear()
    flags[2] = flag
    assert not detector.is_stuck(1e9 + 31)
    assert detector.is_stuck(1e9 + 62)
