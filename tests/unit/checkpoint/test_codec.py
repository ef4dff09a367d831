"""Who writes which tensors; tensors as a file: the pieces are the same bytes, and what is broken is found."""

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from raytf.checkpoint import codec

TENSORS = {
    "kernel": np.arange(3_000_001, dtype=np.float32),
    "ü": np.zeros((0, 4)),
    "turned": np.arange(12).reshape(3, 4).T,
    "mask": np.array(True),
    "half": np.array([1.5], ml_dtypes.bfloat16),
}


@pytest.mark.parametrize("more", [{}, {"complex": np.array([1j], np.complex64)}])
def test_pieces_are_the_file(more):
    tensors = TENSORS | more
    data = b"".join(codec.parts(tensors))
    assert data == codec.encode(tensors)
    if more:  # safetensors itself writes it then, and does not read the half ones
        tensors.pop("half")
        data = b"".join(codec.parts(tensors))
    for name, array in codec.decode(data).items():
        assert (array.dtype, array.shape) == (tensors[name].dtype, tensors[name].shape)
        assert array.tobytes() == np.ascontiguousarray(tensors[name]).tobytes()


def test_pieces_are_the_header_of_safetensors_itself():
    numbers = {"a": np.ones((3, 7), np.float32), "b": np.arange(5), "c": np.array(True)}
    assert b"".join(codec.parts(numbers)) == safetensors.numpy.save(numbers)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16", "complex64"])
@pytest.mark.parametrize("values", [[np.nan, 1], [np.inf, 1], [np.inf, -np.inf]])
def test_what_is_not_finite_is_found(dtype, values):
    kind = getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype
    tensors = {"good": np.ones(3, np.float32), "bad": np.array(values).astype(kind)}
    assert codec.broken(tensors, iter(tensors)) == "bad"
    assert codec.broken(tensors, iter(["good"])) is None


def test_numbers_too_large_for_their_sum_are_finite():
    large = {"x": np.full(100, np.finfo(np.float32).max), "n": np.arange(3)}
    assert codec.broken(large, iter(large)) is None


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
