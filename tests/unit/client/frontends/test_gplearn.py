"""gplearn programs against gplearn's own evaluator."""

from types import SimpleNamespace

import numpy as np
import pytest

from support.refusals import refused
from warpfit.expressions import reference
from warpfit.frontends import as_population, as_program
from warpfit.frontends.gplearn import from_gplearn, population

functions = pytest.importorskip("gplearn.functions")
_Program = pytest.importorskip("gplearn._program")._Program

FEATURES = 4
ALL = [*functions._function_map.values(), functions.sig1]


def program(nodes=None, seed=0, function_set=ALL):
    arities = {}
    for function in function_set:
        arities.setdefault(function.arity, []).append(function)
    return _Program(
        function_set=function_set, arities=arities, init_depth=(1, 7), n_features=FEATURES,
        init_method="half and half", const_range=(-2.0, 2.0), metric=None, p_point_replace=0.05,
        parsimony_coefficient=0.001, random_state=np.random.RandomState(seed), program=nodes,
    )  # fmt: skip


def test_a_generation_computes_what_gplearn_computes():
    """To the bit; only gplearn's sigmoid is written with another formula here."""
    rows = np.random.default_rng(11).normal(0, 2, size=(60, FEATURES))
    rows[:8, 0] = rows[4:12, 1] = [0.0, 0.001, -0.001, 0.0011, -0.0009, 1e-9, 1.0, -1.0]
    sets = ALL, ALL[:-1]
    generation = [program(seed=seed, function_set=sets[seed % 3 > 0]) for seed in range(60)]
    for original, converted in zip(generation, as_population(generation), strict=True):
        with np.errstate(all="ignore"):
            wanted = np.broadcast_to(original.execute(rows), len(rows))
        got = reference.evaluate_program(converted, rows.T)
        has_sigmoid = "logistic" in str(converted)
        np.testing.assert_allclose(got, wanted, rtol=1e-10 if has_sigmoid else 0)
        assert len(converted) == len(original.program)
    estimator = SimpleNamespace(_program=original)
    assert as_program(original) == from_gplearn(estimator) == converted
    assert len(population([])) == 0
    broken = program([functions.add2, 0, 1])
    broken.program = [functions.add2, 0, 1, 2]
    assert refused("STACK_LEFTOVERS", as_population, [*generation, broken]).expression == 60


@pytest.mark.parametrize(
    ("function", "name", "reason", "meaning", "text"),
    [
        (lambda a: a / (1 + np.abs(a)), "damped", "UNKNOWN_FUNCTION", "tanh", "tanh(x1)"),
        (lambda a: np.exp(np.minimum(a, 9)), "exp", "OTHER_FUNCTION", "exp", "exp(x1)"),
        (np.square, "square", None, "square", "x1 ^ 2"),
    ],
)
def test_a_function_of_the_user(function, name, reason, meaning, text):
    custom = functions.make_function(function=function, name=name, arity=1, wrap=False)
    original = program([custom, 0], function_set=[*ALL, custom])
    assert str(from_gplearn(original, {name: meaning})) == text
    if reason is None:
        assert str(as_program(original)) == text
        return
    for operators, wanted in ((None, reason), ({name: "aq"}, "WRONG_ARITY")):
        assert refused(name, from_gplearn, original, operators).reason == wanted
