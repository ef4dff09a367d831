"""Fixed-point reduction against Python's integers and fractions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from raytf.distributed.allreduce.reduction import (
    FixedPointReduction,
    FloatReduction,
    all_finite,
    exponent,
    packed,
    power_of_two,
)
from raytf.distributed.encoding.wire import DEVICE, HOST, WireLayout, WorkerPart

WORDS = pytest.mark.parametrize("words", [HOST, DEVICE], ids=["host", "device"])
FLOATS = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=True)


def reduce_over(splits, values: np.ndarray, reduction=None) -> np.ndarray:
    """Sum of shards' values [V, D], by ranks that own the given ranges of shards, one after another."""
    shards = len(values)
    reduction = reduction or FixedPointReduction(WireLayout([values.shape[1:]], [tf.float32]), shards)
    ranks = [range(a, b) for a, b in zip([0, *splits], [*splits, shards], strict=True) if b > a]
    before = [v.numpy() for v in reduction.state(0).values()]
    sent: list[list[tf.Tensor]] = []

    def run(own: range, all_reduce) -> np.ndarray:
        def compute(scales, early):
            parts = [reduction.encode([tf.constant(values[v])], tf.constant(1.0), scales) for v in own]
            rows = [tf.concat([tf.zeros([1]), extra], 0) for _, extra in parts]
            return [tf.add_n([tensors[0] for tensors, _ in parts])], tf.stack(rows), []

        return reduction.reduce(WorkerPart(all_reduce, own, shards), compute, tf.zeros([1])).tensors[0].numpy()

    # Ranks take turns: each pass a rank hears one more of the others' vectors, until all were exchanged.
    result = None
    for _ in range(3):
        heard: list[list[tf.Tensor]] = []
        for own in ranks:
            for variable, value in zip(reduction.state(0).values(), before, strict=True):
                variable.assign(value)
            mine: list[tf.Tensor] = []

            def all_reduce(tensor, mine=mine, sent=sent):
                mine.append(tensor)
                known = [other[len(mine) - 1] for other in sent if len(other) >= len(mine)]
                return tf.add_n(known) if len(known) == len(ranks) else tensor

            result = run(own, packed(all_reduce))
            heard.append(mine)
        sent = heard
    return result


@WORDS
@settings(max_examples=40, deadline=None)
@given(
    values=hnp.arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(1, 5)), elements=FLOATS),
    cut=st.integers(0, 6),
    other=st.integers(0, 6),
)
def test_the_sum_is_that_of_integers_whoever_owns_which_shard(words, values, cut, other):
    shards = len(values)
    whole = reduce_over([], values)
    layout = WireLayout([values.shape[1:]], [tf.float32])
    split = reduce_over(
        sorted({min(cut, shards), min(other, shards)}), values, FixedPointReduction(layout, shards, words=words)
    )
    assert whole.tobytes() == split.tobytes()
    largest = max(abs(Fraction(float(v))) for v in values.ravel())
    for column, got in zip(values.T, whole, strict=True):
        exact = sum((Fraction(float(v)) for v in column), Fraction(0))
        # Less than a unit a shard, and float32's own rounding of the sum.
        unit = max(2 * largest, Fraction(2) ** -89) / 2 ** (31 - max(1, (shards - 1).bit_length()))
        bound = shards * unit + abs(exact) * Fraction(2) ** -24 + Fraction(2) ** -149
        assert abs(Fraction(float(got)) - exact) <= bound


@WORDS
@settings(max_examples=15, deadline=None)
@given(
    values=hnp.arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(1, 5)), elements=FLOATS),
    cut=st.integers(0, 6),
    other=st.integers(0, 6),
)
def test_a_16_bit_sum_is_the_same_and_off_by_one_of_its_units_at_most(words, values, cut, other):
    shards = len(values)

    def made(words):
        return FixedPointReduction(WireLayout([values.shape[1:]], [tf.float32]), shards, compressed=1, words=words)

    whole = reduce_over([], values, made(HOST))
    split = reduce_over(sorted({min(cut, shards), min(other, shards)}), values, made(words))
    assert whole.tobytes() == split.tobytes()
    largest = max(abs(Fraction(float(v))) for v in values.ravel())
    for column, got in zip(values.T, whole, strict=True):
        exact = sum((Fraction(float(v)) for v in column), Fraction(0))
        unit = max(2 * largest, Fraction(2) ** -89) / 2 ** (15 - max(1, (shards - 1).bit_length()))
        bound = shards * unit + abs(exact) * Fraction(2) ** -24 + Fraction(2) ** -149
        assert abs(Fraction(float(got)) - exact) <= bound


