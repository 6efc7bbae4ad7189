"""DEAP trees against DEAP's own compiler, and `Evaluator` in its algorithms."""

import functools
import math
import operator
import random
from types import SimpleNamespace

import numpy as np
import pytest

import warpfit.testing
from warpfit.errors import InvalidArgumentError
from warpfit.expressions import reference
from warpfit.frontends import as_program
from warpfit.frontends.deap import Evaluator, from_deap
from warpfit.parse import parse

pytest.importorskip("deap")
from deap import algorithms, base, creator, gp, tools


def protectedDiv(left, right):  # noqa: N802 (the name in DEAP's examples)
    try:
        return left / right
    except ZeroDivisionError:
        return 1


def analytic_quotient(left, right):
    return left / math.sqrt(1 + right**2)


def if_then_else(condition, yes, no):
    return yes if condition else no


def scalar_set():
    """The primitives of DEAP's examples, on Python floats."""
    pset = gp.PrimitiveSet("MAIN", 3)
    for function, arity in (
        *((operator.add, 2), (operator.sub, 2), (operator.mul, 2), (protectedDiv, 2)),
        *((operator.neg, 1), (math.cos, 1), (math.sin, 1), (math.tanh, 1), (math.atan, 1)),
        *((analytic_quotient, 2), (max, 2), (min, 2), (operator.lt, 2), (operator.ge, 2)),
        *((if_then_else, 3), (math.fabs, 1), (math.floor, 1), (operator.abs, 1)),
        *((operator.not_, 1), (operator.eq, 2)),
    ):
        pset.addPrimitive(function, arity)
    pset.addEphemeralConstant("rand101", functools.partial(random.uniform, -1, 1))
    pset.addTerminal(math.pi, "pi")
    pset.addTerminal(0.5)
    return pset


def array_set():
    """NumPy primitives under names of their own."""
    pset = gp.PrimitiveSet("MAIN", 3)
    for function, arity in (
        *((np.add, 2), (np.subtract, 2), (np.multiply, 2), (np.true_divide, 2), (np.negative, 1)),
        *((np.sin, 1), (np.exp, 1), (np.log, 1), (np.absolute, 1), (np.square, 1), (np.sqrt, 1)),
        *((np.maximum, 2), (np.minimum, 2), (np.power, 2), (np.arctan, 1), (np.cbrt, 1)),
        *((np.log1p, 1), (np.reciprocal, 1), (np.sign, 1), (np.hypot, 2)),
    ):
        if function is not np.hypot:
            pset.addPrimitive(function, arity, name=f"v_{function.__name__}")
    pset.addEphemeralConstant("vrand", functools.partial(random.uniform, -1, 1))
    return pset


def tree(pset, seed):
    random.seed(seed)
    return gp.PrimitiveTree(gp.genHalfAndHalf(pset, min_=1, max_=5))


def data():
    columns = np.random.default_rng(4).normal(0, 2, size=(3, 40))
    columns[:, :5] = [[0, 1, -1, 0, 2], [0, 0, 1, -1, 0.5], [1, 0, 0, 2, -2]]
    return columns


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("make", [scalar_set, array_set])
def test_random_trees_agree_with_deap(make, seed):
    pset = make()
    original = tree(pset, seed)
    function = gp.compile(original, pset)
    with np.errstate(all="ignore"):
        if make is scalar_set:
            wanted = [float(function(*row)) for row in data().T.tolist()]
        else:
            wanted = np.broadcast_to(function(*data()), data().shape[1])
    got = reference.evaluate_program(from_deap(original, pset), data())
    np.testing.assert_allclose(got, wanted, rtol=1e-12 if make is scalar_set else 0)


def test_without_the_primitive_set_names_decide():
    pset = scalar_set()
    original = gp.PrimitiveTree.from_string("add(protectedDiv(ARG0, ARG2), sin(0.25))", pset)
    assert str(as_program(original)) == "zdiv(x1, x3) + sin(0.25)"
    named = gp.PrimitiveTree.from_string("add(pi, ARG0)", pset)
    assert str(from_deap(named, pset)) == "pi + x1"
    with pytest.raises(InvalidArgumentError, match="pi") as caught:
        as_program(named)
    assert caught.value.reason == "UNKNOWN_TERMINAL"


def test_renamed_arguments():
    pset = scalar_set()
    pset.renameArguments(ARG0="bmi", ARG1="age")
    original = gp.PrimitiveTree.from_string("sub(bmi, mul(age, ARG2))", pset)
    assert str(from_deap(original, pset)) == "x1 - x2 * x3"
    assert str(as_program(original)) == "x1 - x2 * x3"
    assert str(as_program(original, ("age", "sex", "dose", "bmi"))) == "x4 - x1 * x3"


