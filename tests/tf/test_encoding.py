"""Tensors in blocks become the very numbers that they become one at a time."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from raytf.distributed.allreduce.reduction import of_kinds
from raytf.distributed.encoding.fixed_point import SIZE, Blocks, EachTensor, InBlocks, tree
from raytf.distributed.encoding.wire import DEVICE, HOST, WireLayout

SHAPES = st.lists(
    st.sampled_from([(), (0,), (1,), (3, 2), (SIZE,), (SIZE + 1,), (2, SIZE), (SIZE - 1,), (3, SIZE, 2)]),
    min_size=1,
    max_size=5,
)


def drawn(shapes: list[tuple[int, ...]], seed: int) -> list[tf.Tensor]:
    """Numbers of many magnitudes, another one for each tensor."""
    rng = np.random.default_rng(seed)
    return [tf.constant((rng.normal(size=s) * 2.0 ** rng.integers(-60, 60)).astype(np.float32)) for s in shapes]


def layout_of(shapes: list[tuple[int, ...]]) -> WireLayout:
    return WireLayout(shapes, [tf.float32] * len(shapes))


@settings(deadline=None, max_examples=30)
@given(SHAPES, st.integers(0, 5), st.integers(0, 2**16), st.sampled_from([None, 40, 4000]))
def test_blocks_and_single_tensors_give_the_same_numbers(shapes, compressed, seed, bucket):
    layout, compressed = layout_of(shapes), min(compressed, len(shapes))
    tensors, weight = drawn(shapes, seed), tf.constant(0.25)
    exponents = np.array([np.frexp(np.abs(t.numpy()).max(initial=0))[1] for t in tensors])
    bits = np.where(np.arange(len(shapes)) < compressed, 12, 28)
    scales = tf.constant((2.0 ** (bits - exponents)).astype(np.float32))
    steps = tf.constant((1 / scales.numpy()).astype(np.float32))
    found = []
    for make, words in ((EachTensor, HOST), (InBlocks, DEVICE)):
        encoding = make(layout, compressed, 2.0**12 - 1, words, of_kinds(layout.sizes, compressed, bucket))
        encoded, largest = encoding.encode(tensors, weight, scales)
        assert [tuple(e.shape) for e in encoded] == encoding.shapes
        found.append((largest.numpy(), [t.numpy() for t in encoding.decode(encoded, steps)]))
    (largest, decoded), (largest_in_blocks, decoded_in_blocks) = found
    np.testing.assert_array_equal(largest, largest_in_blocks)
    for tensor, one, other in zip(tensors, decoded, decoded_in_blocks, strict=True):
        assert one.shape == other.shape == tensor.shape
        np.testing.assert_array_equal(one, other)
        whole = tensor.numpy()
        assert np.abs(one - 0.25 * whole).max(initial=0) <= np.abs(whole).max(initial=0) * 2.0**-11
    assert any(np.any(one) for one in decoded) or not any(size for size in layout.sizes)


@pytest.mark.parametrize(("make", "words"), [(EachTensor, HOST), (InBlocks, DEVICE)])
def test_a_tensor_of_unknown_shape_is_encoded_like_any_other(make, words):
    layout = layout_of([(3, 2)])
    encoding = make(layout, 0, 2.0**12 - 1, words, of_kinds(layout.sizes, 0, None))

    def encode(tensor: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
        return encoding.encode([tensor], tf.constant(1.0), tf.constant([16.0]))

    (tensor,) = drawn([(3, 2)], 0)
    traced = tf.function(encode, input_signature=[tf.TensorSpec(None)], autograph=False)
    for found, expected in zip(tf.nest.flatten(traced(tensor)), tf.nest.flatten(encode(tensor)), strict=True):
        assert np.any(expected)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, SIZE, SIZE + 6])
def test_what_is_not_finite_is_seen_in_its_own_tensor_alone(wrong, place):
    blocks = Blocks([(4,), (SIZE + 7,), (5,), (0,)])
    tensors = [np.full(shape, -3.0, np.float32) for shape in ((4,), (SIZE + 7,), (5,), (0,))]
    tensors[1][place] = wrong
    found = blocks.largest(blocks.lay([tf.constant(t) for t in tensors])).numpy()
    assert not np.isfinite(found[1])
    assert found[[0, 2, 3]].tolist() == [3.0, 3.0, 0.0]


def test_the_graph_in_blocks_does_not_grow_per_tensor_as_the_other_one_does():
    def operations(make, words, tensors: int) -> int:
        layout = layout_of([(7, 3)] * tensors)
        encoding = make(layout, 0, 1.0, words, of_kinds(layout.sizes, 0, None))

        def both(*values):
            encoded, _ = encoding.encode(values, tf.constant(1.0), tf.ones([tensors]))
            return encoding.decode(encoded, tf.ones([tensors]))

        traced = tf.function(both).get_concrete_function(*[tf.TensorSpec([7, 3])] * tensors)
        cheap = ("Const", "Placeholder", "Reshape", "Identity", "Fill", "NoOp", "Shape")  # free, or folded away
        graph = traced.graph.as_graph_def()  # with the functions that it calls
        nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
        return sum(node.op not in cheap for node in nodes)

    assert operations(InBlocks, DEVICE, 40) <= operations(InBlocks, DEVICE, 2) + 2
    assert operations(EachTensor, HOST, 40) > operations(EachTensor, HOST, 2) + 38 * 5


@pytest.mark.parametrize("counts", [[1], [300], [0, 70_000, 3, 0], [256, 257, 65_536, 65_537]])
def test_the_largest_of_each_row_is_found_in_few_levels(counts):
    values = np.random.default_rng(0).normal(size=sum(counts)).astype(np.float32) ** 2
    found = np.append(values, 0)
    levels = tree(counts)
    for level in levels:
        found = found[level].max(1)
    ends = np.cumsum(counts)
    want = [values[end - count : end].max(initial=0) for end, count in zip(ends, counts, strict=True)]
    assert found.tolist() == [float(each) for each in want]
    assert len(levels) <= 3