@given(st.floats(0, 2.0**127, width=32))
def test_exponent_is_the_least_power_of_two_above(value):
    e = int(exponent(tf.constant(value, tf.float32)))
    assert Fraction(value) < Fraction(2) ** e
    assert e == -90 or Fraction(value) >= Fraction(2) ** (e - 1)


def test_powers_of_two_are_exact():
    e = np.arange(-126, 128, dtype=np.int32)
    np.testing.assert_array_equal(power_of_two(tf.constant(e)).numpy(), np.ldexp(np.float32(1), e))


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("kind", [FixedPointReduction, FloatReduction])
@pytest.mark.parametrize("all_reduce", [packed(tf.identity), None], ids=["several workers", "one worker"])
def test_what_is_not_finite_stays_so_and_is_told(bad, kind, all_reduce):
    layout = WireLayout([(3,), (2,)], [tf.float32, tf.float32])
    reduction = FixedPointReduction(layout, 2) if kind is FixedPointReduction else FloatReduction(layout)
    values = [[1.0, bad, 2.0], [0.5, 0.25]]

    def compute(scales, early):
        parts = [reduction.encode([tf.constant(v) for v in values], tf.constant(0.5), scales) for _ in range(2)]
        summed = [a + b for a, b in zip(parts[0][0], parts[1][0], strict=True)]
        return summed, tf.stack([tf.concat([tf.ones([1]), extra], 0) for _, extra in parts]), []

    reduced = reduction.reduce(WorkerPart(all_reduce, range(2), 2), compute, tf.ones([1]))
    assert not bool(reduced.finite)
    assert not np.isfinite(reduced.tensors[0].numpy()[1])
    np.testing.assert_array_equal(reduced.tensors[1].numpy(), [0.5, 0.25])
    assert (float(reduced.row[0]), float(reduced.flags[0])) == (2.0, 1.0)


def test_the_exponent_follows_and_repeats_a_step_only_when_it_must():
    reduction = FixedPointReduction(WireLayout([(1,)], [tf.float32]), 1)
    (exponents,) = reduction.state(0).values()
    before, calls = [int(exponents.numpy()[0])], []

    def step(value: float) -> float:
        def compute(scales, early):
            calls.append(value)
            tensors, extra = reduction.encode([tf.constant([value])], tf.constant(1.0), scales)
            return tensors, tf.concat([tf.zeros([1]), extra], 0)[None], []

        reduced = reduction.reduce(WorkerPart(packed(tf.identity), range(1), 1), compute, tf.zeros([1]))
        assert int(exponents.numpy()[0]) == before[-1]  # until it is settled, the step can be computed again
        reduction.settle(reduced)
        before.append(int(exponents.numpy()[0]))
        return float(reduced.tensors[0][0])

    assert step(1.5) == 1.5
    assert calls == [1.5, 1.5]  # nothing is known before the first step
    assert int(exponents.numpy()[0]) == 1 + 3
    assert step(15.9) == pytest.approx(15.9, rel=1e-6)
    assert len(calls) == 3  # within the head-room
    assert step(1e6) == pytest.approx(1e6, rel=1e-6)
    assert len(calls) == 5  # outgrown: once more
    high = int(exponents.numpy()[0])
    step(1e6 / 2)
    assert int(exponents.numpy()[0]) == high  # stays where it leaves one bit more than it must
    step(1e-3)
    assert int(exponents.numpy()[0]) == high - 1  # comes down slowly, so that a quiet step costs nothing later
    assert len(calls) == 7


