"""A tree taken apart can be put together again."""

from hypothesis import given
from hypothesis import strategies as st

from raytf.data import tree

KEYS = st.text(max_size=3)
TREES = st.recursive(
    st.none() | st.integers(),
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@given(TREES)
def test_flatten_and_unflatten_are_inverse(value):
    assert tree.unflatten(value, [leaf for _, leaf in tree.flatten(value)]) == value


@given(TREES)
def test_paths_are_distinct(value):
    paths = [path for path, _ in tree.flatten(value)]
    assert len(paths) == len(set(paths))


@given(TREES)
def test_structure_does_not_depend_on_leaves(value):
    marked = tree.map_leaves(lambda leaf: 2 * leaf, value)
    assert [path for path, _ in tree.flatten(marked)] == [path for path, _ in tree.flatten(value)]
