"""Kozax trees against Kozax's own evaluator; Kozax is no dependency of the tests."""

from types import SimpleNamespace

import numpy as np
import pytest

from warpfit.errors import InvalidArgumentError
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