def test_operators_of_the_user():
    pset = scalar_set()
    pset.addPrimitive(lambda a, b: a if b else 0, 2, name="gate")
    original = gp.PrimitiveTree.from_string("gate(ARG0, ARG1)", pset)
    with pytest.raises(InvalidArgumentError, match="'gate'") as caught:
        from_deap(original, pset)
    assert caught.value.reason == "UNKNOWN_FUNCTION"
    assert str(from_deap(original, pset, {"gate": "and"})) == "x1 and x2"
    plain = gp.PrimitiveTree.from_string("sin(ARG0)", pset)
    assert str(from_deap(plain, pset, {"sin": "tanh"})) == "tanh(x1)"
    with pytest.raises(InvalidArgumentError, match="2 operands") as caught:
        from_deap(original, pset, {"gate": "neg"})
    assert caught.value.reason == "WRONG_ARITY"


def protected_by_a_threshold(left, right):
    return left / right if abs(right) > 1e-6 else 1.0


def protected_in_arrays(left, right):
    with np.errstate(all="ignore"):
        quotient = np.divide(left, right)
    quotient[np.asarray(right) == 0] = 1
    return quotient


def modulo(left, right):
    return left - right * math.floor(left / right)


@pytest.mark.parametrize(
    ("name", "function", "is_right"),
    [
        ("protectedDiv", protectedDiv, True),
        ("protectedDiv", protected_in_arrays, True),
        ("protectedDiv", protected_by_a_threshold, False),
        ("div", protectedDiv, False),
        ("div", lambda a, b: a / b, True),
        ("add", functools.partial(operator.add), True),
        ("log", lambda a: math.log(abs(a)) if a else 0.0, False),
        ("sinc", np.sinc, False),
        ("mod", modulo, False),
        ("remainder", math.remainder, False),
        ("remainder", np.remainder, True),
        ("round", round, True),
        ("round", lambda a: math.floor(a + 0.5), False),
        ("if_then_else", if_then_else, True),
        ("if_then_else", lambda a, b, c: b if a > 0 else c, False),
        ("lgamma", math.lgamma, True),
    ],
)
def test_functions_that_are_not_the_operator_of_their_name(name, function, is_right):
    arity = {"protectedDiv": 2, "div": 2, "add": 2, "mod": 2, "remainder": 2, "if_then_else": 3}
    pset = gp.PrimitiveSet("MAIN", 3)
    pset.addPrimitive(function, arity.get(name, 1), name=name)
    arguments = ", ".join(f"ARG{k}" for k in range(arity.get(name, 1)))
    original = gp.PrimitiveTree.from_string(f"{name}({arguments})", pset)
    if is_right:
        assert from_deap(original, pset).variables == arity.get(name, 1)
        return
    with pytest.raises(InvalidArgumentError, match=name) as caught:
        from_deap(original, pset)
    assert caught.value.reason == "OTHER_FUNCTION"
    meaning = {"round": "floor", "sinc": "sin", "remainder": "zdiv", "if_then_else": "where"}.get(
        name, name
    )
    assert len(from_deap(original, pset, {name: meaning}))


@pytest.mark.parametrize("with_set", [False, True])
def test_automatically_defined_functions_are_refused(with_set):
    inner = gp.PrimitiveSet("ADF0" if not with_set else "twice", 1)
    inner.addPrimitive(operator.add, 2)
    pset = gp.PrimitiveSet("MAIN", 1)
    pset.addADF(inner)
    original = gp.PrimitiveTree.from_string(f"{inner.name}(ARG0)", pset)
    with pytest.raises(InvalidArgumentError, match=inner.name) as caught:
        from_deap(original, pset if with_set else None)
    assert caught.value.reason == "ADF_UNSUPPORTED"
    with pytest.raises(InvalidArgumentError) as caught:
        from_deap([original, original], pset)
    assert caught.value.reason == "ADF_UNSUPPORTED"


def test_terminals_that_are_no_numbers():
    pset = gp.PrimitiveSet("MAIN", 1)
    pset.addPrimitive(operator.neg, 1)
    pset.addTerminal(object(), "thing")
    with pytest.raises(InvalidArgumentError, match="thing"):
        from_deap(gp.PrimitiveTree.from_string("neg(thing)", pset), pset)
    with pytest.raises(InvalidArgumentError, match="no number"):
        from_deap([SimpleNamespace(arity=0, value=None, name="None")])


