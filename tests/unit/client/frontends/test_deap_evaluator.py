"""`Evaluator` in DEAP's own algorithms, against DEAP's own evaluation."""

import functools
import operator
import random

import numpy as np
import pytest

import warpfit.testing
from warpfit.errors import InvalidArgumentError
from warpfit.frontends.deap import Evaluator

deap = pytest.importorskip("deap")
from deap import algorithms, base, creator, gp, tools  # noqa: E402

X = np.random.default_rng(0).uniform(-2, 2, (30, 2))
Y = X[:, 0] ** 2 - 3.5 * X[:, 1]


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
        error = np.mean((gp.compile(tree, pset)(*X.T) - Y) ** 2)
    return error if np.isfinite(error) else np.inf


def test_a_generation_is_one_call_and_deap_agrees(toolbox, pset, client, server):
    register(toolbox, Evaluator(client, client.upload(X, Y, dtype="float64"), pset))
    population = toolbox.population(n=300)
    calls = len(server.calls)
    fitnesses = list(toolbox.map(toolbox.evaluate, population))
    assert server.calls[calls:] == ["Evaluate"]
    wanted = [by_deap(tree, pset) for tree in population]
    np.testing.assert_allclose([fitness for (fitness,) in fitnesses], wanted, rtol=1e-9)
    assert np.isinf(wanted).any()
    assert toolbox.evaluate(population[0]) == pytest.approx((wanted[0],))


def test_deaps_algorithms_run_unchanged(toolbox, pset, client, server):
    data = client.upload(X, Y, dtype="float64")
    register(toolbox, Evaluator(client, data, pset))
    population = toolbox.population(n=40)
    calls = len(server.calls)
    population, _ = algorithms.eaSimple(population, toolbox, 0.5, 0.2, ngen=3, verbose=False)
    assert server.calls[calls:] == ["Evaluate"] * 4
    for tree in population:
        assert tree.fitness.values[0] == pytest.approx(by_deap(tree, pset))


def test_map_maps_everything_else_and_terminals_of_the_set_are_not_fitted(toolbox, pset, client):
    data = client.upload(X, Y, dtype="float64")
    evaluate = Evaluator(client, data, pset, fit_iterations=20, rows=slice(0, 10))
    tree = creator.Individual.from_string("mul(2.0, mul(slope, ARG1))", pset)
    assert evaluate(tree) == pytest.approx((np.mean((7.0 * X[:10, 1] - Y[:10]) ** 2),))
    assert [node.name for node in tree] == ["mul", "2.0", "mul", "slope", "ARG1"]
    assert list(evaluate.map(abs, [-1, 2])) == [1, 2]
    assert list(evaluate.map(operator.add, [1, 2], [3, 4])) == [4, 6]
    assert evaluate.map(evaluate, []) == []


def test_fitted_constants_stay_in_their_tree(toolbox, pset, client, server):
    evaluate = Evaluator(client, client.upload(X, Y, dtype="float64"), pset, fit_iterations=20)
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
    data = client.upload(X, Y, dtype="float64")
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
    data = client.upload(X, Y)
    assert Evaluator(client, data, pset, loss="r2")(tree) == (-np.inf,)
    assert Evaluator(client, data, pset, loss="mae")(tree) == (np.inf,)


def test_an_error_names_the_tree(toolbox, pset, client):
    pset.addPrimitive(max, 2, name="gate")
    bad = creator.Individual.from_string("gate(ARG0, ARG1)", pset)
    data = client.upload(X, Y)
    good = toolbox.individual()
    with pytest.raises(InvalidArgumentError, match="'gate'") as caught:
        Evaluator(client, data, pset).score([good, bad])
    assert caught.value.expression == 1
    assert len(Evaluator(client, data, pset, operators={"gate": "max"}).score([good, bad])) == 2
