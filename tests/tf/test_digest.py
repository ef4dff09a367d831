"""The hash of the weights: which bits it sees, and that a device can make it without the host."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorflow.python.framework import kernels

from raytf.checkpoint.digest import Digest
from raytf.distributed.digests import device_sum
from raytf.distributed.replica_agreement import DEVICE_BIT

MASK = (1 << 64) - 1
RNG = np.random.default_rng(0)
ARRAYS = [
    RNG.standard_normal((7, 5)).astype(np.float32),
    RNG.standard_normal(9).astype(np.float16),
    RNG.standard_normal(3),
    RNG.integers(-5, 5, 6),
    np.array([True, False, True]),
    np.float32(2.5),
    np.zeros((0, 3), np.float32),
]


def reference(arrays) -> int:
    """The same in Python's own integers."""
    total, place = 0, 0
    for array in arrays:
        words = np.ascontiguousarray(array).reshape(-1).view({1: "u1", 2: "u2", 4: "u4", 8: "u4"}[array.itemsize])
        for word in words.tolist():
            x = (place + 1) * 0x9E3779B97F4A7C15 & MASK
            x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
            x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
            total, place = total + word * (x ^ x >> 31) & MASK, place + 1
    return total


def test_the_device_s_law_is_what_it_is_said_to_be():
    variables = [tf.Variable(a) for a in ARRAYS]
    assert Digest(variables, on_device=True).value() == reference(ARRAYS) & (DEVICE_BIT - 1) | DEVICE_BIT
    assert Digest(variables).value() < 1 << 32


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 34), st.integers(0, 31), st.booleans())
def test_every_flipped_bit_is_seen_and_one_that_is_flipped_back_is_forgotten(element, bit, on_device):
    variable = tf.Variable(ARRAYS[0])
    digest = Digest([variable], on_device)
    before = digest.value()
    flipped = ARRAYS[0].copy()
    flipped.reshape(-1).view(np.uint32)[element] ^= np.uint32(1 << bit)
    variable.assign(flipped)
    assert digest.value() != before
    variable.assign(ARRAYS[0])
    assert digest.value() == before


@pytest.mark.parametrize("on_device", [True, False])
def test_values_that_change_places_are_seen(on_device):
    variable = tf.Variable(ARRAYS[0])
    digest = Digest([variable], on_device)
    before = digest.value()
    variable.assign(ARRAYS[0][::-1])
    assert digest.value() != before
    variable.assign(-ARRAYS[0])  # the highest bit of each
    assert digest.value() != before


@pytest.mark.parametrize("most", [1, 4, 35, 36])
def test_pieces_give_the_hash_of_the_whole(most):
    told = device_sum([tf.constant(a) for a in ARRAYS], most)
    assert int(told) & MASK == reference(ARRAYS)


def kept_on_host(operation) -> bool | None:
    """Whether a GPU would keep what an operation gives in the host's memory; None where it has no kernel for a GPU."""
    for kernel in kernels.get_registered_kernels_for_op(operation.type).kernel:
        if kernel.device_type in ("GPU", "DEFAULT") and all(
            operation.get_attr(c.name).as_datatype_enum in c.allowed_values.list.type for c in kernel.constraint
        ):
            outputs = {o.name for o in operation.op_def.output_arg}
            return bool(outputs & set(kernel.host_memory_arg))
    return None


def test_no_tensor_goes_through_the_host():
    """Read from the kernels that TensorFlow's own build registers for GPUs; there is no GPU here."""
    variables = [tf.Variable(np.zeros((100, 100), dtype)) for dtype in ("f4", "f2", "f8", "i8")]
    variables.append(tf.Variable(tf.zeros((100, 100), tf.bfloat16)))
    traced = tf.function(lambda: device_sum([v.read_value() for v in variables], 9000), autograph=False)
    graph = traced.get_concrete_function().graph
    sizes = (None, 1000, 2000, 9000, 10_000, 18_000)
    large = [o for o in graph.get_operations() if any(t.shape.num_elements() in sizes for t in o.outputs)]
    large = [o for o in large if o.type != "Placeholder"]
    assert {o.type for o in large} >= {"ReadVariableOp", "Cast", "Mul", "BitwiseXor", "RightShift", "Range"}
    assert {o.type: kept_on_host(o) for o in large if kept_on_host(o) is not False} == {}
    sums = [o for o in graph.get_operations() if o.type == "Sum"]
    assert sums
    assert [kept_on_host(o) for o in sums] == [False] * len(sums)
