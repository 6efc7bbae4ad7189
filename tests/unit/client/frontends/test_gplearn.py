"""gplearn programs against gplearn's own evaluator."""

import numpy as np
import pytest

from warpfit.errors import InvalidArgumentError, ProgramError
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
        function_set=function_set,
        arities=arities,
        init_depth=(1, 7),
        init_method="half and half",
        n_features=FEATURES,
        const_range=(-2.0, 2.0),
        metric=None,
        p_point_replace=0.05,
        parsimony_coefficient=0.001,
        random_state=np.random.RandomState(seed),
        program=nodes,
    )


def data():
    rng = np.random.default_rng(11)
    rows = rng.normal(0, 2, size=(60, FEATURES))
    rows[:8, 0] = [0.0, 0.001, -0.001, 0.0011, -0.0009, 1e-9, 1.0, -1.0]
    rows[4:12, 1] = [0.0, 0.001, -0.001, 0.0011, -0.0009, 1e-9, 1.0, -1.0]
    return rows


@pytest.mark.parametrize("seed", range(60))
def test_random_programs_agree_with_gplearn(seed):
    """To the bit; only gplearn's sigmoid is written with another formula here."""
    sigmoid = seed % 3 == 0
    original = program(seed=seed, function_set=ALL if sigmoid else ALL[:-1])
    with np.errstate(all="ignore"):
        wanted = np.broadcast_to(original.execute(data()), len(data()))
    converted = as_program(original)
    got = reference.evaluate_program(converted, data().T)
    np.testing.assert_allclose(got, wanted, rtol=1e-10 if sigmoid else 0)
    assert len(converted) == len(original.program)


def damped(a):
    return a / (1 + np.abs(a))


def protected(a):
    return np.where(np.abs(a) < 100, np.exp(a), 0.0)


@pytest.mark.parametrize(
    ("function", "name", "reason", "meaning", "text"),
    [
        (damped, "damped", "UNKNOWN_FUNCTION", "tanh", "tanh(x1)"),
        (protected, "exp", "OTHER_FUNCTION", "exp", "exp(x1)"),
        (np.square, "square", None, "square", "x1 ^ 2"),
    ],
)
def test_a_function_of_the_user(function, name, reason, meaning, text):
    custom = functions.make_function(function=function, name=name, arity=1, wrap=False)
    original = program([custom, 0], function_set=[*ALL, custom])
    if reason is None:
        assert str(as_program(original)) == text
        return
    with pytest.raises(InvalidArgumentError, match=name) as caught:
        as_program(original)
    assert caught.value.reason == reason
    assert str(from_gplearn(original, {name: meaning})) == text
    with pytest.raises(InvalidArgumentError, match="takes 2") as caught:
        from_gplearn(original, {name: "aq"})
    assert caught.value.reason == "WRONG_ARITY"


def test_a_fitted_estimator():
    class SymbolicRegressor:
        _program = program([functions.div2, 0, 1])

    assert str(from_gplearn(SymbolicRegressor())) == "pdiv(x1, x2)"


def test_a_generation_is_converted_as_its_programs_are():
    generation = [program(seed=seed) for seed in range(40)]
    assert list(as_population(generation)) == [as_program(each) for each in generation]
    assert len(population([])) == 0
    broken = program([functions.add2, 0, 1])
    broken.program = [functions.add2, 0, 1, 2]
    with pytest.raises(ProgramError) as caught:
        as_population([*generation, broken])
    assert caught.value.expression == 40
