"""Who writes which tensors."""

from hypothesis import given
from hypothesis import strategies as st

from raytf.checkpoint import codec


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 20), max_size=30), st.integers(1, 40))
def test_the_largest_goes_to_the_first_rank_with_least(sizes, world_size):
    split = [[] for _ in range(world_size)]
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        loads = [sum(sizes[n] for n in names) for names in split]
        split[loads.index(min(loads))].append(name)
    assert codec.shares(sizes, world_size) == split


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 20), max_size=30), st.integers(1, 40))
def test_ranks_without_tensors_are_the_last_ones(sizes, world_size):
    has = [bool(names) for names in codec.shares(sizes, world_size)]
    assert has == sorted(has, reverse=True)
