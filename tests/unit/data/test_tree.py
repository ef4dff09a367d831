"""Nested containers: one order of leaves, paths that people can read."""

from collections import namedtuple

import pytest

from raytf.data import tree


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, []),
        (1, [("", 1)]),
        ({"b": 2, "a": 1}, [("['a']", 1), ("['b']", 2)]),
        ([1, None, (2,)], [("[0]", 1), ("[2][0]", 2)]),
        ({"a": [{"c": 3}]}, [("['a'][0]['c']", 3)]),
        ({}, []),
    ],
)
def test_flatten(value, expected):
    assert tree.flatten(value) == expected


def test_flatten_begins_paths_with_a_name():
    assert tree.flatten({"a": 1}, "x") == [("x['a']", 1)]


def test_unflatten_keeps_kinds_and_the_order_of_keys():
    template = {"b": (0, None), "a": [0]}
    built = tree.unflatten(template, ["a0", "b0"])
    assert built == {"b": ("b0", None), "a": ["a0"]}
    assert list(built) == ["b", "a"]


def test_map_leaves():
    assert tree.map_leaves(lambda v: v + 1, (1, None, {"k": [2]})) == (2, None, {"k": [3]})


def test_a_named_tuple_stays_one():
    Pair = namedtuple("Pair", "first second")
    assert tree.map_leaves(lambda v: v + 1, Pair(1, {"k": 2})) == Pair(2, {"k": 3})
    assert tree.merged(Pair(tree.Rows([1]), 2), str) == Pair("1", 2)
