"""The tier chooser is calibrated while nothing else uses the device."""

from __future__ import annotations

import threading
import time

import pytest

pytest.importorskip("numba")

from warpfit_server.engine.cuda.calibration import Activity, IdleCalibrator
from warpfit_server.engine.cuda.tier_chooser import DEFAULT_COSTS, CostTable, TierChooser, TierCost

MEASURED = CostTable(
    dict.fromkeys(DEFAULT_COSTS.tiers, TierCost(1.0, 2.0)), DEFAULT_COSTS.compile_seconds
)


class DisturbedCalibration:
    """Is disturbed by an evaluation as often as it is told, and then measures."""

    def __init__(self, activity: Activity, disturbances: int) -> None:
        self._activity = activity
        self._disturbances = disturbances
        self.times = 0
        self.ended = threading.Event()

    def known(self) -> None:
        return None

    def measure(self, goes_on):
        assert goes_on()
        self.times += 1
        if self.times > self._disturbances:
            self.ended.set()
            return MEASURED
        with self._activity.count():
            assert not goes_on()
        assert not goes_on(), "an evaluation that has ended has disturbed it, too"
        return None


def test_the_tier_chooser_is_calibrated_once_nothing_disturbs_it():
    activity, chooser = Activity(), TierChooser(8)
    calibration = DisturbedCalibration(activity, disturbances=2)
    calibrator = IdleCalibrator(calibration, chooser, activity, pause=0.01)
    with activity.count():
        calibrator.start()
        time.sleep(0.1)
        assert calibration.times == 0
    assert calibration.ended.wait(10)
    calibrator.close()
    assert calibration.times == 3
    assert set(chooser.costs.values()) >= {TierCost(1.0, 2.0)}
    assert chooser.start is MEASURED


def test_calibration_ends_with_the_engine():
    activity, chooser = Activity(), TierChooser(8)
    calibration = DisturbedCalibration(activity, 0)
    calibrator = IdleCalibrator(calibration, chooser, activity, pause=60.0)
    calibrator.start()
    calibrator.close()
    assert calibration.times == 0
    assert chooser.start is DEFAULT_COSTS
