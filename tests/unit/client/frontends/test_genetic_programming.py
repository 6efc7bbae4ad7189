"""Programs of DEAP and gplearn against their own evaluators; DEAP's algorithms with `Evaluator`."""

import functools
import math
import operator
import random
import re
from types import SimpleNamespace

import numpy as np
import pytest
from deap import algorithms, base, creator, gp, tools
from gplearn import functions
from gplearn._program import _Program

import warpfit.testing
from support.refusals import refused
from warpfit.expressions import reference
from warpfit.frontends import as_population, as_program
from warpfit.frontends.deap import Evaluator, from_deap
from warpfit.frontends.gplearn import from_gplearn, population
from warpfit.parse import parse


def set_of(*functions, inputs=3):
    """A primitive set of functions, each with its arity and, where it has another one, its name."""
    pset = gp.PrimitiveSet("MAIN", inputs)
    for each in functions:
        pset.addPrimitive(*each)
    return pset


def tree(text, pset):
    return gp.PrimitiveTree.from_string(text, pset)


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
    pset = set_of(
        *((operator.add, 2), (operator.sub, 2), (operator.mul, 2), (protectedDiv, 2)),
        *((operator.neg, 1), (math.cos, 1), (math.sin, 1), (math.tanh, 1), (math.atan, 1)),
        *((analytic_quotient, 2), (max, 2), (min, 2), (operator.lt, 2), (operator.ge, 2)),
        *((if_then_else, 3), (math.fabs, 1), (math.floor, 1), (operator.abs, 1)),
        *((operator.not_, 1), (operator.eq, 2)),
    )
    pset.addEphemeralConstant("rand101", functools.partial(random.uniform, -1, 1))
    pset.addTerminal(math.pi, "pi")
    pset.addTerminal(0.5)
    return pset


def array_set():
    unary = (np.negative, np.sin, np.exp, np.log, np.absolute, np.square, np.sqrt, np.arctan)
    unary += (np.cbrt, np.log1p, np.reciprocal, np.sign)
    binary = (np.add, np.subtract, np.multiply, np.true_divide, np.maximum, np.minimum, np.power)
    pset = set_of(*((each, each.nin, f"v_{each.__name__}") for each in (*unary, *binary)))
    pset.addEphemeralConstant("vrand", functools.partial(random.uniform, -1, 1))
    return pset


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("make", [scalar_set, array_set])
def test_random_trees_agree_with_deap(make, seed):
    columns = np.random.default_rng(4).normal(0, 2, size=(3, 40))
    columns[:, :5] = [[0, 1, -1, 0, 2], [0, 0, 1, -1, 0.5], [1, 0, 0, 2, -2]]
    random.seed(seed)
    pset = make()
    original = gp.PrimitiveTree(gp.genHalfAndHalf(pset, min_=1, max_=5))
    function = gp.compile(original, pset)
    with np.errstate(all="ignore"):
        if make is scalar_set:
            wanted = [float(function(*row)) for row in columns.T.tolist()]
        else:
            wanted = np.broadcast_to(function(*columns), columns.shape[1])
    got = reference.evaluate_program(from_deap(original, pset), columns)
    np.testing.assert_allclose(got, wanted, rtol=1e-12 if make is scalar_set else 0)


def test_without_the_primitive_set_names_decide():
    pset = scalar_set()
    original = tree("add(protectedDiv(ARG0, ARG2), sin(0.25))", pset)
    assert str(as_program(original)) == "zdiv(x1, x3) + sin(0.25)"
    named = tree("add(pi, ARG0)", pset)
    assert str(from_deap(named, pset)) == "pi + x1"
    refused("UNKNOWN_TERMINAL: .*pi", as_program, named)
    pset.renameArguments(ARG0="bmi", ARG1="age")
    renamed = tree("sub(bmi, mul(age, ARG2))", pset)
    assert str(from_deap(renamed, pset)) == str(as_program(renamed)) == "x1 - x2 * x3"
    assert str(as_program(renamed, ("age", "sex", "dose", "bmi"))) == "x4 - x1 * x3"


def test_operators_of_the_user():
    pset = scalar_set()
    pset.addPrimitive(lambda a, b: a if b else 0, 2, name="gate")
    original = tree("gate(ARG0, ARG1)", pset)
    refused("UNKNOWN_FUNCTION: .*'gate'", from_deap, original, pset)
    assert str(from_deap(original, pset, {"gate": "and"})) == "x1 and x2"
    assert str(from_deap(tree("sin(ARG0)", pset), pset, {"sin": "tanh"})) == "tanh(x1)"
    refused("WRONG_ARITY: .*2 operands", from_deap, original, pset, {"gate": "neg"})


def protected_by_a_threshold(left, right):
    return left / right if abs(right) > 1e-6 else 1.0


def protected_in_arrays(left, right):
    with np.errstate(all="ignore"):
        quotient = np.divide(left, right)
    quotient[np.asarray(right) == 0] = 1
    return quotient


