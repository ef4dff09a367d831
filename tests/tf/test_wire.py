"""Words that travel between workers: sums of words are words of the sums, on CPUs as on GPUs."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given, settings
from hypothesis import strategies as st

from raytf.distributed.allreduce.reduction import FixedPointReduction, everyones, packed
from raytf.distributed.encoding.wire import DEVICE, HOST, WireLayout, WorkerPart, join, narrow, part, widen, zeros

LEAST, MOST = -(2**31), 2**31 - 1
KINDS = pytest.mark.parametrize("dtype", [np.int32, np.uint32], ids=["on the host", "on the device"])


def added(parts: list[np.ndarray]) -> np.ndarray:
    """The sum of the words of each rank's numbers [n], as numbers again."""
    count = len(parts[0])
    total = sum(widen(tf.constant(p.view(np.uint32))).numpy() for p in parts)
    assert total.dtype == np.int64
    assert total.shape == (-(-count // 2),)  # 4 bytes for each number
    return narrow(tf.constant(total), count).numpy().view(np.int32)


@st.composite
def numbers(draw: st.DrawFn, bits: int, most_ranks: int) -> np.ndarray:
    """[W, n] int32 whose sums over any ranks are within so many bits, sign included: often at the very bound."""
    ranks, count = draw(st.integers(1, most_ranks)), draw(st.integers(1, 9))
    most = 2 ** (bits - 1) // ranks
    value = st.integers(-most, most - 1) | st.sampled_from([-most, most - 1, 0, -1])
    rows = draw(st.lists(st.lists(value, min_size=count, max_size=count), min_size=ranks, max_size=ranks))
    return np.array(rows, np.int32)


@settings(deadline=None, max_examples=40)
@given(values=numbers(32, 100))
def test_a_sum_of_words_is_the_word_of_the_sums(values):
    np.testing.assert_array_equal(added(list(values)), values.sum(0, dtype=np.int64))


@pytest.mark.parametrize("ranks", [1, 3, 64, 1000])
@pytest.mark.parametrize("count", [1, 2, 1001])
def test_words_of_any_number_of_ranks_hold_all_of_32_bits(ranks, count):
    rng = np.random.default_rng(ranks * count)
    most = 2**31 // ranks
    kinds = np.array([-most, most - 1, 0, -1, 1])
    values = [rng.choice(kinds, count).astype(np.int32) for _ in range(min(ranks, 8))]
    values = [values[i % len(values)] for i in range(ranks)]
    np.testing.assert_array_equal(added(values), np.sum(values, 0, dtype=np.int64))


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=7), st.integers(0, 4), st.integers(1, 4))
@settings(deadline=None, max_examples=40)
def test_any_bits_arrive_as_they_are_where_the_others_send_zeros(bits, rank, more):
    mine, others = np.array(bits, np.uint32), np.zeros(len(bits), np.uint32)
    parts = [others] * rank + [mine] + [others] * more
    np.testing.assert_array_equal(added(parts).view(np.uint32), mine)