def test_deep_trees_and_wide_sums():
    pset = scalar_set()
    neg, argument = pset.mapping["neg"], pset.mapping["ARG0"]
    assert len(from_deap(gp.PrimitiveTree([neg] * 20_000 + [argument]), pset)) == 20_001
    wide = gp.PrimitiveSet("MAIN", 3)
    wide.addPrimitive(lambda *terms: sum(terms), 3, name="add")
    original = gp.PrimitiveTree.from_string("add(ARG0, add(ARG1, ARG1, 2), ARG2)", wide)
    assert str(as_program(original)) == "x1 + (x2 + x2 + 2) + x3"


@pytest.mark.parametrize("name", ["safeDiv", "protected_division"])
def test_divisions_that_differ_between_programs_need_their_function(name):
    """Where the divisor is 0 some return 1, and others 0."""

    def one(a, b):
        return a / b if b else 1.0

    def zero(a, b):
        return a / b if b else 0.0

    pset = gp.PrimitiveSet("MAIN", 2)
    pset.addPrimitive(one, 2, name=name)
    tree = gp.PrimitiveTree.from_string(f"{name}(ARG0, ARG1)", pset)
    with pytest.raises(InvalidArgumentError, match="different things") as caught:
        from_deap(tree)
    assert "operators=" in caught.value.remedy
    assert (
        from_deap(tree, pset) == from_deap(tree, operators={name: "zdiv"}) == parse("zdiv(x1, x2)")
    )
    other = gp.PrimitiveSet("MAIN", 2)
    other.addPrimitive(zero, 2, name=name)
    with pytest.raises(InvalidArgumentError, match="gives 0"):
        from_deap(gp.PrimitiveTree.from_string(f"{name}(ARG0, ARG1)", other), other)


# ----------------------------------------------------------------------------------- the evaluator


ROWS = np.random.default_rng(0).uniform(-2, 2, (30, 2))
TARGET = ROWS[:, 0] ** 2 - 3.5 * ROWS[:, 1]


@pytest.fixture
def server():
    return warpfit.testing.InProcessServer()


@pytest.fixture
def client(server):
    with warpfit.testing.client(server) as connected:
        yield connected


@pytest.fixture
def pset():
    pset = gp.PrimitiveSet("MAIN", 2)
    for function, arity in ((operator.add, 2), (operator.sub, 2), (operator.mul, 2)):
        pset.addPrimitive(function, arity)
    pset.addPrimitive(np.log, 1, name="log")
    pset.addEphemeralConstant("number", functools.partial(random.uniform, -1, 1))
    pset.addTerminal(2.0)
    pset.addTerminal(3.5, "slope")
    return pset


@pytest.fixture
def toolbox(pset):
    random.seed(7)
    creator.create("Least", base.Fitness, weights=(-1.0,))
    creator.create("Individual", gp.PrimitiveTree, fitness=creator.Least)
    toolbox = base.Toolbox()
    toolbox.register("expression", gp.genHalfAndHalf, pset=pset, min_=1, max_=3)
    toolbox.register("individual", tools.initIterate, creator.Individual, toolbox.expression)
    toolbox.register("population", tools.initRepeat, list, toolbox.individual)
    toolbox.register("select", tools.selTournament, tournsize=3)
    toolbox.register("mate", gp.cxOnePoint)
    toolbox.register("mutate", gp.mutUniform, expr=toolbox.expression, pset=pset)
    yield toolbox
    del creator.Individual
    del creator.Least


def register(toolbox, evaluate):
    toolbox.register("evaluate", evaluate)
    toolbox.register("map", evaluate.map)


def by_deap(tree, pset):
    with np.errstate(all="ignore"):
        error = np.mean((gp.compile(tree, pset)(*ROWS.T) - TARGET) ** 2)
    return error if np.isfinite(error) else np.inf


def test_a_generation_is_one_call_and_deap_agrees(toolbox, pset, client, server):
    register(toolbox, Evaluator(client, client.upload(ROWS, TARGET, dtype="float64"), pset))
    population = toolbox.population(n=300)
    calls = len(server.calls)
    fitnesses = list(toolbox.map(toolbox.evaluate, population))
    assert server.calls[calls:] == ["Evaluate"]
    wanted = [by_deap(tree, pset) for tree in population]
    np.testing.assert_allclose([fitness for (fitness,) in fitnesses], wanted, rtol=1e-9)
    assert np.isinf(wanted).any()
    assert toolbox.evaluate(population[0]) == pytest.approx((wanted[0],))


def test_deaps_algorithms_run_unchanged(toolbox, pset, client, server):
    data = client.upload(ROWS, TARGET, dtype="float64")
    register(toolbox, Evaluator(client, data, pset))
    population = toolbox.population(n=40)
    calls = len(server.calls)
    population, _ = algorithms.eaSimple(population, toolbox, 0.5, 0.2, ngen=3, verbose=False)
    assert server.calls[calls:] == ["Evaluate"] * 4
    for tree in population:
        assert tree.fitness.values[0] == pytest.approx(by_deap(tree, pset))


