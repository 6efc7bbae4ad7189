"""Trees of programs of one's own, as lists of nodes in prefix order."""

import pytest

import warpfit
from warpfit.frontends import from_prefix
from warpfit.parse import parse


@pytest.mark.parametrize(
    ("tree", "names", "wanted"),
    [
        (["add", "x1", "mul", 2.5, "p1"], (), "x1 + 2.5*p1"),
        (["+", "flow rate", "t"], ("flow rate", "t"), "x1 + x2"),
        (["sin", "-", "x1", 3], (), "sin(x1 - 3)"),
        (["x2"], (), "x2"),
        (["where", "lt", "x1", 0, "neg", "x1", "x1"], (), "where(x1 < 0, -x1, x1)"),
        (["mul", "pi", "sin"], ("sin",), "pi*x1"),  # a column's name comes first
    ],
)
def test_nodes_are_those_of_the_text(tree, names, wanted):
    assert list(from_prefix([tree, tree], names)) == [parse(wanted)] * 2


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        (["add", "x1"], "STACK_LEFTOVERS"),
        ([], "STACK_LEFTOVERS"),
        (["foo", "x1"], "UNKNOWN_NAME"),
        (["x1 + x2"], "UNKNOWN_NODE"),
        ([None], "MISSING_VALUE"),
        ([["x1"]], "NOT_NUMBERS"),
    ],
)
def test_other_nodes_are_refused_with_their_tree(tree, reason):
    with pytest.raises(warpfit.InvalidArgumentError) as caught:
        from_prefix([["x1"], tree])
    assert caught.value.reason == reason
    assert caught.value.expression == 1


@pytest.mark.parametrize(
    "nodes", [["add", "x1", "x2"], ["x1"], [2.5], ["sin", 1.0], [["x1"], "x2"]]
)
def test_one_tree_in_the_place_of_a_list_of_trees_is_refused(nodes):
    with pytest.raises(warpfit.InvalidArgumentError, match="Give a list of trees"):
        from_prefix(nodes)