@pytest.mark.parametrize(
    ("name", "arity", "function", "meaning"),
    [
        *(("protectedDiv", 2, protectedDiv, None), ("protectedDiv", 2, protected_in_arrays, None)),
        ("protectedDiv", 2, protected_by_a_threshold, "protectedDiv"),
        *(("div", 2, protectedDiv, "div"), ("add", 2, functools.partial(operator.add), None)),
        *(("log", 1, lambda a: math.log(abs(a)) if a else 0.0, "log"), ("sinc", 1, np.sinc, "sin")),
        ("mod", 2, lambda a, b: a - b * math.floor(a / b), "mod"),
        *(("remainder", 2, math.remainder, "zdiv"), ("remainder", 2, np.remainder, None)),
        ("round", 1, lambda a: math.floor(a + 0.5), "floor"),
        ("if_then_else", 3, if_then_else, None),
        ("if_then_else", 3, lambda a, b, c: b if a > 0 else c, "where"),
        *(("round", 1, round, None), ("lgamma", 1, math.lgamma, None)),
    ],
)
def test_functions_that_are_not_the_operator_of_their_name(name, arity, function, meaning):
    pset = set_of((function, arity, name))
    original = tree(f"{name}({', '.join(f'ARG{k}' for k in range(arity))})", pset)
    if meaning is None:
        assert from_deap(original, pset).variables == arity
        return
    refused(f"OTHER_FUNCTION: .*{name}", from_deap, original, pset)
    assert len(from_deap(original, pset, {name: meaning}))


@pytest.mark.parametrize("name", ["safeDiv", "protected_division"])
def test_divisions_that_differ_between_programs_need_their_function(name):
    """Where the divisor is 0 some return 1, and others 0."""
    text, wanted = f"{name}(ARG0, ARG1)", parse("zdiv(x1, x2)")
    one = set_of((lambda a, b: a / b if b else 1.0, 2, name))
    original = tree(text, one)
    assert "operators=" in refused("different things", from_deap, original).remedy
    assert from_deap(original, one) == from_deap(original, operators={name: "zdiv"}) == wanted
    zero = set_of((lambda a, b: a / b if b else 0.0, 2, name))
    refused("gives 0", lambda: from_deap(tree(text, zero), zero))


@pytest.mark.parametrize("name", ["ADF0", "twice"])
def test_automatically_defined_functions_are_refused(name):
    inner = set_of((operator.add, 2), inputs=1)
    inner.name, pset = name, set_of(inputs=1)
    pset.addADF(inner)
    original = tree(f"{name}(ARG0)", pset)
    known = None if name == "ADF0" else pset  # the name alone tells it
    refused(f"ADF_UNSUPPORTED: .*{name}", from_deap, original, known)
    refused("ADF_UNSUPPORTED", from_deap, [original, original], pset)


def test_deep_trees_wide_sums_and_terminals_that_are_no_numbers():
    pset = scalar_set()
    neg, argument = pset.mapping["neg"], pset.mapping["ARG0"]
    assert len(from_deap(gp.PrimitiveTree([neg] * 20_000 + [argument]), pset)) == 20_001
    wide = set_of((lambda *terms: sum(terms), 3, "add"))
    original = tree("add(ARG0, add(ARG1, ARG1, 2), ARG2)", wide)
    assert str(as_program(original)) == "x1 + (x2 + x2 + 2) + x3"
    pset = set_of((operator.neg, 1))
    pset.addTerminal(object(), "thing")
    refused("thing", lambda: from_deap(tree("neg(thing)", pset), pset))
    refused("no number", from_deap, [SimpleNamespace(arity=0, value=None, name="None")])


ROWS = np.random.default_rng(0).uniform(-2, 2, (30, 2))
TARGET = ROWS[:, 0] ** 2 - 3.5 * ROWS[:, 1]


@pytest.fixture
def pset():
    pset = set_of((operator.add, 2), (operator.sub, 2), (operator.mul, 2), (np.log, 1), inputs=2)
    pset.addEphemeralConstant("number", functools.partial(random.uniform, -1, 1))
    pset.addTerminal(2.0)
    pset.addTerminal(3.5, "slope")
    return pset


@pytest.fixture
def evaluator(server, pset):
    with warpfit.testing.client(server) as client:
        data = client.upload(ROWS, TARGET, dtype="float64")
        yield lambda **options: Evaluator(client, data, pset, **options)


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


def by_deap(tree, pset):
    with np.errstate(all="ignore"):
        error = np.mean((gp.compile(tree, pset)(*ROWS.T) - TARGET) ** 2)
    return error if np.isfinite(error) else np.inf