def test_map_maps_everything_else_and_terminals_of_the_set_are_not_fitted(toolbox, pset, client):
    data = client.upload(ROWS, TARGET, dtype="float64")
    evaluate = Evaluator(client, data, pset, fit_iterations=20, rows=slice(0, 10))
    tree = creator.Individual.from_string("mul(2.0, mul(slope, ARG1))", pset)
    assert evaluate(tree) == pytest.approx((np.mean((7.0 * ROWS[:10, 1] - TARGET[:10]) ** 2),))
    assert [node.name for node in tree] == ["mul", "2.0", "mul", "slope", "ARG1"]
    assert list(evaluate.map(abs, [-1, 2])) == [1, 2]
    assert list(evaluate.map(operator.add, [1, 2], [3, 4])) == [4, 6]
    assert evaluate.map(evaluate, []) == []


def test_fitted_constants_stay_in_their_tree(toolbox, pset, client, server):
    evaluate = Evaluator(
        client, client.upload(ROWS, TARGET, dtype="float64"), pset, fit_iterations=20
    )
    register(toolbox, evaluate)
    number = next(c for c in pset.terminals[object] if isinstance(c, gp.MetaEphemeral))
    text = "sub(mul(ARG0, ARG0), mul({}, ARG1))"
    tree = creator.Individual.from_string(text.format("ARG0"), pset)
    place = next(i for i, node in enumerate(tree) if i > 4 and node.name == "ARG0")
    tree[place] = number()
    twin = creator.Individual(tree)
    before = twin[place].value
    ((fitness,),) = toolbox.map(toolbox.evaluate, [tree])
    assert fitness < 1e-12
    assert tree[place].value == pytest.approx(3.5)
    assert by_deap(tree, pset) == pytest.approx(0.0, abs=1e-12)
    assert twin[place].value == before
    assert server.calls[-1] == "Optimize"


def test_fits_are_never_worse(toolbox, pset, client):
    data = client.upload(ROWS, TARGET, dtype="float64")
    population = toolbox.population(n=100)
    plain = Evaluator(client, data, pset).score(population)
    fitted = Evaluator(client, data, pset, fit_iterations=5).score(population)
    pairs = [(before[0], after[0]) for before, after in zip(plain, fitted, strict=True)]
    assert all(after <= before * (1 + 1e-9) for before, after in pairs)
    assert sum(after < before - 1e-6 for before, after in pairs) > 5
    for tree, (loss,) in zip(population, fitted, strict=True):
        assert by_deap(tree, pset) == pytest.approx(loss, rel=1e-6, abs=1e-9)


def test_scores_that_are_best_when_high_fail_low(toolbox, pset, client):
    tree = creator.Individual.from_string("log(sub(ARG0, ARG0))", pset)
    data = client.upload(ROWS, TARGET)
    assert Evaluator(client, data, pset, loss="r2")(tree) == (-np.inf,)
    assert Evaluator(client, data, pset, loss="mae")(tree) == (np.inf,)


def test_an_error_names_the_tree(toolbox, pset, client):
    pset.addPrimitive(max, 2, name="gate")
    bad = creator.Individual.from_string("gate(ARG0, ARG1)", pset)
    data = client.upload(ROWS, TARGET)
    good = toolbox.individual()
    with pytest.raises(InvalidArgumentError, match="'gate'") as caught:
        Evaluator(client, data, pset).score([good, bad])
    assert caught.value.expression == 1
    assert len(Evaluator(client, data, pset, operators={"gate": "max"}).score([good, bad])) == 2


def test_an_evaluator_checks_and_shows_what_it_is_made_of(pset, client):
    pset.addPrimitive(max, 2, name="gate")
    data = client.upload(ROWS, TARGET)
    shown = repr(Evaluator(client, data, pset, fit_iterations=3))
    assert shown.startswith("<Evaluator of mse on <UploadedDataset ")
    assert shown.endswith(", 3 iterations of fits>")
    for options, remedy in (
        ({"operators": {"gate": "maxx"}}, "Did you mean max?"),
        ({"operators": {"gat": "max"}}, "Did you mean gate?"),
        ({"losss": "mse"}, "Did you mean loss=?"),
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            Evaluator(client, data, pset, **options)
        assert caught.value.remedy == remedy
    Evaluator(client, data, pset, operators={"of_another_pset": "max"})
    with pytest.raises(InvalidArgumentError, match="data is <class 'tuple'>"):
        Evaluator(client, (ROWS, TARGET), pset)
