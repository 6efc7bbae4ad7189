"""Dimensions of units, and formulas that are consistent in them."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("sklearn")

from warpfit import InvalidArgumentError, ProgramError, parse
from warpfit.formulas.units import check_units, dimension, dimensions
from warpfit.sklearn.constraints import consistency
from warpfit.sklearn.genomes import Genomes

NAMES = ("m", "v", "w", "t", "angle")
UNITS = {"m": "kg", "v": "m/s", "w": "m*s^-1", "t": "s"}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("J", "kg*m^2/s^2"),
        ("N/m", "J*m^-2"),
        ("V*A", "W"),
        ("", None),
        ("m^0.5*m^0.5", "m"),
        ({"kg": 1, "m": 1, "s": -2}, "N"),
        ("rad", "1"),
    ],
)
def test_equal_units_have_one_dimension(one, other):
    assert dimension(one) == pytest.approx(dimension(other), abs=1e-12)


def test_units_of_other_systems_are_those_of_pint():
    pytest.importorskip("pint")
    assert dimension("mile/hour") == pytest.approx(dimension("m/s"))
    assert dimension("kN") == pytest.approx(dimension("N"))


@pytest.mark.parametrize(
    ("units", "reason"),
    [
        ({"m": "florin*"}, "UNKNOWN_UNIT"),
        ({"q": "kg"}, "BAD_SETTING"),
        (["kg"], "BAD_SETTING"),
        ("kg", "BAD_SETTING"),
    ],
)
def test_units_that_are_not_known_or_do_not_fit(units, reason):
    with pytest.raises(InvalidArgumentError) as caught:
        dimensions(units, NAMES, len(NAMES))
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("text", "sound"),
    [
        ("v + t", False),
        ("v*t + 3*w", True),  # 3 may be a time
        ("v*t + w", False),
        ("square(v)/w - w", True),
        ("exp(v)", False),
        ("exp(v/w)*m", True),
        ("sin(angle) + angle", True),
        ("m*(1 - square(v/w))", True),
        ("v^angle", False),
        ("v^2.5 + w", True),
        ("min(v, t)", False),
        ("where(v < t, m, m)", False),
        ("fma(v, t, w)", False),
    ],
)
def test_formulas_are_consistent_in_their_units(text, sound):
    check = consistency(dimensions(UNITS, NAMES, len(NAMES)))
    program = parse(text, NAMES)
    assert check(Genomes.of([program])).tolist() == [sound]
    if sound:
        check_units(program, dimensions(UNITS, NAMES, len(NAMES)), None, NAMES)
    else:
        with pytest.raises(ProgramError) as caught:
            check_units(program, dimensions(UNITS, NAMES, len(NAMES)), None, NAMES)
        assert caught.value.reason == "UNITS_DIFFER"
        assert caught.value.position is not None


@pytest.mark.parametrize(
    ("text", "target", "place"),
    [("p1*v*t", "m", None), ("v*t", "s", 2), ("v*(v + p1*t) + exp(t)", "", 19)],
)
def test_a_formula_has_the_unit_of_the_target(text, target, place):
    program, variables = parse(text, NAMES), dimensions(UNITS, NAMES, len(NAMES))
    if place is None:
        check_units(program, variables, dimension(target), NAMES)
        return
    with pytest.raises(ProgramError) as caught:
        check_units(program, variables, dimension(target), NAMES)
    assert caught.value.position == place


def test_units_by_column_and_by_default_names():
    assert np.allclose(dimensions(["m", None], (), 2), dimensions({"x1": "m"}, (), 2))