@KINDS
@settings(deadline=None, max_examples=40)
@given(values=numbers(16, 64))
def test_joined_words_add_as_their_values_do(dtype, values):
    count = values.shape[1]
    words = sum(join(tf.constant(row.view(dtype))).numpy() for row in values)
    assert words.shape == (-(-count // 2),)
    np.testing.assert_array_equal(part(tf.constant(words), count).numpy().view(np.int32), values.sum(0))


@KINDS
@pytest.mark.parametrize("extreme", [-(2**15), 2**15 - 1])
def test_joined_words_hold_all_of_16_bits(dtype, extreme):
    values = np.array([extreme, 0, -1, extreme], np.int32).view(dtype)
    np.testing.assert_array_equal(part(join(tf.constant(values)), 4).numpy(), values)


def test_both_ways_join_to_the_same_bits():
    values = np.random.default_rng(0).integers(-(2**13), 2**13, 9).astype(np.int32)
    on_device = join(tf.constant(values.view(np.uint32))).numpy()
    np.testing.assert_array_equal(join(tf.constant(values)).numpy().view(np.uint32), on_device)


@settings(deadline=None, max_examples=40)
@given(values=numbers(16, 8).map(lambda values: np.maximum(values, -(2**15 - 1) // len(values) + 1)))
@example(np.array([[-16383, 0, 0, 0], [-16384, 0, -1, 0]], np.int32))
def test_four_numbers_of_16_bits_travel_in_an_int64(values):
    """Of sums above -2**15, as clipped gradients have."""
    count = values.shape[1]
    words = sum(widen(join(tf.constant(row.view(np.uint32)))).numpy() for row in values)
    assert words.shape == (-(-count // 4),)
    found = part(narrow(tf.constant(words), -(-count // 2)), count).numpy().view(np.int32)
    np.testing.assert_array_equal(found, values.sum(0))


@settings(deadline=None, max_examples=40)
@given(
    shapes=st.lists(st.lists(st.integers(0, 3), max_size=3).map(tuple), min_size=1, max_size=5),
    small=st.integers(0, 5),
    ranks=st.integers(1, 4),
    seed=st.integers(0, 2**20),
)
def test_both_ways_tell_the_same_sums(shapes, small, ranks, seed):
    layout, rng = WireLayout(shapes, [tf.float32] * len(shapes)), np.random.default_rng(seed)
    small = min(small, len(shapes))
    most = [2**15 // ranks if i < small else 2**31 // ranks for i in range(len(shapes))]
    values = [
        [rng.integers(1 - m, m, s).astype(np.int32) for m, s in zip(most, shapes, strict=True)] for _ in range(ranks)
    ]
    bits = rng.integers(LEAST, MOST, (2, 3)).astype(np.int32)
    expected = [np.sum(each, 0, dtype=np.int32) for each in zip(*values, strict=True)]
    for words, dtype in ((HOST, np.int32), (DEVICE, np.uint32)):
        sent: list[list[np.ndarray]] = []

        def tell(tensors, sent=sent):
            sent.append([t.numpy() for t in tensors])
            return [tf.constant(sum(each)) for each in zip(*sent, strict=True)]

        for rank, own in enumerate(values):
            beside = [tf.constant((bits if rank == 0 else 0 * bits).view(dtype))]
            sums, others = words.add(tell, [tf.constant(v.view(dtype)) for v in own], small, beside)
        assert len(sums) == words.travelling(len(shapes), small)
        assert len({t.dtype for each in sent for t in each}) == 1
        found = [t.numpy().view(np.int32) for t in words.unpack(sums, layout, small)]
        for one, other, shape in zip(found, expected, shapes, strict=True):
            np.testing.assert_array_equal(one.reshape(shape), other)
        np.testing.assert_array_equal(others[0].numpy().view(np.int32), bits)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(-(2.0**30), 2.0**30, width=32) | st.sampled_from([-1.0, -0.5, 0.5, 2.0**24 + 2]), min_size=1))
def test_numbers_become_words_alike(values):
    given = tf.constant(values, tf.float32)
    host, device = HOST.whole(given), DEVICE.whole(given)
    assert (host.dtype, device.dtype) == (HOST.dtype, DEVICE.dtype) == (tf.int32, tf.uint32)
    assert host.numpy().tobytes() == device.numpy().tobytes()
    assert HOST.real(host).numpy().tobytes() == DEVICE.real(device).numpy().tobytes()


@pytest.mark.parametrize("shape", [(), (0,), (3, 2)])
@pytest.mark.parametrize("dtype", [tf.uint32, tf.int32, tf.float32, tf.int64])
def test_zeros_are_zeros(shape, dtype):
    found = zeros(shape, dtype)
    assert (found.dtype, found.shape) == (dtype, shape)
    assert not found.numpy().any()


@pytest.mark.parametrize("words", [HOST, DEVICE], ids=["host", "device"])
def test_rows_arrive_bit_for_bit(words):
    rows = np.array([[np.nan, -0.0, 1e-45], [np.inf, 3.25, -1e38]], np.float32)
    nothing = words.of_bits(tf.zeros([4, 3]))

    def all_reduce(tensors):  # another worker has no rows
        sent = widen(tf.reshape(nothing, [-1])) if words is DEVICE else nothing
        return [tensors[0] + tf.reshape(sent, tensors[0].shape)]

    found = everyones(WorkerPart(all_reduce, range(1, 3), 4), tf.constant(rows), words).numpy()
    assert found.tobytes() == np.concatenate([np.zeros((1, 3)), rows, np.zeros((1, 3))]).astype(np.float32).tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_changes_no_bit_of_its_neighbours(bad):
    # Of odd size, so that its last number would share an int64 with the first one of the next tensor.
    values = [np.full(3, bad, np.float32), np.float32([0.5, -0.25, 7]), np.float32([3, -5])]

    def reduced(words, all_reduce):
        exact = FixedPointReduction(WireLayout([v.shape for v in values], [tf.float32] * 3), 4, 0, words)

        def compute(scales, early):
            parts = [exact.encode([tf.constant(v) for v in values], tf.constant(0.25), scales) for _ in range(4)]
            summed = [tf.add_n(list(each)) for each in zip(*(tensors for tensors, _ in parts), strict=True)]
            return summed, tf.stack([tf.concat([tf.constant([0.1]), extra], 0) for _, extra in parts]), []

        found = exact.reduce(WorkerPart(all_reduce, range(4), 4), compute, tf.ones([1]))
        assert not np.isfinite(found.tensors[0].numpy()).any()
        return b"".join(t.numpy().tobytes() for t in [*found.tensors[1:], found.row, found.flags])

    assert reduced(DEVICE, packed(tf.identity)) == reduced(HOST, packed(tf.identity)) == reduced(HOST, None)


def test_with_workers_that_are_not_finite_the_others_tensors_keep_their_bits():
    # Sums of the largest int32 of three ranks, as a GPU gives for what is too large, leave 32 bits.
    full, own = np.full(3, MOST, np.int32), np.int32([1, -2, 3])
    parts = [[tf.constant(v.view(np.uint32)) for v in (full, own)] for _ in range(3)]
    sent: list[np.ndarray] = []

    def tell(tensors):
        sent.append(tensors[0].numpy())
        return [tf.constant(sum(sent))]

    for each in parts:
        sums, beside = DEVICE.add(tell, each, 0, [tf.constant([1], tf.uint32)])
    found = DEVICE.unpack(sums, WireLayout([(3,), (3,)]), 0)[1]
    np.testing.assert_array_equal(found.numpy().view(np.int32), 3 * own)
    assert beside[0].numpy().tolist() == [3]
