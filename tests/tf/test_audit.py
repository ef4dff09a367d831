"""Steps of which another rank computes a shard, too: nothing of the run changes, and a wrong bit stops the step."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from raytf.checkpoint.variables import weights_sha256
from raytf.data.plan import StepPlan, assign
from raytf.data.sources import ArraySource
from raytf.distributed import audit
from raytf.distributed.audit import AuditVerdict
from tests.tf.ranks import Rank, World, train

RNG = np.random.default_rng(0)
SHARDS, STEPS = 6, 8
TOKENS, NUMBERS, LABELS = RNG.integers(0, 20, (96, 4)), RNG.normal(size=(96, 8)), RNG.integers(0, 3, 96)
SOURCE = ArraySource({"tokens": TOKENS, "numbers": NUMBERS.astype("float32")}, LABELS)


def model():
    """An embedding, whose gradient is rows, and all else that travels."""
    tokens, numbers = keras.Input((4,), name="tokens", dtype="int64"), keras.Input((8,), name="numbers")
    rows = layers.Flatten()(layers.Embedding(20, 3)(tokens))
    x = layers.Concatenate()([rows, layers.Dense(8)(numbers)])
    x = layers.Dropout(0.3)(layers.BatchNormalization()(x))
    made = keras.Model({"tokens": tokens, "numbers": numbers}, layers.Dense(3)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"])
    return made


class Faulty:
    """An encoding that flips a bit of a shard's numbers while `mask` is not 0, once or always."""

    def __init__(self, encoding: Any):
        self._encoding = encoding
        self.mask = tf.Variable(0, dtype=tf.int32, trainable=False)
        self.left = tf.Variable(0, dtype=tf.int32, trainable=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoding, name)

    def encode(self, tensors: Sequence[tf.Tensor], weight: tf.Tensor, scales: tf.Tensor) -> Any:
        encoded, largest = self._encoding.encode(tensors, weight, scales)
        flip = tf.where(self.left > 0, self.mask, 0)
        with tf.control_dependencies([flip]):
            counted = self.left.assign_sub(tf.cast(self.left > 0, tf.int32))
        with tf.control_dependencies([counted]):
            place = next(i for i, each in enumerate(encoded) if each.shape.num_elements())
            flat = tf.reshape(encoded[place], [-1])
            flat = tf.concat([tf.bitwise.bitwise_xor(flat[:1], flip), flat[1:]], 0)
            encoded[place] = tf.reshape(flat, encoded[place].shape)
        return encoded, largest


class Group:
    """Ranks as threads, each of which can be made to compute wrongly, and audits of every step."""

    def __init__(self, size: int, batch: int = 24):
        keras.utils.clear_session()
        self.plan, self.spans = StepPlan(SOURCE.records, batch, SHARDS), assign(SHARDS, size)
        world = World(size)
        self.ranks = [
            Rank(model, SOURCE, self.plan, own, world.all_reduce(rank), audits=True)
            for rank, own in enumerate(self.spans)
        ]
        self.faults = []
        for rank in self.ranks:
            (reduction,) = rank.step.reductions
            self.faults.append(Faulty(reduction._encoding))
            reduction._encoding = self.faults[-1]
            rank.step.trace()

    def step(self, start: int) -> list[Any]:
        """What each rank comes to in a step: an outcome, or the digests that differed."""
        choice = audit.choose(0, start + 1, self.spans)

        def one(number: int) -> Any:
            rank, is_auditor = self.ranks[number], choice.auditor == number
            call = rank._pipeline.submit(start, start + 1, choice.shard if is_auditor else None).result()
            try:
                return rank.step(call, np.zeros(1, np.float32), choice.shard, is_auditor)
            except tf.errors.OpError:
                return rank.step.audit.take()

        with ThreadPoolExecutor(len(self.ranks)) as pool:
            return list(pool.map(one, range(len(self.ranks))))

    def verdict(self, start: int, told: tuple[bytes, bytes]) -> AuditVerdict:
        choice, again = audit.choose(0, start + 1, self.spans), []
        for rank in self.ranks:
            call = rank._pipeline.alone(choice.shard, start)
            count = None if self.plan.is_even else int(call.counts[0])
            leaves = [leaf[0] for leaf in call.leaves]
            again.append(rank.step.audit.again(leaves, call.seeds[0], count, self.plan.global_batch_size))
        return audit.judge(choice, told, again)


@pytest.fixture(scope="module")
def alone():
    """Weights of one rank without audits."""
    return weights_sha256(train(model, SOURCE, 24, SHARDS, STEPS)[0][0])


@pytest.mark.parametrize("size", [2, 3])
def test_audits_change_nothing(size: int, alone):
    group = Group(size)
    for start in range(STEPS):
        if group.plan.is_full(group.plan.locate(start)[1]):
            outcomes = group.step(start)
            assert all(outcome.finite.all() for outcome in outcomes), outcomes
    assert {weights_sha256(rank.model) for rank in group.ranks} == {alone}


def test_a_shard_that_is_larger_than_others_is_audited():
    group = Group(2, batch=20)  # of which two shards have four records, and four have three
    for start in range(4):
        assert all(outcome.finite.all() for outcome in group.step(start))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("times", ["once", "always"])
@pytest.mark.parametrize("is_owner", [True, False], ids=["owner", "auditor"])
def test_a_wrong_bit_stops_the_step_and_its_rank_is_named(size: int, times: str, is_owner: bool, alone):
    group = Group(size)
    for start in range(3):
        group.step(start)
    choice = audit.choose(0, 4, group.spans)
    culprit = choice.owner if is_owner else choice.auditor
    fault, before = group.faults[culprit], [weights_sha256(rank.model) for rank in group.ranks]
    fault.mask.assign(1 << 9)
    # The auditor computes the shard after its own ones; the owner's first one may be another.
    own = group.spans[culprit]
    at = own.index(choice.shard) if is_owner else len(own)
    fault.left.assign(at + 1 if times == "once" else 1 << 30)
    told = group.step(3)
    assert all(isinstance(each, tuple) for each in told)
    assert len(set(told)) == 1
    assert [weights_sha256(rank.model) for rank in group.ranks] == before
    if times == "once":
        fault.left.assign(0)
    verdict = group.verdict(3, told[0])
    expected = () if size == 2 and times == "always" else (culprit,)
    assert verdict.culprits == expected, verdict
    # Without the fault the step is made, and the run ends as one that nobody has disturbed.
    fault.left.assign(0)
    for start in range(3, STEPS):
        assert all(outcome.finite.all() for outcome in group.step(start))
    assert {weights_sha256(rank.model) for rank in group.ranks} == {alone}
