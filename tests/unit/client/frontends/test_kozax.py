"""Kozax trees against Kozax's own evaluator; Kozax is no dependency of the tests."""

from types import SimpleNamespace

import numpy as np
import pytest

from warpfit.errors import InvalidArgumentError
from warpfit.expressions import reference
from warpfit.frontends.kozax import from_kozax

#: As a strategy over + and sin with variables a and b names its nodes; 0 is empty, 1 a constant.
STRATEGY = SimpleNamespace(
    node_to_string={2: "+", 3: "sin", 4: "a", 5: "b"}, slots=[0, 0, 2, 1, 0, 0]
)
#: a + sin(0.5) with two empty rows, the root last.
TREE = np.array(
    [[0, -1, -1, 0], [0, -1, -1, 0], [1, -1, -1, 0.5], [3, 2, -1, 0], [4, -1, -1, 0], [2, 4, 3, 0]]
)


def test_a_tree_by_hand():
    assert str(from_kozax(TREE, STRATEGY)) == "x1 + sin(0.5)"
    assert str(from_kozax(TREE[None], STRATEGY)) == "x1 + sin(0.5)"
    assert str(from_kozax(TREE, STRATEGY, ("b", "a"))) == "x2 + sin(0.5)"
    assert str(from_kozax(TREE, STRATEGY, operators={"sin": "tanh"})) == "x1 + tanh(0.5)"


def test_what_is_not_known():
    with pytest.raises(InvalidArgumentError, match="'a'") as caught:
        from_kozax(TREE, STRATEGY, ("c",))
    assert caught.value.reason == "UNKNOWN_NAME"
    with pytest.raises(InvalidArgumentError, match="'sin'"):
        from_kozax(TREE, STRATEGY, operators={"sin": "wave"})
    with pytest.raises(InvalidArgumentError, match="one tree"):
        from_kozax(np.stack([TREE, TREE]), STRATEGY)


class Constant:
    """A fitness function as Kozax wants it."""

    n_objectives = 1

    def __call__(self, candidate, data, tree_evaluator):
        return 0.0


def test_random_trees_agree_with_kozax():
    jax = pytest.importorskip("jax")
    kozax = pytest.importorskip("kozax.genetic_programming")
    jnp = jax.numpy
    operators = [
        {"string": string, "fn": function, "arity": arity}
        for string, function, arity in (
            *(("+", jnp.add, 2), ("-", jnp.subtract, 2), ("*", jnp.multiply, 2)),
            *(("/", jnp.divide, 2), ("sin", jnp.sin, 1), ("exp", jnp.exp, 1)),
            *(("sqrt", jnp.sqrt, 1), ("max", jnp.maximum, 2), ("tanh", jnp.tanh, 1)),
        )
    ]
    strategy = kozax.GeneticProgramming(
        num_generations=1,
        population_size=200,
        fitness_function=Constant(),
        operator_list=operators,
        variable_list=[["u", "v", "w"]],
        layer_sizes=jnp.array([1]),
    )
    population = np.asarray(strategy.initialize_population(jax.random.PRNGKey(0)))
    candidates = population.reshape(-1, *population.shape[-3:])
    rows = np.random.default_rng(1).uniform(0.2, 2.0, (20, 3))
    evaluate = jax.jit(jax.vmap(strategy.tree_evaluator, in_axes=(None, 0)))
    assert len(candidates) >= 200
    for candidate in candidates:
        program = from_kozax(candidate, strategy, ("u", "v", "w"))
        wanted = np.asarray(evaluate(candidate, rows))[:, 0]
        got = reference.evaluate_program(program, rows.T)
        finite = np.isfinite(wanted) & (np.abs(wanted) < 1e5)
        np.testing.assert_allclose(got[finite], wanted[finite], rtol=1e-3, atol=1e-4)
