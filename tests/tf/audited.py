"""Ranks as threads that audit each other, each of which can be made to compute wrongly."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from raytf.audit import shard_audit
from raytf.audit.shard_audit import AuditVerdict
from raytf.data.plan import StepPlan, assign
from raytf.data.sources import ArraySource
from tests.tf.ranks import Rank, World

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


#: Which results of an encoding are wrong: none, or all.
NONE, ALL = -1, -2


class Faulty:
    """An encoding that flips a bit of a shard's numbers."""

    def __init__(self, encoding: Any):
        self._encoding = encoding
        self._mask, self._at, self._count = (tf.Variable(n, dtype=tf.int32, trainable=False) for n in (1, NONE, 0))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoding, name)

    def begin(self, at: int, bit: int = 9) -> None:
        """From now on a bit is flipped in the result of that number, counted from 0, or in none or all."""
        self._mask.assign(np.uint32(1 << bit).view(np.int32))
        self._at.assign(at)
        self._count.assign(0)

    def encode(self, tensors: Sequence[tf.Tensor], weight: tf.Tensor, scales: tf.Tensor) -> Any:
        encoded, largest = self._encoding.encode(tensors, weight, scales)
        number = self._count.assign_add(1) - 1
        flip = tf.where((self._at == ALL) | (self._at == number), self._mask.read_value(), 0)
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
        choice = shard_audit.choose(0, start + 1, self.spans)

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
        choice, again = shard_audit.choose(0, start + 1, self.spans), []
        for rank in self.ranks:
            call = rank._pipeline.alone(choice.shard, start)
            count = None if self.plan.is_even else int(call.counts[0])
            leaves = [leaf[0] for leaf in call.leaves]
            again.append(rank.step.audit.again(leaves, call.seeds[0], count, self.plan.global_batch_size))
        return shard_audit.judge(choice, told, again)