@given(
    values=hnp.arrays(np.float32, st.tuples(st.integers(1, 9)), elements=FLOATS),
    weight=st.floats(2.0**-10, 1, width=32),
    slack=st.integers(0, 8),
    shards=st.sampled_from([1, 2, 3, 4, 8, 64]),
)
@settings(deadline=None)
def test_a_shard_is_encoded_as_python_would(values, weight, slack, shards):
    reduction = FixedPointReduction(WireLayout([values.shape], [tf.float32]), shards)
    products = values * np.float32(weight)
    largest = np.abs(products).max()
    least = int(exponent(tf.constant(largest)))
    e = least + slack
    scales = power_of_two(tf.constant([reduction.bits - e]))
    (encoded,), told = reduction.encode([tf.constant(values)], tf.constant(weight, tf.float32), scales)
    assert exponent(told).numpy().tolist() == [least]
    unit = Fraction(2) ** (e - reduction.bits)
    assert encoded.numpy().tolist() == [int(Fraction(float(p)) / unit) for p in products]
    assert shards * int(np.abs(encoded.numpy().astype(np.int64)).max()) < 2**31


@pytest.mark.parametrize("at", [0, 1, 17, 998, 999])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_one_bad_value_among_many_is_seen_wherever_it_is(bad, at):
    values = np.linspace(-1, 1, 1000).astype(np.float32)
    values[at] = bad
    _, told = FixedPointReduction(WireLayout([(1000,)], [tf.float32]), 2).encode(
        [tf.constant(values)], tf.constant(0.5), tf.ones([1])
    )
    assert not np.isfinite(told.numpy()[0])


def test_the_largest_values_of_all_shards_fit_the_sum():
    for shards in (1, 2, 4, 7, 64):
        values = np.full((shards, 2), np.nextafter(np.float32(2), np.float32(0)), np.float32) * np.float32([1, -1])
        exact = shards * Fraction(float(values[0, 0]))
        got = reduce_over([], values)
        assert abs(Fraction(float(got[0])) - exact) <= exact * Fraction(2) ** -24
        assert got[1] == -got[0]


def test_a_sum_that_overflows_is_not_taken_for_a_number_that_is_not_finite():
    assert bool(all_finite([tf.fill([4], 3e38), tf.ones([2])]))
    assert not bool(all_finite([tf.ones([2]), tf.constant([np.inf, -np.inf])]))


@pytest.mark.parametrize("all_reduce", [packed(tf.identity), None], ids=["several workers", "one worker"])
@WORDS
def test_the_loop_gives_the_same_in_a_graph(words, all_reduce):
    values = np.float32([[1.5, -3.25], [1e-3, 7.0]])
    reduction = FixedPointReduction(WireLayout([(2,)], [tf.float32]), 2, words=words)

    @tf.function(autograph=False)
    def step(x):
        def compute(scales, early):
            parts = [reduction.encode([x[v]], tf.constant(1.0), scales) for v in range(2)]
            rows = tf.stack([tf.concat([tf.ones([1]), extra], 0) for _, extra in parts])
            return [parts[0][0][0] + parts[1][0][0]], rows, []

        reduced = reduction.reduce(WorkerPart(all_reduce, range(2), 2), compute, tf.ones([3]))
        return reduced.tensors[0], reduced.row, reduced.flags

    tensor, row, flags = step(values)
    assert tensor.numpy().tobytes() == reduce_over([], values).tobytes()
    assert (row.numpy().tolist(), flags.numpy().tolist()) == ([2.0], [1.0] * 3)


def test_one_worker_that_packs_nothing_has_the_bits_of_several():
    random = np.random.default_rng(0)
    values = [random.normal(size=(2, *shape)).astype("float32") for shape in ((3, 5), (7,))]
    found = []
    for all_reduce, words in ((packed(tf.identity), HOST), (packed(tf.identity), DEVICE), (None, HOST), (None, DEVICE)):
        reduction = FixedPointReduction(WireLayout([(3, 5), (7,)], [tf.float32] * 2), 2, compressed=1, words=words)

        def compute(scales, early, reduction=reduction):
            parts = [reduction.encode([tf.constant(v[s]) for v in values], tf.constant(0.5), scales) for s in range(2)]
            summed = [a + b for a, b in zip(parts[0][0], parts[1][0], strict=True)]
            return summed, tf.stack([tf.concat([tf.ones([1]), extra], 0) for _, extra in parts]), []

        reduced = reduction.reduce(WorkerPart(all_reduce, range(2), 2), compute, tf.ones([1]))
        found.append([t.numpy().tobytes() for t in [*reduced.tensors, reduced.row, reduced.flags]])
    assert found[0] == found[1] == found[2] == found[3]
