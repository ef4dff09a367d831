"""The hash of the weights: which bits it sees, and that a device can make it without the host."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorflow.python.framework import kernels

from raytf.checkpoint.replicas import Digest
from raytf.distributed.encoding.digests import FOLD_ROWS, FOLD_WIDTH, columns, device_sum, fold_factors, folded
from raytf.distributed.step_agreement import DEVICE_BIT
from raytf.distributed.step_digest import DigestKind

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


def mixed(place: int) -> int:
    x = (place + 1) * 0x9E3779B97F4A7C15 & MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def reference(arrays) -> int:
    """The same in Python's own integers."""
    total, place = 0, 0
    for array in arrays:
        words = np.ascontiguousarray(array).reshape(-1).view({1: "u1", 2: "u2", 4: "u4", 8: "u4"}[array.itemsize])
        for word in words.tolist():
            total, place = total + word * mixed(place) & MASK, place + 1
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


FOLDED = RNG.integers(-(1 << 31), 1 << 31, FOLD_WIDTH * 300 + 5).astype(np.int32)


def fold(values: np.ndarray) -> bytes:
    return folded(tf.constant(values)).numpy().tobytes()


@pytest.mark.parametrize("count", [1 << 14, 64 * 257, 64 * 258 + 63, 64 * FOLD_ROWS, 64 * (FOLD_ROWS + 2) + 7])
def test_whole_numbers_are_folded_as_it_is_said(count):
    values = RNG.integers(-(1 << 31), 1 << 31, count).astype(np.int32)
    parts, left = [], values
    while (rows := min(FOLD_ROWS, (len(left) // 64 - 1) | 1)) > 1:  # the largest odd number
        matrix = left[: rows * 64].reshape(rows, 64).astype(np.int64)
        parts.append((matrix * fold_factors()[:rows, None].astype(np.int64)).sum(0).astype(np.int32))  # modulo 2^32
        left = left[rows * 64 :]
    expected = np.concatenate([*parts, left])
    assert fold(values) == expected.tobytes()
    assert len(expected) < 64 * 5


def test_the_factors_of_the_fold_are_odd_and_mixed():
    assert [int(each) & 0xFFFFFFFF for each in fold_factors()[:3]] == [mixed(place) >> 32 | 1 for place in range(3)]
    assert (fold_factors() & 1).all()
    assert len(set(fold_factors().tolist())) > FOLD_ROWS - 10


def test_digests_of_older_runs_are_of_all_bytes():
    hashed = tf.raw_ops.Fingerprint(data=FOLDED[None], method="farmhash64").numpy()
    assert columns([tf.constant(FOLDED)], DigestKind.WHOLE).numpy().tobytes() == hashed.tobytes()
    hashed = tf.raw_ops.Fingerprint(data=folded(tf.constant(FOLDED)), method="farmhash64").numpy()
    assert columns([tf.constant(FOLDED)], DigestKind.FOLDED).numpy().tobytes() == hashed.tobytes()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, len(FOLDED) - 1), st.integers(0, 31))
def test_every_flipped_bit_of_whole_numbers_is_seen(element, bit):
    flipped = FOLDED.copy()
    flipped.view(np.uint32)[element] ^= np.uint32(1 << bit)
    assert fold(flipped) != fold(FOLDED)


@pytest.mark.parametrize(
    "change",
    [
        lambda v: -v,
        lambda v: v[::-1],
        lambda v: np.roll(v, 64),
        lambda v: v ^ np.int32(-(1 << 31)),
        lambda v: v ^ np.where(np.arange(len(v)) % 16 == 3, np.int32(-(1 << 31)), np.int32(0)),
        lambda v: v ^ np.where(np.arange(len(v)) % 8 == 3, np.int32(1 << 30), np.int32(0)),
        lambda v: np.where(np.arange(len(v)) < 640, 0, v).astype(np.int32),
        lambda v: np.concatenate([v[64:128], v[:64], v[128:]]),
    ],
    ids=["negated", "backwards", "shifted by a row", "sign bits", "a lane's sign bits", "a lane", "zeros", "two rows"],
)
def test_faults_of_many_whole_numbers_are_seen(change):
    assert fold(change(FOLDED)) != fold(FOLDED)


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