def test_a_generation_is_one_call_and_deaps_algorithms_run_unchanged(
    toolbox, pset, evaluator, server
):
    evaluate = evaluator()
    toolbox.register("evaluate", evaluate)
    toolbox.register("map", evaluate.map)
    population, calls = toolbox.population(n=300), len(server.calls)
    fitnesses = list(toolbox.map(toolbox.evaluate, population))
    assert server.calls[calls:] == ["Evaluate"]
    wanted = [by_deap(tree, pset) for tree in population]
    np.testing.assert_allclose([fitness for (fitness,) in fitnesses], wanted, rtol=1e-9)
    assert np.isinf(wanted).any()
    assert toolbox.evaluate(population[0]) == pytest.approx((wanted[0],))
    calls = len(server.calls)
    bred, _ = algorithms.eaSimple(population[:40], toolbox, 0.5, 0.2, ngen=3, verbose=False)
    assert server.calls[calls:] == ["Evaluate"] * 4
    found = [tree.fitness.values[0] for tree in bred]
    assert found == pytest.approx([by_deap(tree, pset) for tree in bred])


def test_map_maps_everything_else_and_terminals_of_the_set_are_not_fitted(toolbox, pset, evaluator):
    evaluate = evaluator(fit_iterations=20, rows=slice(0, 10))
    tree = creator.Individual.from_string("mul(2.0, mul(slope, ARG1))", pset)
    assert evaluate(tree) == pytest.approx((np.mean((7.0 * ROWS[:10, 1] - TARGET[:10]) ** 2),))
    assert [node.name for node in tree] == ["mul", "2.0", "mul", "slope", "ARG1"]
    assert list(evaluate.map(abs, [-1, 2])) == [1, 2]
    assert list(evaluate.map(operator.add, [1, 2], [3, 4])) == [4, 6]
    assert evaluate.map(evaluate, []) == []


def test_fitted_constants_stay_in_their_tree(toolbox, pset, evaluator, server):
    number = next(c for c in pset.terminals[object] if isinstance(c, gp.MetaEphemeral))
    tree = creator.Individual.from_string("sub(mul(ARG0, ARG0), mul(ARG0, ARG1))", pset)
    place = 5
    tree[place] = number()
    twin = creator.Individual(tree)
    before, evaluate = twin[place].value, evaluator(fit_iterations=20)
    ((fitness,),) = evaluate.map(evaluate, [tree])
    assert fitness < 1e-12 and tree[place].value == pytest.approx(3.5)
    assert by_deap(tree, pset) == pytest.approx(0.0, abs=1e-12)
    assert twin[place].value == before and server.calls[-1] == "Optimize"


def test_fits_are_never_worse(toolbox, pset, evaluator):
    population = toolbox.population(n=100)
    plain = np.ravel(evaluator().score(population))
    fitted = np.ravel(evaluator(fit_iterations=5).score(population))
    assert (fitted <= plain * (1 + 1e-9)).all() and (fitted < plain - 1e-6).sum() > 5
    wanted = [by_deap(tree, pset) for tree in population]
    np.testing.assert_allclose(fitted, wanted, rtol=1e-6, atol=1e-9)


def test_scores_fail_low_and_an_error_names_the_tree(toolbox, pset, evaluator):
    tree = creator.Individual.from_string("log(sub(ARG0, ARG0))", pset)
    assert evaluator(loss="r2")(tree) == (-np.inf,)
    assert evaluator(loss="mae")(tree) == (np.inf,)
    pset.addPrimitive(max, 2, name="gate")
    bad = creator.Individual.from_string("gate(ARG0, ARG1)", pset)
    both = [toolbox.individual(), bad]
    assert refused("'gate'", evaluator().score, both).expression == 1
    assert len(evaluator(operators={"gate": "max"}).score(both)) == 2


def test_an_evaluator_checks_and_shows_what_it_is_made_of(pset, evaluator):
    pset.addPrimitive(max, 2, name="gate")
    shown = repr(evaluator(fit_iterations=3))
    assert re.fullmatch("<Evaluator of mse on <UploadedData.*>, 3 iterations of fits>", shown)
    refused("mean max", evaluator, operators={"gate": "maxx"})
    refused("mean gate", evaluator, operators={"gat": "max"})
    refused("mean loss=", evaluator, losss="mse")
    evaluator(operators={"of_another_pset": "max"})
    refused("data is <class 'tuple'>", Evaluator, evaluator().client, (ROWS, TARGET), pset)


FEATURES = 4
ALL = [*functions._function_map.values(), functions.sig1]


def program(nodes=None, seed=0, function_set=ALL):
    arities = {}
    for function in function_set:
        arities.setdefault(function.arity, []).append(function)
    usual = {"init_depth": (1, 7), "init_method": "half and half", "const_range": (-2.0, 2.0)}
    usual |= {"metric": None, "p_point_replace": 0.05, "parsimony_coefficient": 0.001}
    own = {"random_state": np.random.RandomState(seed), "program": nodes, "n_features": FEATURES}
    return _Program(function_set=function_set, arities=arities, **usual, **own)


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
        refused(f"{wanted}: .*{name}", from_gplearn, original, operators)
